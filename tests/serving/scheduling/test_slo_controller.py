"""The controller of prefill share and running batch, on the simulated device, from a prior that is off by a half."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from configs.scheduling import SchedulingConfig
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.lengths import LengthStats
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.schedule import StepLimits
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.slo_controller import SloController
from serving.scheduling.step_time import LinearStepTime
from serving.simulation.results import Slo
from serving.simulation.simulator import Simulator
from serving.simulation.trace import Load, mix

PRIOR = LinearStepTime(
    base_s=3e-3, decode_row_s=10e-6, decode_kv_token_s=40e-9, prefill_token_s=14e-6, prefill_pair_s=0.6e-9
)
CHAT = Load(requests_per_s=40.0, prompt_tokens=800, output_tokens=100, length_cv=0.7)


def make(targets: SchedulingConfig, **changes) -> tuple[Simulator, SloController]:
    sizes = {"num_pages": 50_000, **changes}
    config = SchedulerConfig(
        page_size=16,
        decode_sizes=(8, 32, 64, 128),
        max_model_len=32_768,
        prefill_token_buckets=(512, 1024, 4096),
        query_block=32,
        max_decode_steps=8,
        policy=targets,
        **sizes,
    )
    simulator = Simulator(Scheduler(config), LinearStepTime())
    controller = SloController(simulator.scheduler, targets, OnlineStepTime(PRIOR, config.prefill_token_buckets))
    simulator.limits, simulator.observe = controller.limits, controller.observe
    return simulator, controller


def tpot(seconds: float) -> SchedulingConfig:
    return SchedulingConfig(class_tpot_s=(seconds,))


def tpot_attainment(requests, seconds: float, since_s: float = 0.0) -> float:
    ended = [r for r in requests if r.is_complete and r.last_token_s is not None and r.last_token_s >= since_s]
    assert len(ended) > 20
    return sum(r.meets(Slo(tpot_s=seconds)) for r in ended) / len(ended)


@pytest.mark.parametrize(("seconds", "batch"), [(0.012, 32), (0.02, 128), (0.04, 128)], ids=["12ms", "20ms", "40ms"])
def test_under_overload_the_target_is_met_and_the_engine_is_full(seconds, batch):
    """`batch`: the best of fixed ones."""
    simulator, _ = make(tpot(seconds))
    result = simulator.run(mix([CHAT], 8.0), until_s=8.0)
    assert tpot_attainment(result.requests, seconds, since_s=2.0) >= 0.95
    ended = sum(r.is_complete for r in result.requests)
    limits = StepLimits(max_prefill_tokens=512, max_num_seqs=batch)
    fixed, _ = make(tpot(seconds))
    fixed.limits, fixed.observe = (lambda now_s: limits), None
    outcome = fixed.run(mix([CHAT], 8.0), until_s=8.0)
    assert ended >= 0.9 * sum(r.is_complete and r.meets(Slo(tpot_s=seconds)) for r in outcome.requests)


def test_the_batch_settles():
    simulator, controller = make(tpot(0.02))
    batches = []
    simulator.limits = lambda now_s: (limits := controller.limits(now_s), batches.append(limits.max_num_seqs))[0]
    simulator.run(mix([CHAT], 8.0), until_s=8.0)
    late = batches[len(batches) // 2 :]
    assert max(late) <= 1.5 * min(late)
    assert sum(a != b for a, b in itertools.pairwise(late)) < len(late) / 20


def test_a_shift_of_lengths_is_followed():
    short = dataclasses.replace(CHAT, prompt_tokens=200, output_tokens=150)
    long = dataclasses.replace(CHAT, prompt_tokens=6000, output_tokens=150, start_s=6.0)
    simulator, _ = make(tpot(0.025))
    trace = [r for r in mix([short], 6.0)] + mix([long], 20.0)
    result = simulator.run(sorted(trace, key=lambda r: r.arrival_s), until_s=20.0)
    assert tpot_attainment(result.requests, 0.025, since_s=10.0) >= 0.95


def test_low_load_gets_prompts_in_at_once():
    simulator, _ = make(tpot(0.05))
    result = simulator.run(mix([dataclasses.replace(CHAT, requests_per_s=2.0, prompt_tokens=3000)], 10.0))
    assert all(r.is_complete for r in result.requests)
    assert sorted(r.ttft_s for r in result.requests)[len(result.requests) // 2] < 0.15
    assert tpot_attainment(result.requests, 0.05) == 1.0 if len(result.requests) > 20 else True


def test_a_target_that_no_step_can_meet_stops_nobody():
    simulator, _ = make(tpot(0.001))
    result = simulator.run(mix([dataclasses.replace(CHAT, requests_per_s=1.0)], 4.0))
    assert all(r.is_complete for r in result.requests)


def test_without_targets_the_configs_sizes_hold():
    simulator, controller = make(SchedulingConfig())
    limits = controller.limits(0.0)
    assert limits.max_prefill_tokens == 4096 and limits.max_num_seqs == 128 and limits.max_background_seqs is None
    result = simulator.run(mix([dataclasses.replace(CHAT, requests_per_s=5.0)], 4.0))
    assert all(r.is_complete for r in result.requests)


def test_pages_for_those_that_run_to_grow_are_kept():
    """Long outputs in a small pool: admitted as far as they are expected to end without preempting each other."""
    load = dataclasses.replace(CHAT, prompt_tokens=100, output_tokens=700, length_cv=0.3, requests_per_s=30.0)
    free, _ = make(tpot(0.05), num_pages=2000)
    free.limits, free.observe = None, None
    kept, _ = make(tpot(0.05), num_pages=2000)
    trace = mix([load], 5.0)
    without, result = free.run(trace, until_s=30.0), kept.run(trace, until_s=30.0)
    assert result.stats.num_preemptions <= 0.3 * without.stats.num_preemptions
    assert sum(r.is_complete for r in result.requests) >= 0.95 * sum(r.is_complete for r in without.requests)


def test_background_takes_what_is_left_and_gives_way():
    targets = SchedulingConfig(
        class_names=("chat", "batch"), class_priorities=(0, 10), class_ttft_s=(1.0, 0.0), class_tpot_s=(0.025, 0.0)
    )
    chat = dataclasses.replace(CHAT, requests_per_s=8.0, class_name="chat")
    batch = dataclasses.replace(CHAT, requests_per_s=60.0, class_name="batch", priority=10)
    simulator, _ = make(targets)
    result = simulator.run(mix([chat, batch], 12.0), until_s=14.0)
    groups = result.groups(lambda r: r.class_name)
    slo = Slo(ttft_s=1.0, tpot_s=0.025)
    chats = [r for r in groups["chat"] if 2.0 <= r.arrival_s < 11.0]
    assert sum(r.meets(slo) for r in chats) >= 0.95 * len(chats)
    assert sum(r.is_complete for r in groups["batch"]) > 60  # and yet there was room


def test_saturation_tells_how_full_the_engine_is():
    simulator, controller = make(tpot(0.02))
    assert set(controller.saturation().values()) == {0.0}
    simulator.run(mix([dataclasses.replace(CHAT, requests_per_s=100.0)], 5.0), until_s=5.0)
    full = controller.saturation()
    assert max(full.values()) > 0.8 and max(full, key=lambda name: full[name]) in ("compute", "slots")
    simulator, controller = make(tpot(0.05))
    simulator.run(mix([dataclasses.replace(CHAT, requests_per_s=2.0)], 8.0), until_s=8.0)
    assert max(controller.saturation().values()) < 0.5


# Lengths


def test_a_start_with_long_outputs_is_not_mistaken_for_short_ones():
    lengths = LengthStats()
    for _ in range(100):  # a hundred that run have brought 100 tokens each; the shortest one ended
        lengths.sampled(100)
    lengths.ended(10, 10, 5)
    assert lengths.mean_output_tokens > 1_000


def test_what_is_still_to_come_is_the_mean_of_those_that_were_longer():
    lengths = LengthStats()
    for length in (10, 20, 30, 40, 100, 200) * 4:
        lengths.sampled(length)
        lengths.ended(100, 80, length)
    assert lengths.remaining_tokens(40) == pytest.approx(150 - 40)
    assert lengths.remaining_tokens(0) == pytest.approx(400 / 6)
    assert lengths.remaining_tokens(500) == pytest.approx(lengths.mean_output_tokens)
    assert lengths.mean_prompt_tokens == pytest.approx(100) and lengths.mean_computed_tokens == pytest.approx(80)
    assert lengths.output_quantile(0.0) == 10 and lengths.output_quantile(0.99) == 200


def test_what_is_still_to_come_of_many_is_what_it_is_of_each():
    lengths = LengthStats()
    outputs = np.array([0, 5, 40, 41, 150, 500])
    assert lengths.remaining_tokens_of(outputs).tolist() == [lengths.remaining_tokens(int(n)) for n in outputs]
    for length in (10, 20, 30, 40, 100, 200) * 4:
        lengths.sampled(length)
        lengths.ended(100, 80, length)
    assert lengths.remaining_tokens_of(outputs).tolist() == [lengths.remaining_tokens(int(n)) for n in outputs]
