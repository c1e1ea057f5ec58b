from __future__ import annotations

import pytest

from configs.checks import ConfigError
from serving.scheduling.step_time import LinearStepTime, StepWork


def test_work_counts_tokens_keys_and_pairs(tools):
    """A prompt of 10 tokens in chunks of 8 and 2, then decode steps, with a page of 4 tokens shared with nobody."""
    engine = tools.Engine(tools.make_config(prefill_token_buckets=(8,), max_decode_steps=1), depth=0)
    engine.add(tools.make_request("a", range(10), 4))
    works = []
    while (schedule := engine.scheduler.schedule()) is not None:
        works.append(StepWork.of(schedule))
        engine.scheduler.update(schedule, engine.runner.run(schedule))
    assert works == [
        StepWork(prefill_bucket=8, num_prefill_tokens=8, prefill_kv_pairs=8 * 9 // 2),
        StepWork(prefill_bucket=8, num_prefill_tokens=2, prefill_kv_pairs=9 + 10),
        *(StepWork(num_decode_slots=4, num_decode_rows=1, decode_kv_tokens=keys) for keys in (11, 12, 13)),
    ]


def test_work_of_a_dispatch_of_many_steps_sums_the_keys_of_each(tools):
    engine = tools.Engine(tools.make_config(max_decode_steps=4), depth=0)
    engine.add(tools.make_request("a", range(10), 5))
    engine.step()
    work = StepWork.of(engine.scheduler.schedule())
    assert (work.num_decode_steps, work.num_decode_rows, work.decode_kv_tokens) == (4, 1, 11 + 12 + 13 + 14)


@pytest.mark.parametrize(
    ("rows", "keys", "measured_s"), [(1, 1024, 4.5e-3), (128, 1024, 10.3e-3), (256, 1024, 16.9e-3), (128, 4096, 22e-3)]
)
def test_the_defaults_are_within_5_percent_of_the_decode_steps_they_fit(rows, keys, measured_s):
    work = StepWork(num_decode_slots=rows, num_decode_rows=rows, decode_kv_tokens=rows * keys)
    assert LinearStepTime().predict_s(work) == pytest.approx(measured_s, rel=0.05)


def test_the_defaults_are_within_5_percent_of_the_prefill_rate_they_fit():
    work = StepWork(prefill_bucket=4096, num_prefill_tokens=4096, prefill_kv_pairs=4096 * 4097 // 2)
    assert 4096 / LinearStepTime().predict_s(work) == pytest.approx(42_000, rel=0.05)


def test_a_negative_coefficient_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"LinearStepTime\.base_s"):
        LinearStepTime(base_s=-1.0)
