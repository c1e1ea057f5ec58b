"""A tiny engine with a tokenizer of bytes and a chat template, and HTTP servers over it on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.engine import EngineConfig, MeshConfig
from configs.scheduling import SchedulingConfig
from configs.server import ServerConfig
from serving.api.http_jobs import job_routes
from serving.api.http_server import HttpServer, build_app
from serving.api.service import Service
from serving.async_engine import AsyncEngine
from serving.engine import build_engine
from serving.jobs.jobs import Jobs
from serving.jobs.store import Store
from serving.observer import EngineObserver, RequestRecord
from serving.operations.operations import Operations
from serving.request import Request
from serving.scheduling.schedule import Schedule
from serving.scheduling.scheduler import NOT_FINITE, StepEvent
from serving.structured.compiler import GrammarCompiler
from serving.text.byte_level import CHARACTER_OF_BYTE
from serving.text.tokenizer import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny"
CONTEXT = 96
VOCAB_SIZE = 301
BOS, TURN, END = 259, 260, 261
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, template: str | None = TEMPLATE, adds_bos: bool = True) -> Tokenizer:
    """A token for every byte (its id), "he" 256, "hel" 257, "lo" 258, <s> 259, <|im_start|> 260, <|im_end|> 261."""
    tokens = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += ["he", "hel", "lo", "<s>", "<|im_start|>", "<|im_end|>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [3] * 3,
        "tokenizer.ggml.merges": ["h e", "he l", "l o"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": adds_bos,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    tokenizer = load_tokenizer(metadata)
    assert tokenizer is not None
    return tokenizer


def tiny_engine(
    *, template: str = TEMPLATE, context: int = CONTEXT, scheduling: SchedulingConfig | None = None, **settings: Any
) -> AsyncEngine:
    """Random weights, 301 tokens, eight slots, 128 pages of 8 tokens; no token ends its output but 7."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=context,
        max_num_seqs=8,
        page_size=8,
        prefill_token_buckets=(32,),
        query_block=16,
        max_decode_steps=1,
        num_pages=129,
        prefix_cache_scope="tenant",
        **settings,
    )
    engine = build_engine(f"dummy:{TINY}", config, MeshConfig(), scheduling=scheduling)
    engine.tokenizer = byte_tokenizer(template=template)
    engine._grammars = GrammarCompiler(engine.tokenizer, VOCAB_SIZE, engine.eos_token_ids)
    return AsyncEngine(engine)


class Servers:
    """HTTP servers in an event loop of their own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._running: list[tuple[HttpServer, Any]] = []

    def start(self, app: Any, config: ServerConfig) -> str:
        """Serve `app` on a free port; returns its address."""
        server = HttpServer(app, config, host="127.0.0.1", port=0)
        future = asyncio.run_coroutine_threadsafe(server.serve(), self.loop)
        self._running.append((server, future))
        return server.address

    def start_service(
        self, config: ServerConfig, engine: AsyncEngine | None, operations: Operations | None = None
    ) -> tuple[str, Service]:
        service = Service(dataclasses.replace(config, max_loop_delay_s=60.0), "tiny")  # a machine of tests may be slow
        if engine is not None:
            service.attach(engine, operations)
        return self.start(build_app(service, version="0"), config), service

    def close(self) -> None:
        for server, _ in self._running:
            server.stop()
        for _, future in self._running:
            future.result(timeout=30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Requests(EngineObserver):
    """Notes what it is told of requests that have ended."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


def poison(monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine, is_it: Callable[[Request], bool]) -> None:
    """Have the device say of a decoding request that its numbers are not finite, once it has two output tokens."""
    scheduler = engine.engine.scheduler
    update = scheduler.update

    def poisoned(schedule: Schedule, tokens: np.ndarray) -> list[StepEvent]:
        tokens = tokens.copy()
        for slot, request in schedule.decode:
            if is_it(request) and request.num_output_tokens == 2:
                tokens[0, slot] = NOT_FINITE
        return update(schedule, tokens)

    monkeypatch.setattr(scheduler, "update", poisoned)


def check_idle(engine: AsyncEngine, service: Service | None = None) -> None:
    """The engine comes to rest, and has every page and slot that it has at its start."""
    deadline_s = time.monotonic() + 60
    while engine.engine.has_work() or (service is not None and service.num_in_flight):
        assert time.monotonic() < deadline_s, engine.stats()
        time.sleep(0.01)
    stats = engine.stats()
    assert engine.is_alive
    assert (stats["num_running"], stats["num_waiting"], stats["num_compiles_while_serving"]) == (0, 0, 0)
    assert stats["num_free_pages"] == stats["num_pages"] - 1 and stats["num_free_slots"] == 8
    engine.engine.scheduler.check_integrity()


def free_port() -> int:
    """A port that nobody has, and below those that the system gives out, so that nobody is given it meanwhile."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(15_000, 32_000))) as taken,
        ):
            port: int = taken.getsockname()[1]
            return port


class Brake:
    """Lets an engine run `num_steps` steps, then none until there are more; it takes requests and aborts meanwhile.

    None: any number. So a test can have clients do what they do while requests are under way, on a slow machine too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine, num_steps: int | None = 0):
        self.num_steps = num_steps
        self._step = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", self._braked_step)

    def _braked_step(self) -> list[Any]:
        if self.num_steps == 0:
            time.sleep(0.001)
            return []
        if self.num_steps is not None:
            self.num_steps -= 1
        return self._step()


class JobServer:
    """HTTP over a store of jobs; the jobs run until `close`."""

    def __init__(self, running: Servers, engine: Any, config: ServerConfig, now_s: Callable[[], float] = time.time):
        self.running = running
        self.service = Service(config, "tiny")
        if engine is not None:
            self.service.attach(engine)
        self.jobs = Jobs(self.service, Store(config), now_s=now_s)
        app = build_app(self.service, version="0", more_routes=job_routes(self.service, self.jobs))
        self.url = running.start(app, config)
        self._serving = asyncio.run_coroutine_threadsafe(self.jobs.serve(), self.running.loop)

    def close(self) -> None:
        self.running.loop.call_soon_threadsafe(self.jobs.stop)
        self._serving.result(timeout=30)
        self.jobs.close()


@contextlib.contextmanager
def job_server(running: Servers, engine: Any, folder: Path, **fields: Any) -> Iterator[JobServer]:
    now_s = fields.pop("now_s", time.time)
    config = ServerConfig(batch_dir=str(folder), **{"served_model_name": "tiny", "max_batch_in_flight": 4, **fields})
    server = JobServer(running, engine, config, now_s)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    running = Servers()
    try:
        yield running
    finally:
        running.close()
