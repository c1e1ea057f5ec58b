"""Named loads with the question that each answers: what runs, under which policies, and the figure to look at.

All are of an 8B model on one H200, by the default `LinearStepTime`. `python -m serving bench replay --simulate
--scenario NAME` runs them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.engine import EngineConfig
from configs.scheduling import SchedulingConfig
from serving.scheduling.config import SchedulerConfig
from serving.simulation.results import RequestResult, RunResult, Slo
from serving.simulation.trace import BLOCK_TOKENS, Load, Trace, TraceRequest, keep, mix, scale_rate

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
# Ageing would make interactive what has waited long, and batch work that saturates has.
CLASSES = {"class_names": (INTERACTIVE, BATCH), "class_priorities": (0, BATCH_PRIORITY), "class_ageing_s": 0.0}


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
        prefix_cache_floor=engine.prefix_cache_floor,
        policy=policy or SchedulingConfig(),
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a trace beside others: the part of it that is meant, and changed settings."""

    engine: Mapping[str, Any] = field(default_factory=dict)  # EngineConfig fields
    policy: Mapping[str, Any] = field(default_factory=dict)  # SchedulingConfig fields
    keeps: Callable[[TraceRequest], bool] | None = None  # of the trace; None: all of it
    rate: float = 1.0  # so many times as fast

    def trace(self, trace: Trace) -> list[TraceRequest]:
        """What of a scenario's trace it runs."""
        return scale_rate(trace if self.keeps is None else keep(trace, self.keeps), self.rate)

    def scheduler_config(self, engine: EngineConfig) -> SchedulerConfig:
        config = scheduler_config(dataclasses.replace(engine, **self.engine))
        return dataclasses.replace(config, policy=dataclasses.replace(config.policy, **self.policy))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A load, the ways to run it, and what to read from the runs."""

    summary: str
    trace: Callable[[int, float], list[TraceRequest]]  # from a seed and `duration_s`
    variants: Mapping[str, Variant]
    figures: Callable[[Mapping[str, RunResult]], dict[str, Any]]  # of the runs by variant, Bound where it is to hold
    duration_s: float = 120.0  # of arrivals
    engine: EngineConfig = H200_8B
    slos: Callable[[RequestResult], Slo] = lambda request: Slo()
    group: str = "class_name"  # a RequestResult field that rows of the table are split by
    is_cut: bool = False  # the runs end with the arrivals


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A figure that is to be at most, or at least, so much."""

    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_kept(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        bounds = {"at_most": self.at_most, "at_least": self.at_least}
        return {"value": self.value, **{k: v for k, v in bounds.items() if v is not None}, "kept": self.is_kept}

    def __str__(self) -> str:
        bound = f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"
        return f"{self.value:g} ({bound}: {'kept' if self.is_kept else 'BROKEN'})"


def chosen(result: RunResult, **values: Any) -> list[RequestResult]:
    """The requests whose fields have these values."""
    return [r for r in result.requests if all(getattr(r, name) == value for name, value in values.items())]


# A long prompt over users that decode


NUM_USERS = 64
LONG_PROMPT = 32_768
LONG_ARRIVAL_S = 6.0
BOUNDED = "max_step_s"  # the variant whose chunks the SLO controller sizes
MAX_STEP_S = 0.0175  # twice the steady gap, less 5% for what a prediction is off


def _long_prompt(seed: int, duration_s: float) -> list[TraceRequest]:
    del seed, duration_s  # nothing is drawn
    warm_up = [  # that a controller learns from
        TraceRequest(arrival_s=0.1 * i, num_prompt_tokens=1024, num_output_tokens=32, class_name="warm-up")
        for i in range(4)
    ]
    users = [
        TraceRequest(arrival_s=1.0, num_prompt_tokens=1024, num_output_tokens=1500, class_name="user")
        for _ in range(NUM_USERS)
    ]
    long = TraceRequest(
        arrival_s=LONG_ARRIVAL_S, num_prompt_tokens=LONG_PROMPT, num_output_tokens=16, class_name="long"
    )
    return [*warm_up, *users, long]


def _chunked(num_tokens: int) -> Variant:
    return Variant(engine={"prefill_token_buckets": (num_tokens,)})


def _is_not_long(request: TraceRequest) -> bool:
    return request.class_name != "long"


def _long_prompt_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """The longest gap between a user's tokens over the gap without the long prompt, whose own TTFT it buys."""
    steady_s = statistics.median(r.tpot_s or 0.0 for r in chosen(runs["steady"], class_name="user"))
    figures: dict[str, Any] = {"steady_gap_ms": round(steady_s * 1e3, 2)}
    for name, run in runs.items():
        if name != "steady":
            (long,) = chosen(run, class_name="long")
            gap_s = max(r.max_gap_s for r in chosen(run, class_name="user"))
            figures[f"{name}: longest gap ms"] = round(gap_s * 1e3, 1)
            over_steady = round(gap_s / steady_s, 2)
            figures[f"{name}: over the steady gap"] = (
                Bound(value=over_steady, at_most=2.0) if name == BOUNDED else over_steady
            )
            if name == "whole":
                figures["whole: over its prefill"] = Bound(value=round(gap_s / (long.ttft_s or 0.0), 2), at_least=0.95)
            figures[f"{name}: long prompt's TTFT ms"] = round((long.ttft_s or 0.0) * 1e3, 1)
    return figures


# Batch work under interactive


CAPACITY_RPS = 20.4  # interactive requests that the engine ends at most: what SATURATED shows
SATURATED = "interactive, 20 times as fast"
BACKGROUND_STEP_S = 0.0088
STRONGEST = "two classes, background_step_s"


def _batch_and_interactive(seed: int, duration_s: float) -> list[TraceRequest]:
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
        requests_per_s=0.2 * CAPACITY_RPS,
        prompt_tokens=1024,
        output_tokens=256,
        length_cv=0.5,
        class_name=INTERACTIVE,
    )
    return mix([batch, interactive], duration_s, seed=seed)


def _is_interactive(request: TraceRequest) -> bool:
    return request.class_name == INTERACTIVE


def _is_batch(request: TraceRequest) -> bool:
    return request.class_name == BATCH


def _batch_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """Interactive TTFT against the same requests alone, and the output of batch work against batch work alone, with
    nothing held back for others."""
    figures: dict[str, Any] = {}
    alone_s = percentile([r.ttft_s for r in runs["interactive alone"].requests], 99)
    batch_alone = _tokens_per_s(runs["batch alone"], BATCH)
    for name, run in runs.items():
        if name == SATURATED:
            figures[f"{name}: requests/s that end"] = round(len(run.requests) / run.duration_s, 2)
            continue
        is_bound = name == STRONGEST
        interactive_s = percentile([r.ttft_s for r in chosen(run, class_name=INTERACTIVE)], 99)
        if interactive_s is not None and alone_s is not None:
            figures[f"{name}: interactive TTFT p99 ms"] = round(interactive_s * 1e3, 1)
            over_alone = round(interactive_s / alone_s, 3)
            figures[f"{name}: over alone"] = Bound(value=over_alone, at_most=1.1) if is_bound else over_alone
        if chosen(run, class_name=BATCH):
            figures[f"{name}: batch output tokens/s"] = round(_tokens_per_s(run, BATCH))
            share = round(_tokens_per_s(run, BATCH) / batch_alone, 3)
            figures[f"{name}: batch output over alone"] = Bound(value=share, at_least=0.7) if is_bound else share
    return figures


def percentile(values: Sequence[float | None], percent: int) -> float | None:
    """Nearest rank, of those that there are."""
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) * percent // 100, len(known) - 1)] if known else None


def _tokens_per_s(run: RunResult, class_name: str) -> float:
    return sum(r.num_tokens for r in chosen(run, class_name=class_name)) / run.duration_s


# One tenant at 20 times its budget beside nine within theirs


NUM_QUIET = 9
FLOOD = "flood"
QUIET = tuple(f"quiet{i}" for i in range(NUM_QUIET))
BUDGET_TOKENS_PER_S = 1280  # of each tenant, prompt and output
NUM_PREFIXES = 6  # of BLOCK_TOKENS each, that a quiet tenant's prompts begin with
TENANT_PAGES = 200_000 // H200_8B.page_size  # a pool for which those who run and the caches compete
TENANT_BUDGETS = {"default_tenant_kv_tokens": 200_000 // (NUM_QUIET + 1)}
PREFIX_FLOOR = 0.05  # of the pool, for each tenant's cached prefixes
RATE_LIMITS = {"default_tenant_tokens_per_min": 60 * BUDGET_TOKENS_PER_S}


def _tenants(seed: int, duration_s: float) -> list[TraceRequest]:
    """Nine tenants at four fifths of their budgets, whose prompts share prefixes, and a tenth at 20 times its own."""
    quiet = [
        Load(requests_per_s=0.8, prompt_tokens=1024, output_tokens=256, length_cv=0.5, tenant=tenant)
        for tenant in QUIET
    ]
    flood = Load(requests_per_s=10.0, prompt_tokens=2048, output_tokens=512, length_cv=0.5, tenant=FLOOD)
    return _with_prefixes(mix([*quiet, flood], duration_s, seed=seed))


def _with_prefixes(trace: list[TraceRequest]) -> list[TraceRequest]:
    """The same, where each quiet tenant's prompts begin in turn with one of its prefixes."""
    counts: Counter[str] = Counter()
    requests = []
    for index, request in enumerate(trace):
        if request.tenant in QUIET:
            counts[request.tenant] += 1
            prefix = QUIET.index(request.tenant) * NUM_PREFIXES + counts[request.tenant] % NUM_PREFIXES
            num_more = math.ceil(request.num_prompt_tokens / BLOCK_TOKENS) - 1
            own = 10_000 + 100 * index
            request = dataclasses.replace(request, hash_ids=(prefix, *range(own, own + num_more)))
        requests.append(request)
    return requests


def _is_quiet(request: TraceRequest) -> bool:
    return request.tenant != FLOOD


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness (Jain, Chiu and Hawe 1984): 1 where all are equal, 1 / n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


TENANT_SLO = Slo(ttft_s=1.0, tpot_s=0.05)
BURST_S = 60.0  # in which a tenant may send what its rate limit gives it for a minute, at once
LAST_S = 10.0  # before the end: what comes then may be unfinished


def _tenant_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """What the flood leaves of the quiet tenants' goodput, of the worst of them, and of their prefix hits.

    Jain's index is of the tokens that each tenant was served, at most its budget, of those that it asked for, at most
    its budget; and with rate limits also of the tokens as they are, once the bursts are over that those let through.
    """
    figures: dict[str, Any] = {}
    alone = runs["quiet alone"]
    for name, run in runs.items():
        is_bound = "KV budgets" in name
        worst_s = max(percentile([r.ttft_s for r in chosen(run, tenant=t)], 99) or float("inf") for t in QUIET)
        figures[f"{name}: worst quiet tenant's TTFT p99 ms"] = round(worst_s * 1e3, 1)
        if run is alone:
            continue
        kept = round(min(_num_good(run, tenant) / _num_good(alone, tenant) for tenant in QUIET), 3)
        lost = round(100 * (_hit_rate(alone) - _hit_rate(run)), 2)
        shares = [_share_of_budget(run, tenant) for tenant in (*QUIET, FLOOD)]
        fairness = round(jain(shares), 3)
        figures[f"{name}: worst quiet tenant's goodput over alone"] = (
            Bound(value=kept, at_least=0.95) if is_bound else kept
        )
        figures[f"{name}: Jain index of budgets served"] = (
            Bound(value=fairness, at_least=0.95) if is_bound else fairness
        )
        if "rate limits" in name:
            rates = [_num_tokens(run, tenant, BURST_S) for tenant in (*QUIET, FLOOD)]
            figures[f"{name}: Jain index of token rates"] = Bound(value=round(jain(rates), 3), at_least=0.95)
        figures[f"{name}: points of prefix hit rate lost"] = Bound(value=lost, at_most=5.0) if is_bound else lost
    return figures


def _num_good(run: RunResult, tenant: str) -> int:
    requests = chosen(run, tenant=tenant)
    return sum(r.meets(TENANT_SLO) for r in requests if r.arrival_s < run.duration_s - LAST_S)


def _num_tokens(run: RunResult, tenant: str, since_s: float = 0.0) -> int:
    requests = chosen(run, tenant=tenant)
    return sum(r.num_prompt_tokens + r.num_tokens for r in requests if r.num_tokens and r.arrival_s >= since_s)


def _share_of_budget(run: RunResult, tenant: str) -> float:
    budget = BUDGET_TOKENS_PER_S * run.duration_s
    asked = sum(r.num_prompt_tokens + r.num_output_tokens for r in chosen(run, tenant=tenant))
    return min(_num_tokens(run, tenant), budget) / min(asked, budget)


def _hit_rate(run: RunResult) -> float:
    """Of the quiet tenants' prompt tokens."""
    quiet = [r for r in run.requests if r.tenant in QUIET and r.num_tokens]
    return sum(r.num_cached_tokens for r in quiet) / sum(r.num_prompt_tokens for r in quiet)


# A pool that is promised three times over


FITTING_SEQS = 85
OVERCOMMIT_ENGINE = dataclasses.replace(H200_8B, num_pages=FITTING_SEQS * (1024 + 2048) // H200_8B.page_size + 1)


OVERCOMMIT_TPOT_S = 0.025  # about twice that of as many as fit


def _long_outputs(seed: int, duration_s: float) -> list[TraceRequest]:
    load = Load(requests_per_s=8.0, prompt_tokens=1024, output_tokens=2048, length_cv=0.3)
    return load.requests(duration_s, seed)


def _overcommit_figures(runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """Goodput is of complete answers within OVERCOMMIT_TPOT_S; how long they wait to begin says how much too many came."""
    figures: dict[str, Any] = {}
    fitting = _good_per_s(runs["as much"])
    for name, run in runs.items():
        counts = [r.num_preemptions for r in run.requests]
        figures[f"{name}: preemptions a request"] = Bound(value=round(statistics.mean(counts), 3), at_most=4.0)
        figures[f"{name}: most of one request"] = max(counts)
        figures[f"{name}: unfinished"] = Bound(value=sum(not r.is_complete for r in run.requests), at_most=0)
        if name != "as much":
            share = round(_good_per_s(run) / fitting, 3)
            figures[f"{name}: goodput over that without overcommitment"] = Bound(value=share, at_least=0.9)
    return figures


def _good_per_s(run: RunResult) -> float:
    return sum(r.meets(Slo(tpot_s=OVERCOMMIT_TPOT_S)) for r in run.requests) / run.duration_s


def _slots(num_seqs: int, **policy: Any) -> Variant:
    sizes = (*(size for size in (8, 32, 64, 128) if size < num_seqs), num_seqs)
    return Variant(engine={"max_num_seqs": num_seqs, "decode_slot_buckets": sizes}, policy=policy)


SCENARIOS: dict[str, Scenario] = {
    "long_prompt": Scenario(
        summary=f"a prompt of {LONG_PROMPT} tokens while {NUM_USERS} users decode",
        trace=_long_prompt,
        engine=dataclasses.replace(H200_8B, max_decode_steps=1),
        variants={
            "steady": Variant(keeps=_is_not_long),
            "chunks of 128": _chunked(128),
            "chunks of 256": _chunked(256),
            "chunks of 512": _chunked(512),
            "chunks of 2048": _chunked(2048),
            "whole": _chunked(LONG_PROMPT),
            BOUNDED: Variant(
                engine={"prefill_token_buckets": (128, 256, 512, 1024, 2048)}, policy={"max_step_s": MAX_STEP_S}
            ),
        },
        figures=_long_prompt_figures,
    ),
    "batch_and_interactive": Scenario(
        summary="batch work that saturates the engine, and interactive requests of a fifth of what it can do",
        trace=_batch_and_interactive,
        # 192 prompt tokens take as long as reading the weights does, so beside rows that decode they are free.
        engine=dataclasses.replace(
            H200_8B,
            max_decode_steps=1,
            decode_slot_buckets=(8, 16, 32, 64, 96, 128, 192, 256),
            prefill_token_buckets=(192, 512, 1024, 2048, 4096),
        ),
        variants={
            "interactive alone": Variant(keeps=_is_interactive),
            SATURATED: Variant(keeps=_is_interactive, rate=20.0),
            "batch alone": Variant(keeps=_is_batch, engine={"prefill_token_buckets": (192,)}),
            "one class": Variant(),
            "two classes": Variant(policy=CLASSES),
            STRONGEST: Variant(
                policy={
                    **CLASSES,
                    "class_ttft_s": (0.5, 0.0),
                    "admission_control": False,
                    "background_step_s": BACKGROUND_STEP_S,
                }
            ),
        },
        slos=lambda request: Slo(ttft_s=0.5, tpot_s=0.05) if request.class_name == INTERACTIVE else Slo(),
        figures=_batch_figures,
        is_cut=True,
        duration_s=180.0,
    ),
    "tenants": Scenario(
        summary=f"{NUM_QUIET} tenants within their budgets, and one that sends 20 times its own",
        trace=_tenants,
        engine=dataclasses.replace(
            H200_8B, max_num_seqs=64, decode_slot_buckets=(8, 32, 64), num_pages=TENANT_PAGES + 1
        ),
        variants={
            "quiet alone": Variant(keeps=_is_quiet),
            "together": Variant(),
            "KV budgets and floors": Variant(policy=TENANT_BUDGETS, engine={"prefix_cache_floor": PREFIX_FLOOR}),
            "KV budgets, floors and rate limits": Variant(
                policy={**TENANT_BUDGETS, **RATE_LIMITS}, engine={"prefix_cache_floor": PREFIX_FLOOR}
            ),
        },
        slos=lambda request: TENANT_SLO,
        figures=_tenant_figures,
        group="tenant",
        is_cut=True,
        duration_s=180.0,
    ),
    "overcommit": Scenario(
        summary="slots for as much as the pool holds, and for three times as much",
        trace=_long_outputs,
        engine=OVERCOMMIT_ENGINE,
        variants={
            "as much": _slots(FITTING_SEQS),
            "three times": _slots(3 * FITTING_SEQS),
            "three times, class_tpot_s": _slots(
                3 * FITTING_SEQS, class_tpot_s=(OVERCOMMIT_TPOT_S,), admission_control=False
            ),
        },
        figures=_overcommit_figures,
        slos=lambda request: Slo(tpot_s=OVERCOMMIT_TPOT_S),
        duration_s=60.0,
    ),
}
