"""One layer of the decoder: attention over pages and a gated MLP, each with its norms and residual sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from configs.model import LayerType, ModelConfig
from layers.kv_cache import LayerKV, kv_specs
from layers.linear import Linear
from layers.norm import RMSNorm
from layers.params import ParamSpecs
from layers.rope import rotate
from layers.step_inputs import AttentionRows
from pallas_kernels.kv_page_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from sharding.param_spec import KV_HEADS
from sharding.placement import device_kind_of, mesh_of, partition_spec

ACTIVATION: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

QUERY_AXES = (None, KV_HEADS, None, None)  # [T, K, G, H]
KEY_AXES = (None, KV_HEADS, None)  # [T, K, H]


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer_kv: LayerKV[jax.Array],
    kv_indices: jax.Array,
    rows: tuple[AttentionRows, ...],
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    device_kind: str | None,
) -> tuple[LayerKV[jax.Array], jax.Array]:
    """Write k, v [T, K, H] to pages, then attend with q [T, K, G, H] -> (layer_kv, out [T, K, G, H])."""
    layer_kv = LayerKV(*write_kv(layer_kv.pages, k, v, kv_indices, layer_kv.scales))
    outs = []
    start = 0
    for group in rows:
        q_rows = q[start : start + group.num_tokens].reshape(-1, group.num_queries, *q.shape[1:])
        out = paged_attention(
            q_rows,
            layer_kv.pages,
            group.page_table,
            group.starts,
            group.lengths,
            scale=scale,
            kv_scales=layer_kv.scales,
            sliding_window=sliding_window,
            softcap=softcap,
            device_kind=device_kind,
        )
        outs.append(out.reshape(-1, *q.shape[1:]))
        start += group.num_tokens
    return layer_kv, jnp.concatenate(outs)


class Block(nnx.Module):
    """Parameters of one layer. Equal for layers of one kind, so that they share one traced function."""

    def __init__(self, config: ModelConfig, specs: ParamSpecs, path: str, layer_type: LayerType):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(specs, f"{path}/{name}", config.rms_norm_eps)

        self.config = config
        self.sliding_window = config.sliding_window if layer_type == "sliding_attention" else None
        self.attn_norm = norm("attn_norm")
        self.qkv = Linear(specs, f"{path}/qkv")
        self.q_norm = norm("q_norm") if config.qk_norm else None
        self.k_norm = norm("k_norm") if config.qk_norm else None
        self.o = Linear(specs, f"{path}/o", num_in=3)
        self.post_attn_norm = norm("post_attn_norm") if config.post_norms else None
        self.mlp_norm = norm("mlp_norm")
        self.gate_up = Linear(specs, f"{path}/gate_up")
        self.down = Linear(specs, f"{path}/down")
        self.post_mlp_norm = norm("post_mlp_norm") if config.post_norms else None

    def __call__(
        self,
        hidden: jax.Array,
        layer_kv: LayerKV[jax.Array],
        rope: tuple[jax.Array, jax.Array],
        kv_indices: jax.Array,
        rows: tuple[AttentionRows, ...],
    ) -> tuple[LayerKV[jax.Array], jax.Array]:
        """hidden [T, D] -> (layer_kv with the tokens' keys and values, hidden). Two all-reduces over shards."""
        layer_kv, update = self.attention(self.attn_norm(hidden), layer_kv, rope, kv_indices, rows)
        if self.post_attn_norm is not None:
            update = self.post_attn_norm(update)
        hidden = hidden + update
        update = self.mlp(self.mlp_norm(hidden))
        if self.post_mlp_norm is not None:
            update = self.post_mlp_norm(update)
        return layer_kv, hidden + update

    def attention(
        self,
        x: jax.Array,
        layer_kv: LayerKV[jax.Array],
        rope: tuple[jax.Array, jax.Array],
        kv_indices: jax.Array,
        rows: tuple[AttentionRows, ...],
    ) -> tuple[LayerKV[jax.Array], jax.Array]:
        """x [T, D] -> (layer_kv, [T, D])."""
        config = self.config
        qkv = self.qkv(x)  # [T, K, G + 2, H]: for each KV head its query heads, its key and its value
        turning, v = qkv[:, :, :-1], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            turning = jnp.concatenate([self.q_norm(turning[:, :, :-1]), self.k_norm(turning[:, :, -1:])], axis=2)
        turned = rotate(turning, *rope)
        q, k = turned[:, :, :-1], turned[:, :, -1]
        local = functools.partial(
            write_and_attend,
            scale=config.attention_scale,
            sliding_window=self.sliding_window,
            softcap=config.attn_logit_softcap,
            device_kind=device_kind_of(layer_kv.pages),
        )
        query, key, pool = partition_spec(QUERY_AXES), partition_spec(KEY_AXES), kv_specs(layer_kv)
        layer_kv, out = jax.shard_map(
            local,
            mesh=mesh_of(layer_kv.pages),
            in_specs=(query, key, key, pool, PartitionSpec(), PartitionSpec()),
            out_specs=(pool, query),
            check_vma=False,  # kernels know no mesh, and loop carries that start as constants would be refused
        )(q, k, v, layer_kv, kv_indices, rows)
        return layer_kv, self.o(out)

    def mlp(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, D]."""
        gate_up = self.gate_up(x)
        hidden = ACTIVATION[self.config.activation](gate_up[:, 0]) * gate_up[:, 1]
        return self.down(hidden)
