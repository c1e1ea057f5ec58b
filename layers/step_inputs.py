"""The arrays that one forward pass needs besides parameters and pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionRows:
    """R rows of Q consecutive tokens of one sequence each. Several rows may be consecutive parts of one sequence.

    Query i of row r stands at absolute position starts[r] + i and is real where i < lengths[r]. Keys and values of
    all real tokens are written to pages before any query attends. Other tokens write nowhere and give
    hidden states that mean nothing.
    """

    page_table: jax.Array  # [R, P] int32: page ids of the row's sequence in order
    starts: jax.Array  # [R] int32
    lengths: jax.Array  # [R] int32 in [0, Q]
    rope_lens: jax.Array  # [R] int32: dynamic and longrope rope see at least this sequence length
    num_queries: int = field(metadata={"static": True})  # Q

    @property
    def num_tokens(self) -> int:
        return self.starts.shape[0] * self.num_queries


@register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The T tokens of a step: those of the groups of rows one after the other, row-major within each."""

    token_ids: jax.Array  # [T] int32
    rows: tuple[AttentionRows, ...]
