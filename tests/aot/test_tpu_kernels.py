"""The TPU kernel compiles for the shapes it says it takes, within its memory, and reads the pool where it lies."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from configs.engine import MeshConfig
from pallas_kernels.kv_page_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from sharding.topology import target_mesh

TARGETS = ["v5e", "v6e", "7x"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Shapes of one attention call: defaults are a layer of an 8B model at batch 64 and context 4,096."""

    num_rows: int = 64
    num_queries: int = 1
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    page_size: int = 16
    context: int = 4096
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    token_scales: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    softcap: float | None = None

    def lower(self, sharding: NamedSharding, pool_sharding: NamedSharding | Format | None = None) -> jax.stages.Lowered:
        array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        pages_per_row = self.context // self.page_size
        num_pages = min(self.num_rows * pages_per_row, 20_000)
        pool_shape = (num_pages, 2, self.page_size, self.num_kv_heads, self.head_dim)
        pool_dtype = jnp.dtype(self.kv_dtype or self.dtype)
        scales = None
        if self.kv_dtype is not None:
            shape = (num_pages, 2, self.num_kv_heads, self.page_size) if self.token_scales else (2,)
            scales = array(shape, jnp.float32)
        attend = functools.partial(
            paged_attention,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            implementation="mosaic_tpu",
        )
        return jax.jit(lambda *arrays: attend(*arrays[:5], kv_scales=arrays[5], sinks=arrays[6])).lower(
            array(
                (self.num_rows, self.num_queries, self.num_kv_heads, self.num_groups, self.head_dim),
                jnp.dtype(self.dtype),
            ),
            jax.ShapeDtypeStruct(pool_shape, pool_dtype, sharding=pool_sharding or sharding),
            array((self.num_rows, pages_per_row), jnp.int32),
            array((self.num_rows,), jnp.int32),
            array((self.num_rows,), jnp.int32),
            scales,
            array((self.num_kv_heads, self.num_groups), jnp.float32) if self.sinks else None,
        )


Prefill = functools.partial(Attention, num_queries=32)
CASES: dict[str, Attention] = {
    "decode": Attention(),
    "decode, head_dim 256": Attention(head_dim=256, num_groups=2),
    "decode, fp8": Attention(kv_dtype="float8_e4m3fn"),
    "decode, fp8, head_dim 256": Attention(kv_dtype="float8_e4m3fn", head_dim=256, num_groups=2),
    "decode, int8": Attention(kv_dtype="int8"),
    "decode, int8, scales a token, page 128": Attention(kv_dtype="int8", token_scales=True, page_size=128),
    "decode, 2 heads of 8 over four devices": Attention(num_kv_heads=2),
    "decode, 2 heads, int8": Attention(num_kv_heads=2, kv_dtype="int8"),
    "decode, MQA": Attention(num_kv_heads=1, num_groups=32),
    "decode over 256 Ki tokens": Attention(num_rows=16, context=2**18),
    "decode, sinks, window, 64 query heads": Attention(num_groups=8, sinks=True, sliding_window=128),
    "4 queries, 7 groups, page 64": Attention(num_queries=4, num_kv_heads=4, num_groups=7, page_size=64),
    "prefill": Prefill(),
    "prefill, head_dim 256, soft cap and window": Prefill(
        head_dim=256, num_groups=2, softcap=50.0, sliding_window=4096
    ),
    "prefill, fp8": Prefill(kv_dtype="float8_e4m3fn"),
    "prefill, int8, scales a token": Prefill(kv_dtype="int8", token_scales=True, page_size=128),
    "prefill of 512 queries a row": Attention(num_rows=4, num_queries=512),
    "prefill, float32": Prefill(dtype="float32", num_kv_heads=2),
}


def check(lowered: jax.stages.Lowered) -> None:
    q_bytes, pool_bytes = (x.size * x.dtype.itemsize for x in lowered.in_avals[0][:2])
    compiled = lowered.compile()
    assert "tpu_custom_call" in (compiled.as_text() or "")
    analysis = compiled.memory_analysis()
    assert analysis is not None
    print(f"temp {analysis.temp_size_in_bytes / 1e6:.1f} MB, code {analysis.generated_code_size_in_bytes / 1e3:.0f} KB")
    # queries and result with the heads in front; no part of a pool
    assert analysis.temp_size_in_bytes < 2.1 * q_bytes + pool_bytes / 16


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_and_copies_no_pool(name: str, target: str) -> None:
    mesh = target_mesh(target, MeshConfig())
    with jax.set_mesh(mesh):
        lowered = CASES[name].lower(NamedSharding(mesh, PartitionSpec()))
        check(lowered)


@pytest.mark.parametrize("case", [Attention(head_dim=64), Prefill(head_dim=64)], ids=["decode", "prefill"])
def test_kernel_takes_head_dim_64_from_a_pool_that_was_laid_out_for_it(case: Attention) -> None:
    """It is not chosen for it: a pool lies otherwise unless its program says so."""
    mesh = target_mesh("v5e", MeshConfig())
    sharding = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        lowered = case.lower(sharding, Format(Layout((0, 1, 2, 3, 4)), sharding))
        check(lowered)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "num_kv_heads"), [("bfloat16", 8), ("bfloat16", 2), ("bfloat16", 1), ("int8", 2)])
def test_page_write_of_a_prefill_is_in_place(dtype: str, num_kv_heads: int, target: str) -> None:
    mesh = target_mesh(target, MeshConfig())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    pool = array((8000, 2, 16, num_kv_heads, 128), jnp.dtype(dtype))
    new = array((2048, num_kv_heads, 128), jnp.bfloat16)
    scales = array((2,), jnp.float32) if dtype == "int8" else None
    with jax.set_mesh(mesh):
        write = jax.jit(write_kv, donate_argnums=0)
        analysis = write.lower(pool, new, new, array((2048,), jnp.int32), scales).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= pool.size * pool.dtype.itemsize
    assert analysis.temp_size_in_bytes < pool.size * pool.dtype.itemsize / 8
