"""Where the wall clock of an engine's steps goes: the host's own work, waiting for the device, the device idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class StepTimes:
    """Seconds. `host` and `wait` are inside steps; the others are wall time while steps were outstanding."""

    host: float = 0.0  # scheduling, dispatching, reading; without waiting for the device
    wait: float = 0.0  # for a step's result
    span: float = 0.0  # from a dispatch to the next, or to the end of the last step before work ran out
    idle_min: float = 0.0  # of the span, the device surely had no step to run
    idle_max: float = 0.0  # of the span, the device may have had none

    def __sub__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def idle_fractions(self) -> tuple[float, float]:
        """(idle_min, idle_max) as shares of the span."""
        return self.idle_min / max(self.span, 1e-9), self.idle_max / max(self.span, 1e-9)


class StepClock:
    """Counts `StepTimes` since the start of one engine.

    The host sees that a step has ended only when it looks: when a step of the engine begins and ends, around each
    dispatch, and when it waits. The device was idle from the end of its newest step to the next dispatch, so the two
    looks around that end bound the idle time from both sides; with the next step dispatched before the newest ended
    both bounds are 0. Gaps between the kernels of one step are not in it: only a trace of the device shows those.
    On CPU a dispatch may run the step itself, which then counts as the host's time.

    A `result` is an array on the device (jax.Array, whose declared type has no `is_ready`). `now` gives seconds.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.perf_counter
        self._host_s = self._wait_s = self._span_s = self._idle_min_s = self._idle_max_s = 0.0
        self._step_s = self._step_wait_s = 0.0
        self._newest: Any = None  # result of the step dispatched last, while work goes on
        self._dispatched_s = 0.0
        self._looked_s = 0.0
        self._seen_busy_s = 0.0  # the last look at which the newest step had not ended
        self._seen_idle_s: float | None = None  # the first at which it had

    def times(self) -> StepTimes:
        return StepTimes(self._host_s, self._wait_s, self._span_s, self._idle_min_s, self._idle_max_s)

    def begin_step(self) -> None:
        self._step_s, self._step_wait_s = self._now(), self._wait_s
        self.look()

    def look(self) -> None:
        """See whether the newest step has ended; called just before a dispatch as well."""
        self._looked_s = now_s = self._now()
        if self._newest is None or self._seen_idle_s is not None:
            return
        if self._newest.is_ready():
            self._seen_idle_s = now_s
        else:
            self._seen_busy_s = now_s

    def dispatched(self, result: Any) -> None:
        """A step was dispatched since the last look; `result` is ready when it has run."""
        before_s, now_s = self._looked_s, self._now()
        if self._newest is not None:
            self._span_s += now_s - self._dispatched_s
            if self._seen_idle_s is not None:
                self._idle_min_s += before_s - self._seen_idle_s
                self._idle_max_s += now_s - self._seen_busy_s
            elif self._newest.is_ready():  # it ended during the dispatch
                self._idle_max_s += now_s - self._seen_busy_s
        self._newest, self._dispatched_s = result, now_s
        self._seen_busy_s, self._seen_idle_s = now_s, None

    def wait(self, result: Any) -> None:
        """Wait for a dispatched step's result."""
        started_s = self._now()
        was_ready = result.is_ready()
        result.block_until_ready()
        ended_s = self._now()
        self._wait_s += ended_s - started_s
        if result is self._newest and self._seen_idle_s is None:
            if was_ready:
                self._seen_idle_s = started_s
            else:
                self._seen_busy_s = self._seen_idle_s = ended_s
        self.look()

    def end_step(self, *, is_outstanding: bool) -> None:
        """`is_outstanding`: a dispatched step has not been read. Without one there is no work, and time stands still."""
        self.look()
        self._host_s += self._looked_s - self._step_s - (self._wait_s - self._step_wait_s)
        if not is_outstanding and self._newest is not None:
            assert self._seen_idle_s is not None, "a step was read that nobody waited for"
            self._span_s += max(self._seen_idle_s - self._dispatched_s, 0.0)
            self._newest = None
