"""Prompts of the command line: a JSON Lines file or one text, checked whole before anything runs.

A line is an object with exactly one of `prompt` (text), `prompt_token_ids` (list of ints) and `messages` (a chat:
list of `{"role": ..., "content": ...}`), and any fields of SamplingParams by their names.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.request import RequestError, SamplingParams, StructuredOutput

SOURCES = ("prompt", "prompt_token_ids", "messages")
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One prompt. `source` is the key it came under and `value` what stood there; `where` names it in messages."""

    where: str
    source: str
    value: Any
    sampling: dict[str, Any]  # the SamplingParams fields that were given; the model's defaults lie under them

    @property
    def engine_prompt(self) -> dict[str, Any]:
        """The prompt as `LLM.generate` takes it."""
        return {self.source: self.value}

    @property
    def shown(self) -> str:
        """The prompt in one line for people: its text, its ids, or the last message of a chat."""
        text = self.value[-1]["content"] if self.source == "messages" else self.value
        return " ".join(str(text).split())


def single_prompt(text: str, sampling: dict[str, Any]) -> PromptLine:
    """The prompt of `--prompt`. Raises RequestError."""
    return _prompt_line({"prompt": text}, sampling, where="--prompt")


def read_prompts(path: Path, sampling: dict[str, Any]) -> list[PromptLine]:
    """Every prompt of a JSON Lines file; a line's own sampling fields win over `sampling`. Empty lines are skipped.

    Raises RequestError naming file, line and field, and OSError if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(str(path), f"is not UTF-8: {error}") from None
    lines = []
    # not splitlines(): JSON strings may hold U+2028 and other characters that it would split at
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            lines.append(_prompt_line(_parse_object(line, where), sampling, where=where))
    if not lines:
        raise RequestError(str(path), "holds no prompts")
    return lines


def _parse_object(line: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                raise ValueError(f"key {key[:80]!r} is given twice")
            fields[key] = value
        return fields

    try:
        value = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise RequestError(where, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(where, f"must be an object, got {type(value).__name__}")
    return value


def _prompt_line(fields: dict[str, Any], sampling: dict[str, Any], *, where: str) -> PromptLine:
    for name in fields:
        if name not in SOURCES and name not in SAMPLING_FIELDS:
            raise RequestError(where, f"unknown field {name[:80]!r}; known: {', '.join((*SOURCES, *SAMPLING_FIELDS))}")
    given = [name for name in SOURCES if name in fields]
    if len(given) != 1:
        raise RequestError(where, f"needs exactly one of {', '.join(SOURCES)}; got {', '.join(given) or 'none'}")
    source = given[0]
    own = {name: value for name, value in fields.items() if name != source}
    try:
        _check_source(source, fields[source])
        if isinstance(own.get("logit_bias"), dict):  # JSON keys are strings
            own["logit_bias"] = _bias_by_id(own["logit_bias"])
        if own.get("structured") is not None:
            own["structured"] = StructuredOutput.from_fields(own["structured"])
        SamplingParams(**{**sampling, **own})
    except RequestError as error:
        raise RequestError(where, str(error)) from None
    return PromptLine(where=where, source=source, value=fields[source], sampling={**sampling, **own})


def _bias_by_id(bias: dict[str, Any]) -> dict[int, Any]:
    by_id = {_token_id(key): value for key, value in bias.items()}
    if len(by_id) < len(bias):  # as "1" and "01"
        raise RequestError("logit_bias", "an id is given twice")
    return by_id


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > 10:
        raise RequestError("logit_bias", f"key {key[:80]!r} is not a token id")
    return int(key)


def _check_source(source: str, value: Any) -> None:
    if source == "prompt":
        if not isinstance(value, str):
            raise RequestError(source, f"must be text, got {type(value).__name__}")
    elif source == "prompt_token_ids":
        if not isinstance(value, list) or not value:
            raise RequestError(source, "must be a list of token ids that is not empty")
        for index, token_id in enumerate(value):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise RequestError(f"{source}[{index}]", f"must be a token id, got {str(token_id)[:80]!r}")
    else:
        if not isinstance(value, list) or not value:
            raise RequestError(source, "must be a list of messages that is not empty")
        for index, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f"{source}[{index}]", "must be an object with role and content")
