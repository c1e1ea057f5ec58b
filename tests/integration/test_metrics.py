"""Every series of a scrape against ground truth, recomputed one token and one request at a time from a log of its own."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from configs.engine import EngineConfig, MeshConfig
from configs.operations import OperationsConfig
from configs.scheduling import SchedulingConfig
from serving import RequestError, SamplingParams
from serving.bench.figures import Ceilings
from serving.engine import build_engine
from serving.metrics import LENGTH_BOUNDS, REFUSALS, EngineMetrics, series_of
from serving.observer import EngineObserver
from serving.request import RequestContext, RequestStatus
from serving.status import status_snapshot

TINY = Path(__file__).parents[1] / "data" / "tiny"
CEILINGS = Ceilings(
    device_kind="a card",
    platform="gpu",
    read_bytes=2**31,
    read_bytes_per_s=1e9,
    matmul_size=8192,
    matmul_dtype="float32",
    matmul_flops_per_s=1e11,
)
CLASS = {"ttft": 0.3, "tpot": 0.03}
SLO = {"ttft_slo_s": 0.4, "tpot_slo_s": 0.06}
GPU_HOUR_USD = 3.6


class Clock:
    """A clock that a test moves, in steps of 1/1024 s: sums of them are exact."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def move(self, ticks: int) -> None:
        self.now_s += ticks / 1024


class Log:
    """What happened to an engine, seen from outside: requests as their client sees them, schedules as they are made."""

    def __init__(self, engine, clock, rng):
        self.engine, self.clock = engine, clock
        self.requests = {}  # id -> what the client knows of it
        self.dispatches = []  # (time, schedule, places of held pages, of those without a token)
        self.reads = []  # (time, schedule, {(id, index): tokens sampled}, {id: output tokens before})
        self.num_drains = 0
        self.num_preemptions = 0  # of requests that are done
        self.tenants = []  # as they were first told of
        scheduler, runner = engine.scheduler, engine.runner
        schedule, dispatch, update = scheduler.schedule, runner.dispatch, scheduler.update

        def logged_schedule(*args):
            decision = schedule(*args)
            self.num_drains += decision is None and scheduler.needs_drain
            return decision

        def logged_dispatch(decision, masks):
            held = {page for sequence in scheduler._running for page in sequence.page_ids}
            unused = self.unused_tokens()
            hits = {id(chunk.request): chunk.start for chunk in decision.prefill}
            resets = [(r.request, r.request.num_tokens, hits[id(r.request)]) for r in decision.resets]
            self.dispatches.append((clock(), decision, len(held) * engine.config.page_size, unused, resets))
            clock.move(int(rng.integers(0, 8)))  # the host takes time
            return dispatch(decision, masks)

        def logged_update(decision, tokens):
            before = {id(r): r.num_output_tokens for _, r in decision.decode}
            before |= {id(c.request): c.request.num_output_tokens for c in decision.prefill}
            events = update(decision, tokens)
            sampled = [(e.request, len(e.new_token_ids), before[id(e.request)]) for e in events]
            self.reads.append((clock(), decision, sampled))
            self.tenants += [chunk.request.context.tenant for chunk in decision.prefill]
            return events

        scheduler.schedule, runner.dispatch, scheduler.update = logged_schedule, logged_dispatch, logged_update

    def unused_tokens(self):
        page_size = self.engine.config.page_size
        return sum(max(len(s.page_ids) * page_size - s.num_future_tokens, 0) for s in self.engine.scheduler._running)

    def add(self, prompt, params, tenant):
        request_id = self.engine.add(prompt, params, context=RequestContext(tenant=tenant))
        self.requests[request_id] = {
            "prompt": len(prompt),
            "params": params,
            "tenant": tenant,
            "arrival": self.clock(),
            "tokens": defaultdict(list),  # index -> times
            "ends": {},  # index -> (time, reason)
            "done": False,
        }
        return request_id

    def take(self, deltas, read_time_s):
        for delta in deltas:
            request = self.requests[delta.request_id]
            request["tokens"][delta.index] += [read_time_s] * len(delta.new_token_ids)
            if delta.finish_reason is not None:
                request["ends"][delta.index] = (read_time_s, str(delta.finish_reason))
            if delta.request_finished:
                request["done"] = True
                self.tenants.append(request["tenant"])
                self.num_preemptions += self.engine.collect(delta.request_id).metrics["num_preemptions"]

    def step(self):
        num_reads = len(self.reads)
        deltas = self.engine.step()
        if deltas:
            assert len(self.reads) == num_reads + 1  # the tiny trace never reads two steps in one
            self.take(deltas, self.reads[-1][0])


def truth(log, config, model_name):
    """(counters and gauges, observations of histograms): name -> labels -> value, or a list of values."""
    engine, now_s = log.engine, log.clock()
    values = defaultdict(lambda: defaultdict(float))
    seen = defaultdict(lambda: defaultdict(list))
    plain = ()

    # Requests
    slot_times = {}
    for time_s, decision, *_ in log.dispatches:
        for reset in decision.resets:
            slot_times.setdefault((reset.request.request_id, reset.request.child_index), time_s)
    for request_id, request in log.requests.items():
        params, prompt, arrival = request["params"], request["prompt"], request["arrival"]
        bucket = sum(prompt > bound for bound in LENGTH_BOUNDS)
        length = (("1-256", "257-1024", "1025-4096", "4097-16384", "16385+")[bucket],)
        values["headrace_requests_total"][plain] += 1
        if request["tokens"][0] or (params.max_tokens == 0 and request["done"] and request["ends"][0][1] == "length"):
            values["vllm:prompt_tokens_total"][plain] += prompt
        for times in request["tokens"].values():
            values["vllm:generation_tokens_total"][plain] += len(times)
            if times:
                seen["vllm:time_to_first_token_seconds"][plain].append(times[0] - arrival)
                seen["headrace_time_to_first_token_seconds"][length].append(times[0] - arrival)
            steps = sorted(set(times))
            seen["vllm:inter_token_latency_seconds"][plain] += [b - a for a, b in itertools.pairwise(steps)]
        for _, reason in request["ends"].values():
            values["vllm:request_success_total"][(reason,)] += 1
        if not request["done"]:
            continue
        counts = [len(request["tokens"][index]) for index in range(params.n)]
        seen["vllm:request_max_num_generation_tokens"][plain].append(max(counts))
        seen["vllm:request_params_n"][plain].append(params.n)
        if params.max_tokens is not None:
            seen["vllm:request_params_max_tokens"][plain].append(params.max_tokens)
        for index in range(params.n):
            end, reason = request["ends"][index]
            times, slot = request["tokens"][index], slot_times.get((request_id, index))
            seen["vllm:request_prompt_tokens"][plain].append(prompt)
            seen["vllm:request_generation_tokens"][plain].append(len(times))
            seen["vllm:e2e_request_latency_seconds"][plain].append(end - arrival)
            seen["headrace_e2e_latency_seconds"][length].append(end - arrival)
            if slot is not None:
                seen["vllm:request_queue_time_seconds"][plain].append(slot - arrival)
                seen["headrace_queue_time_seconds"][length].append(slot - arrival)
            tpot = 0.0
            if times:
                seen["vllm:request_prefill_time_seconds"][plain].append(times[0] - slot)
                seen["vllm:request_decode_time_seconds"][plain].append(times[-1] - times[0])
                seen["vllm:request_inference_time_seconds"][plain].append(times[-1] - slot)
            if len(times) > 1:
                tpot = (times[-1] - times[0]) / (len(times) - 1)
                seen["vllm:request_time_per_output_token_seconds"][plain].append(tpot)
                seen["headrace_time_per_output_token_seconds"][length].append(tpot)
            if reason != "abort":
                ttft = (times[0] if times else end) - arrival
                met = (
                    "met" if ttft <= SLO["ttft_slo_s"] else "missed",
                    "met" if tpot <= SLO["tpot_slo_s"] else "missed",
                )
                values["headrace_slo_requests_total"][met] += 1
        ends = [request["ends"][index] for index in range(params.n)]
        if all(reason != "abort" for _, reason in ends):
            times = [request["tokens"][index] for index in range(params.n)]
            ttft = max((t[0] if t else end) - arrival for t, (end, _) in zip(times, ends, strict=True))
            tpot = max(((t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1), default=0.0)
            met = ("met" if ttft <= CLASS["ttft"] else "missed", "met" if tpot <= CLASS["tpot"] else "missed")
            values["headrace_class_requests_total"][("default", *met)] += 1
    for reason in ("stop", "length", "abort", "error", "timeout"):
        values["vllm:request_success_total"][(reason,)] += 0

    # Dispatched steps
    for _, decision, held, unused, resets in log.dispatches:
        values["headrace_kv_held_token_steps_total"][plain] += held
        values["headrace_kv_unused_token_steps_total"][plain] += unused
        values["headrace_slot_moves_total"][plain] += len(decision.moves)
        if decision.decode:
            values["headrace_decode_passes_total"][plain] += decision.num_decode_steps
        for request, num_tokens, num_hits in resets:
            if request.params.prompt_logprobs is None:
                values["vllm:prefix_cache_queries_total"][plain] += num_tokens
                values["vllm:prefix_cache_hits_total"][plain] += num_hits
    requests = [c.request for group in engine._groups.values() for c in group.completions]
    num_preemptions = log.num_preemptions + sum(request.num_preemptions for request in requests)
    values["vllm:num_preemptions_total"][plain] = num_preemptions
    values["headrace_drains_total"][plain] = log.num_drains
    for name in ("swap_outs_total", "swap_ins_total", "swap_host_bytes"):  # tests/integration/test_swap.py swaps
        values[f"headrace_{name}"][plain] = 0
    values["headrace_swap_bytes_total"] = {("out",): 0, ("in",): 0}

    # Steps read
    model, params = engine.model_config, engine.runner.params
    weights = sum(a.nbytes for path, a in params.items() if path != "embed/weight")
    matrices = sum(a.size for path, a in params.items() if path.endswith("/kernel"))
    kv_bytes = 2 * model.num_kv_heads * model.head_dim * 4  # of a token in a layer, float32
    dispatch_times = {decision.step_id: time_s for time_s, decision, *_ in log.dispatches}
    read_before, seconds = 0.0, Counter()
    for time_s, decision, sampled in log.reads:
        phase = ("mixed" if decision.decode else "prefill") if decision.prefill else "decode"
        for preemption in decision.preemptions:
            labels = ("default", preemption.context.tenant, "default", "pages")
            values["headrace_preemptions_total"][labels] += 1
            values["headrace_preempted_tokens_total"][labels] += preemption.num_tokens
        duration = time_s - max(dispatch_times[decision.step_id], read_before)
        read_before = time_s
        seconds[phase] += duration
        seen["headrace_step_duration_seconds"][(phase,)].append(duration)
        num_read = decision.num_decode_steps * weights
        num_flops = num_decode = num_prefill = 0
        tokens = Counter()
        chunked = {id(chunk.request) for chunk in decision.prefill}
        for chunk in decision.prefill:
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                num_flops += 2 * matrices + 4 * model.head_dim * model.num_heads * model.num_layers * (position + 1)
                num_prefill += 1
                tokens[(chunk.request.context.tenant, "prefill")] += 1
            num_flops += 2 * params["lm_head/weight"].size * chunk.samples
        for request, count, before in sampled:
            for k in range(count if id(request) not in chunked else 0):
                num_keys = request.num_prompt_tokens + before + k
                num_flops += 2 * matrices + 2 * params["lm_head/weight"].size
                num_flops += 4 * model.head_dim * model.num_heads * model.num_layers * num_keys
                num_read += num_keys * kv_bytes * model.num_layers
                num_decode += 1
                tokens[(request.context.tenant, "decode")] += 1
        values["headrace_step_flops_total"][(phase,)] += num_flops
        values["headrace_step_read_bytes_total"][(phase,)] += num_read
        values["vllm:estimated_flops_per_gpu_total"][plain] += num_flops
        values["vllm:estimated_read_bytes_per_gpu_total"][plain] += num_read
        written = (num_decode + num_prefill) * kv_bytes * model.num_layers
        values["vllm:estimated_write_bytes_per_gpu_total"][plain] += written
        values["headrace_step_tokens_total"][("decode",)] += num_decode
        values["headrace_step_tokens_total"][("prefill",)] += num_prefill
        values["headrace_step_tokens_total"][("padding",)] += decision.prefill_bucket - num_prefill
        places = decision.num_decode_slots * decision.num_decode_steps
        values["headrace_step_tokens_total"][("idle",)] += places - num_decode
        num_sampled = sum(chunk.samples for chunk in decision.prefill)
        seen["vllm:iteration_tokens_total"][plain].append(num_decode + num_prefill + num_sampled)
        values["headrace_multi_step_dispatches_total"][plain] += decision.num_decode_steps > 1
        for (tenant, kind), count in tokens.items():
            labels = (tenant, kind)
            values["headrace_tenant_device_seconds_total"][labels] += duration * count / (num_decode + num_prefill)
    for phase, total_s in ((phase, total_s) for phase, total_s in seconds.items() if total_s):
        flops, num_bytes = (values[f"headrace_step_{what}_total"][(phase,)] for what in ("flops", "read_bytes"))
        values["headrace_mfu"][(phase,)] = flops / total_s / CEILINGS.matmul_flops_per_s
        values["headrace_mbu"][(phase,)] = num_bytes / total_s / CEILINGS.read_bytes_per_s
    uses = values["headrace_step_tokens_total"]
    if log.reads:
        values["headrace_padding_ratio"][plain] = (uses[("padding",)] + uses[("idle",)]) / sum(uses.values())

    # Tenants: as many as the config allows have their own series, in order of appearance; others share one.
    for request in log.requests.values():
        if request["done"]:
            name = (request["tenant"],)
            values["headrace_tenant_prompt_tokens_total"][name] += request["prompt"]
            values["headrace_tenant_generation_tokens_total"][name] += sum(map(len, request["tokens"].values()))
    own = list(dict.fromkeys(log.tenants))[: config.max_tenants]
    for name in list(values):
        if name.startswith("headrace_tenant_"):
            merged = defaultdict(float)
            for (tenant, *rest), value in values[name].items():
                merged[(tenant if tenant in own else "other", *rest)] += value
            values[name] = merged
    for name in ("headrace_preemptions_total", "headrace_preempted_tokens_total"):
        merged = defaultdict(float)
        for (name_of_class, tenant, *rest), value in values[name].items():
            merged[(name_of_class, tenant if tenant in own else "other", *rest)] += value
        values[name] = merged
    for labels, tenant_s in list(values["headrace_tenant_device_seconds_total"].items()):
        values["headrace_tenant_cost_usd_total"][labels] = tenant_s * GPU_HOUR_USD / 3600
    values["headrace_cost_usd_total"][plain] = (now_s - 100.0) * GPU_HOUR_USD / 3600

    # Now
    running = [s for s in engine.scheduler._running]
    held = len({page for sequence in running for page in sequence.page_ids})
    waiting = [r for r in requests if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]
    pages = engine.scheduler.page_allocator
    values["vllm:num_requests_running"][plain] = sum(r.status is RequestStatus.RUNNING for r in requests)
    values["vllm:num_requests_waiting"][plain] = len(waiting)
    values["headrace_waiting_tokens"][plain] = sum(r.num_prompt_tokens + r.num_output_tokens for r in waiting)
    values["vllm:kv_cache_usage_perc"][plain] = held / (engine.runner.num_pages - 1)
    values["headrace_saturation"] = {
        ("slots",): sum(r.status is RequestStatus.RUNNING for r in requests) / engine.config.max_num_seqs,
        ("pages",): held / (engine.runner.num_pages - 1),
    }
    values["headrace_kv_unused_tokens"][plain] = log.unused_tokens()
    values["headrace_kv_pages"] = {
        ("held",): held,
        ("free",): len(pages._free),
        ("cached",): len(pages._evictable),
        ("quarantined",): len(pages._quarantine),
    }
    num_pages = str(engine.runner.num_pages - 1)
    values["vllm:cache_config_info"][(str(engine.config.page_size), num_pages, "float32", "True")] = 1
    values["headrace_ready"][plain] = 1
    values["headrace_step_stuck"][plain] = 0
    values["headrace_compiles_total"][plain] = 0
    values["headrace_page_evictions_total"] = {(cause,): n for cause, n in pages.num_evictions_by_cause.items()}
    assert sum(values["headrace_page_evictions_total"].values()) == engine.stats()["num_page_evictions"]
    values["headrace_prefix_waits_total"][plain] = engine.stats()["num_prefix_waits"]
    values["headrace_pinned_pages"][plain] = 0
    values["headrace_programs"] = {("compiled",): len(engine.runner.reports), ("loaded",): 0}
    values["headrace_slo_seconds"] = {("ttft",): SLO["ttft_slo_s"], ("tpot",): SLO["tpot_slo_s"]}
    values["headrace_peak_flops_per_second"][plain] = CEILINGS.matmul_flops_per_s
    values["headrace_peak_read_bytes_per_second"][plain] = CEILINGS.read_bytes_per_s
    values["headrace_requests_refused_total"] = dict.fromkeys(((reason,) for reason in REFUSALS), 0)
    values["headrace_requests_refused_total"][("invalid",)] = 1

    # The engine's clock has tests of its own, tests/serving/test_step_clock.py.
    times = engine.clock.times()
    idle_min, idle_max = times.idle_fractions()
    for name, value in (
        ("host_seconds_total", times.host),
        ("device_wait_seconds_total", times.wait),
        ("device_span_seconds_total", times.span),
        ("device_idle_min_seconds_total", times.idle_min),
        ("device_idle_max_seconds_total", times.idle_max),
        ("device_idle_fraction_min", idle_min),
        ("device_idle_fraction_max", idle_max),
    ):
        values[f"headrace_{name}"][plain] = value
    return values, seen


def check_scrape(metrics, log):
    """Compare a scrape, as text, with the truth: the same series, the same values, nothing more and nothing less."""
    values, seen = truth(log, metrics.config, "tiny")
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    scraped = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            key = sample.name, frozenset(labels.items())
            assert key not in scraped, key
            scraped[key] = sample.value
    expected = {}
    for name, series in metrics.series.items():
        if series.kind == "histogram":
            by_label = {labels: found for labels, found in seen[name].items() if found or not series.labels}
            if not series.labels:
                by_label.setdefault((), [])
            for labels, found in by_label.items():
                pairs = list(zip(series.labels, labels, strict=True))
                for bound in (*series.bounds, np.inf):
                    le = "+Inf" if bound == np.inf else str(float(bound))
                    expected[f"{name}_bucket", frozenset([*pairs, ("le", le)])] = sum(x <= bound for x in found)
                expected[f"{name}_count", frozenset(pairs)] = len(found)
                expected[f"{name}_sum", frozenset(pairs)] = sum(found)
        else:
            by_label = values[name]
            if series.kind == "counter" and not series.labels:
                by_label.setdefault((), 0.0)
            for labels, value in by_label.items():
                expected[name, frozenset(zip(series.labels, labels, strict=True))] = value
    assert scraped.keys() == expected.keys(), scraped.keys() ^ expected.keys()
    wrong = {key: (scraped[key], value) for key, value in expected.items() if scraped[key] != pytest.approx(value)}
    assert not wrong, wrong


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def engine(clock):
    """Few pages, so that requests are preempted; two decode sizes, so that slots move; four steps in a dispatch."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=400,
        max_num_seqs=6,
        decode_slot_buckets=(2, 6),
        page_size=8,
        prefill_token_buckets=(64,),
        query_block=16,
        max_decode_steps=4,
        num_pages=52,
    )
    targets = SchedulingConfig(
        class_ttft_s=(CLASS["ttft"],), class_tpot_s=(CLASS["tpot"],), slo_control=False, admission_control=False
    )
    return build_engine(f"dummy:{TINY}", config, MeshConfig(), scheduling=targets, now=clock)


@pytest.fixture
def fresh(engine, clock):
    """The engine with nothing in it, its counters at zero and nobody watching."""
    engine.observers = ()
    for request_id in list(engine._groups):
        engine.discard(request_id)
    while engine.has_work():
        engine.step()
    engine.runner.__dict__.pop("dispatch", None)  # what a Log put there
    engine.restart_scheduler(static_batching=False)
    engine.clock = type(engine.clock)(clock)
    clock.now_s = 100.0
    return engine


def params_of(rng, kind):
    base = {"max_tokens": int(rng.integers(1, 90)), "seed": int(rng.integers(2**32))}
    if kind == 0:
        return SamplingParams(**base, ignore_eos=True, n=int(rng.integers(2, 4)))
    if kind == 1:
        return SamplingParams(max_tokens=0, prompt_logprobs=0)  # only scores the prompt
    if kind == 2:
        return SamplingParams(**base, stop_token_ids=tuple(range(0, 300, 20)))
    if kind == 3:
        return SamplingParams(max_tokens=None, stop_token_ids=tuple(range(0, 300, 19)))
    return SamplingParams(**base, ignore_eos=True)


def test_every_series_of_a_replayed_trace_is_what_its_log_gives(fresh, clock):
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    log = Log(fresh, clock, rng)
    config = OperationsConfig(**SLO, gpu_hour_usd=GPU_HOUR_USD, max_tenants=2)
    metrics = EngineMetrics(fresh, config, model_name="tiny", ceilings=CEILINGS)
    shared = rng.integers(10, 300, 40).tolist()
    waiting = []
    for number in range(50):
        length = int(rng.integers(1, 300)) if number % 10 == 0 else int(rng.integers(1, 60))
        own = rng.integers(10, 300, length).tolist()
        waiting.append((shared + own if number % 3 == 0 and length < 60 else own, params_of(rng, number % 6)))
    with pytest.raises(RequestError):
        fresh.add([301], SamplingParams())
    metrics.count_refusal("invalid")
    num_steps = 0
    while waiting or fresh.has_work():
        clock.move(int(rng.integers(1, 60)))
        for _ in range(int(rng.integers(0, 4)) if waiting else 0):
            if waiting:
                prompt, params = waiting.pop()
                tenant = ["default", "acme", "globex", "initech"][len(waiting) % 4]
                request_id = log.add(prompt, params, tenant)
                if len(waiting) % 12 == 5:  # at once: it never gets a slot
                    log.take(fresh.abort(request_id), clock())
        open_ids = [request_id for request_id, request in log.requests.items() if not request["done"]]
        if open_ids and rng.random() < 0.03:
            log.take(fresh.abort(str(rng.choice(open_ids))), clock())
        if fresh.has_work():
            log.step()
            num_steps += 1
        if num_steps % 20 == 1:
            check_scrape(metrics, log)
    check_scrape(metrics, log)
    stats = fresh.stats()
    assert stats["num_preemptions"] and stats["num_cached_tokens"] and stats["num_page_evictions"]
    assert stats["num_finished_stop"] and stats["num_finished_length"] and stats["num_finished_abort"]
    values = metrics.values()
    assert values["headrace_slot_moves_total"][()] and values["headrace_multi_step_dispatches_total"][()]
    assert {labels[0] for labels in values["headrace_tenant_prompt_tokens_total"]} > {"other"}
    # At rest everything adds up: what came in went out, and tenants and phases share the totals.
    finished = values["vllm:request_success_total"]
    assert sum(finished.values()) == sum(request["params"].n for request in log.requests.values())
    assert sum(values["headrace_tenant_generation_tokens_total"].values()) == stats["num_output_tokens"]
    assert sum(values["headrace_preemptions_total"].values()) == stats["num_preemptions"]
    assert len(values["headrace_class_requests_total"]) >= 2
    assert values["headrace_kv_pages"][("held",)] == values["headrace_kv_pages"][("quarantined",)] == 0


def test_a_scrape_may_come_before_any_request_and_names_every_metric(fresh):
    body, _ = EngineMetrics(fresh, model_name='a "model"\n\\').exposition()
    families = list(text_string_to_metric_families(body.decode()))
    assert {family.name.removesuffix("_total") for family in families} == {
        series.name.removesuffix("_total") for series in series_of(fresh.max_model_len)
    }
    assert {sample.labels["model_name"] for family in families for sample in family.samples} == {'a "model"\n\\'}
    documented = {sample.name for family in families for sample in family.samples}
    assert {"vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count"} <= documented


def test_metrics_of_two_engines_share_nothing(fresh):
    first = EngineMetrics(fresh, model_name="one")
    second = EngineMetrics(fresh, model_name="two", engine_index=1)
    first.count_refusal("overloaded")
    samples = {m: m.values()["headrace_requests_refused_total"][("overloaded",)] for m in (first, second)}
    assert samples == {first: 1.0, second: 0.0}


def test_names_of_tenants_are_bounded_in_number_and_form(fresh):
    metrics = EngineMetrics(fresh, OperationsConfig(max_tenants=3), model_name="tiny")
    for number in range(20):
        context = RequestContext(tenant=f"tenant {number}")
        fresh.add([1, 2], SamplingParams(max_tokens=1), context=context)
    while fresh.has_work():
        fresh.step()
    tokens = metrics.values()["headrace_tenant_prompt_tokens_total"]
    assert len(tokens) == 4 and tokens[("other",)] == 2 * 17 and sum(tokens.values()) == 40
    for name in ("", "x" * 65, "a\nb", "é", "\0", 7, None):
        with pytest.raises(RequestError, match="tenant"):
            RequestContext(tenant=name)


def test_shares_and_ratios_look_back_a_minute_and_then_go(fresh, clock):
    metrics = EngineMetrics(fresh, model_name="tiny", ceilings=CEILINGS)
    fresh.add([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    while fresh.has_work():
        clock.move(10)
        fresh.step()
    assert set(metrics.values()["headrace_mfu"]) == {("prefill",), ("decode",)}
    clock.move(61 * 1024)
    values = metrics.values()
    assert values["headrace_mfu"] == values["headrace_mbu"] == {} and "headrace_padding_ratio" not in values
    assert values["headrace_step_tokens_total"][("decode",)] == 2


def test_records_are_worked_in_without_a_scrape(fresh):
    metrics = EngineMetrics(fresh, model_name="tiny")
    longest = 0
    for _ in range(4):
        fresh.add([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
        while fresh.has_work():
            fresh.step()
            longest = max(longest, len(metrics._records))
    assert 1 < longest < 64 and sum(metrics._sums["headrace_step_tokens_total"].values()) > 500


def test_an_observer_that_fails_is_taken_off_and_the_request_goes_on(fresh, caplog):
    class Broken(EngineObserver):
        def step_read(self, record):
            raise RuntimeError("out of ideas")

    metrics = EngineMetrics(fresh, model_name="tiny")
    fresh.observers = (Broken(), metrics)
    request_id = fresh.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    while fresh.has_work():
        fresh.step()
    assert len(fresh.collect(request_id).outputs[0].token_ids) == 5
    assert fresh.observers == (metrics,) and "observer" in caplog.text
    assert metrics.values()["vllm:generation_tokens_total"][()] == 5


def test_times_of_a_request_are_in_its_output(fresh, clock):
    request_id = fresh.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True, n=2))
    times = []
    while fresh.has_work():
        clock.move(100)
        fresh.step()
        times.append(clock())
    output = fresh.collect(request_id).metrics
    assert output["arrival_time_s"] == 100.0 and output["first_scheduled_time_s"] == times[0]
    assert output["first_token_time_s"] == times[1]
    assert output["last_token_time_s"] == output["finish_time_s"] == times[-1]


def schema_problems(value, schema, where="$"):
    """Where a JSON value departs from `schema`: types, tuples of them, dicts of named parts, [item], or {str: item}."""
    if isinstance(schema, dict) and str not in schema:
        if not isinstance(value, dict) or value.keys() != schema.keys():
            return [where]
        return [p for key, part in schema.items() for p in schema_problems(value[key], part, f"{where}.{key}")]
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [where]
        return [p for key, item in value.items() for p in schema_problems(item, schema[str], f"{where}.{key}")]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [where]
        return [p for i, item in enumerate(value) for p in schema_problems(item, schema[0], f"{where}[{i}]")]
    return [] if isinstance(value, schema) and not isinstance(value, bool if schema is not bool else ()) else [where]


NUMBER, MAYBE = (int, float), (int, float, type(None))
PERCENTILES = {"p50_s": MAYBE, "p90_s": MAYBE, "p99_s": MAYBE}
BY_PHASE = {"decode": MAYBE, "prefill": MAYBE, "mixed": MAYBE}
SNAPSHOT = {
    "state": str,
    "model": {"name": str, "engine": str, "dtype": str, "kv_dtype": str, "max_model_len": int},
    "queues": {"num_running": int, "num_slots": int, "num_waiting": int, "num_waiting_tokens": int},
    "kv": {
        "page_size": int,
        "pages": {"held": NUMBER, "cached": NUMBER, "free": NUMBER, "quarantined": NUMBER},
        "used_fraction": NUMBER,
        "waste_fraction": MAYBE,
        "cells": [[NUMBER]],
    },
    "steps": {"window_s": NUMBER, "tokens": {"decode": int, "prefill": int, "padding": int, "idle": int}},
    "latency": {
        "num_completions": int,
        "ttft": {"target_s": NUMBER, **PERCENTILES},
        "tpot": {"target_s": NUMBER, **PERCENTILES},
        "by_length": [{"input_tokens": str, "num_completions": int, "ttft": PERCENTILES, "tpot": PERCENTILES}],
    },
    "prefix_cache": {"enabled": bool, "queried_tokens": NUMBER, "hit_tokens": NUMBER, "hit_fraction": MAYBE},
    "hardware": {
        "mbu": BY_PHASE,
        "mfu": BY_PHASE,
        "device_idle_fraction_min": NUMBER,
        "device_idle_fraction_max": NUMBER,
    },
    "mesh": {
        "axes": [{"name": str, "size": int}],
        "device_kind": str,
        "num_devices": int,
        "devices": [{"id": int, "process": int, "place": [int]}],
        "memory_bytes": {"weights": int, "slot_table": int, "workspace": int, "kv_pool": int, "slack": int},
    },
    "totals": {
        "uptime_s": NUMBER,
        "requests": NUMBER,
        "refused": {str: NUMBER},
        "finished": {str: NUMBER},
        "prompt_tokens": NUMBER,
        "generation_tokens": NUMBER,
        "preemptions": NUMBER,
        "compiles": NUMBER,
        "programs": int,
    },
}


def test_the_status_snapshot_is_json_of_its_schema_before_while_and_after_serving(fresh, clock):
    metrics = EngineMetrics(fresh, model_name="tiny", ceilings=CEILINGS)

    def snapshot():
        found = json.loads(json.dumps(status_snapshot(fresh, metrics), allow_nan=False))
        assert schema_problems(found, SNAPSHOT) == []
        return found

    empty = snapshot()
    assert empty["state"] == "ready" and empty["latency"]["ttft"]["p50_s"] is None
    assert empty["hardware"]["mbu"] == {"decode": None, "prefill": None, "mixed": None}
    assert sum(held + cached for held, cached in empty["kv"]["cells"]) == 0
    context = RequestContext(tenant="a-tenant")
    for _ in range(8):
        fresh.add([1] * 20, SamplingParams(max_tokens=12, ignore_eos=True), context=context)
    for _ in range(3):
        clock.move(32)
        fresh.step()
    running = snapshot()
    assert running["queues"] == {"num_running": 6, "num_slots": 6, "num_waiting": 2, "num_waiting_tokens": 40}
    num_pages = fresh.runner.num_pages - 1
    cells = running["kv"]["cells"]
    assert len(cells) == num_pages and sum(held for held, _ in cells) == running["kv"]["pages"]["held"] > 0
    while fresh.has_work():
        clock.move(32)
        fresh.step()
    done = snapshot()
    assert done["totals"]["finished"]["length"] == done["latency"]["num_completions"] == 8
    assert done["totals"]["generation_tokens"] == 96 and done["prefix_cache"]["hit_tokens"] > 0
    assert done["latency"]["ttft"]["p50_s"] >= 1 / 16 and done["hardware"]["mbu"]["decode"] > 0
    assert sum(cached for _, cached in done["kv"]["cells"]) == done["kv"]["pages"]["cached"] > 0
    assert "a-tenant" not in json.dumps(done)
    metrics.is_stuck = lambda: True
    assert snapshot()["state"] == "stuck"


def test_cells_of_the_pool_are_equal_shares_of_its_pages(fresh):
    pages = fresh.scheduler.page_allocator
    held = pages.try_allocate(7)
    assert held == list(range(1, 8))
    assert pages.occupancy(1) == [(7 / 51, 0.0)]
    assert pages.occupancy(3) == [(7 / 17, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert pages.occupancy(51)[:8] == [(1.0, 0.0)] * 7 + [(0.0, 0.0)]
    pages.free(held, after_step=0)
    assert {cell for cell in pages.occupancy(240)} == {(0.0, 0.0)}
