"""What a sequence may take over from another one with the same first tokens: full pages, and a copy of the next one.

The token before the first that differs is computed again by each, in pages of its own: its logits are needed. All
pages before its page are shared; the tokens before it in its page are copied there on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkSource:
    """Pages that hold, once the steps dispatched so far have run, K/V of the first `num_tokens` tokens of a sequence."""

    page_ids: Sequence[int]
    num_tokens: int  # that the forked sequence has too
    num_confirmed_tokens: int  # of those, computed by steps that were read and were finite


@dataclass(eq=False, kw_only=True, slots=True)
class KeptPages:
    """Pages of a finished request with `Request.keeps_pages`, until `Scheduler.release_pages` or until others need them."""

    order: tuple[int, int]  # of the request
    salt: bytes
    num_tokens: int  # whose K/V they hold
    last_step_id: int  # that writes them
    page_ids: list[int]  # none: they were given back
