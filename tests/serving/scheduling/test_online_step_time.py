"""A step-time model that learns: from a wrong prior, through noise and outliers, and anew when the machine changes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.step_time import LinearStepTime, StepWork

BUCKETS = (512, 1024, 2048, 4096)
PRIORS = {
    "half": LinearStepTime(
        base_s=2e-3, decode_row_s=8e-6, decode_kv_token_s=15e-9, prefill_token_s=11e-6, prefill_pair_s=5e-10
    ),
    "crooked": LinearStepTime(
        base_s=3e-3, decode_row_s=5e-6, decode_kv_token_s=40e-9, prefill_token_s=12e-6, prefill_pair_s=2e-9
    ),
    "tenfold": LinearStepTime(
        base_s=45e-3, decode_row_s=155e-6, decode_kv_token_s=3e-7, prefill_token_s=2e-4, prefill_pair_s=1e-8
    ),
}


def works(rng: np.random.Generator, context: int, count: int) -> list[StepWork]:
    found = []
    for _ in range(count):
        rows = int(rng.integers(1, 257))
        num_steps = 8 if rng.random() < 0.2 else 1
        bucket = 0 if num_steps > 1 or rng.random() < 0.5 else int(rng.choice(BUCKETS))
        found.append(
            StepWork(
                num_decode_slots=next(size for size in (8, 32, 64, 128, 256) if size >= rows),
                num_decode_rows=rows,
                num_decode_steps=num_steps,
                decode_kv_tokens=int(rows * num_steps * context * rng.uniform(0.8, 1.2)),
                prefill_bucket=bucket,
                num_prefill_tokens=bucket,
                prefill_kv_pairs=int(bucket * rng.uniform(0.2, 1) * context),
            )
        )
    return found


def learn(model, device, rng, context, count, *, noise=0.03, outliers=0.01):
    for work in works(rng, context, count):
        seconds = device.predict_s(work) * math.exp(rng.normal(0, noise))
        if rng.random() < outliers:
            seconds += rng.exponential(1.0)  # a compilation, a pause of the host
        model.observe(work, seconds)


def mean_error(model, device, rng, context):
    return float(np.mean([abs(model.predict_s(w) / device.predict_s(w) - 1) for w in works(rng, context, 200)]))


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_a_wrong_prior_is_corrected_within_200_noisy_steps(prior):
    rng, device, model = np.random.default_rng(0), LinearStepTime(), OnlineStepTime(prior, BUCKETS)
    learn(model, device, rng, 1000, 200)
    assert mean_error(model, device, rng, 1000) < 0.03
    assert model.relative_error < 0.06


@pytest.mark.parametrize("context", [250, 4000], ids=["shorter", "longer"])
def test_lengths_that_shift_are_followed(context):
    rng, device, model = np.random.default_rng(1), LinearStepTime(), OnlineStepTime(PRIORS["crooked"], BUCKETS)
    learn(model, device, rng, 1000, 400)
    learn(model, device, rng, context, 100)
    assert mean_error(model, device, rng, context) < 0.03


def test_a_machine_that_slows_down_is_followed_within_40_steps():
    rng, device, model = np.random.default_rng(2), LinearStepTime(), OnlineStepTime(PRIORS["half"], BUCKETS)
    learn(model, device, rng, 1000, 400)

    class Slower:
        def predict_s(self, work):
            return 1.5 * device.predict_s(work)

    learn(model, Slower(), rng, 1000, 40)
    assert mean_error(model, Slower(), rng, 1000) < 0.03


def test_a_pause_of_a_minute_moves_predictions_by_less_than_a_hundredth():
    rng, device, model = np.random.default_rng(3), LinearStepTime(), OnlineStepTime(PRIORS["half"], BUCKETS)
    learn(model, device, rng, 1000, 300, outliers=0)
    probes = works(rng, 1000, 50)
    before = [model.predict_s(work) for work in probes]
    for work in works(rng, 1000, 2):
        model.observe(work, 60.0)
    changes = [abs(model.predict_s(work) / seconds - 1) for work, seconds in zip(probes, before, strict=True)]
    assert max(changes) < 0.01


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf], ids=str)
def test_a_duration_that_is_none_is_passed_over(seconds):
    model = OnlineStepTime(PRIORS["half"], BUCKETS)
    model.observe(StepWork(num_decode_slots=8), seconds)
    assert model.num_steps == 0


def test_predictions_are_never_negative():
    rng, model = np.random.default_rng(4), OnlineStepTime(PRIORS["half"], BUCKETS)
    for work in works(rng, 1000, 300):
        model.observe(work, float(rng.exponential(0.02)))  # nothing to do with the work
    assert all(model.predict_s(work) >= 0 for work in works(rng, 8000, 100))
