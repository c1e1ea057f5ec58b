"""The standing delay of an event loop, with a clock of the test's own."""

from __future__ import annotations

import asyncio

import pytest

from configs.server import ServerConfig
from serving.api import loop_delay
from serving.api.errors import OverloadedError
from serving.api.loop_delay import EVERY_S, NUM_TICKS, LoopDelay
from serving.api.service import Service


class Loop:
    """Timers that the test fires, as late as it likes."""

    def __init__(self) -> None:
        self.now_s, self.timers = 0.0, []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s, function, *args):
        self.timers.append((function, args))
        return object()

    def fire(self, late_s: float) -> None:
        ((function, args),) = self.timers
        self.timers.clear()
        self.now_s += EVERY_S + late_s
        function(*args)


@pytest.fixture
def loop(monkeypatch):
    loop = Loop()
    monkeypatch.setattr(loop_delay.asyncio, "get_running_loop", lambda: loop)
    return loop


def test_a_delay_counts_once_it_stands_and_no_longer_than_it_does(loop):
    delay = LoopDelay(lambda: True)
    assert delay.measure() == 0.0
    for _ in range(NUM_TICKS - 1):
        loop.fire(late_s=0.5)
        assert delay.measure() == 0.0
    loop.fire(late_s=0.5)
    assert delay.measure() == pytest.approx(0.5)
    loop.fire(late_s=0.001)
    assert delay.measure() == pytest.approx(0.001)


def test_an_idle_loop_has_no_timer_and_no_delay(loop):
    is_busy = True
    delay = LoopDelay(lambda: is_busy)
    delay.measure()
    for _ in range(NUM_TICKS):
        loop.fire(late_s=0.5)
    is_busy = False
    loop.fire(late_s=0.5)
    assert not loop.timers and delay.measure() == 0.0 and len(loop.timers) == 1


def test_a_service_whose_loop_is_late_takes_no_new_request(monkeypatch):
    service = Service(ServerConfig(max_loop_delay_s=0.2, retry_after_s=7), "model")
    monkeypatch.setattr(service, "check_ready", lambda: None)
    monkeypatch.setattr(Service, "num_waiting", 0)

    async def admit(delay_s: float) -> int:
        monkeypatch.setattr(service._loop_delay, "measure", lambda: delay_s)
        with service.admission():
            return service.num_in_flight

    assert asyncio.run(admit(0.2)) == 1
    with pytest.raises(OverloadedError, match="300 ms late") as refused:
        asyncio.run(admit(0.3))
    assert refused.value.retry_after_s == 7 and service.num_in_flight == 0
    service.close()
