"""`headrace bench replay --simulate`: traces through the scheduler at several loads and settings, without a device."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from configs.run import RunConfig
from configs.scheduling import SchedulingConfig
from serving.cli.flags import given_fields
from serving.cli.parser import configs_from
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.step_time import LinearStepTime
from serving.simulation import plot
from serving.simulation.control import controlled_simulator
from serving.simulation.results import RequestResult, RunResult, Slo, Slos, summarise
from serving.simulation.scenarios import SCENARIOS, Bound, scheduler_config
from serving.simulation.simulator import HOST_S
from serving.simulation.trace import Trace, TraceRequest, merge, read_trace, requests_per_s, scale_rate, window

# Fields of EngineConfig that a scheduler reads; the others say how a device computes, which is not simulated.
READ_FIELDS = {
    "page_size",
    "max_model_len",
    "max_num_seqs",
    "decode_slot_buckets",
    "prefill_token_buckets",
    "query_block",
    "max_decode_steps",
    "num_pages",
    "enable_prefix_caching",
    "prefix_cache_floor",
}
# Fields of SchedulingConfig that a door reads, and nothing behind it.
UNREAD_POLICY = {
    "tenant_requests_per_min",
    "tenant_tokens_per_min",
    "default_tenant_requests_per_min",
    "default_tenant_tokens_per_min",
}
TABLE = (
    "variant",
    "group",
    "offered_rps",
    "requests",
    "complete",
    "refused",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "max_gap_ms_p99",
    "goodput_rps",
    "good_arrivals_rps",
    "attainment",
    "admitted_attainment",
    "output_tokens_per_s",
    "hit_rate",
    "preemptions_a_request",
)


@dataclass(frozen=True)
class _Run:
    variant: str
    trace: Trace
    config: SchedulerConfig
    until_s: float | None = None


def run_replay(
    args: argparse.Namespace, reparse: Callable[[Sequence[str], argparse.Namespace], argparse.Namespace]
) -> int:
    """Print a row of figures for each run, load by load, as a table or as JSON lines.

    reparse: engine flags read into a copy of a namespace, for --compare. Raises ConfigError before anything runs.
    """
    if args.simulate is None:
        raise ConfigError("replay needs --simulate: replaying a trace on a real engine is not there yet")
    _check_read(args)
    step_time = LinearStepTime(**given_fields(args, LinearStepTime))
    host_s = HOST_S if args.host_ms is None else args.host_ms / 1e3
    slos: Slos
    if args.scenario is not None:
        scenario = SCENARIOS[args.scenario]
        title, group, slos = f"{args.scenario}: {scenario.summary}", scenario.group, scenario.slos
        runs = list(_scenario_runs(args))
    else:
        runs = list(_trace_runs(args, reparse))
        title, slos = " ".join(args.simulate), _slos(args, runs[0].config.policy)
        group = "priority" if len({request.priority for request in runs[0].trace}) > 1 else ""
    results: dict[str, RunResult] = {}
    rows = []
    for run in runs:
        result = _simulate(run, step_time, host_s, quiet=args.json)
        results[run.variant] = result
        for row in _rows(run, result, group, slos):
            rows.append(row)
            if args.json:
                print(json.dumps({"engine": "headrace", "figure": "replay", "simulated": True, **row}), flush=True)
    figures = SCENARIOS[args.scenario].figures(results) if args.scenario is not None else {}
    if args.json:
        if figures:
            values = {name: v.fields() if isinstance(v, Bound) else v for name, v in figures.items()}
            print(json.dumps({"engine": "headrace", "figure": "scenario", "scenario": args.scenario, **values}))
    else:
        print(f"{title}\n{_table(rows)}")
        for name, value in figures.items():
            print(f"{name}: {value}")
    if args.plot is not None:
        args.plot.write_text(plot.page(title, [row for row in rows if row["group"] == "all"]))
    return 0


def _check_read(args: argparse.Namespace) -> None:
    """Raises ConfigError on flags that go nowhere."""
    if args.scenario is not None:
        if args.simulate:
            raise ConfigError(f"--scenario={args.scenario} makes its own trace: --simulate takes none beside it")
        for flag in ("load", "compare", "gin_file", "gin_bindings", "slo_ttft_ms", "slo_tpot_ms", "requests_per_s"):
            if getattr(args, flag):
                raise ConfigError(
                    f"--{flag}={getattr(args, flag)} is for traces: --scenario={args.scenario} has its own"
                )
        for flag in ("start_s", "duration_s"):
            if getattr(args, flag) is not None:
                raise ConfigError(
                    f"--{flag}={getattr(args, flag)} is for traces: --scenario={args.scenario} has its own"
                )
    elif not args.simulate:
        raise ConfigError("--simulate needs traces, or --scenario")
    for cls in (RunConfig, MeshConfig):
        for field, value in given_fields(args, cls).items():
            raise ConfigError(f"{cls.__name__}.{field}={value!r}: replay --simulate has no model and no devices")
    for flag in ("slo_ttft_ms", "slo_tpot_ms", "requests_per_s", "duration_s"):
        if getattr(args, flag) is not None and not getattr(args, flag) > 0:
            raise ConfigError(f"--{flag} must be above 0, got {getattr(args, flag)}")
    for flag in ("start_s", "host_ms"):
        if getattr(args, flag) is not None and not getattr(args, flag) >= 0:
            raise ConfigError(f"--{flag} must be at least 0, got {getattr(args, flag)}")
    for factor in args.load or ():
        if not 0 < factor < float("inf"):
            raise ConfigError(f"--load must be above 0, got {factor}")


def _slos(args: argparse.Namespace, policy: SchedulingConfig) -> Slos:
    """Those of --slo_ttft_ms and --slo_tpot_ms; without them, what `policy` has for the class of a request."""
    if args.slo_ttft_ms is not None or args.slo_tpot_ms is not None:
        slo = Slo(ttft_s=_seconds(args.slo_ttft_ms), tpot_s=_seconds(args.slo_tpot_ms))
        return lambda request: slo
    classes = [
        Slo(ttft_s=ttft_s or None, tpot_s=tpot_s or None)
        for ttft_s, tpot_s in zip(policy.class_ttft_s, policy.class_tpot_s, strict=True)
    ]
    return lambda request: classes[policy.class_of(request.priority)]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _scenario_runs(args: argparse.Namespace) -> Iterator[_Run]:
    scenario = SCENARIOS[args.scenario]
    for field, value in given_fields(args, SchedulingConfig).items():
        raise ConfigError(
            f"SchedulingConfig.{field}={value!r} is for traces: --scenario={args.scenario} has its own policies"
        )
    engine = dataclasses.replace(scenario.engine, **_read_fields(given_fields(args, EngineConfig)))
    trace = scenario.trace(args.replay_seed, scenario.duration_s)
    for name, variant in scenario.variants.items():
        config = variant.scheduler_config(engine)
        yield _Run(name, variant.trace(trace), config, scenario.duration_s if scenario.is_cut else None)


def _check_policy(policy: SchedulingConfig) -> None:
    default = SchedulingConfig()
    for field in sorted(UNREAD_POLICY):
        if getattr(policy, field) != getattr(default, field):
            raise ConfigError(
                f"SchedulingConfig.{field}={getattr(policy, field)!r}: replay --simulate has no doors that count"
            )


def _read_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    for field, value in fields.items():
        if field not in READ_FIELDS:
            raise ConfigError(f"EngineConfig.{field}={value!r}: replay --simulate does not read it")
    return fields


def _trace_runs(
    args: argparse.Namespace, reparse: Callable[[Sequence[str], argparse.Namespace], argparse.Namespace]
) -> Iterator[_Run]:
    trace: list[TraceRequest] = merge(
        read_trace(Path(path), requests_per_s=args.requests_per_s, seed=args.replay_seed) for path in args.simulate
    )
    if args.start_s is not None or args.duration_s is not None:
        trace = window(trace, args.start_s or 0.0, args.duration_s or float("inf"))
        if not trace:
            raise ConfigError(f"--start_s={args.start_s} --duration_s={args.duration_s}: no request arrives then")
    configs = {}
    for text in ("", *(args.compare or ())):
        given = configs_from(reparse(shlex.split(text), copy.copy(args)))
        engine = given.engine
        default = EngineConfig()
        names = [field.name for field in dataclasses.fields(engine)]
        _read_fields({name: getattr(engine, name) for name in names if getattr(engine, name) != getattr(default, name)})
        _check_policy(given.scheduling)
        configs[text or "base"] = scheduler_config(engine, given.scheduling)
    for factor in args.load or [1.0]:
        for name, config in configs.items():
            yield _Run(name, scale_rate(trace, factor), config)


def _simulate(run: _Run, step_time: LinearStepTime, host_s: float, *, quiet: bool) -> RunResult:
    simulator = controlled_simulator(run.config, step_time, host_s=host_s)
    with tqdm(total=len(run.trace), desc=run.variant, unit="request", disable=quiet or None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.update(done - bar.n)

        simulator.progress = progress
        return simulator.run(run.trace, run.until_s)


def _rows(run: _Run, result: RunResult, group: str, slos: Slos) -> Iterator[dict[str, Any]]:
    """A row for all requests, and where there are several groups, one for each."""
    common = {"variant": run.variant, "offered_rps": round(requests_per_s(run.trace), 3)}
    yield {**common, "group": "all", **result.summary(slos)}
    groups = result.groups(lambda request: str(getattr(request, group))) if group else {}
    if len(groups) > 1:
        for name, requests in groups.items():
            yield {
                **common,
                "group": name,
                **summarise(requests, result.duration_s, slos, result.arrivals_s),
                **_shares(requests),
            }


def _shares(requests: Sequence[RequestResult]) -> dict[str, float]:
    num_prompt_tokens = sum(r.num_prompt_tokens for r in requests)
    return {
        "hit_rate": round(sum(r.num_cached_tokens for r in requests) / num_prompt_tokens, 4),
        "preemptions_a_request": round(sum(r.num_preemptions for r in requests) / len(requests), 4),
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [list(TABLE), *(["-" if row.get(name) is None else str(row[name]) for name in TABLE] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(TABLE))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells)
