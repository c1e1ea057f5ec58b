"""The decoder's parameters as data: `param_specs` lists them, `init_params` fills them at random.

Matrices are stored [out..., in...]. Paths are the places of the parameters in `layers.decoder.Decoder`.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding

from configs.model import ModelConfig
from sharding.param_spec import EMBED, KV_HEADS, MLP, VOCAB, ParamSpec
from sharding.placement import check_split, named_sharding, padded_vocab_size, stored_kv_heads

type ParamSpecs = Mapping[str, ParamSpec]

TABLE_INIT_SCALE = 0.02  # embedding and output tables, biases


def make_param(spec: ParamSpec) -> nnx.Param:
    """A parameter without memory: shape and dtype only, its spec beside them."""
    return nnx.Param(spec.abstract(), spec=spec)


def param_specs(config: ModelConfig, dtype: Any, tensor_shards: int) -> dict[str, ParamSpec]:
    """Every parameter of the decoder by path, in the model's order. Matrices and biases in `dtype`, norms float32.

    K below is the number of stored KV heads and G the query heads of each (`sharding.placement`). Raises
    ConfigError where the model cannot be split over `tensor_shards`.
    """
    check_split(config, tensor_shards)
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    K = stored_kv_heads(config, tensor_shards)
    G = config.num_heads // K

    def norm(size: int) -> ParamSpec:
        return ParamSpec((size,), jnp.float32, (None,))

    def kernel(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> ParamSpec:
        return ParamSpec(shape, dtype, axes, init_scale=fan_in**-0.5)

    def bias(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
        return ParamSpec(shape, dtype, axes, init_scale=TABLE_INIT_SCALE)

    table = ParamSpec(
        (padded_vocab_size(config, tensor_shards), D),
        dtype,
        (VOCAB, EMBED),
        init_scale=TABLE_INIT_SCALE,
        num_rows=config.vocab_size,
    )
    specs = {"embed/weight": table}
    for i in range(config.num_layers):
        layer = f"layers/{i}"
        specs[f"{layer}/attn_norm/weight"] = norm(D)
        # [:, :G] are the query heads, [:, G] the key and [:, G + 1] the value head of each KV head
        specs[f"{layer}/qkv/kernel"] = kernel((K, G + 2, H, D), (KV_HEADS, None, None, EMBED), D)
        if config.qkv_bias:
            specs[f"{layer}/qkv/bias"] = bias((K, G + 2, H), (KV_HEADS, None, None))
        if config.qk_norm:
            specs[f"{layer}/q_norm/weight"] = norm(H)
            specs[f"{layer}/k_norm/weight"] = norm(H)
        specs[f"{layer}/o/kernel"] = kernel((D, K, G, H), (EMBED, KV_HEADS, None, None), K * G * H)
        if config.attention_out_bias:
            specs[f"{layer}/o/bias"] = bias((D,), (EMBED,))
        if config.post_norms:
            specs[f"{layer}/post_attn_norm/weight"] = norm(D)
        specs[f"{layer}/mlp_norm/weight"] = norm(D)
        specs[f"{layer}/gate_up/kernel"] = kernel((2, F, D), (None, MLP, EMBED), D)
        if config.mlp_bias:
            specs[f"{layer}/gate_up/bias"] = bias((2, F), (None, MLP))
        specs[f"{layer}/down/kernel"] = kernel((D, F), (EMBED, MLP), F)
        if config.mlp_bias:
            specs[f"{layer}/down/bias"] = bias((D,), (EMBED,))
        if config.post_norms:
            specs[f"{layer}/post_mlp_norm/weight"] = norm(D)
    specs["final_norm/weight"] = norm(D)
    if not config.tie_word_embeddings:
        specs["lm_head/weight"] = table
    return specs


def _hashed_bits(seed: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Evenly spread uint32 [shape] from a uint32 seed: MurmurHash3's 32-bit finaliser over each element's index.

    Elementwise, so that every device makes its own part, and the same bits on every mesh and backend; far cheaper
    than a cryptographic generator, which random weights do not need.
    """
    index = jnp.uint32(0)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis, out_sharding=sharding)
    bits = index * jnp.uint32(0x9E3779B1) + seed  # an odd factor: neighbours get seeds far apart
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


@functools.partial(jax.jit, static_argnames=("spec", "sharding"))
def _init_param(seed: jax.Array, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
    if spec.init_scale is None:
        return jnp.ones(spec.shape, spec.dtype, device=sharding)
    bits = _hashed_bits(seed, spec.shape, sharding)
    centred = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1.0  # float32 holds 24 bits: uniform in [-1, 1)
    values = centred * (spec.init_scale * math.sqrt(3))  # the std of uniform [-1, 1) is 1 / sqrt(3)
    if spec.num_rows is not None:
        row = lax.broadcasted_iota(jnp.int32, spec.shape, 0, out_sharding=sharding)
        values = jnp.where(row < spec.num_rows, values, 0.0)
    return values.astype(spec.dtype)


def init_params(specs: ParamSpecs, seed: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Random parameters, made where they live: uniform with each spec's `init_scale` as std, norms 1, padding rows 0.

    The values depend on the seed, the path and the shape alone, not on the mesh. Nothing passes through the host.
    """

    def seed_of(path: str) -> np.uint32:
        return np.uint32(zlib.crc32(f"{seed}/{path}".encode()))

    with jax.set_mesh(mesh):  # no argument carries the mesh in its type
        return {path: _init_param(seed_of(path), spec, named_sharding(mesh, spec)) for path, spec in specs.items()}
