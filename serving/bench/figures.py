"""What work must read and compute, and its time as shares of the device's ceilings. Formulas only, no JAX.

Bytes and bandwidth are of one device; FLOPs and FLOP/s are of all devices together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def keys_seen(first: int, num_queries: int, window: int | None) -> int:
    """Keys that consecutive queries of a sequence attend to, summed; the first sees `first` keys, each next one more.

    A sliding window bounds what a query sees, itself included.
    """
    last = first + num_queries - 1
    if window is None or last <= window:
        return (first + last) * num_queries // 2
    num_growing = max(window - first + 1, 0)  # queries that see less than the window, or just it
    return (first + window) * num_growing // 2 + (num_queries - num_growing) * window


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """A model as it lies on the devices, reduced to what a forward pass must read and compute.

    FLOPs: a matrix product takes 2 for each parameter and token; attention takes 4 * head_dim * heads for each pair of
    a query and a key it sees (q . k and probabilities times v, 2 each); the output product counts for sampled tokens
    only. This is the count of model FLOPs of Chowdhery et al. 2022 (PaLM), appendix B, forward pass, with the pairs
    that the causal mask leaves in place of the whole square.
    """

    weight_bytes: int  # of one device: every array but the input embedding, which is looked up, not read through
    kv_token_bytes: float  # of one device, one layer: keys and values of a token
    windows: tuple[int | None, ...]  # of each layer
    layer_params: int  # in the matrices of the layers
    head_params: int  # in the output table
    num_heads: int
    head_dim: int

    def keys(self, first: int, num_queries: int) -> int:
        """`keys_seen` summed over the layers."""
        return sum(keys_seen(first, num_queries, window) for window in self.windows)

    def attention_flops(self, num_keys: float) -> float:
        return 4 * self.head_dim * self.num_heads * num_keys

    def decode_step(self, batch: int, context: int, num_steps: int) -> tuple[float, float]:
        """(bytes, FLOPs) of the mean of `num_steps` decode steps of `batch` sequences after `context` prompt tokens.

        Step i of 1, 2, ... sees context + i keys. The first output token comes from prefill and is not among them.
        """
        num_keys = batch * self.keys(context + 1, num_steps) / num_steps
        flops = 2 * batch * (self.layer_params + self.head_params) + self.attention_flops(num_keys)
        return self.weight_bytes + num_keys * self.kv_token_bytes, flops

    def generate(self, lengths: Sequence[tuple[int, int]], num_passes: int) -> tuple[float, float]:
        """(bytes, FLOPs) of requests of (input, output) tokens that ran in `num_passes` forward passes.

        Bytes: the weights once a pass, and the live KV of each decode step. Keys that a prompt's later chunks read
        again are left out: how often depends on the kernel.
        """
        num_bytes = float(num_passes * self.weight_bytes)
        flops = 0.0
        for num_input, num_output in lengths:
            num_computed = num_input + num_output - 1  # the last token is not run
            num_bytes += self.kv_token_bytes * self.keys(num_input + 1, num_output - 1)
            flops += 2 * (num_computed * self.layer_params + num_output * self.head_params)
            flops += self.attention_flops(self.keys(1, num_computed))
        return num_bytes, flops


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one device was seen to reach: reading an array, and multiplying two matrices."""

    device_kind: str
    platform: str
    read_bytes: int  # of the array
    read_bytes_per_s: float
    matmul_size: int
    matmul_dtype: str
    matmul_flops_per_s: float

    def figures(self) -> dict[str, Any]:
        return {
            "device_kind": self.device_kind,
            "platform": self.platform,
            "read_tb_per_s": significant(self.read_bytes_per_s / 1e12),
            "read_bytes": self.read_bytes,
            "matmul_tflop_per_s": significant(self.matmul_flops_per_s / 1e12),
            "matmul": f"{self.matmul_size}^3 {self.matmul_dtype}",
        }

    def rates(self, seconds: float, num_bytes: float, flops: float, num_devices: int) -> dict[str, Any]:
        """Work as rates and as shares of the ceilings: MBU of reading, MFU of multiplying."""
        bytes_per_s, flops_per_s = num_bytes / seconds, flops / seconds / num_devices
        return {
            "bytes": round(num_bytes),
            "tb_per_s": significant(bytes_per_s / 1e12),
            "mbu": significant(bytes_per_s / self.read_bytes_per_s),
            "flops": round(flops),
            "tflop_per_s": significant(num_devices * flops_per_s / 1e12),
            "mfu": significant(flops_per_s / self.matmul_flops_per_s),
        }


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to so many significant digits: figures of a tiny model must not all round to 0."""
    return float(f"{value:.{digits}g}")


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile of `values`, by name."""
    p50, p99 = np.percentile(values, (50, 99))
    return {f"{name}_p50": round(float(p50), 3), f"{name}_p99": round(float(p99), 3)}
