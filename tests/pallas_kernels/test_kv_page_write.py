"""The page write: what it writes, and that it writes in place."""

from __future__ import annotations

import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_page_write import write_kv


def test_tokens_land_in_their_places_and_nothing_else_changes() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_pages, num_kv_heads, page_size, head_dim = 6, 2, 4, 8
    kv_pages = rng.standard_normal((num_pages, 2, page_size, num_kv_heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, 7, num_kv_heads, head_dim)).astype(np.float32)
    # five real tokens, then two padding tokens past the pool
    kv_indices = np.concatenate(
        [page_size + rng.permutation((num_pages - 1) * page_size)[:5], [num_pages * page_size] * 2]
    ).astype(np.int32)
    expected = kv_pages.copy()
    for token, index in enumerate(kv_indices[:5]):
        expected[index // page_size, 0, index % page_size] = k[token]
        expected[index // page_size, 1, index % page_size] = v[token]
    out = np.asarray(jax.jit(write_kv)(kv_pages, k, v, kv_indices)[0])
    np.testing.assert_array_equal(out, expected)


def test_values_are_cast_to_the_dtype_of_the_pool() -> None:
    kv_pages = jnp.zeros((2, 2, 2, 1, 4), jnp.bfloat16)
    ones = jnp.ones((1, 1, 4), jnp.float32)
    out, _ = write_kv(kv_pages, ones, 2 * ones, jnp.array([3], jnp.int32))
    assert out.dtype == jnp.bfloat16
    assert out[1, :, 1, 0, 0].tolist() == [1.0, 2.0]


def test_index_outside_the_pool_is_dropped() -> None:
    kv_pages = jnp.zeros((2, 2, 2, 1, 4))
    out, _ = write_kv(kv_pages, jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)), jnp.array([4, 1000], jnp.int32))
    assert not out.any()


def test_donated_pool_is_written_in_place() -> None:
    kv_pages = jnp.zeros((1024, 2, 16, 2, 64))
    new = jnp.ones((8, 2, 64))
    arguments = (kv_pages, new, new, jnp.arange(16, 24, dtype=jnp.int32))
    compiled = jax.jit(write_kv, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == kv_pages.nbytes
    assert memory.temp_size_in_bytes < kv_pages.nbytes / 100
    compiled(*arguments)
    assert kv_pages.is_deleted()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        write_kv(jnp.zeros((2, 2, 2, 1, 4)), jnp.ones((1, 2, 4)), jnp.ones((1, 2, 4)), jnp.zeros(1, jnp.int32))
