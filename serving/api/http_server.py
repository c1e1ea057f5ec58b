"""OpenAI's HTTP interface over a Service, on starlette and uvicorn (the extra `http`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.api.event_stream import EventEncoder, event
from serving.api.http_errors import HttpError, error_body, error_response, http_error, http_refusal_reason
from serving.api.http_front_door import ClientGoneError, FrontDoor, RequestInfo, read_body, until_client_gone
from serving.api.pins import parse_pin, pin, unpin
from serving.api.schema import GenerationCall
from serving.api.service import Generation, Service
from serving.api.strict_json import decode_object
from serving.request import RequestContext
from serving.status import load_page

SMALL_BODY_BYTES = 16 * 2**10  # decoded in the event loop; larger ones in a thread
BACKLOG = 2048
SHUTDOWN_S = 2  # for clients that do not read the end of their answers
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def build_app(service: Service, *, version: str, more_routes: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The public routes, and `more_routes`."""

    async def metrics(_: Request) -> Response:
        body, media_type = await asyncio.to_thread(service.metrics.exposition)
        return Response(body, media_type=media_type)

    async def status(_: Request) -> dict[str, Any]:
        return await asyncio.to_thread(service.status)

    pages = {"/status": _page("status"), "/chat": _page("chat")}
    routes: list[BaseRoute] = [
        *more_routes,
        Route("/v1/completions", _Post(service, service.parse_completion, _generate), methods=["POST"]),
        Route("/v1/chat/completions", _Post(service, service.parse_chat, _generate), methods=["POST"]),
        Route("/tokenize", _Post(service, service.parse_tokenize, _answering(service.tokenize)), methods=["POST"]),
        Route(
            "/detokenize", _Post(service, service.parse_detokenize, _answering(service.detokenize)), methods=["POST"]
        ),
        Route("/tokenizer_info", _get(lambda _: service.tokenizer_info())),
        Route("/v1/models", _get(lambda _: {"object": "list", "data": service.models()})),
        Route("/v1/models/{model:path}", _get(lambda request: _model(service, request.path_params["model"]))),
        Route("/health", _get(lambda _: service.check_alive())),
        Route("/healthz", _get(lambda _: service.check_alive())),
        Route("/readyz", _get(lambda _: service.check_ready())),
        Route("/ping", _get(lambda _: service.check_ready())),
        Route("/load", _get(lambda _: {"server_load": service.num_in_flight, **_load(service)})),
        Route("/version", _get(lambda _: {"version": version})),
        Route("/metrics", _get(metrics)),
        Route("/status.json", _get(status)),
        *(Route(path, _get(functools.partial(_open_page, page))) for path, page in pages.items()),
    ]
    return _app(routes, service, pages)


def build_admin_app(service: Service, *, version: str, config_text: str) -> ASGIApp:
    """Routes for those who run the server, on a port of their own; under the same keys."""

    async def reset_prefix_cache(_: Request) -> dict[str, Any]:
        return {"num_pages": await service.engine.reset_prefix_cache()}

    parse = functools.partial(parse_pin, config=service.config)

    def server_info(_: Request) -> dict[str, Any]:
        return {"version": version, "model": service.model_name, "config": config_text, "stats": service.stats()}

    routes: list[BaseRoute] = [
        Route("/reset_prefix_cache", _get(reset_prefix_cache), methods=["POST"]),
        Route("/pin_prefix", _Post(service, parse, _answering(functools.partial(pin, service))), methods=["POST"]),
        Route("/unpin_prefix", _Post(service, parse, _answering(functools.partial(unpin, service))), methods=["POST"]),
        Route("/server_info", _get(server_info)),
        Route("/health", _get(lambda _: service.check_alive())),
    ]
    return _app(routes, service, {})


class HttpServer:
    """An ASGI app on a port. The port is taken at construction; raises ConfigError where it cannot be."""

    def __init__(self, app: ASGIApp, config: ServerConfig, *, host: str, port: int):
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(config.header_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                h11_max_incomplete_event_size=config.max_header_bytes,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )

    async def serve(self) -> None:
        """Answer until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Close the port; connections end with the answer that they are at."""
        self._server.should_exit = True

    def close(self) -> None:
        """Give the port back without having served."""
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # signals are the command's
        yield


def _protocol(header_timeout_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, which alone would wait for ever for the headers of a request.

    `write_directly` in a request's state is for streams: it writes a part of a body that is under way as `send` would,
    at a fraction of the cost, or is False where `send` must do it.
    """

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "write_directly": self._write_directly}
            self._watch(None)

        def _write_directly(self, data: bytes) -> bool:
            cycle = self.cycle
            # Without a length, HTTP/1.1 has chunks, which h11 frames just so and keeps no count of.
            is_chunked = cycle.scope["http_version"] == "1.1" and cycle.response_started and not cycle.response_complete
            if not is_chunked or cycle.disconnected or self.flow.write_paused or not data:
                return False
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _watch(self, last_request: object) -> None:
            self._timer = self.loop.call_later(header_timeout_s, self._check, last_request)

        def _check(self, last_request: object) -> None:
            is_waiting = self.cycle is None or self.cycle.response_complete
            if is_waiting and self.cycle is last_request:
                self.transport.abort()
            else:
                self._watch(self.cycle)

    return Protocol


class _Post:
    """ASGI endpoint of a JSON request: admitted, read, parsed, and answered while its client is there."""

    def __init__(
        self,
        service: Service,
        parse: Callable[[object], Any],
        respond: Callable[[Service, Any, Scope, Receive, Send], Awaitable[None]],
    ):
        self._service, self._parse, self._respond = service, parse, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def noting_send(message: Any) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            with self._service.admission():
                body = await read_body(scope, receive, self._service.config)
                await until_client_gone(receive, self._work(body, scope, receive, noting_send))
        except ClientGoneError:
            raise
        except Exception as error:
            self._service.count_refusal(http_refusal_reason(error))
            if is_started:  # nothing can be said any more: the connection is closed
                raise
            await error_response(error)(scope, receive, send)

    async def _work(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        if len(body) <= SMALL_BODY_BYTES:
            call = self._decode(body)
        else:
            call = await self._service.in_text_thread(self._decode, body)
        info: RequestInfo = scope["state"]["request"]
        if isinstance(call, GenerationCall) and call.request_id is not None and not info.is_named:
            info.request_id = call.request_id
        await self._respond(self._service, call, scope, receive, send)

    def _decode(self, body: bytes) -> Any:
        return self._parse(decode_object(body, max_depth=self._service.config.max_json_depth))


async def _generate(service: Service, call: Any, scope: Scope, receive: Receive, send: Send) -> None:
    info: RequestInfo = scope["state"]["request"]
    generation = await service.start(call, RequestContext(tenant=info.tenant, trace=info.trace))
    info.response_id = generation.answer.id
    if call.stream is None:
        await JSONResponse(await generation.whole())(scope, receive, send)
    else:
        await _send_events(generation, scope, send)


async def _send_events(generation: Generation, scope: Scope, send: Send) -> None:
    """The stream of a generation. What goes wrong before its first event is raised; later, it is the last event."""
    encoder = EventEncoder(generation.answer)
    write_directly: Callable[[bytes], bool] | None = scope["state"].get("write_directly")
    is_started = False
    events: list[bytes] = []  # not sent yet

    async def start() -> None:
        nonlocal is_started
        is_started = True
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})

    try:
        async with contextlib.aclosing(generation.batches()) as batches:
            async for batch in batches:
                for item in batch:
                    events += encoder.events(item)
                if not events:
                    continue
                if not is_started:
                    await start()
                body = b"".join(events)
                events.clear()
                if write_directly is None or not write_directly(body):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        events += encoder.last_events()
    except Exception as error:
        if not is_started and not events:
            raise
        events.append(event(error_body(http_error(error))))
    if not is_started:
        await start()
    await send({"type": "http.response.body", "body": b"".join(events), "more_body": False})


def _answering(
    answer: Callable[[Any], Awaitable[dict[str, Any]]],
) -> Callable[[Service, Any, Scope, Receive, Send], Awaitable[None]]:
    async def respond(service: Service, call: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(await answer(call))(scope, receive, send)

    return respond


type _Value = dict[str, Any] | Response | None


def _get(answer: Callable[[Request], _Value | Awaitable[_Value]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint without a body to read: it answers with an object, a response, or an empty 200."""

    async def endpoint(request: Request) -> Response:
        try:
            value = answer(request)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            return error_response(error)
        if isinstance(value, Response):
            return value
        return Response() if value is None else JSONResponse(value)

    return endpoint


def _model(service: Service, name: str) -> dict[str, Any]:
    service.check_model(name)
    return service.models()[0]


def _load(service: Service) -> dict[str, Any]:
    stats = service.stats()
    return {name: stats.get(name, 0) for name in ("num_running", "num_waiting")}


def _page(name: Literal["status", "chat"]) -> Callable[[int], Response]:
    page = load_page(name)
    headers = {
        "Content-Security-Policy": page.content_security_policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return lambda status: Response(page.body, status, headers, media_type="text/html")


def _open_page(page: Callable[[int], Response], _: Request) -> Response:
    return page(200)


def _app(routes: Sequence[BaseRoute], service: Service, pages: Mapping[str, Callable[[int], Response]]) -> ASGIApp:
    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return error_response(HttpError(404, f"there is no {request.url.path[:200]!r} here", code="not_found"))
        message = f"{request.method} is not a method of {request.url.path[:200]!r}"
        return error_response(HttpError(error.status_code, message, headers=dict(error.headers or {})))

    async def fail(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGoneError):
            raise error
        return error_response(error)

    app = Starlette(routes=list(routes), exception_handlers={HTTPException: refuse, Exception: fail})
    app.router.redirect_slashes = False
    return FrontDoor(
        app,
        service.config,
        keys=service.keys,
        pages={path.encode(): page for path, page in pages.items()},
        count_refusal=service.count_refusal,
    )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)  # those who come before `serve` wait
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound
