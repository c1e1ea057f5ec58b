"""What every HTTP request passes first: its key, its headers, its id, and one line in the log at its end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.server import ServerConfig
from serving.api.callers import read_tenant, read_trace
from serving.api.http_errors import HttpError, error_response, http_refusal_reason
from serving.api.keys import ApiKeys
from serving.api.schema import read_request_id
from serving.operations.trace_context import TraceContext
from serving.request import DEFAULT_TENANT, RequestError

logger = logging.getLogger(__name__)

OPEN_PATHS = (b"/health", b"/healthz", b"/readyz", b"/ping")  # answer without a key
CLIENT_GONE_STATUS = 499  # in the log alone


class ClientGoneError(Exception):
    """The client has closed its connection."""


@dataclass
class RequestInfo:
    """Names of one HTTP request: in its answer's headers, and in the log."""

    request_id: str
    is_named: bool  # by its client, in the header
    trace: TraceContext | None  # of the caller, if it sent one
    tenant: str = DEFAULT_TENANT
    response_id: str | None = None  # the name of its answer, and of the engine's request


class FrontDoor:
    """ASGI middleware. Leaves the RequestInfo of a request in `scope["state"]["request"]`.

    With keys, every path and method but GET and HEAD of OPEN_PATHS, spelled just so, needs one of them. A browser that
    opens one of `pages` cannot bring one, so that its refusal is the page, which has nothing to tell and asks for a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        *,
        keys: ApiKeys,
        pages: Mapping[bytes, Callable[[int], Response]],
        count_refusal: Callable[[str | None], None],
    ):
        self._app = app
        self._config = config
        self._pages = pages
        self._count_refusal = count_refusal
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        started_s = time.perf_counter()
        info, problem = self._read_headers(scope)
        scope.setdefault("state", {})["request"] = info
        status, is_complete = CLIENT_GONE_STATUS, False

        async def named_send(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                names = [(b"x-request-id", info.request_id.encode())]
                if info.trace is not None:
                    names.append((b"traceparent", info.trace.traceparent.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *names]}
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            if not self._may_pass(scope):
                await self._without_key(scope)(scope, receive, named_send)
            elif problem is not None:
                await self._refuse(scope, problem)(scope, receive, named_send)
            else:
                await self._app(scope, receive, named_send)
        except ClientGoneError:
            pass
        finally:
            if logger.isEnabledFor(logging.INFO):
                fields = {
                    "request_id": info.request_id,
                    "response_id": info.response_id,
                    "trace_id": info.trace.trace_id if info.trace is not None else None,
                    "span_id": info.trace.span_id if info.trace is not None else None,
                    "tenant": info.tenant,
                    "method": scope["method"],
                    "route": _route(scope),
                    "status_code": status if is_complete else CLIENT_GONE_STATUS,
                    "duration_s": time.perf_counter() - started_s,
                }
                logger.info("http_request", extra={"fields": fields})

    def _refuse(self, scope: Scope, problem: Exception) -> Response:
        if scope["method"] == "POST":  # pages that are open ask for their data again and again
            self._count_refusal(http_refusal_reason(problem))
        return error_response(problem)

    def _without_key(self, scope: Scope) -> Response:
        page = self._pages.get(scope.get("raw_path", b"")) if scope["method"] == "GET" else None
        if page is not None and not header_values(scope, b"authorization"):
            return page(401)
        refusal = HttpError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        return self._refuse(scope, refusal)

    def _may_pass(self, scope: Scope) -> bool:
        """Whether its key or its path lets it in."""
        if scope["method"] in ("GET", "HEAD") and scope.get("raw_path") in OPEN_PATHS:
            return True
        return self._keys.tenant_of(header_values(scope, b"authorization")) is not None

    def _read_headers(self, scope: Scope) -> tuple[RequestInfo, Exception | None]:
        """The request's names, and what is wrong with its headers."""
        problem: Exception | None = None
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > self._config.max_header_bytes:
            limit = self._config.max_header_bytes
            problem = HttpError(431, f"the headers have {num_bytes} bytes; at most {limit} are accepted")
        request_id = None
        given = header_values(scope, b"x-request-id")
        if given and problem is None:
            try:
                if len(given) > 1:
                    raise RequestError("X-Request-Id", "is given more than once")
                request_id = read_request_id("X-Request-Id", given[0].decode("latin-1"), self._config)
            except RequestError as error:
                problem = error

        def values_of(name: str) -> list[bytes]:
            return header_values(scope, name.encode())

        info = RequestInfo(
            request_id=request_id or uuid.uuid4().hex, is_named=request_id is not None, trace=read_trace(values_of)
        )
        try:
            info.tenant = read_tenant(values_of, self._config, self._keys)
        except RequestError as error:
            problem = problem or error
        return info, problem


async def read_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """The body of a JSON request. Raises HttpError or RequestError for what is refused, and ClientGoneError."""
    media_types = [value.partition(b";")[0].strip().lower() for value in header_values(scope, b"content-type")]
    if media_types != [b"application/json"]:
        # A page in a browser cannot send this type to another site unasked.
        raise RequestError("Content-Type", "must be application/json")
    if header_values(scope, b"content-encoding"):
        raise RequestError("Content-Encoding", "is not accepted: send the JSON as it is")
    lengths = header_values(scope, b"content-length")
    if lengths and int(lengths[0]) > config.max_body_bytes:
        raise _too_large(config)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message.get("body", b"")
                num_bytes += len(chunk)
                if num_bytes > config.max_body_bytes:
                    raise _too_large(config)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise HttpError(
            408, f"the body did not arrive within {config.body_timeout_s:g} s", headers={"Connection": "close"}
        ) from None


async def until_client_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, which answers a request whose body is read, and cancel it once its client has gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if task.cancelled():
        raise ClientGoneError
    task.result()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _route(scope: Scope) -> str:
    """The request's path, with names for what its client chose in it."""
    if "endpoint" not in scope:
        return "unknown"
    path: str = scope["path"]
    for name, value in scope.get("path_params", {}).items():
        path = f"{path.removesuffix(value)}{{{name}}}"
    return path


def _too_large(config: ServerConfig) -> HttpError:
    return HttpError(413, f"the body has more than {config.max_body_bytes} bytes")
