"""How late an event loop is, so that a server sheds load before its health checks have to wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

EVERY_S = 0.02
NUM_TICKS = 20


class LoopDelay:
    """The standing delay of an event loop: the least lateness of the last NUM_TICKS turns of a timer.

    The least, as CoDel takes it of a queue (Nichols and Jacobson 2012), since a burst that is worked off, or a moment in
    which the machine did something else, is no overload. The timer runs while `is_busy`, so that an idle server sleeps.
    """

    def __init__(self, is_busy: Callable[[], bool]):
        self._is_busy = is_busy
        self._lateness: deque[float] = deque([0.0], maxlen=NUM_TICKS)
        self._timer: asyncio.TimerHandle | None = None

    def measure(self) -> float:
        """Seconds; to be called in the loop. Begins to count where the loop was idle."""
        if self._timer is None:
            self._schedule(asyncio.get_running_loop())
        return min(self._lateness)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(EVERY_S, self._tick, loop, loop.time() + EVERY_S)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        if self._is_busy():
            self._lateness.append(max(loop.time() - due_s, 0.0))
            self._schedule(loop)
        else:
            self._lateness.append(0.0)
            self._timer = None
