from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from configs.checks import ConfigError
from serving.simulation.trace import (
    BLOCK_TOKENS,
    Load,
    TraceRequest,
    arrivals,
    block_hit_rate,
    merge,
    mix,
    read_trace,
    requests_per_s,
    scale_rate,
    window,
)

TRACES = Path(__file__).parents[2] / "data" / "traces"


def test_azure_rows_become_requests_by_arrival():
    trace = read_trace(TRACES / "azure2023_conv.csv")
    assert len(trace) == 300
    first, second = trace[:2]
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert (second.arrival_s, second.num_prompt_tokens, second.num_output_tokens) == (4.315, 396, 109)


def test_mooncake_prompts_share_tokens_as_far_as_their_hash_ids():
    trace = read_trace(TRACES / "mooncake_conversation.jsonl")
    first, second = trace[0].prompt(0), trace[1].prompt(1)
    assert (len(first), len(second)) == (trace[0].num_prompt_tokens, trace[1].num_prompt_tokens)
    assert trace[0].hash_ids[0] == trace[1].hash_ids[0] and trace[0].hash_ids[1] != trace[1].hash_ids[1]
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS]
    assert first[BLOCK_TOKENS] != second[BLOCK_TOKENS]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 600])
def test_prompts_without_hash_ids_differ_and_have_their_length(num_tokens):
    request = TraceRequest(arrival_s=0.0, num_prompt_tokens=num_tokens, num_output_tokens=1)
    assert len(request.prompt(1)) == num_tokens and request.prompt(1) != request.prompt(2)


def test_a_trace_without_times_gets_poisson_arrivals():
    trace = read_trace(TRACES / "sharegpt_lengths.csv", requests_per_s=4.0, seed=1)
    assert len(trace) == 200 and requests_per_s(trace) == pytest.approx(4.0, rel=0.2)
    assert trace == read_trace(TRACES / "sharegpt_lengths.csv", requests_per_s=4.0, seed=1)


@pytest.mark.parametrize("cv", [0.0, 1.0, 3.0])
def test_gaps_have_the_rate_and_variation_asked_for(cv):
    gaps_s = np.diff(arrivals(20_000, 5.0, cv=cv, seed=3))
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.1) and gaps_s.std() / gaps_s.mean() == pytest.approx(cv, abs=0.2)


def test_a_mix_has_each_load_with_its_rate_lengths_and_names():
    loads = [
        Load(requests_per_s=10.0, prompt_tokens=300, output_tokens=50, length_cv=1.0, class_name="a", priority=5),
        Load(requests_per_s=2.0, prompt_tokens=10, output_tokens=1, start_s=100.0, tenant="b", timeout_s=3.0),
    ]
    trace = mix(loads, duration_s=200.0)
    assert [r.arrival_s for r in trace] == sorted(r.arrival_s for r in trace)
    first, second = ([r for r in trace if r.class_name == name] for name in ("a", "default"))
    assert len(first) == pytest.approx(2000, rel=0.1) and len(second) == pytest.approx(200, rel=0.3)
    assert np.mean([r.num_prompt_tokens for r in first]) == pytest.approx(300, rel=0.1)
    assert {r.num_prompt_tokens for r in second} == {10} and min(r.arrival_s for r in second) >= 100.0
    assert {(r.tenant, r.priority, r.timeout_s) for r in trace} == {("default", 5, None), ("b", 0, 3.0)}


def test_rates_scale_and_windows_start_at_zero():
    trace = read_trace(TRACES / "azure2023_code.csv")
    assert requests_per_s(scale_rate(trace, 3.0)) == pytest.approx(3 * requests_per_s(trace))
    cut = window(trace, 10.0, 20.0)
    assert len(cut) == sum(10.0 <= r.arrival_s < 30.0 for r in trace) > 0
    assert all(0.0 <= r.arrival_s < 20.0 for r in cut)
    assert len(merge([trace, cut])) == len(trace) + len(cut)


def test_block_hit_rate_counts_runs_from_the_start():
    def request(*hash_ids):
        return TraceRequest(arrival_s=0.0, num_prompt_tokens=1, num_output_tokens=1, hash_ids=hash_ids)

    assert block_hit_rate([request(1, 2), request(1, 3, 2), request(4, 1)]) == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", r"a \.csv or a \.jsonl"),
        ("empty.csv", "arrival_ms,input_tokens,output_tokens\n", "holds no requests"),
        ("field.csv", "arrival_ms,input_tokens\n0,1\n", r"field\.csv:2: output_tokens must be a number, got None"),
        ("word.csv", "arrival_ms,input_tokens,output_tokens\n0,x,1\n", r"word\.csv:2: input_tokens .* got 'x'"),
        ("zero.csv", "arrival_ms,input_tokens,output_tokens\n0,1,0\n", "output_tokens must be at least 1"),
        ("times.csv", "input_tokens,output_tokens\n1,1\n", "has no arrival_ms: requests_per_s is needed"),
        ("json.jsonl", "{\n", r"json\.jsonl:1: is not JSON"),
        ("list.jsonl", "[]\n", r"list\.jsonl:1: must be a JSON object"),
        (
            "blocks.jsonl",
            json.dumps({"arrival_ms": 0, "input_tokens": 513, "output_tokens": 1, "hash_ids": [1]}),
            "hash_ids has 1 entries; input_tokens=513 are 2 blocks",
        ),
    ],
    ids=["suffix", "empty", "field", "word", "zero", "times", "json", "list", "blocks"],
)
def test_a_bad_file_is_refused_with_its_line_and_field(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_a_rate_for_a_trace_that_has_times_is_refused():
    with pytest.raises(ConfigError, match="requests_per_s"):
        read_trace(TRACES / "azure2023_conv.csv", requests_per_s=1.0)


def test_hash_ids_are_one_for_each_block():
    for request in read_trace(TRACES / "mooncake_conversation.jsonl"):
        assert len(request.hash_ids) == math.ceil(request.num_prompt_tokens / BLOCK_TOKENS)
