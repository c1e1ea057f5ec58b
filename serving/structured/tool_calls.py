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


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """Free text before the answer: `begin`, any text, `end`, and `after`. is_open: `begin` stands in the prompt already,
    and the text must come; otherwise all of it may be left out. Some line feeds may follow where `after` is empty."""

    begin: str
    end: str
    after: str = ""
    is_open: bool


def tagged_json(
    tags: Sequence[TaggedJson],
    tokenizer: Tokenizer,
    *,
    min_calls: int = 1,
    max_calls: int | None = 1,
    separator: str = "",
    trigger: str | None = None,
    before: str = "",
    after: str = "",
    otherwise: TaggedJson | None = None,
    reasoning: Reasoning | None = None,
) -> StructuredOutput:
    """A text of min_calls to max_calls (None: any number of) tags, each one of `tags`, with `separator` between them.

    With `trigger`, which every `begin` must start with, any text may come before, between and after them, but once it
    holds the trigger a tag follows. Without it, `before` and `after` stand around all tags, `otherwise` may stand in
    their place, and `reasoning` comes first. Control tokens in all these texts are those tokens, the rest is text.
    Raises RequestError, as for a schema that is none.
    """
    if not tags:
        raise RequestError("structured.tags", "is empty")
    if not 0 <= min_calls <= (min_calls if max_calls is None else max_calls) or max_calls == 0:
        raise RequestError("structured.min_calls", f"{min_calls} and max_calls={max_calls} allow no call")
    if trigger is None and min_calls == 0:
        raise RequestError("structured.min_calls", "is 0, which needs a trigger: no call is then any text")
    if trigger is not None and separator:
        raise RequestError("structured.separator", f"{shown(separator)} contradicts trigger: any text may stand there")
    assert trigger is None or not (before or after or otherwise or reasoning), "a trigger goes with none of these"
    rules = []
    for i, tag in enumerate(tags):
        begin = tag.begin
        if trigger is not None:
            if not trigger or not begin.startswith(trigger):
                raise RequestError(
                    f"structured.tags[{i}].begin", f"{shown(begin)} must start with trigger={shown(trigger)}"
                )
            begin = begin.removeprefix(trigger)
        rules.append(f"tag_{i}: {_terms(begin, tokenizer)} {_json(tag.schema)} {_terms(tag.end, tokenizer)}")
    rules.append("tag: " + " | ".join(f"tag_{i}" for i in range(len(tags))))
    if trigger is None:
        more = "" if max_calls is None else max_calls - 1
        again = f" ({_terms(separator, tokenizer)} tag){{{min_calls - 1},{more}}}" if more != 0 else ""
        rules.append(f"tags: {_terms(before, tokenizer)} tag{again} {_terms(after, tokenizer)}")
        answer = "tags"
        if otherwise is not None:
            begin, end = _terms(otherwise.begin, tokenizer), _terms(otherwise.end, tokenizer)
            rules.append(f"other: {begin} {_json(otherwise.schema)} {end}")
            answer = "(tags | other)"
        rules += _reasoning_rules(reasoning, answer, tokenizer)
    else:
        rules += _trigger_rules(trigger, tokenizer)
        rules.append(f"start: call{{{min_calls},{'' if max_calls is None else max_calls}}} rest")
        rules.append(f"rest: {_FREE_TEXT}")
    return StructuredOutput.grammar("\n".join(rules))


def _json(schema: Mapping[str, Any] | bool) -> str:
    """A schema as a term. What Lark rules have a meaning for is escaped inside its strings, where alone it can be."""
    text: str = StructuredOutput.json_schema(schema).value
    if text in ("true", "false"):
        text = f'{{"anyOf":[{text}]}}'
    return "%json " + text.replace("%", "\\u0025").replace("=", "\\u003d")


def _reasoning_rules(reasoning: Reasoning | None, answer: str, tokenizer: Tokenizer) -> list[str]:
    if reasoning is None:
        return [f"start: {answer}"]
    pieces = _pieces(reasoning.end, tokenizer)
    assert len(pieces) == 1, reasoning
    if isinstance(pieces[0], int):
        rules = [f"thought: {_FREE_TEXT} <[{pieces[0]}]>"]
    else:
        rules = [f"thought[lazy]: THOUGHT {json.dumps(reasoning.end)}", f"THOUGHT: {_FREE_TEXT}"]
    gap = _terms(reasoning.after, tokenizer) if reasoning.after else r"/\n{0,4}/"
    rest = f"thought {gap}"
    begin = "" if reasoning.is_open else f"{_terms(reasoning.begin, tokenizer)} "
    return [*rules, f"reasoning: {begin}{rest}", f"start: reasoning{'' if reasoning.is_open else '?'} {answer}"]


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
