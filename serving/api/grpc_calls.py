"""How the methods of a gRPC service are called: messages parsed by us, errors as rich statuses, a line in the log.

Messages come as bytes, so that one that is broken is the client's mistake (grpc would say INTERNAL), and a large one
is parsed beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2
from grpc_status import rpc_status

from serving.api.callers import read_tenant, read_trace
from serving.api.errors import refusal_reason
from serving.api.grpc_errors import GrpcError, status_of
from serving.api.grpc_messages import parse_message
from serving.api.service import Service
from serving.request import RequestContext

logger = logging.getLogger(__name__)

SMALL_MESSAGE_BYTES = 16 * 2**10  # read in the event loop; larger ones in a thread


class Call:
    """One call of a method under way."""

    def __init__(self, service: Service, context: grpc.aio.ServicerContext, request_type: type[Message]):
        self._service = service
        self._context = context
        self._request_type = request_type
        self._turn = asyncio.Lock()
        self._write: asyncio.Future[None] | None = None

    async def read[Result](self, data: bytes, convert: Callable[[Any], Result]) -> Result:
        """What `convert` makes of the message in `data`. Raises RequestError."""
        if len(data) <= SMALL_MESSAGE_BYTES:
            return convert(parse_message(self._request_type, data))
        return await self._service.in_text_thread(lambda: convert(parse_message(self._request_type, data)))

    def request_context(self) -> RequestContext:
        """Whose the call is, and within what span, by its metadata as HTTP's headers say it, and until when it must have
        begun, by its own deadline. Raises RequestError."""
        values_of = functools.partial(metadata_values, self._context)
        tenant = read_tenant(values_of, self._service.config, self._service.keys)
        remaining_s = self._context.time_remaining()
        deadline_s = None if remaining_s is None else self._service.now() + remaining_s
        return RequestContext(tenant=tenant, trace=read_trace(values_of), deadline_s=deadline_s)

    async def send(self, message: Message) -> None:
        """Returns once the client's window has room. Raises GrpcError for a message over the limit.

        Not to be cancelled but with the call: gRPC cannot take back what it has begun to write.
        """
        self._check_size(message)
        with _gone_client_told():
            await self._context.write(message)

    async def send_from_task(self, message: Message) -> None:
        """`send` for one of many tasks, which may be cancelled: the write is then left to end by itself."""
        self._check_size(message)
        async with self._turn:
            if self._write is not None:
                with _gone_client_told():
                    await asyncio.shield(self._write)
            self._write = asyncio.ensure_future(self._context.write(message))
            self._write.add_done_callback(lambda write: write.cancelled() or write.exception())  # seen, where awaited
            with _gone_client_told():
                await asyncio.shield(self._write)

    async def wait_written(self) -> None:
        """Until nothing is left of what was being written; a status may follow then."""
        if self._write is not None:
            await asyncio.wait((self._write,))

    def _check_size(self, message: Message) -> None:
        limit, num_bytes = self._service.config.max_answer_bytes, message.ByteSize()
        if num_bytes > limit:
            raise GrpcError(code_pb2.RESOURCE_EXHAUSTED, f"the answer has {num_bytes} bytes; at most {limit} are sent")


@contextlib.contextmanager
def _gone_client_told() -> Iterator[None]:
    """A write fails only where the call has ended: no fault of ours."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise GrpcError(code_pb2.CANCELLED, "the client has gone") from error


def metadata_values(context: grpc.aio.ServicerContext | grpc.HandlerCallDetails, name: str) -> list[bytes]:
    """The values of a call's metadata of that name, which is in lower case."""
    metadata = (
        context.invocation_metadata if isinstance(context, grpc.HandlerCallDetails) else context.invocation_metadata()
    )
    return [value if isinstance(value, bytes) else value.encode() for key, value in metadata or () if key == name]


# What a method does with its request, or with its stream of requests: bytes, for `Call.read`. Methods of one answer
# return it, those of a stream `send` theirs.
Method = Callable[[Any, Call], Awaitable[Message | None]]


def service_handler(
    descriptor: ServiceDescriptor, methods: Mapping[str, Method], service: Service
) -> grpc.GenericRpcHandler:
    """Serve `methods` of a service by their names; the others are UNIMPLEMENTED, by name."""
    unknown = methods.keys() - {method.name for method in descriptor.methods}
    assert not unknown, unknown
    return grpc.method_handlers_generic_handler(
        descriptor.full_name,
        {method.name: _handler(method, methods.get(method.name), service) for method in descriptor.methods},
    )


def _handler(descriptor: MethodDescriptor, method: Method | None, service: Service) -> grpc.RpcMethodHandler:
    name = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
    request_type = GetMessageClass(descriptor.input_type)

    async def behaviour(requests: bytes | AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Message | None:
        started_s = time.perf_counter()
        call = Call(service, context, request_type)
        code = grpc.StatusCode.CANCELLED
        try:
            if method is None:
                raise GrpcError(code_pb2.UNIMPLEMENTED, f"{name} is not offered here")
            answer = await method(requests, call)
            code = grpc.StatusCode.OK
            return answer
        except Exception as error:
            service.count_refusal(refusal_reason(error))
            status = rpc_status.to_status(status_of(error))
            code = status.code
            await call.wait_written()
            await context.abort(code, status.details, status.trailing_metadata)
            raise  # never reached: abort raises
        finally:
            logger.info("%s %s %.1f ms", name, code.name, 1e3 * (time.perf_counter() - started_s))

    kind = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[descriptor.client_streaming, descriptor.server_streaming]
    return kind(behaviour, request_deserializer=None, response_serializer=lambda message: message.SerializeToString())
