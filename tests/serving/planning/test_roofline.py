"""Step times from sizes and peaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.hf import model_config_from_hf
from serving.planning.roofline import RooflineStepTime, config_cost, hardware_peaks
from serving.scheduling.step_time import StepWork

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"


@pytest.fixture(scope="module")
def llama():
    return model_config_from_hf(json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text()))


def test_the_cost_of_an_8b_model_is_that_of_its_config(llama):
    cost = config_cost(llama, weight_bytes=2, kv_bytes=2)
    assert cost.layer_params + 2 * cost.head_params == pytest.approx(8.03e9, rel=1e-3)
    assert cost.kv_token_bytes * llama.num_layers == 131_072


@pytest.mark.parametrize(
    ("num_slots", "num_keys", "measured_s"),
    [(1, 1024, 4.5e-3), (128, 128 * 1024, 10.3e-3), (256, 256 * 1024, 16.9e-3), (128, 128 * 4096, 22e-3)],
    ids=["1x1024", "128x1024", "256x1024", "128x4096"],
)
def test_decode_steps_of_an_h200_are_right_within_two_fifths(llama, num_slots, num_keys, measured_s):
    model = RooflineStepTime(cost=config_cost(llama, weight_bytes=2, kv_bytes=2), peaks=hardware_peaks("NVIDIA H200"))
    work = StepWork(num_decode_slots=num_slots, num_decode_rows=num_slots, decode_kv_tokens=num_keys)
    assert 0.6 < model.predict_s(work) / measured_s < 1.2


def test_a_prompt_takes_its_products_and_devices_share_them(llama):
    cost = config_cost(llama, weight_bytes=2, kv_bytes=2)
    one, two = (RooflineStepTime(cost=cost, peaks=hardware_peaks("NVIDIA H200"), num_devices=n) for n in (1, 2))
    work = StepWork(prefill_bucket=4096, num_prefill_tokens=4096, prefill_kv_pairs=4096 * 4097 // 2)
    assert 30_000 < 4096 / one.predict_s(work) < 60_000
    assert one.predict_s(work) > 1.7 * two.predict_s(work)
