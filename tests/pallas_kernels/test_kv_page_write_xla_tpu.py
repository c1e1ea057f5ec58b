"""The TPU form of the page write puts the same values at the same places."""

from __future__ import annotations

import secrets

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_page_write.xla_tpu import set_tokens


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "head_dim"),
    [(jnp.bfloat16, 8, 128), (jnp.bfloat16, 1, 128), (jnp.bfloat16, 3, 256), (jnp.int8, 2, 128), (jnp.float32, 2, 64)],
)
def test_tokens_lie_where_page_and_offset_say_and_padding_is_dropped(dtype, num_kv_heads: int, head_dim: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_pages, page_size = 7, 16
    pool = rng.integers(-100, 100, (num_pages, 2, page_size, num_kv_heads, head_dim))
    new = rng.integers(-100, 100, (20, 2, num_kv_heads, head_dim))
    kv_indices = rng.permutation(num_pages * page_size)[:20]
    kv_indices[[3, 11]] = num_pages * page_size, num_pages * page_size + 5
    pages, offsets = kv_indices // page_size, kv_indices % page_size
    out = set_tokens(
        jnp.asarray(pool, dtype),
        jnp.asarray(new, dtype),
        jnp.asarray(pages, jnp.int32),
        jnp.asarray(offsets, jnp.int32),
    )
    for token, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        if page < num_pages:
            pool[page, :, offset] = new[token]
    np.testing.assert_array_equal(np.asarray(out, np.int64), pool)
