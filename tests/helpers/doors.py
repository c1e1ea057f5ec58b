"""What each door of a server says to a request, in HTTP's terms, so that the doors can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.message import Message
from google.rpc import status_pb2
from grpc_harness import refusal, status_verdict
from grpc_status import rpc_status

from serving.proto.v1 import serving_pb2 as pb
from serving.proto.v1.serving_pb2_grpc import ServingStub

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
GENERATING = ("completions", "chat")
JSON = {"content-type": "application/json"}
# google.rpc.Code by HTTP's status of the same error; a status of the server's own faults is in neither.
STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
}
GOLDEN = {
    "prompt": "hello",
    "temperature": 0.0,
    "ignore_eos": True,
    "max_tokens": 2,
    "allowed_token_ids": list(range(97, 123)),
}


@dataclass(frozen=True)
class Verdict:
    status: int  # HTTP's, 200 for an answer
    message: str = ""
    field: str | None = None  # that a 400 names

    @property
    def is_refusal(self) -> bool:
        return 400 <= self.status < 500


OK = Verdict(200)


def verdict_of_http(status: int, body: bytes) -> Verdict:
    if status == 200:
        return OK
    error = json.loads(body)
    assert set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}
    return Verdict(status, error["error"]["message"], error["error"]["param"] if status == 400 else None)


def verdict_of_status(code: str, message: str, field: str | None) -> Verdict:
    return Verdict(STATUSES.get(code, 500), message, field)


class Doors:
    """Clients of HTTP and gRPC of one server of the tiny model."""

    def __init__(self, http: httpx.Client, channel: grpc.Channel):
        self.http, self.channel, self.stub = http, channel, ServingStub(channel)
        self.golden = self.golden_by_http()
        assert len(self.golden) == 2 == len(self.golden_by_grpc())

    def by_http(self, path: str, body: dict[str, Any] | bytes, headers: dict[str, str] = JSON) -> Verdict:
        """`body` may hold what is no JSON, such as NaN."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.http.post(path, content=content, headers=headers)
        return verdict_of_http(response.status_code, response.content)

    def by_grpc(self, message: Message, **kwargs: Any) -> Verdict:
        """The verdict on a message of one of the endpoints. kwargs are of the call."""
        try:
            match message:
                case pb.CompletionRequest():
                    list(self.stub.Generate(pb.GenerateRequest(completion=message), **kwargs))
                case pb.ChatRequest():
                    list(self.stub.Generate(pb.GenerateRequest(chat=message), **kwargs))
                case pb.TokenizeRequest():
                    self.stub.Tokenize(message, **kwargs)
                case pb.DetokenizeRequest():
                    self.stub.Detokenize(message, **kwargs)
                case _:
                    raise TypeError(type(message))
        except grpc.RpcError as error:
            return verdict_of_error(error)
        return OK

    def by_batch(self, requests: Iterable[pb.GenerateBatchRequest]) -> dict[str, Verdict]:
        """The verdict on each request of one GenerateBatch call, by its id."""
        return {
            last.id: verdict_of_http(last.http.status_code, last.http.body)
            if last.WhichOneof("result") == "http"
            else verdict_of_status(*status_verdict(last.error))
            if last.HasField("error")
            else OK
            for last in self.stub.GenerateBatch(iter(requests))
            if last.is_last
        }

    def check_message(self, endpoint: str, body: dict[str, Any], message: Message) -> Verdict:
        """gRPC's verdict on `message`, which is HTTP's on the `body` that says the same."""
        verdict = self.by_grpc(message)
        if not is_finite(body):  # no JSON: HTTP refuses it as such
            assert verdict.status == 400, (endpoint, body)
            return verdict
        theirs = self.by_http(PATHS[endpoint], body)
        assert theirs == verdict or theirs.status == 413, (body, theirs, verdict)  # longer as JSON than as a message
        return verdict

    def check_lines(self, bodies: Sequence[tuple[str, bytes]], by_http: Sequence[Verdict]) -> list[Verdict]:
        """A batch's verdicts on HTTP requests (path, body), which are HTTP's; a good one after each has its answer."""
        golden = json.dumps(GOLDEN).encode()
        requests = []
        for i, (path, body) in enumerate(bodies):
            requests.append(pb.GenerateBatchRequest(id=str(i), http=pb.HttpRequest(url=path, body=body)))
            http = pb.HttpRequest(url=PATHS["completions"], body=golden)
            requests.append(pb.GenerateBatchRequest(id=f"golden {i}", http=http))
        answers = self.by_batch(requests)
        assert len(answers) == len(requests)
        for i, ((path, body), theirs) in enumerate(zip(bodies, by_http, strict=True)):
            assert answers[f"golden {i}"] == OK
            if theirs == OK and answers[str(i)] != OK:
                assert answers[str(i)].field == "stream" and b'"stream": true' in body
            else:
                assert answers[str(i)] == theirs, (path, body[:500])
        return [answers[str(i)] for i in range(len(bodies))]

    def golden_by_http(self) -> str:
        response = self.http.post("/v1/completions", json=GOLDEN)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def golden_by_grpc(self) -> str:
        (response,) = self.stub.Generate(pb.GenerateRequest(completion=golden_message()))
        return response.choices[0].text

    def check_golden(self, door: str) -> None:
        """A good request through that door has its answer still."""
        assert (self.golden_by_http() if door == "http" else self.golden_by_grpc()) == self.golden


def golden_message() -> pb.CompletionRequest:
    return pb.CompletionRequest(**{**GOLDEN, "prompt": [pb.Prompt(text=GOLDEN["prompt"])]})


def verdict_of_error(error: grpc.RpcError) -> Verdict:
    """Of a failed call; those that gRPC itself has ended have no rich status."""
    status: status_pb2.Status | None = rpc_status.from_call(error)
    if status is None:
        return verdict_of_status(error.code().name, error.details() or "", None)
    return verdict_of_status(*refusal(error))


def is_finite(value: Any) -> bool:
    """Whether JSON can say it."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
