"""Logs as one JSON object a line, without anything that a client sent or got.

What may be logged is listed, not what may not: a record's own text only from our loggers, where it is a fixed name or
names files; fields only by the names in FIELDS. A message of another library may quote a prompt or a key, so only where
it came from is kept, and of an exception only its type and where it was raised.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from absl import logging as absl_logging

from serving.observer import EngineObserver, RequestRecord

OWN_LOGGERS = ("serving", "layers", "pallas_kernels", "sharding", "checkpoints", "configs")
FIELDS = frozenset(
    {
        *(
            "request_id",
            "response_id",
            "trace_id",
            "span_id",
            "tenant",
            "operation",
            "model",
            "method",
            "route",
            "status_code",
            "reason",
        ),
        *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_completions", "num_preemptions"),
        *("finish_reasons", "duration_s", "queue_s", "time_to_first_token_s", "decode_s", "stacks"),
    }
)
MAX_CHARS = 256  # of a field but `stacks`: request ids and tenants come from clients

request_logger = logging.getLogger("serving.requests")


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: time, level, logger, event, and what `extra={"fields": {...}}` gives of FIELDS."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name.split(".")[0] in OWN_LOGGERS:
            entry["event"] = record.getMessage()
            entry |= shown_fields(record)
        else:
            entry["event"] = "message of a library"
        entry["source"] = f"{record.module}:{record.lineno}"
        if record.exc_info and record.exc_info[1] is not None:
            entry["exceptions"] = _exceptions(record.exc_info[1])
        return json.dumps(entry, ensure_ascii=True)


def shown_fields(record: logging.LogRecord) -> dict[str, object]:
    """What `extra={"fields": {...}}` gave of FIELDS."""
    fields = getattr(record, "fields", {})
    return {name: _shown(name, value) for name, value in fields.items() if name in FIELDS}


def _shown(name: str, value: object) -> object:
    if isinstance(value, str):
        return value if name == "stacks" or len(value) <= MAX_CHARS else value[:MAX_CHARS] + "..."
    if isinstance(value, list | tuple):
        return [_shown(name, item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None  # JSON has no other numbers
    return type(value).__name__


def _exceptions(error: BaseException | None) -> list[dict[str, object]]:
    """The exception, then what caused it: types and places. Their texts may quote the values that were wrong."""
    found: list[dict[str, object]] = []
    while error is not None and len(found) < 8:
        found.append({"type": type(error).__qualname__, "stack": _places(error.__traceback__)})
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _places(trace: TracebackType | None) -> list[str]:
    frames = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


def use_json_logs(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send every log record to `stream` (standard error) as JSON, and nowhere else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for logger in list(logging.root.manager.loggerDict.values()):  # libraries that set up handlers of their own
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True


def use_text_logs() -> None:
    """Let absl's log lines end with the fields of their event."""
    absl_logging.get_absl_handler().setFormatter(_TextFormatter())


class _TextFormatter(absl_logging.PythonFormatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={value}" for name, value in shown_fields(record).items() if value is not None]
        return " ".join([super().format(record), *fields])


class RequestLog(EngineObserver):
    """A line for each request that has ended."""

    def request_finished(self, record: RequestRecord) -> None:
        if request_logger.isEnabledFor(logging.INFO):
            request_logger.info("request_finished", extra={"fields": request_fields(record)})


def request_fields(record: RequestRecord) -> Mapping[str, object]:
    """What is logged of a request: ids, counts and durations in seconds."""
    completions, trace = record.completions, record.context.trace
    slots = [c.first_scheduled_time_s for c in completions if c.first_scheduled_time_s is not None]
    firsts = [c.first_token_time_s for c in completions if c.first_token_time_s is not None]
    lasts = [c.last_token_time_s for c in completions if c.last_token_time_s is not None]
    arrival_s = record.arrival_time_s
    return {
        "request_id": record.request_id,
        "trace_id": trace.trace_id if trace is not None else None,
        "span_id": trace.span_id if trace is not None else None,
        "tenant": record.context.tenant,
        "operation": record.context.operation,
        "num_completions": len(completions),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_output_tokens": record.num_output_tokens,
        "num_preemptions": sum(completion.num_preemptions for completion in completions),
        "finish_reasons": [str(completion.finish_reason) for completion in completions],
        "duration_s": max(completion.finish_time_s for completion in completions) - arrival_s,
        "queue_s": min(slots) - arrival_s if slots else None,
        "time_to_first_token_s": min(firsts) - arrival_s if firsts else None,
        "decode_s": max(lasts) - min(firsts) if firsts else None,
    }
