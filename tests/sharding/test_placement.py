"""Where parameters go, and which splits are possible."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from configs.checks import ConfigError
from configs.engine import MeshConfig
from configs.model import ModelConfig, RopeConfig
from sharding.mesh import make_mesh
from sharding.param_spec import EMBED, KV_HEADS, MLP, VOCAB, ParamSpec
from sharding.placement import (
    check_split,
    device_kind_of,
    named_sharding,
    padded_vocab_size,
    partition_spec,
    replicated,
    stored_kv_heads,
)

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32003,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=24,
    num_kv_heads=4,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    activation="silu",
    tie_word_embeddings=True,
    attention_scale=0.25,
    rope=RopeConfig(rotary_dim=16, max_position_embeddings=64),
    layer_types=("full_attention",),
)


def test_heads_mlp_and_vocabulary_are_split_and_the_model_width_is_not() -> None:
    spec = partition_spec((VOCAB, EMBED, KV_HEADS, MLP, None))
    assert spec == PartitionSpec("tensor", None, "tensor", "tensor", None)
    with pytest.raises(KeyError, match="batch"):
        partition_spec(("batch",))


def test_the_device_kind_is_in_the_type_of_an_array_also_when_it_is_traced() -> None:
    mesh = make_mesh(MeshConfig())
    kinds = []
    jax.jit(lambda x: kinds.append(device_kind_of(x)))(jax.device_put(jnp.zeros(8), replicated(mesh, 1)))
    assert kinds == [mesh.devices.flat[0].device_kind]


def test_parameter_is_placed_by_its_axes() -> None:
    mesh = make_mesh(MeshConfig())
    sharding = named_sharding(mesh, ParamSpec((8, 4), jnp.float32, (MLP, EMBED)))
    assert sharding.spec == PartitionSpec("tensor", None)
    assert sharding.mesh == mesh


@pytest.mark.parametrize(("tensor_shards", "num_stored"), [(1, 4), (2, 4), (4, 4), (8, 8), (12, 12), (24, 24)])
def test_kv_heads_are_repeated_where_there_are_more_shards(tensor_shards: int, num_stored: int) -> None:
    check_split(CONFIG, tensor_shards)
    assert stored_kv_heads(CONFIG, tensor_shards) == num_stored
    assert CONFIG.num_heads % num_stored == 0


@pytest.mark.parametrize(
    ("tensor_shards", "changes", "field"),
    [
        (5, {}, "num_heads=24"),
        (3, {}, "num_kv_heads=4"),  # 24 heads divide by 3, 4 KV heads do not
        (6, {}, "num_kv_heads=4"),  # 6 shards are no whole number of copies of 4
        (8, {"intermediate_size": 100}, "intermediate_size=100"),
        (0, {}, "got 0"),
        (True, {}, "got True"),
    ],
)
def test_impossible_split_is_refused_with_the_reason(tensor_shards: int, changes: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        check_split(replace(CONFIG, **changes), tensor_shards)


@pytest.mark.parametrize("tensor_shards", [1, 2, 3, 4, 8, 64])
def test_padded_vocabulary_divides_over_the_shards_with_less_than_a_tile_each_to_spare(tensor_shards: int) -> None:
    padded = padded_vocab_size(CONFIG, tensor_shards)
    assert padded % (8 * tensor_shards) == 0
    assert 0 <= padded - CONFIG.vocab_size < 8 * tensor_shards
