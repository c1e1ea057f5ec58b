"""The gRPC interface over a Service (the extra `grpc`): generation, batches of it, tokens, jobs, health, reflection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.rpc import status_pb2

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.api import grpc_health
from serving.api.errors import OverloadedError, refusal_reason
from serving.api.fields import Text
from serving.api.grpc_calls import Call, Method, metadata_values, service_handler
from serving.api.grpc_errors import status_of
from serving.api.grpc_jobs import GrpcJobs
from serving.api.grpc_messages import ChunkMessages, request_body, response_message
from serving.api.schema import ChatCall, CompletionCall
from serving.api.service import Service
from serving.jobs.jobs import Jobs
from serving.jobs.lines import answer_request
from serving.proto.v1 import serving_pb2 as pb
from serving.request import RequestContext, RequestError

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Serving"]
HEALTH_PREFIX = f"/{grpc_health.DESCRIPTOR.full_name}/"  # its methods answer without a key
MESSAGE_OVERHEAD_BYTES = 2**16  # of a batch line or a job around a request of the largest size
SHUTDOWN_S = 2  # for clients that do not read the end of their answers


class GrpcServer:
    """gRPC on a port. The port is taken at construction; raises ConfigError where it cannot be."""

    def __init__(self, service: Service, *, host: str, port: int, version: str, jobs: Jobs | None = None):
        self._service, self._jobs, self._version = service, jobs, version
        self._socket, target = _reserve(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._target = f"{target}:{self.port}"
        self.address = f"grpc://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        """Answer until `stop`."""
        service, config = self._service, self._service.config
        server = grpc.aio.server(interceptors=[_KeyCheck(service)], options=_options(config))
        handlers = [service_handler(DESCRIPTOR, ServingMethods(service, self._jobs).methods(), service)]
        names = [DESCRIPTOR.full_name]
        if importlib.util.find_spec("smg_grpc_proto") is not None:
            from serving.api import grpc_vllm

            engine = grpc_vllm.VllmEngine(service, self._version)
            handlers.append(service_handler(grpc_vllm.DESCRIPTOR, engine.methods(), service))
            names.append(grpc_vllm.DESCRIPTOR.full_name)
        health = grpc_health.Health(service, names)
        handlers.append(service_handler(grpc_health.DESCRIPTOR, health.methods(), service))
        server.add_generic_rpc_handlers(handlers)
        if config.grpc_reflection:
            from grpc_reflection.v1alpha import reflection

            reflected = (*names, grpc_health.DESCRIPTOR.full_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(reflected, server)
        server.add_insecure_port(self._target)
        await server.start()
        self._socket.close()
        try:
            await self._stopping.wait()
        finally:
            await server.stop(SHUTDOWN_S)

    def stop(self) -> None:
        """Close the port; calls end with the answer that they are at."""
        self._stopping.set()

    def close(self) -> None:
        """Give the port back without having served."""
        self._socket.close()


class ServingMethods:
    """Methods of serving.v1.Serving."""

    def __init__(self, service: Service, jobs: Jobs | None):
        self._service = service
        self._jobs = GrpcJobs(service, jobs)

    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self._generate,
            "GenerateBatch": self._generate_batch,
            "Tokenize": functools.partial(
                self._answer, self._service.parse_tokenize, self._service.tokenize, pb.TokenizeResponse
            ),
            "Detokenize": functools.partial(
                self._answer, self._service.parse_detokenize, self._service.detokenize, pb.DetokenizeResponse
            ),
            **self._jobs.methods(),
        }

    async def _generate(self, data: bytes, call: Call) -> None:
        with self._service.admission():
            parsed = await call.read(data, self._parse)
            await self._run(parsed, call.request_context(), call.send)

    def _parse(self, request: pb.GenerateRequest | pb.GenerateBatchRequest) -> CompletionCall | ChatCall:
        kind = request.WhichOneof("request")
        if kind == "completion":
            return self._service.parse_completion(request_body(request.completion))
        if kind == "chat":
            return self._service.parse_chat(request_body(request.chat))
        raise RequestError("request", "is missing: give one of its kinds")

    async def _run(
        self,
        parsed: CompletionCall | ChatCall,
        context: RequestContext,
        send: Callable[[pb.GenerateResponse], Awaitable[None]],
    ) -> None:
        generation = await self._service.start(parsed, context)
        if parsed.stream is None:
            await send(response_message(await generation.whole()))
            return
        chunks = ChunkMessages(generation.answer)
        async with contextlib.aclosing(generation.batches()) as batches:
            async for batch in batches:
                for message in chunks.messages(batch):
                    await send(message)
        for message in chunks.last_messages():
            await send(message)

    async def _answer(
        self,
        parse: Callable[[object], Any],
        answer: Callable[[Any], Awaitable[dict[str, Any]]],
        response: type[Any],
        data: bytes,
        call: Call,
    ) -> Any:
        with self._service.admission():
            parsed = await call.read(data, lambda request: parse(request_body(request)))
            return response(**await answer(parsed))

    async def _generate_batch(self, requests: AsyncIterator[bytes], call: Call) -> None:
        """No more is read while as much as may be is in flight, results that wait for their reader included."""
        room = asyncio.Semaphore(self._service.config.max_batch_in_flight)
        context = call.request_context()
        ids: set[str] = set()

        async def work(request: pb.GenerateBatchRequest) -> None:
            try:
                await self._run_item(request, context, call)
            finally:
                ids.discard(request.id)
                room.release()

        async with _group() as group:
            async for data in _reading(requests, room):
                request = await call.read(data, _checked_envelope)
                Text(self._service.config.max_id_chars).read("id", request.id)
                if request.id in ids:
                    raise RequestError("id", f"{request.id!r} is in flight already")
                ids.add(request.id)
                group.create_task(work(request))

    async def _run_item(self, request: pb.GenerateBatchRequest, context: RequestContext, call: Call) -> None:
        async def send(response: pb.GenerateResponse) -> None:
            await call.send_from_task(pb.GenerateBatchResponse(id=request.id, response=response))

        try:
            while True:
                try:
                    async with _admitted(self._service):
                        if request.WhichOneof("request") == "http":
                            answer = await answer_request(
                                self._service,
                                request.http.url,
                                request.http.body,
                                context=context,
                                may_be_overloaded=True,
                            )
                            http = pb.HttpResponse(
                                status_code=answer.status_code, request_id=answer.request_id, body=answer.body_bytes()
                            )
                            await call.send_from_task(pb.GenerateBatchResponse(id=request.id, is_last=True, http=http))
                            return
                        parsed = await self._service.in_text_thread(self._parse, request)
                        await self._run(parsed, context, send)
                    break
                except OverloadedError as error:  # by rate limits, before anything was sent: it waits as for admission
                    await asyncio.sleep(error.retry_after_s)
            last = pb.GenerateBatchResponse(id=request.id, is_last=True)
        except Exception as error:
            self._service.count_refusal(refusal_reason(error))
            status: status_pb2.Status = status_of(error)
            last = pb.GenerateBatchResponse(id=request.id, is_last=True, error=status)
        await call.send_from_task(last)


def _checked_envelope(request: pb.GenerateBatchRequest) -> pb.GenerateBatchRequest:
    if request.WhichOneof("request") == "http":
        request_body(request.http, "http.")
    return request


@contextlib.asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _reading(requests: AsyncIterator[bytes], room: asyncio.Semaphore) -> AsyncIterator[bytes]:
    """The requests, each once there is room for it."""
    while True:
        await room.acquire()
        try:
            data = await anext(requests)
        except StopAsyncIteration:
            return
        yield data


@contextlib.asynccontextmanager
async def _admitted(service: Service) -> AsyncIterator[None]:
    """Admission of an item of a batch, which waits where another call would be refused: nothing more is read."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(service.admission())
                break
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after_s)
        yield


class _KeyCheck(grpc.aio.ServerInterceptor):
    """Every method but those of health needs a key, known or not."""

    def __init__(self, service: Service):
        self._service = service
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)  # answers before anything is read

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if not handler_call_details.method.startswith(HEALTH_PREFIX):
            given = metadata_values(handler_call_details, "authorization")
            if self._service.keys.tenant_of(given) is None:
                self._service.count_refusal("unauthorized")
                return self._refusal
        return await continuation(handler_call_details)


async def _refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid API key is needed: authorization: Bearer KEY")


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),  # the socket that has reserved the port is still open at first
        ("grpc.max_receive_message_length", config.max_body_bytes + MESSAGE_OVERHEAD_BYTES),
        ("grpc.max_send_message_length", config.max_answer_bytes + MESSAGE_OVERHEAD_BYTES),
        ("grpc.max_concurrent_streams", config.max_concurrent_requests + 64),  # of a connection; health has room
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.absolute_max_metadata_size", config.max_header_bytes),
        ("grpc.keepalive_time_ms", int(1000 * config.grpc_keepalive_s)),
        ("grpc.keepalive_timeout_ms", int(1000 * config.grpc_keepalive_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * config.grpc_min_ping_s)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(1000 * config.grpc_min_ping_s)),
        ("grpc.server_handshake_timeout_ms", int(1000 * config.header_timeout_s)),
    ]


def _reserve(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that holds the port until gRPC listens on it, and the host's address as gRPC writes it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:  # SO_REUSEPORT alone would share it with another server
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
            name = probe.getsockname()
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(name)
        except BaseException:
            held.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return held, f"[{name[0]}]" if family == socket.AF_INET6 else name[0]
