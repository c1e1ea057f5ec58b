"""AsyncEngine: the thread that owns an engine, and the queues between it and asyncio.

Callers await in their own event loop (a notebook's running one too); the engine steps in a thread of its own. If that
thread dies, every waiting and every later call raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from configs.engine import EngineConfig, MeshConfig
from serving.engine import Engine, OutputDelta, Prompt, build_engine
from serving.request import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; `__cause__` says why."""


@dataclass
class _Stream:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[OutputDelta, RequestOutput | None] | BaseException]

    def put(self, item: tuple[OutputDelta, RequestOutput | None] | BaseException) -> None:
        # A closed loop has nobody waiting any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """An engine in its own thread. `generate` may be called from any event loop, many at once."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()
        self._error: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_source(
        cls, model: str, config: EngineConfig | None = None, mesh_config: MeshConfig | None = None, **kwargs: Any
    ) -> AsyncEngine:
        """Build the engine for a model source (see `serving.llm.LLM`) and start its thread."""
        return cls(build_engine(model, config or EngineConfig(), mesh_config or MeshConfig(), **kwargs))

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[tuple[OutputDelta, RequestOutput | None]]:
        """Yield (delta, None) as tokens come, and the whole RequestOutput beside the last delta.

        Raises RequestError for a refused request. Leaving the iterator early aborts the request.
        """
        request_id = request_id or f"async-{next(self._ids)}"
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._send(lambda: self._add(prompt, params, request_id, stream))
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item[1] is not None
                yield item
        finally:
            if not finished:
                self.abort(request_id, stream)

    def abort(self, request_id: str, stream: _Stream | None = None) -> None:
        """End a request; its pages are free within a step. Unknown ids are ignored."""
        with contextlib.suppress(EngineDeadError):
            self._send(lambda: self._abort(request_id, stream))

    def close(self) -> None:
        """Abort what runs and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _send(self, command: Callable[[], None]) -> None:
        with self._lock:  # nothing enters the inbox once it has been emptied for the last time
            if self._error is not None or self._closed:
                raise EngineDeadError("the engine has stopped") from self._error
            self._inbox.put(command)

    # In the engine's thread

    def _add(self, prompt: Prompt, params: SamplingParams, request_id: str, stream: _Stream) -> None:
        if self._error is not None:
            stream.put(self._dead())
            return
        try:
            self.engine.add(prompt, params, request_id)
        except ValueError as error:  # RequestError: this caller's alone
            stream.put(error)
        else:
            self._streams[request_id] = stream

    def _abort(self, request_id: str, stream: _Stream | None) -> None:
        if self._error is not None:
            return
        owner = self._streams.get(request_id)
        if owner is None or (stream is not None and owner is not stream):
            return
        self._deliver(self.engine.abort(request_id))

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            stream = self._streams[delta.request_id]
            output = None
            if delta.request_finished:
                output = self.engine.collect(delta.request_id)
                del self._streams[delta.request_id]
            stream.put((delta, output))

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                if self.engine.has_work():
                    self._deliver(self.engine.step())
            for request_id in list(self._streams):
                self._deliver(self.engine.abort(request_id))
        except BaseException as error:
            logger.critical("the engine's thread has ended", exc_info=True)
            with self._lock:
                self._error = error
                while not self._inbox.empty():
                    command = self._inbox.get()
                    if command is not None:
                        command()
            for stream in self._streams.values():
                stream.put(self._dead())
            self._streams.clear()

    def _dead(self) -> EngineDeadError:
        dead = EngineDeadError("the engine's thread has ended")
        dead.__cause__ = self._error
        return dead

    def _drain_inbox(self) -> bool:
        """Run what callers asked for; waits for the first command while there is nothing to do. False: close."""
        block = not self.engine.has_work()
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False
