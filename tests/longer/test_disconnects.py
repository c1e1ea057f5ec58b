"""Clients that leave at random moments, thousands of them, over HTTP and gRPC: nothing of theirs is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_harness import grpc_server
from http_harness import check_idle, servers

from configs.server import ServerConfig
from serving.proto.v1 import serving_pb2 as pb
from serving.proto.v1.serving_pb2_grpc import ServingStub

pytestmark = pytest.mark.timeout(3600)
NUM_CLIENTS = 5000
MOST_AT_ONCE = 32
MOST_TOKENS = 80
SETTINGS: dict[str, Any] = {"max_tokens": MOST_TOKENS, "ignore_eos": True, "allowed_token_ids": list(range(97, 123))}
EARLY_SHARE = 0.05  # leave before the engine has their request, or about then
LONGEST_STAY_S = 0.05  # of those that wait for a whole answer, from when the engine has their request


@dataclass
class Watch:
    """When the engine had, aborted and last ran each client's request. A client goes by the seed of its request."""

    engine: Any  # serving.engine.Engine
    clients: dict[str, int] = field(default_factory=dict)  # by request id
    arrived: dict[int, asyncio.Event] = field(default_factory=dict)
    left_s: dict[int, float] = field(default_factory=dict)
    aborted_s: dict[int, float] = field(default_factory=dict)
    read_s: dict[int, float] = field(default_factory=dict)  # the last step that had it was read
    steps_s: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each
    faults: list[str] = field(default_factory=list)

    def start(self, monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
        add, abort, step = self.engine.add_checked, self.engine.abort, self.engine.step
        schedule = self.engine.scheduler.schedule
        dispatched: set[int] = set()
        in_flight: set[int] = set()

        def noting_add(checked: Any, *args: Any, **kwargs: Any) -> str:
            request_id = add(checked, *args, **kwargs)
            self.clients[request_id] = checked.params.seed
            loop.call_soon_threadsafe(self.arrival(checked.params.seed).set)
            return request_id

        def noting_abort(request_id: str) -> Any:
            deltas = abort(request_id)
            self.aborted_s[self.clients[request_id]] = time.monotonic()
            return deltas

        def noting_schedule(*args: Any, **kwargs: Any) -> Any:
            found = schedule(*args, **kwargs)
            if found is not None:
                requests = [request for _, request in found.decode] + [chunk.request for chunk in found.prefill]
                dispatched.update(self.clients[request.request_id] for request in requests)
                for client in dispatched & self.aborted_s.keys():
                    self.faults.append(f"client {client} is in step {found.step_id}, after it was aborted")
            return found

        def noting_step() -> Any:
            nonlocal dispatched, in_flight
            started_s = time.monotonic()
            deltas = step()
            now_s = time.monotonic()
            self.steps_s.append((started_s, now_s))
            self.read_s.update(dict.fromkeys(in_flight, now_s))
            in_flight, dispatched = dispatched, set()
            return deltas

        monkeypatch.setattr(self.engine, "add_checked", noting_add)
        monkeypatch.setattr(self.engine, "abort", noting_abort)
        monkeypatch.setattr(self.engine, "step", noting_step)
        monkeypatch.setattr(self.engine.scheduler, "schedule", noting_schedule)

    def stops_s(self) -> tuple[list[float], int]:
        """From leaving until the engine ran a client's request no more, of each whose request was aborted; and how many
        of these took longer than the longest step meanwhile and 200 ms."""
        steps_s = np.array(self.steps_s)
        stops_s, num_late = [], 0
        for client, aborted_s in self.aborted_s.items():
            left_s, stopped_s = self.left_s[client], max(aborted_s, self.read_s.get(client, aborted_s))
            meanwhile = steps_s[(steps_s[:, 1] >= left_s) & (steps_s[:, 0] <= stopped_s)]
            step_s = np.diff(meanwhile).max(initial=0.0)
            stops_s.append(stopped_s - left_s)
            num_late += stops_s[-1] > step_s + 0.2
        return stops_s, num_late

    def arrival(self, client: int) -> asyncio.Event:
        return self.arrived.setdefault(client, asyncio.Event())

    async def stay(self, client: int, rng: random.Random) -> None:
        """As long as a client does that waits for its whole answer."""
        if rng.random() < EARLY_SHARE:
            await asyncio.sleep(rng.random() * LONGEST_STAY_S / 5)
        else:
            await self.arrival(client).wait()
            await asyncio.sleep(rng.random() * LONGEST_STAY_S)

    def leave(self, client: int) -> None:
        self.left_s[client] = time.monotonic()


def events_to_read(rng: random.Random) -> int:
    """How many events a streaming client reads before it leaves; 0: about when its request arrives."""
    return 0 if rng.random() < EARLY_SHARE else rng.randrange(1, MOST_TOKENS - 1)


async def http_client(address: str, watch: Watch, client: int, rng: random.Random) -> None:
    """Closes its connection or, one in two, resets it."""
    host, port = address.removeprefix("http://").split(":")
    is_streamed, is_reset = rng.random() < 0.5, rng.random() < 0.5
    content = json.dumps({"prompt": "hello", **SETTINGS, "stream": is_streamed, "seed": client}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + content)
    if is_streamed and (count := events_to_read(rng)):
        while count:
            line = await reader.readline()
            assert line, "the server has closed the connection"
            count -= line.startswith(b"data: ")
    else:
        await watch.stay(client, rng)
    watch.leave(client)
    if is_reset:
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def grpc_client(stub: Any, watch: Watch, client: int, rng: random.Random) -> None:
    is_streamed = rng.random() < 0.5
    completion = pb.CompletionRequest(prompt=[pb.Prompt(text="hello")], stream=is_streamed, seed=client, **SETTINGS)
    call = stub.Generate(pb.GenerateRequest(completion=completion))
    if is_streamed and (count := events_to_read(rng)):
        for _ in range(count):
            assert await call.read() is not grpc.aio.EOF
    else:
        reading = asyncio.ensure_future(call.read())  # which sends the request
        await watch.stay(client, rng)
        reading.cancel()
    watch.leave(client)
    call.cancel()


def test_five_thousand_clients_that_leave_leave_nothing(engine, caplog, monkeypatch):
    seed = random.randrange(2**32)
    print("seed", seed)
    before = engine.stats()
    watch = Watch(engine.engine)
    with servers() as running:
        address, service = running.start_service(ServerConfig(max_concurrent_requests=1000), engine)
        with grpc_server(running, service) as target:
            asyncio.run(everyone(address, target, watch, random.Random(seed), monkeypatch))
            check_idle(engine, service)
            monkeypatch.undo()
    after = engine.stats()
    added = {name: after[name] - before[name] for name in after}
    num_arrived = len(watch.clients)
    print(f"{num_arrived} of {NUM_CLIENTS} requests reached the engine, {added['num_finished_abort']} were aborted")
    stops_s, num_late = watch.stops_s()
    print("from leaving until the engine ran it no more:", _spread(stops_s))
    print("a step:", _spread([end_s - start_s for start_s, end_s in watch.steps_s]))
    print(f"{num_late} of {len(stops_s)} later than the longest step meanwhile and 200 ms")
    assert num_arrived > 0.93 * NUM_CLIENTS and added["num_finished_abort"] > 0.9 * NUM_CLIENTS
    # All of them, and nothing else, is accounted for.
    assert added["num_requests"] == num_arrived
    assert added["num_finished_abort"] + added["num_finished_length"] == num_arrived
    assert len(watch.aborted_s) == added["num_finished_abort"]
    gauges = ("num_running", "num_waiting", "num_free_slots", "num_free_pages")
    assert {name: added[name] for name in gauges} == dict.fromkeys(gauges, 0)
    assert not watch.faults, watch.faults[:5]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _spread(values_s: list[float]) -> str:
    values = {"median": np.median(values_s), "p99": np.percentile(values_s, 99), "max": max(values_s)}
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in values.items())


async def everyone(
    address: str, target: str, watch: Watch, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.start(monkeypatch, asyncio.get_running_loop())
    room = asyncio.Semaphore(MOST_AT_ONCE)
    async with grpc.aio.insecure_channel(target) as channel:
        stub = ServingStub(channel)

        async def one(i: int) -> None:
            async with room:
                await (http_client(address, watch, i, rng) if i % 2 else grpc_client(stub, watch, i, rng))

        await asyncio.gather(*(one(i) for i in range(NUM_CLIENTS)))
