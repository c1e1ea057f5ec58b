"""Named loads with the question that each answers: what runs, under which policies, and the figure to look at.

All are of an 8B model on one H200, by the default `LinearStepTime`. `python -m serving bench replay --simulate
--scenario NAME` runs them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.engine import EngineConfig
from configs.scheduling import SchedulingConfig
from serving.scheduling.config import SchedulerConfig
from serving.simulation.results import RequestResult, RunResult, Slo
from serving.simulation.trace import Load, TraceRequest, merge, mix

POOL_TOKENS = 900_000  # of KV that an H200 holds beside an 8B model
MAX_MODEL_LEN = 131_072  # tokens

H200_8B = EngineConfig(
    page_size=64,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=256,
    decode_slot_buckets=(8, 32, 64, 128, 256),
    prefill_token_buckets=(512, 1024, 2048, 4096),
    query_block=64,
    max_decode_steps=8,
)

INTERACTIVE, BATCH = "interactive", "batch"
BATCH_PRIORITY = 10
CLASSES = {"class_names": (INTERACTIVE, BATCH), "class_priorities": (0, BATCH_PRIORITY)}


def scheduler_config(engine: EngineConfig, policy: SchedulingConfig | None = None) -> SchedulerConfig:
    """What the engine that `engine` describes gives its scheduler; without `num_pages`, POOL_TOKENS of KV."""
    return SchedulerConfig(
        page_size=engine.page_size,
        num_pages=engine.num_pages or POOL_TOKENS // engine.page_size + 1,
        decode_sizes=engine.decode_sizes,
        max_model_len=engine.max_model_len or MAX_MODEL_LEN,
        prefill_token_buckets=engine.prefill_token_buckets,
        query_block=engine.query_block,
        max_decode_steps=engine.max_decode_steps,
        enable_prefix_caching=engine.enable_prefix_caching,
        policy=policy or SchedulingConfig(),
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a trace beside others: the part of it that is meant, and changed settings."""

    engine: Mapping[str, Any] = field(default_factory=dict)  # EngineConfig fields
    policy: Mapping[str, Any] = field(default_factory=dict)  # SchedulingConfig fields
    keeps: Callable[[TraceRequest], bool] | None = None  # of the trace; None: all of it

    def scheduler_config(self, engine: EngineConfig) -> SchedulerConfig:
        config = scheduler_config(dataclasses.replace(engine, **self.engine))
        return dataclasses.replace(config, policy=dataclasses.replace(config.policy, **self.policy))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A load, the ways to run it, and what to read from the runs."""

    summary: str
    trace: Callable[[int], list[TraceRequest]]  # from a seed
    variants: Mapping[str, Variant]
    figures: Callable[[Mapping[str, RunResult]], dict[str, Any]]  # of the runs by variant
    engine: EngineConfig = H200_8B
    slos: Callable[[RequestResult], Slo] = lambda request: Slo()
    group: str = "class_name"  # a RequestResult field that rows of the table are split by
    until_s: float | None = None  # of the virtual clock


def chosen(result: RunResult, **values: Any) -> list[RequestResult]:
    """The requests whose fields have these values."""
    return [r for r in result.requests if all(getattr(r, name) == value for name, value in values.items())]


# A long prompt over users that decode


NUM_USERS = 64
LONG_PROMPT = 32_768
LONG_ARRIVAL_S = 5.0


def _long_prompt(seed: int) -> list[TraceRequest]:
    del seed  # nothing is drawn
    users = [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=1024, num_output_tokens=1500, class_name="user")
        for _ in range(NUM_USERS)
    ]
    long = TraceRequest(
        arrival_s=LONG_ARRIVAL_S, num_prompt_tokens=LONG_PROMPT, num_output_tokens=16, class_name="long"
    )
    return [*users, long]


def _chunked(num_tokens: int) -> Variant:
    return Variant(engine={"prefill_token_buckets": (num_tokens,)})


def _is_user(request: TraceRequest) -> bool:
    return request.class_name == "user"


def _long_prompt_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """The longest gap between a user's tokens over the gap without the long prompt, whose own TTFT it buys."""
    steady_s = statistics.median(r.tpot_s or 0.0 for r in runs["steady"].requests)
    figures: dict[str, Any] = {"steady_gap_ms": round(steady_s * 1e3, 2)}
    for name, run in runs.items():
        if name != "steady":
            (long,) = chosen(run, class_name="long")
            gap_s = max(r.max_gap_s for r in chosen(run, class_name="user"))
            figures[f"{name}_gap"] = f"{gap_s * 1e3:.1f} ms, {gap_s / steady_s:.2f} times the steady one"
            figures[f"{name}_long_ttft_ms"] = round((long.ttft_s or 0.0) * 1e3, 1)
    return figures


# Batch work under interactive


def _batch_and_interactive(seed: int) -> list[TraceRequest]:
    """Batch work of more than the engine can do, and interactive requests of a fifth of what it can."""
    batch = Load(
        requests_per_s=20.0,
        prompt_tokens=1024,
        output_tokens=512,
        length_cv=0.5,
        class_name=BATCH,
        tenant="batch",
        priority=BATCH_PRIORITY,
    )
    interactive = Load(
        requests_per_s=4.0, prompt_tokens=1024, output_tokens=256, length_cv=0.5, class_name=INTERACTIVE, start_s=30.0
    )
    return mix([batch, interactive], duration_s=120.0, seed=seed)


def _is_interactive(request: TraceRequest) -> bool:
    return request.class_name == INTERACTIVE


def _is_batch(request: TraceRequest) -> bool:
    return request.class_name == BATCH


def _batch_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """Interactive TTFT against the same requests alone, and the output of batch work against batch work alone."""
    figures: dict[str, Any] = {}
    alone_s = percentile([r.ttft_s for r in runs["interactive alone"].requests], 99)
    batch_alone = _tokens_per_s(runs["batch alone"], BATCH)
    for name, run in runs.items():
        interactive_s = percentile([r.ttft_s for r in chosen(run, class_name=INTERACTIVE)], 99)
        if interactive_s is not None and alone_s is not None:
            figures[f"{name}: interactive TTFT p99 ms"] = round(interactive_s * 1e3, 1)
            figures[f"{name}: interactive TTFT p99 over alone"] = round(interactive_s / alone_s, 2)
        if chosen(run, class_name=BATCH):
            share = _tokens_per_s(run, BATCH) / batch_alone
            figures[f"{name}: batch output over alone"] = round(share, 3)
    return figures


def percentile(values: Sequence[float | None], percent: int) -> float | None:
    """Nearest rank, of those that there are."""
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) * percent // 100, len(known) - 1)] if known else None


def _tokens_per_s(run: RunResult, class_name: str) -> float:
    return sum(r.num_tokens for r in chosen(run, class_name=class_name)) / run.duration_s


# One tenant at 20 times the rate of nine others


NUM_QUIET = 9
FLOOD_START_S = 30.0


def _tenants(seed: int) -> list[TraceRequest]:
    """Nine tenants of half a request a second each, and a tenth that sends 20 times as many from FLOOD_START_S on."""
    quiet = [
        Load(requests_per_s=0.5, prompt_tokens=1024, output_tokens=256, length_cv=0.5, tenant=f"quiet{i}")
        for i in range(NUM_QUIET)
    ]
    flood = Load(
        requests_per_s=10.0,
        prompt_tokens=2048,
        output_tokens=512,
        length_cv=0.5,
        tenant="flood",
        start_s=FLOOD_START_S,
    )
    return merge([mix(quiet, 120.0, seed=seed), flood.requests(120.0, seed=seed * 1000 + NUM_QUIET)])


def _is_quiet(request: TraceRequest) -> bool:
    return request.tenant != "flood"


def _tenant_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """What the flood does to the quiet tenants' TTFT, the worst of them at the 99th percentile."""
    figures: dict[str, Any] = {}
    alone_s = _worst_quiet_ttft_s(runs["quiet alone"])
    for name, run in runs.items():
        worst_s = _worst_quiet_ttft_s(run)
        figures[f"{name}: worst quiet tenant's TTFT p99 ms"] = round(worst_s * 1e3, 1)
        figures[f"{name}: over alone"] = round(worst_s / alone_s, 2)
    return figures


def _worst_quiet_ttft_s(run: RunResult) -> float:
    return max(
        percentile([r.ttft_s for r in chosen(run, tenant=f"quiet{i}")], 99) or float("inf") for i in range(NUM_QUIET)
    )


# A pool that is promised three times over


FITTING_SEQS = 85
OVERCOMMIT_ENGINE = dataclasses.replace(H200_8B, num_pages=FITTING_SEQS * (1024 + 2048) // H200_8B.page_size + 1)


def _long_outputs(seed: int) -> list[TraceRequest]:
    load = Load(requests_per_s=8.0, prompt_tokens=1024, output_tokens=2048, length_cv=0.3)
    return load.requests(60.0, seed)


def _overcommit_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """Goodput here is of complete answers whatever they took: what preemption costs and nothing else."""
    figures: dict[str, Any] = {}
    for name, run in runs.items():
        counts = [r.num_preemptions for r in run.requests]
        figures[f"{name}: preemptions a request"] = round(statistics.mean(counts), 3)
        figures[f"{name}: most of one request"] = max(counts)
        figures[f"{name}: unfinished"] = sum(not r.is_complete for r in run.requests)
    fitting, overcommitted = (run.summary()["goodput_rps"] for run in runs.values())
    figures["goodput over that without overcommitment"] = round(overcommitted / fitting, 3)
    return figures


def _slots(num_seqs: int) -> Variant:
    sizes = (*(size for size in (8, 32, 64, 128) if size < num_seqs), num_seqs)
    return Variant(engine={"max_num_seqs": num_seqs, "decode_slot_buckets": sizes})


SCENARIOS: dict[str, Scenario] = {
    "long_prompt": Scenario(
        summary=f"a prompt of {LONG_PROMPT} tokens while {NUM_USERS} users decode",
        trace=_long_prompt,
        engine=dataclasses.replace(H200_8B, max_decode_steps=1),
        variants={
            "steady": Variant(keeps=_is_user),
            "chunks of 128": _chunked(128),
            "chunks of 256": _chunked(256),
            "chunks of 512": _chunked(512),
            "chunks of 2048": _chunked(2048),
            "whole": _chunked(LONG_PROMPT),
        },
        figures=_long_prompt_figures,
    ),
    "batch_and_interactive": Scenario(
        summary="batch work that saturates the engine, and interactive requests of a fifth of it from 30 s on",
        trace=_batch_and_interactive,
        variants={
            "interactive alone": Variant(keeps=_is_interactive),
            "batch alone": Variant(keeps=_is_batch),
            "one class": Variant(),
            "two classes": Variant(policy=CLASSES),
        },
        slos=lambda request: Slo(ttft_s=1.0, tpot_s=0.05) if request.class_name == INTERACTIVE else Slo(),
        figures=_batch_figures,
        until_s=120.0,
    ),
    "tenants": Scenario(
        summary=f"{NUM_QUIET} tenants, and one that sends 20 times as much as each from {FLOOD_START_S:g} s on",
        trace=_tenants,
        engine=dataclasses.replace(H200_8B, max_num_seqs=64, decode_slot_buckets=(8, 32, 64)),
        variants={
            "quiet alone": Variant(keeps=_is_quiet),
            "together": Variant(),
            "together, KV budgets": Variant(policy={"default_tenant_kv_tokens": POOL_TOKENS // (NUM_QUIET + 1)}),
        },
        slos=lambda request: Slo(ttft_s=1.0, tpot_s=0.05),
        figures=_tenant_figures,
        group="tenant",
        until_s=120.0,
    ),
    "overcommit": Scenario(
        summary="slots for as much as the pool holds, and for three times as much",
        trace=_long_outputs,
        engine=OVERCOMMIT_ENGINE,
        variants={"as much": _slots(FITTING_SEQS), "three times": _slots(3 * FITTING_SEQS)},
        figures=_overcommit_figures,
    ),
}
