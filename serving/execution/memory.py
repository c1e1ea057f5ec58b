"""Where a device's memory goes: weights, slot table, workspace, swap staging, KV pool, slack. Bytes are of one device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
import psutil

from configs.checks import ConfigError
from configs.engine import EngineConfig
from configs.model import ModelConfig
from sharding.placement import stored_kv_heads

CPU_KV_CACHE_BYTES = 1 << 30  # host memory is shared with everything else: take a fixed share unless told
GPU_HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # bounds XLA's page-locked memory
GPU_HOST_LIMIT_GIB = 64  # where it is not set
GPU_HOST_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """Bytes of one device; weights + slot_table + workspace + swap_staging + kv_pool + slack = device."""

    device: int
    weights: int
    slot_table: int
    workspace: int  # the largest program's temporaries and outputs
    kv_pool: int  # pages and their scales
    kv_dtype: str
    kv_scales: str | None  # "per_token_head", "per_tensor"; None: not quantised
    num_pages: int
    page_size: int
    max_model_len: int
    swap_staging: int = 0  # pages on their way to the host and back
    host: int = 0  # of host memory, for pages of preempted sequences of all devices

    @property
    def slack(self) -> int:
        return self.device - self.weights - self.slot_table - self.workspace - self.swap_staging - self.kv_pool

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token's keys and values, all layers, with what scales they have."""
        return self.kv_pool / (self.num_pages * self.page_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens the pool holds; the null page holds none."""
        return (self.num_pages - 1) * self.page_size

    @property
    def capacity_sequences(self) -> int:
        """Sequences of max_model_len that fit at once."""
        return self.capacity_tokens // self.max_model_len

    def __str__(self) -> str:
        kept = self.kv_dtype if self.kv_scales is None else f"{self.kv_dtype} {self.kv_scales}"
        rows = [
            ("weights", self.weights),
            ("slot table", self.slot_table),
            ("workspace", self.workspace),
            *([("pages on their way to the host and back", self.swap_staging)] if self.host else []),
            (f"KV pool, {self.num_pages} pages of {self.page_size} tokens, {kept}", self.kv_pool),
            ("slack", self.slack),
            ("device memory", self.device),
        ]
        lines = [f"  {name:<64}{size / 2**20:>12,.1f} MiB" for name, size in rows]
        lines.append(
            f"  fits {self.capacity_tokens:,} tokens: {self.capacity_sequences:,} sequences of {self.max_model_len:,}"
        )
        if self.host:
            lines.append(f"  host memory for pages of preempted sequences, all devices: {self.host / 2**20:,.1f} MiB")
        return "\n".join(lines)


def device_memory_bytes(device: jax.Device, num_devices: int) -> int:
    """Memory of one device that this process can have; host devices share what the machine has free."""
    if device.platform == "cpu":
        return psutil.virtual_memory().available // num_devices
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(f"device {device} does not say how much memory it has")
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def page_bytes(model: ModelConfig, config: EngineConfig, kv_itemsize: int, tensor_shards: int) -> int:
    """Bytes of one page of all layers on one device, with its scales if it has its own."""
    vector_bytes = model.head_dim * kv_itemsize + (4 if config.kv_format[1] == "per_token_head" else 0)
    num_heads = stored_kv_heads(model, tensor_shards) // tensor_shards
    return 2 * model.num_layers * num_heads * config.page_size * vector_bytes


def estimate_workspace_bytes(model: ModelConfig, config: EngineConfig, padded_vocab_size: int, shards: int) -> int:
    """A guess of the largest program's temporaries, to size the pool before anything is compiled.

    float32 throughout: for each token the residual stream, one MLP's hidden and one attention's q, k, v and out; for
    each slot a dozen rows over the vocabulary (logits, sort keys, noise, probabilities).
    """
    num_tokens = config.prefill_token_buckets[-1] + config.max_num_seqs
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim // shards
    per_token = 4 * (6 * model.hidden_size + 3 * model.intermediate_size // shards + 2 * heads)
    return num_tokens * per_token + 12 * 4 * config.max_num_seqs * padded_vocab_size


def pinned_host_bytes(platform: str) -> int:
    """Page-locked host memory that this process can have: what the machine has free, and on GPUs XLA's own limit less
    what its other transfers may need."""
    available = psutil.virtual_memory().available
    if platform != "gpu":
        return available
    limit = os.environ.get(GPU_HOST_LIMIT, "")
    return min(available, (int(limit) if limit.isdecimal() else GPU_HOST_LIMIT_GIB) * 2**30 - GPU_HOST_RESERVE_BYTES)


def check_swap_bytes(config: EngineConfig, *, batch_nbytes: int, platform: str) -> None:
    """Raise ConfigError where swap_bytes is more than there can be, or less than one batch of pages takes."""
    available = pinned_host_bytes(platform)
    if not batch_nbytes <= config.swap_bytes <= available:
        raise ConfigError(
            f"EngineConfig.swap_bytes={config.swap_bytes} must be 0, or from {batch_nbytes:,}, which is what one batch of "
            f"pages takes, to the {available:,} bytes of host memory that can be had (on GPUs bounded by {GPU_HOST_LIMIT})"
        )


def choose_num_pages(
    config: EngineConfig, *, page_nbytes: int, free_bytes: int, max_model_len: int, is_cpu: bool
) -> int:
    """Pages of the pool: as told, or what fits `free_bytes`, and no more than every slot at full length needs twice.

    Raises ConfigError where not even one sequence of max_model_len fits.
    """
    pages_per_sequence = -(-max_model_len // config.page_size)
    if config.num_pages is not None:
        num_pages = config.num_pages
    else:
        pool_bytes = config.kv_cache_bytes
        if pool_bytes is None:
            pool_bytes = min(free_bytes, CPU_KV_CACHE_BYTES) if is_cpu else free_bytes
        # Twice full occupancy leaves as much again for cached prefixes; more would only lie idle.
        num_pages = min(pool_bytes // page_nbytes, 2 * config.max_num_seqs * pages_per_sequence + 1)
    if num_pages * page_nbytes > free_bytes:
        field = "num_pages" if config.kv_cache_bytes is None else "kv_cache_bytes"
        raise ConfigError(
            f"EngineConfig.{field}={getattr(config, field)}: {num_pages} pages take {num_pages * page_nbytes:,} bytes of KV; "
            f"{max(free_bytes, 0):,} bytes are left beside weights and workspace"
        )
    if num_pages - 1 < pages_per_sequence:
        raise ConfigError(
            f"the KV pool of {num_pages} pages x {config.page_size} tokens cannot hold one sequence of "
            f"max_model_len={max_model_len} tokens ({pages_per_sequence} pages and the null page): "
            "lower max_model_len or give the pool more memory"
        )
    return num_pages
