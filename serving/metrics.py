"""Metrics of one engine in Prometheus's form: vLLM's names where the meaning is the same, `headrace_` for the rest.

The engine's thread only queues its records (`serving.observer`); they are worked into sums a batch at a time, there or
in the thread that scrapes. Gauges and the engine's own counters are read when scraped. `prometheus_client` (extra
`metrics`) is imported only to write the sums out.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from configs.operations import OperationsConfig
from serving.bench.figures import Ceilings, Rows, model_cost
from serving.observer import PHASES, CompletionRecord, EngineObserver, Phase, RequestRecord, StepRecord
from serving.request import FinishReason
from serving.scheduling.goodput import GoodputCounters

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from serving.engine import Engine

BATCH = 64  # records that wait at most before the engine's own thread works them in
WINDOW_S = 60.0  # what gauges of rates and shares look back on, by the engine's clock
MAX_RECENT_REQUESTS = 1024  # completions that the status page's percentiles are of
OTHER_TENANTS = "other"
PREEMPTION_LABELS = ("class", "tenant", "by_class", "reason")
STEP_TOKEN_USES = ("decode", "prefill", "padding", "idle")

# Why a request was refused before it got to the engine.
REFUSALS = ("invalid", "unauthorized", "too_large", "overloaded", "unavailable")

# Bounds of histograms, in seconds or tokens. Those of vLLM's names hold all of vLLM's own, so that a quantile over
# servers of both kinds is computed from the same bounds. Below them come finer ones where Headrace's values lie: a decode
# step of an 8B model takes 5 to 20 ms, of a small one 1 ms.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),  # 2.0 is ours: the usual target of p99
)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BOUNDS = tuple(float(2**i) for i in range(15))  # steps double from a single slot to the largest buckets
NUM_COMPLETIONS_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)  # 128: the most that a request may ask for
# Prompt lengths that are told apart: a chat turn, a long one, documents, books. Few, as each multiplies the series.
LENGTH_BOUNDS = (256, 1024, 4096, 16384)
LENGTH_LABELS = ("1-256", "257-1024", "1025-4096", "4097-16384", "16385+")


def length_label(num_prompt_tokens: int) -> str:
    return LENGTH_LABELS[bisect.bisect_left(LENGTH_BOUNDS, num_prompt_tokens)]


def request_token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to the context: the same series as vLLM's, an error of at most 2.5 times at any length."""
    steps = (mantissa * 10**power for power in range(12) for mantissa in (1, 2, 5))
    return tuple(float(bound) for bound in steps if bound <= max_model_len)


@dataclass(frozen=True)
class Series:
    """A metric: its name as scraped (without _bucket and the like), its labels beside model_name and engine."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def series_of(max_model_len: int) -> tuple[Series, ...]:
    """Every metric there is."""
    tokens = request_token_bounds(max_model_len)
    length = ("input_tokens",)

    def counter(name: str, text: str, *labels: str) -> Series:
        return Series(name, "counter", text, labels)

    def gauge(name: str, text: str, *labels: str) -> Series:
        return Series(name, "gauge", text, labels)

    def histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Series:
        return Series(name, "histogram", text, labels, bounds)

    return (
        gauge("vllm:num_requests_running", "Completions that have a slot."),
        gauge("vllm:num_requests_waiting", "Completions that wait for a slot or pages, preempted ones included."),
        gauge("vllm:kv_cache_usage_perc", "Share of the KV pages that running requests hold, 0 to 1."),
        gauge(
            "vllm:cache_config_info",
            "1, with the KV cache's configuration as labels.",
            "block_size",
            "num_gpu_blocks",
            "cache_dtype",
            "enable_prefix_caching",
        ),
        counter("vllm:prompt_tokens_total", "Prompt tokens of requests whose prompt was processed, hits included."),
        counter("vllm:generation_tokens_total", "Output tokens."),
        counter("vllm:prefix_cache_queries_total", "Tokens of admitted requests, looked up in the prefix cache."),
        counter("vllm:prefix_cache_hits_total", "Of those, tokens that it had."),
        counter("vllm:num_preemptions_total", "Sequences put back to wait for lack of pages."),
        counter("vllm:request_success_total", "Completions that ended, by how.", "finished_reason"),
        counter("vllm:estimated_flops_per_gpu_total", "Model FLOPs of the steps read, for one device."),
        counter("vllm:estimated_read_bytes_per_gpu_total", "Bytes of weights and KV that a device had to read."),
        counter("vllm:estimated_write_bytes_per_gpu_total", "Bytes of keys and values that a device wrote."),
        histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", TTFT_BOUNDS),
        histogram(
            "vllm:inter_token_latency_seconds",
            "Between the steps that brought a completion tokens; a step may bring several.",
            TOKEN_BOUNDS,
        ),
        histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after the first; completions of one token are left out.",
            TOKEN_BOUNDS,
        ),
        histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to a completion's end.", LATENCY_BOUNDS
        ),
        histogram("vllm:request_queue_time_seconds", "From arrival to the first slot.", LATENCY_BOUNDS),
        histogram("vllm:request_prefill_time_seconds", "From the first slot to the first token.", LATENCY_BOUNDS),
        histogram("vllm:request_decode_time_seconds", "From the first token to the last.", LATENCY_BOUNDS),
        histogram("vllm:request_inference_time_seconds", "From the first slot to the last token.", LATENCY_BOUNDS),
        histogram("vllm:request_prompt_tokens", "Prompt tokens of ended completions.", tokens),
        histogram("vllm:request_generation_tokens", "Output tokens of ended completions.", tokens),
        histogram("vllm:request_max_num_generation_tokens", "Tokens of a request's longest completion.", tokens),
        histogram("vllm:request_params_n", "Completions that requests asked for.", NUM_COMPLETIONS_BOUNDS),
        histogram("vllm:request_params_max_tokens", "max_tokens of requests that gave it.", tokens),
        histogram("vllm:iteration_tokens_total", "Tokens of a step: of prompts and sampled.", STEP_TOKENS_BOUNDS),
        gauge("headrace_ready", "Whether requests are served: 1 or 0."),
        gauge("headrace_step_stuck", "Whether a step takes longer than the watchdog allows: 1 or 0."),
        counter("headrace_requests_total", "Requests that the engine took in."),
        counter("headrace_requests_refused_total", "Requests refused before the engine.", "reason"),
        gauge("headrace_waiting_tokens", "Tokens of waiting completions."),
        gauge("headrace_kv_pages", "KV pages by who has them.", "state"),
        gauge("headrace_kv_unused_tokens", "Token places of held pages that hold no token: the waste of paging."),
        counter("headrace_kv_held_token_steps_total", "Token places of held pages, summed over steps."),
        counter("headrace_kv_unused_token_steps_total", "Of those, places that held no token."),
        counter(
            "headrace_page_evictions_total",
            "Cached pages given up: for a request of their own tenant, another's, or another's in spite of a floor.",
            "cause",
        ),
        gauge("headrace_pinned_pages", "Cached pages that pinned prefixes hold."),
        counter("headrace_prefix_waits_total", "Times that a request waited for a prefix being computed."),
        counter("headrace_swap_outs_total", "Preempted sequences that went to host memory."),
        counter("headrace_swap_ins_total", "Sequences that came back from it."),
        counter("headrace_swap_bytes_total", "Bytes of their pages, all devices.", "direction"),
        gauge("headrace_swap_host_bytes", "Host memory that preempted sequences take."),
        histogram("headrace_time_to_first_token_seconds", "TTFT by prompt length.", TTFT_BOUNDS, *length),
        histogram("headrace_time_per_output_token_seconds", "TPOT by prompt length.", TOKEN_BOUNDS, *length),
        histogram("headrace_queue_time_seconds", "Time to the first slot by prompt length.", LATENCY_BOUNDS, *length),
        histogram("headrace_e2e_latency_seconds", "Time to the end by prompt length.", LATENCY_BOUNDS, *length),
        counter(
            "headrace_slo_requests_total",
            "Completions that ended by themselves or by a fault, by whether they met the targets.",
            "ttft",
            "tpot",
        ),
        gauge("headrace_slo_seconds", "The targets.", "target"),
        counter(
            "headrace_class_requests_total",
            "Requests that ended, their client not having given them up, by whether they met their class's targets.",
            "class",
            "ttft",
            "tpot",
        ),
        gauge(
            "headrace_saturation",
            "Share that is used of what can be sustained by prediction, 0 to 1; the largest is what saturates.",
            "resource",
        ),
        counter(
            "headrace_preemptions_total",
            "Sequences that gave way, by class and tenant, for whom and why: a page, or a better class.",
            *PREEMPTION_LABELS,
        ),
        counter(
            "headrace_preempted_tokens_total",
            "Their computed tokens, to be computed again less prefix hits.",
            *PREEMPTION_LABELS,
        ),
        histogram(
            "headrace_step_duration_seconds",
            "From a step's dispatch, or the reading of the one before, to its own: no less than the device's time.",
            TOKEN_BOUNDS,
            "phase",
        ),
        counter("headrace_step_flops_total", "Model FLOPs of the steps, all devices.", "phase"),
        counter("headrace_step_read_bytes_total", "Bytes that a device had to read in the steps.", "phase"),
        gauge("headrace_mfu", f"Share of the measured peak FLOP/s over the last {WINDOW_S:g} s of steps.", "phase"),
        gauge("headrace_mbu", f"Share of the measured peak bandwidth over the last {WINDOW_S:g} s of steps.", "phase"),
        gauge("headrace_peak_flops_per_second", "Peak of one device that MFU is a share of."),
        gauge("headrace_peak_read_bytes_per_second", "Peak of one device that MBU is a share of."),
        counter(
            "headrace_step_tokens_total",
            "Token places of the programs that ran: decode and prefill tokens, prefill padding, idle slots.",
            "use",
        ),
        gauge("headrace_padding_ratio", f"Share of padding and idle places over the last {WINDOW_S:g} s."),
        counter("headrace_decode_passes_total", "Forward passes in which slots decode."),
        counter("headrace_multi_step_dispatches_total", "Dispatches of several decode steps at once."),
        counter("headrace_slot_moves_total", "Sequences moved to lower slots."),
        counter("headrace_drains_total", "Times that nothing could be decided before a step was read."),
        counter("headrace_host_seconds_total", "Time of scheduling, dispatching and reading, without waiting."),
        counter("headrace_device_wait_seconds_total", "Time of waiting for steps' results."),
        counter("headrace_device_span_seconds_total", "Time while a step was outstanding."),
        counter("headrace_device_idle_min_seconds_total", "Of that, time that the device surely had no step to run."),
        counter("headrace_device_idle_max_seconds_total", "Of that, time that it may have had none."),
        gauge("headrace_device_idle_fraction_min", "Lower bound since start on the share without a step to run."),
        gauge("headrace_device_idle_fraction_max", "Upper bound since start."),
        counter("headrace_compiles_total", "Compilations while serving; anything but 0 is a fault."),
        gauge("headrace_programs", "Programs by how they came: compiled at start, or loaded.", "source"),
        counter("headrace_tenant_prompt_tokens_total", "Prompt tokens of ended requests.", "tenant"),
        counter("headrace_tenant_generation_tokens_total", "Output tokens of ended requests.", "tenant"),
        counter("headrace_tenant_device_seconds_total", "Step time, shared out by computed tokens.", "tenant", "phase"),
        counter(
            "headrace_tenant_cost_usd_total", "Its estimated cost; the rest of the bill was idle.", "tenant", "phase"
        ),
        counter("headrace_cost_usd_total", "Estimated cost of all devices since start, idle time included."),
    )


class Histogram:
    """Counts by bound, inclusive, and their sum. Not for several threads at once."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count


@dataclass
class _Window:
    """What steps took and did, for sums over a while."""

    end_s: float = 0.0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flops: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    read_bytes: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEP_TOKEN_USES, 0))

    def add(self, other: _Window) -> None:
        for phase in PHASES:
            self.seconds[phase] += other.seconds[phase]
            self.flops[phase] += other.flops[phase]
            self.read_bytes[phase] += other.read_bytes[phase]
        for use, count in other.tokens.items():
            self.tokens[use] += count


@dataclass(frozen=True, slots=True)
class RecentCompletion:
    """For percentiles of what was just served."""

    finish_time_s: float
    length_label: str
    ttft_s: float | None
    tpot_s: float | None


class EngineMetrics(EngineObserver):
    """The metrics of one engine; watches it from construction on.

    ceilings: what MFU and MBU are shares of; None: these are not given. is_ready, is_stuck: what the server and its
    watchdog say. `count_refusal`, `registry`, `exposition` and `collect` may be called by any thread.
    """

    def __init__(
        self,
        engine: Engine,
        config: OperationsConfig | None = None,
        *,
        model_name: str,
        engine_index: int = 0,
        ceilings: Ceilings | None = None,
        is_ready: Callable[[], bool] | None = None,
        is_stuck: Callable[[], bool] = lambda: False,
    ):
        self.engine, self.config, self.ceilings = engine, config or OperationsConfig(), ceilings
        self.base_labels = {"model_name": model_name, "engine": str(engine_index)}
        self.series = {series.name: series for series in series_of(engine.max_model_len)}
        self.is_ready = is_ready or (lambda: engine.is_alive)
        self.is_stuck = is_stuck
        self.cost = model_cost(engine)
        self.num_devices: int = engine.runner.mesh.size
        self.start_s = engine.now()
        self._records: deque[StepRecord | RequestRecord] = deque()
        self._lock = threading.Lock()  # of all below, which only `_work_in` and the readers touch
        self._sums: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = defaultdict(dict)
        self._tenants: set[str] = set()
        self._windows: deque[_Window] = deque()
        self.goodput = GoodputCounters(engine.scheduling)
        self._recent: deque[RecentCompletion] = deque(maxlen=MAX_RECENT_REQUESTS)
        for name, series in self.series.items():
            if series.kind == "histogram" and not series.labels:
                self._histograms[name][()] = Histogram(series.bounds)
        for reason in REFUSALS:
            self._sums["headrace_requests_refused_total"][(reason,)] = 0.0
        engine.observers = (*engine.observers, self)

    # In the engine's thread

    def step_read(self, record: StepRecord) -> None:
        self._queue(record)

    def request_finished(self, record: RequestRecord) -> None:
        self._queue(record)

    def _queue(self, record: StepRecord | RequestRecord) -> None:
        self._records.append(record)
        # A thread that holds the lock takes the records as well: serving does not wait for it.
        if len(self._records) >= BATCH and self._lock.acquire(blocking=False):
            try:
                self._work_in()
            finally:
                self._lock.release()

    # Under the lock

    def _work_in(self) -> None:
        """Take every queued record into the sums."""
        steps = []
        for _ in range(len(self._records)):
            record = self._records.popleft()
            if isinstance(record, StepRecord):
                steps.append(record)
                for tenant in (*record.prefill_tokens_by_tenant, *record.decode_tokens_by_tenant):
                    self._tenant_label(tenant)  # first come, first served, however records fall into batches
            else:
                self._add_request(record)
        if steps:
            self._add_steps(steps)

    def _observe(self, name: str, value: float, *labels: str, count: int = 1) -> None:
        histograms = self._histograms[name]
        if labels not in histograms:
            histograms[labels] = Histogram(self.series[name].bounds)
        histograms[labels].add(value, count)

    def _add_steps(self, steps: Sequence[StepRecord]) -> None:
        window = _Window(end_s=steps[-1].read_time_s)
        for phase in PHASES:
            of_phase = [step for step in steps if step.phase == phase]
            if not of_phase:
                continue
            window.read_bytes[phase], window.flops[phase] = self.cost.passes(
                _joined([step.decode_rows for step in of_phase]),
                _joined([step.prefill_rows for step in of_phase]),
                num_sampled=sum(step.num_decode_tokens + step.num_sampled_chunks for step in of_phase),
                num_passes=sum(step.num_decode_steps for step in of_phase),
            )
            self._sums["headrace_step_flops_total"][(phase,)] += window.flops[phase]
            self._sums["headrace_step_read_bytes_total"][(phase,)] += window.read_bytes[phase]
            window.seconds[phase] = sum(step.duration_s for step in of_phase)
        for step in steps:
            self._add_step(step, window)
        for use, count in window.tokens.items():
            self._sums["headrace_step_tokens_total"][(use,)] += count
        written = (window.tokens["decode"] + window.tokens["prefill"]) * self.engine.runner.ledger.kv_token_bytes
        for name, value in (
            ("vllm:estimated_flops_per_gpu_total", sum(window.flops.values()) / self.num_devices),
            ("vllm:estimated_read_bytes_per_gpu_total", sum(window.read_bytes.values())),
            ("vllm:estimated_write_bytes_per_gpu_total", written),
        ):
            self._sums[name][()] += value
        self._windows.append(window)
        self._drop_old_windows(window.end_s)

    def _add_step(self, step: StepRecord, window: _Window) -> None:
        num_decode, num_prefill = step.num_decode_tokens, step.num_prefill_tokens
        window.tokens["decode"] += num_decode
        window.tokens["prefill"] += num_prefill
        window.tokens["padding"] += step.prefill_bucket - num_prefill
        window.tokens["idle"] += step.num_decode_slots * step.num_decode_steps - num_decode
        self._observe("headrace_step_duration_seconds", step.duration_s, step.phase)
        self._observe("vllm:iteration_tokens_total", num_prefill + num_decode + step.num_sampled_chunks)
        if step.num_decode_steps > 1:
            self._sums["headrace_multi_step_dispatches_total"][()] += 1
        for preemption in step.preemptions:
            names, class_of = self.engine.scheduling.class_names, self.engine.scheduling.class_of
            tenant, by_class = self._tenant_label(preemption.context.tenant), names[class_of(preemption.by.priority)]
            key = (names[class_of(preemption.context.priority)], tenant, by_class, preemption.reason)
            self._sums["headrace_preemptions_total"][key] += 1
            self._sums["headrace_preempted_tokens_total"][key] += preemption.num_tokens
        for gap_s, count in step.gaps_s.items():
            self._observe("vllm:inter_token_latency_seconds", gap_s, count=count)
        for first in step.first_tokens:
            self._observe("vllm:time_to_first_token_seconds", first.wait_s)
            label = length_label(first.num_prompt_tokens)
            self._observe("headrace_time_to_first_token_seconds", first.wait_s, label)
            if first.child_index == 0:
                self._sums["vllm:prompt_tokens_total"][()] += first.num_prompt_tokens
        token_s = step.duration_s * self.num_devices / max(num_decode + num_prefill, 1)
        for phase, tokens in (("prefill", step.prefill_tokens_by_tenant), ("decode", step.decode_tokens_by_tenant)):
            for tenant, num_tokens in tokens.items():
                labels = (self._tenant_label(tenant), phase)
                self._sums["headrace_tenant_device_seconds_total"][labels] += token_s * num_tokens

    def _add_request(self, record: RequestRecord) -> None:
        self.goodput.add(record)
        tenant = (self._tenant_label(record.context.tenant),)
        self._sums["headrace_tenant_prompt_tokens_total"][tenant] += record.num_prompt_tokens
        self._sums["headrace_tenant_generation_tokens_total"][tenant] += record.num_output_tokens
        longest = max(completion.num_output_tokens for completion in record.completions)
        self._observe("vllm:request_max_num_generation_tokens", longest)
        self._observe("vllm:request_params_n", len(record.completions))
        if record.params.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", record.params.max_tokens)
        first = record.completions[0]
        if first.first_token_time_s is None and first.finish_reason is FinishReason.LENGTH:  # a prompt that was scored
            self._sums["vllm:prompt_tokens_total"][()] += record.num_prompt_tokens
        for completion in record.completions:
            self._add_completion(record, completion)

    def _add_completion(self, record: RequestRecord, completion: CompletionRecord) -> None:
        arrival_s, end_s = record.arrival_time_s, completion.finish_time_s
        slot_s, first_s, last_s = (
            completion.first_scheduled_time_s,
            completion.first_token_time_s,
            completion.last_token_time_s,
        )
        label = length_label(record.num_prompt_tokens)
        self._observe("vllm:request_prompt_tokens", record.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", completion.num_output_tokens)
        self._observe("vllm:e2e_request_latency_seconds", end_s - arrival_s)
        self._observe("headrace_e2e_latency_seconds", end_s - arrival_s, label)
        if slot_s is not None:
            self._observe("vllm:request_queue_time_seconds", slot_s - arrival_s)
            self._observe("headrace_queue_time_seconds", slot_s - arrival_s, label)
        ttft_s = tpot_s = None
        if first_s is not None and last_s is not None:
            assert slot_s is not None
            ttft_s = first_s - arrival_s
            self._observe("vllm:request_prefill_time_seconds", first_s - slot_s)
            self._observe("vllm:request_decode_time_seconds", last_s - first_s)
            self._observe("vllm:request_inference_time_seconds", last_s - slot_s)
            if completion.num_output_tokens > 1:
                tpot_s = (last_s - first_s) / (completion.num_output_tokens - 1)
                self._observe("vllm:request_time_per_output_token_seconds", tpot_s)
                self._observe("headrace_time_per_output_token_seconds", tpot_s, label)
        self._recent.append(RecentCompletion(end_s, label, ttft_s, tpot_s))
        if completion.finish_reason is not FinishReason.ABORT:  # the client's wish, neither good nor bad service
            is_error = completion.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
            answered_s = end_s - arrival_s if ttft_s is None else ttft_s
            met = (
                not is_error and answered_s <= self.config.ttft_slo_s,
                not is_error and (tpot_s is None or tpot_s <= self.config.tpot_slo_s),
            )
            labels = tuple(map(_met, met))
            self._sums["headrace_slo_requests_total"][labels] += 1

    def _tenant_label(self, tenant: str) -> str:
        """The tenant, or `other` once there are too many: a client that makes up names must not make up series."""
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= self.config.max_tenants:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant

    def _drop_old_windows(self, now_s: float) -> None:
        while self._windows and self._windows[0].end_s < now_s - WINDOW_S:
            self._windows.popleft()

    def _recent_window(self) -> _Window:
        self._drop_old_windows(self.engine.now())
        total = _Window()
        for window in self._windows:
            total.add(window)
        return total

    # Any thread

    def count_refusal(self, reason: str) -> None:
        """A request was refused at the door; `reason` is one of REFUSALS."""
        assert reason in REFUSALS, reason
        with self._lock:
            self._sums["headrace_requests_refused_total"][(reason,)] += 1

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Every counter and gauge: by name, its values by label values."""
        with self._lock:
            self._work_in()
            values = {name: dict(by_label) for name, by_label in self._sums.items()}
            values["headrace_class_requests_total"] = {
                (name, _met(ttft), _met(tpot)): float(count)
                for (name, ttft, tpot), count in self.goodput.counts.items()
            }
            window = self._recent_window()
        values.update(self._engine_values())
        if self.ceilings is not None:
            ceilings = self.ceilings
            values["headrace_peak_flops_per_second"] = {(): ceilings.matmul_flops_per_s}
            values["headrace_peak_read_bytes_per_second"] = {(): ceilings.read_bytes_per_s}
            values["headrace_mfu"], values["headrace_mbu"] = self._shares(window, ceilings)
        num_places = sum(window.tokens.values())
        if num_places:
            padding = window.tokens["padding"] + window.tokens["idle"]
            values["headrace_padding_ratio"] = {(): padding / num_places}
        if self.config.gpu_hour_usd:
            usd_per_s = self.config.gpu_hour_usd / 3600
            by_tenant = values.get("headrace_tenant_device_seconds_total", {})
            values["headrace_tenant_cost_usd_total"] = {key: s * usd_per_s for key, s in by_tenant.items()}
            up_s = self.engine.now() - self.start_s
            values["headrace_cost_usd_total"] = {(): up_s * usd_per_s * self.num_devices}
        for name, series in self.series.items():
            if series.kind == "counter" and not series.labels and name != "headrace_cost_usd_total":
                values.setdefault(name, {(): 0.0})
        return values

    def _shares(
        self, window: _Window, ceilings: Ceilings
    ) -> tuple[dict[tuple[str, ...], float], dict[tuple[str, ...], float]]:
        """(MFU, MBU) of each phase that ran."""
        mfu: dict[tuple[str, ...], float] = {}
        mbu: dict[tuple[str, ...], float] = {}
        for phase, seconds in window.seconds.items():
            if seconds > 0:
                peak_flops = ceilings.matmul_flops_per_s * self.num_devices
                mfu[(phase,)] = window.flops[phase] / seconds / peak_flops
                mbu[(phase,)] = window.read_bytes[phase] / seconds / ceilings.read_bytes_per_s
        return mfu, mbu

    def _engine_values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """What the engine counts itself, read while it may be running."""
        engine = self.engine
        config, runner, counters, scheduler = engine.config, engine.runner, engine.counters, engine.scheduler
        stats, pages, times = scheduler.stats, scheduler.page_allocator, engine.clock.times()
        host_pool = scheduler.host_pool
        idle_min, idle_max = times.idle_fractions()
        num_loaded = sum(report.is_loaded for report in runner.reports)
        cache_labels = (
            str(config.page_size),
            str(runner.num_pages - 1),
            config.kv_format[0],
            str(config.enable_prefix_caching),
        )
        plain: dict[str, float] = {
            "vllm:num_requests_running": scheduler.num_running,
            "vllm:num_requests_waiting": scheduler.num_waiting,
            "vllm:kv_cache_usage_perc": pages.num_held_pages / (runner.num_pages - 1),
            "vllm:generation_tokens_total": counters.num_output_tokens,
            "vllm:prefix_cache_queries_total": stats.num_prefix_query_tokens,
            "vllm:prefix_cache_hits_total": stats.num_prefix_hit_tokens,
            "vllm:num_preemptions_total": stats.num_preemptions,
            "headrace_ready": self.is_ready(),
            "headrace_step_stuck": self.is_stuck(),
            "headrace_requests_total": counters.num_requests,
            "headrace_waiting_tokens": scheduler.num_waiting_tokens,
            "headrace_kv_unused_tokens": scheduler.num_unused_page_tokens,
            "headrace_kv_held_token_steps_total": counters.page_token_steps,
            "headrace_kv_unused_token_steps_total": counters.unused_page_token_steps,
            "headrace_pinned_pages": scheduler.num_pinned_pages,
            "headrace_prefix_waits_total": stats.num_prefix_waits,
            "headrace_swap_outs_total": host_pool.num_swap_outs,
            "headrace_swap_ins_total": host_pool.num_swap_ins,
            "headrace_swap_host_bytes": host_pool.num_used_bytes,
            "headrace_decode_passes_total": stats.num_decode_steps,
            "headrace_slot_moves_total": stats.num_slot_moves,
            "headrace_drains_total": stats.num_drains,
            "headrace_host_seconds_total": times.host,
            "headrace_device_wait_seconds_total": times.wait,
            "headrace_device_span_seconds_total": times.span,
            "headrace_device_idle_min_seconds_total": times.idle_min,
            "headrace_device_idle_max_seconds_total": times.idle_max,
            "headrace_device_idle_fraction_min": idle_min,
            "headrace_device_idle_fraction_max": idle_max,
            "headrace_compiles_total": engine.num_compiles_while_serving,
        }
        return {
            **{name: {(): float(value)} for name, value in plain.items()},
            "vllm:cache_config_info": {cache_labels: 1.0},
            "vllm:request_success_total": {(reason,): n for reason, n in counters.num_finished.items()},
            "headrace_page_evictions_total": {(cause,): n for cause, n in pages.num_evictions_by_cause.items()},
            "headrace_kv_pages": {
                ("held",): pages.num_held_pages,
                ("cached",): pages.num_evictable_pages,
                ("free",): pages.num_free_pages - pages.num_evictable_pages,
                ("quarantined",): pages.num_quarantined_pages,
            },
            "headrace_swap_bytes_total": {
                ("out",): float(host_pool.num_out_bytes),
                ("in",): float(host_pool.num_in_bytes),
            },
            "headrace_slo_seconds": {("ttft",): self.config.ttft_slo_s, ("tpot",): self.config.tpot_slo_s},
            "headrace_saturation": {(name,): share for name, share in _saturation(engine).items()},
            "headrace_programs": {
                ("compiled",): len(runner.reports) - num_loaded,
                ("loaded",): num_loaded,
            },
        }

    def histograms(self) -> dict[str, dict[tuple[str, ...], tuple[list[int], float]]]:
        """Every histogram: by name, (counts by bound, sum) by label values."""
        with self._lock:
            self._work_in()
            return {
                name: {labels: (list(h.counts), h.sum) for labels, h in by_label.items()}
                for name, by_label in self._histograms.items()
            }

    def recent(self) -> tuple[list[RecentCompletion], Mapping[str, int]]:
        """Completions that ended last, and the token places of the last WINDOW_S seconds by use."""
        with self._lock:
            self._work_in()
            return list(self._recent), self._recent_window().tokens

    # Prometheus

    def collect(self) -> Iterable[Any]:
        """Metric families, as prometheus_client's registries ask for them."""
        from prometheus_client import core

        values, histograms = self.values(), self.histograms()
        families = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        base = tuple(self.base_labels.values())
        for name, series in self.series.items():
            labels = (*self.base_labels, *series.labels)
            if series.kind == "histogram":
                family = core.HistogramMetricFamily(name, series.help, labels=labels)
                for key, (counts, total) in sorted(histograms.get(name, {}).items()):
                    family.add_metric((*base, *key), _cumulative(series.bounds, counts), total)
            else:
                family = families[series.kind](name, series.help, labels=labels)
                for key, value in sorted(values.get(name, {}).items()):
                    family.add_metric((*base, *key), value)
            yield family

    def registry(self) -> CollectorRegistry:
        """A registry of this engine's metrics alone. Raises ImportError without the extra `metrics`."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def exposition(self) -> tuple[bytes, str]:
        """(body, content type) of a scrape.

        Always the plain text format, which every scraper reads: as OpenMetrics, prometheus_client 0.26 writes the names of
        samples with `_` for `:` where the scraper does not ask for UTF-8, and vLLM's names would be lost.
        """
        from prometheus_client import exposition

        return exposition.generate_latest(self.registry()), exposition.CONTENT_TYPE_PLAIN_0_0_4


def _saturation(engine: Engine) -> dict[str, float]:
    if engine.controller is not None:
        return engine.controller.saturation()
    scheduler = engine.scheduler
    num_pages = scheduler.page_allocator.num_pages - 1
    return {
        "slots": scheduler.num_running / scheduler.config.max_num_seqs,
        "pages": scheduler.page_allocator.num_held_pages / num_pages,
    }


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _joined(rows: Sequence[Rows]) -> Rows:
    return list(chain.from_iterable(keys for keys, _ in rows)), list(chain.from_iterable(count for _, count in rows))


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
    return buckets
