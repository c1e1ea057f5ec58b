"""The Hopper decode kernel on the card: error against float32, repeatability, and time beside the bytes it must read.

python benchmarks/kernels/decode_attention.py [--check] [--time] [--soak_s SECONDS]
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

from pallas_kernels.paged_attention import mosaic_gpu_decode, reference
from pallas_kernels.paged_attention.mosaic_gpu_decode import Tuning

NUM_KV_HEADS, HEAD_DIM = 8, 128
POOL_BYTES = 3 << 30


def emit(**figures) -> None:
    print(json.dumps(figures), flush=True)


def make_arrays(
    rng, starts, *, num_queries=1, num_kv_heads=NUM_KV_HEADS, num_groups=4, head_dim=HEAD_DIM, page_size=16
):
    """Random queries, a pool of numbers, and rows of random pages; all lengths are num_queries."""
    starts = np.asarray(starts, np.int32)
    num_rows = len(starts)
    pages_per_row = -(-int(starts.max() + num_queries) // page_size)
    num_pages = num_rows * pages_per_row + 1
    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 2)
    q = jax.random.normal(keys[0], (num_rows, num_queries, num_kv_heads, num_groups, head_dim), jnp.bfloat16)
    kv_pages = jax.random.normal(keys[1], (num_pages, 2, page_size, num_kv_heads, head_dim), jnp.bfloat16)
    page_table = (1 + rng.permutation(num_pages - 1)).astype(np.int32).reshape(num_rows, pages_per_row)
    lengths = np.full(num_rows, num_queries, np.int32)
    return q, kv_pages, jnp.asarray(page_table), jnp.asarray(starts), jnp.asarray(lengths)


CHECKS = {
    "d128 g4": {},
    "d64 g8": dict(head_dim=64, num_groups=8),
    "d256 g1": dict(head_dim=256, num_groups=1),
    "g7 page 64": dict(num_groups=7, page_size=64),
    "g16 page 128": dict(num_groups=16, num_kv_heads=2, page_size=128),
    "g32": dict(num_groups=32, num_kv_heads=1),
    "4 queries": dict(num_queries=4),
    "8 queries g8": dict(num_queries=8, num_groups=8),
    "window": dict(sliding_window=300),
    "softcap": dict(softcap=20.0),
}


def check() -> None:
    """Relative error against float32 on the same bf16 arrays, equal bits over 10 runs and alone."""
    rng = np.random.default_rng()
    for name, case in CHECKS.items():
        case = dict(case)
        options = dict(scale=0.2, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
        try:
            starts = [0, 1, 14, 15, 62, 63, 64, 255, 1023, *rng.integers(1, 5000, 23)]
            q, kv_pages, table, starts, lengths = make_arrays(rng, starts, **case)
            lengths = lengths.at[5].set(0)
            kernel = jax.jit(functools.partial(mosaic_gpu_decode.paged_attention, **options))
            out = kernel(q, kv_pages, table, starts, lengths)
            wide = functools.partial(reference.paged_attention, **options)
            expected = jax.jit(wide)(q.astype(jnp.float32), kv_pages.astype(jnp.float32), table, starts, lengths)
            error = out.astype(jnp.float32) - expected
            rows = jnp.linalg.norm(error.reshape(len(starts), -1), axis=1)
            norms = jnp.linalg.norm(expected.reshape(len(starts), -1), axis=1)
            same = all(bool((kernel(q, kv_pages, table, starts, lengths) == out).all()) for _ in range(10))
            alone = all(
                bool(
                    (
                        kernel(q, kv_pages, table, starts, jnp.zeros_like(lengths).at[r].set(lengths[r]))[r] == out[r]
                    ).all()
                )
                for r in (3, 8, 20)
            )
            emit(
                check=name,
                relative_error=f"{float(jnp.linalg.norm(error) / jnp.linalg.norm(expected)):.2e}",
                worst_row=f"{float((rows / jnp.maximum(norms, 1e-9)).max()):.2e}",
                repeats_equal=same,
                alone_equal=alone,
                unused_row_zero=not bool(out[5].any()),
            )
        except Exception as error:  # one variant's failure must not hide the others
            emit(check=name, failed=f"{type(error).__name__}: {str(error)[:500]}")


def time_case(name: str, starts, *, tuning: Tuning, calls: int, **case) -> None:
    """Seconds of one call in a chain of `calls`, each with the queries that the one before gave, over pools in turn."""
    try:
        rng = np.random.default_rng(1)
        q, kv_pages, table, starts, lengths = make_arrays(rng, starts, **case)
        num_pools = max(1, min(calls, -(-POOL_BYTES // kv_pages.nbytes)))  # more than the L2 holds
        pools = [kv_pages] + [kv_pages + jnp.bfloat16(i) for i in range(1, num_pools)]

        @jax.jit
        def chain(q, pools, table, starts, lengths):
            for i in range(calls):
                q = mosaic_gpu_decode.paged_attention(
                    q, pools[i % num_pools], table, starts, lengths, scale=0.09, tuning=tuning
                )
            return q

        compiled = chain.lower(q, pools, table, starts, lengths).compile()
        jax.block_until_ready(compiled(q, pools, table, starts, lengths))
        times_s = []
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(3):
                out = compiled(q, pools, table, starts, lengths)
            jax.block_until_ready(out)
            times_s.append((time.perf_counter() - begin) / 3 / calls)
        seconds = statistics.median(times_s)
        num_keys = int((starts + lengths).sum())
        num_bytes = num_keys * 2 * kv_pages.shape[3] * kv_pages.shape[4] * kv_pages.dtype.itemsize
        emit(
            case=name,
            blocks=tuning.num_blocks,
            stages=tuning.num_stages,
            us=round(seconds * 1e6, 1),
            tb_per_s=round(num_bytes / seconds / 1e12, 3),
        )
    except Exception as error:
        emit(case=name, failed=f"{type(error).__name__}: {str(error)[:500]}")


CHUNKS = {
    "512 to 2048, 1024 to 65536 (default)": Tuning.chunks,
    "256 to 2048, 512 to 16384": ((2048, 256), (16384, 512), (65536, 1024), (1 << 30, 2048)),
    "512 to 16384": ((16384, 512), (65536, 1024), (1 << 30, 2048)),
    "1024 to 65536": ((65536, 1024), (1 << 30, 2048)),
    "256 to 16384": ((16384, 256), (65536, 1024), (1 << 30, 2048)),
}


def time_all() -> None:
    ragged = np.random.default_rng(3).integers(0, 4096, 128)
    for label, chunks in CHUNKS.items():
        tuning = Tuning(chunks=chunks)
        for rows, keys in ((1, 1088), (1, 4096), (1, 131072), (32, 1088), (128, 1088), (256, 1088), (128, 4096)):
            calls = 64 if rows == 1 and keys < 10_000 else 8
            time_case(f"{rows} x {keys}, chunks {label}", [keys - 1] * rows, tuning=tuning, calls=calls)
        time_case(f"128 ragged to 4096, chunks {label}", ragged, tuning=tuning, calls=8)
    for tuning in (Tuning(num_blocks=528), Tuning(num_stages=3, num_blocks=264)):
        time_case("256 x 1088", [1087] * 256, tuning=tuning, calls=8)
    default = Tuning()
    time_case("128 x 4096 d64", [4095] * 128, tuning=default, calls=8, head_dim=64)
    time_case("64 x 4096 d256", [4095] * 64, tuning=Tuning(num_blocks=132), calls=8, head_dim=256)
    for num_groups in (1, 8, 16, 32):
        time_case(f"128 x 4096 g{num_groups}", [4095] * 128, tuning=default, calls=8, num_groups=num_groups)
    time_case("128 x 4096 8 queries", [4088] * 128, tuning=default, calls=8, num_queries=8)


def soak(seconds: float) -> None:
    """Random lengths over a poisoned pool, run 21 times each and compared bit for bit, and with float32."""
    rng = np.random.default_rng()
    kernel = jax.jit(functools.partial(mosaic_gpu_decode.paged_attention, scale=0.2))
    exact = jax.jit(functools.partial(reference.paged_attention, scale=0.2))
    q, kv_pages, table, _, _ = make_arrays(rng, [4095] * 64)
    owned = np.asarray(table)
    begin, turns, worst = time.perf_counter(), 0, 0.0
    poison = jax.jit(lambda pool, dead: jnp.where(dead[:, None, None, None, None], jnp.nan, pool))
    while time.perf_counter() - begin < seconds:
        starts = rng.integers(0, 4096, 64).astype(np.int32)
        lengths = rng.integers(0, 2, 64).astype(np.int32)
        dead = np.ones(kv_pages.shape[0], bool)
        for row in range(64):
            if lengths[row]:
                dead[owned[row, : starts[row] // 16 + 1]] = False
        pool = poison(kv_pages, dead)
        out = kernel(q, pool, table, starts, lengths)
        for _ in range(20):
            again = kernel(q, pool, table, starts, lengths)
            if not bool((again == out).all()):
                raise SystemExit(f"turn {turns}: a repeat differs")
        expected = exact(q.astype(jnp.float32), kv_pages.astype(jnp.float32), table, starts, lengths)
        error = float(jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
        worst, turns = max(worst, error), turns + 1
        if not error < 4e-3:
            raise SystemExit(f"turn {turns}: error {error}")
    emit(soak_s=round(time.perf_counter() - begin), turns=turns, runs=21 * turns, worst_relative_error=f"{worst:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--soak_s", type=float, default=0.0)
    args = parser.parse_args()
    emit(device=jax.devices()[0].device_kind, jax=jax.__version__)
    if args.check:
        check()
    if args.time:
        time_all()
    if args.soak_s:
        soak(args.soak_s)


if __name__ == "__main__":
    main()
