"""Grammars for JSON inside a text of fixed form, such as the tool calls of a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.request import RequestError, StructuredOutput, shown
from serving.text.tokenizer import Tokenizer

_FREE_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, kw_only=True)
class TaggedJson:
    """`begin`, then JSON that `schema` accepts, then `end`: `<tool_call>{"name": "f", "arguments": `, the schema of f's
    arguments, `}</tool_call>`."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str = ""


def tagged_json(
    tags: Sequence[TaggedJson],
    tokenizer: Tokenizer,
    *,
    min_calls: int = 1,
    max_calls: int | None = 1,
    separator: str = "",
    trigger: str | None = None,
) -> StructuredOutput:
    """A text of min_calls to max_calls (None: any number of) tags, each one of `tags`, with `separator` between them.

    With `trigger`, which every `begin` must start with, any text may come before, between and after them, but once it
    holds the trigger a tag follows. Control tokens in `begin`, `end`, `separator` and `trigger` are those tokens, the
    rest is text. Raises RequestError, as for a schema that is none.
    """
    if not tags:
        raise RequestError("structured.tags", "is empty")
    if not 0 <= min_calls <= (min_calls if max_calls is None else max_calls) or max_calls == 0:
        raise RequestError("structured.min_calls", f"{min_calls} and max_calls={max_calls} allow no call")
    if trigger is None and min_calls == 0:
        raise RequestError("structured.min_calls", "is 0, which needs a trigger: no call is then any text")
    if trigger is not None and separator:
        raise RequestError("structured.separator", f"{shown(separator)} contradicts trigger: any text may stand there")
    rules = []
    for i, tag in enumerate(tags):
        begin = tag.begin
        if trigger is not None:
            if not trigger or not begin.startswith(trigger):
                raise RequestError(
                    f"structured.tags[{i}].begin", f"{shown(begin)} must start with trigger={shown(trigger)}"
                )
            begin = begin.removeprefix(trigger)
        schema = StructuredOutput.json_schema(tag.schema).value
        if schema in ("true", "false"):
            schema = f'{{"anyOf":[{schema}]}}'
        rules.append(f"tag_{i}: {_terms(begin, tokenizer)} %json {schema} {_terms(tag.end, tokenizer)}")
    rules.append("tag: " + " | ".join(f"tag_{i}" for i in range(len(tags))))
    if trigger is None:
        more = "" if max_calls is None else max_calls - 1
        again = f" ({_terms(separator, tokenizer)} tag){{{min_calls - 1},{more}}}" if more != 0 else ""
        rules.append(f"start: tag{again}")
    else:
        rules += _trigger_rules(trigger, tokenizer)
        rules.append(f"start: call{{{min_calls},{'' if max_calls is None else max_calls}}} rest")
        rules.append(f"rest: {_FREE_TEXT}")
    return StructuredOutput.grammar("\n".join(rules))


def _trigger_rules(trigger: str, tokenizer: Tokenizer) -> list[str]:
    pieces = _pieces(trigger, tokenizer)
    if len(pieces) != 1:
        raise RequestError("structured.trigger", f"{shown(trigger)} must be one control token or text without any")
    if isinstance(pieces[0], int):
        return [f"call: {_FREE_TEXT} <[{pieces[0]}]> tag"]
    return [f"text_to_call[lazy]: TEXT {json.dumps(trigger)}", f"TEXT: {_FREE_TEXT}", "call: text_to_call tag"]


def _pieces(text: str, tokenizer: Tokenizer) -> list[str | int]:
    pieces: list[str | int] = []
    for piece in tokenizer.split_special_text(text):
        if isinstance(piece, int) and piece not in tokenizer.special_token_ids:
            piece = tokenizer.token_text(piece)  # a token that reads as text
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        elif piece != "":
            pieces.append(piece)
    return pieces


def _terms(text: str, tokenizer: Tokenizer) -> str:
    """A text as terms of a Lark rule; the empty text as a term too."""
    pieces = _pieces(text, tokenizer) or [""]
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)
