"""`headrace bench decode|prefill|mixed|batching`: figures as JSON lines.

Prompts are token ids drawn with a fixed seed, so that another engine can run exactly the same work. A decode figure is
(time of `steps` + 1 tokens - time of 1 token) / `steps`: queueing and prefill cancel out.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.checks import ConfigError
from serving.request import SamplingParams

DECODE_CASES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (128, 4096))
PREFILL_CASES = ((1, 4096), (32, 2048))
MIXED_REQUESTS = 512
DECODE_STEPS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrace bench`; engine flags are added by the command line itself."""
    parser.add_argument("figure", choices=("decode", "prefill", "mixed", "batching"))
    parser.add_argument("--batch", type=int, action="append", help="decode: sequences at once (repeatable)")
    parser.add_argument("--context", type=int, action="append", help="prompt tokens, one for each --batch")
    parser.add_argument("--steps", type=int, default=DECODE_STEPS, help="decode: tokens timed for each sequence")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case; the median is reported")
    parser.add_argument("--num_requests", type=int, default=MIXED_REQUESTS, help="mixed, batching: requests in all")
    parser.add_argument("--lengths", metavar="F.csv", help="batching: input_tokens,output_tokens of each request")


def random_prompts(rng: np.random.Generator, count: int, length: int, vocab_size: int) -> list[dict[str, list[int]]]:
    """`count` prompts of `length` random token ids."""
    return [{"prompt_token_ids": rng.integers(100, vocab_size - 100, length).tolist()} for _ in range(count)]


def mixed_lengths(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """ShareGPT-like lengths: lognormal input (median about 500) and output (about 200), clipped; tokens."""
    num_input = np.clip(np.exp(rng.normal(6.2, 0.9, count)), 16, 4096).astype(int)
    num_output = np.clip(np.exp(rng.normal(5.3, 0.7, count)), 16, 1024).astype(int)
    return num_input, num_output


class Bench:
    """Runs cases on an LLM and prints one JSON object a figure."""

    def __init__(self, llm: Any, name: str, repeats: int):
        self.llm, self.name, self.repeats = llm, name, repeats
        self.vocab_size = llm.engine.model_config.vocab_size

    def _run_s(self, prompts: Sequence[dict], num_output: int | Sequence[int]) -> float:
        lengths = [num_output] * len(prompts) if isinstance(num_output, int) else num_output
        params = [SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True) for n in lengths]
        started_s = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started_s

    def _check_cases(self, cases: Sequence[tuple[int, int]], num_output: int) -> None:
        """A case that does not run at once would give figures of something else."""
        config, room = self.llm.engine.config, self.llm.engine.max_model_len
        for batch, context in cases:
            if batch > config.max_num_seqs:
                raise ConfigError(f"--batch={batch} is above EngineConfig.max_num_seqs={config.max_num_seqs}")
            if context + num_output > room:
                raise ConfigError(
                    f"--context={context}: with {num_output} output tokens it exceeds the context of {room}"
                )

    def _emit(self, **figures: Any) -> None:
        compiles = self.llm.engine.num_compiles_while_serving
        print(
            json.dumps({"engine": "headrace", "name": self.name, **figures, "compiles_while_serving": compiles}),
            flush=True,
        )

    def decode(self, cases: Sequence[tuple[int, int]], num_steps: int) -> None:
        """Milliseconds of a decode step for (batch, context)."""
        self._check_cases(cases, num_steps + 1)
        rng = np.random.default_rng(0)
        self._run_s(random_prompts(rng, 1, 64, self.vocab_size), 8)
        for batch, context in cases:
            step_ms, first_ms = [], []
            for _ in range(self.repeats):
                first_s = self._run_s(random_prompts(rng, batch, context, self.vocab_size), 1)
                whole_s = self._run_s(random_prompts(rng, batch, context, self.vocab_size), num_steps + 1)
                step_ms.append((whole_s - first_s) / num_steps * 1e3)
                first_ms.append(first_s * 1e3)
            median = statistics.median(step_ms)
            self._emit(
                figure="decode",
                batch=batch,
                context=context,
                step_ms=round(median, 3),
                all_step_ms=[round(x, 3) for x in step_ms],
                output_tokens_per_s=round(batch / median * 1e3, 1),
                first_token_ms=round(statistics.median(first_ms), 2),
            )

    def prefill(self, cases: Sequence[tuple[int, int]]) -> None:
        """Prompt tokens a second for (prompts, length), each prompt to its first token."""
        self._check_cases([(1, length) for _, length in cases], 1)
        rng = np.random.default_rng(0)
        self._run_s(random_prompts(rng, 1, 64, self.vocab_size), 1)
        for count, length in cases:
            times_s = [self._run_s(random_prompts(rng, count, length, self.vocab_size), 1) for _ in range(self.repeats)]
            median_s = statistics.median(times_s)
            self._emit(
                figure="prefill",
                batch=count,
                context=length,
                prompt_tokens_per_s=round(count * length / median_s),
                ms=round(median_s * 1e3, 2),
                all_ms=[round(t * 1e3, 2) for t in times_s],
            )

    def mixed(self, count: int) -> None:
        """A batch of requests of ShareGPT-like lengths, all queued at once."""
        rng = np.random.default_rng(7)
        num_input, num_output = mixed_lengths(rng, count)
        room = self.llm.engine.max_model_len
        if int((num_input + num_output).max()) > room:
            raise ConfigError(
                f"--max_model_len: the mixed case needs {int((num_input + num_output).max())} tokens, has {room}"
            )
        prompts = [{"prompt_token_ids": rng.integers(100, self.vocab_size - 100, int(n)).tolist()} for n in num_input]
        seconds = self._run_s(prompts, num_output.tolist())
        self._emit(
            figure="mixed",
            requests=count,
            input_tokens=int(num_input.sum()),
            output_tokens=int(num_output.sum()),
            s=round(seconds, 2),
            output_tokens_per_s=round(num_output.sum() / seconds, 1),
            total_tokens_per_s=round((num_input.sum() + num_output.sum()) / seconds, 1),
            preemptions=self.llm.stats()["num_preemptions"],
        )

    def batching(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Continuous against static batching on the same requests, all queued at once.

        A slot step is one slot for one decode step. `held`: from a request's first decode step until its slot is
        free for another, which in a static batch is the end of its longest member. `dispatched`: what the
        fixed-shape program ran, slots without work at the end of the list included.
        """
        rng = np.random.default_rng(3)
        room, num_slots = self.llm.engine.max_model_len, self.llm.engine.config.max_num_seqs
        lengths = [(min(i, room - 1), min(o, room - min(i, room - 1))) for i, o in lengths]
        prompts = [{"prompt_token_ids": rng.integers(100, self.vocab_size - 100, i).tolist()} for i, _ in lengths]
        outputs = [o for _, o in lengths]
        batches = [outputs[i : i + num_slots] for i in range(0, len(outputs), num_slots)]
        held = {"static": sum(len(b) * (max(b) - 1) for b in batches), "continuous": sum(o - 1 for o in outputs)}
        figures: dict[str, Any] = {}
        self._run_s(prompts[:1], outputs[:1])
        for mode in ("static", "continuous"):
            self.llm.engine.restart_scheduler(static_batching=mode == "static")
            seconds = self._run_s(prompts, outputs)
            stats = self.llm.stats()
            figures[mode] = seconds, stats["num_decode_slot_steps"]
            self._emit(
                figure="batching",
                mode=mode,
                requests=len(prompts),
                slots=num_slots,
                input_tokens=sum(i for i, _ in lengths),
                output_tokens=sum(outputs),
                held_slot_steps=held[mode],
                dispatched_slot_steps=stats["num_decode_slot_steps"],
                page_waste_fraction=stats["page_waste_fraction"],
                max_unused_tokens_per_sequence=stats["max_unused_tokens_per_sequence"],
                preemptions=stats["num_preemptions"],
                s=round(seconds, 2),
                output_tokens_per_s=round(sum(outputs) / seconds, 1),
            )
        self.llm.engine.restart_scheduler(static_batching=False)
        self._emit(
            figure="batching",
            mode="static / continuous",
            held_slot_steps_ratio=round(held["static"] / held["continuous"], 2),
            dispatched_slot_steps_ratio=round(figures["static"][1] / figures["continuous"][1], 2),
            s_ratio=round(figures["static"][0] / figures["continuous"][0], 2),
        )


def read_lengths(path: str, count: int) -> list[tuple[int, int]]:
    """The first `count` rows of a CSV file with columns input_tokens and output_tokens. Raises ConfigError."""
    try:
        with Path(path).open(newline="") as file:
            rows = [(int(row["input_tokens"]), max(int(row["output_tokens"]), 2)) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--lengths={path}: {error!r}") from error
    if len(rows) < count:
        raise ConfigError(f"--num_requests={count}: {path} has {len(rows)} rows")
    return rows[:count]


def run(llm: Any, args: argparse.Namespace, name: str) -> None:
    """The figure that `args` names, on an engine that is ready. Raises ConfigError on flags that do not go together."""
    for flag in ("steps", "repeats", "num_requests"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {getattr(args, flag)}")
    if args.figure in ("mixed", "batching") and (args.batch or args.context):
        raise ConfigError(f"--batch and --context are for decode and prefill, not for {args.figure}")
    if args.figure != "batching" and args.lengths is not None:
        raise ConfigError(f"--lengths is for batching, not for {args.figure}")
    bench = Bench(llm, name, args.repeats)
    cases = None
    if args.batch or args.context:
        if len(args.batch or ()) != len(args.context or ()):
            raise ConfigError(
                f"--context: give one for each --batch ({len(args.batch or ())}), got {len(args.context or ())}"
            )
        cases = tuple(zip(args.batch, args.context, strict=True))
    print(f"device: {llm.engine.runner.mesh.devices.flat[0].device_kind}", file=sys.stderr)
    if args.figure == "decode":
        bench.decode(cases or DECODE_CASES, args.steps)
    elif args.figure == "prefill":
        bench.prefill(cases or PREFILL_CASES)
    elif args.figure == "mixed":
        bench.mixed(args.num_requests)
    else:
        if args.lengths is None:
            raise ConfigError("--lengths: batching needs a CSV file of lengths")
        bench.batching(read_lengths(args.lengths, args.num_requests))
