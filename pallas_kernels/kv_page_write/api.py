"""The contract of the page write, and its one implementation: an XLA scatter, in place on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_page_write import xla_tpu
from pallas_kernels.kv_scales import check_kv_scales

LEAST_SCALE = 1e-12  # of a token's head of zeros


def write_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, kv_indices: jax.Array, kv_scales: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Put the keys and values of T tokens into the pool. In place where `kv_pages` and `kv_scales` are donated.

    Args:
      kv_pages: [num_pages, 2, page_size, K, H].
      k: [T, K, H], rotated keys; cast to the pool's dtype, or quantised where that is float8_e4m3fn or int8.
      v: [T, K, H].
      kv_indices: [T] int32, page_id * page_size + offset of each token. Those within the pool differ;
        padding tokens have one past the pool and are dropped.
      kv_scales: float32 for quantised pools, as `paged_attention` takes them. [2]: values are divided by them, and those
        outside the dtype's range become its largest. [num_pages, 2, K, page_size]: each token and head gets its own,
        its largest magnitude over the dtype's largest value.

    Returns:
      (kv_pages, kv_scales) with the tokens written.

    Raises ValueError on shapes that do not fit, and on scales without a quantised pool or the reverse.
    """
    _, _, page_size, num_kv_heads, head_dim = kv_pages.shape
    expected = (kv_indices.shape[0], num_kv_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k {k.shape} and v {v.shape} must be {expected} for kv_pages {kv_pages.shape}")
    check_kv_scales(kv_pages, kv_scales)
    pages, offsets = kv_indices // page_size, kv_indices % page_size
    new_T2KH = jnp.stack([k, v], axis=1)
    if kv_scales is not None:
        new_T2KH = new_T2KH.astype(jnp.float32)
        largest = _largest(kv_pages.dtype)
        if kv_scales.ndim == 1:
            scales = kv_scales[:, None]
        else:
            scales = jnp.maximum(jnp.abs(new_T2KH).max(-1) / largest, LEAST_SCALE)  # [T, 2, K]
            kv_scales = kv_scales.at[pages, :, :, offsets].set(scales, mode="drop", unique_indices=True)
        new_T2KH = jnp.clip(new_T2KH / scales[..., None], -largest, largest)
        if kv_pages.dtype == jnp.int8:
            new_T2KH = jnp.round(new_T2KH)

    def set_tokens(kv_pages: jax.Array, new_T2KH: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
        return kv_pages.at[pages, :, offsets].set(new_T2KH, mode="drop", unique_indices=True)

    arrays = (kv_pages, new_T2KH.astype(kv_pages.dtype), pages, offsets)
    return lax.platform_dependent(*arrays, tpu=xla_tpu.set_tokens, default=set_tokens), kv_scales


def _largest(dtype: jnp.dtype) -> float:
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)
