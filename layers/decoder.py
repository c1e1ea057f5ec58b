"""The decoder-only transformer: one Flax NNX model for every dense architecture, driven by ModelConfig.

The model holds no state: pages and inputs go in and come out. Its modules are built without memory; `bind` puts
arrays in place inside a traced function. Placement comes from the types of the arrays (explicit sharding), so no
ambient mesh is needed; parameters and pages must be placed by `sharding.placement` on a mesh of
`sharding.mesh.make_mesh`, also where it has one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from configs.model import LayerType, ModelConfig, RopeConfig
from layers.block import Block
from layers.embedding import embed
from layers.kv_cache import KVCache, LayerKV, make_kv_cache
from layers.linear import linear
from layers.norm import RMSNorm
from layers.params import ParamSpecs, init_params, make_param, param_specs
from layers.rope import rope_tables
from layers.step_inputs import AttentionRows, StepInputs
from sharding.placement import mesh_of, replicated

__all__ = ["Decoder", "bind", "forward", "init_params", "logits", "make_kv_cache", "param_specs"]


class Embedding(nnx.Module):
    """A table [V, D] of token vectors, or of output vectors."""

    def __init__(self, specs: ParamSpecs, path: str):
        self.weight = make_param(specs[f"{path}/weight"])


class Decoder(nnx.Module):
    """Parameters of the model by the paths of `layers.params.param_specs`; without memory until `bind` fills them."""

    def __init__(self, config: ModelConfig, *, dtype: Any, tensor_shards: int = 1):
        specs = param_specs(config, dtype, tensor_shards)
        self.config = config
        self.embed = Embedding(specs, "embed")
        self.layers = nnx.List(
            [Block(config, specs, f"layers/{i}", layer_type) for i, layer_type in enumerate(config.layer_types)]
        )
        self.final_norm = RMSNorm(specs, "final_norm", config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Embedding(specs, "lm_head")


def bind(config: ModelConfig, dtype: Any, tensor_shards: int) -> Callable[[Mapping[str, jax.Array]], Decoder]:
    """A function from a flat dict of parameters, by path, to a Decoder that holds them. For use inside jit:
    a plain dict is what dispatches cheapest, and splitting the model is done here, once."""
    graphdef, state = nnx.split(Decoder(config, dtype=dtype, tensor_shards=tensor_shards))
    keys = {"/".join(map(str, key)): key for key, _ in nnx.to_flat_state(state)}

    def fill(params: Mapping[str, jax.Array]) -> Decoder:
        assert params.keys() == keys.keys(), sorted(params.keys() ^ keys.keys())
        return nnx.merge(graphdef, nnx.FlatState([(keys[path], value) for path, value in params.items()], sort=True))

    return fill


def _positions(rows: AttentionRows) -> jax.Array:
    """[R, Q] absolute positions."""
    return rows.starts[:, None] + jnp.arange(rows.num_queries, dtype=jnp.int32)


def _kv_indices(rows: AttentionRows, num_pages: int, page_size: int) -> jax.Array:
    """[R * Q] the place in the pool of each token: page_id * page_size + offset; past the pool for padding."""
    positions = _positions(rows)
    page_index, offset = positions // page_size, positions % page_size
    page_ids = jnp.take_along_axis(rows.page_table, page_index, axis=1, mode="clip")
    is_token = jnp.arange(rows.num_queries, dtype=jnp.int32) < rows.lengths[:, None]
    return jnp.where(is_token, page_ids * page_size + offset, num_pages * page_size).reshape(-1)


def _rope_of(config: ModelConfig, layer_type: LayerType) -> RopeConfig:
    if layer_type == "sliding_attention" and config.rope_sliding is not None:
        return config.rope_sliding
    return config.rope


# One traced and lowered function for each kind of layer, called once a layer: a program of 30 equal layers is
# traced and lowered as one. XLA inlines the calls, so the compiled program is unrolled.
@jax.jit
def _run_block(
    block: Block,
    hidden: jax.Array,
    layer_kv: LayerKV[jax.Array],
    rope: tuple[jax.Array, jax.Array],
    kv_indices: jax.Array,
    rows: tuple[AttentionRows, ...],
) -> tuple[LayerKV[jax.Array], jax.Array]:
    return block(hidden, layer_kv, rope, kv_indices, rows)


def forward(model: Decoder, kv_cache: KVCache, inputs: StepInputs) -> tuple[KVCache, jax.Array]:
    """Run the T tokens of `inputs` through all layers -> (kv_cache, hidden [T, D] after the final norm).

    Keys and values of the tokens are written to `kv_cache`, in place where the caller donates it.
    """
    config = model.config
    num_pages, _, page_size, _, _ = kv_cache[0].pages.shape
    positions = jnp.concatenate([_positions(rows).reshape(-1) for rows in inputs.rows])
    rope_lens = jnp.concatenate([jnp.repeat(rows.rope_lens, rows.num_queries) for rows in inputs.rows])
    kv_indices = jnp.concatenate([_kv_indices(rows, num_pages, page_size) for rows in inputs.rows])
    assert inputs.token_ids.shape == positions.shape, (inputs.token_ids.shape, positions.shape)
    ropes = {
        rope: rope_tables(rope, positions, rope_lens)
        for rope in dict.fromkeys(_rope_of(config, layer_type) for layer_type in config.layer_types)
    }

    hidden = embed(model.embed.weight.get_value(), inputs.token_ids)
    if config.embedding_scale is not None:
        hidden = hidden * jnp.asarray(config.embedding_scale, hidden.dtype)  # Gemma rounds the scale to the dtype
    new_kv_cache = []
    for layer_type, block, layer_kv in zip(config.layer_types, model.layers, kv_cache, strict=True):
        rope = ropes[_rope_of(config, layer_type)]
        layer_kv, hidden = _run_block(block, hidden, layer_kv, rope, kv_indices, inputs.rows)
        new_kv_cache.append(layer_kv)
    return tuple(new_kv_cache), model.final_norm(hidden)


def logits(model: Decoder, hidden: jax.Array) -> jax.Array:
    """Logits, float32 [..., V padded], of hidden states [..., D], whole on every device; padding tokens get -inf."""
    config = model.config
    table = model.embed if model.lm_head is None else model.lm_head
    weight = table.weight.get_value()
    scores = linear(hidden, weight, out_dtype=jnp.float32)
    scores = jax.reshard(scores, replicated(mesh_of(weight), scores.ndim))
    if config.final_logit_softcap is not None:
        scores = config.final_logit_softcap * jnp.tanh(scores / config.final_logit_softcap)
    return jnp.where(jnp.arange(scores.shape[-1]) < config.vocab_size, scores, -jnp.inf)
