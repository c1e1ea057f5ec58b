"""Moving attention kernels between numbers of stored KV heads.

A model with K KV heads on more than K shards stores each head several times; each copy serves an equal part of the
head's query heads, in order. These functions work on numpy and JAX arrays alike.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def regroup_qkv(array: Any, num_kv_heads: int, stored_kv_heads: int, xp: ModuleType) -> Any:
    """[K, G + 2, ...] -> [stored_kv_heads, G' + 2, ...], of a model with `num_kv_heads`.

    [:, :G] are query heads, [:, G] the key and [:, G + 1] the value head. `xp` is numpy or jax.numpy.
    """
    old_kv_heads, old_group, rest = array.shape[0], array.shape[1] - 2, array.shape[2:]
    group = old_kv_heads * old_group // stored_kv_heads
    queries = array[:, :old_group].reshape(stored_kv_heads, group, *rest)
    keys_values = array[:: old_kv_heads // num_kv_heads, old_group:]  # one of the copies of each head
    keys_values = xp.repeat(keys_values, stored_kv_heads // num_kv_heads, axis=0)
    return xp.concatenate([queries, keys_values], axis=1)


def regroup_o(array: Any, stored_kv_heads: int) -> Any:
    """[D, K, G, H] -> [D, stored_kv_heads, G', H]: query heads keep their order."""
    width, old_kv_heads, old_group, head_dim = array.shape
    return array.reshape(width, stored_kv_heads, old_kv_heads * old_group // stored_kv_heads, head_dim)


def regroup(path: str, array: Any, num_kv_heads: int, stored_kv_heads: int, xp: ModuleType) -> Any:
    """The parameter at `path` with `stored_kv_heads`; parameters without heads come back as they are."""
    if "/qkv/" in path:
        return regroup_qkv(array, num_kv_heads, stored_kv_heads, xp)
    if path.endswith("/o/kernel"):
        return regroup_o(array, stored_kv_heads)
    return array
