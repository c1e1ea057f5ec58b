"""The Hopper prefill kernel on the card: error against float32, repeatability, and time beside the work it must do.

python benchmarks/kernels/prefill_attention.py [--check] [--time] [--only SUBSTRING]

Both together take about 90 s on the card, most of it compilation; `--only` runs the cases whose name has the substring.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import mosaic_gpu_prefill, reference
from pallas_kernels.paged_attention.mosaic_gpu_prefill import Tuning, default_tuning

NUM_HEADS, NUM_KV_HEADS = 32, 8
CHUNK = 2048  # new tokens a step


START_S = time.perf_counter()


def emit(**figures) -> None:
    print(json.dumps(figures | dict(elapsed_s=round(time.perf_counter() - START_S, 1))), flush=True)


def make_pool(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: str, has_scale_a_token: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Pages of about normal values, and their scales if they are quantised."""
    shape = (num_pages, 2, page_size, num_kv_heads, head_dim)
    steps = {"bfloat16": 1, "float8_e4m3fn": 64, "int8": 30}[kv_dtype]  # a standard deviation

    @jax.jit
    def make():
        values = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16) * steps
        if kv_dtype == "int8":
            values = jnp.clip(jnp.rint(values), -127, 127)
        if kv_dtype == "bfloat16":
            return values, None
        scales_shape = (num_pages, 2, num_kv_heads, page_size) if has_scale_a_token else (2,)
        return values.astype(kv_dtype), jax.random.uniform(jax.random.key(2), scales_shape, minval=0.5) * 1.3 / steps

    return make()


TOKEN = dict(has_scale_a_token=True)
CHECKS: dict[str, dict[str, Any]] = {
    "d128 g4": {},
    "d128 g4, 64 queries, one query stage, sinks": dict(
        num_queries=64, has_sinks=True, tuning=dict(num_value_stages=3, num_query_stages=1)
    ),
    "d128 g4, 64 keys": dict(tuning=dict(block_kv=64, num_key_stages=4, num_value_stages=4)),
    "d64 g8 page 64, window, sinks": dict(head_dim=64, page_size=64, num_groups=8, sliding_window=128, has_sinks=True),
    "d80 g1 page 8": dict(head_dim=80, num_groups=1, page_size=8),
    "d96 g4 page 32": dict(head_dim=96, page_size=32),
    "d256 g4 page 128, softcap": dict(head_dim=256, page_size=128, softcap=20.0),
    "g7, 16 queries, window": dict(num_groups=7, num_queries=16, sliding_window=300),
    "d128 g4 e4m3": dict(kv_dtype="float8_e4m3fn"),
    "d128 g4 e4m3, a scale a token": dict(kv_dtype="float8_e4m3fn", **TOKEN),
    "d64 g4 int8 page 8, a scale a token": dict(kv_dtype="int8", head_dim=64, page_size=8, **TOKEN),
    "d128 g4 int8 page 128": dict(kv_dtype="int8", page_size=128),
    "d256 g2 int8, a scale a token": dict(kv_dtype="int8", head_dim=256, num_groups=2, **TOKEN),
}


def check(only: str) -> None:
    """Relative error against float32 on the same arrays, equal bits over 10 runs and alone, over NaN pages."""
    rng = np.random.default_rng()
    for name, case in CHECKS.items():
        if only not in name:
            continue
        case = dict[str, Any](num_queries=128, num_kv_heads=2, num_groups=4, head_dim=128, page_size=16) | case
        kv_dtype, has_scale_a_token = case.get("kv_dtype", "bfloat16"), case.get("has_scale_a_token", False)
        options = dict(scale=0.2, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
        num_queries, page_size, head_dim = case["num_queries"], case["page_size"], case["head_dim"]
        tuning = dataclasses.replace(
            default_tuning(head_dim, is_quantised=kv_dtype != "bfloat16"), **case.get("tuning", {})
        )
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
            kv_pages, kv_scales = make_pool(
                num_pages, page_size, case["num_kv_heads"], head_dim, kv_dtype, has_scale_a_token
            )
            poison = jnp.asarray(127 if kv_dtype == "int8" else jnp.nan, kv_pages.dtype)
            kv_pages = jnp.where(is_unused[:, None, None, None, None], poison, kv_pages)
            if kv_scales is not None and has_scale_a_token:
                kv_scales = jnp.where(is_unused[:, None, None, None], jnp.nan, kv_scales)
            sinks_shape = (case["num_kv_heads"], case["num_groups"])
            sinks = 4 + 2 * jax.random.normal(jax.random.key(3), sinks_shape) if case.get("has_sinks") else None
            q_shape = (len(starts), num_queries, case["num_kv_heads"], case["num_groups"], head_dim)
            q = jax.random.normal(jax.random.key(int(rng.integers(1 << 30))), q_shape, jnp.bfloat16)
            kernel = jax.jit(functools.partial(mosaic_gpu_prefill.paged_attention, tuning=tuning, **options))
            exact = jax.jit(functools.partial(reference.paged_attention, **options))
            optional = (kv_scales, sinks)
            out = kernel(q, kv_pages, table, starts, lengths, *optional)
            exact_pages = kv_pages.astype(jnp.float32) if kv_scales is None else kv_pages
            expected = exact(q.astype(jnp.float32), exact_pages, table, starts, lengths, *optional)
            error = out.astype(jnp.float32) - expected
            rows = jnp.linalg.norm(error.reshape(len(starts), -1), axis=1)
            norms = jnp.linalg.norm(expected.reshape(len(starts), -1), axis=1)
            repeats_equal = all(
                bool((kernel(q, kv_pages, table, starts, lengths, *optional) == out).all()) for _ in range(10)
            )
            alone_equal = all(
                bool((kernel(q, kv_pages, table, starts, alone, *optional)[row] == out[row]).all())
                for row, alone in ((row, lengths * (np.arange(16) == row)) for row in (0, 5, 12))
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

    def __init__(
        self,
        *,
        head_dim=128,
        num_groups=NUM_HEADS // NUM_KV_HEADS,
        page_size=16,
        kv_dtype="bfloat16",
        has_scale_a_token=False,
        max_keys=8192 + CHUNK,
        calls=4,
    ):
        self.head_dim, self.num_groups, self.page_size, self.calls = head_dim, num_groups, page_size, calls
        self.kv_dtype = kv_dtype + (", a scale a token" if has_scale_a_token else "")
        self.num_kv_heads = NUM_KV_HEADS if head_dim < 256 else NUM_KV_HEADS // 2
        self.num_pages = max_keys // page_size
        pool_shape = (self.num_pages, page_size, self.num_kv_heads, head_dim)
        self.kv_pages, self.kv_scales = make_pool(*pool_shape, kv_dtype, has_scale_a_token)
        self.permutation = np.random.default_rng(1).permutation(self.num_pages).astype(np.int32)

    def default_tuning(self) -> Tuning:
        return default_tuning(self.head_dim, is_quantised=self.kv_scales is not None)

    def program(self, tuning: Tuning, sliding_window: int | None = None):
        @jax.jit
        def program(qs, kv_pages, table, starts, lengths, kv_scales):
            options = dict(scale=self.head_dim**-0.5, sliding_window=sliding_window, tuning=tuning)
            arrays = (kv_pages, table, starts, lengths, kv_scales)
            return [mosaic_gpu_prefill.paged_attention(q, *arrays, **options) for q in qs]

        return program

    def arrays(self, query_block: int, num_sequences: int, num_before: int) -> tuple[Any, ...]:
        """Of the program: `num_sequences` that share CHUNK new tokens evenly, over `num_before` keys each."""
        num_rows = CHUNK // query_block
        shape = (num_rows, query_block, self.num_kv_heads, self.num_groups, self.head_dim)
        # different queries, or XLA would merge the calls
        qs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(self.calls)]
        rows_each = num_rows // num_sequences
        starts = num_before + query_block * (np.arange(num_rows, dtype=np.int32) % rows_each)
        lengths = np.full(num_rows, query_block, np.int32)
        pages_each = self.num_pages // num_sequences
        table = np.zeros((num_rows, self.num_pages), np.int32)
        own = self.permutation[: num_sequences * pages_each].reshape(num_sequences, pages_each)
        table[:, :pages_each] = np.repeat(own, rows_each, axis=0)
        return jax.device_put((qs, self.kv_pages, table, starts, lengths, self.kv_scales))

    def seconds(self, program, arrays) -> float:
        """Of one of the program's calls."""
        jax.block_until_ready(program(*arrays))
        times_s = []
        for _ in range(7):
            begin = time.perf_counter()
            jax.block_until_ready([program(*arrays) for _ in range(3)])
            times_s.append((time.perf_counter() - begin) / 3 / self.calls)
        return statistics.median(times_s)

    def time(self, tuning: Tuning, query_block: int, *cases: tuple[str, int, int], sliding_window=None) -> None:
        """cases: (name, number of sequences that share CHUNK new tokens evenly, keys before each one's new tokens)."""
        label = dict(
            heads=self.num_kv_heads * self.num_groups,
            d=self.head_dim,
            page=self.page_size,
            query_block=query_block,
            window=sliding_window,
            kv=self.kv_dtype,
            tuning=dataclasses.asdict(tuning),
        )
        try:
            program = self.program(tuning, sliding_window)
            for name, num_sequences, num_before in cases:
                arrays = self.arrays(query_block, num_sequences, num_before)
                seconds = self.seconds(program, arrays)
                starts = np.asarray(arrays[3])
                num_keys = (starts[:, None] + np.arange(query_block)[None, :] + 1).astype(np.int64)
                if sliding_window is not None:
                    num_keys = np.minimum(num_keys, sliding_window)
                flops = 4 * self.num_kv_heads * self.num_groups * self.head_dim * int(num_keys.sum())
                emit(case=name, us=round(seconds * 1e6, 1), tflops=round(flops / seconds / 1e12), **label)
        except Exception as error:
            emit(case="all", failed=f"{type(error).__name__}: {str(error)[:500]}", **label)


def time_all(only: str) -> None:
    short, long = ((f"{CHUNK} over {n}", 1, n) for n in (0, 8192))
    longest = (f"{CHUNK} over 65536", 1, 65536)
    prompts = (("32 prompts, last 64 of 2048", 32, 2048 - 64), ("4 prompts, last 512 of 2048", 4, 2048 - 512))
    if only in "bfloat16 128":
        work = Work(max_keys=65536 + CHUNK)
        default = work.default_tuning()
        work.time(default, 64, short, long, longest, *prompts)
        work.time(default, 128, short, long)
        for tuning in (
            dataclasses.replace(default, num_query_stages=1),
            dataclasses.replace(default, num_query_stages=1, num_value_stages=3),
            dataclasses.replace(default, block_kv=64, num_key_stages=4, num_value_stages=4),
        ):
            work.time(tuning, 64, short, long)
        work.time(default, 64, long, sliding_window=1024)
        del work
    for head_dim, kv_dtype, options in (
        (128, "float8_e4m3fn", dict(page_size=16)),
        (128, "float8_e4m3fn", dict(page_size=64, **TOKEN)),
        (128, "int8", dict(page_size=16, **TOKEN)),
        (64, "bfloat16", {}),
        (96, "bfloat16", {}),
        (256, "bfloat16", {}),
        (256, "float8_e4m3fn", {}),
        (128, "bfloat16", dict(num_groups=1)),
    ):
        if only in f"{kv_dtype} {head_dim}":
            work = Work(head_dim=head_dim, kv_dtype=kv_dtype, **options)
            work.time(work.default_tuning(), 64, short, long)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    emit(device=jax.devices()[0].device_kind, jax=jax.__version__)
    if args.check:
        check(args.only)
    if args.time:
        time_all(args.only)


if __name__ == "__main__":
    main()
