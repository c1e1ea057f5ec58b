"""Errors as HTTP answers in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from serving.api.errors import (
    GenerationError,
    NotFoundError,
    OverloadedError,
    QueueTimeoutError,
    UnavailableError,
    UnknownModelError,
    refusal_reason,
)
from serving.request import RequestError

if TYPE_CHECKING:  # batch files have these errors without a server
    from starlette.responses import JSONResponse

logger = logging.getLogger(__name__)


class HttpError(Exception):
    """An error that only HTTP knows, with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})


def http_error(error: Exception) -> HttpError:
    """What `error` is for HTTP. A fault of ours is logged, and told without its details."""
    match error:
        case HttpError():
            return error
        case UnknownModelError():
            return HttpError(404, str(error), param="model", code="model_not_found")
        case NotFoundError():
            return HttpError(404, str(error), param=error.field, code="not_found")
        case RequestError():
            return HttpError(400, str(error), param=error.field)
        case OverloadedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return HttpError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case QueueTimeoutError():
            return HttpError(504, str(error), code="queue_timeout")
        case UnavailableError():
            headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
            return HttpError(503, str(error), code="service_unavailable", headers=headers)
        case GenerationError():
            return HttpError(500, str(error), code="generation_failed")
    logger.error("a request failed through a fault of the server", exc_info=error)
    return HttpError(500, "the server failed; its log says why", code="internal_error")


def http_refusal_reason(error: Exception) -> str | None:
    """`refusal_reason`, of errors that only HTTP knows too."""
    if not isinstance(error, HttpError):
        return refusal_reason(error)
    return {401: "unauthorized", 413: "too_large", 431: "too_large"}.get(error.status, "invalid")


def error_body(error: HttpError) -> dict[str, Any]:
    types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = types.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> JSONResponse:
    from starlette.responses import JSONResponse

    known = http_error(error)
    return JSONResponse(error_body(known), status_code=known.status, headers=known.headers)
