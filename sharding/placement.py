"""Logical axes + rules + mesh -> where an array lives; what must divide for a model to be split.

A KV head is the unit of the attention split: its query heads go with it. Where there are more shards than KV
heads, each head is stored several times, and each copy serves an equal part of its query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from configs.checks import ConfigError
from configs.model import ModelConfig
from sharding.param_spec import ParamSpec
from sharding.rules import MESH_AXIS_OF

# The vocabulary is padded to a multiple of this on every shard, so that rows of a bfloat16 table are whole
# 16-byte words and matrix units need no tail.
VOCAB_ROWS_MULTIPLE = 8


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """One entry a dimension: the mesh axis of its logical axis, or None. Raises KeyError on an unknown name."""
    return PartitionSpec(*(None if axis is None else MESH_AXIS_OF[axis] for axis in axes))


def named_sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Where the parameter of `spec` lives on `mesh`."""
    return NamedSharding(mesh, partition_spec(spec.axes))


def replicated(mesh: Mesh | AbstractMesh, ndim: int) -> NamedSharding:
    """A whole copy of an `ndim`-dimensional array on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * ndim))


def mesh_of(array: jax.Array) -> AbstractMesh:
    """The mesh in the type of an array, concrete or traced."""
    mesh = jax.typeof(array).sharding.mesh
    assert not mesh.empty, "the array has no mesh in its type: place it with a NamedSharding on make_mesh(...)"
    return mesh


def device_kind_of(array: jax.Array) -> str | None:
    """`jax.Device.device_kind` of the mesh in the type of an array: the same for a described device as for a real one."""
    device = mesh_of(array).abstract_device
    return None if device is None else device.device_kind


def sum_over_shards(
    f: Callable[..., jax.Array],
    axes: tuple[str | None, ...],
    *,
    mesh: AbstractMesh,
    in_specs: Any,
    out_specs: PartitionSpec,
) -> Callable[..., jax.Array]:
    """`jax.shard_map(f)` whose result is summed over the mesh axes in `axes` (None: not split), by one all-reduce.

    Where those axes have one device each, the program has no all-reduce: XLA keeps one of a single member.
    """
    split_axes = tuple(axis for axis in axes if axis is not None and mesh.shape[axis] > 1)

    def local(*args: jax.Array) -> jax.Array:
        return jax.lax.psum(f(*args), split_axes) if split_axes else f(*args)

    # Only the sum tells JAX that the result is the same on all shards; without it there is one shard.
    check_vma = bool(split_axes) or not any(axes)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def stored_kv_heads(config: ModelConfig, tensor_shards: int) -> int:
    """KV heads in the parameters and the page pool: `num_kv_heads`, or one a shard where that is more."""
    return max(config.num_kv_heads, tensor_shards)


def padded_vocab_size(config: ModelConfig, tensor_shards: int) -> int:
    """Rows of the embedding and output tables: `vocab_size` rounded up so that it divides over the shards."""
    multiple = VOCAB_ROWS_MULTIPLE * tensor_shards
    return -(-config.vocab_size // multiple) * multiple


def check_split(config: ModelConfig, tensor_shards: int) -> None:
    """Raise ConfigError with the reason unless the model splits evenly over `tensor_shards`."""

    def refuse(field: str, reason: str) -> None:
        value = getattr(config, field)
        raise ConfigError(f"MeshConfig.tensor={tensor_shards} cannot split ModelConfig.{field}={value}: {reason}")

    if isinstance(tensor_shards, bool) or not isinstance(tensor_shards, int) or tensor_shards < 1:
        raise ConfigError(f"MeshConfig.tensor must be an integer >= 1, got {tensor_shards!r}")
    if config.num_heads % tensor_shards:
        refuse("num_heads", "every shard needs the same number of query heads")
    if config.num_kv_heads >= tensor_shards:
        if config.num_kv_heads % tensor_shards:
            refuse("num_kv_heads", "every shard needs the same number of KV heads")
    elif tensor_shards % config.num_kv_heads:
        refuse("num_kv_heads", "with more shards than KV heads, every head needs the same number of copies")
    if config.intermediate_size % tensor_shards:
        refuse("intermediate_size", "every shard needs the same part of the MLP width")
