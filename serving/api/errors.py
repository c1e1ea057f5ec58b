"""What can go wrong with a request beside RequestError, the same for every door."""

from __future__ import annotations

from serving.request import RequestError


class UnknownModelError(RequestError):
    """A model that is not served here."""


class NotFoundError(RequestError):
    """A file or a batch job that is not here."""


class OverloadedError(Exception):
    """As many requests are in flight as are accepted; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeoutError(Exception):
    """A request that was not begun in the time that it would wait."""


class UnavailableError(Exception):
    """No requests are taken now: the engine is loading, draining or dead. `retry_after_s`: None where it is dead."""

    def __init__(self, message: str, *, retry_after_s: int | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GivenUpError(UnavailableError):
    """A request that ran, and was given up because the server stops or its engine is dead."""


class GenerationError(Exception):
    """A request that failed while it ran, through a fault that is not its client's."""


def refusal_reason(error: Exception) -> str | None:
    """What a request that ended with `error` was refused for, as `Service.count_refusal` takes it. None: it ran."""
    match error:
        case RequestError():
            return "invalid"
        case OverloadedError() | QueueTimeoutError():
            return "overloaded"
        case GivenUpError():
            return None
        case UnavailableError():
            return "unavailable"
    return None
