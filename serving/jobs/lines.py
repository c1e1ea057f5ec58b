"""Lines of OpenAI's batch files: read, answered, written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from configs.scheduling import MAX_PRIORITY
from configs.server import ServerConfig
from serving.api.errors import OverloadedError, UnavailableError, refusal_reason
from serving.api.fields import Text, check_keys
from serving.api.http_errors import error_body, http_error
from serving.api.service import Service
from serving.api.strict_json import decode_object
from serving.request import RequestContext, RequestError, shown

URLS = ("/v1/completions", "/v1/chat/completions")
BATCH_CONTEXT = RequestContext(priority=MAX_PRIORITY)  # of lines that say nothing of theirs: the last class
ENVELOPE_BYTES = 4096  # of a line around the body of its request


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LineAnswer:
    """What HTTP would have answered."""

    status_code: int
    body: dict[str, Any]
    request_id: str

    @property
    def is_error(self) -> bool:
        return self.status_code != 200

    def body_bytes(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False, allow_nan=False).encode()


def read_line(data: bytes, config: ServerConfig) -> BatchLine:
    """Raises RequestError, of field "line" for what is no JSON object. The body is checked when it is answered."""
    value = decode_object(data, max_depth=config.max_json_depth + 1, name="line")
    keys = ("custom_id", "method", "url", "body")
    given = check_keys("line", value, keys, keys)
    if given["method"] != "POST":
        raise RequestError("line.method", f"must be POST, got {shown(given['method'])}")
    if given["url"] not in URLS:
        raise RequestError("line.url", f"must be one of {', '.join(URLS)}; got {shown(given['url'])}")
    if not isinstance(given["body"], dict):
        raise RequestError("line.body", f"must be an object, got {shown(given['body'])}")
    custom_id = Text(config.max_id_chars).read("line.custom_id", given["custom_id"])
    return BatchLine(custom_id=custom_id, url=given["url"], body=given["body"])


class TooLongError(RequestError):
    """A line over the limit; what follows it is not read."""

    def __init__(self, number: int, limit: int):
        super().__init__("line", f"has more than {limit} bytes")
        self.number = number


def input_lines(file: BinaryIO, config: ServerConfig) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not blank. Raises TooLongError."""
    limit = config.max_body_bytes + ENVELOPE_BYTES
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise TooLongError(number, limit)
        if line.strip():
            yield number, line


@dataclass(frozen=True, kw_only=True)
class LineProblem:
    """Why a file was refused: OpenAI's `errors.data` of a batch."""

    code: str
    message: str
    param: str | None
    line: int | None


def check_lines(
    file: BinaryIO, config: ServerConfig, url: str | None, max_problems: int
) -> tuple[int, list[LineProblem]]:
    """How many lines there are, and what is wrong with them. `url`: the one that all must have."""
    problems: list[LineProblem] = []
    seen: set[str] = set()
    num_lines = 0
    try:
        for number, data in input_lines(file, config):
            num_lines += 1
            try:
                if num_lines > config.max_batch_lines:
                    raise RequestError("line", f"is one over the {config.max_batch_lines} that are accepted")
                _check_line(read_line(data, config), url, seen)
            except RequestError as error:
                problems.append(_problem(error, number))
            if num_lines > config.max_batch_lines or len(problems) >= max_problems:
                break
    except TooLongError as error:
        problems.append(_problem(error, error.number))
    if num_lines == 0 and not problems:
        problems.append(LineProblem(code="empty_file", message="the file has no lines", param=None, line=None))
    return num_lines, problems


class _DuplicateError(RequestError):
    """A custom_id that an earlier line has."""


def _check_line(line: BatchLine, url: str | None, seen: set[str]) -> None:
    if url is not None and line.url != url:
        raise RequestError("line.url", f"is {line.url}, and the batch is for {url}")
    if line.custom_id in seen:
        raise _DuplicateError("line.custom_id", f"{shown(line.custom_id)} is an earlier line's")
    seen.add(line.custom_id)


def _problem(error: RequestError, number: int) -> LineProblem:
    code = "duplicate_custom_id" if isinstance(error, _DuplicateError) else "invalid_line"
    return LineProblem(code=code, message=str(error), param=error.field, line=number)


async def answer_request(
    service: Service,
    url: str,
    body: bytes | dict[str, Any],
    on_first_token: Callable[[], None] = lambda: None,
    *,
    context: RequestContext | None = None,
    may_be_overloaded: bool = False,
) -> LineAnswer:
    """What HTTP would answer. Raises UnavailableError alone, and where it may OverloadedError: another try may do
    better."""
    parsers = dict(zip(URLS, (service.parse_completion, service.parse_chat), strict=True))

    def parse() -> Any:
        if url not in parsers:
            raise RequestError("url", f"must be one of {', '.join(URLS)}; got {shown(url)}")
        value = decode_object(body, max_depth=service.config.max_json_depth) if isinstance(body, bytes) else body
        call = parsers[url](value)
        if call.stream is not None:
            raise RequestError("stream", "must be false in a batch")
        return call

    request_id = f"req-{uuid.uuid4().hex}"
    try:
        generation = await service.start(await service.in_text_thread(parse), context)
        answer = await generation.whole(on_first_token)
    except UnavailableError:
        raise
    except Exception as error:
        if may_be_overloaded and isinstance(error, OverloadedError):
            raise
        service.count_refusal(refusal_reason(error))
        known = http_error(error)
        return LineAnswer(status_code=known.status, body=error_body(known), request_id=request_id)
    return LineAnswer(status_code=200, body=answer, request_id=request_id)


def output_line(custom_id: str, answer: LineAnswer) -> bytes:
    """A line of the output or error file, without its end."""
    response = {"status_code": answer.status_code, "request_id": answer.request_id, "body": answer.body}
    return _line(custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request that was not run."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
