"""RMS norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from layers.params import ParamSpecs, make_param


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis: float32 inside, x's dtype out."""
    x32 = x.astype(jnp.float32)  # the mean of squares of bfloat16 values needs more than their 8 bits
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    return (x32 * lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


class RMSNorm(nnx.Module):
    """A float32 weight [features] and its epsilon."""

    def __init__(self, specs: ParamSpecs, path: str, eps: float):
        self.weight = make_param(specs[f"{path}/weight"])
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight.get_value(), self.eps)
