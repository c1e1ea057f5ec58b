"""Every GPU kernel compiles for sm_90a over the shapes it says it takes, and ptxas finds registers enough: spills are bounded."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.engine import MeshConfig
from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill, paged_attention
from sharding.topology import target_mesh

SUPPORTS = {"mosaic_gpu_decode": mosaic_gpu_decode.supports, "mosaic_gpu_prefill": mosaic_gpu_prefill.supports}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Shapes of one attention call: defaults are a layer of an 8B model at batch 128 and context 4,096."""

    kernel: str = "mosaic_gpu_decode"
    num_rows: int = 128
    num_queries: int = 1
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    page_size: int = 16
    context: int = 4096
    sliding_window: int | None = None
    softcap: float | None = None
    kv_dtype: str = "bfloat16"
    has_scale_a_token: bool = False
    has_sinks: bool = False
    max_spill_bytes: int = 0

    def function(self) -> Callable[..., jax.Array]:
        def attend(*arrays: jax.Array, kv_scales: jax.Array | None, sinks: jax.Array | None) -> jax.Array:
            return paged_attention(
                *arrays,
                kv_scales=kv_scales,
                sinks=sinks,
                scale=self.head_dim**-0.5,
                sliding_window=self.sliding_window,
                softcap=self.softcap,
                implementation=self.kernel,
            )

        return attend

    def arrays(
        self, sharding: NamedSharding
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], dict[str, jax.ShapeDtypeStruct | None]]:
        pages_per_row = self.context // self.page_size
        num_pages = self.num_rows * pages_per_row + 1
        array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        arrays = (
            array((self.num_rows, self.num_queries, self.num_kv_heads, self.num_groups, self.head_dim), jnp.bfloat16),
            array((num_pages, 2, self.page_size, self.num_kv_heads, self.head_dim), jnp.dtype(self.kv_dtype)),
            array((self.num_rows, pages_per_row), jnp.int32),
            array((self.num_rows,), jnp.int32),
            array((self.num_rows,), jnp.int32),
        )
        scales_shape = (num_pages, 2, self.num_kv_heads, self.page_size) if self.has_scale_a_token else (2,)
        optional = {
            "kv_scales": None if self.kv_dtype == "bfloat16" else array(scales_shape, jnp.float32),
            "sinks": array((self.num_kv_heads, self.num_groups), jnp.float32) if self.has_sinks else None,
        }
        assert SUPPORTS[self.kernel](*arrays[:2], **optional)
        return arrays, optional


# Its three warpgroups have at most 168 registers a thread until they share them out anew, and ptxas spills around that:
# nothing in most cases when this was written, and up to 232 bytes with pages of 8 tokens, whose ids the producer holds.
Prefill = functools.partial(
    Attention, kernel="mosaic_gpu_prefill", num_rows=64, num_queries=32, context=8192, max_spill_bytes=256
)
# The column numbers of the mask are spilled, which only steps at the edge of what is seen read back: 308 bytes. With pages of
# 8 tokens so are scales and ids in the producer: 624.
PrefillScaleAToken = functools.partial(Prefill, has_scale_a_token=True, max_spill_bytes=700)


GATE_CASES: dict[str, Attention] = {
    "8B decode": Attention(),
    "8B decode, one long row": Attention(num_rows=1, context=131072),
    "8B decode, e4m3": Attention(kv_dtype="float8_e4m3fn"),
    "8B prefill": Prefill(max_spill_bytes=0),
}
CASES: dict[str, Attention] = {
    "256 rows": Attention(num_rows=256, context=1024),
    "page 8": Attention(page_size=8),
    "page 32": Attention(page_size=32),
    "page 64": Attention(page_size=64),
    "page 128": Attention(page_size=128),
    "head_dim 64": Attention(head_dim=64),
    "head_dim 64, 16 groups": Attention(head_dim=64, num_groups=16, num_kv_heads=4),
    "head_dim 256": Attention(head_dim=256, num_groups=2),
    "head_dim 256, window and soft cap": Attention(head_dim=256, num_groups=2, sliding_window=4096, softcap=50.0),
    "no grouping": Attention(num_groups=1),
    "7 groups": Attention(num_groups=7, num_kv_heads=4),
    "8 groups": Attention(num_groups=8),
    "MQA, 32 groups": Attention(num_groups=32, num_kv_heads=1),
    "window": Attention(sliding_window=1024),
    "soft cap": Attention(softcap=30.0),
    "2 queries": Attention(num_queries=2),
    "4 queries": Attention(num_queries=4),
    "8 queries": Attention(num_queries=8),
    "head_dim 80": Attention(head_dim=80),
    "head_dim 96, page 64": Attention(head_dim=96, page_size=64),
    "head_dim 64, 8 groups, window and sinks": Attention(head_dim=64, num_groups=8, sliding_window=128, has_sinks=True),
    "e4m3, page 64": Attention(kv_dtype="float8_e4m3fn", page_size=64),
    "e4m3, a scale a token": Attention(kv_dtype="float8_e4m3fn", has_scale_a_token=True),
    "e4m3, page 8": Attention(kv_dtype="float8_e4m3fn", page_size=8),
    "e4m3, head_dim 64, 8 groups, sinks": Attention(
        kv_dtype="float8_e4m3fn", head_dim=64, num_groups=8, has_sinks=True
    ),
    "e4m3, head_dim 256, a scale a token, soft cap": Attention(
        kv_dtype="float8_e4m3fn", head_dim=256, num_groups=2, has_scale_a_token=True, softcap=50.0
    ),
    "e4m3, 8 queries": Attention(kv_dtype="float8_e4m3fn", num_queries=8),
    "int8": Attention(kv_dtype="int8"),
    "int8, a scale a token, page 128": Attention(kv_dtype="int8", has_scale_a_token=True, page_size=128),
    "prefill of 128 queries a row": Prefill(num_rows=16, num_queries=128),
    "prefill, page 8": Prefill(page_size=8),
    "prefill, page 128": Prefill(page_size=128),
    "prefill, head_dim 64": Prefill(head_dim=64),
    "prefill, head_dim 256": Prefill(head_dim=256, num_groups=2),
    "prefill, no grouping": Prefill(num_groups=1),
    "prefill, 7 groups": Prefill(num_groups=7, num_kv_heads=4),
    "prefill, MQA, 32 groups": Prefill(num_groups=32, num_kv_heads=1),
    "prefill, window": Prefill(sliding_window=1024),
    "prefill, soft cap": Prefill(softcap=30.0),
    "prefill over 128 Ki earlier tokens": Prefill(num_rows=64, context=131072),
    "prefill, sinks": Prefill(has_sinks=True),
    "prefill, head_dim 64, 8 groups, window and sinks": Prefill(
        head_dim=64, num_groups=8, sliding_window=128, has_sinks=True
    ),
    "prefill, head_dim 80": Prefill(head_dim=80),
    "prefill, head_dim 96": Prefill(head_dim=96),
    "prefill, head_dim 96, page 8": Prefill(head_dim=96, page_size=8),
    "prefill, e4m3": Prefill(kv_dtype="float8_e4m3fn"),
    "prefill, e4m3, a scale a token": PrefillScaleAToken(kv_dtype="float8_e4m3fn"),
    "prefill, int8": Prefill(kv_dtype="int8"),
    "prefill, int8, a scale a token, page 128": PrefillScaleAToken(kv_dtype="int8", page_size=128),
    "prefill, int8, a scale a token, page 8": PrefillScaleAToken(kv_dtype="int8", page_size=8),
    "prefill, e4m3, head_dim 64": Prefill(kv_dtype="float8_e4m3fn", head_dim=64),
    "prefill, e4m3, head_dim 256, a scale a token, soft cap": PrefillScaleAToken(
        kv_dtype="float8_e4m3fn", head_dim=256, num_groups=2, softcap=50.0
    ),
}


def check(case: Attention, capfd: pytest.CaptureFixture[str]) -> None:
    mesh = target_mesh("h200", MeshConfig())
    with jax.set_mesh(mesh):
        arrays, optional = case.arrays(NamedSharding(mesh, PartitionSpec()))
        compiled = jax.jit(case.function()).lower(*arrays, **optional).compile()
    assert "mosaic_gpu" in compiled.as_text()
    out, err = capfd.readouterr()
    report = out + err
    kernels = re.findall(r"Compiling entry function '(\S+)' for '(\S+)'", report)
    assert kernels and {arch for _, arch in kernels} == {"sm_90a"}, report
    print(report)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    assert spilled and max(spilled) <= case.max_spill_bytes, report


@pytest.mark.gate
@pytest.mark.parametrize("name", GATE_CASES)
def test_kernel_of_the_8b_step_compiles_within_its_registers(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    check(GATE_CASES[name], capfd)


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_within_its_registers(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    check(CASES[name], capfd)
