"""Errors as gRPC has them: a status code, a message, and google.rpc details."""

from __future__ import annotations

import logging

from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from serving.api.errors import (
    GenerationError,
    NotFoundError,
    OverloadedError,
    QueueTimeoutError,
    UnavailableError,
    UnknownModelError,
)
from serving.request import RequestError

logger = logging.getLogger(__name__)


class GrpcError(Exception):
    """An error that only gRPC knows, with its google.rpc.Code."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


def status_of(error: Exception) -> status_pb2.Status:
    """What `error` is for gRPC. A fault of ours is logged, and told without its details."""
    match error:
        case GrpcError():
            return _status(error.code, str(error))
        case UnknownModelError() | NotFoundError():
            return _status(code_pb2.NOT_FOUND, str(error))
        case RequestError():
            reason = str(error).removeprefix(f"{error.field}: ")
            violation = {"field": error.field, "description": reason}
            return _status(
                code_pb2.INVALID_ARGUMENT, str(error), error_details_pb2.BadRequest(field_violations=[violation])
            )
        case OverloadedError():
            return _status(code_pb2.RESOURCE_EXHAUSTED, str(error), _retry(error.retry_after_s))
        case QueueTimeoutError():
            return _status(code_pb2.DEADLINE_EXCEEDED, str(error))
        case UnavailableError():
            details = () if error.retry_after_s is None else (_retry(error.retry_after_s),)
            return _status(code_pb2.UNAVAILABLE, str(error), *details)
        case GenerationError():
            return _status(code_pb2.INTERNAL, str(error))
    logger.error("a call failed through a fault of the server", exc_info=error)
    return _status(code_pb2.INTERNAL, "the server failed; its log says why")


def _status(code: int, message: str, *details: Message) -> status_pb2.Status:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code, message=message, details=packed)


def _retry(seconds: int) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay={"seconds": seconds})
