"""The simulator's clock and bookkeeping, on steps of known times."""

from __future__ import annotations

import pytest

from serving.scheduling.config import SchedulerConfig
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step_time import LinearStepTime, StepWork
from serving.simulation.results import Slo, summarise
from serving.simulation.simulator import Simulator
from serving.simulation.trace import Load, TraceRequest, mix


class SecondEachPass:
    """A second for each forward pass."""

    def predict_s(self, work: StepWork) -> float:
        return float(work.num_decode_steps)


def make_scheduler(**changes) -> Scheduler:
    values = {
        "page_size": 16,
        "num_pages": 1025,
        "decode_sizes": (4,),
        "max_model_len": 1024,
        "prefill_token_buckets": (64,),
        "query_block": 16,
    }
    return Scheduler(SchedulerConfig(**(values | changes)))


def make_simulator(step_time=None, host_s=0.0, **changes) -> Simulator:
    return Simulator(make_scheduler(**changes), step_time or SecondEachPass(), host_s=host_s, check_integrity=True)


def request(arrival_s: float, num_prompt_tokens: int, num_output_tokens: int, **values) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, **values
    )


def test_a_lone_request_takes_a_step_for_its_prompt_and_one_for_each_further_token():
    result = make_simulator().run([request(10.0, 64, 5)])
    (only,) = result.requests
    assert (only.ttft_s, only.tpot_s, only.max_gap_s) == (1.0, 1.0, 1.0)
    assert only.is_complete and only.finish_reason == "length"
    assert (result.duration_s, result.busy_s, result.stats.num_steps) == (5.0, 5.0, 5)


def test_tokens_of_a_dispatch_of_many_steps_come_together():
    (only,) = make_simulator(max_decode_steps=4).run([request(0.0, 64, 5)]).requests
    assert (only.ttft_s, only.max_gap_s, only.tpot_s) == (1.0, 4.0, 1.0)


def test_a_request_that_arrives_during_a_step_waits_for_the_schedule_after_the_next():
    """Step 2 is dispatched at 0 behind step 1; the request of 0.5 is in step 3, which is dispatched at 1."""
    _, second = make_simulator().run([request(0.0, 64, 9), request(0.5, 64, 1)]).requests
    assert second.first_token_s == 3.0


def test_the_host_hides_behind_the_device_and_shows_where_it_is_slower():
    (hidden,) = make_simulator(host_s=0.5).run([request(0.0, 64, 5)]).requests
    assert (hidden.ttft_s, hidden.tpot_s) == (1.5, 1.0)
    (shown,) = make_simulator(host_s=2.0).run([request(0.0, 64, 5)]).requests
    assert (shown.ttft_s, shown.max_gap_s) == (4.0, 2.0)  # a token is read after the next step is dispatched


def test_hooks_see_each_step_and_may_refuse_requests():
    simulator = make_simulator()
    works, asked = [], []

    def admit(request, now_s):
        asked.append((request.num_prompt_tokens, now_s))
        return 7.0 if request.num_prompt_tokens > 32 else None

    simulator.observe = lambda work, seconds: works.append((work, seconds))
    simulator.admit = admit
    taken, refused = simulator.run([request(0.0, 32, 3), request(0.0, 33, 3)]).requests
    assert asked == [(32, 0.0), (33, 0.0)]
    assert taken.is_complete and (refused.refused, refused.retry_after_s) == ("overloaded", 7.0)
    assert [seconds for _, seconds in works] == [1.0, 1.0, 1.0]
    assert works[0][0].num_prefill_tokens == 32 and [work.num_decode_rows for work, _ in works] == [0, 1, 1]


def test_a_request_that_can_never_run_is_refused_with_the_reason():
    (only,) = make_simulator().run([request(0.0, 1024, 1)]).requests
    assert "max_total_tokens" in only.refused and only.ttft_s is None


def test_a_run_cut_short_leaves_requests_unfinished():
    first, second = make_simulator().run([request(0.0, 64, 50), request(90.0, 64, 1)], until_s=10.0).requests
    assert first.num_tokens == 10 and not first.is_complete and first.finish_reason is None
    assert second.num_tokens == 0 and second.refused is None


def test_equal_hash_ids_are_found_in_the_prefix_cache():
    trace = [request(0.0, 600, 1, hash_ids=(0, 1)), request(20.0, 600, 1, hash_ids=(0, 2)), request(40.0, 600, 1)]
    assert [r.num_cached_tokens for r in make_simulator().run(trace).requests] == [0, 512, 0]


@pytest.mark.parametrize("num_pages", [65, 1025], ids=["scarce", "ample"])
def test_random_mixes_complete_with_every_check_on(num_pages):
    loads = [
        Load(requests_per_s=40.0, prompt_tokens=60, output_tokens=20, length_cv=1.0, tenant="a"),
        Load(requests_per_s=4.0, prompt_tokens=300, output_tokens=40, length_cv=0.3, tenant="b", arrival_cv=3.0),
    ]
    trace = mix(loads, duration_s=2.0, seed=1)
    result = make_simulator(LinearStepTime(), 1e-3, num_pages=num_pages, max_decode_steps=4).run(trace)
    assert all(r.is_complete for r in result.requests if r.refused is None)
    assert (result.stats.num_preemptions > 0) == (num_pages == 65)
    assert result.stats.num_output_tokens == sum(r.num_tokens for r in result.requests)
    again = make_simulator(LinearStepTime(), 1e-3, num_pages=num_pages, max_decode_steps=4).run(trace)
    assert again.requests == result.requests  # the same run again


def test_goodput_counts_what_was_answered_in_full_within_its_targets():
    result = make_simulator().run([request(0.0, 64, 1), request(0.0, 64, 1), request(0.0, 1024, 1)])
    assert [r.ttft_s for r in result.requests] == [1.0, 2.0, None]
    figures = summarise(result.requests, result.duration_s, lambda r: Slo(ttft_s=1.5))
    assert (figures["goodput_rps"], figures["attainment"], figures["refused"]) == (0.5, 0.3333, 1)
    assert summarise(result.requests, result.duration_s)["goodput_rps"] == 1.0
