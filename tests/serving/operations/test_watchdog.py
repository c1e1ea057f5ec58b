"""The watchdog: what it finds stuck, what it does not, and that it says so."""

from __future__ import annotations

import logging
import threading

import pytest

from serving.operations.watchdog import Watchdog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watchdog(clock):
    return Watchdog(10.0, now=clock)


def test_a_step_that_takes_too_long_is_stuck_until_it_returns(watchdog, clock, caplog):
    watchdog.step_begun()
    clock.now_s = 9.0
    watchdog.check()
    assert not watchdog.is_stuck and not caplog.records
    clock.now_s = 10.0
    for _ in range(3):
        watchdog.check()
        assert watchdog.is_stuck and watchdog.num_stuck_steps == 1
    (report,) = caplog.records
    assert report.levelno == logging.CRITICAL and report.getMessage() == "step_stuck"
    assert report.fields["duration_s"] == 10.0
    assert "test_a_step_that_takes_too_long_is_stuck_until_it_returns" in report.fields["stacks"]
    clock.now_s = 25.0
    watchdog.step_ended()
    assert not watchdog.is_stuck and caplog.records[-1].fields == {"duration_s": 25.0}
    watchdog.step_begun()
    clock.now_s = 36.0
    watchdog.check()
    assert watchdog.is_stuck and watchdog.num_stuck_steps == 2


def test_idle_time_is_not_a_step(watchdog, clock):
    for _ in range(3):
        watchdog.check()
        clock.now_s += 1000.0
        watchdog.step_begun()
        clock.now_s += 1.0
        watchdog.check()
        watchdog.step_ended()
        watchdog.check()
    assert not watchdog.is_stuck and watchdog.num_stuck_steps == 0


def test_a_pause_holds_inside_a_step_and_its_time_does_not_count(watchdog, clock):
    watchdog.step_begun()
    with watchdog.paused():
        clock.now_s = 100.0
        watchdog.check()
        assert not watchdog.is_stuck
    clock.now_s = 109.0
    watchdog.check()
    assert not watchdog.is_stuck
    clock.now_s = 110.0
    watchdog.check()
    assert watchdog.is_stuck


def test_its_thread_finds_a_hung_step_of_another_thread_and_sees_it_return(caplog):
    watchdog = Watchdog(0.02)
    hang = threading.Event()

    def a_step_that_hangs():
        watchdog.step_begun()
        hang.wait(60.0)
        watchdog.step_ended()

    worker = threading.Thread(target=a_step_that_hangs)
    watchdog.start()
    worker.start()
    found = threading.Event()
    while not watchdog.is_stuck and not found.wait(0.005):
        assert worker.is_alive()
    hang.set()
    worker.join()
    assert not watchdog.is_stuck
    watchdog.close()
    assert "a_step_that_hangs" in caplog.records[0].fields["stacks"]
