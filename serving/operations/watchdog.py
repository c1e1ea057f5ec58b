"""Notices a step of the engine that does not come back: a hung device, a collective that waits for a dead peer."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from serving.observer import EngineObserver

logger = logging.getLogger(__name__)


class Watchdog(EngineObserver):
    """`is_stuck` from when a step has taken `stuck_step_s` seconds until it returns; the stacks go to the log once.

    Put it among an engine's observers, and `start` its thread. Only time inside a step counts, so an idle engine and one
    that is being built are never stuck; a long task that runs inside a step on purpose goes under `paused`.
    """

    def __init__(self, stuck_step_s: float, *, now: Callable[[], float] = time.monotonic):
        assert stuck_step_s > 0, stuck_step_s
        self.stuck_step_s = stuck_step_s
        self.num_stuck_steps = 0
        self._now = now
        self._begun_s: float | None = None
        self._num_steps = 0
        self._reported: int | None = None  # number of the step that was found stuck
        self._num_paused = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    # In the engine's thread

    def step_begun(self) -> None:
        self._num_steps += 1
        self._begun_s = self._now()

    def step_ended(self) -> None:
        begun_s, self._begun_s = self._begun_s, None
        if self._reported == self._num_steps and begun_s is not None:
            logger.warning("stuck_step_ended", extra={"fields": {"duration_s": self._now() - begun_s}})

    # Any thread

    @property
    def is_stuck(self) -> bool:
        return self._reported == self._num_steps and self._begun_s is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step is found stuck meanwhile; afterwards the one that runs counts from then on."""
        self._num_paused += 1
        try:
            yield
        finally:
            if self._begun_s is not None:
                self._begun_s = self._now()
            self._num_paused -= 1

    def check(self) -> None:
        """Look once; the thread does so several times in `stuck_step_s`."""
        step, begun_s = self._num_steps, self._begun_s
        if begun_s is None or self._num_paused or self._reported == step:
            return
        duration_s = self._now() - begun_s
        if duration_s >= self.stuck_step_s and step == self._num_steps:
            logger.critical("step_stuck", extra={"fields": {"duration_s": duration_s, "stacks": _all_stacks()}})
            self.num_stuck_steps += 1
            self._reported = step

    def start(self) -> None:
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="headrace-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self.stuck_step_s / 4):
            self.check()


def _all_stacks() -> str:
    """Every thread's stack as files, lines and functions; no values, so nothing of a request."""
    with tempfile.TemporaryFile() as file:  # faulthandler writes to a descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
