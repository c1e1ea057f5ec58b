"""JSON of a client's, decoded without the freedoms of Python's decoder."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from serving.request import RequestError, shown

# A string (to its end, or to the end of the text where that is missing), or a bracket. Possessive: no backtracking.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(data: bytes, *, max_depth: int, name: str = "body") -> dict[str, Any]:
    """The JSON object in `data` (UTF-8).

    Refused as RequestError of field `name`: what is no JSON, a key given twice in an object, NaN and infinities
    (1e999 too), values more than `max_depth` deep inside each other, halves of surrogate pairs, and any value but
    an object.
    """
    _check_depth(data, max_depth, name)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_short_int,
        )
    except UnicodeDecodeError as error:
        raise RequestError(name, f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(name, f"is not JSON: {error}") from None
    except ValueError as error:
        raise RequestError(name, str(error)) from None
    if not isinstance(value, dict):
        raise RequestError(name, f"must be a JSON object, got {shown(value)}")
    if _SURROGATE_ESCAPE.search(data):
        _check_surrogates(value, name)
    return value


def _check_depth(data: bytes, max_depth: int, name: str) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        first = data[match.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise RequestError(name, f"holds values more than {max_depth} deep inside each other")
        elif first in b"]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"has the key {shown(key)} twice in one object")
            seen.add(key)
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"holds {text}, which is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds a number beyond the range of floats: {text[:40]}")
    return value


def _short_int(text: str) -> int:
    if len(text) > 400:  # the largest float has 309 digits; longer ones are slow to read and mean nothing here
        raise ValueError(f"holds an integer of {len(text)} digits")
    return int(text)


def _check_surrogates(value: Any, name: str) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, str) and not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
            raise RequestError(name, f"holds half of a surrogate pair: {shown(item)}")
