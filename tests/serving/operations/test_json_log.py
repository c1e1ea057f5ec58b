"""Logs as JSON lines, and that nothing of a client gets into them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings

import pytest

from serving.operations.json_log import FIELDS, RequestLog, use_json_logs
from serving.request import RequestError, SamplingParams


@pytest.fixture
def stream():
    """Where JSON logs go meanwhile; all loggers are as before afterwards."""
    root = logging.getLogger()
    loggers = [root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    stream = io.StringIO()
    use_json_logs(stream)
    yield stream
    logging.captureWarnings(False)
    for logger, handlers, propagate, level in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_finished_request_is_one_line_of_ids_counts_and_durations(stream, record):
    RequestLog().request_finished(record)
    (line,) = lines(stream)
    assert line.pop("time").endswith("+00:00")
    assert line.pop("source").startswith("json_log:")
    assert line == {
        "level": "info",
        "logger": "serving.requests",
        "event": "request_finished",
        "request_id": "request-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "tenant": "acme",
        "operation": "chat",
        "num_completions": 2,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
        "num_output_tokens": 7,
        "num_preemptions": 1,
        "finish_reasons": ["length", "length"],
        "duration_s": 7.0,
        "queue_s": 1.0,
        "time_to_first_token_s": 3.0,
        "decode_s": 3.0,
    }


def test_planted_secrets_do_not_get_out(stream, record):
    secret = "SECRET-zx81"
    own, other = logging.getLogger("serving.api"), logging.getLogger("uvicorn.error")
    own.info("http_request", extra={"fields": {"status_code": 400, "prompt": secret, "authorization": secret}})
    own.info("odd_field", extra={"fields": {"route": {"key": secret}, "reason": [secret.encode(), 1.23456789]}})
    other.error("bad request %s", secret)
    other.error(f"bad request {secret}")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"strange value {secret}", UserWarning, stacklevel=1)
    try:
        try:
            SamplingParams(stop=secret * 1000)
        except RequestError as error:
            raise ValueError(f"cannot serve {secret}") from error
    except ValueError:
        own.exception("request_failed")
        other.exception("Exception in ASGI application: %s", secret)

    async def fails():
        raise RequestError("prompt", f"{secret} is empty")

    async def leave_an_error_behind():
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        del task  # asyncio logs "Task exception was never retrieved", with the exception's repr

    asyncio.run(leave_an_error_behind())
    RequestLog().request_finished(record)
    text = stream.getvalue()
    assert secret not in text and "planted-stop" not in text
    found = lines(stream)
    assert [line["event"] for line in found if line["logger"] == "serving.api"] == [
        "http_request",
        "odd_field",
        "request_failed",
    ]
    assert found[0]["status_code"] == 400 and "prompt" not in found[0]
    assert found[1]["route"] == "dict" and found[1]["reason"] == ["bytes", 1.234568]
    assert "asyncio" in {line["logger"] for line in found} and "py.warnings" in {line["logger"] for line in found}
    failed = next(line for line in found if line["event"] == "request_failed")
    assert [entry["type"] for entry in failed["exceptions"]] == ["ValueError", "RequestError"]
    assert any("__post_init__" in place for place in failed["exceptions"][1]["stack"])


def test_a_record_is_one_line_whatever_is_in_it(stream):
    fields = {"request_id": 'a"\n\u2028\x00{}', "tenant": "x" * 5000, "duration_s": float("nan"), "stacks": "a\nb"}
    logging.getLogger("serving").warning("two\nlines", extra={"fields": fields})
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["request_id"] == fields["request_id"] and len(found["tenant"]) == 259
    assert found["stacks"] == "a\nb" and found["duration_s"] is None


def test_no_field_is_named_as_what_clients_send():
    assert not FIELDS & {"prompt", "messages", "text", "content", "stop", "api_key", "authorization", "token_ids"}
