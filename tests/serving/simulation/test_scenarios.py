"""What the scenarios are to show, in shorter runs: simulated times and counts alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.scheduling.step_time import LinearStepTime
from serving.simulation.control import controlled_simulator
from serving.simulation.results import RunResult
from serving.simulation.scenarios import (
    BOUNDED,
    FLOOD,
    H200_8B,
    SCENARIOS,
    STRONGEST,
    Bound,
    chosen,
    scheduler_config,
)
from serving.simulation.trace import BLOCK_TOKENS, block_hit_rate, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"


def figures(name: str, duration_s: float, *variants: str) -> tuple[dict[str, Any], dict[str, RunResult]]:
    """What a shorter run of the scenario's variants shows, and the runs."""
    scenario = SCENARIOS[name]
    trace = scenario.trace(0, duration_s)
    until_s = duration_s if scenario.is_cut else None
    results = {}
    for variant_name in variants:
        variant = scenario.variants[variant_name]
        config = variant.scheduler_config(scenario.engine)
        results[variant_name] = controlled_simulator(config, LinearStepTime()).run(variant.trace(trace), until_s)
    return scenario.figures(results), results


def broken(found: dict[str, Any]) -> dict[str, str]:
    bounds = {name: value for name, value in found.items() if isinstance(value, Bound)}
    assert bounds
    return {name: str(bound) for name, bound in bounds.items() if not bound.is_kept}


def test_a_long_prompt_at_most_doubles_the_gap_between_tokens_of_64_users():
    found, runs = figures("long_prompt", 0.0, "steady", "chunks of 128", "whole", BOUNDED)
    assert broken(found) == {}
    assert found["chunks of 128: over the steady gap"] <= 2.0
    assert found["whole: over the steady gap"] > 100.0
    bounded, small = (chosen(runs[name], class_name="long")[0].ttft_s for name in (BOUNDED, "chunks of 128"))
    assert bounded < 0.8 * small  # chunks are as large as the bound lets them be


def test_interactive_requests_hardly_notice_batch_work_that_keeps_most_of_its_rate():
    found, _ = figures("batch_and_interactive", 20.0, "interactive alone", "batch alone", "two classes", STRONGEST)
    assert broken(found) == {}
    assert found["two classes: over alone"] > 1.5  # what priorities alone bring


def test_a_tenant_at_20_times_its_budget_takes_nothing_from_nine_within_theirs():
    for variant, duration_s in (("KV budgets and floors", 40.0), ("KV budgets, floors and rate limits", 120.0)):
        found, runs = figures("tenants", duration_s, "quiet alone", variant)
        assert broken(found) == {}
        requests = runs[variant].requests
        assert any(not request.is_complete for request in requests if request.tenant == FLOOD)
        assert not any(request.refused for request in requests if request.tenant != FLOOD)


def test_an_overcommitted_pool_preempts_few_and_loses_nothing():
    found, runs = figures("overcommit", 25.0, "as much", "three times")
    assert broken(found) == {}
    assert runs["as much"].stats.num_preemptions == 0 < runs["three times"].stats.num_preemptions


def test_with_a_pool_that_holds_all_the_prefix_cache_finds_the_blocks_that_a_trace_repeats():
    trace = read_trace(TRACES / "mooncake_conversation.jsonl")
    config = scheduler_config(replace(H200_8B, page_size=BLOCK_TOKENS, num_pages=20_000))
    result = controlled_simulator(config, LinearStepTime()).run(trace)
    num_blocks = sum(len(request.hash_ids) for request in trace)
    found = sum(request.num_cached_tokens for request in result.requests) / BLOCK_TOKENS / num_blocks
    assert block_hit_rate(trace) > 0.05
    assert found == pytest.approx(block_hit_rate(trace), abs=0.01)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_makes_the_same_trace_in_order_of_arrival(name):
    trace = SCENARIOS[name].trace(3, 20.0)
    assert trace == SCENARIOS[name].trace(3, 20.0)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
