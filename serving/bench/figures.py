"""What work must read and compute, and its time as shares of the device's ceilings. Formulas only, no JAX.

Bytes and bandwidth are of one device; FLOPs and FLOP/s are of all devices together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from serving.engine import Engine

# Consecutive queries of several sequences: of each, the keys that its first query sees, and how many they are.
type Rows = tuple[Sequence[int], Sequence[int]]


def keys_seen(first: ArrayLike, num_queries: ArrayLike, window: int | None) -> int:
    """Keys that consecutive queries of a sequence attend to, summed; the first sees `first` keys, each next one more.

    Of several sequences, int [R] each, the sum over all. A sliding window bounds what a query sees, itself included.
    """
    first, num_queries = np.asarray(first, np.int64), np.asarray(num_queries, np.int64)
    if window is None:
        return int(((2 * first + num_queries - 1) * num_queries // 2).sum())
    num_growing = np.clip(window - first + 1, 0, num_queries)  # queries that see less than the window, or just it
    growing = (2 * first + num_growing - 1) * num_growing // 2
    return int((growing + (num_queries - num_growing) * window).sum())


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

    def keys(self, first: ArrayLike, num_queries: ArrayLike) -> int:
        """`keys_seen` summed over the layers."""
        return sum(
            num_layers * keys_seen(first, num_queries, window) for window, num_layers in Counter(self.windows).items()
        )

    def passes(
        self, decode_rows: Rows, prefill_rows: Rows, *, num_sampled: int, num_passes: int
    ) -> tuple[float, float]:
        """(bytes read, FLOPs) of forward passes over rows of decoding sequences and of prompt chunks.

        num_sampled: tokens whose logits were taken. Bytes: the weights once a pass, and the live KV of each decoded
        token. Keys that a prompt's later chunks read again are left out: how often depends on the kernel.
        """
        decode_keys = self.keys(*decode_rows)
        num_tokens = sum(decode_rows[1]) + sum(prefill_rows[1])
        flops = 2.0 * (num_tokens * self.layer_params + num_sampled * self.head_params)
        flops += self.attention_flops(decode_keys + self.keys(*prefill_rows))
        return num_passes * self.weight_bytes + self.kv_token_bytes * decode_keys, flops

    def attention_flops(self, num_keys: float) -> float:
        return 4 * self.head_dim * self.num_heads * num_keys

    def decode_step(self, batch: int, context: int, num_steps: int) -> tuple[float, float]:
        """(bytes, FLOPs) of the mean of `num_steps` decode steps of `batch` sequences after `context` prompt tokens.

        Step i of 1, 2, ... sees context + i keys. The first output token comes from prefill and is not among them.
        """
        num_bytes, flops = self.passes(
            ([context + 1] * batch, [num_steps] * batch),
            ((), ()),
            num_sampled=batch * num_steps,
            num_passes=num_steps,
        )
        return num_bytes / num_steps, flops / num_steps

    def generate(self, lengths: Sequence[tuple[int, int]], num_passes: int) -> tuple[float, float]:
        """(bytes, FLOPs) of requests of (input, output) tokens that ran in `num_passes` forward passes."""
        return self.passes(
            ([i + 1 for i, _ in lengths], [o - 1 for _, o in lengths]),  # the last token is not run
            ([1] * len(lengths), [i for i, _ in lengths]),
            num_sampled=sum(num_output for _, num_output in lengths),
            num_passes=num_passes,
        )


def model_cost(engine: Engine) -> ModelCost:
    """What the engine's arrays cost to read and use, from the arrays as they lie on its devices."""
    model, params, ledger = engine.model_config, engine.runner.params, engine.runner.ledger
    head = "embed/weight" if model.tie_word_embeddings else "lm_head/weight"
    return ModelCost(
        weight_bytes=sum(
            array.addressable_shards[0].data.nbytes
            for path, array in params.items()
            if path != "embed/weight" or path == head
        ),
        kv_token_bytes=ledger.kv_token_bytes / model.num_layers,
        windows=tuple(
            model.sliding_window if layer_type == "sliding_attention" else None for layer_type in model.layer_types
        ),
        layer_params=sum(array.size for path, array in params.items() if path.endswith("/kernel")),
        head_params=params[head].size,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
    )


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
