"""What `make demo` runs: a server on the small model of a gin file, a chat over HTTP, a batch over gRPC, and its end.

python -m serving.cli.demo --gin_file=runs/demo.gin --prompts_file=FILE.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHAT = "What is a headrace, and what is it good for?"
SHOWN_SERIES = (  # of /metrics
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "headrace_compiles_total",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the server's exit status; raises RuntimeError where it gives no answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gin_file", required=True)
    parser.add_argument("--prompts_file", type=Path, required=True, help="lines with messages and max_tokens")
    args = parser.parse_args(argv)
    lines = [json.loads(line) for line in args.prompts_file.read_text(encoding="utf-8").splitlines()]
    port, grpc_port = _free_ports(2)
    flags = [f"--gin_file={args.gin_file}", f"--port={port}", f"--grpc_port={grpc_port}"]
    command = [sys.executable, "-m", "serving", "serve", *flags]
    print("$ headrace serve", *flags, flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ready = server.stdout.readline()
            if not ready:
                raise RuntimeError(f"the server ended with status {server.wait()}")
            print(ready, end="")
            _stream_chat(port)
            _run_batch(grpc_port, [*lines, *lines])
            _print_metrics(port)
        finally:
            server.send_signal(signal.SIGTERM)
        status = server.wait()
        print(f"\nserver drained, exit status {status}")
    return status


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _post(port: int, path: str, body: dict[str, object]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {response.read().decode()}")
    return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[len(b"data: ") :])


def _stream_chat(port: int) -> None:
    print(f"\nchat over HTTP: {CHAT}\n> ", end="")
    body = dict(
        messages=[{"role": "user", "content": CHAT}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage: dict[str, int] = {}
    began_s, first_s = time.monotonic(), None
    for event in _events(_post(port, "/v1/chat/completions", body)):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first_s = first_s or time.monotonic()
                print(text, end="", flush=True)
    ended_s = time.monotonic()
    first_s = first_s or ended_s
    rate = (usage["completion_tokens"] - 1) / (ended_s - first_s)
    print(f"\nfirst token after {(first_s - began_s) * 1e3:.0f} ms, then {rate:.1f} tokens/s")


def _run_batch(port: int, lines: list[dict[str, Any]]) -> None:
    import grpc

    from serving.proto.v1 import serving_pb2 as pb
    from serving.proto.v1.serving_pb2_grpc import ServingStub

    print(f"\n{len(lines)} chats over gRPC (GenerateBatch):")
    requests = [
        pb.GenerateBatchRequest(
            id=str(i),
            chat=pb.ChatRequest(
                messages=[pb.ChatMessage(**message) for message in line["messages"]],
                max_tokens=line["max_tokens"],
                temperature=0 if i < len(lines) // 2 else 0.8,
                seed=i,
            ),
        )
        for i, line in enumerate(lines)
    ]
    began_s, num_tokens = time.monotonic(), 0
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for result in ServingStub(channel).GenerateBatch(iter(requests)):
            if result.WhichOneof("result") == "error":
                raise RuntimeError(f"request {result.id}: {result.error.message}")
            if result.WhichOneof("result") is None:  # says only that the answer was whole
                continue
            num_tokens += result.response.usage.completion_tokens
            answer = " ".join(result.response.choices[0].message.content.split())
            print(f"{time.monotonic() - began_s:6.1f} s  [{result.id:>2}] {answer[:90]}", flush=True)
    seconds = time.monotonic() - began_s
    print(f"{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s")


def _print_metrics(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    print("\nfrom /metrics:")
    for line in text.splitlines():
        if line.startswith(SHOWN_SERIES):
            print(" ", line)


if __name__ == "__main__":
    sys.exit(main())
