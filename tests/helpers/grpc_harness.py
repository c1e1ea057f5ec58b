"""gRPC servers over the tiny engine of http_harness, and requests of the schema as gRPC messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from http_harness import Servers

from serving.api.grpc_messages import request_body
from serving.api.grpc_server import GrpcServer
from serving.api.service import Service
from serving.jobs.jobs import Jobs
from serving.proto.v1 import serving_pb2 as pb
from serving.proto.v1.serving_pb2_grpc import ServingStub

MESSAGES = {
    "completions": pb.CompletionRequest,
    "chat": pb.ChatRequest,
    "tokenize": pb.TokenizeRequest,
    "detokenize": pb.DetokenizeRequest,
}


@contextlib.contextmanager
def grpc_server(running: Servers, service: Service, jobs: Jobs | None = None) -> Iterator[str]:
    """Serve on a free port, in the event loop of `running`; gives HOST:PORT."""
    server = GrpcServer(service, host="127.0.0.1", port=0, version="0", jobs=jobs)
    future = asyncio.run_coroutine_threadsafe(server.serve(), running.loop)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
        yield f"127.0.0.1:{server.port}"
    finally:
        running.loop.call_soon_threadsafe(server.stop)
        future.result(timeout=30)


@contextlib.contextmanager
def stub(target: str) -> Iterator[ServingStub]:
    with grpc.insecure_channel(target) as channel:
        yield ServingStub(channel)


def message_of(endpoint: str, body: dict[str, Any]) -> Message | None:
    """`body` as a message of `endpoint`; None where a message cannot say the same."""
    fields = {name: value for name, value in body.items() if value is not None}
    wanted = dict(fields)
    try:
        if endpoint == "completions":
            fields["prompt"] = _prompts(fields["prompt"])
        message = ParseDict(fields, MESSAGES[endpoint]())
        said = request_body(message)
        same = json.dumps(said, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    except Exception:  # of the client's library, for what its types cannot hold
        return None
    return message if same else None


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    return [{"text": item} if isinstance(item, str) else {"tokens": {"token_ids": item}} for item in prompts]


def refusal(error: grpc.RpcError) -> tuple[str, str, str | None]:
    """(code, message, field) of a refused call, its details being what the code asks for."""
    return status_verdict(rpc_status.from_call(error))


def status_verdict(status: status_pb2.Status) -> tuple[str, str, str | None]:
    field = None
    details = error_details_pb2.BadRequest()
    if any(detail.Unpack(details) for detail in status.details):
        (violation,) = details.field_violations
        field = violation.field
        assert status.message == f"{field}: {violation.description}"
    return grpc_code(status.code), status.message, field


def grpc_code(number: int) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)
