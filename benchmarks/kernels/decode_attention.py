"""The Hopper decode kernel on the card: error against float32, repeatability, and time beside the bytes it must read.

python benchmarks/kernels/decode_attention.py [--check] [--time] [--soak_s SECONDS] [--only PART_OF_A_NAME]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import mosaic_gpu_decode, reference
from pallas_kernels.paged_attention.tuning import DecodeShape, read_tiles, tiles_file

POOL_BYTES = 3 << 30
VALUE_SCALE = 1 / 64  # of quantised normal values


def emit(**figures) -> None:
    print(json.dumps(figures), flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Defaults are a layer of an 8B model. `kv_dtype` other than bfloat16 has a scale for all, or one a token and head."""

    num_rows: int = 32
    max_keys: int = 5000
    num_queries: int = 1
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: str = "bfloat16"
    has_scale_a_token: bool = False
    has_sinks: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    scale: float = 0.2
    tuning: tuple[tuple[str, Any], ...] = ()  # what differs from the default

    def options(self) -> dict[str, Any]:
        sizes = dict(
            num_rows=self.num_rows,
            num_kv_heads=self.num_kv_heads,
            num_columns=self.num_queries * self.num_groups,
            head_dim=self.head_dim,
        )
        tiles = read_tiles(tiles_file(jax.devices()[0].device_kind))
        tuning = tiles.get(DecodeShape(**sizes, kv_dtype=self.kv_dtype, page_size=self.page_size))
        if tuning is None:
            tuning = mosaic_gpu_decode.default_tuning(**sizes, dtype=jnp.dtype(self.kv_dtype))
        return dict(self.definition(), tuning=dataclasses.replace(tuning, **dict(self.tuning)))

    def definition(self) -> dict[str, Any]:
        return dict(scale=self.scale, sliding_window=self.sliding_window, softcap=self.softcap)

    def arrays(self, rng: np.random.Generator, starts: np.ndarray) -> tuple[Any, ...]:
        """Random queries, a pool of numbers, and rows of random pages that begin at `starts`; all queries are real."""
        pages_per_row = -(-self.max_keys // self.page_size)
        num_pages = self.num_rows * pages_per_row + 1
        keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 4)
        q_shape = (self.num_rows, self.num_queries, self.num_kv_heads, self.num_groups, self.head_dim)
        q = jax.random.normal(keys[0], q_shape, jnp.bfloat16)
        kv_pages = _normal(keys[1], (num_pages, 2, self.page_size, self.num_kv_heads, self.head_dim), self.kv_dtype)
        kv_scales = sinks = None
        if self.has_scale_a_token:
            shape = (num_pages, 2, self.num_kv_heads, self.page_size)
            kv_scales = VALUE_SCALE * 2 ** jax.random.uniform(keys[2], shape, jnp.float32, -2, 2)
        elif self.kv_dtype != "bfloat16":
            kv_scales = jnp.array([VALUE_SCALE, 2 * VALUE_SCALE], jnp.float32)
        if self.has_sinks:
            sinks = 2 + 2 * jax.random.normal(keys[3], (self.num_kv_heads, self.num_groups), jnp.float32)
        page_table = (1 + rng.permutation(num_pages - 1)).astype(np.int32).reshape(self.num_rows, pages_per_row)
        lengths = jnp.full(self.num_rows, self.num_queries, jnp.int32)
        return q, kv_pages, jnp.asarray(page_table), jnp.asarray(starts, jnp.int32), lengths, kv_scales, sinks


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    values = jax.random.normal(key, shape, jnp.bfloat16)
    if dtype == "int8":
        return jnp.clip(jnp.round(values / VALUE_SCALE * 0.5), -127, 127).astype(jnp.int8)
    return (values if dtype == "bfloat16" else values / VALUE_SCALE).astype(jnp.dtype(dtype))


E4M3 = "float8_e4m3fn"
CHECKS = {
    "d128 g4, sinks": Case(has_sinks=True),
    "d64 g8, sinks, window": Case(head_dim=64, num_groups=8, has_sinks=True, sliding_window=300),
    "d80": Case(head_dim=80),
    "d96, page 64": Case(head_dim=96, page_size=64),
    "d256 g2, soft cap": Case(head_dim=256, num_groups=2, softcap=20.0),
    "g16, 4 queries, page 128": Case(num_groups=16, num_queries=4, num_kv_heads=2, page_size=128),
    "e4m3": Case(kv_dtype=E4M3),
    "e4m3, a scale a token": Case(kv_dtype=E4M3, has_scale_a_token=True),
    "e4m3, page 64, a scale a token, soft cap": Case(kv_dtype=E4M3, page_size=64, has_scale_a_token=True, softcap=20.0),
    "e4m3, d64 g8, sinks, 2 queries": Case(kv_dtype=E4M3, head_dim=64, num_groups=8, has_sinks=True, num_queries=2),
    "int8, d256 g2, a scale a token, page 32": Case(
        kv_dtype="int8", head_dim=256, num_groups=2, has_scale_a_token=True, page_size=32
    ),
    "int8": Case(kv_dtype="int8"),
    "e4m3 to 131,072 keys, a scale a token": Case(
        num_rows=2, max_keys=131072, kv_dtype=E4M3, has_scale_a_token=True, scale=0.02
    ),
}


def check_one(name: str, case: Case, kernel, exact, arrays) -> None:
    q, kv_pages, table, starts, lengths, kv_scales, sinks = arrays
    unused, checked = (5, (3, 8, 20)) if case.num_rows == 32 else (None, (0, 1))
    if unused is not None:
        lengths = lengths.at[unused].set(0)
    out = kernel(q, kv_pages, table, starts, lengths, kv_scales, sinks)
    wide_pages = kv_pages.astype(jnp.float32) if kv_scales is None else kv_pages
    expected = exact(q.astype(jnp.float32), wide_pages, table, starts, lengths, kv_scales, sinks)
    error = out.astype(jnp.float32) - expected
    rows = jnp.linalg.norm(error.reshape(case.num_rows, -1), axis=1)
    norms = jnp.linalg.norm(expected.reshape(case.num_rows, -1), axis=1)
    same = all(bool((kernel(q, kv_pages, table, starts, lengths, kv_scales, sinks) == out).all()) for _ in range(10))
    alone = True
    for row in checked:
        only = jnp.zeros_like(lengths).at[row].set(lengths[row])
        alone &= bool((kernel(q, kv_pages, table, starts, only, kv_scales, sinks)[row] == out[row]).all())
    emit(
        check=name,
        relative_error=f"{float(jnp.linalg.norm(error) / jnp.linalg.norm(expected)):.2e}",
        worst_row=f"{float((rows / jnp.maximum(norms, 1e-9)).max()):.2e}",
        repeats_equal=same,
        alone_equal=alone,
        unused_row_zero=unused is None or not bool(out[unused].any()),
    )


def check(cases: dict[str, Case]) -> None:
    """Relative error against float32 on the same values, equal bits over 10 runs and alone."""
    rng = np.random.default_rng()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        started = []
        for name, case in cases.items():
            ends = [0, 1, 14, 15, 62, 63, 64, 255, 1023, *rng.integers(1, case.max_keys - 8, 23)]
            arrays = case.arrays(rng, np.asarray(ends if case.num_rows == 32 else [1023, case.max_keys - 1]))
            kernel = jax.jit(functools.partial(mosaic_gpu_decode.paged_attention, **case.options()))
            exact = jax.jit(functools.partial(reference.paged_attention, **case.definition()))
            q, kv_pages, *rest = jax.eval_shape(lambda arrays=arrays: arrays)
            wide_pages = kv_pages.update(dtype=jnp.float32) if case.kv_dtype == "bfloat16" else kv_pages
            lowered = kernel.lower(q, kv_pages, *rest), exact.lower(q.update(dtype=jnp.float32), wide_pages, *rest)
            started.append((name, case, arrays, [pool.submit(each.compile) for each in lowered]))
        for name, case, arrays, futures in started:
            try:
                check_one(name, case, futures[0].result(), futures[1].result(), arrays)
            except Exception as error:  # one variant's failure must not hide the others
                emit(check=name, failed=f"{type(error).__name__}: {str(error)[:500]}")


def _of(keys: int, rows: int, **case) -> Case:
    return Case(num_rows=rows, max_keys=keys, scale=0.09, **case)


RAGGED = "128 ragged to 4096"
LARGE = functools.partial(_of, 4096, 128)
TIMES = {
    "128 x 4096": LARGE(),
    "256 x 1024": _of(1024, 256),
    "256 x 1088": _of(1088, 256),
    RAGGED: LARGE(),
    "128 x 1088": _of(1088, 128),
    "1 x 4096": _of(4096, 1),
    "1 x 131072": _of(131072, 1),
    "128 x 4096 d80": LARGE(head_dim=80),
    "128 x 4096 d96": LARGE(head_dim=96),
    "128 x 4096 d64": LARGE(head_dim=64),
    "64 x 4096 d256": _of(4096, 64, head_dim=256),
    "128 x 4096 g1": LARGE(num_groups=1),
    "128 x 4096 g7": LARGE(num_groups=7),
    "128 x 4096 g8, sinks": LARGE(num_groups=8, has_sinks=True),
    "128 x 4096 g16": LARGE(num_groups=16),
    "128 x 4096 g32": LARGE(num_groups=32),
    "128 x 4096 8 queries": LARGE(num_queries=8),
    "128 x 4096 e4m3": LARGE(kv_dtype=E4M3),
    "128 x 4096 e4m3 page 64": LARGE(kv_dtype=E4M3, page_size=64),
    "128 x 4096 e4m3, a scale a token": LARGE(kv_dtype=E4M3, has_scale_a_token=True),
    "128 x 4096 int8 page 64, a scale a token": LARGE(kv_dtype="int8", page_size=64, has_scale_a_token=True),
    "256 x 1024 e4m3": _of(1024, 256, kv_dtype=E4M3),
    "1 x 4096 e4m3": _of(4096, 1, kv_dtype=E4M3),
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """A chain of `calls`, each with the queries that the one before gave, over pools in turn."""

    name: str
    case: Case
    calls: int
    num_pools: int  # more than the L2 holds

    @staticmethod
    def of(name: str, case: Case) -> Timing:
        calls = 64 if case.num_rows == 1 and case.max_keys < 10_000 else 8
        pages = jax.eval_shape(lambda: case.arrays(np.random.default_rng(1), case_starts(name, case))[1])
        return Timing(name, case, calls, max(1, min(calls, -(-POOL_BYTES // (pages.size * pages.dtype.itemsize)))))

    def chain(self, q, pools, table, starts, lengths, kv_scales, sinks):
        for i in range(self.calls):
            pool = pools[i % self.num_pools]
            q = mosaic_gpu_decode.paged_attention(
                q, pool, table, starts, lengths, kv_scales, sinks, **self.case.options()
            )
        return q

    def arrays(self):
        q, kv_pages, *rest = self.case.arrays(np.random.default_rng(1), case_starts(self.name, self.case))
        return q, [kv_pages, *(jnp.copy(kv_pages) for _ in range(self.num_pools - 1))], *rest

    def lower(self) -> jax.stages.Lowered:
        return jax.jit(self.chain).lower(*jax.eval_shape(self.arrays))

    def seconds(self, compiled, arrays) -> float:
        """Of one call of the chain."""
        jax.block_until_ready(compiled(*arrays))
        times_s = []
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(3):
                out = compiled(*arrays)
            jax.block_until_ready(out)
            times_s.append((time.perf_counter() - begin) / 3 / self.calls)
        return statistics.median(times_s)

    def run(self, compiled) -> None:
        seconds = self.seconds(compiled, jax.block_until_ready(self.arrays()))
        num_keys = int((case_starts(self.name, self.case) + self.case.num_queries).sum())
        value_bytes = jnp.dtype(self.case.kv_dtype).itemsize
        num_bytes = num_keys * 2 * self.case.num_kv_heads * self.case.head_dim * value_bytes
        tuning = self.case.options()["tuning"]
        emit(
            case=self.name,
            blocks=tuning.num_blocks,
            stages=tuning.num_stages,
            us=round(seconds * 1e6, 1),
            tb_per_s=round(num_bytes / seconds / 1e12, 3),
        )


def case_starts(name: str, case: Case) -> np.ndarray:
    if name == RAGGED:
        return np.random.default_rng(3).integers(0, case.max_keys, case.num_rows)
    return np.full(case.num_rows, case.max_keys - case.num_queries)


def time_all(cases: dict[str, Case]) -> None:
    timings = [Timing.of(name, case) for name, case in cases.items()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = [(timing, pool.submit(timing.lower().compile)) for timing in timings]
        for timing, future in compiled:
            try:
                timing.run(future.result())
            except Exception as error:
                emit(case=timing.name, failed=f"{type(error).__name__}: {str(error)[:500]}")


def soak(seconds: float) -> None:
    """Random lengths over poisoned pools, run 21 times each and compared bit for bit, and with float32; in turn in
    bfloat16 and in e4m3 with a scale a token."""
    rng = np.random.default_rng()
    begin, turns, worst = time.perf_counter(), 0, 0.0
    subjects = []
    for case in (_of(4096, 64), _of(4096, 64, kv_dtype=E4M3, has_scale_a_token=True)):
        kernel = jax.jit(functools.partial(mosaic_gpu_decode.paged_attention, **case.options()))
        exact = jax.jit(functools.partial(reference.paged_attention, **case.definition()))
        subjects.append((kernel, exact, case.arrays(rng, np.zeros(64))))

    @jax.jit
    def poison(array, dead):
        nan = jnp.array(jnp.nan, array.dtype)
        return jnp.where(dead.reshape(-1, *(1,) * (array.ndim - 1)), nan, array)

    while time.perf_counter() - begin < seconds:
        kernel, exact, (q, kv_pages, table, _, _, kv_scales, _) = subjects[turns % 2]
        owned = np.asarray(table)
        starts = rng.integers(0, 4096, 64).astype(np.int32)
        lengths = rng.integers(0, 2, 64).astype(np.int32)
        dead = np.ones(kv_pages.shape[0], bool)
        for row in range(64):
            if lengths[row]:
                dead[owned[row, : starts[row] // 16 + 1]] = False
        pool = poison(kv_pages, dead)
        scales = None if kv_scales is None else poison(kv_scales, dead)
        out = kernel(q, pool, table, starts, lengths, scales)
        for _ in range(20):
            again = kernel(q, pool, table, starts, lengths, scales)
            if not bool((again == out).all()):
                raise SystemExit(f"turn {turns}: a repeat differs")
        wide_pool = pool.astype(jnp.float32) if scales is None else pool
        expected = exact(q.astype(jnp.float32), wide_pool, table, starts, lengths, scales)
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
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    emit(device=jax.devices()[0].device_kind, jax=jax.__version__)
    if args.check:
        check({name: case for name, case in CHECKS.items() if args.only in name})
    if args.time:
        time_all({name: case for name, case in TIMES.items() if args.only in name})
    if args.soak_s:
        soak(args.soak_s)


if __name__ == "__main__":
    main()
