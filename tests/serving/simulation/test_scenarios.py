"""What the scenarios are to show, where the scheduler already does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step_time import LinearStepTime
from serving.simulation.results import RunResult
from serving.simulation.scenarios import H200_8B, SCENARIOS, chosen, scheduler_config
from serving.simulation.simulator import Simulator
from serving.simulation.trace import BLOCK_TOKENS, block_hit_rate, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"


def run(name: str, *variants: str) -> dict[str, RunResult]:
    scenario = SCENARIOS[name]
    trace = scenario.trace(0)
    results = {}
    for variant_name in variants:
        variant = scenario.variants[variant_name]
        kept = [request for request in trace if variant.keeps is None or variant.keeps(request)]
        config = variant.scheduler_config(scenario.engine)
        results[variant_name] = Simulator(Scheduler(config), LinearStepTime()).run(kept, scenario.until_s)
    return results


def test_a_long_prompt_in_small_chunks_at_most_doubles_the_gap_between_tokens_of_64_users():
    runs = run("long_prompt", "steady", "chunks of 128", "whole")
    steady_s = max(request.tpot_s for request in runs["steady"].requests)
    chunked_s = max(request.max_gap_s for request in chosen(runs["chunks of 128"], class_name="user"))
    whole_s = max(request.max_gap_s for request in chosen(runs["whole"], class_name="user"))
    (long,) = chosen(runs["whole"], class_name="long")
    assert chunked_s <= 2 * steady_s
    assert whole_s == pytest.approx(long.ttft_s, rel=0.05)  # unchunked, users wait for the whole prefill


def test_an_overcommitted_pool_preempts_few_and_loses_nothing():
    runs = run("overcommit", "as much", "three times")
    for result in runs.values():
        assert all(request.is_complete for request in result.requests)
    fitting, overcommitted = runs.values()
    assert fitting.stats.num_preemptions == 0 < overcommitted.stats.num_preemptions
    assert overcommitted.stats.num_preemptions <= 0.2 * len(overcommitted.requests)
    assert overcommitted.summary()["goodput_rps"] >= 0.95 * fitting.summary()["goodput_rps"]


def test_with_a_pool_that_holds_all_the_prefix_cache_finds_the_blocks_that_a_trace_repeats():
    trace = read_trace(TRACES / "mooncake_conversation.jsonl")
    config = scheduler_config(replace(H200_8B, page_size=BLOCK_TOKENS, num_pages=20_000))
    result = Simulator(Scheduler(config), LinearStepTime()).run(trace)
    num_blocks = sum(len(request.hash_ids) for request in trace)
    found = sum(request.num_cached_tokens for request in result.requests) / BLOCK_TOKENS / num_blocks
    assert block_hit_rate(trace) > 0.05
    assert found == pytest.approx(block_hit_rate(trace), abs=0.01)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_makes_the_same_trace_in_order_of_arrival(name):
    trace = SCENARIOS[name].trace(3)
    assert trace == SCENARIOS[name].trace(3)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
