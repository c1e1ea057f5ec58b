"""Thousands of bad inputs through every door: none ends the server, is its fault, or gets another verdict elsewhere.

Those of each door are counted by what came of them; a good request right after each has its answer still.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import httpx
import pytest
from bad_requests import mutated, requests_of_hostile_texts, requests_of_one_bad_value, smallest
from doors import (
    GENERATING,
    JSON,
    OK,
    PATHS,
    Doors,
    Verdict,
    golden_message,
    is_finite,
    verdict_of_error,
    verdict_of_http,
)
from google.protobuf.message import Message
from grpc_harness import grpc_server, message_of
from http_harness import Servers, check_idle, job_server
from smg_grpc_proto import vllm_engine_pb2

from configs.server import ServerConfig
from serving.api.service import Service
from serving.jobs.lines import URLS
from serving.proto.v1 import serving_pb2 as pb

CONFIG = ServerConfig(
    served_model_name="tiny",
    max_body_bytes=200_000,
    max_header_bytes=8192,
    max_batch_in_flight=4,
    max_batch_lines=10**5,
)
pytestmark = pytest.mark.timeout(3600)
LEAST = 2000  # bad inputs of a door
NUM_PAIRS, NUM_BROKEN = 3000, 2500


@pytest.fixture
def draw() -> random.Random:
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def served(running: Servers, engine) -> Iterator[tuple[Service, Doors]]:
    url, service = running.start_service(CONFIG, engine)
    with (
        grpc_server(running, service) as target,
        httpx.Client(base_url=url, timeout=60) as http,
        grpc.insecure_channel(target) as channel,
    ):
        yield service, Doors(http, channel)


@pytest.fixture
def doors(served) -> Doors:
    return served[1]


@pytest.fixture(autouse=True)
def engine_is_left_as_it_was(engine, served, caplog):
    yield
    check_idle(engine, served[0])
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def report(door: str, verdicts: Sequence[Verdict]) -> None:
    counts = Counter(verdict.status for verdict in verdicts)
    num_bad = sum(verdict.is_refusal for verdict in verdicts)
    print(f"{door}: {len(verdicts)} inputs, {num_bad} refused: {dict(sorted(counts.items()))}")
    assert max(counts) < 500


def broken_bodies(draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    bodies = [
        (PATHS[endpoint], json.dumps(body).encode())
        for endpoint, _, body in itertools.chain(
            requests_of_hostile_texts(), requests_of_one_bad_value(ServerConfig(max_body_bytes=1024))
        )
        if endpoint in GENERATING
    ]
    for _ in range(count):
        path, body = draw.choice(bodies)
        yield path, mutated(body[:4096], draw)


def test_s67_bodies_over_http_and_in_batches(doors, draw):
    """Any JSON, and what is none: the same bytes to HTTP and as items of a batch."""
    bodies = [
        (PATHS[endpoint], json.dumps(body).encode())
        for endpoint, _, body in itertools.chain(requests_of_one_bad_value(CONFIG), requests_of_hostile_texts())
    ]
    bodies += broken_bodies(draw, NUM_BROKEN)
    bodies += [("/v1/completions", data) for data in (b"", b"[1]", b"\xff", b'{"prompt": 1e999}', b"[" * 100_000)]
    by_http = []
    for path, body in bodies:
        by_http.append(doors.by_http(path, body))
        doors.check_golden("http")
    report("HTTP", by_http)
    known = [
        ((path, body), verdict)
        for (path, body), verdict in zip(bodies, by_http, strict=True)
        if path in URLS and len(body) <= CONFIG.max_body_bytes  # longer ones end the call that they come in
    ]
    by_batch = doors.check_lines([line for line, _ in known], [verdict for _, verdict in known])
    report("batch", by_batch)
    for verdicts in (by_http, by_batch):
        assert sum(verdict.is_refusal for verdict in verdicts) >= LEAST


def test_s67_messages_over_grpc(doors, draw):
    """Whatever a message can say: each bad value, and pairs of those that are refused alone."""
    verdicts = []

    def judge(endpoint: str, body: dict[str, Any], names: Sequence[str]) -> Verdict | None:
        message = message_of(endpoint, body)
        if message is None or message.ByteSize() > CONFIG.max_body_bytes:
            return None
        verdict = doors.check_message(endpoint, body, message)
        doors.check_golden("grpc")
        verdicts.append(verdict)
        if verdict.status == 400:
            assert verdict.field is not None and any(name in verdict.message for name in names), (body, verdict)
        return verdict

    bad: dict[str, list[tuple[str, Any]]] = {endpoint: [] for endpoint in PATHS}
    for endpoint, name, body in itertools.chain(requests_of_one_bad_value(CONFIG), requests_of_hostile_texts()):
        verdict = judge(endpoint, body, (name,))
        if verdict is not None and verdict.is_refusal and name in body:
            bad[endpoint].append((name, body[name]))
    report("gRPC, one bad value", verdicts)
    num_pairs = 0
    while num_pairs < NUM_PAIRS:
        endpoint = draw.choice(GENERATING)
        (name, value), (other, other_value) = draw.sample(bad[endpoint], 2)
        if name != other:
            body = {**smallest(endpoint), name: value, other: other_value}
            num_pairs += judge(endpoint, body, (name, other)) is not None
    report("gRPC, with pairs of them", verdicts)
    assert sum(verdict.is_refusal for verdict in verdicts) >= LEAST


def test_s67_batches_of_good_and_bad_messages(doors, draw):
    """As they come: messages and HTTP bodies, and good ones among them, in batches of any length."""
    cases = [
        (endpoint, body, message)
        for endpoint, _, body in itertools.chain(requests_of_one_bad_value(CONFIG), requests_of_hostile_texts())
        if endpoint in GENERATING
        and (message := message_of(endpoint, body)) is not None
        and is_finite(body)
        and message.ByteSize() < CONFIG.max_body_bytes // 4
    ]
    draw.shuffle(cases)
    verdicts = []
    while cases:
        batch = [cases.pop() for _ in range(min(len(cases), draw.randint(1, 60)))]
        requests = []
        for i, (endpoint, body, message) in enumerate(batch):
            kind = {"completions": "completion", "chat": "chat"}[endpoint]
            requests.append(pb.GenerateBatchRequest(**{"id": f"message {i}", kind: message}))
            http = pb.HttpRequest(url=PATHS[endpoint], body=json.dumps(body).encode())
            requests.append(pb.GenerateBatchRequest(id=f"http {i}", http=http))
            requests.append(pb.GenerateBatchRequest(id=f"golden {i}", completion=golden_message()))
        draw.shuffle(requests)
        answers = doors.by_batch(requests)
        assert len(answers) == len(requests)
        for i, (_, body, _) in enumerate(batch):
            assert answers[f"golden {i}"] == OK
            verdict = answers[f"message {i}"]
            verdicts.append(verdict)
            if answers[f"http {i}"].field == "stream" and verdict != answers[f"http {i}"]:
                assert body["stream"] is True
            else:
                assert verdict == answers[f"http {i}"], body
    report("GenerateBatch, messages", verdicts)


def test_bytes_that_are_broken_messages(doors, draw):
    """Messages of every method with bytes changed, cut and doubled."""
    samples: list[tuple[str, bytes]] = []
    for endpoint, _, body in itertools.chain(requests_of_one_bad_value(CONFIG), requests_of_hostile_texts()):
        message = message_of(endpoint, body)
        if message is None or message.ByteSize() > 4096:
            continue
        if endpoint in GENERATING:
            kind = {"completions": "completion", "chat": "chat"}[endpoint]
            samples.append(("Generate", pb.GenerateRequest(**{kind: message}).SerializeToString()))
            item = pb.GenerateBatchRequest(**{"id": "a", kind: message})
            samples.append(("GenerateBatch", item.SerializeToString()))
        else:
            samples.append((endpoint.capitalize(), message.SerializeToString()))
    settings = pb.CreateJobRequest(endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}, jsonl=b"x")
    jobs: list[tuple[str, Message]] = [
        ("CreateJob", settings),
        ("GetJob", pb.JobRequest(id="batch_a")),
        ("ListJobs", pb.ListJobsRequest(limit=5, after="batch_a")),
        ("CancelJob", pb.JobRequest(id="batch_a")),
        ("StreamJobResults", pb.StreamJobResultsRequest(id="batch_a", skip_output=1, skip_errors=2)),
    ]
    samples += 100 * [(name, message.SerializeToString()) for name, message in jobs]
    samples = [(f"/serving.v1.Serving/{name}", data) for name, data in samples]
    samples += 150 * [
        (f"/vllm.grpc.engine.VllmEngine/{name}", message.SerializeToString()) for name, message in MESSAGES_OF_A_GATEWAY
    ]
    calls = {name: doors.channel.stream_stream(name) for name, _ in samples}
    not_offered = {f"/serving.v1.Serving/{name}" for name, _ in jobs} | {"/vllm.grpc.engine.VllmEngine/Embed"}
    verdicts = []
    for _ in range(NUM_BROKEN):
        name, data = draw.choice(samples)
        try:
            list(calls[name](iter([mutated(data, draw)])))
            verdicts.append(OK)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                assert name in not_offered
                verdicts.append(Verdict(404))
            else:
                verdicts.append(verdict_of_error(error))
                assert verdicts[-1].status != 500, (name, data, error)
        doors.check_golden("grpc")
    report("gRPC, broken bytes", verdicts)
    assert sum(verdict.is_refusal for verdict in verdicts) > NUM_BROKEN // 3


_SETTINGS = vllm_engine_pb2.SamplingParams(
    temperature=0.5, top_p=0.9, top_k=5, max_tokens=3, stop=["a"], stop_token_ids=[7], logprobs=2, n=2, seed=5
)
_TOKENIZED = vllm_engine_pb2.TokenizedInput(original_text="a", input_ids=[5, 6])
MESSAGES_OF_A_GATEWAY: list[tuple[str, Message]] = [
    (
        "Generate",
        vllm_engine_pb2.GenerateRequest(request_id="a", tokenized=_TOKENIZED, sampling_params=_SETTINGS, stream=True),
    ),
    ("Abort", vllm_engine_pb2.AbortRequest(request_ids=["a", "b"])),
    ("Embed", vllm_engine_pb2.EmbedRequest(request_id="a", tokenized=_TOKENIZED)),
]
KEYS = [
    "",
    "Bearer",
    "Bearer wrong",
    "key",
    "Basic key",
    "Bearer key,",
    "Bearer  key",
    "bearer key",
    "Bearer key",
]
TENANTS = ["", "a", "a" * 64, "a" * 65, "a\tb", "é", "a,b", "default"]
TRACES = [
    "",
    "x",
    "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "ff-a",
    "0" * 500,
]
STATES = ["", "a=b", "=", ",,,", "a=b,a=c", "x" * 600, "a=" + "b" * 255]


def test_headers_and_metadata(running, engine, draw):
    """Keys, tenants, traces and names: the same verdict from HTTP's headers and gRPC's metadata."""
    config = ServerConfig(
        served_model_name="tiny", api_keys=("key",), tenant_header="X-Tenant", max_header_bytes=4096, max_id_chars=64
    )
    url, service = running.start_service(config, engine)
    message = golden_message()
    content = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    combinations = [
        [("authorization", key), *tenants, ("traceparent", trace), ("tracestate", state)]
        for key in KEYS
        for tenants in [[], *([("x-tenant", tenant)] for tenant in TENANTS), [("x-tenant", "a"), ("x-tenant", "b")]]
        for trace in TRACES
        for state in STATES
    ]
    draw.shuffle(combinations)
    combinations = [
        *combinations[:1500],
        [("authorization", "Bearer key"), ("authorization", "Bearer key")],
        [("authorization", "Bearer key"), *(("traceparent", trace) for trace in TRACES)],
    ]
    verdicts = []
    golden = {"authorization": "Bearer key"}
    with (
        grpc_server(running, service) as target,
        httpx.Client(base_url=url, timeout=60) as http,
        grpc.insecure_channel(target) as channel,
    ):
        generate = channel.unary_stream(
            "/serving.v1.Serving/Generate", request_serializer=lambda message: message.SerializeToString()
        )
        request = pb.GenerateRequest(completion=message)
        for headers in combinations:
            sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            response = http.post("/v1/completions", content=content, headers=[*JSON.items(), *sent])
            theirs = verdict_of_http(response.status_code, response.content)
            verdict = OK
            if all(value.isascii() and value.isprintable() for _, value in headers):  # or gRPC's client sends none
                try:
                    list(generate(request, metadata=headers))
                except grpc.RpcError as error:
                    verdict = verdict_of_error(error)
                assert (verdict.status, verdict.field) == (theirs.status, theirs.field), (headers, verdict, theirs)
                assert theirs.status == 401 or verdict.message == theirs.message, headers
            verdicts.append(theirs)
            assert http.post("/v1/completions", content=content, headers=[*JSON.items(), *golden.items()]).is_success
        report("headers and metadata", verdicts)
        for name in ("x-request-id", "x-other"):
            for value in ("x" * 5000, "a" * 65, "", "a b", "a,b"):
                response = http.post("/v1/completions", content=content, headers={**JSON, **golden, name: value})
                assert response.status_code in (200, 400, 431), (name, value)
    assert sum(verdict.is_refusal for verdict in verdicts) > len(verdicts) // 2


def test_deadlines_of_odd_values(doors, engine):
    """A deadline that has passed, or is far away, is no fault and leaves nothing."""
    for timeout in (-1.0, 0.0, 1e-9, 1e-6, 1e-3, 0.01, 1e3, 1e6):
        request = pb.CompletionRequest(prompt=[pb.Prompt(text="a")], max_tokens=50, ignore_eos=True)
        for _ in range(20):
            try:
                list(doors.stub.Generate(pb.GenerateRequest(completion=request), timeout=timeout))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout < 1, timeout
            doors.check_golden("grpc")
    check_idle(engine, None)


SETTINGS = {
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "input_file_id": "file-a",
    "metadata": {"a": "b"},
}
ODD_IDS = [
    "",
    "a",
    "batch_a",
    "../x",
    "..",
    "/etc/passwd",
    "%2e",
    "a" * 300,
    "batch_" + "0" * 32,
    "lock",
    "*",
    "\x01",
    "é",
]
ODD_TEXTS = [
    None,
    "",
    " ",
    "x",
    "/v1/completions",
    "/v1/embeddings",
    "24h",
    "1h",
    "a" * 5000,
    "file-a",
    "../../etc/passwd",
]
ODD_METADATA = [{}, {"": ""}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "" for i in range(17)}, {"\0": "é"}]


def test_calls_about_jobs(running, engine, tmp_path, draw):
    """Settings, ids and pages of jobs: HTTP and gRPC say the same, and lines of a job are judged as HTTP judges them."""
    verdicts = []
    with (
        job_server(running, engine, tmp_path, max_batch_lines=10**5, max_header_bytes=16384) as server,
        grpc_server(running, server.service, server.jobs) as target,
        httpx.Client(base_url=server.url, timeout=60) as http,
        grpc.insecure_channel(target) as channel,
    ):
        doors = Doors(http, channel)

        def by_grpc(call: Any) -> Verdict:
            try:
                call()
            except grpc.RpcError as error:
                return verdict_of_error(error)
            return OK

        def judge(theirs: Verdict, verdict: Verdict, what: Any) -> None:
            verdicts.append(verdict)
            assert (verdict.status, verdict.field) == (theirs.status, theirs.field), (what, verdict, theirs)
            doors.check_golden("grpc")

        for name, values in (
            *((name, ODD_TEXTS) for name in ("endpoint", "completion_window", "input_file_id")),
            ("metadata", ODD_METADATA),
        ):
            for value in values:
                body = {key: item for key, item in {**SETTINGS, name: value}.items() if item is not None}
                message = pb.CreateJobRequest(**body)
                judge(
                    doors.by_http("/v1/batches", body),
                    by_grpc(lambda message=message: doors.stub.CreateJob(iter([message]))),
                    body,
                )
        for limit in (-(2**63), -1, 0, 1, 2, 100, 101, 2**31, 2**63 - 1):
            response = http.get("/v1/batches", params={"limit": limit})
            theirs = verdict_of_http(response.status_code, response.content)
            request = pb.ListJobsRequest(limit=limit)
            judge(theirs, by_grpc(lambda request=request: doors.stub.ListJobs(request)), limit)
        for odd in ODD_IDS:
            for call, request in (
                (doors.stub.GetJob, pb.JobRequest(id=odd)),
                (doors.stub.CancelJob, pb.JobRequest(id=odd)),
                (lambda r: list(doors.stub.StreamJobResults(r)), pb.StreamJobResultsRequest(id=odd)),
            ):
                verdict = by_grpc(lambda call=call, request=request: call(request))
                judge(Verdict(404), verdict, odd)
            if odd:
                request = pb.ListJobsRequest(after=odd)
                response = http.get("/v1/batches", params={"after": odd})
                theirs = verdict_of_http(response.status_code, response.content)
                judge(theirs, by_grpc(lambda request=request: doors.stub.ListJobs(request)), odd)
        for skip in (-(2**63), -1, 2**63 - 1):
            for name in ("skip_output", "skip_errors"):
                request = pb.StreamJobResultsRequest(**{"id": "batch_a", name: skip})
                verdict = by_grpc(lambda request=request: list(doors.stub.StreamJobResults(request)))
                judge(Verdict(400, field=name) if skip < 0 else Verdict(404), verdict, skip)
        report("calls about jobs", verdicts)
        _judge_lines_of_a_job(doors, draw)


def _judge_lines_of_a_job(doors: Doors, draw: random.Random) -> None:
    bodies = [
        body
        for endpoint, _, body in itertools.chain(requests_of_one_bad_value(CONFIG), requests_of_hostile_texts())
        if endpoint == "completions" and is_finite(body) and "\\ud8" not in json.dumps(body)
    ]
    draw.shuffle(bodies)
    golden = {"prompt": "hello", "max_tokens": 1}
    lines = [
        {"custom_id": f"{kind} {i}", "method": "POST", "url": PATHS["completions"], "body": body}
        for i, bad in enumerate(bodies)
        for kind, body in (("bad", bad), ("golden", golden))
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    settings = pb.CreateJobRequest(endpoint=PATHS["completions"], completion_window="24h")
    pieces = [settings, *(pb.CreateJobRequest(jsonl=data[i : i + 100_000]) for i in range(0, len(data), 100_000))]
    job = doors.stub.CreateJob(iter(pieces))
    found = {}
    for result in doors.stub.StreamJobResults(pb.StreamJobResultsRequest(id=job.id)):
        response = json.loads(result.line)["response"]
        found[result.custom_id] = verdict_of_http(response["status_code"], json.dumps(response["body"]).encode())
    assert len(found) == len(lines), doors.stub.GetJob(pb.JobRequest(id=job.id))
    verdicts = []
    for i, body in enumerate(bodies):
        assert found[f"golden {i}"] == OK
        verdict = found[f"bad {i}"]
        verdicts.append(verdict)
        theirs = doors.by_http(PATHS["completions"], body)
        if theirs == OK and verdict != OK:
            assert verdict.field == "stream" and body["stream"] is True
        else:
            assert verdict == theirs, body
    report("lines of a job", verdicts)
