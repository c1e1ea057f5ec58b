"""Admission by the predicted wait through HTTP, gRPC and batches, and an engine that sizes its steps by targets."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_harness import grpc_server, stub
from grpc_status import rpc_status
from http_harness import tiny_engine

from configs.scheduling import SchedulingConfig
from configs.server import ServerConfig
from serving.api.errors import OverloadedError
from serving.jobs.lines import answer_request
from serving.proto.v1 import serving_pb2 as pb
from serving.scheduling.admission import LoadSnapshot

COMPLETIONS = "/v1/completions"
SHORT = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
BODY = {"prompt": "a", **SHORT}
SCHEDULING = SchedulingConfig(
    class_names=("chat", "batch"), class_priorities=(0, 10), class_ttft_s=(2.0, 0.0), class_tpot_s=(0.5, 0.0)
)
IDLE = LoadSnapshot(
    time_s=0.0,
    waiting_requests=(0, 0),
    waiting_tokens=(0, 0),
    waiting_pairs=(0, 0),
    prefilling_tokens=0,
    num_running=1,
    num_free_slots=8,
    free_kv_tokens=1000.0,
    prefill_tokens_per_s=1000.0,
    full_prefill_tokens_per_s=1000.0,
    pairs_a_token=500.0,
    pair_s=1e-8,
    ends_per_s=10.0,
    ended_kv_tokens=100.0,
    step_s=0.01,
)
FULL = dataclasses.replace(IDLE, waiting_requests=(9, 0), waiting_tokens=(9000, 0), num_free_slots=0)


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(scheduling=SCHEDULING)
    yield engine
    engine.close()


@pytest.fixture
def service(running, engine):
    engine.engine.admission.publish(IDLE)
    return running.start_service(ServerConfig(), engine)


@pytest.fixture
def full(engine, service):
    """As if there were more to do than can be done within the target: an idle engine publishes nothing of its own."""
    engine.engine.admission.publish(FULL)
    yield
    engine.engine.admission.publish(IDLE)


def test_http_refuses_with_the_predicted_time(service, full):
    address, _ = service
    with httpx.Client(base_url=address) as http:
        refused = http.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 429 and 7 <= int(refused.headers["retry-after"]) <= 14
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_prompt_that_alone_takes_longer_than_its_target_is_refused_with_that_reason(engine, service):
    address, _ = service
    engine.engine.admission.publish(dataclasses.replace(IDLE, prefill_tokens_per_s=1.0))
    with httpx.Client(base_url=address) as http:
        refused = http.post(COMPLETIONS, json={"prompt": list(range(1, 6)), **SHORT})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "5 prompt tokens alone take 5.0 s" in refused.json()["error"]["message"]
        engine.engine.admission.publish(dataclasses.replace(IDLE, prefill_tokens_per_s=1.0, num_running=0))
        assert http.post(COMPLETIONS, json={"prompt": list(range(1, 6)), **SHORT}).status_code == 200


def test_grpc_refuses_with_the_predicted_time(running, service, full):
    with grpc_server(running, service[1]) as target, stub(target) as client:
        request = pb.GenerateRequest(completion=pb.CompletionRequest(prompt=[pb.Prompt(text="a")], **SHORT))
        with pytest.raises(grpc.RpcError) as error:
            list(client.Generate(request))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        details = [detail for detail in rpc_status.from_call(error.value).details if detail.Unpack(retry)]
        assert details and 7 <= retry.retry_delay.seconds <= 14


def test_a_batch_line_is_to_wait_where_its_class_would_wait_too_long(running, engine, service):
    tokens = round(IDLE.full_prefill_tokens_per_s * SCHEDULING.max_queue_s * 2)
    engine.engine.admission.publish(dataclasses.replace(FULL, waiting_requests=(0, 9), waiting_tokens=(0, tokens)))

    async def line():
        body = {**BODY, "priority": 10}
        with pytest.raises(OverloadedError) as error:
            await answer_request(service[1], COMPLETIONS, body, may_be_overloaded=True)
        assert error.value.retry_after_s >= SCHEDULING.max_queue_s
        engine.engine.admission.publish(IDLE)
        return await answer_request(service[1], COMPLETIONS, body, may_be_overloaded=True)

    answer = asyncio.run_coroutine_threadsafe(line(), running.loop).result(60)
    assert answer.status_code == 200


def test_once_there_is_room_requests_run_and_steps_are_learnt_from(service, engine):
    address, _ = service
    with httpx.Client(base_url=address) as http:
        for _ in range(3):
            assert http.post(COMPLETIONS, json=BODY).status_code == 200
    controller = engine.engine.controller
    assert controller.step_time.num_steps >= 6
    assert controller.lengths.mean_prompt_tokens > 0
    assert engine.stats()["num_running"] == 0
