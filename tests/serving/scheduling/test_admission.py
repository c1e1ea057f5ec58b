"""Admission by the predicted wait for the first token."""

from __future__ import annotations

import dataclasses
import math

import pytest

from configs.scheduling import SchedulingConfig
from serving.scheduling.admission import AdmissionControl, LoadSnapshot, predicted_wait_s

CONFIG = SchedulingConfig(
    class_names=("chat", "batch"), class_priorities=(0, 10), class_ttft_s=(2.0, 0.0), class_tpot_s=(0.05, 0.0)
)
IDLE = LoadSnapshot(
    time_s=10.0,
    waiting_requests=(0, 0),
    waiting_tokens=(0, 0),
    waiting_pairs=(0, 0),
    prefilling_tokens=0,
    num_running=8,
    num_free_slots=8,
    free_kv_tokens=100_000,
    prefill_tokens_per_s=10_000.0,
    full_prefill_tokens_per_s=5_000.0,
    pairs_a_token=501.0,
    pair_s=1e-8,
    ends_per_s=4.0,
    ended_kv_tokens=2_000.0,
    step_s=0.01,
)
CHAT, BATCH = 0, 10


def control(**changes) -> AdmissionControl:
    admission = AdmissionControl(CONFIG)
    admission.publish(dataclasses.replace(IDLE, **changes))
    return admission


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        ({}, 0.1),  # its own prefill
        ({"prefilling_tokens": 5_000}, 1.0 + 0.1),
        ({"num_free_slots": 0}, 0.25 + 0.1),
        ({"free_kv_tokens": -1_000.0}, 2_000 / 8_000 + 0.1),
    ],
    ids=["idle", "compute", "slots", "pages"],
)
def test_a_wait_is_what_takes_longest_and_then_the_own_prefill(changes, wait_s):
    snapshot = dataclasses.replace(IDLE, **changes)
    assert predicted_wait_s(snapshot, 1_000, 0, 0) == pytest.approx(wait_s + 2 * IDLE.step_s)


def test_a_long_prompt_is_dearer_than_its_tokens():
    short, long = predicted_wait_s(IDLE, 1_000, 0, 0), predicted_wait_s(IDLE, 20_000, 0, 0)
    assert long - 2 * IDLE.step_s > 1.5 * 20 * (short - 2 * IDLE.step_s)
    pairs = 20_000 * 20_001 // 2
    assert predicted_wait_s(IDLE, 1_000, 1, 20_000, pairs) > predicted_wait_s(IDLE, 1_000, 1, 20_000, 20_000 * 500) + 1


def test_an_idle_engine_accepts_and_a_busy_one_queues_then_refuses():
    assert control().decide(CHAT, 1_000, 10.0).action == "accept"
    assert control(waiting_requests=(1, 0), waiting_tokens=(1_000, 0)).decide(CHAT, 1_000, 10.0).action == "queue"
    refused = control(waiting_requests=(20, 0), waiting_tokens=(20_000, 0)).decide(CHAT, 1_000, 10.0)
    assert refused.action == "refuse" and refused.wait_s > 2.0


def test_after_the_time_to_wait_a_request_would_be_taken():
    tokens = 40_000
    refused = control(waiting_requests=(20, 0), waiting_tokens=(tokens, 0)).decide(CHAT, 1_000, 10.0)
    computed = round(refused.retry_after_s * IDLE.full_prefill_tokens_per_s)
    later = control(waiting_requests=(1, 0), waiting_tokens=(max(tokens - computed, 0), 0))
    assert refused.action == "refuse" and later.decide(CHAT, 1_000, 10.0).action == "queue"
    assert 5 <= refused.retry_after_s <= 11


def test_a_better_class_does_not_wait_behind_a_worse_one():
    admission = control(waiting_requests=(0, 500), waiting_tokens=(0, 500_000))
    assert admission.decide(CHAT, 1_000, 10.0).action == "accept"
    assert admission.decide(BATCH, 1_000, 10.0).action == "refuse"  # more than max_queue_s


def test_a_class_without_a_target_waits_for_as_long_as_max_queue_s():
    tokens = round(IDLE.full_prefill_tokens_per_s * CONFIG.max_queue_s * 0.5)
    assert control(waiting_requests=(0, 9), waiting_tokens=(0, tokens)).decide(BATCH, 100, 10.0).action == "queue"


def test_a_burst_between_two_steps_is_counted():
    admission = control()
    actions = [admission.take(CHAT, 1_000, 10.0 + i / 1024).action for i in range(1, 40)]
    assert actions[0] == "accept" and actions[-1] == "refuse"
    num_taken = len(actions) - actions.count("refuse")
    assert 4 <= num_taken <= 11
    admission.publish(dataclasses.replace(IDLE, time_s=11.0))  # all of them have got their slots
    assert admission.take(CHAT, 1_000, 11.001).action == "accept"


def test_a_prompt_that_takes_longer_than_its_target_runs_on_an_idle_engine_alone():
    assert control(num_running=0).take(CHAT, 50_000, 10.0).action == "accept"
    refused = control().decide(CHAT, 50_000, 10.0)
    assert refused.action == "refuse" and refused.own_s > refused.limit_s == 2.0
    assert 15 <= refused.retry_after_s <= 30
    admission = control(num_running=0)
    assert [admission.take(CHAT, 50_000, 10.0 + i / 1024).action for i in range(1, 4)] == ["accept", "refuse", "refuse"]


def test_before_the_first_step_everything_is_accepted():
    assert AdmissionControl(CONFIG).decide(CHAT, 10**6, 0.0).action == "accept"


def test_predictions_that_come_out_short_are_trusted_less():
    admission = control(waiting_requests=(7, 0), waiting_tokens=(5_000, 0))
    assert admission.decide(CHAT, 1_000, 10.0).action == "queue"
    for _ in range(60):
        admission.learn(CHAT, 1.0, 2.5)
    assert admission.decide(CHAT, 1_000, 10.0).action == "refuse"
    assert 2.0 < admission.caution < 4.0


def test_a_time_to_wait_is_bounded():
    refused = control(waiting_requests=(9, 0), waiting_tokens=(10**12, 0)).decide(CHAT, 1_000, 10.0)
    assert refused.retry_after_s == 3600 and math.isfinite(refused.wait_s)
