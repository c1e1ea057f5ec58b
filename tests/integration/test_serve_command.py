"""`headrace serve` as a process: loading, ready, draining, and its exit status; and what it refuses at start."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_harness import free_port

from serving.__main__ import main

TINY = Path(__file__).parents[1] / "data" / "tiny"
FLAGS = ["--dtype=float32", "--max_num_seqs=2", "--prefill_token_buckets=32", "--num_pages=200", "--max_decode_steps=1"]
FLAGS += ["--measure_peaks=false", "--drain_grace_s=300"]
LONG = {"prompt": [1, 2], "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}


@contextlib.contextmanager
def serving(port: int, *flags: str, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "serving", "serve", f"--model=dummy:{TINY}", f"--port={port}", *FLAGS, *flags]
    with open(log or "/dev/null", "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def health(port: int, name: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=30)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def started_stream(client: httpx.AsyncClient, n: int, text: list[str]) -> None:
    """Read one stream to its end, whatever that is; its events go to `text`."""
    async with client.stream("POST", "/v1/completions", json={**LONG, "n": n}) as response:
        async for line in response.aiter_lines():
            text.append(line.removeprefix("data: "))


async def drained(port: int, process: subprocess.Popen[str], *, n: int, num_signals: int) -> list[str]:
    """The events of a stream of `n` choices that runs while the process gets its signals."""
    text: list[str] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        stream = asyncio.create_task(started_stream(client, n, text))
        while not text:
            await asyncio.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        while (refused := await client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.005)
        assert "draining" in refused.text
        scrape = await client.get("/metrics")
        assert [line[-4:] for line in scrape.text.splitlines() if line.startswith("headrace_ready{")] == [" 0.0"]
        refused = await client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        if num_signals > 1:
            assert not stream.done()
            process.send_signal(signal.SIGINT)
        await stream
    return [line for line in text if line]


def test_s46_s47_loading_is_said_ready_is_said_and_a_signal_lets_requests_end(tmp_path):
    port, grpc_port, log = free_port(), free_port(), tmp_path / "log"
    flags = ("--served_model_name=m", "--json_logs=true", f"--grpc_port={grpc_port}")
    with (
        serving(port, *flags, log=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        while True:
            with contextlib.suppress(httpx.ConnectError):
                assert client.get("/health").status_code == 200
                break
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/completions", json=LONG).status_code == 503
        assert (health(grpc_port, ""), health(grpc_port, "serving.v1.Serving")) == ("SERVING", "NOT_SERVING")
        line = process.stdout.readline()
        assert line.startswith("headrace: m is ready after ")
        assert line.endswith(f"http://127.0.0.1:{port}, grpc://127.0.0.1:{grpc_port}\n")
        assert client.get("/readyz").status_code == 200
        assert 'headrace_ready{engine="0",model_name="m"} 1.0' in client.get("/metrics").text
        assert client.get("/status.json").json()["state"] == "ready"
        assert health(grpc_port, "serving.v1.Serving") == "SERVING"
        client.close()
        *_, end, done = asyncio.run(drained(port, process, n=6, num_signals=1))
        assert json.loads(end)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == ""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert {"http_request", "request_finished"} <= {line["event"] for line in lines}
    assert "message of a library" not in {line["event"] for line in lines if line["level"] in ("error", "critical")}


def test_s46_a_second_signal_gives_up_what_runs():
    port = free_port()
    with serving(port) as process:
        assert "is ready" in process.stdout.readline()
        *before, last = asyncio.run(drained(port, process, n=100, num_signals=2))
        assert len(before) < 100 * 900 and json.loads(last)["error"]["code"] == "service_unavailable"
        assert process.wait(timeout=60) == 0


def test_a_signal_while_the_model_loads_ends_the_process():
    port = free_port()
    with serving(port) as process:
        while True:
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=60)
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == ""


def test_what_cannot_be_served_is_refused_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, message in (
            ([f"--port={port}"], f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (["--host=no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
            (["--port=0", f"--grpc_port={port}"], f"cannot listen on 127.0.0.1:{port}"),
            (["--port=0", "--batch_dir=/proc/nothing"], "ServerConfig.batch_dir='/proc/nothing' cannot be used"),
            (["--port=70000"], "ServerConfig.port must be in [0, 65535]"),
            (["--api_key=a b"], "ServerConfig.api_keys[0] must be visible ASCII characters"),
            (["--port=0", "--tensor_parallel_size=3"], "3"),
        ):
            assert main(["serve", f"--model=dummy:{TINY}", *flags]) == 2, flags
            error = capsys.readouterr().err
            last = error.splitlines()[-1]
            assert last.startswith("headrace: error: ") and message in last and "a b" not in last


def test_traces_without_their_packages_are_refused_before_the_model_loads(capsys, monkeypatch):
    find_spec = importlib.util.find_spec

    def without_opentelemetry(name: str) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)  # of a package inside one that is not there
        return find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_opentelemetry)
    assert main(["serve", "--model=dummy:/no/such/folder", "--otlp_endpoint=http://localhost:4318/v1/traces"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("headrace: error: serve needs opentelemetry.sdk") and "headrace[otel]" in error


def test_a_dry_run_says_what_would_run_and_a_key_is_in_nothing_printed(capsys):
    flags = ["serve", f"--model=dummy:{TINY}", "--api_key=secret", "--api_key=other", "--port=8001"]
    assert main([*flags, "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert main([*flags, "--dry_run"]) == 0
    dry = capsys.readouterr().out
    assert dry.startswith(printed.rstrip()) and "# context 1024 tokens; tokenizer: none" in dry
    assert "ServerConfig.port = 8001" in printed and "# ServerConfig.api_keys is not shown: 2" in printed
    assert "secret" not in dry and "secret" not in printed
    assert main(["serve", "--model=dummy:/no/such/folder", "--dry_run"]) == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_address_without_a_key_is_warned_of(host, capsys):
    assert main(["serve", f"--model=dummy:{TINY}", f"--host={host}", "--port=0", "--tensor_parallel_size=3"]) == 2
    assert "headrace: warning: no api_key is set" in capsys.readouterr().err
