"""Goodput: live counters against the log of requests, recomputed by other means."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from configs.scheduling import SchedulingConfig
from serving.observer import CompletionRecord, RequestRecord
from serving.request import FinishReason, RequestContext, SamplingParams
from serving.scheduling.goodput import GoodputCounters, outcome

CONFIG = SchedulingConfig(
    class_names=("chat", "agent", "batch"),
    class_priorities=(0, 5, 10),
    class_ttft_s=(0.5, 2.0, 0.0),
    class_tpot_s=(0.02, 0.0, 0.0),
)


def completion(first_s, last_s, count, reason=FinishReason.STOP, end_s=None):
    return CompletionRecord(
        num_output_tokens=count,
        finish_reason=reason,
        num_preemptions=0,
        first_scheduled_time_s=first_s,
        first_token_time_s=first_s,
        last_token_time_s=last_s,
        finish_time_s=(last_s if end_s is None else end_s),
    )


def record(priority, arrival_s, *completions):
    return RequestRecord(
        request_id="r",
        context=RequestContext(priority=priority),
        params=SamplingParams(),
        num_prompt_tokens=1,
        num_cached_tokens=0,
        arrival_time_s=arrival_s,
        completions=completions,
    )


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (record(0, 0.0, completion(0.5, 0.7, 11)), ("chat", True, True)),
        (record(0, 0.0, completion(0.51, 0.7, 11)), ("chat", False, True)),
        (record(0, 0.0, completion(0.5, 0.71, 11)), ("chat", True, False)),
        (record(0, 0.0, completion(0.5, 0.5, 1)), ("chat", True, True)),
        (record(4, 0.0, completion(0.1, 9.0, 2)), ("chat", True, False)),
        (record(-9, 0.0, completion(0.1, 0.1, 1)), ("chat", True, True)),
        (record(5, 0.0, completion(2.0, 99.0, 2)), ("agent", True, True)),
        (record(99, 0.0, completion(50.0, 99.0, 2)), ("batch", True, True)),
        (record(0, 0.0, completion(0.1, 0.1, 1), completion(0.6, 0.6, 1)), ("chat", False, True)),
        (record(0, 0.0, completion(0.1, 0.2, 9, FinishReason.ERROR)), ("chat", False, False)),
        (record(9, 0.0, completion(None, None, 0, FinishReason.TIMEOUT, 1.0)), ("agent", False, False)),
        (record(0, 0.0, completion(None, None, 0, FinishReason.LENGTH, 0.4)), ("chat", True, True)),
        (record(0, 0.0, completion(0.1, 0.2, 9), completion(0.1, 0.2, 3, FinishReason.ABORT)), None),
    ],
    ids=[
        *("met", "late", "slow", "single_token", "between_classes", "below_all_classes", "no_tpot", "no_target"),
        *("slowest_of_two", "error", "timeout", "scored", "given_up"),
    ],
)
def test_an_outcome(ended, expected):
    assert outcome(ended, CONFIG) == expected


def test_live_counters_equal_what_the_log_recomputes():
    rng = np.random.default_rng(5)
    live, log = GoodputCounters(CONFIG), []
    for _ in range(2000):
        arrival_s = float(rng.uniform(0, 1e4))
        completions = []
        for _ in range(int(rng.integers(1, 4))):
            count = int(rng.integers(1, 30))
            first_s = arrival_s + float(rng.exponential(0.5))
            last_s = first_s + (count - 1) * float(rng.exponential(0.02))
            reason = rng.choice(list(FinishReason), p=[0.5, 0.3, 0.05, 0.1, 0.05])
            completions.append(completion(first_s, last_s, count, FinishReason(reason)))
        ended = record(int(rng.integers(-2, 14)), arrival_s, *completions)
        live.add(ended)
        log.append(ended)

    recomputed = Counter()
    for entry in log:
        reasons = {c.finish_reason for c in entry.completions}
        if FinishReason.ABORT in reasons:
            continue
        name = "chat" if entry.context.priority < 5 else "agent" if entry.context.priority < 10 else "batch"
        ttft_s = max(c.first_token_time_s - entry.arrival_time_s for c in entry.completions)
        gaps = [
            (c.last_token_time_s - c.first_token_time_s) / (c.num_output_tokens - 1)
            for c in entry.completions
            if c.num_output_tokens > 1
        ]
        is_fault = bool(reasons & {FinishReason.ERROR, FinishReason.TIMEOUT})
        ttft_met = not is_fault and ttft_s <= {"chat": 0.5, "agent": 2.0, "batch": 1e9}[name]
        tpot_met = not is_fault and (name != "chat" or max(gaps, default=0.0) <= 0.02)
        recomputed[name, ttft_met, tpot_met] += 1
    assert live.counts == recomputed and len(recomputed) >= 8
    assert live.num_good("chat") == recomputed["chat", True, True] > 0
