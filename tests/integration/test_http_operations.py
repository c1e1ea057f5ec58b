"""What an operator sees through HTTP and gRPC: metrics, pages, health of a stuck engine, tenants, traces and the access log."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_harness import grpc_server, stub
from http_harness import Servers
from prometheus_client.parser import text_string_to_metric_families

from configs.operations import OperationsConfig
from configs.server import ServerConfig
from serving.observer import EngineObserver, RequestRecord
from serving.operations.json_log import JsonFormatter, _TextFormatter
from serving.operations.operations import Operations
from serving.proto.v1 import serving_pb2 as pb
from serving.status import load_page

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEYED = ServerConfig(served_model_name="tiny", api_keys=("key-a", "key-b"), api_key_tenants=("acme", "bolt"))
AS_A, AS_B = ({"Authorization": f"Bearer {key}"} for key in KEYED.api_keys)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SHORT = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}


class Requests(EngineObserver):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


@pytest.fixture
def operations(engine):
    config = OperationsConfig(measure_peaks=False)
    operations = Operations(engine.engine, config, model_name="tiny")
    yield operations
    operations.close()
    engine.engine.observers = ()


@pytest.fixture
def url(running: Servers, engine, operations) -> str:
    return running.start_service(KEYED, engine, operations)[0]


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def scraped(http: httpx.Client) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by sample name and the values of its labels beside model_name and engine."""
    response = http.get("/metrics", headers=AS_A)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            labels = tuple(value for name, value in sample.labels.items() if name not in ("model_name", "engine"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_metrics_count_what_clients_of_each_door_got_and_what_was_refused(url, http):
    before = scraped(http)
    for key in KEYED.api_keys:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            extra = {"ignore_eos": True}
            client.completions.create(model="tiny", prompt="hello", max_tokens=4, n=2, extra_body=extra)
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=5, extra_body=extra
            )
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="tiny", prompt="hello", n=0)
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="other", prompt="hello")
    assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 401
    big = {"prompt": "x" * KEYED.max_body_bytes}
    assert http.post(COMPLETIONS, json=big, headers=AS_A).status_code == 413
    assert http.get("/v1/models").status_code == 401  # no request to the engine
    values = scraped(http)
    for name, count in (("headrace_requests_total", 4), ("vllm:generation_tokens_total", 2 * (2 * 4 + 5))):
        assert values[name][()] - before[name][()] == count
    ended = "vllm:request_success_total"
    assert values[ended][("length",)] - before[ended][("length",)] == 6
    assert values["vllm:num_requests_running"] == {(): 0}
    refusals = {labels[0]: count for labels, count in values["headrace_requests_refused_total"].items()}
    assert refusals == {"invalid": 4, "unauthorized": 1, "too_large": 1, "overloaded": 0, "unavailable": 0}
    assert {labels[0] for labels in values["headrace_tenant_generation_tokens_total"]} == {"acme", "bolt"}


def test_a_refusal_for_load_is_counted_and_a_client_that_left_is_not(running, engine, operations):
    address, service = running.start_service(ServerConfig(), engine, operations)
    service.num_in_flight += service.config.max_concurrent_requests
    assert httpx.post(address + COMPLETIONS, json={"prompt": "a"}, timeout=60).status_code == 429
    service.num_in_flight -= service.config.max_concurrent_requests
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            address + COMPLETIONS,
            json={"prompt": "a", "max_tokens": 90, "n": 100},
            timeout=httpx.Timeout(60, read=0.05),
        )
    running.loop.call_soon_threadsafe(service.drain)
    while service.is_ready:
        pass
    assert httpx.post(address + COMPLETIONS, json={"prompt": "a"}, timeout=60).status_code == 503
    counts = operations.metrics.values()["headrace_requests_refused_total"]
    assert {labels[0] for labels, count in counts.items() if count} == {"overloaded", "unavailable"}
    assert httpx.get(address + "/metrics", timeout=60).status_code == 200  # while draining too


def test_refusals_while_the_model_loads_are_counted_once_there_are_metrics(running, engine, operations):
    address, service = running.start_service(ServerConfig(), None)
    for _ in range(3):
        assert httpx.post(address + COMPLETIONS, json={"prompt": "a"}, timeout=60).status_code == 503
    service.attach(engine, operations)
    assert operations.metrics.values()["headrace_requests_refused_total"][("unavailable",)] == 3
    service.drain()
    assert httpx.post(address + COMPLETIONS, json={"prompt": "a"}, timeout=60).status_code == 503
    assert operations.metrics.values()["headrace_requests_refused_total"][("unavailable",)] == 4


@pytest.mark.parametrize("name", ["status", "chat"])
def test_a_page_opens_in_a_browser_which_has_no_key_to_bring_and_shows_nothing_without_one(http, name):
    page = load_page(name)
    opened = http.get(f"/{name}")
    assert (opened.status_code, opened.content) == (401, page.body) and "www-authenticate" not in opened.headers
    with_key = http.get(f"/{name}", headers=AS_A)
    assert (with_key.status_code, with_key.content) == (200, page.body)
    for response in (opened, with_key):
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"] == page.content_security_policy
    assert http.get(f"/{name}", headers={"Authorization": "Bearer wrong"}).json()["error"]["code"] == "invalid_api_key"
    assert http.post(f"/{name}").status_code == 401
    # What the pages ask for, and with what.
    assert http.get("/status.json").status_code == http.get("/v1/models").status_code == 401
    text = page.body.decode()
    assert 'Authorization: "Bearer " + key' in text and 'type="password"' in text and "?key" not in text


def test_the_status_is_of_this_engine(http):
    before = http.get("/status.json", headers=AS_A).json()
    http.post(COMPLETIONS, json={"prompt": "hello", **SHORT}, headers=AS_A).raise_for_status()
    status = http.get("/status.json", headers=AS_A).json()
    assert status["state"] == "ready" and status["model"]["name"] == "tiny"
    assert status["totals"]["generation_tokens"] - before["totals"]["generation_tokens"] == 3


def test_a_step_that_hangs_is_told_by_health_checks_until_it_returns(http, engine, operations, monkeypatch):
    hang, step = threading.Event(), engine.engine._step

    def hanging_step():
        hang.wait(60.0)
        return step()

    monkeypatch.setattr(engine.engine, "_step", hanging_step)
    answers: list[httpx.Response] = []
    body = {"prompt": "hello", **SHORT}
    asking = threading.Thread(target=lambda: answers.append(http.post(COMPLETIONS, json=body, headers=AS_A)))
    asking.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(operations.watchdog, "stuck_step_s", 0.05)
            while not operations.watchdog.is_stuck:
                operations.watchdog.check()
        for path in ("/health", "/healthz", "/readyz", "/ping"):
            assert "does not return" in httpx.get(f"{http.base_url}{path}", timeout=60).json()["error"]["message"], path
        assert httpx.post(f"{http.base_url}{COMPLETIONS}", json=body, headers=AS_B, timeout=60).status_code == 503
        assert httpx.get(f"{http.base_url}/status.json", headers=AS_B, timeout=60).json()["state"] == "stuck"
    finally:
        hang.set()
        asking.join()
    assert answers[0].status_code == 200
    for path in ("/health", "/readyz"):
        assert http.get(path).status_code == 200


def test_tenant_trace_and_names_reach_the_engine_and_the_access_log(http, engine, operations, caplog):
    requests = Requests()
    engine.engine.observers += (requests,)
    headers = {**AS_B, "traceparent": TRACE, "tracestate": "a=1", "X-Request-Id": "mine"}
    with caplog.at_level(logging.INFO, "serving.api.http_front_door"):
        chat = http.post(CHAT, json={"messages": [{"role": "user", "content": "secret"}], **SHORT}, headers=headers)
        two = http.post(COMPLETIONS, json={"prompt": ["secret", "b"], **SHORT}, headers=AS_A)
        http.get("/v1/models/tiny", headers=AS_A)
        http.get("/secret/path?key=secret", headers=AS_A)
        http.get("/status.json")
        deadline_s = time.monotonic() + 60
        while len(caplog.records) < 5 and time.monotonic() < deadline_s:  # a line follows its answer
            time.sleep(0.01)
    assert chat.headers["traceparent"] == TRACE
    first, *others = requests.records
    assert (first.context.tenant, first.context.operation) == ("bolt", "chat")
    assert first.context.trace is not None and first.context.trace.traceparent == TRACE
    assert first.context.trace.state == "a=1"
    assert first.request_id == chat.json()["id"]
    assert [record.request_id for record in others] == [f"{two.json()['id']}-{index}" for index in range(2)]
    assert {(record.context.tenant, record.context.operation) for record in others} == {("acme", "text_completion")}

    records = [record for record in caplog.records if record.name == "serving.api.http_front_door"]
    assert {record.getMessage() for record in records} == {"http_request"}
    lines: list[dict[str, Any]] = [json.loads(JsonFormatter().format(record)) for record in records]
    names = ("method", "route", "status_code", "tenant")
    assert [tuple(line[name] for name in names) for line in lines] == [
        ("POST", CHAT, 200, "bolt"),
        ("POST", COMPLETIONS, 200, "acme"),
        ("GET", "/v1/models/{model}", 200, "acme"),
        ("GET", "unknown", 404, "acme"),
        ("GET", "unknown", 401, "default"),
    ]
    assert (lines[0]["request_id"], lines[0]["response_id"]) == ("mine", chat.json()["id"])
    assert lines[0]["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736" and lines[0]["duration_s"] > 0
    assert "secret" not in str(lines) and "key-" not in str(lines)
    text = _TextFormatter().format(records[0])
    assert "http_request" in text and f"route={CHAT} status_code=200" in text


def test_a_trusted_proxy_may_name_the_tenant(running, engine, operations):
    requests = Requests()
    engine.engine.observers += (requests,)
    address, _ = running.start_service(ServerConfig(tenant_header="X-Tenant"), engine, operations)
    with httpx.Client(base_url=address, timeout=60) as client:
        body = {"prompt": "a", **SHORT}
        for headers in ({"X-Tenant": "acme corp"}, {}, {"Authorization": "Bearer x", "traceparent": "broken"}):
            assert client.post(COMPLETIONS, json=body, headers=headers).status_code == 200
        assert [record.context.tenant for record in requests.records] == ["acme corp", "default", "default"]
        for bad in (("X-Tenant", "x" * 65), ("X-Tenant", ""), ("X-Tenant", "\xe9")):
            response = client.post(COMPLETIONS, json=body, headers=[(bad[0], bad[1].encode("latin-1"))])
            assert response.status_code == 400 and response.json()["error"]["param"] == "tenant"
        twice = client.post(COMPLETIONS, json=body, headers=[("X-Tenant", "a"), ("X-Tenant", "b")])
        assert twice.json()["error"]["param"] == "tenant"


def test_tenant_trace_and_refusals_over_grpc_are_those_of_http(running, engine, operations):
    requests = Requests()
    engine.engine.observers += (requests,)
    address, service = running.start_service(KEYED, engine, operations)
    key = ("authorization", "Bearer key-b")
    request = pb.GenerateRequest(completion=pb.CompletionRequest(prompt=[pb.Prompt(text="a")], **SHORT))
    bad = pb.GenerateRequest(completion=pb.CompletionRequest(prompt=[pb.Prompt(text="a")], n=0))
    with (
        httpx.Client(base_url=address, timeout=60) as http,
        grpc_server(running, service) as target,
        stub(target) as client,
    ):
        before = scraped(http)["headrace_requests_refused_total"]
        list(client.Generate(request, metadata=(key, ("traceparent", TRACE))))
        items = [
            pb.GenerateBatchRequest(id="0", completion=request.completion),
            pb.GenerateBatchRequest(id="1", completion=bad.completion),
        ]
        list(client.GenerateBatch(iter(items), metadata=(("authorization", "Bearer key-a"),)))
        for wrong, metadata in ((bad, (key,)), (request, ())):
            with pytest.raises(grpc.RpcError):
                list(client.Generate(wrong, metadata=metadata))
        after = scraped(http)["headrace_requests_refused_total"]
    one, two = requests.records
    assert (one.context.tenant, two.context.tenant) == ("bolt", "acme")
    assert one.context.trace is not None and one.context.trace.traceparent == TRACE
    refused = {reason: after[(reason,)] - before.get((reason,), 0) for (reason,) in after}
    assert refused["invalid"] == 2 and refused["unauthorized"] == 1


def test_a_trusted_proxy_may_name_the_tenant_over_grpc(running, engine, operations):
    requests = Requests()
    engine.engine.observers += (requests,)
    _, service = running.start_service(ServerConfig(tenant_header="X-Tenant"), engine, operations)
    request = pb.GenerateRequest(completion=pb.CompletionRequest(prompt=[pb.Prompt(text="a")], **SHORT))
    with grpc_server(running, service) as target, stub(target) as client:
        list(client.Generate(request, metadata=(("x-tenant", "acme corp"),)))
        assert requests.records[0].context.tenant == "acme corp"
        for metadata in ((("x-tenant", "x" * 65),), (("x-tenant", "a"), ("x-tenant", "b"))):
            with pytest.raises(grpc.RpcError) as raised:
                list(client.Generate(request, metadata=metadata))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "tenant" in raised.value.details()
