"""The Hopper prefill kernel on the card: error against float32, repeatability, and time beside the work it must do.

python benchmarks/kernels/prefill_attention.py [--check] [--time]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import mosaic_gpu_prefill, reference
from pallas_kernels.paged_attention.mosaic_gpu_prefill import Tuning, default_tuning

NUM_HEADS, NUM_KV_HEADS = 32, 8
CHUNK = 2048  # new tokens a step
MAX_KEYS = 65536 + CHUNK


def emit(**figures) -> None:
    print(json.dumps(figures), flush=True)


def make_pool(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> jax.Array:
    shape = (num_pages, 2, page_size, num_kv_heads, head_dim)
    return jax.jit(lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))()


CHECKS = {
    "d128 g4": {},
    "d128 g4, 64 queries, 3 stages": dict(num_queries=64, tuning=dict(num_stages=3, is_query_room_reused=True)),
    "d128 g4, 64 keys": dict(tuning=dict(block_kv=64, num_stages=4)),
    "d64 g4 page 64": dict(head_dim=64, page_size=64),
    "d256 g4": dict(head_dim=256),
    "d256 g1 page 128": dict(head_dim=256, num_groups=1, page_size=128),
    "g1": dict(num_groups=1),
    "g7, 16 queries": dict(num_groups=7, num_queries=16),
    "window": dict(sliding_window=300),
    "softcap": dict(softcap=20.0),
}


def check() -> None:
    """Relative error against float32 on the same bf16 arrays, equal bits over 10 runs and alone, over NaN pages."""
    rng = np.random.default_rng()
    for name, case in CHECKS.items():
        case = dict(num_queries=128, num_kv_heads=2, num_groups=4, head_dim=128, page_size=16) | case
        options = dict(scale=0.2, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
        num_queries, page_size, head_dim = case["num_queries"], case["page_size"], case["head_dim"]
        tuning = default_tuning(head_dim)
        if "tuning" in case:
            tuning = Tuning(**({"block_kv": tuning.block_kv} | case["tuning"]))
        try:
            starts = np.array([0, 1, 15, 127, 128, 1000, 0, *rng.integers(0, 4000, 9)], np.int32)
            lengths = np.array([num_queries, 1, *rng.integers(1, num_queries + 1, 14)], np.int32)
            lengths[6] = 0
            pages_per_row = -(-(4000 + num_queries) // page_size)
            num_pages = 1 + pages_per_row * len(starts)
            table = (1 + rng.permutation(num_pages - 1)).astype(np.int32).reshape(len(starts), -1)
            is_unused = np.ones(num_pages, bool)
            for row, num_keys in enumerate(starts + lengths):
                if lengths[row]:
                    is_unused[table[row, : -(-num_keys // page_size)]] = False
            kv_pages = make_pool(num_pages, page_size, case["num_kv_heads"], head_dim)
            kv_pages = jnp.where(is_unused[:, None, None, None, None], jnp.bfloat16(jnp.nan), kv_pages)
            q_shape = (len(starts), num_queries, case["num_kv_heads"], case["num_groups"], head_dim)
            q = jax.random.normal(jax.random.key(int(rng.integers(1 << 30))), q_shape, jnp.bfloat16)
            kernel = jax.jit(functools.partial(mosaic_gpu_prefill.paged_attention, tuning=tuning, **options))
            exact = jax.jit(functools.partial(reference.paged_attention, **options))
            out = kernel(q, kv_pages, table, starts, lengths)
            expected = exact(q.astype(jnp.float32), kv_pages.astype(jnp.float32), table, starts, lengths)
            error = out.astype(jnp.float32) - expected
            rows = jnp.linalg.norm(error.reshape(len(starts), -1), axis=1)
            norms = jnp.linalg.norm(expected.reshape(len(starts), -1), axis=1)
            repeats_equal = all(bool((kernel(q, kv_pages, table, starts, lengths) == out).all()) for _ in range(10))
            alone_equal = all(
                bool((kernel(q, kv_pages, table, starts, lengths * (np.arange(16) == row))[row] == out[row]).all())
                for row in (0, 5, 12)
            )
            is_real = np.arange(num_queries)[None, :] < lengths[:, None]
            emit(
                check=name,
                relative_error=f"{float(jnp.linalg.norm(error) / jnp.linalg.norm(expected)):.2e}",
                worst_row=f"{float((rows / jnp.maximum(norms, 1e-9)).max()):.2e}",
                repeats_equal=repeats_equal,
                alone_equal=alone_equal,
                rest_is_zero=not bool(jnp.where(is_real[:, :, None, None, None], 0, out).any()),
            )
        except Exception as error:  # one case's failure must not hide the others
            emit(check=name, failed=f"{type(error).__name__}: {str(error)[:500]}")


class Work:
    """Chunks of CHUNK new tokens over one pool: a program a tuning, any starts."""

    def __init__(self, *, head_dim=128, num_groups=NUM_HEADS // NUM_KV_HEADS, page_size=16, calls=4):
        self.head_dim, self.num_groups, self.page_size, self.calls = head_dim, num_groups, page_size, calls
        self.num_kv_heads = NUM_KV_HEADS if head_dim < 256 else NUM_KV_HEADS // 2
        self.num_pages = MAX_KEYS // page_size
        self.kv_pages = make_pool(self.num_pages, page_size, self.num_kv_heads, head_dim)
        self.permutation = np.random.default_rng(1).permutation(self.num_pages).astype(np.int32)

    def time(self, tuning: Tuning, query_block: int, *cases: tuple[str, int, int], sliding_window=None) -> None:
        """cases: (name, number of sequences that share CHUNK new tokens evenly, keys before each one's new tokens)."""
        num_rows = CHUNK // query_block
        label = dict(
            heads=self.num_kv_heads * self.num_groups,
            d=self.head_dim,
            page=self.page_size,
            query_block=query_block,
            window=sliding_window,
        )
        label["tuning"] = f"{tuning.block_kv} keys x {tuning.num_stages}" + (
            ", room reused" if tuning.is_query_room_reused else ""
        )
        shape = (num_rows, query_block, self.num_kv_heads, self.num_groups, self.head_dim)
        try:
            # different queries, or XLA would merge the calls
            qs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(self.calls)]

            @jax.jit
            def program(qs, kv_pages, table, starts, lengths):
                options = dict(scale=self.head_dim**-0.5, sliding_window=sliding_window, tuning=tuning)
                arrays = (kv_pages, table, starts, lengths)
                return [mosaic_gpu_prefill.paged_attention(q, *arrays, **options) for q in qs]

            for name, num_sequences, num_before in cases:
                rows_each = num_rows // num_sequences
                starts = num_before + query_block * (np.arange(num_rows, dtype=np.int32) % rows_each)
                lengths = np.full(num_rows, query_block, np.int32)
                pages_each = self.num_pages // num_sequences
                table = np.zeros((num_rows, self.num_pages), np.int32)
                own = self.permutation[: num_sequences * pages_each].reshape(num_sequences, pages_each)
                table[:, :pages_each] = np.repeat(own, rows_each, axis=0)
                arrays = jax.device_put((qs, self.kv_pages, table, starts, lengths))
                jax.block_until_ready(program(*arrays))
                times_s = []
                for _ in range(7):
                    begin = time.perf_counter()
                    jax.block_until_ready([program(*arrays) for _ in range(3)])
                    times_s.append((time.perf_counter() - begin) / 3 / self.calls)
                seconds = statistics.median(times_s)
                num_keys = (starts[:, None] + np.arange(query_block)[None, :] + 1).astype(np.int64)
                if sliding_window is not None:
                    num_keys = np.minimum(num_keys, sliding_window)
                flops = 4 * self.num_kv_heads * self.num_groups * self.head_dim * int(num_keys.sum())
                emit(case=name, us=round(seconds * 1e6, 1), tflops=round(flops / seconds / 1e12), **label)
        except Exception as error:
            emit(case="all", failed=f"{type(error).__name__}: {str(error)[:500]}", **label)


def time_all() -> None:
    alone = tuple((f"{CHUNK} over {n}", 1, n) for n in (0, 8192, 65536))
    work = Work()
    for tuning, query_blocks in (
        (default_tuning(128), (64, 128, 256)),
        (Tuning(block_kv=128, num_stages=2, is_query_room_reused=True), (128,)),
        (Tuning(block_kv=128, num_stages=3, is_query_room_reused=True), (128,)),
        (Tuning(block_kv=64, num_stages=4), (128,)),
    ):
        for query_block in query_blocks:
            work.time(tuning, query_block, *alone)
    prompts = (("32 prompts, last 64 of 2048", 32, 2048 - 64), ("4 prompts, last 512 of 2048", 4, 2048 - 512))
    work.time(default_tuning(128), 64, *prompts)
    work.time(default_tuning(128), 64, *alone, sliding_window=1024)
    del work
    Work(page_size=64).time(default_tuning(128), 128, *alone)
    work = Work(head_dim=64)
    work.time(default_tuning(64), 128, *alone)
    work = Work(head_dim=256)
    work.time(default_tuning(256), 128, *alone)
    work = Work(num_groups=1)
    work.time(default_tuning(128), 128, *alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    args = parser.parse_args()
    emit(device=jax.devices()[0].device_kind, jax=jax.__version__)
    if args.check:
        check()
    if args.time:
        time_all()


if __name__ == "__main__":
    main()
