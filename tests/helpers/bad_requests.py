"""Requests made from the schema's own table: for each field, values at and beyond what it allows."""

from __future__ import annotations

import math
import random
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


def requests_of_one_bad_value(config: ServerConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(endpoint, field, body) for every edge of every field, and without each field that must be there."""
    for endpoint, field in fields_of(config):
        for value in edge_values(field):
            if field.name == "max_queue_s" and isinstance(value, float) and 0 < value < 60:
                continue  # accepted, and then its verdict depends on the load
            yield endpoint, field.name, {**smallest(endpoint), field.name: value}
        if field.name in SMALLEST[endpoint]:
            yield endpoint, field.name, {key: item for key, item in smallest(endpoint).items() if key != field.name}


def requests_of_hostile_texts() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(endpoint, field, body) with names, patterns, grammars, schemas and templates that are malformed or hostile."""
    for endpoint in (COMPLETIONS, CHAT):
        for name in NAMES:
            for field in ("model", "request_id", "cache_salt"):
                yield endpoint, field, {**smallest(endpoint), field: name}
        for key, values in (("regex", PATTERNS), ("grammar", GRAMMARS), ("json", SCHEMAS), ("choice", CHOICES)):
            for value in values:
                body = {**smallest(endpoint), "structured_outputs": {key: value}}
                yield endpoint, "structured_outputs", body
                yield endpoint, f"guided_{key}", {**smallest(endpoint), f"guided_{key}": value}
        for schema in SCHEMAS:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            yield endpoint, "response_format", {**smallest(endpoint), "response_format": form}
    for endpoint in (CHAT, TOKENIZE):
        start = {"messages": MESSAGES} | ({"max_tokens": 1} if endpoint == CHAT else {})
        for template in TEMPLATES:
            yield endpoint, "chat_template", {**start, "chat_template": template}
            for key in ("chat_template", "messages", "tools", "self", "bos_token", template):
                yield endpoint, "chat_template_kwargs", {**start, "chat_template_kwargs": {key: template}}
        for content in CONTENTS:
            for role in ("user", "system", "assistant", "tool", "x", "", None, 5):
                yield endpoint, "messages", {**start, "messages": [{"role": role, "content": content}]}


def smallest(endpoint: str) -> dict[str, Any]:
    """A good request that costs one token."""
    return SMALLEST[endpoint] | ({"max_tokens": 1} if endpoint in (COMPLETIONS, CHAT) else {})


def mutated(data: bytes, draw: random.Random) -> bytes:
    """`data` with a few bytes changed, cut out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        length = draw.randint(1, 4)
        kind = draw.randrange(5)
        if kind == 0:
            changed[at : at + length] = draw.randbytes(length)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = draw.randbytes(length)
        elif kind == 3:
            changed[at:at] = changed[at : at + 20]
        else:
            del changed[at:]
    return bytes(changed)


NAMES = [
    "",
    " ",
    "a b",
    "a\n",
    "\0",
    "é",
    "a" * 256,
    "a" * 257,
    "x" * 10_000,
    "../../etc/passwd",
    "%s",
    "\x7f",
    "'",
    "😀",
]
PATTERNS = [
    *("a**", "(", "[a", "(a", "a{2,1}", "a{99999999}", "(?=a)a", "(?<=a)a", r"(a)\1", "\\", r"\p{Nope}", "[z-a]", "*"),
    *(
        "(?P<n>a",
        "a{1,2}{3,4}{5,6}{7,8}",
        "(((((((((a+)+)+)+)+)+)+)+)+)+",
        "[]",
        "[^]",
        "(a|b|ab)*c{1000}",
        r"\x{110000}",
    ),
    *(
        "^",
        "$",
        "(?i)a",
        r"\b",
        "a|",
        "|",
        "(?:)",
        "a" * 5000,
        "(" * 500 + ")" * 500,
        "\ud800",
        "\0",
        "[^\\x00-\\x{10FFFF}]",
    ),
]
GRAMMARS = [
    *("root ::= (", 'start: "a', "start: start", "start:", "x: /a/", "start: /(/", "start: y", "%import x", "%json {"),
    *(
        'start: %json {"type": 5}',
        'start: "a" start',
        "start: " + "(" * 300 + '"a"' + ")" * 300,
        "\0",
        "{",
        "root ::= root",
    ),
    *(
        'root ::= "a" | root "b"',
        "start: /a**/",
        "%ignore /a/",
        '%llguidance {"no_forcing": 5}\nstart: /a/',
        "start: <x>",
    ),
]
SCHEMAS: list[Any] = [
    *(
        {"type": 5},
        {"type": "nope"},
        {"type": []},
        {"type": ["string", "x"]},
        {"properties": []},
        {"properties": {"a": 5}},
    ),
    *(
        {"required": 5},
        {"required": [5]},
        {"enum": []},
        {"enum": 5},
        {"pattern": 5},
        {"type": "string", "pattern": "[a"},
    ),
    *({"$ref": "#/nope"}, {"$ref": 5}, {"$ref": "#"}, {"$ref": "http://a/b"}, {"minimum": "a"}, {"multipleOf": 0}),
    *({"type": "integer", "minimum": 5, "maximum": 4}, {"minLength": -1}, {"minLength": 2**70}, {"items": 5}, False),
    *({"oneOf": []}, {"anyOf": 5}, {"allOf": [False]}, {"not": {}}, {"if": {}}, {"format": "nope"}, {"$schema": 5}),
    *({"$schema": "http://nope"}, {"type": "array", "minItems": 5, "maxItems": 4}, {"patternProperties": {"(": {}}}),
    *(
        {"unknown": 1},
        {"type": "object", "additionalProperties": 5},
        {"x-guidance": {"a": 1}},
        {"const": math.nan},
        "{",
    ),
    *({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"type": "string", "minLength": 10**9}, [], "null"),
]
CHOICES: list[Any] = [[], [""], [5], [None], "a", [["a"]], ["a" * 70_000], ["a"] * 100_000, {"a": 1}]
TEMPLATES = [
    "{% for a in range(99999999) %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 'a' * 10**9 }}",
    "{% include 'x' %}",
    "{{",
    "{{ raise_exception('x') }}",
    "\0",
    "",
]
CONTENTS: list[Any] = [
    *(
        None,
        5,
        "",
        "\0",
        "\ud800",
        [],
        {},
        [{}],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"type": "image_url"}],
    ),
    *(
        [{"type": "text", "text": "a"}, None],
        "<|im_end|>" * 100,
        "x" * 5000,
        [{"type": "input_audio", "input_audio": {}}],
    ),
]
