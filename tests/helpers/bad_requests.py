"""Requests made from the schema's own table: for each field, values at and beyond what it allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from configs.server import ServerConfig
from serving.api.fields import Choice, Field, Integer, Number, Only, Structure, Text, Texts, TokenIds, TokenNumbers
from serving.api.schema import CHAT, COMPLETIONS, DETOKENIZE, ENDPOINTS, TOKENIZE, request_fields

MESSAGES = [{"role": "user", "content": "a"}]
SMALLEST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [1]},
}
WRONG_TYPES: list[Any] = [None, True, "", "a", -1, 0, 1, 1.5, 2**63, -(2**63), 2**64, 10**300, math.nan, math.inf]
WRONG_TYPES += [[], [None], [[]], {}, {"a": 1}, [{}], [[[1]]], {"": None}, "\0", "é" * 50, "\ud800"]


def edge_values(field: Field) -> Iterator[Any]:
    """Values at and beyond what the kind of `field` allows."""
    kind = field.kind
    yield from WRONG_TYPES
    match kind:
        case Integer(low, high):
            yield from (low - 1, low, low + 1, high - 1, high, high + 1, float(low), str(high))
        case Number(low, high):
            yield from (low - 1, low, high, high + 1, math.nextafter(high, math.inf), math.nextafter(low, -math.inf))
        case Text(max_chars, _):
            yield from ("x" * max_chars, "x" * (max_chars + 1))
        case Texts(max_items, max_chars):
            yield from (["x"] * max_items, ["x"] * (max_items + 1), "x" * max_chars, ["x" * (max_chars + 1)], ["a", 1])
        case TokenIds(max_items, _):
            yield from ([0], [-1], [2**31 - 1], [2**31], [True], [1.0], ["1"], [1] * (max_items + 1))
        case TokenNumbers(max_items, low, high):
            yield from ({"1": high}, {"1": high * 2}, {"-1": 1}, {"AI": 1}, {"1.5": 1}, {"1": 1, "01": 1}, {"1": "x"})
            yield from ({"1": math.nan}, {"1": low}, {"9" * 30: 1}, {str(i): 1 for i in range(max_items + 1)})
        case Choice(values):
            yield from (*values, [*values])
        case Only(values, _):
            yield from values
        case Structure(_, examples):
            for example in examples:
                yield from (example, [example], {"a": example})
                if isinstance(example, dict):
                    for key in example:
                        yield from ({**example, key: bad} for bad in WRONG_TYPES)
                    yield {**example, "unknown_key": 1}


def fields_of(config: ServerConfig) -> list[tuple[str, Field]]:
    """(endpoint, field) of all there are."""
    return [(e, field) for e in ENDPOINTS for field in request_fields(config) if e in field.endpoints]
