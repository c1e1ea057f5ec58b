"""Files and batches over HTTP, with the openai client and raw, jobs over gRPC, and `headrace batch`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_harness import grpc_server, refusal, stub
from http_harness import TINY, JobServer, check_idle, job_server
from openai.types import Batch, FileObject

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.__main__ import main
from serving.api.service import Service
from serving.jobs import jobs as jobs_module
from serving.jobs.appending import LineFile
from serving.jobs.store import Store
from serving.proto.v1 import serving_pb2 as pb

LETTERS = list(range(ord("a"), ord("z") + 1))
GREEDY = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}
URL = "/v1/completions"


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": "a"}]} if "chat" in url else {"prompt": "hello"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**fields, **GREEDY, "max_tokens": 3, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines)


@pytest.fixture
def server(running, engine, tmp_path):
    with job_server(running, engine, tmp_path / "batches") as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture(autouse=True)
def engine_is_left_as_it_was(engine):
    yield
    check_idle(engine)


def create(client: openai.OpenAI, *lines: Any, endpoint: Any = URL, **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline_s = time.monotonic() + 300
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.01)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    records = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {record["custom_id"]: record for record in records}
    assert len(by_id) == len(records)
    return by_id


# Through the openai client


def test_a_batch_runs_from_upload_to_results(client):
    lines = [line(f"r{i}", prompt=[i + 1], n=1 + i % 2) for i in range(12)] + [
        line("bad", n=0),
        line("other", model="x"),
    ]
    batch = create(client, *lines, metadata={"team": "a"})
    Batch.model_validate(batch.model_dump(warnings=False), strict=True)
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"team": "a"})
    assert batch.expires_at == batch.created_at + 86400 and batch.output_file_id is None
    batch = ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 14, 12, 2)
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert output.keys() == {f"r{i}" for i in range(12)} and errors.keys() == {"bad", "other"}
    known = client.completions.create(model="tiny", prompt=[4], max_tokens=3, n=2, extra_body=GREEDY)
    answer = output["r3"]["response"]
    assert answer["status_code"] == 200 and output["r3"]["error"] is None
    assert [choice["text"] for choice in answer["body"]["choices"]] == [choice.text for choice in known.choices]
    assert errors["bad"]["response"]["status_code"] == 400 and errors["other"]["response"]["status_code"] == 404
    assert errors["bad"]["response"]["body"]["error"]["message"] == "n: must be in [1, 128], got 0"
    file = client.files.retrieve(batch.output_file_id)
    FileObject.model_validate(file.model_dump(warnings=False), strict=True)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl") and file.bytes > 0


def test_chats_run_too_and_a_stream_is_an_error(client):
    chats = "/v1/chat/completions"
    batch = ended(client, create(client, line("a", chats), line("b", chats, stream=True), endpoint=chats))
    output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert output["a"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert errors["b"]["response"]["body"]["error"]["param"] == "stream"


def test_files_are_listed_read_and_deleted(client):
    files = [client.files.create(file=(f"{i}.jsonl", jsonl(line(str(i)))), purpose="batch") for i in range(3)]
    assert {file.id for file in client.files.list()} >= {file.id for file in files}
    assert [file.id for file in client.files.list(limit=1, purpose="batch")] == [
        file.id for file in client.files.list(purpose="batch")
    ]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.content(files[0].id).content == jsonl(line("0"))
    assert client.files.delete(files[0].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(files[0].id)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=files[0].id, endpoint=URL, completion_window="24h")


def test_batches_are_listed_in_pages_the_newest_first(client):
    made = [ended(client, create(client, line("a"))).id for _ in range(3)]
    assert sorted(batch.id for batch in client.batches.list(limit=2)) == sorted(made)
    assert len(client.batches.list(limit=2).data) == 2 and client.batches.list(limit=2).has_more
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_nothing")


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (jsonl(line("a"), line("a")), "duplicate_custom_id", 2),
        (jsonl(line("a"), b"\xff\xfe"), "invalid_line", 2),
        (jsonl(b'{"a":' * 5000), "invalid_line", 1),
        (jsonl(line("a", "/v1/chat/completions")), "invalid_line", 1),
        (jsonl(b"x" * 300_000), "invalid_line", 1),
        (b"", "empty_file", None),
        (b"\0" * 1000, "invalid_line", 1),
    ],
)
def test_a_bad_file_fails_with_the_number_of_its_line_and_the_next_batch_runs(
    running, engine, tmp_path, data, code, number
):
    with (
        job_server(running, engine, tmp_path, max_body_bytes=100_000) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h"))
        assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
        assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
        assert ended(client, create(client, line("a"))).status == "completed"


def test_a_batch_is_cancelled_with_what_it_has(client, engine):
    batch = create(client, *(line(str(i), n=8, max_tokens=80) for i in range(100)))
    deadline_s = time.monotonic() + 30
    while not client.batches.retrieve(batch.id).request_counts.completed and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    counts = batch.request_counts
    assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
    assert 0 < counts.completed < 100 and len(results(client, batch.output_file_id)) == counts.completed
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_expires_and_its_error_file_says_what_was_not_run(running, engine, tmp_path):
    def url(server: JobServer) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    with job_server(running, None, tmp_path) as server, url(server) as client:  # no engine: nothing runs
        batch = create(client, *(line(str(i)) for i in range(7)))
        while client.batches.retrieve(batch.id).status != "in_progress":
            time.sleep(0.01)
    later = time.time() + 90_000.0
    with job_server(running, engine, tmp_path, now_s=lambda: later) as server, url(server) as client:
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.failed, batch.expired_at) == ("expired", 7, int(later))
        errors = results(client, batch.error_file_id)
        assert {record["error"]["code"] for record in errors.values()} == {"batch_expired"} and len(errors) == 7


# Requests that do not wait come first


def test_batch_work_waits_while_requests_wait(running, engine, tmp_path, monkeypatch):
    with (
        job_server(running, engine, tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        num_waiting = 1
        monkeypatch.setattr(Service, "num_waiting", property(lambda _: num_waiting))
        batch = create(client, *(line(str(i)) for i in range(20)))
        while client.batches.retrieve(batch.id).status != "in_progress":
            time.sleep(0.01)
        before = engine.stats()["num_requests"]
        answer = client.completions.create(model="tiny", prompt="hi", max_tokens=2, extra_body=GREEDY)
        assert answer.choices[0].text
        time.sleep(0.1)
        assert engine.stats()["num_requests"] == before + 1
        num_waiting = 0
        assert ended(client, batch).request_counts.completed == 20


# Over the wire as it is


def upload(http: httpx.Client, content: bytes, **kwargs: Any) -> httpx.Response:
    return http.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}, **kwargs)


def test_uploads_are_bounded_in_all_their_parts(running, engine, tmp_path):
    limits = {"max_file_bytes": 100_000, "max_store_bytes": 250_000}
    with (
        job_server(running, engine, tmp_path, **limits) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        folder = tmp_path / "files"
        assert upload(http, b"x" * 100_000).status_code == 200
        for size, status in ((100_001, 400), (300_000, 413)):
            answer = upload(http, b"x" * size)
            assert answer.status_code == status, answer.text

        def endless() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(10_000):
                yield b"x" * 10_000

        headers = {"content-type": "multipart/form-data; boundary=b"}
        with contextlib.suppress(httpx.WriteError):
            assert http.post("/v1/files", content=endless(), headers=headers).status_code == 413
        assert upload(http, b"x" * 100_000).status_code == 200
        answer = upload(http, b"x" * 100_000)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert sorted(path.suffix for path in folder.iterdir()) == [".data", ".data", ".json", ".json"]
        assert server.jobs.store.files()[0].bytes == 100_000


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{}", "application/json"),
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=b"),
        (b"--b\r\nx\r\n", "multipart/form-data; boundary=b"),
        (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nbatch\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
        ),
        (b"--b\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", "multipart/form-data; boundary=b"),
        (b"--" + b"b" * 300 + b"\r\n", "multipart/form-data; boundary=" + "b" * 300),
    ],
)
def test_what_is_no_upload_is_a_400(http, server, content, kind):
    answer = http.post("/v1/files", content=content, headers={"content-type": kind})
    assert answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.jobs.store.files() == []


def test_fields_of_uploads_and_batches_that_are_not_known_are_refused(http):
    file = ("a", b"x")
    for data, param in (({"purpose": "fine-tune"}, "purpose"), ({}, "purpose"), ({"purpose": "batch", "x": "1"}, "x")):
        answer = http.post("/v1/files", files={"file": file}, data=data)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for name in ("a\nb", "x" * 300):
        answer = http.post("/v1/files", files={"file": (name, b"x")}, data={"purpose": "batch"})
        assert answer.status_code in (200, 400)
    good = {"input_file_id": upload(http, jsonl(line("a"))).json()["id"], "endpoint": URL, "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"other": 1}, "other"),
    ):
        answer = http.post("/v1/batches", json={**good, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), change
    for content in (b"", b"[]", b"[" * 10_000, b"\xff"):
        headers = {"content-type": "application/json"}
        assert http.post("/v1/batches", content=content, headers=headers).status_code == 400


def test_ids_never_leave_the_folder(http, server, tmp_path):
    secret = tmp_path / "secret"
    for name in ("secret", "secret.data", "secret.json"):
        (tmp_path / name).write_text("secret")
    ids = ["..%2F..%2Fsecret", "../../secret", "..%2fsecret", "/etc/passwd", "%2Fetc%2Fpasswd", "file-%00", "%ff"]
    ids += ["%2e", "%2e%2e", "x" * 5000, "file-" + "0" * 32, "lock", "*", "file-../../secret", f"..%2F{secret.name}"]
    for odd in ids:
        for method, path in (
            ("GET", f"/v1/files/{odd}"),
            ("GET", f"/v1/files/{odd}/content"),
            ("DELETE", f"/v1/files/{odd}"),
            ("GET", f"/v1/batches/{odd}"),
            ("POST", f"/v1/batches/{odd}/cancel"),
        ):
            answer = http.request(method, path)
            assert answer.status_code in (404, 405), (method, path, answer.text)
            assert "root:" not in answer.text
        body = {"input_file_id": odd, "endpoint": URL, "completion_window": "24h"}
        assert http.post("/v1/batches", json=body).status_code == 404
    assert secret.read_text() == (tmp_path / "secret.data").read_text() == "secret"


def test_without_a_key_no_route_of_files_and_batches_answers(running, engine, tmp_path):
    with (
        job_server(running, engine, tmp_path, api_keys=("key",)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for path in ("/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a"):
            for method in ("GET", "POST", "DELETE"):
                assert http.request(method, path).status_code == 401
        assert http.get("/v1/files", headers={"authorization": "Bearer key"}).status_code == 200


# Over gRPC


def pieces(data: bytes, **fields: Any) -> Iterator[pb.CreateJobRequest]:
    yield pb.CreateJobRequest(**{"endpoint": URL, "completion_window": "24h", "metadata": {"a": "b"}, **fields})
    for start in range(0, len(data), 100):
        yield pb.CreateJobRequest(jsonl=data[start : start + 100])


def test_a_job_runs_over_grpc_in_the_same_store(running, server, client):
    with grpc_server(running, server.service, server.jobs) as target, stub(target) as rpc:
        data = jsonl(*(line(f"r{i}", prompt=[i + 1]) for i in range(8)), line("bad", n=0))
        job = rpc.CreateJob(pieces(data))
        found = list(rpc.StreamJobResults(pb.StreamJobResultsRequest(id=job.id)))
        by_id = {result.custom_id: result for result in found}
        assert len(found) == 9 and [r.custom_id for r in found if r.is_error] == ["bad"]
        job = rpc.GetJob(pb.JobRequest(id=job.id))
        assert (job.status, job.request_counts.completed, job.request_counts.failed) == ("completed", 8, 1)
        assert dict(job.metadata) == {"a": "b"}
        same = client.batches.retrieve(job.id)
        assert same.output_file_id == job.output_file_id
        assert results(client, same.output_file_id)["r3"] == json.loads(by_id["r3"].line)
        rest = list(rpc.StreamJobResults(pb.StreamJobResultsRequest(id=job.id, skip_output=6, skip_errors=1)))
        assert [r.custom_id for r in rest] == [r.custom_id for r in found if not r.is_error][6:]
        again = rpc.CreateJob(iter([next(pieces(b"", input_file_id=job.input_file_id))]))
        listed = rpc.ListJobs(pb.ListJobsRequest(limit=1))
        assert len(listed.jobs) == 1 and listed.has_more
        assert {again.id, job.id} == {item.id for item in rpc.ListJobs(pb.ListJobsRequest()).jobs}
        assert rpc.CancelJob(pb.JobRequest(id=job.id)).status == "completed"
        ended(client, client.batches.retrieve(again.id))


def test_bad_jobs_over_grpc_are_refused_and_leave_no_file(running, server):
    with grpc_server(running, server.service, server.jobs) as target, stub(target) as rpc:
        for calls, code, field in (
            ([], "INVALID_ARGUMENT", "request"),
            (pieces(b""), "INVALID_ARGUMENT", "input_file_id"),
            (pieces(b"x", endpoint="/v1/x"), "INVALID_ARGUMENT", "endpoint"),
            (pieces(b"x", completion_window="1h"), "INVALID_ARGUMENT", "completion_window"),
            (pieces(b"x", input_file_id="file-1"), "INVALID_ARGUMENT", "jsonl"),
            (pieces(b"", input_file_id="../x"), "NOT_FOUND", None),
            ([*pieces(b"x"), *pieces(b"x")], "INVALID_ARGUMENT", "request"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                rpc.CreateJob(iter(calls))
            assert refusal(caught.value)[::2] == (code, field)
        for call, request in (
            (rpc.GetJob, pb.JobRequest(id="../lock")),
            (rpc.CancelJob, pb.JobRequest()),
            (lambda r: list(rpc.StreamJobResults(r)), pb.StreamJobResultsRequest(id="batch_x")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert server.jobs.store.files() == [] and list((Path(server.service.config.batch_dir) / "files").iterdir()) == []


# After a crash


def test_one_server_owns_a_folder_and_a_broken_state_is_left_alone(running, engine, tmp_path, caplog):
    with job_server(running, engine, tmp_path) as server, pytest.raises(ConfigError, match="in use by another"):
        Store(server.service.config)
    for text in ("", "{}", "[]", "\0", json.dumps({"id": "../x"})):
        (tmp_path / "batches" / "batch_a.json").write_text(text)
        (tmp_path / "files" / "file-a.data").write_text("data")
        with job_server(running, engine, tmp_path) as server:
            assert server.jobs.store.jobs() == []
        assert (tmp_path / "files" / "file-a.data").exists() and "batch_a.json cannot be read" in caplog.text
    (tmp_path / "batches" / "batch_a.json").unlink()
    (tmp_path / "files" / "file-b.part").write_text("half an upload")
    with job_server(running, engine, tmp_path):
        assert list((tmp_path / "files").iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(ServerConfig(batch_dir="/proc/nothing"))


def test_a_full_disk_holds_a_job_up_and_a_fault_costs_one_job_alone(client, monkeypatch):
    add, save = LineFile.add, Store.save_job
    failures = [*(OSError(errno.ENOSPC, "full") for _ in range(2)), *(KeyError("a fault of ours") for _ in range(2))]

    def failing(file: LineFile, data: bytes) -> None:
        if failures and b'"r3"' in data:
            raise failures.pop(0)
        add(file, data)

    def failing_save(store: Store, job: Any) -> None:
        if job.status == "failed" and saves:
            raise saves.pop()
        save(store, job)

    saves = [OSError(errno.ENOSPC, "full")]
    monkeypatch.setattr(jobs_module, "FULL_RETRY_S", 0.01)
    monkeypatch.setattr(LineFile, "add", failing)
    monkeypatch.setattr(Store, "save_job", failing_save)
    batch = ended(client, create(client, *(line(f"r{i}") for i in range(6))))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_failed")
    assert failures == [] and saves == []
    batch = ended(client, create(client, *(line(f"r{i}") for i in range(6))))
    assert (batch.status, batch.request_counts.completed) == ("completed", 6)
    assert len(results(client, batch.output_file_id)) == 6


FLAGS = ["--dtype=float32", "--max_num_seqs=2", "--prefill_token_buckets=32", "--num_pages=200", "--max_decode_steps=1"]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "serving", "serve", f"--model=dummy:{TINY}", "--port=0", *FLAGS]
    command += [f"--batch_dir={folder}", "--served_model_name=m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        yield process, next(part for part in ready.split(", ") if part.startswith("http")).strip()
    finally:
        process.kill()
        process.communicate()


def test_a_job_goes_on_after_the_server_was_killed(tmp_path):
    lines = [
        {**line(f"r{i}"), "body": {"prompt": [1 + i % 50], "max_tokens": 40, "temperature": 0, "ignore_eos": True}}
        for i in range(300)
    ]
    with serving(tmp_path) as (process, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        batch = create(client, *lines)
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 20:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (output,) = (path for path in (tmp_path / "files").glob("*.data") if b"batch_req_" in path.read_bytes())
    done = output.read_bytes()
    assert 20 <= done.count(b"\n") < 300
    output.write_bytes(done[:-10])  # torn
    with serving(tmp_path) as (_, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        batch = ended(client, client.batches.retrieve(batch.id))
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 300, 300, 0)
        content = client.files.content(batch.output_file_id).content
        found = results(client, batch.output_file_id)
    assert found.keys() == {f"r{i}" for i in range(300)}
    assert content.startswith(done[: done[:-10].rindex(b"\n") + 1])  # what was there was not run again
    assert all(record["response"]["body"]["usage"]["completion_tokens"] == 40 for record in found.values())


# The command


def run_command(capsys: Any, *arguments: Any) -> tuple[int, str]:
    status = main(["batch", *map(str, arguments)])
    return status, capsys.readouterr().err.strip().splitlines()[-1]


def test_the_command_answers_a_file_through_a_server_and_goes_on_where_it_was(
    running, engine, tmp_path, capsys, monkeypatch
):
    service = Service(ServerConfig(served_model_name="tiny", api_keys=("key",)), "tiny")
    service.attach(engine)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"r{i}", prompt=[i + 1]) for i in range(9)] + [line("chat", "/v1/chat/completions"), line("bad", n=0)]
    source.write_bytes(jsonl(*lines))
    with grpc_server(running, service) as target:
        assert run_command(capsys, source, out, f"--server={target}")[0] == 2  # no key
        monkeypatch.setenv("HEADRACE_API_KEY", "key")
        status, said = run_command(capsys, source, out, f"--server={target}", "--max_in_flight=3")
        assert status == 1 and said.startswith("11 requests: 0 had answers, 11 were answered now, 1 of these")
        records = [json.loads(text) for text in out.read_text().splitlines()]
        assert {record["custom_id"] for record in records} == {item["custom_id"] for item in lines}
        kept = out.read_bytes()
        assert run_command(capsys, source, out, f"--server={target}")[1].startswith("11 requests: 11 had answers, 0 ")
        assert out.read_bytes() == kept
        out.write_bytes(kept[:-5])
        assert run_command(capsys, source, out, f"--server={target}")[1].startswith("11 requests: 10 had answers, 1 ")
        assert len(out.read_text().splitlines()) == 11
        service.drain()
        status, said = run_command(capsys, source, tmp_path / "new", f"--server={target}")
        assert status == 1 and said.endswith("11 have none") and (tmp_path / "new").read_bytes() == b""
    status, said = run_command(capsys, source, tmp_path / "other", f"--server={target}")
    assert status == 2 and "UNAVAILABLE" in said


def test_the_command_answers_a_file_by_itself(tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": [1, 2], "max_tokens": 3, "model": "m"}
    source.write_bytes(jsonl(*({**line(f"r{i}"), "body": body} for i in range(5))))
    flags = [f"--model=dummy:{TINY}", *FLAGS, "--served_model_name=m", "--max_in_flight=2"]
    status, said = run_command(capsys, source, out, *flags)
    assert (status, said.split(",")[1]) == (0, " 5 were answered now")
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert {record["response"]["body"]["usage"]["completion_tokens"] for record in records} == {3}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (jsonl(line("a"), line("a")), "line 2: line.custom_id: 'a' is an earlier line's"),
        (b"\xff\n", "line 1: line: is not UTF-8"),
        (b"", "has no lines"),
    ],
)
def test_a_bad_file_is_refused_before_anything_runs(tmp_path, capsys, data, message):
    source = tmp_path / "in.jsonl"
    source.write_bytes(data)
    status, said = run_command(capsys, source, tmp_path / "out", "--server=127.0.0.1:1")
    assert status == 2 and message in said and not (tmp_path / "out").exists()
    assert run_command(capsys, tmp_path / "none", tmp_path / "out", "--server=127.0.0.1:1")[0] == 2
    source.write_bytes(jsonl(line("a")))
    status, said = run_command(capsys, source, source, "--server=127.0.0.1:1")
    assert status == 2 and "is no answer of a batch" in said and source.read_bytes() == jsonl(line("a"))
