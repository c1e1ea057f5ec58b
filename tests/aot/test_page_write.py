"""The kernel of rotation and page write compiles for sm_90a without spilling registers, and writes pages in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.engine import MeshConfig
from pallas_kernels.kv_page_write import rotate_and_write_kv
from sharding.topology import target_mesh

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def compile_for_h200(function, *arrays, donate=()):
    """arrays: (shape, dtype), or None."""
    mesh = target_mesh("h200", MeshConfig())
    sharding = NamedSharding(mesh, PartitionSpec())
    abstract = [None if a is None else jax.ShapeDtypeStruct(*a, sharding=sharding) for a in arrays]
    with jax.set_mesh(mesh):
        compiled = jax.jit(function, donate_argnums=donate).lower(*abstract).compile(compiler_options=NO_SPILLS)
    text = compiled.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
    return compiled


@pytest.mark.parametrize(
    ("pool", "scales"),
    [
        (jnp.bfloat16, None),
        (jnp.float8_e4m3fn, "tensor"),
        (jnp.float8_e4m3fn, "head"),
        (jnp.int8, "tensor"),
        (jnp.int8, "head"),
    ],
)
@pytest.mark.parametrize(
    ("num_groups", "head_dim", "rotary_dim", "has_norms"),
    [(4, 128, 128, False), (2, 128, 128, True), (7, 96, 96, False), (16, 64, 32, False), (2, 256, 256, True)],
)
def test_page_write_compiles_and_is_in_place(pool, scales, num_groups, head_dim, rotary_dim, has_norms) -> None:
    num_tokens, num_kv_heads, num_pages, page_size = 32, 8, 4000, 16
    pages = ((num_pages, 2, page_size, num_kv_heads, head_dim), pool)
    kinds = {None: None, "tensor": ((2,), jnp.float32), "head": ((num_pages, 2, num_kv_heads, page_size), jnp.float32)}
    table = ((num_tokens, rotary_dim // 2), jnp.float32)

    def write(qkv, cos, sin, kv_pages, kv_indices, kv_scales, q_weight, k_weight):
        return rotate_and_write_kv(
            qkv,
            cos,
            sin,
            kv_pages,
            kv_indices,
            kv_scales,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=1e-6,
            num_columns=-(-num_groups // 8) * 8,
        )

    weight = ((head_dim,), jnp.float32) if has_norms else None
    compiled = compile_for_h200(
        write,
        ((num_tokens, num_kv_heads, num_groups + 2, head_dim), jnp.bfloat16),
        table,
        table,
        pages,
        ((num_tokens,), jnp.int32),
        kinds[scales],
        weight,
        weight,
        donate=(3, 5),
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = num_pages * 2 * page_size * num_kv_heads * head_dim * jnp.dtype(pool).itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 1 << 20
