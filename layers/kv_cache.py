"""The page pool: one array a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from configs.model import ModelConfig
from sharding.param_spec import KV_HEADS
from sharding.placement import partition_spec, stored_kv_heads

KV_PAGES_AXES = (None, None, None, KV_HEADS, None)

type KVCache = tuple[jax.Array, ...]


def abstract_kv_cache(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: Any, tensor_shards: int, mesh: Mesh
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """[num_pages, 2, page_size, K, H] for each layer, K the stored KV heads and split over the mesh."""
    shape = (num_pages, 2, page_size, stored_kv_heads(config, tensor_shards), config.head_dim)
    sharding = NamedSharding(mesh, partition_spec(KV_PAGES_AXES))
    return (jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),) * config.num_layers


def make_kv_cache(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: Any, tensor_shards: int, mesh: Mesh
) -> KVCache:
    """Zeros, as `abstract_kv_cache` says.

    Keys are at [:, 0], values at [:, 1]; page 0 is the null page, which page tables name where they
    have none.
    """
    pools = abstract_kv_cache(
        config, num_pages=num_pages, page_size=page_size, dtype=dtype, tensor_shards=tensor_shards, mesh=mesh
    )
    return tuple(jnp.zeros(pool.shape, pool.dtype, device=pool.sharding) for pool in pools)
