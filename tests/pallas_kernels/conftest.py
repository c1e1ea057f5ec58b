"""Dense attention in float64 and random paged cases, shared by the attention tests."""

from __future__ import annotations

import numpy as np
import pytest


def _dense_attention(q, k, v, start, length, *, scale, sliding_window, softcap):
    """One row in float64: q [Q, K, G, H], k and v [S, K, H] -> [Q, K, G, H]."""
    out = np.zeros(q.shape)
    for i in range(length):
        position = start + i
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        scores = np.einsum("kgh,skh->kgs", q[i], k[first : position + 1]) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        out[i] = np.einsum("kgs,skh->kgh", probs / probs.sum(-1, keepdims=True), v[first : position + 1])
    return out


def _make_case(
    rng, *, starts, lengths, num_queries, num_kv_heads, num_groups, head_dim, page_size, dtype, finite_tails=False
):
    """Random q, a pool that is NaN wherever no token of a row lies, its page table, and dense k and v of each row.

    finite_tails: the places past a row's end in its last page hold numbers, as they do in a pool that serves.
    """
    num_rows = len(starts)
    pages_per_row = max(-(-(s + n) // page_size) for s, n in zip(starts, lengths, strict=True)) + 2
    num_pages = 1 + num_rows * pages_per_row
    kv_pages = np.full((num_pages, 2, page_size, num_kv_heads, head_dim), np.nan, np.float32)
    page_table = (1 + rng.permutation(num_pages - 1).reshape(num_rows, pages_per_row)).astype(np.int32)
    dense = []
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        kv = rng.standard_normal((start + length, 2, num_kv_heads, head_dim)).astype(dtype)
        if finite_tails:
            kv_pages[page_table[row, : -(-len(kv) // page_size)]] = rng.standard_normal(kv_pages.shape[1:])
        for position, value in enumerate(kv):
            kv_pages[page_table[row, position // page_size], :, position % page_size] = value
        dense.append(kv.astype(np.float64))
    q = rng.standard_normal((num_rows, num_queries, num_kv_heads, num_groups, head_dim)).astype(dtype)
    arrays = (q, kv_pages.astype(dtype), page_table, np.asarray(starts, np.int32), np.asarray(lengths, np.int32))
    return arrays, dense


@pytest.fixture(scope="session")
def dense_attention():
    return _dense_attention


@pytest.fixture(scope="session")
def make_case():
    return _make_case
