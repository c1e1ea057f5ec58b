"""What the device reaches at best, by plain jnp: the figures that MBU and MFU are shares of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from serving.bench.figures import Ceilings

READ_BYTES, MATMUL_SIZE = 2 << 30, 8192
CPU_READ_BYTES, CPU_MATMUL_SIZE = 256 << 20, 1024
MIN_READ_BYTES = 64 << 20  # less would be read from a cache
READ_ROW = 1024


def measure_ceilings(device: jax.Device, dtype: str, free_bytes: int) -> Ceilings:
    """Time a sum over an array and a product of two square matrices in `dtype`, products summed as in the layers.

    The best of several rounds: a ceiling is what can be reached. The array takes at most a quarter of `free_bytes`.
    """
    is_cpu = device.platform == "cpu"
    size = CPU_MATMUL_SIZE if is_cpu else MATMUL_SIZE
    num_bytes = max(min(CPU_READ_BYTES if is_cpu else READ_BYTES, free_bytes // 4), MIN_READ_BYTES)
    num_rows = num_bytes // (READ_ROW * 2)
    here = SingleDeviceSharding(device)

    # The values are anything but constants, which a compiler could fold away.
    fill = jax.jit(
        lambda: (jax.lax.broadcasted_iota(jnp.uint32, (num_rows, READ_ROW), 1) & 127).astype(jnp.bfloat16),
        out_shardings=here,
    )
    array = fill()
    read_s = _best_s(jax.jit(lambda x: x.astype(jnp.float32).sum()), array)
    read_bytes = array.nbytes
    del array

    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    random = jax.jit(lambda key: jax.random.normal(key, (size, size), dtype), out_shardings=here)
    a, b = random(jax.random.key(0)), random(jax.random.key(1))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return Ceilings(
        device_kind=device.device_kind,
        platform=device.platform,
        read_bytes=read_bytes,
        read_bytes_per_s=read_bytes / read_s,
        matmul_size=size,
        matmul_dtype=dtype,
        matmul_flops_per_s=2 * size**3 / _best_s(product, a, b, num_calls=4),
    )


def _best_s(function: Callable[..., Any], *args: Any, num_calls: int = 8, num_rounds: int = 5) -> float:
    """Seconds a call, of the fastest round of calls that are queued together."""
    jax.block_until_ready(function(*args))
    rounds_s = []
    for _ in range(num_rounds):
        started_s = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(num_calls)])
        rounds_s.append(time.perf_counter() - started_s)
    return min(rounds_s) / num_calls
