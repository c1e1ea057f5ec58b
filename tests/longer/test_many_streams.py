"""Cases of other engines about many streams at once, in their full size, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_harness import grpc_server
from http_harness import Servers, check_idle

from configs.server import ServerConfig
from serving.proto.v1 import serving_pb2 as pb
from serving.proto.v1.serving_pb2_grpc import ServingStub

SETTINGS: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": list(range(97, 123)), "return_token_ids": True}


@pytest.fixture(scope="module")
def served(running: Servers, engine):
    url, service = running.start_service(ServerConfig(), engine)
    with grpc_server(running, service) as target:
        yield url, target, service


class Client:
    """Streams of either door, as (token ids of an event, its finish reason or "")."""

    def __init__(self, http: httpx.AsyncClient, channel: grpc.aio.Channel):
        self._http, self._stub = http, ServingStub(channel)

    async def by_http(self, prompt: list[int], **fields: Any) -> AsyncIterator[tuple[list[int], str]]:
        body = {"prompt": prompt, "stream": True, **SETTINGS, **fields}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    yield choice["token_ids"], choice["finish_reason"] or ""

    async def by_grpc(self, prompt: list[int], **fields: Any) -> AsyncIterator[tuple[list[int], str]]:
        tokens = pb.Prompt(tokens=pb.TokenIds(token_ids=prompt))
        request = pb.CompletionRequest(prompt=[tokens], stream=True, **SETTINGS, **fields)
        call = self._stub.Generate(pb.GenerateRequest(completion=request))
        try:
            async for part in call:
                (choice,) = part.choices
                yield list(choice.token_ids), choice.finish_reason
        finally:
            call.cancel()

    def stream(self, door: str, prompt: list[int], **fields: Any) -> AsyncIterator[tuple[list[int], str]]:
        return (self.by_http if door == "http" else self.by_grpc)(prompt, **fields)


def run(served: Any, work: Any) -> Any:
    async def with_client() -> Any:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=served[0], timeout=300, limits=limits) as http,
            grpc.aio.insecure_channel(served[1]) as channel,
        ):
            return await work(Client(http, channel))

    return asyncio.run(with_client())


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_s06_200_streams_of_slow_readers_have_all_64_tokens_before_their_end(served, engine, door):
    async def work(client: Client) -> list[list[int]]:
        rng = random.Random(6)

        async def one(i: int) -> list[int]:
            token_ids, ends = [], []
            async for tokens, finish_reason in client.stream(door, [i + 1], max_tokens=64, temperature=0):
                assert not ends
                token_ids += tokens
                ends += [finish_reason] if finish_reason else []
                if rng.random() < 0.05:
                    await asyncio.sleep(0.01)
            assert ends == ["length"]
            return token_ids

        together = await asyncio.gather(*(one(i) for i in range(200)))
        assert together[::20] == [await one(i) for i in range(0, 200, 20)]  # each its own
        return together

    token_ids = run(served, work)
    assert [len(tokens) for tokens in token_ids] == [64] * 200
    print(f"{door}: 200 streams, {sum(map(len, token_ids))} tokens")
    check_idle(engine, served[2])


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_s41_500_streams_closed_after_their_first_event_leave_full_capacity(served, engine, door):
    before = engine.stats()

    async def work(client: Client) -> None:
        room = asyncio.Semaphore(50)

        async def first_event(i: int) -> None:
            async with room:
                stream = client.stream(door, [i % 250 + 1], max_tokens=90)
                assert await anext(stream)
                await stream.aclose()

        await asyncio.gather(*(first_event(i) for i in range(500)))

    run(served, work)
    check_idle(engine, served[2])
    after = engine.stats()
    num_aborts, num_ends = (after[name] - before[name] for name in ("num_finished_abort", "num_finished_length"))
    assert num_aborts + num_ends == 500 and num_aborts > 400  # some may end before their client's leaving is seen
    num_tokens = after["num_output_tokens"] - before["num_output_tokens"]
    print(f"{door}: 500 streams left after their first event, {num_tokens} tokens of {500 * 90} made")
    assert num_tokens < 500 * 90

    async def full(client: Client) -> list[int]:
        async def one(i: int) -> int:
            return sum([len(tokens) async for tokens, _ in client.stream(door, [i + 1], max_tokens=90)])

        return await asyncio.gather(*(one(i) for i in range(8)))

    assert run(served, full) == [90] * 8
