"""The page write's scatter in the form that XLA keeps in place on TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.mosaic_tpu import LANES, is_token_major_pool


def set_tokens(kv_pages: jax.Array, new_T2KH: jax.Array, pages: jax.Array, offsets: jax.Array) -> jax.Array:
    """Put tokens, in the pool's dtype, at [pages, :, offsets]; those past the pool are dropped.

    Indexed by one axis, the pool's places as they lie in memory. Indexed by page and offset, XLA brings these two axes
    together before a scatter of many tokens: it copies the pool there and back.
    """
    num_pages, _, page_size, num_kv_heads, head_dim = kv_pages.shape
    if head_dim % LANES:  # pages lie in the lanes: no form is in place
        return kv_pages.at[pages, :, offsets].set(new_T2KH, mode="drop", unique_indices=True)
    part_T2 = pages[:, None] * 2 + jnp.arange(2)
    if is_token_major_pool(kv_pages):
        places = part_T2 * page_size + offsets[:, None]
        rows = kv_pages.reshape(-1, num_kv_heads, head_dim)
        new = new_T2KH.reshape(-1, num_kv_heads, head_dim)
        rows = rows.at[places.reshape(-1)].set(new, mode="drop", unique_indices=True)
        return rows.reshape(kv_pages.shape)
    head_T2K = part_T2[:, :, None] * num_kv_heads + jnp.arange(num_kv_heads)
    places = head_T2K * page_size + offsets[:, None, None]
    rows = jnp.swapaxes(kv_pages, 2, 3).reshape(-1, head_dim)
    rows = rows.at[places.reshape(-1)].set(new_T2KH.reshape(-1, head_dim), mode="drop", unique_indices=True)
    return jnp.swapaxes(rows.reshape(num_pages, 2, num_kv_heads, page_size, head_dim), 2, 3)
