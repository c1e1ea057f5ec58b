"""AsyncEngine: the thread that owns an engine, and the queues between it and asyncio.

Callers await in their own event loop (a notebook's running one too); the engine steps in a thread of its own. If that
thread dies, every waiting and every later call raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from configs.engine import EngineConfig, MeshConfig
from serving.engine import CheckedRequest, Engine, OutputDelta, Prompt, build_engine
from serving.request import RequestOutput, SamplingParams
from serving.validation import check_request_id

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; `__cause__` says why."""


@dataclass
class _Stream:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[OutputDelta, RequestOutput | None] | BaseException]
    request_id: str | None = None  # of the engine's thread; None until the engine has the request

    def put(self, item: tuple[OutputDelta, RequestOutput | None] | BaseException) -> None:
        # A closed loop has nobody waiting any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """An engine in its own thread. `generate` may be called from any event loop, many at once.

    `close` it when done; what is still open when the interpreter ends is closed then.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        # Grammars have threads of their own: slow ones hold up no text that is encoded.
        self._compiling = ThreadPoolExecutor(max_workers=8, thread_name_prefix="headrace-grammar")
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()
        _OPEN_ENGINES.add(self)

    @classmethod
    def from_source(
        cls,
        model: str | os.PathLike[str],
        config: EngineConfig | None = None,
        mesh_config: MeshConfig | None = None,
        **kwargs: Any,
    ) -> AsyncEngine:
        """Build the engine for a model source (see `serving.llm.LLM`) and start its thread."""
        return cls(build_engine(model, config or EngineConfig(), mesh_config or MeshConfig(), **kwargs))

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[tuple[OutputDelta, RequestOutput | None], None]:
        """Yield (delta, None) as tokens come, and the whole RequestOutput beside the last delta.

        The engine names a request without `request_id`. Raises RequestError for a refused request. Leaving the iterator
        early aborts the request.
        """
        if request_id is not None:
            request_id = check_request_id(request_id)
        # What may take long, neither this loop nor the engine waits for.
        if isinstance(params, SamplingParams) and params.structured is not None:
            loop = asyncio.get_running_loop()
            checked = await loop.run_in_executor(self._compiling, self.engine.check, prompt, params)
        elif isinstance(prompt, str):
            checked = await asyncio.to_thread(self.engine.check, prompt, params)
        else:
            checked = self.engine.check(prompt, params)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        if not self._send(lambda: self._add(checked, request_id, stream)):
            raise EngineDeadError("the engine has stopped") from self._error
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
                self._send(lambda: self._abort_stream(stream))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str | None = None,
        **template_args: Any,
    ) -> AsyncGenerator[tuple[OutputDelta, RequestOutput | None], None]:
        """Answer one conversation, through the model's chat template; yields as `generate` does.

        template_args are those of `serving.text.chat_template.ChatTemplate.render`, such as tools.
        """
        prompt = await asyncio.to_thread(functools.partial(self.engine.render_chat, messages, **template_args))
        async with contextlib.aclosing(self.generate(prompt, params, request_id)) as stream:
            async for item in stream:
                yield item

    def stats(self) -> dict[str, int | float]:
        """Counters since start and gauges of now, as `serving.engine.Engine.stats` explains them."""
        return self.engine.stats()

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free within a step. Unknown ids are ignored. Raises RequestError for no id."""
        checked_id = check_request_id(request_id)
        self._send(lambda: self._abort(checked_id))

    def close(self) -> None:
        """Abort what runs, wait for the step on the device, and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()
        _OPEN_ENGINES.discard(self)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _send(self, command: Callable[[], None]) -> bool:
        """Give the engine's thread something to do; False once it has stopped."""
        with self._lock:  # nothing enters the inbox once it has been emptied for the last time
            if self._error is not None or self._closed:
                return False
            self._inbox.put(command)
            return True

    # In the engine's thread

    def _add(self, checked: CheckedRequest, request_id: str | None, stream: _Stream) -> None:
        if self._error is not None:
            stream.put(self._dead())
            return
        try:
            stream.request_id = self.engine.add_checked(checked, request_id)
        except Exception as error:  # nothing has changed: this is its caller's alone, whatever it is
            stream.put(error)
        else:
            self._streams[stream.request_id] = stream

    def _abort(self, request_id: str) -> None:
        if self._error is None and request_id in self._streams:
            self._deliver(self.engine.abort(request_id))

    def _abort_stream(self, stream: _Stream) -> None:
        # Its id may be in use again by another stream, or never have been its own.
        if stream.request_id is not None and self._streams.get(stream.request_id) is stream:
            self._abort(stream.request_id)

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
            while self.engine.has_work():  # the step in flight: the interpreter must not end while it runs
                self.engine.step()
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


_OPEN_ENGINES: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()


@atexit.register  # after JAX's own hooks were registered, so it runs before them
def _close_open_engines() -> None:
    """A thread that the end of the interpreter stops inside a step brings the process down."""
    for engine in list(_OPEN_ENGINES):
        engine.close()
