"""The gRPC server on loopback. Names with s06 ... are cases of other engines."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import random
import threading
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from bad_requests import SMALLEST, fields_of, requests_of_hostile_texts, requests_of_one_bad_value
from doors import GENERATING, PATHS, Doors
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from google.rpc import error_details_pb2
from grpc_harness import grpc_server, message_of, refusal, status_verdict, stub
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from http_harness import CONTEXT, TINY, Brake, Servers, check_idle
from smg_grpc_proto import vllm_engine_pb2

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.api import grpc_health
from serving.api.fields import NoEffect, Only
from serving.api.grpc_server import GrpcServer
from serving.api.schema import ENDPOINTS
from serving.api.service import Service
from serving.proto.v1 import serving_pb2 as pb
from serving.proto.v1.serving_pb2_grpc import ServingStub

CONFIG = ServerConfig(served_model_name="tiny", max_body_bytes=200_000, max_header_bytes=8192, max_batch_in_flight=4)
LETTERS = list(range(ord("a"), ord("z") + 1))
GREEDY = {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": LETTERS}


@pytest.fixture(scope="module")
def served(running: Servers, engine):
    url, service = running.start_service(CONFIG, engine)
    with grpc_server(running, service) as target:
        yield url, service, target


@pytest.fixture
def service(served) -> Service:
    return served[1]


@pytest.fixture
def target(served) -> str:
    return served[2]


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served[0], timeout=60) as client:
        yield client


@pytest.fixture
def client(target) -> Iterator[ServingStub]:
    with stub(target) as client:
        yield client


@pytest.fixture(autouse=True)
def engine_is_left_as_it_was(engine, served):
    yield
    check_idle(engine, served[1])


@pytest.fixture
def doors(http, target) -> Iterator[Doors]:
    with grpc.insecure_channel(target) as channel:
        yield Doors(http, channel)


def completion(prompt: Any = "hello", **fields: Any) -> pb.GenerateRequest:
    message = message_of("completions", {"prompt": prompt, **GREEDY, **fields})
    assert message is not None
    return pb.GenerateRequest(completion=message)


def chat(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    message = message_of("chat", {"messages": [{"role": "user", "content": text}], **GREEDY, **fields})
    assert message is not None
    return pb.GenerateRequest(chat=message)


def answer(client: ServingStub, request: pb.GenerateRequest) -> pb.GenerateResponse:
    (response,) = client.Generate(request)
    return response


def refused(call: Any) -> tuple[str, str, str | None]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call) if hasattr(call, "__next__") else call()
    return refusal(caught.value)


# Answers


BEAMS = {"use_beam_search": True, "length_penalty": 0.5, "ignore_eos": True}


@pytest.mark.parametrize("fields", [GREEDY, BEAMS], ids=["sampled", "beams"])
def test_an_answer_is_what_http_gives(client, http, fields):
    body = {"prompt": "hello", **fields, "max_tokens": 5, "logprobs": 2, "n": 2, "return_token_ids": True}
    body |= {"echo": True, "prompt_logprobs": 1}
    theirs = http.post("/v1/completions", json=body).json()
    ours = answer(client, pb.GenerateRequest(completion=message_of("completions", body)))
    assert ours.id.startswith("cmpl-") and (ours.object, ours.model) == (theirs["object"], "tiny")
    assert len(ours.choices) == 2
    for choice, known in zip(ours.choices, theirs["choices"], strict=True):
        assert (choice.index, choice.text, choice.finish_reason) == (known["index"], known["text"], "length")
        assert list(choice.token_ids) == known["token_ids"]
        assert list(choice.prompt_token_ids) == known["prompt_token_ids"]
        logprobs = known["logprobs"]
        assert [entry.token for entry in choice.logprobs] == logprobs["tokens"]
        assert [entry.text_offset for entry in choice.logprobs] == logprobs["text_offset"]
        given = [entry.logprob if entry.HasField("logprob") else None for entry in choice.logprobs]
        assert given == logprobs["token_logprobs"]
        tops = [{top.token: top.logprob for top in entry.top_logprobs} or None for entry in choice.logprobs]
        assert tops == logprobs["top_logprobs"]
        prompts = [{str(top.token_id): top.logprob for top in entry.top_logprobs} for entry in choice.prompt_logprobs]
        wanted = [{key: value["logprob"] for key, value in (entry or {}).items()} for entry in known["prompt_logprobs"]]
        assert prompts == wanted and wanted[0] == {} and len(wanted[1]) >= 1
    usage = theirs["usage"]
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (usage["prompt_tokens"], 10)
    assert ours.usage.total_tokens == usage["total_tokens"]


def test_a_chat_streams_its_role_its_text_its_end_and_its_usage(client, http):
    fields = {**GREEDY, "max_completion_tokens": 6, "logprobs": True, "top_logprobs": 1}
    known = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **fields}).json()
    parts = list(client.Generate(chat("a", **fields, stream=True, stream_options={"include_usage": True})))
    assert len({part.id for part in parts}) == 1 and parts[0].choices[0].message.role == "assistant"
    assert parts[-1].usage.completion_tokens == 6 and not parts[-1].choices
    choices = [choice for part in parts for choice in part.choices]
    assert "".join(choice.message.content for choice in choices) == known["choices"][0]["message"]["content"]
    assert [choice.finish_reason for choice in choices] == [""] * (len(choices) - 1) + ["length"]
    entries = [entry for choice in choices for entry in choice.logprobs]
    logprobs = known["choices"][0]["logprobs"]["content"]
    assert [(entry.token, list(entry.bytes)) for entry in entries] == [(e["token"], e["bytes"]) for e in logprobs]
    assert entries[0].top_logprobs[0].token == logprobs[0]["top_logprobs"][0]["token"]


def test_stop_reasons_are_texts_or_token_ids(client):
    text = answer(client, completion(max_tokens=5)).choices[0].text
    by_text = answer(client, completion(max_tokens=5, stop=[text[1]])).choices[0]
    assert by_text.finish_reason == "stop" and by_text.WhichOneof("stop_reason") == "stop_string"
    by_id = answer(client, completion(max_tokens=5, stop_token_ids=[ord(text[1])])).choices[0]
    assert by_id.finish_reason == "stop" and by_id.stop_token_id == ord(text[1])


def test_tokens_and_texts(client, http):
    tokens = client.Tokenize(pb.TokenizeRequest(prompt="hello", return_token_strs=True))
    known = http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()
    assert (list(tokens.tokens), list(tokens.token_strs)) == (known["tokens"], known["token_strs"])
    assert (tokens.count, tokens.max_model_len) == (len(known["tokens"]), CONTEXT)
    messages = [{"role": "user", "content": "hi"}]
    rendered = client.Tokenize(pb.TokenizeRequest(messages=messages))
    assert list(rendered.tokens) == http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert client.Detokenize(pb.DetokenizeRequest(tokens=[104, 105])).prompt == "hi"


# Verdicts


def test_messages_have_the_fields_of_the_schema():
    for endpoint in ENDPOINTS:
        message = message_of(endpoint, SMALLEST[endpoint])
        effective = {
            field.name
            for e, field in fields_of(CONFIG)
            if e == endpoint and not isinstance(field.kind, Only | NoEffect) and not field.name.startswith("guided_")
        }  # guided_* are older names of structured_outputs, over HTTP alone
        assert {field.name for field in message.DESCRIPTOR.fields} == effective, endpoint


def test_s67_every_value_gets_the_verdict_that_http_gives_and_hurts_nobody(doors):
    seed = random.randrange(2**32)
    print("seed", seed)
    cases = [
        (endpoint, body, message)
        for endpoint, _, body in (*requests_of_one_bad_value(CONFIG), *requests_of_hostile_texts())
        if (message := message_of(endpoint, body)) is not None and message.ByteSize() <= CONFIG.max_body_bytes
    ]
    assert len(cases) > 1000
    statuses = set()
    for case in random.Random(seed).sample(cases, 300):
        verdict = doors.check_message(*case)
        statuses.add(verdict.status)
        if verdict.is_refusal:
            doors.check_golden("grpc")
    assert {200, 400} <= statuses <= {200, 400, 404}


def test_s67_a_batch_gives_the_same_verdicts_as_http_for_any_json(doors):
    seed = random.randrange(2**32)
    print("seed", seed)
    cases = [
        (PATHS[endpoint], content)
        for endpoint, _, body in (*requests_of_one_bad_value(CONFIG), *requests_of_hostile_texts())
        if endpoint in GENERATING and len(content := json.dumps(body).encode()) <= CONFIG.max_body_bytes
    ]
    bodies = random.Random(seed).sample(cases, 300)
    broken = (b"", b"{", b"[1]", b"\xff", b'{"prompt": 1e999}', b"[" * 1000)
    bodies += [(PATHS["completions"], content) for content in broken]
    doors.check_lines(bodies, [doors.by_http(*line) for line in bodies])


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\x05\x12\x03\x0a\x01\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a"])
def test_bytes_that_are_no_message_are_the_clients_mistake(target, data):
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_stream("/serving.v1.Serving/Generate")
        assert refused(call(data))[::2] == ("INVALID_ARGUMENT", "request")


def test_fields_that_are_not_known_are_refused_by_number(target, client):
    request = completion(max_tokens=1)
    inner = request.completion.SerializeToString() + b"\xf8\x3f\x01"  # field 1023
    data = b"\x0a" + bytes([len(inner) & 0x7F | 0x80, len(inner) >> 7]) + inner
    with grpc.insecure_channel(target) as channel:
        code, text, field = refused(channel.unary_stream("/serving.v1.Serving/Generate")(data))
    assert (code, field) == ("INVALID_ARGUMENT", "(number 1023)") and "not a field" in text
    assert refused(client.Generate(pb.GenerateRequest()))[::2] == ("INVALID_ARGUMENT", "request")


def test_json_values_that_are_deep_or_not_finite_are_refused(client):
    for value in (math.nan, math.inf):
        kwargs = Struct()
        kwargs["a"] = value
        request = chat(max_tokens=1)
        request.chat.chat_template_kwargs.CopyFrom(kwargs)
        assert refused(client.Generate(request))[::2] == ("INVALID_ARGUMENT", "chat_template_kwargs")
    deep: Any = {}
    for _ in range(60):
        deep = {"a": deep}
    request = chat(max_tokens=1)
    request.chat.chat_template_kwargs.update(deep)
    assert refused(client.Generate(request))[0] == "INVALID_ARGUMENT"


def test_s50_a_message_over_the_limit_is_refused_and_the_server_lives_on(client):
    for size in (300_000, 4_100_000, 16_000_000):
        with pytest.raises(grpc.RpcError) as caught:
            list(client.Generate(completion("x" * size, max_tokens=1)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer(client, completion(max_tokens=1)).choices
    with pytest.raises(grpc.RpcError) as caught:
        list(client.Generate(completion(max_tokens=1), metadata=(("x-request-id", "x" * 2**20),)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert answer(client, completion(max_tokens=1)).choices


def test_an_answer_over_the_limit_is_an_error_and_not_silence(running, engine):
    config = ServerConfig(max_answer_bytes=2**16)
    service = Service(config, "tiny")
    service.attach(engine)
    with grpc_server(running, service) as target, stub(target) as client:
        request = completion([1] * 10, n=16, max_tokens=80, logprobs=20)
        code, text, _ = refused_plain(client.Generate(request))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "at most 65536 are sent" in text
        request.completion.stream = True
        assert len({choice.index for part in client.Generate(request) for choice in part.choices}) == 16


def refused_plain(call: Any) -> tuple[grpc.StatusCode, str, Any]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details(), rpc_status.from_call(caught.value)


def test_an_unknown_model_and_too_much_at_once_have_their_codes(client, service, monkeypatch):
    assert refused(client.Generate(completion(model="other")))[0] == "NOT_FOUND"
    monkeypatch.setattr(service, "num_in_flight", CONFIG.max_concurrent_requests)
    code, _, status = refused_plain(client.Generate(completion()))
    retry = error_details_pb2.RetryInfo()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == CONFIG.retry_after_s
    monkeypatch.undo()


def test_s18_two_calls_may_have_one_id_at_once(target):
    async def work() -> list[pb.GenerateResponse]:
        async with grpc.aio.insecure_channel(target) as channel:
            client = ServingStub(channel)

            async def one(i: int) -> pb.GenerateResponse:
                call = client.Generate(completion([5], max_tokens=20, request_id="same", seed=i))
                part = await call.read()
                assert await call.read() is grpc.aio.EOF
                return part

            together = await asyncio.gather(*(one(i) for i in range(4)))
            return [*together, await one(4)]  # and once more after they have ended

    answers = asyncio.run(work())
    assert len({answer.id for answer in answers}) == 5
    assert len({answer.choices[0].text for answer in answers}) == 1


def test_a_fault_of_the_server_is_told_without_its_details(client, service, monkeypatch):
    async def broken(call: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(service, "start", broken)
    code, text, _ = refused(client.Generate(completion()))
    assert code == "INTERNAL" and "secret" not in text


# Slow readers, clients that leave, deadlines


def test_s06_many_streams_with_slow_readers_have_all_their_tokens_before_their_end(target):
    async def one(client: ServingStub, i: int, rng: random.Random) -> None:
        request = completion([i + 1], max_tokens=64, stream=True, return_token_ids=True)
        tokens, ends = 0, []
        async for part in client.Generate(request):
            (choice,) = part.choices
            assert not ends
            tokens += len(choice.token_ids)
            if choice.finish_reason:
                ends.append(choice.finish_reason)
            if rng.random() < 0.05:
                await asyncio.sleep(0.005)
        assert (tokens, ends) == (64, ["length"])

    async def work() -> None:
        rng = random.Random()
        async with grpc.aio.insecure_channel(target) as channel:
            await asyncio.gather(*(one(ServingStub(channel), i, rng) for i in range(200)))

    asyncio.run(work())


def test_a_reader_that_stands_still_blocks_neither_the_engine_nor_others(target, client, engine):
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with grpc.insecure_channel(target, options=options) as channel:
        still = ServingStub(channel).Generate(completion([1], n=8, max_tokens=90, logprobs=20, stream=True))
        next(still)
        assert answer(client, completion(max_tokens=3)).usage.completion_tokens == 3
        deadline_s = time.monotonic() + 30
        while engine.stats()["num_running"] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert engine.stats()["num_running"] == 0  # all of it is done, read or not
        choices = [choice for part in still for choice in part.choices]
        assert sorted(choice.index for choice in choices if choice.finish_reason) == list(range(8))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_s41_calls_that_are_cancelled_leave_nothing(client, engine, is_streamed):
    before = engine.stats()["num_output_tokens"]
    for _ in range(6):
        call = client.Generate(completion([1], n=64, max_tokens=90, stream=is_streamed))
        if is_streamed:
            next(call)
        call.cancel()
    assert answer(client, completion(max_tokens=3)).usage.completion_tokens == 3
    assert engine.stats()["num_output_tokens"] - before < 6 * 64 * 90 / 2


def test_work_past_its_deadline_is_dropped_whether_it_waits_or_runs(client, engine):
    before = engine.stats()
    long = client.Generate(completion([1], n=128, max_tokens=90, stream=True))
    next(long)
    waiting = client.Generate(completion([2], max_tokens=90), timeout=0.5)
    with pytest.raises(grpc.RpcError) as caught:
        list(waiting)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    long.cancel()
    runs = client.Generate(completion([1], n=128, max_tokens=90, stream=True), timeout=1.0)
    with pytest.raises(grpc.RpcError) as caught:
        list(runs)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer(client, completion(max_tokens=3)).usage.completion_tokens == 3
    after = engine.stats()
    assert after["num_finished_abort"] - before["num_finished_abort"] > 128
    assert after["num_output_tokens"] - before["num_output_tokens"] < 2 * 128 * 90


# Batches


def items(count: int, **fields: Any) -> list[pb.GenerateBatchRequest]:
    return [
        pb.GenerateBatchRequest(id=f"item-{i}", completion=completion([i + 1], **fields).completion)
        for i in range(count)
    ]


def test_a_batch_answers_every_request_by_its_id_and_runs_a_bounded_number(client, service, monkeypatch):
    in_flight: list[int] = []
    start = service.start

    async def counted(*args: Any) -> Any:
        in_flight.append(service.num_in_flight)
        return await start(*args)

    monkeypatch.setattr(service, "start", counted)
    requests = items(40, max_tokens=3, return_token_ids=True)
    requests[7].completion.n = 0
    requests[9].completion.stream = True
    requests.append(pb.GenerateBatchRequest(id="chat", chat=chat(max_tokens=2).chat))
    requests.append(pb.GenerateBatchRequest(id="empty"))
    by_id: dict[str, list[pb.GenerateBatchResponse]] = {}
    for response in client.GenerateBatch(iter(requests)):
        by_id.setdefault(response.id, []).append(response)
    assert by_id.keys() == {request.id for request in requests}
    assert all([part.is_last for part in parts] == [False] * (len(parts) - 1) + [True] for parts in by_id.values())
    assert status_verdict(by_id["item-7"][-1].error) == ("INVALID_ARGUMENT", "n: must be in [1, 128], got 0", "n")
    assert status_verdict(by_id["empty"][-1].error)[2] == "request"
    assert len(by_id["item-9"]) == 4 and by_id["item-9"][-2].response.choices[0].finish_reason == "length"
    alone = answer(client, completion([4], max_tokens=3))
    assert by_id["item-3"][0].response.choices[0].text == alone.choices[0].text
    assert by_id["chat"][0].response.choices[0].message.role == "assistant"
    assert 1 < max(in_flight) <= CONFIG.max_batch_in_flight


def test_a_batch_stops_reading_while_its_results_are_not_taken(target, service, engine):
    """Both ways more is sent than fits between two sides that do not read."""
    large = completion([1], max_tokens=64, logprobs=20, n=4, banned_token_ids=[300] * 60_000)

    async def work() -> None:
        options = [("grpc.http2.bdp_probe", 0)]
        num_written = 0

        async def write(call: Any) -> None:
            nonlocal num_written
            for i in range(300):
                await call.write(pb.GenerateBatchRequest(id=str(i), completion=large.completion))
                num_written += 1
            await call.done_writing()

        async with grpc.aio.insecure_channel(target, options=options) as channel:
            call = ServingStub(channel).GenerateBatch()
            writing = asyncio.ensure_future(write(call))
            await call.read()
            stood_still, seen = 0, (0, 0)
            while stood_still < 5:
                await asyncio.sleep(0.1)
                now = (service.num_in_flight, num_written)
                assert now[0] <= CONFIG.max_batch_in_flight
                stood_still = stood_still + 1 if now == seen and not engine.engine.has_work() else 0
                seen = now
            call.cancel()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            assert seen[0] > 0 and num_written < 300

    asyncio.run(work())


def test_an_id_in_flight_twice_ends_the_batch(client):
    double = items(1, n=64, max_tokens=90)[0]
    code, text, field = refused(client.GenerateBatch(iter([double, double])))
    assert (code, field) == ("INVALID_ARGUMENT", "id") and "in flight" in text
    code, _, field = refused(client.GenerateBatch(iter([pb.GenerateBatchRequest()])))
    assert (code, field) == ("INVALID_ARGUMENT", "id")


def test_a_batch_that_ends_early_says_why_whatever_waits_to_be_read(target):
    async def work() -> None:
        async with grpc.aio.insecure_channel(target, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            call = ServingStub(channel).GenerateBatch()
            big = items(2, n=4, max_tokens=90, logprobs=20)
            slow = items(3, n=128, max_tokens=90)[2]
            for request in (*big, slow):
                await call.write(request)
            await asyncio.sleep(0.3)  # results wait
            await call.write(slow)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
                raise AssertionError(await call.code())
            assert refusal(caught.value)[::2] == ("INVALID_ARGUMENT", "id")

    asyncio.run(work())


def test_a_batch_whose_client_leaves_stops(client, engine):
    before = engine.stats()["num_output_tokens"]
    stop = threading.Event()

    def requests() -> Iterator[pb.GenerateBatchRequest]:
        yield from items(4, n=32, max_tokens=90)
        stop.wait(30)

    call = client.GenerateBatch(requests())
    deadline_s = time.monotonic() + 30
    while not engine.stats()["num_running"] and time.monotonic() < deadline_s:
        time.sleep(0.001)
    call.cancel()
    stop.set()
    assert answer(client, completion(max_tokens=3)).usage.completion_tokens == 3
    assert engine.stats()["num_output_tokens"] - before < 4 * 32 * 90


# Health, keys, reflection, ports


def health(channel: grpc.Channel, name: str) -> str:
    response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def test_health_is_alive_from_the_start_and_ready_between_loading_and_draining(running, engine, monkeypatch):
    service = Service(ServerConfig(api_keys=("key",)), "tiny")
    name = "serving.v1.Serving"
    with grpc_server(running, service) as target, grpc.insecure_channel(target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
        seen = [next(watch).status]
        assert (health(channel, ""), health(channel, name)) == ("SERVING", "NOT_SERVING")
        code, _, status = refused_plain(
            ServingStub(channel).Generate(completion(), metadata=(("authorization", "Bearer key"),))
        )
        assert code is grpc.StatusCode.UNAVAILABLE and status.details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        service.attach(engine)
        assert health(channel, name) == health(channel, "vllm.grpc.engine.VllmEngine") == "SERVING"
        seen.append(next(watch).status)
        service.drain()
        assert (health(channel, ""), health(channel, name)) == ("SERVING", "NOT_SERVING")
        seen.append(next(watch).status)
        assert seen == [2, 1, 2]
        monkeypatch.setattr(grpc_health, "MAX_WATCHING", 1)
        again = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
        assert refused_plain(again)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            health(channel, "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def all_methods() -> list[Any]:
    files = (pb, vllm_engine_pb2, reflection_pb2)
    return [m for file in files for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods]


def call_raw(channel: grpc.Channel, path: str, metadata: Any) -> grpc.StatusCode:
    """How a call of one empty message ends, or OK once it is answered."""
    call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60)
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


def test_s53_nothing_but_health_is_open_without_a_key(running, engine):
    service = Service(ServerConfig(api_keys=("first-key", "second"), grpc_reflection=True), "tiny")
    service.attach(engine)
    paths = [f"/{method.containing_service.full_name}/{method.name}" for method in all_methods()]
    assert len(paths) > 20
    odd = ["/serving.v1.Serving/Nope", "/nope/Nope", "//serving.v1.Serving/Generate", "/grpc.health.v1.HealthX/Check"]
    wrong = [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "first-key"),),
        (("authorization", "Basic first-key"),),
        (("authorization", "Bearer first-ke"),),
        (("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")),
        (("x-api-key", "first-key"),),
    ]
    with grpc_server(running, service) as target, grpc.insecure_channel(target) as channel:
        for path in [*paths, *odd]:
            for metadata in wrong:
                assert call_raw(channel, path, metadata) is grpc.StatusCode.UNAUTHENTICATED, (path, metadata)
            for key in ("first-key", "second"):
                code = call_raw(channel, path, (("authorization", f"bearer {key}"),))
                assert code is not grpc.StatusCode.UNAUTHENTICATED, path
        assert health(channel, "") == "SERVING"


def test_reflection_is_there_where_it_is_asked_for(running, engine, target):
    service = Service(ServerConfig(grpc_reflection=True), "tiny")
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc_server(running, service) as other, grpc.insecure_channel(other) as channel:
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        names = [service.name for service in answer.list_services_response.service]
        assert "serving.v1.Serving" in names and "grpc.health.v1.Health" in names
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request])))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_port_that_is_taken_is_refused(target, service):
    port = int(target.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        GrpcServer(service, host="127.0.0.1", port=port, version="0")
    first = GrpcServer(service, host="127.0.0.1", port=0, version="0")
    with pytest.raises(ConfigError, match="cannot listen"):
        GrpcServer(service, host="127.0.0.1", port=first.port, version="0")
    first.close()
    GrpcServer(service, host="127.0.0.1", port=first.port, version="0").close()


# The interface of gateways


@pytest.fixture
def vllm(target):
    """Call a method of VllmEngine by its name."""
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    with grpc.insecure_channel(target) as channel:

        def call(name: str, **fields: Any) -> Any:
            method = service.methods_by_name[name]
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            request = GetMessageClass(method.input_type)(**fields)
            answer = GetMessageClass(method.output_type)
            return kind(
                f"/{service.full_name}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,
            )(request)

        yield call


SETTINGS = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5}


def test_a_gateway_gets_token_ids_in_chunks_and_whole(vllm, client):
    known = answer(client, completion([5, 6], max_tokens=5, return_token_ids=True, allowed_token_ids=[*range(301)]))
    token_ids = list(known.choices[0].token_ids)
    request = {"request_id": "a", "tokenized": {"input_ids": [5, 6], "original_text": "x"}}
    settings = {**SETTINGS, "logprobs": 2}
    *chunks, last = vllm("Generate", **request, sampling_params=settings, stream=True)
    assert [token for part in chunks for token in part.chunk.token_ids] == token_ids
    assert [part.chunk.completion_tokens for part in chunks] == [1, 2, 3, 4, 5]
    assert all(len(part.chunk.output_logprobs.top_logprobs[0].values) == 2 for part in chunks)
    assert (list(last.complete.output_ids), last.complete.finish_reason) == (token_ids, "length")
    assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (2, 5)
    settings = {**SETTINGS, "n": 2, "prompt_logprobs": 1}
    whole = list(vllm("Generate", **request, sampling_params=settings))
    assert [part.complete.index for part in whole] == [0, 1]
    assert all(list(part.complete.output_ids) == token_ids for part in whole)
    inputs = whole[0].complete.input_logprobs
    assert list(inputs.token_ids) == [5, 6] and not inputs.token_logprobs[0].HasField("value")
    assert inputs.token_logprobs[1].value < 0 and len(inputs.top_logprobs[1].values) == 1
    settings = {**SETTINGS, "stop_token_ids": [token_ids[1]]}
    (stopped,) = vllm("Generate", **request, sampling_params=settings)
    assert stopped.complete.finish_reason == "stop" and stopped.complete.matched_token_id == token_ids[1]


def test_a_gateway_aborts_by_its_id(vllm, engine, monkeypatch):
    brake = Brake(monkeypatch, engine, 10)
    request = {"request_id": "a", "tokenized": {"input_ids": [5]}, "stream": True}
    call = vllm("Generate", **request, sampling_params={**SETTINGS, "n": 64, "max_tokens": 90})
    first = next(call)
    code, _, field = refused(vllm("Generate", **request, sampling_params=SETTINGS))
    assert (code, field) == ("INVALID_ARGUMENT", "request_id")
    vllm("Abort", request_ids=["a", "unknown"])
    brake.num_steps = None
    ends = [part.complete for part in [first, *call] if part.HasField("complete")]
    assert [end.finish_reason for end in ends] == ["abort"] * 64
    assert list(vllm("Generate", **request, sampling_params=SETTINGS))[-1].complete.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokenized": {"input_ids": []}}, "prompt"),
        ({"tokenized": {"input_ids": [301]}}, "prompt[0]"),
        ({}, "prompt"),
        ({"sampling_params": {"temperature": math.nan}}, "temperature"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs"),
        ({"sampling_params": {"max_tokens": 2**31}}, "max_tokens"),
        ({"sampling_params": {"structural_tag": "a"}}, "sampling_params.structural_tag"),
        ({"sampling_params": {"truncate_prompt_tokens": 1}}, "sampling_params.truncate_prompt_tokens"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"request_id": "a b"}, "request_id"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_a_gateway_may_not_ask_is_refused_by_name(vllm, fields, field):
    request = {} if fields == {} else {"tokenized": {"input_ids": [5]}, **fields}
    assert refused(vllm("Generate", **request))[::2] == ("INVALID_ARGUMENT", field)


def test_a_gateway_learns_of_model_server_and_load(vllm, service, engine, tmp_path, monkeypatch):
    model = vllm("GetModelInfo")
    assert (model.max_context_length, model.vocab_size, model.served_model_name) == (CONTEXT, 301, "tiny")
    assert model.is_generation and list(model.eos_token_ids) == list(engine.engine.eos_token_ids)
    assert vllm("GetServerInfo").max_num_seqs == 8 and vllm("HealthCheck").healthy
    (load,) = vllm("GetLoads").loads
    assert (load.num_running_reqs, load.max_total_num_tokens) == (0, 128 * 8)
    with pytest.raises(grpc.RpcError) as caught:
        vllm("Embed")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    monkeypatch.setattr(service, "source", f"dummy:{TINY}")
    assert refused(vllm("GetTokenizer"))[0] == "NOT_FOUND"
    config = (TINY / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer.json").write_bytes(content := random.randbytes(3 * 2**20))
    monkeypatch.setattr(service, "source", f"dummy:{tmp_path}")
    chunks = list(vllm("GetTokenizer"))
    data = b"".join(chunk.data for chunk in chunks)
    digests = [chunk.sha256 for chunk in chunks]
    assert len(chunks) > 2 and digests == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == content and archive.read("config.json").decode() == config
