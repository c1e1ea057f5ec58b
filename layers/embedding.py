"""Token embedding from a table that is split over its rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.param_spec import EMBED, VOCAB
from sharding.placement import mesh_of, partition_spec, sum_over_shards
from sharding.rules import MESH_AXIS_OF

VOCAB_AXIS = MESH_AXIS_OF[VOCAB]


def embed(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] for token_ids [T] -> [T, D], whole on every device.

    Each shard looks up the ids that it holds and gives 0 for the others; the sum over shards has one term that is
    not 0, so it is exact.
    """

    def lookup(shard: jax.Array, ids: jax.Array) -> jax.Array:
        row = ids - lax.axis_index(VOCAB_AXIS) * shard.shape[0]
        is_here = (row >= 0) & (row < shard.shape[0])
        rows = shard.at[row].get(mode="clip")
        return jnp.where(is_here[:, None], rows, 0)

    return sum_over_shards(
        lookup,
        (VOCAB_AXIS,),
        mesh=mesh_of(table),
        in_specs=(partition_spec((VOCAB, EMBED)), PartitionSpec()),
        out_specs=partition_spec((None, EMBED)),
    )(table, token_ids)
