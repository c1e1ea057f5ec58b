"""What is refused of schemas, patterns and grammars before llguidance sees them: all that it would pass over in silence.

llguidance itself refuses the validation keywords that it does not implement, by name. Keywords unknown to it, and its own
option `x-guidance`, which makes it lenient, it accepts without a word; and some that it implements let through what the
schema does not: those cases, found by comparing with the package jsonschema, are refused here as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from serving.request import RequestError, shown
from serving.structured.grammar_worker import JSON_IN_GRAMMAR

# One schema, a list of schemas, or schemas by name: where others lie inside a schema.
_SCHEMA = ("items", "additionalItems", "additionalProperties")
_SCHEMA_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ENFORCED = {
    *_SCHEMA, *_SCHEMA_LISTS, *_SCHEMA_MAPS, "$ref", "const", "enum", "type", "required", "format", "pattern", "minItems",
    "maxItems", "minProperties", "maxProperties", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
}  # fmt: skip
# Without effect on what is valid (JSON Schema 2020-12, Validation, 8 and 9; OpenAPI 3.1 for discriminator and example).
_ANNOTATIONS = {
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "example", "deprecated",
    "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator",
}  # fmt: skip
_WITH_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# A class up to its end as ECMA 262 has it, or an escape outside of one.
_CLASS = re.compile(r"\\.|\[\^?(?P<inside>(?:\\.|[^\\\]])*)\]?", re.DOTALL)
_CLASS_OPERATION = re.compile(r"\[|&&|--|~~")
_GRAMMAR_OPTIONS = re.compile(r"%llguidance(?!\s*\{\s*\})")
_RULE_OPTION = re.compile(r"\[[^\[\]\"\n]*\b(temperature|stop)\s*=")
_OLD_DRAFT = re.compile(r"draft-0[3-7]\b")
_REPETITION = re.compile(r"[*+?]|\{\d+(,\d*)?\}")


def check_schema(field: str, schema: Any) -> None:
    """Refuse by name every keyword of a schema (plain JSON) that would not be enforced. Raises RequestError."""
    schemas = list(subschemas(field, schema))
    for where, inner in schemas:
        if isinstance(inner, dict):
            _check_keywords(where, inner)
        elif not isinstance(inner, bool):
            raise RequestError(where, f"must be a schema, an object or a boolean, got {shown(inner)}")
    _check_together(schema, [(where, inner) for where, inner in schemas if isinstance(inner, dict)])


def subschemas(field: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """The schema and all schemas inside it, each with its place."""
    yield field, schema
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        where = f"{field}.{keyword[:80]}"
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            for name, inner in value.items():
                yield from subschemas(f"{where}.{name[:80]}", inner)
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            for i, inner in enumerate(value):
                yield from subschemas(f"{where}[{i}]", inner)
        elif keyword in _SCHEMA:
            yield from subschemas(where, value)


def _check_keywords(field: str, schema: dict[str, Any]) -> None:
    for keyword, value in schema.items():
        where = f"{field}.{keyword[:80]}"
        if keyword not in _ENFORCED and keyword not in _ANNOTATIONS and not _is_extension(keyword):
            raise RequestError(where, "is not supported in schemas")
        if keyword == "pattern" and isinstance(value, str):
            check_pattern(where, value)
            _check_classes(where, value)
        if keyword == "patternProperties" and isinstance(value, dict):
            for name in value:
                check_pattern(f"{where}.{name[:80]}", name)
                _check_classes(f"{where}.{name[:80]}", name)
        if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            _check_exclusive(where, value, schema)
        if keyword in _WITH_NUMBERS:
            _check_numbers(where, value)
        if keyword == "minProperties" and isinstance(value, int):
            _check_min_properties(where, value, schema.get("required"))
        if keyword == "additionalItems" and not isinstance(schema.get("items"), list):
            raise RequestError(where, "is supported only beside a list of items: use items beside prefixItems")


def _check_together(root: Any, schemas: list[tuple[str, dict[str, Any]]]) -> None:
    """Refuse keywords that go wrong together where different schemas hold them."""
    keywords = {keyword for _, schema in schemas for keyword in schema}
    if "oneOf" in keywords and _OLD_DRAFT.search(str(root.get("$schema", ""))):
        for where, schema in schemas:
            beside = next(
                (keyword for keyword in schema if keyword in _ENFORCED - {"$ref", "$defs", "definitions"}), None
            )
            if "$ref" in schema and beside is not None:
                # Enforced though the draft ignores it: of two schemas in oneOf more values would match just one.
                raise RequestError(f"{where}.{beside}", "beside $ref is not supported with oneOf in drafts up to 7")
    if keywords.isdisjoint(("$ref", "allOf", "anyOf", "oneOf")):
        return
    for name, other, sign in (("Minimum", "maximum", 1), ("Maximum", "minimum", -1)):
        exclusive = f"exclusive{name}"
        others = [
            schema[keyword]
            for _, schema in schemas
            for keyword in (other, f"exclusive{other.capitalize()}")
            if _is_number(schema.get(keyword))
        ]
        for where, schema in schemas:
            value = schema.get(exclusive)
            if _is_number(value) and value == int(value) and any(0 < sign * (bound - value) < 1 for bound in others):
                _refuse_exclusive(f"{where}.{exclusive}", value)


def _is_extension(keyword: str) -> bool:
    return keyword.startswith("x-") and keyword != "x-guidance"


def _check_exclusive(field: str, value: Any, schema: dict[str, Any]) -> None:
    if isinstance(value, bool):
        raise RequestError(field, "must be a number: the boolean of draft 4 is not supported")
    bounds = [[schema.get(f"exclusive{name}"), schema.get(name.lower())] for name in ("Minimum", "Maximum")]
    lower, upper = ([bound for bound in pair if isinstance(bound, int | float)] for pair in bounds)
    # Of numbers above 2 and up to 2.5, "2" would be one.
    if _is_number(value) and value == int(value) and lower and upper and min(upper) - max(lower) < 1:
        _refuse_exclusive(field, value)


def _refuse_exclusive(field: str, value: float) -> None:
    raise RequestError(field, f"{shown(value)} is not supported with another bound less than 1 away")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(field: str, value: Any) -> None:
    # They become float64 on the way.
    if isinstance(value, int | float) and abs(value) > 2**53:
        raise RequestError(field, f"{shown(value)} is beyond 2**53, which is not supported")
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        _check_numbers(field, item)


def _check_min_properties(field: str, value: int, required: Any) -> None:
    # Names beside `properties` are not kept apart, so that the same one twice would count as two.
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if value > num_required + 1:
        raise RequestError(field, f"{value} is supported only up to one above the {num_required} required properties")


def check_pattern(field: str, pattern: str) -> None:
    """Refuse a quantifier of a quantifier: `a**` and `a++` are errors in some dialects and possessive in others."""
    in_class, was_quantifier, i = False, False, 0
    while i < len(pattern):
        character, end = pattern[i], i + 1
        is_quantifier = False
        if character == "\\":
            end = i + 2
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            end += pattern[end : end + 1] == "^"
            end += pattern[end : end + 1] == "]"  # first in a class, it is itself
        elif repeat := _REPETITION.match(pattern, i):
            if was_quantifier:
                raise RequestError(field, f"repeats a repetition at character {i}: {shown(pattern)}")
            is_quantifier, end = True, repeat.end()
            end += pattern[end : end + 1] == "?"  # not greedy: the same texts match
        was_quantifier, i = is_quantifier, end


def _check_classes(field: str, pattern: str) -> None:
    """Refuse in a class of a schema's pattern what Rust's regex crate reads as an operation on classes, and ECMA 262 as
    characters."""
    for match in _CLASS.finditer(pattern):
        inside = match["inside"]
        if inside == "":
            raise RequestError(field, f"has an empty class, which is not supported: {shown(pattern)}")
        if inside and (operation := _CLASS_OPERATION.search(re.sub(r"\\.", "_", inside, flags=re.DOTALL))):
            raise RequestError(
                field, f"has {operation[0]!r} in a class, which is not supported without a backslash: {shown(pattern)}"
            )


def check_grammar(field: str, grammar: str) -> None:
    """Refuse what a grammar holds and would not be followed. Raises RequestError."""
    if _GRAMMAR_OPTIONS.search(grammar):
        raise RequestError(field, "sets options by %llguidance, which is not supported")
    option = _RULE_OPTION.search(grammar)
    if option is not None:
        raise RequestError(field, f"has the rule option {option[1]!r}, which is not supported")
    for match in JSON_IN_GRAMMAR.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, match.end() - 1)
        except (ValueError, RecursionError) as error:
            raise RequestError(field, f"has a %json whose schema is not JSON: {error}") from None
        check_schema(f"{field}.%json", schema)
