"""The clock of an engine's steps, on a device that is told when its steps end."""

from __future__ import annotations

import pytest

from serving.execution import step_clock
from serving.execution.step_clock import StepClock


class Timeline:
    """Stands in for time.perf_counter; a test moves it."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Result:
    """A step's result, ready at a moment of the timeline; waiting for it moves the timeline there."""

    def __init__(self, timeline: Timeline, ready_s: float):
        self.timeline, self.ready_s = timeline, ready_s

    def is_ready(self) -> bool:
        return self.timeline.now_s >= self.ready_s

    def block_until_ready(self) -> None:
        self.timeline.now_s = max(self.timeline.now_s, self.ready_s)


@pytest.fixture
def timeline(monkeypatch) -> Timeline:
    timeline = Timeline()
    monkeypatch.setattr(step_clock, "time", timeline)
    return timeline


def run_steps(clock: StepClock, timeline: Timeline, device_s: float, num_steps: int) -> None:
    """Steps one ahead, as the engine takes them: 1 s of scheduling, 1 s of dispatch, 2 s of reading."""
    pending, free_s = None, 0.0
    for _ in range(num_steps):
        clock.begin_step()
        timeline.now_s += 1
        clock.look()
        start_s = timeline.now_s
        timeline.now_s += 1
        free_s = max(free_s, start_s) + device_s
        result = Result(timeline, free_s)
        clock.dispatched(result)
        if pending is not None:
            clock.wait(pending)
            timeline.now_s += 2
        clock.end_step(is_outstanding=True)
        pending = result
    clock.begin_step()
    clock.wait(pending)
    timeline.now_s += 2
    clock.end_step(is_outstanding=False)


def test_device_that_is_always_behind_the_host_is_never_idle(timeline):
    clock = StepClock()
    run_steps(clock, timeline, device_s=10.0, num_steps=5)
    times = clock.times()
    # The device starts at 1 s and runs 5 steps of 10 s; the last result takes 2 s to read.
    assert timeline.now_s == 53.0
    assert (times.idle_min, times.idle_max) == (0.0, 0.0)
    assert times.host == 5 * 2 + 5 * 2 and times.wait == 53.0 - times.host
    assert times.span == 51.0 - 2.0  # from the end of the first dispatch to the last result


def test_idle_time_of_a_device_that_outruns_the_host_lies_between_the_bounds(timeline):
    clock = StepClock()
    run_steps(clock, timeline, device_s=0.5, num_steps=5)
    times = clock.times()
    # A dispatch begins every 2 s, then every 4 s (reading included); the device works 0.5 s of each.
    is_idle_s = (2 - 0.5) + 3 * (4 - 0.5)
    assert times.idle_min <= is_idle_s <= times.idle_max
    assert times.wait == 0.0 and 0.0 < times.idle_fractions()[0] <= times.idle_fractions()[1] <= 1.0


def test_step_that_was_waited_for_with_nothing_behind_it_gives_the_idle_time_exactly(timeline):
    clock = StepClock()
    clock.begin_step()
    clock.dispatched(Result(timeline, 3.0))
    clock.end_step(is_outstanding=True)
    first = clock._newest
    clock.begin_step()
    clock.wait(first)  # until 3 s
    timeline.now_s += 2  # reading and scheduling
    clock.look()
    clock.dispatched(Result(timeline, 9.0))  # takes no time here
    clock.end_step(is_outstanding=True)
    times = clock.times()
    assert (times.idle_min, times.idle_max, times.span, times.wait) == (2.0, 2.0, 5.0, 3.0)


def test_time_without_work_is_not_counted(timeline):
    clock = StepClock()
    run_steps(clock, timeline, device_s=10.0, num_steps=2)
    before = clock.times()
    timeline.now_s += 1000
    run_steps(clock, timeline, device_s=10.0, num_steps=2)
    times = clock.times() - before
    assert times.span == before.span and times.host == before.host and times.idle_max == 0.0
