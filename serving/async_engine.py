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
from serving.request import DEFAULT_TENANT, RequestContext, RequestOutput, SamplingParams
from serving.validation import check_request_id

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; `__cause__` says why."""


# (index of the request among its caller's, delta, and beside its last delta its whole output)
RequestDelta = tuple[int, OutputDelta, RequestOutput | None]


class _Mailbox:
    """Deltas on their way to one caller, who takes all that have come at once. Used in the caller's loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._deltas: list[RequestDelta] = []
        self._error: BaseException | None = None  # the end: what comes later is for nobody
        self._arrival: asyncio.Future[None] | None = None  # while its caller waits

    def put(self, item: RequestDelta | BaseException) -> None:
        if self._error is not None:
            return
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._deltas.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> list[RequestDelta]:
        """One delta or more, in order. Raises the error that was put, after what came before it."""
        if not self._deltas and self._error is None:
            self._arrival = self.loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        if not self._deltas:
            assert self._error is not None
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas


@dataclass
class _Stream:
    mailbox: _Mailbox  # of all requests of one caller
    index: int  # of this request among them
    request_id: str | None = None  # of the engine's thread; None until the engine has the request

    def put(self, item: RequestDelta | BaseException) -> None:
        _post(self.mailbox.loop, [(self.mailbox, item)])


def _post(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Mailbox, RequestDelta | BaseException]]) -> None:
    def put_all() -> None:
        for mailbox, item in items:
            mailbox.put(item)

    with contextlib.suppress(RuntimeError):  # a closed loop has nobody waiting any more
        loop.call_soon_threadsafe(put_all)


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
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
    ) -> AsyncGenerator[tuple[OutputDelta, RequestOutput | None], None]:
        """Yield (delta, None) as tokens come, and the whole RequestOutput beside the last delta.

        The engine names a request without `request_id`. `context` is for metrics, logs and traces. Raises RequestError
        for a refused request. Leaving the iterator early aborts the request.
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
        requests = self.generate_checked([checked], [request_id], context=context)
        async with contextlib.aclosing(requests) as items:
            async for _, delta, output in items:
                yield delta, output

    async def generate_checked(
        self,
        checked: Sequence[CheckedRequest],
        request_ids: Sequence[str | None] | None = None,
        *,
        context: RequestContext | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Run requests that `Engine.check` has found right, queued together and in order, until all have finished.

        Yields (index of the request, delta, and beside its last delta its whole output). Leaving the iterator early, or
        an error in one of them, aborts all. Raises EngineDeadError, and RequestError for an id in use.
        """
        async with contextlib.aclosing(self.generate_in_batches(checked, request_ids, context=context)) as batches:
            async for batch in batches:
                for item in batch:
                    yield item

    async def generate_in_batches(
        self,
        checked: Sequence[CheckedRequest],
        request_ids: Sequence[str | None] | None = None,
        *,
        context: RequestContext | None = None,
    ) -> AsyncGenerator[list[RequestDelta], None]:
        """As `generate_checked`, which yields one by one what this yields together: all that has come meanwhile."""
        mailbox = _Mailbox(asyncio.get_running_loop())
        streams = [_Stream(mailbox, index) for index in range(len(checked))]
        ids = [None] * len(checked) if request_ids is None else request_ids

        def add_all() -> None:
            for request, request_id, stream in zip(checked, ids, streams, strict=True):
                self._add(request, request_id, context, stream)

        if not self._send(add_all):
            raise EngineDeadError("the engine has stopped") from self._error
        num_unfinished = len(streams)
        try:
            while num_unfinished:
                batch = await mailbox.take()
                num_unfinished -= sum(output is not None for _, _, output in batch)
                yield batch
        finally:
            if num_unfinished:
                self._send(lambda: self._abort_streams(streams))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        **template_args: Any,
    ) -> AsyncGenerator[tuple[OutputDelta, RequestOutput | None], None]:
        """Answer one conversation, through the model's chat template; yields as `generate` does.

        template_args are those of `serving.text.chat_template.ChatTemplate.render`, such as tools.
        """
        prompt = await asyncio.to_thread(functools.partial(self.engine.render_chat, messages, **template_args))
        async with contextlib.aclosing(self.generate(prompt, params, request_id, context=context)) as stream:
            async for item in stream:
                yield item

    def stats(self) -> dict[str, int | float]:
        """Counters since start and gauges of now, as `serving.engine.Engine.stats` explains them."""
        return self.engine.stats()

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; returns how many pages were forgotten. Raises EngineDeadError."""
        return await self._call(self.engine.reset_prefix_cache)

    async def pin_prefix(self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_salt: bytes = b"") -> int:
        """`serving.engine.Engine.pin_prefix` in the engine's thread. Raises RequestError and EngineDeadError."""
        token_ids = await self._token_ids(prompt)
        pin = functools.partial(self.engine.pin_prefix, token_ids, tenant=tenant, cache_salt=cache_salt)
        return await self._call(pin)

    async def unpin_prefix(self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_salt: bytes = b"") -> int:
        """`serving.engine.Engine.unpin_prefix` in the engine's thread. Raises RequestError and EngineDeadError."""
        token_ids = await self._token_ids(prompt)
        unpin = functools.partial(self.engine.unpin_prefix, token_ids, tenant=tenant, cache_salt=cache_salt)
        return await self._call(unpin)

    async def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        return await asyncio.to_thread(self.engine.encode, prompt) if isinstance(prompt, str) else prompt

    async def _call(self, function: Callable[[], int]) -> int:
        """What `function` returns or raises in the engine's thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()

        def settle(value: int, error: Exception | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(value)
                else:
                    done.set_exception(error)

        def call() -> None:
            value, error = 0, None
            try:
                if self._error is not None:
                    raise self._dead()
                value = function()
            except Exception as raised:  # its caller's alone
                error = raised
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, value, error)

        if not self._send(call):
            raise EngineDeadError("the engine has stopped") from self._error
        return await done

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
        return self._error is None and self._thread.is_alive()  # the error comes first, then callers are told

    def _send(self, command: Callable[[], None]) -> bool:
        """Give the engine's thread something to do; False once it has stopped."""
        with self._lock:  # nothing enters the inbox once it has been emptied for the last time
            if self._error is not None or self._closed:
                return False
            self._inbox.put(command)
            return True

    # In the engine's thread

    def _add(
        self, checked: CheckedRequest, request_id: str | None, context: RequestContext | None, stream: _Stream
    ) -> None:
        if self._error is not None:
            stream.put(self._dead())
            return
        try:
            stream.request_id = self.engine.add_checked(checked, request_id, context=context)
        except Exception as error:  # nothing has changed: this is its caller's alone, whatever it is
            stream.put(error)
        else:
            self._streams[stream.request_id] = stream

    def _abort(self, request_id: str) -> None:
        if self._error is None and request_id in self._streams:
            self._deliver(self.engine.abort(request_id))

    def _abort_streams(self, streams: Sequence[_Stream]) -> None:
        for stream in streams:
            # Its id may be in use again by another stream, or never have been its own.
            if stream.request_id is not None and self._streams.get(stream.request_id) is stream:
                self._abort(stream.request_id)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        # One wake-up for each loop and step: each costs this thread a system call.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, RequestDelta]]] = {}
        for delta in deltas:
            stream = self._streams[delta.request_id]
            output = None
            if delta.request_finished:
                output = self.engine.collect(delta.request_id)
                del self._streams[delta.request_id]
            by_loop.setdefault(stream.mailbox.loop, []).append((stream.mailbox, (stream.index, delta, output)))
        for loop, items in by_loop.items():
            _post(loop, items)

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
