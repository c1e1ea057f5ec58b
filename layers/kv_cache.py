"""The page pool: one array a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from configs.model import ModelConfig
from sharding.param_spec import KV_HEADS
from sharding.placement import partition_spec, stored_kv_heads

KV_PAGES_AXES = (None, None, KV_HEADS, None, None)

type KVCache = tuple[jax.Array, ...]


def make_kv_cache(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: Any, tensor_shards: int, mesh: Mesh
) -> KVCache:
    """Zeros [num_pages, 2, K, page_size, H] for each layer, K the stored KV heads and split over the mesh.

    Keys are at [:, 0], values at [:, 1]; page 0 is the null page, where padding tokens write.
    """
    shape = (num_pages, 2, stored_kv_heads(config, tensor_shards), page_size, config.head_dim)
    sharding = NamedSharding(mesh, partition_spec(KV_PAGES_AXES))
    return tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(config.num_layers))
