"""The tuner of the Hopper attention kernels: times a few tiles for each stated shape on the card that is here, and writes
`pallas_kernels/paged_attention/tiles/<device kind>.json`.

python benchmarks/kernels/tune_attention.py [--only decode|prefill] --output FILE

Shapes are those of an 8B model's layer: 32 query and 8 KV heads, head_dim 128, pages of 16, bfloat16 or e4m3 with a scale
a token. Each is timed at two mixes of lengths whose sum counts, and the default stays unless another is 2% faster. With
`--only`, the entries of the other kernel stay as FILE has them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import decode_attention
import jax
import jax.numpy as jnp
import numpy as np
import prefill_attention
from decode_attention import emit

from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill
from pallas_kernels.paged_attention.tuning import HEADER, KINDS, DecodeShape, PrefillShape, Tuning, entry_of, read_tiles

KV_DTYPES = ("bfloat16", "float8_e4m3fn")
DECODE_ROWS = (1, 8, 32, 128, 256)
QUERY_BLOCKS = (32, 64, 128)
LEAST_GAIN = 0.02
PASSES = 2  # over all candidates of a shape; the best time of each counts
SM_COUNT = 132


class Decode:
    """One decode call: all rows at 1,088 keys, and rows spread evenly over lengths up to 4,080."""

    kernel = "mosaic_gpu_decode"
    max_keys = 4080  # so that 256 rows have less than 2**31 values

    def __init__(self, num_rows: int, kv_dtype: str):
        self.case = decode_attention.Case(
            num_rows=num_rows,
            max_keys=self.max_keys,
            kv_dtype=kv_dtype,
            has_scale_a_token=kv_dtype != "bfloat16",
            scale=0.09,
        )
        case = self.case
        sizes = (num_rows, case.num_kv_heads, case.num_queries * case.num_groups, case.head_dim)
        names = ("num_rows", "num_kv_heads", "num_columns", "head_dim")
        self.shape = DecodeShape(**dict(zip(names, sizes, strict=True)), kv_dtype=kv_dtype, page_size=case.page_size)
        self.default = mosaic_gpu_decode.default_tuning(*sizes, jnp.dtype(kv_dtype))
        self.timing = dataclasses.replace(
            decode_attention.Timing.of("tune", case), calls=64 if num_rows <= 8 else 32 if num_rows <= 32 else 8
        )

    def candidates(self) -> list[mosaic_gpu_decode.Tuning]:
        """The first chunks, which are of rows up to 2,048 keys or 4,096, half and twice as large as by default. Those
        further away were slower whenever they were timed, and a program takes more than a second to lower."""
        (up_to, chunk), *longer = self.default.chunks
        chunks = [_joined(((up_to, most), *longer)) for most in (chunk // 2, chunk * 2) if 128 <= most <= 2048]
        return [dataclasses.replace(self.default, chunks=each) for each in chunks]

    def more(self, best: mosaic_gpu_decode.Tuning) -> list[mosaic_gpu_decode.Tuning]:
        """Three and four stages, in about as much shared memory."""
        blocks = best.num_blocks / SM_COUNT
        return [
            dataclasses.replace(best, num_stages=stages, num_blocks=SM_COUNT * max(1, round(blocks * 2 / stages)))
            for stages in (3, 4)
        ]

    def lower(self, tuning: mosaic_gpu_decode.Tuning) -> jax.stages.Lowered:
        case = dataclasses.replace(self.case, tuning=tuple(dataclasses.asdict(tuning).items()))
        return dataclasses.replace(self.timing, case=case).lower()

    def mixes(self) -> list[tuple[Any, ...]]:
        q, pools, table, _, *rest = jax.block_until_ready(self.timing.arrays())
        num_rows = self.case.num_rows
        spread = self.max_keys * np.arange(1, num_rows + 1) // (num_rows + 1)
        lengths = (np.full(num_rows, 1088), np.random.default_rng(3).permutation(spread))
        return [(q, pools, table, jnp.asarray(length - 1, jnp.int32), *rest) for length in lengths]

    def seconds(self, compiled, arrays) -> float:
        return self.timing.seconds(compiled, arrays)


def _joined(chunks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Without the limits between equal chunks, which say nothing."""
    after = (*chunks[1:], (0, 0))
    return tuple(each for each, following in zip(chunks, after, strict=True) if each[1] != following[1])


class Prefill:
    """2,048 new tokens of one prompt, over 0 and over 8,192 earlier keys."""

    kernel = "mosaic_gpu_prefill"

    def __init__(self, work: prefill_attention.Work, query_block: int):
        self.work, self.query_block = work, query_block
        self.default = work.default_tuning()
        self.shape = PrefillShape(
            num_queries=query_block,
            num_groups=work.num_groups,
            head_dim=work.head_dim,
            kv_dtype=str(work.kv_pages.dtype),
            page_size=work.page_size,
        )

    def candidates(self) -> list[mosaic_gpu_prefill.Tuning]:
        small = dict(block_kv=64, num_key_stages=4, num_value_stages=4)
        if self.work.kv_scales is None:
            changes = [dict(num_query_stages=1), dict(num_query_stages=1, num_value_stages=3), small]
        else:
            changes = [small, dict(block_kv=64, num_key_stages=3, num_value_stages=3, num_query_stages=2)]
        return [dataclasses.replace(self.default, **each) for each in changes]

    def more(self, best: mosaic_gpu_prefill.Tuning) -> list[mosaic_gpu_prefill.Tuning]:
        return []

    def lower(self, tuning: mosaic_gpu_prefill.Tuning) -> jax.stages.Lowered:
        return self.work.program(tuning).lower(*jax.eval_shape(lambda: self.work.arrays(self.query_block, 1, 0)))

    def mixes(self) -> list[tuple[Any, ...]]:
        return [self.work.arrays(self.query_block, 1, num_before) for num_before in (0, 8192)]

    def seconds(self, compiled, arrays) -> float:
        return self.work.seconds(compiled, arrays)


def tune(subjects: list[Decode] | list[Prefill]) -> list[dict[str, Any]]:
    """An entry a subject. Nothing is timed while something compiles."""
    times_us: list[dict[Tuning, float]] = [{} for _ in subjects]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        mixes = [pool.submit(subject.mixes) for subject in subjects]

        def time_round(tunings: list[list[Tuning]]) -> None:
            futures = [
                {tuning: pool.submit(lambda s=subject, t=tuning: s.lower(t).compile()) for tuning in each}
                for subject, each in zip(subjects, tunings, strict=True)
            ]
            concurrent.futures.wait([*mixes, *(future for each in futures for future in each.values())])
            for subject, arrays, compiled, times in zip(subjects, mixes, futures, times_us, strict=True):
                for tuning, future in [*compiled.items()] * PASSES:
                    try:
                        us = sum(subject.seconds(future.result(), each) for each in arrays.result()) * 1e6
                    except Exception as error:  # one candidate's failure must not hide the others
                        emit(failed=f"{type(error).__name__}: {str(error)[:300]}", tuning=str(tuning))
                        continue
                    times[tuning] = min(times.get(tuning, us), us)
                    emit(**dataclasses.asdict(subject.shape), us=round(us, 1), tuning=str(tuning))

        time_round([[subject.default, *subject.candidates()] for subject in subjects])
        time_round([s.more(min(times, key=times.__getitem__)) for s, times in zip(subjects, times_us, strict=True)])
    entries = []
    for subject, times in zip(subjects, times_us, strict=True):
        best, default_us = min(times, key=times.__getitem__), times[subject.default]
        if times[best] > (1 - LEAST_GAIN) * default_us:
            best = subject.default
        entries.append(entry_of(subject.shape, best, round(times[best], 1), round(default_us, 1)))
        emit(chosen=entries[-1])
    return entries


def text_of(content: dict[str, Any]) -> str:
    """JSON with a line an entry."""
    lines = [f'"{name}": {json.dumps(content[name])}' for name in HEADER]
    for kernel in KINDS:
        entries = ",\n    ".join(map(json.dumps, content[kernel]))
        lines.append(f'"{kernel}": [\n    {entries}\n  ]' if entries else f'"{kernel}": []')
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    content: dict[str, Any] = {kernel: [] for kernel in KINDS}
    if args.only and args.output.exists():
        content = json.loads(args.output.read_text(encoding="utf-8"))
        if content["device"] != device:
            raise SystemExit(f"--output={args.output} is of {content['device']}, this is {device}")
    command = "python benchmarks/kernels/tune_attention.py --output FILE"
    content |= dict(device=device, jax=jax.__version__, date=datetime.date.today().isoformat(), command=command)
    if args.only != "prefill":
        content[Decode.kernel] = tune([Decode(rows, kv_dtype) for kv_dtype in KV_DTYPES for rows in DECODE_ROWS])
    if args.only != "decode":
        works = [prefill_attention.Work(kv_dtype=each, has_scale_a_token=each != "bfloat16") for each in KV_DTYPES]
        content[Prefill.kernel] = tune([Prefill(work, block) for work in works for block in QUERY_BLOCKS])
    args.output.write_text(text_of(content), encoding="utf-8")
    read_tiles(args.output)


if __name__ == "__main__":
    main()
