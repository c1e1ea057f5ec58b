"""One description of each parameter: shape, dtype, logical axes. Abstract values, shardings, random
initial values and the checkpoint loader's targets all come from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Logical axis names. Only `sharding/rules.py` knows which mesh axis each one takes.
EMBED = "embed"  # model width D
VOCAB = "vocab"  # padded vocabulary V
KV_HEADS = "kv_heads"  # K; query heads are grouped under it, so they split with it
MLP = "mlp"  # F


@dataclass(frozen=True)
class ParamSpec:
    """Shape, dtype and logical axes of one parameter. `axes` has a name or None for each dimension.

    Where `num_rows` is given, only the first `num_rows` rows of axis 0 are the model's; the rest is padding, zero.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    init_scale: float | None = None  # std of the random init; None means ones (norm weights)
    num_rows: int | None = None  # None: all

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize

    def abstract(self, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
        """The parameter as shape and dtype only, with its sharding if given."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)
