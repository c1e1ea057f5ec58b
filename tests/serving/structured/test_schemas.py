"""Random texts that schemas let through are valid by another implementation; what is not enforced is refused by name."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest
from json_proofs import accepts

from serving.request import RequestError, StructuredOutput

_SHORT = {"type": "string", "maxLength": 4}

SUPPORTED: dict[str, Any] = {
    "true": True,
    "empty": {},
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "several types": {"type": ["integer", "null", "boolean"]},
    "integer range": {"type": "integer", "minimum": -5, "maximum": 17},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 103},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 1.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0},
    "multiple of a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern from start to end": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$", "maxLength": 12},
    "pattern somewhere": {"type": "string", "pattern": "ab|cd", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["a", 'quote " and \\', "é😀\n", 5, 1.5, None, True, [1, {"x": []}]]},
    "const": {"const": {"a": [1, None, "é"], "b": {}}},
    "array": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    "array lengths": {"type": "array", "items": _SHORT, "minItems": 2, "maxItems": 4},
    "tuple": {"prefixItems": [{"type": "integer"}, _SHORT], "items": False, "minItems": 2, "type": "array"},
    "tuple and more": {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": _SHORT},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "odd names": {
        "type": "object",
        "properties": {'q"\\': {"type": "null"}, "é😀\n": {"type": "null"}, "": {"type": "null"}},
        "required": ['q"\\', "é😀\n", ""],
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "map that is not empty": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "patterns of names": {
        "type": "object",
        "patternProperties": {"^x-": {"type": "integer"}, "^y[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "required and not described": {"type": "object", "required": ["k"], "additionalProperties": {"type": "integer"}},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string", "enum": ["x", "y"]}]},
    "oneOf of different types": {"oneOf": [{"type": "integer"}, {"type": "null"}, {"type": "array", "maxItems": 0}]},
    "oneOf of marked objects": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "v": schema},
                "required": ["kind", "v"],
                "additionalProperties": False,
            }
            for kind, schema in (("i", {"type": "integer"}), ("s", _SHORT))
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "definitions": {
        "$defs": {"p": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "ref with more": {"$defs": {"n": {"type": "integer", "minimum": 1}}, "$ref": "#/$defs/n", "maximum": 20},
    "recursive": {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    },
    "tuple of older drafts": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "null"}],
        "additionalItems": False,
    },
    "names of both kinds": {
        "type": "object",
        "properties": {"x-a": {"type": ["integer", "null"]}},
        "patternProperties": {"^x-": {"type": ["null", "boolean"]}},
        "required": ["x-a"],
        "additionalProperties": False,
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/s",
        "$comment": "c",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "x-order": 3,
        "type": "integer",
    },
}

# schema, and what the message must name
REFUSED: list[tuple[Any, str]] = [
    *(
        ({"type": "array", "items": {keyword: value}}, keyword)
        for keyword, value in {
            "not": {},
            "if": {},
            "then": {},
            "else": {},
            "dependentRequired": {},
            "dependentSchemas": {},
            "dependencies": {},
            "contains": {},
            "minContains": 1,
            "maxContains": 1,
            "uniqueItems": True,
            "propertyNames": {},
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
            "$dynamicRef": "#",
            "$recursiveRef": "#",
            "nullable": True,
            "divisibleBy": 2,
            "extends": {},
            "x-guidance": {"lenient": True},
            "minLenght": 3,
        }.items()
    ),
    ({"$defs": {"unused": {"not": {}}}}, "not"),
    ({"type": "object", "properties": {"a": {"anyOf": [{"not": {}}]}}}, "anyOf[0].not"),
    ({"type": "string", "format": "json-pointer"}, "json-pointer"),
    ({"type": "text"}, "text"),
    ({"type": "string", "pattern": 5}, "pattern"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "a**"}, "pattern"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "integer", "minimum": "1"}, "minimum"),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
    ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, "exclusiveMinimum"),
    ({"type": "number", "minimum": 2.5, "exclusiveMaximum": 3}, "exclusiveMaximum"),
    ({"enum": [1, [2**53 + 2]]}, "enum"),
    ({"const": 1e300}, "const"),
    ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "additionalItems"),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": "object", "properties": ["a"]}, "properties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported only where"),
    ({"enum": []}, "anyOf or enum is empty"),
    ({"enum": "a"}, "enum"),
    ({"anyOf": []}, "anyOf"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "incompatible types"),
    (False, "false"),
    ({"$ref": "#/$defs/none"}, "$ref: Pointer '/$defs/none'"),
    ({"$ref": "#none"}, "$ref: Anchor 'none'"),
    ({"patternProperties": {"a": {"type": "integer"}, "b": {"type": "null"}}}, "patternProperties"),
    ({"pattern": "[[:alpha:]]"}, "pattern: has '['"),
    ({"patternProperties": {"[a&&b]": {}}}, "patternProperties.[a&&b]: has '&&'"),
    ({"pattern": "x[a-z--b]"}, "pattern: has '--'"),
    ({"pattern": "[^]"}, "pattern: has an empty class"),
    ({"type": "string", "format": "date", "maxLength": 9}, "pattern, format, minLength and maxLength"),
    ({"type": "number", "allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "allOf[0].exclusiveMinimum"),
    ({"$defs": {"a": {"minimum": 1.5}}, "$ref": "#/$defs/a", "exclusiveMaximum": 2}, "exclusiveMaximum"),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$defs": {"text": {"type": "string"}},
            "oneOf": [{"type": "string"}, {"$ref": "#/$defs/text", "type": "integer"}],
        },
        "oneOf[1].type: beside $ref",
    ),
    ({"$ref": "https://example.com/schema.json"}, "https://example.com/schema.json"),
    ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
    ({"$ref": "#"}, "matches no text"),
    ({"items": 5}, "items"),
    ({"type": "integer", "multipleOf": 0}, "multiple of"),
    ({"type": "integer", "multipleOf": 999983}, "compile"),  # by time or by memory
]


def validate(schema: Any, value: Any) -> None:
    default = jsonschema.Draft202012Validator
    validator = jsonschema.validators.validator_for(schema, default) if isinstance(schema, dict) else default
    validator.check_schema(schema)
    validator(schema, format_checker=default.FORMAT_CHECKER).validate(value)


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_text_that_a_schema_lets_through_is_valid(compiler, random_text, name):
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    rng = random.Random(seed)
    grammar = compiler.compile(StructuredOutput.json_schema(SUPPORTED[name]))
    texts = [text for text in (random_text(grammar, rng) for _ in range(12)) if text is not None]
    assert len(texts) >= 6
    for text in texts:
        # RFC 3339 has second 60; rfc3339-validator, which jsonschema asks where it is installed, does not.
        validate(SUPPORTED[name], json.loads(re.sub(r"(:\d\d):60", r"\1:59", text) if "time" in name else text))


@pytest.mark.parametrize(("schema", "part"), REFUSED, ids=[f"{part}-{i}" for i, (_, part) in enumerate(REFUSED)])
def test_what_would_not_be_enforced_is_refused_by_name(compiler, schema, part):
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError) as refused:
            compiler.compile(StructuredOutput.json_schema(schema))
        assert refused.value.field.startswith("structured") and part in str(refused.value)


DRAFT7 = "http://json-schema.org/draft-07/schema#"
HOST = ".".join(["a" * 62] * 4)  # of 251 characters

# schema, values that it accepts, values that it does not
EXACT: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "0001-12-31", "1999-02-28", "1999-11-30"],
        [
            "2023-02-29",
            "1900-02-29",
            "2024-02-30",
            "0000-01-01",
            "1999-11-31",
            "1999-13-01",
            "1999-1-01",
            "02024-01-01",
        ],
    ),
    (
        {"format": "time"},
        ["23:59:59Z", "00:00:00.123z", "12:30:00+23:59", "12:30:00-00:00", 5],
        ["23:59:60Z", "12:00:60Z", "24:00:00Z", "12:00:00", "12:00Z", "12:00:00+24:00", "12:00:00.Z"],
    ),
    (
        {"format": "date-time", "pattern": "^20", "type": ["string", "null"]},
        ["2024-02-29T00:00:00Z", "2023-02-28t23:59:59.5-01:00", None],
        ["1999-01-01T00:00:00Z", "2023-02-29T00:00:00Z", "2024-02-29T00:00:60Z", "2024-02-29 00:00:00Z", 5],
    ),
    ({"allOf": [{"format": "time"}], "format": "date"}, [1], ["2024-02-28", "12:00:00Z"]),
    ({"type": "string", "format": "hostname"}, ["a.b-c.d", f"{HOST}.a"], [f"{HOST}.aa", "a..b", "-a", "a-", "a_b"]),
    ({"type": "string", "format": "hostname", "maxLength": 3}, ["a.b"], ["a.bc"]),
    *(
        (
            {"$schema": DRAFT7} | {keyword: schema[keyword] for keyword in order},
            [[1], []],
            [[1, "a"], [1, True], ["a"]],
        )
        for schema in [
            {
                "type": "array",
                "allOf": [{"items": [{"type": "integer"}, {"type": "string"}]}],
                "items": [{"type": "integer"}],
                "additionalItems": {"type": "boolean"},
            }
        ]
        for order in (schema, reversed(schema), ("allOf", "additionalItems", "items", "type"))
    ),
    ({"enum": ["%json {", "%json {}"]}, ["%json {", "%json {}"], ["%json {x"]),
    ({"pattern": r"^[\[\]&\-\w]+$"}, ["[&-]a"], ["é", "~"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), EXACT)
def test_values_on_both_sides_of_a_schema(compiler, schema, valid, invalid):
    grammar = compiler.compile(StructuredOutput.json_schema(schema))
    assert [value for value in valid if not accepts(grammar, value)] == []
    assert [value for value in invalid if accepts(grammar, value)] == []


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"const": "2024-02-29", "format": "date"}, '["2024-02-29"]'),
        ({"const": "2023-02-29", "format": "date"}, None),
        ({"const": "100%json {=\na ::= b"}, '["100%json {=\\na ::= b"]'),
    ],
)
def test_a_schema_in_a_grammar_is_the_same_schema(compiler, random_text, schema, expected):
    text = json.dumps(schema).replace("%", r"\u0025").replace("=", r"\u003d")  # as tool_calls writes it
    structured = StructuredOutput.grammar(f'start: "[" %json {text} "]"')
    if expected is None:
        with pytest.raises(RequestError, match="format"):
            compiler.compile(structured)
    else:
        assert random_text(compiler.compile(structured), random.Random(1)) == expected


def test_the_order_of_properties_is_that_of_the_schema(compiler, random_text):
    names = ["b", "a", "d", "c"]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": sorted(names)}
    grammar = compiler.compile(StructuredOutput.json_schema(schema | {"additionalProperties": False}))
    assert list(json.loads(random_text(grammar, random.Random(1)))) == names


def test_blanks_between_tokens_are_bounded(compiler, follows):
    grammar = compiler.compile(StructuredOutput.json_object())
    assert follows(grammar, '{"a":' + 40 * " " + "1}")
    assert not follows(grammar, '{"a":' + 41 * " ")
    assert not follows(grammar, " {")
