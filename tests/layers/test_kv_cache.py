"""The page pool with scales: what is made, how it is split, what zeroing and copying pages leave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.engine import MeshConfig
from configs.model import ModelConfig, RopeConfig
from layers.kv_cache import copy_pages, gather_pages, make_kv_cache, scatter_pages, zero_pages
from sharding.mesh import make_mesh

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=31,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    activation="silu",
    tie_word_embeddings=True,
    attention_scale=0.25,
    rope=RopeConfig(rotary_dim=8, max_position_embeddings=64),
    layer_types=("full_attention", "full_attention"),
)


@pytest.mark.parametrize(
    ("dtype", "scales", "shape"),
    [
        (jnp.float32, None, None),
        (jnp.int8, "per_token_head", (6, 2, 2, 4)),
        (jnp.float8_e4m3fn, "per_tensor", (2,)),
    ],
)
def test_zeroed_pages_lose_their_own_scales_and_no_others(dtype, scales, shape):
    mesh = make_mesh(MeshConfig())
    cache = make_kv_cache(CONFIG, num_pages=6, page_size=4, dtype=dtype, scales=scales, tensor_shards=1, mesh=mesh)
    assert [(kv.pages.shape, kv.pages.dtype) for kv in cache] == [((6, 2, 4, 2, 8), jnp.dtype(dtype))] * 2
    assert [None if kv.scales is None else (kv.scales.shape, kv.scales.dtype.name) for kv in cache] == [
        None if shape is None else (shape, "float32")
    ] * 2
    if scales == "per_tensor":
        assert all((np.asarray(kv.scales) == 1.0).all() for kv in cache)
    full = jax.tree.map(lambda x: (x * 0 + 3).astype(x.dtype), cache)
    page_ids = jax.device_put(np.array([1, 4, 4], np.int32), NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        zeroed = jax.jit(zero_pages)(full, page_ids)
    for kv in zeroed:
        for array in (kv.pages, kv.scales):
            if array is not None and array.ndim > 1:
                values = np.asarray(array).astype(np.float32)
                assert (values[[1, 4]] == 0).all() and (values[[0, 2, 3, 5]] == 3).all()
        if scales == "per_tensor":
            assert (np.asarray(kv.scales) == 3).all()


@pytest.mark.parametrize(
    ("dtype", "scales"), [(jnp.float32, None), (jnp.int8, "per_token_head"), (jnp.float8_e4m3fn, "per_tensor")]
)
def test_copied_pages_hold_the_first_tokens_of_their_source_and_nothing_of_what_follows_it(dtype, scales):
    mesh = make_mesh(MeshConfig())
    cache = make_kv_cache(CONFIG, num_pages=6, page_size=4, dtype=dtype, scales=scales, tensor_shards=1, mesh=mesh)
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: rng.integers(1, 9, x.shape).astype(np.float32), cache)
    if scales is None:  # what a masked key that is not finite would spread
        for kv in values:
            kv.pages[2, :, 3] = np.nan
    full = jax.tree.map(lambda x, value: jax.device_put(value.astype(x.dtype), x.sharding), cache, values)
    copies = np.array([[2, 1, 2, 0], [4, 5, 3, 0], [3, 4, 1, 0]], np.int32)
    with jax.set_mesh(mesh):
        copied = jax.jit(copy_pages)(full, jax.device_put(copies, NamedSharding(mesh, PartitionSpec())))
    for old_kv, new_kv in zip(full, copied, strict=True):
        for old, new, axis in ((old_kv.pages, new_kv.pages, 1), (old_kv.scales, new_kv.scales, 2)):
            if old is None:
                continue
            before, after = (np.asarray(x).astype(np.float32) for x in (old, new))
            if old.ndim == 1:
                assert (before == after).all()
                continue
            assert np.array_equal(before[[1, 2]], after[[1, 2]], equal_nan=True)
            for source, target, num_tokens in copies.T[:3]:
                kept, cleared = np.split(after[target], [num_tokens], axis=axis)
                assert np.array_equal(kept, np.split(before[source], [num_tokens], axis=axis)[0])
                assert (cleared == 0).all()


def test_scales_are_split_as_the_kv_heads_are():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    cache = make_kv_cache(
        CONFIG,
        num_pages=6,
        page_size=4,
        dtype=jnp.int8,
        scales="per_token_head",
        tensor_shards=2,
        mesh=make_mesh(MeshConfig(tensor=2)),
    )
    for kv in cache:
        assert kv.scales is not None
        assert kv.pages.addressable_shards[0].data.shape == (6, 2, 4, 1, 8)
        assert kv.scales.addressable_shards[0].data.shape == (6, 2, 1, 4)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(jnp.bfloat16, None), (jnp.int8, "per_token_head"), (jnp.float8_e4m3fn, "per_tensor")],
)
def test_gathered_pages_go_to_other_pages_with_their_scales_and_leave_the_rest(dtype, scales):
    rng = np.random.default_rng()
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        pool = make_kv_cache(CONFIG, num_pages=6, page_size=4, dtype=dtype, scales=scales, tensor_shards=1, mesh=mesh)
        pool = jax.tree.map(lambda x: jnp.asarray(rng.integers(-100, 100, x.shape), x.dtype, device=x.sharding), pool)
        before = jax.tree.map(np.asarray, pool)
        stacked = jax.jit(gather_pages)(pool, np.array([4, 0, 2], np.int32))
        after, _ = jax.jit(scatter_pages)(pool, stacked, np.array([1, 6, 5], np.int32))  # 6: past the pool
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        wanted = old.copy()
        if old.ndim > 1:
            wanted[[1, 5]] = old[[4, 2]]
        assert np.array_equal(np.asarray(new).view(np.uint8), wanted.view(np.uint8))
