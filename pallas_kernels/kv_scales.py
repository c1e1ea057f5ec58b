"""Quantised KV pages and their scales: what the page write and attention both ask of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

QUANTISED = frozenset({jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)})


def check_kv_scales(kv_pages: jax.Array, kv_scales: jax.Array | None) -> None:
    """Raise ValueError unless the pages [num_pages, 2, page_size, K, H] are quantised and the scales float32 [2] or
    [num_pages, 2, K, page_size], or neither is."""
    if kv_pages.dtype in QUANTISED:
        num_pages, _, page_size, num_kv_heads, _ = kv_pages.shape
        shapes = ((2,), (num_pages, 2, num_kv_heads, page_size))
        if kv_scales is None or kv_scales.dtype != jnp.float32 or kv_scales.shape not in shapes:
            found = None if kv_scales is None else f"{kv_scales.dtype}{list(kv_scales.shape)}"
            raise ValueError(f"kv_scales must be float32 of one of {shapes} for {kv_pages.dtype} pages: {found}")
    elif kv_scales is not None:
        raise ValueError(f"kv_scales belong to quantised pages; kv_pages are {kv_pages.dtype}")
