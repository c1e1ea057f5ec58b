"""RMS norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import jax
from flax import nnx

from layers.params import ParamSpecs, make_param
from pallas_kernels.kv_page_write.reference import rms_norm


class RMSNorm(nnx.Module):
    """A float32 weight [features] and its epsilon."""

    def __init__(self, specs: ParamSpecs, path: str, eps: float):
        self.weight = make_param(specs[f"{path}/weight"])
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight.get_value(), self.eps)
