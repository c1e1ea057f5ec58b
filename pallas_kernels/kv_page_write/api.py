"""The contract of the page write, and its one implementation: an XLA scatter, which is in place on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(kv_pages: jax.Array, k: jax.Array, v: jax.Array, kv_indices: jax.Array) -> jax.Array:
    """Put the keys and values of T tokens into the pool. In place where `kv_pages` is donated.

    Args:
      kv_pages: [num_pages, 2, page_size, K, H].
      k: [T, K, H], rotated keys; cast to the pool's dtype.
      v: [T, K, H].
      kv_indices: [T] int32, page_id * page_size + offset of each token. Those within the pool differ;
        padding tokens have one past the pool and are dropped.

    Returns:
      kv_pages with the tokens written.

    Raises ValueError on shapes that do not fit.
    """
    _, _, page_size, num_kv_heads, head_dim = kv_pages.shape
    expected = (kv_indices.shape[0], num_kv_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k {k.shape} and v {v.shape} must be {expected} for kv_pages {kv_pages.shape}")
    new_T2KH = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)
    return kv_pages.at[kv_indices // page_size, :, kv_indices % page_size].set(
        new_T2KH, mode="drop", unique_indices=True
    )
