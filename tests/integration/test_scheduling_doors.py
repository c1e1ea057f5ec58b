"""Priorities, queue deadlines and rate limits through HTTP, gRPC, batches and AsyncEngine: the same at every door."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_harness import grpc_server, stub
from grpc_status import rpc_status
from http_harness import Requests, Servers, tiny_engine

from configs.scheduling import MAX_PRIORITY, SchedulingConfig
from configs.server import ServerConfig
from serving.api.errors import OverloadedError
from serving.jobs.lines import BATCH_CONTEXT, answer_request
from serving.proto.v1 import serving_pb2 as pb
from serving.request import RequestContext, SamplingParams

COMPLETIONS = "/v1/completions"
SHORT = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
SCHEDULING = SchedulingConfig(
    class_names=("interactive", "batch"),
    class_priorities=(0, 10),
    tenant_names=("few", "short"),
    tenant_requests_per_min=(2, 0),
    tenant_tokens_per_min=(0, 8),
)
SERVER = ServerConfig(tenant_header="X-Tenant")


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(scheduling=SCHEDULING)
    yield engine
    engine.close()


@pytest.fixture
def requests(engine):
    requests = Requests()
    engine.engine.observers = (requests,)
    yield requests
    engine.engine.observers = ()


@pytest.fixture
def doors(running: Servers, engine):
    """(HTTP client, gRPC stub, service) with rate limits that nobody has drawn on."""
    address, service = running.start_service(SERVER, engine)
    with httpx.Client(base_url=address) as http, grpc_server(running, service) as target, stub(target) as client:
        yield http, client, service


def message(prompt: str = "a", **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(completion=pb.CompletionRequest(prompt=[pb.Prompt(text=prompt)], **{**SHORT, **fields}))


@contextlib.contextmanager
def all_slots_taken(http: httpx.Client) -> Iterator[None]:
    body = {"prompt": "hello", **SHORT, "max_tokens": 90, "n": 100, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()  # dropped, it would close the response
        next(lines)
        yield


def test_priority_and_deadline_of_every_door_reach_the_engine(doors, requests, engine):
    http, client, service = doors
    assert http.post(COMPLETIONS, json={"prompt": "a", **SHORT}).status_code == 200
    assert http.post(COMPLETIONS, json={"prompt": "a", "priority": -3, **SHORT}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "priority": 4, "max_queue_s": 60, **SHORT}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    list(client.Generate(message(priority=7, max_queue_s=1000.0), timeout=100))
    list(client.GenerateBatch(iter([pb.GenerateBatchRequest(id="0", completion=message(priority=8).completion)])))

    async def others() -> None:
        for body in ({}, {"priority": 9}):
            body = {"prompt": "a", **SHORT, **body}
            answer = await answer_request(service, COMPLETIONS, json.dumps(body).encode(), context=BATCH_CONTEXT)
            assert answer.status_code == 200
        params = SamplingParams(**SHORT)
        async for _ in engine.generate([1, 2], params, context=RequestContext(priority=5)):
            pass

    asyncio.run(others())
    contexts = [record.context for record in requests.records]
    assert [context.priority for context in contexts] == [0, -3, 4, 7, 8, MAX_PRIORITY, 9, 5]
    now_s = engine.engine.now()
    deadlines = [context.deadline_s for context in contexts]
    assert deadlines[0] is None and deadlines[4] is None
    assert 0 < deadlines[2] - now_s <= 60
    assert 0 < deadlines[3] - now_s <= 100  # the earlier of the call's and the field's


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_does_not_begin_in_time_is_told_so_and_counted(doors, engine, is_stream):
    http, client, _ = doors
    before = engine.stats()["num_deadline_drops"]
    with all_slots_taken(http):
        body = {"prompt": "a", "max_queue_s": 0.001, "stream": is_stream, **SHORT}
        late = http.post(COMPLETIONS, json=body)
        with pytest.raises(grpc.RpcError) as raised:
            list(client.Generate(message(max_queue_s=0.001, stream=is_stream)))
    assert late.status_code == 504 and late.json()["error"]["code"] == "queue_timeout"
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "queue" in raised.value.details()
    assert engine.stats()["num_deadline_drops"] == before + 2


def test_a_tenant_over_its_requests_a_minute_is_refused_and_others_are_not(doors):
    http, client, _ = doors
    body = {"prompt": "a", **SHORT}
    few = {"X-Tenant": "few"}
    assert [http.post(COMPLETIONS, json=body, headers=few).status_code for _ in range(2)] == [200, 200]
    refused = http.post(COMPLETIONS, json=body, headers=few)
    assert refused.status_code == 429 and 0 < int(refused.headers["Retry-After"]) <= 30
    assert "2 requests a minute" in refused.json()["error"]["message"]
    with pytest.raises(grpc.RpcError) as raised:
        list(client.Generate(message(), metadata=(("x-tenant", "few"),)))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(raised.value).details)
    assert 0 < retry.retry_delay.seconds <= 30
    assert http.post(COMPLETIONS, json=body).status_code == 200
    list(client.Generate(message()))


def test_tokens_a_minute_count_prompt_and_output_and_a_batch_is_told_to_wait(doors):
    http, _, service = doors
    short = {"X-Tenant": "short"}
    body = {"prompt": [1, 2, 3, 4, 5], **SHORT}  # and 3 tokens of output: 8
    assert http.post(COMPLETIONS, json=body, headers=short).status_code == 200
    refused = http.post(COMPLETIONS, json={**body, "prompt": [1]}, headers=short)
    assert refused.status_code == 429 and "8 tokens a minute" in refused.json()["error"]["message"]

    async def wait_or_answer() -> None:
        data, context = json.dumps(body).encode(), RequestContext(tenant="short")
        with pytest.raises(OverloadedError):
            await answer_request(service, COMPLETIONS, data, context=context, may_be_overloaded=True)
        assert (await answer_request(service, COMPLETIONS, data, context=context)).status_code == 429

    asyncio.run(wait_or_answer())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"max_queue_s": 0.0}, "max_queue_s"),
    ],
)
def test_values_out_of_range_are_refused_by_name_at_both_doors(doors, fields, name):
    http, client, _ = doors
    refused = http.post(COMPLETIONS, json={"prompt": "a", **SHORT, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name
    with pytest.raises(grpc.RpcError) as raised:
        list(client.Generate(message(**fields)))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and name in raised.value.details()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_where_nothing_is_generated_a_priority_is_refused_by_name(doors, path):
    http, _, _ = doors
    refused = http.post(path, json={"prompt": "a", "tokens": [1], "priority": 1})
    assert refused.status_code == 400
    only = http.post(path, json={("prompt" if path == "/tokenize" else "tokens"): "a", "priority": 1})
    assert only.json()["error"]["param"] == "priority"
