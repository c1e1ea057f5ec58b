"""`headrace bench decode|prefill|mixed|batching|replay`: figures as JSON lines. Importing it imports no JAX.

Prompts are token ids drawn with a fixed seed, so that another engine can run exactly the same work. How each figure
is made stands in docs/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.checks import ConfigError
from serving.bench import cases
from serving.cli.flags import add_dataclass_flags, given_fields
from serving.scheduling.step_time import LinearStepTime
from serving.simulation.scenarios import SCENARIOS

FIGURES = ("decode", "prefill", "mixed", "batching", "replay")
# Which figures read a flag, and its default there (None: no default, the cases or the flag's own rule decide).
FLAG_DEFAULTS: dict[str, dict[str, int | bool | None]] = {
    "batch": {"decode": None, "prefill": None},
    "context": {"decode": None, "prefill": None},
    "steps": {"decode": cases.DECODE_STEPS},
    "repeats": {"decode": 3, "prefill": 3, "mixed": 1},
    "num_requests": {"mixed": cases.MIXED_REQUESTS, "batching": cases.MIXED_REQUESTS},
    "lengths": {"batching": None},
    "profile_dir": {"decode": None, "prefill": None},
    "simulate": {"replay": None},
    "scenario": {"replay": None},
    "load": {"replay": None},
    "compare": {"replay": None},
    "requests_per_s": {"replay": None},
    "start_s": {"replay": None},
    "duration_s": {"replay": None},
    "slo_ttft_ms": {"replay": None},
    "slo_tpot_ms": {"replay": None},
    "host_ms": {"replay": None},
    "replay_seed": {"replay": 0},
    "json": {"replay": False},
    "plot": {"replay": None},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrace bench`; engine flags are added by the command line itself."""

    def add(flag: str, text: str, **options: Any) -> None:
        values = FLAG_DEFAULTS[flag]
        defaults = sorted({str(value) for value in values.values() if value is not None})
        suffix = f"; default {' or '.join(defaults)}" if defaults else ""
        parser.add_argument(f"--{flag}", help=f"{', '.join(values)}: {text}{suffix}", **options)

    parser.add_argument("figure", choices=FIGURES)
    add("batch", "sequences or prompts at once; repeatable", type=int, action="append")
    add("context", "prompt tokens, one for each --batch", type=int, action="append")
    add("steps", "tokens timed for each sequence", type=int)
    add("repeats", "runs of each case, on fresh token ids; the median is reported", type=int)
    add("num_requests", "requests in all", type=int)
    add("lengths", "input_tokens,output_tokens of each request", metavar="F.csv")
    add("profile_dir", "trace a few steps of each case after its timing, into this folder", type=Path, metavar="DIR")
    add("simulate", "replay these traces without a device: .csv or .jsonl", nargs="*", metavar="TRACE")
    add("scenario", "a named load in place of traces", choices=sorted(SCENARIOS))
    add("load", "times the rate of the traces; repeatable", type=float, action="append")
    add("compare", "engine flags to run beside, as one argument; repeatable", action="append", metavar="FLAGS")
    add("requests_per_s", "of a trace without arrival times, which come at random", type=float)
    add("start_s", "leave out what arrives earlier", type=float)
    add("duration_s", "leave out what arrives so long after --start_s", type=float)
    add("slo_ttft_ms", "target of the time to first token, for goodput; without both, the classes' own", type=float)
    add(
        "slo_tpot_ms",
        "target of the time of each further token, for goodput; without both, the classes' own",
        type=float,
    )
    add("host_ms", "of the host for each step", type=float)
    add("replay_seed", "of what is drawn", type=int)
    add("json", "JSON lines in place of a table", action="store_const", const=True)
    add("plot", "a page with goodput and latencies against load", type=Path, metavar="OUT.html")
    add_dataclass_flags(parser, LinearStepTime, description="of the device that replay simulates, in seconds")


def check_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with the figure's own defaults filled in. Raises ConfigError on a flag that the figure does not read."""
    resolved = argparse.Namespace(**vars(args))
    for field, value in given_fields(args, LinearStepTime).items():
        if args.figure != "replay":
            raise ConfigError(f"--{field}={value} is for replay: {args.figure} does not read it")
    for flag, defaults in FLAG_DEFAULTS.items():
        value = getattr(args, flag)
        if args.figure not in defaults:
            if value is not None:
                raise ConfigError(f"--{flag}={value} is for {', '.join(defaults)}: {args.figure} does not read it")
        elif value is None:
            setattr(resolved, flag, defaults[args.figure])
    for flag in ("steps", "repeats", "num_requests", "batch", "context"):
        values = getattr(resolved, flag)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise ConfigError(f"--{flag} must be at least 1, got {value}")
    num_batches, num_contexts = len(args.batch or ()), len(args.context or ())
    if num_batches != num_contexts:
        raise ConfigError(f"--context: give one for each --batch ({num_batches}), got {num_contexts}")
    if args.figure == "batching" and args.lengths is None:
        raise ConfigError("--lengths: batching needs a CSV file of lengths")
    if args.profile_dir is not None and args.profile_dir.exists() and not args.profile_dir.is_dir():
        raise ConfigError(f"--profile_dir={args.profile_dir} is there and is not a folder")
    return resolved


def run(make_llm: Callable[[], Any], args: argparse.Namespace, name: str) -> None:
    """Print the figure that `args` names, on the engine that `make_llm` builds.

    Raises ConfigError on flags that do not go together, before anything is built.
    """
    args = check_arguments(args)
    lengths = cases.read_lengths(args.lengths, args.num_requests) if args.figure == "batching" else []
    chosen = tuple(zip(args.batch or (), args.context or (), strict=True))
    llm = make_llm()
    from serving.bench.batching import compare_batching
    from serving.bench.runner import Bench

    if args.figure == "batching":
        compare_batching(Bench(llm, name), lengths)
        return
    bench = Bench(llm, name, args.repeats, args.profile_dir)
    if args.figure == "decode":
        bench.decode(chosen or cases.DECODE_CASES, args.steps)
    elif args.figure == "prefill":
        bench.prefill(chosen or cases.PREFILL_CASES)
    else:
        bench.mixed(args.num_requests)
