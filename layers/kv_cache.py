"""The page pool: pages, and where they are quantised their scales, for each layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.model import ModelConfig
from sharding.param_spec import KV_HEADS
from sharding.placement import partition_spec, stored_kv_heads

KV_PAGES_AXES = (None, None, None, KV_HEADS, None)
KV_SCALES_AXES = (None, None, KV_HEADS, None)


class LayerKV[Leaf](NamedTuple):
    """One layer's pool: arrays, or what stands for them. Keys are at [:, 0], values at [:, 1]; page 0 is the null page,
    which page tables name where they have none."""

    pages: Leaf  # [num_pages, 2, page_size, K, H], K the stored KV heads and split over the mesh
    scales: Leaf | None  # float32 [num_pages, 2, K, page_size], split as the pages; or [2], of keys and of values


type KVCache = tuple[LayerKV[jax.Array], ...]
type AbstractKVCache = tuple[LayerKV[jax.ShapeDtypeStruct], ...]


def kv_specs(layer_kv: LayerKV[Any]) -> LayerKV[PartitionSpec]:
    """How a layer's pool is split over the mesh."""
    scales = None
    if layer_kv.scales is not None:
        scales = partition_spec(KV_SCALES_AXES) if layer_kv.scales.ndim > 1 else PartitionSpec()
    return LayerKV(partition_spec(KV_PAGES_AXES), scales)


def abstract_kv_cache(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: Any,
    scales: str | None = None,
    tensor_shards: int,
    mesh: Mesh,
) -> AbstractKVCache:
    """The pool of each layer as shapes, dtypes and shardings.

    dtype is that of the activations, without `scales`; or float8_e4m3fn or int8, with scales "per_token_head" (each
    token's head its own) or "per_tensor" (1.0 for all).
    """
    num_heads = stored_kv_heads(config, tensor_shards)
    pages = jax.ShapeDtypeStruct((num_pages, 2, page_size, num_heads, config.head_dim), dtype)
    shapes = {"per_token_head": (num_pages, 2, num_heads, page_size), "per_tensor": (2,)}
    layer = LayerKV(pages, None if scales is None else jax.ShapeDtypeStruct(shapes[scales], jnp.float32))
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        layer,
        kv_specs(layer),
    )
    return (placed,) * config.num_layers


def make_kv_cache(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: Any,
    scales: str | None = None,
    tensor_shards: int,
    mesh: Mesh,
) -> KVCache:
    """As `abstract_kv_cache` says: zeros, and ones for scales that stand for all tokens."""
    abstract = abstract_kv_cache(
        config,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        scales=scales,
        tensor_shards=tensor_shards,
        mesh=mesh,
    )
    return jax.tree.map(lambda x: jnp.full(x.shape, x.ndim == 1, x.dtype, device=x.sharding), abstract)


def stacked_pages(kv_cache: AbstractKVCache, num_pages: int) -> LayerKV[jax.ShapeDtypeStruct | None]:
    """What `gather_pages` gives of `num_pages` pages, as shapes, dtypes and shardings."""

    def stacked(pool: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(pool.sharding.mesh, PartitionSpec(None, *pool.sharding.spec))
        return jax.ShapeDtypeStruct((len(kv_cache), num_pages, *pool.shape[1:]), pool.dtype, sharding=sharding)

    scales = _page_scales(kv_cache)
    return LayerKV(stacked(kv_cache[0].pages), stacked(scales[0]) if scales else None)


def gather_pages(kv_cache: KVCache, page_ids: jax.Array) -> LayerKV[jax.Array]:
    """Pages [n] of all layers with the scales they have of their own, each as one array [num_layers, n, ...]."""

    def gather(pools: list[jax.Array]) -> jax.Array:
        spec = jax.typeof(pools[0]).sharding.spec  # pages are not split, so each device gathers what it has of them
        return jnp.stack([pool.at[page_ids].get(out_sharding=spec, mode="clip") for pool in pools])

    scales = _page_scales(kv_cache)
    return LayerKV(gather([layer.pages for layer in kv_cache]), gather(scales) if scales else None)


def scatter_pages(kv_cache: KVCache, stacked: LayerKV[jax.Array], page_ids: jax.Array) -> tuple[KVCache, jax.Array]:
    """Write what `gather_pages` gave to pages [n], none twice; one past the pool: nowhere. The second result is ready
    once that is done."""

    def scatter(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[page_ids].set(rows, mode="drop", unique_indices=True)

    layers = []
    for i, layer in enumerate(kv_cache):
        scales = layer.scales
        if scales is not None and stacked.scales is not None:
            scales = scatter(scales, stacked.scales[i])
        layers.append(LayerKV(scatter(layer.pages, stacked.pages[i]), scales))
    return tuple(layers), page_ids[0]


def _page_scales[Leaf: (jax.Array, jax.ShapeDtypeStruct)](kv_cache: tuple[LayerKV[Leaf], ...]) -> list[Leaf]:
    """Each layer's scales, where pages have their own."""
    return [layer.scales for layer in kv_cache if layer.scales is not None and layer.scales.ndim > 1]


def zero_pages(kv_cache: KVCache, page_ids: jax.Array) -> KVCache:
    """Overwrite pages [n] and their scales with zeros: a request whose numbers were not finite leaves none behind."""
    return jax.tree.map(lambda x: x.at[page_ids].set(0) if x.ndim > 1 else x, kv_cache)


def copy_pages(kv_cache: KVCache, copies: jax.Array) -> KVCache:
    """Overwrite pages copies[1] with the first copies[2] tokens of pages copies[0], and their scales, and with zeros
    after them: whatever follows in the source, numbers that are not finite among it, is not the target's. All are read
    before one is written."""
    sources, targets, num_tokens = copies

    def copy(x: jax.Array, token_axis: int) -> jax.Array:
        shape = [1] * x.ndim
        shape[token_axis] = -1
        places = jnp.arange(x.shape[token_axis]).reshape(shape)
        is_kept = places < num_tokens.reshape(-1, *[1] * (x.ndim - 1))
        return x.at[targets].set(jnp.where(is_kept, x[sources], 0))

    def copy_layer(layer: LayerKV[jax.Array]) -> LayerKV[jax.Array]:
        scales = layer.scales
        return LayerKV(copy(layer.pages, 2), scales if scales is None or scales.ndim == 1 else copy(scales, 3))

    return tuple(map(copy_layer, kv_cache))
