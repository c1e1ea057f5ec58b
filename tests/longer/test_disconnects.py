"""Clients that leave at random moments, thousands of them, over HTTP and gRPC: nothing of theirs is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import grpc
import httpx
import pytest
from grpc_harness import grpc_server
from http_harness import servers, tiny_engine

from configs.server import ServerConfig
from serving.proto.v1 import serving_pb2 as pb
from serving.proto.v1.serving_pb2_grpc import ServingStub

NUM_CLIENTS = 2500  # of each kind
MOST_AT_ONCE = 32
LONGEST_STAY_S = 0.15
MOST_TOKENS = 80


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine()
    yield engine
    engine.close()


async def http_client(url: str, rng: random.Random) -> None:
    body = {"prompt": "hello", "max_tokens": MOST_TOKENS, "ignore_eos": True, "stream": rng.random() < 0.5}
    async with httpx.AsyncClient(base_url=url) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * LONGEST_STAY_S):
                await client.post("/v1/completions", json=body)


async def grpc_client(stub: Any, rng: random.Random) -> None:
    completion = pb.CompletionRequest(
        prompt=[pb.Prompt(text="hello")], max_tokens=MOST_TOKENS, ignore_eos=True, stream=rng.random() < 0.5
    )
    call = stub.Generate(pb.GenerateRequest(completion=completion))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.random() * LONGEST_STAY_S):
            async for _ in call:
                pass
    call.cancel()


def test_five_thousand_clients_that_leave_leave_nothing(engine, caplog):
    seed = random.randrange(2**32)
    print("seed", seed)
    before = engine.stats()
    with servers() as running:
        url, service = running.start_service(ServerConfig(max_concurrent_requests=1000), engine)
        with grpc_server(running, service) as target:
            idle_s = asyncio.run(everyone(url, target, engine, service, random.Random(seed)))
    after = engine.stats()
    num_aborts = after["num_finished_abort"] - before["num_finished_abort"]
    print(
        f"{num_aborts} of {after['num_requests'] - before['num_requests']} ended early; idle {idle_s * 1e3:.0f} ms after"
    )
    assert num_aborts > NUM_CLIENTS / 4
    assert {name: after[name] for name in ("num_running", "num_waiting", "num_free_slots")} == {
        name: before[name] for name in ("num_running", "num_waiting", "num_free_slots")
    }
    assert after["num_free_pages"] == before["num_free_pages"] and service.num_in_flight == 0
    engine.engine.scheduler.check_integrity()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def everyone(url: str, target: str, engine: Any, service: Any, rng: random.Random) -> float:
    """Returns the seconds from the last client's end until the engine has nothing to do."""
    room = asyncio.Semaphore(MOST_AT_ONCE)
    async with grpc.aio.insecure_channel(target) as channel:
        stub = ServingStub(channel)

        async def one(i: int) -> None:
            async with room:
                await (http_client(url, rng) if i % 2 else grpc_client(stub, rng))

        await asyncio.gather(*(one(i) for i in range(2 * NUM_CLIENTS)))
        ended_s = time.monotonic()
        async with asyncio.timeout(30):
            while service.num_in_flight or engine.engine.has_work():
                await asyncio.sleep(0.005)
        return time.monotonic() - ended_s
