"""Kernels that are lowered once for all programs. Lowering for a GPU needs none."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import lowered_once
from pallas_kernels.paged_attention import paged_attention


def arrays(num_rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        jax.ShapeDtypeStruct((num_rows, 1, 2, 4, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((9, 2, 16, 2, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_rows, 8), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )


def test_two_programs_share_a_kernel_that_tracing_does_not_lower() -> None:
    lowered_once._export.cache_clear()

    def attend(*arrays: jax.Array) -> jax.Array:
        return paged_attention(*arrays, scale=0.125, device_kind="NVIDIA H200")

    programs = [jax.jit(attend).trace(*arrays(3)), jax.jit(lambda *x: attend(*x) + 1).trace(*arrays(3))]
    assert lowered_once._export.cache_info().misses == 0
    texts = [program.lower(lowering_platforms=("cuda",)).as_text() for program in programs]
    assert lowered_once._export.cache_info().misses == 1
    assert all(text.count("mosaic_gpu") > 0 for text in texts)

    jax.jit(attend).trace(*arrays(5)).lower(lowering_platforms=("cuda",))
    assert lowered_once._export.cache_info().misses == 2
    assert "mosaic_gpu" not in jax.jit(attend).trace(*arrays(3)).lower(lowering_platforms=("cpu",)).as_text()
    assert lowered_once._export.cache_info().misses == 2
