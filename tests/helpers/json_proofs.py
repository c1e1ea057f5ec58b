"""Compares what grammars of JSON schemas let through with what the package jsonschema calls valid."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from http_harness import END, VOCAB_SIZE, byte_tokenizer

from serving import SamplingParams
from serving.request import RequestError, StructuredOutput
from serving.structured.compiler import GrammarCompiler
from serving.structured.constraint import Constraint, Grammar
from serving.structured.schema_check import subschemas

DATA = Path(__file__).parents[1] / "data" / "json_schemas"
_DRAFT_URIS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Refusals without a keyword that is at fault alone.
_NO_KEYWORD = (
    "schema is false",
    "matches no text",
    "takes more than",
    "be compiled in",
    "incompatible types",
    "numbers cannot",
    *("$ref", "$dynamicAnchor", "format"),  # of a metaschema that the schema names
)
_CLOSING = frozenset(b'"]}')
_MAX_ORDERS = 5000  # of properties, tried for one value


def read_records(name: str) -> list[dict[str, Any]]:
    """The records {"schema", "tests", ...} of a file of DATA, each with a "name"; a schema names its draft."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        records = [json.loads(line) for line in file]
    for record in records:
        record["name"] = record.get("id") or "/".join(record[key] for key in ("draft", "file", "description"))
        if "draft" in record and isinstance(record["schema"], dict):
            record["schema"].setdefault("$schema", _DRAFT_URIS[record["draft"]])
    return records


def prove(
    compiler: GrammarCompiler, record: dict[str, Any], draw: random.Random, num_texts: int
) -> tuple[Counter[str], list[str]]:
    """Counts of what came of a record, and what is wrong."""
    counts, faults, schema = Counter(["schemas"]), [], record["schema"]
    try:
        grammar = compiler.compile(StructuredOutput.json_schema(schema))
    except RequestError as error:
        counts[f"refused: {refused_for(schema, error)}"] += 1
        if refused_for(schema, error) is None:
            faults.append(f"refused without a keyword: {error}")
        return counts, faults
    counts["accepted"] += 1
    try:
        validator = validator_of(schema)
    except re.error:
        validator = None
        counts["accepted, with a pattern that Python cannot read"] += 1
    for _ in range(num_texts if validator is not None else 0):
        text = random_text(grammar, draw)
        counts["texts without an end" if text is None else "texts"] += 1
        if text is not None:
            fault = jsonschema.exceptions.best_match(validator.iter_errors(exact(text)))
            faults += [] if fault is None else [f"lets through {text[:500]!r}: {fault.message[:200]}"]
    for test in record["tests"]:
        is_let_through = accepts(grammar, test["data"])
        counts[
            f"{'valid' if test['valid'] else 'invalid'} values {'let through' if is_let_through else 'kept out'}"
        ] += 1
        if is_let_through and not test["valid"]:
            faults.append(f"lets through {json.dumps(test['data'])[:500]}")
        if test["valid"] and not is_let_through and not _is_stricter(record, test["data"]):
            faults.append(f"keeps out {json.dumps(test['data'])[:500]}")
    return counts, faults


def refused_for(schema: Any, error: RequestError) -> str | None:
    """The keyword that a refusal names, or its reason without one."""
    text = str(error)
    keywords = {keyword for _, inner in subschemas("", schema) if isinstance(inner, dict) for keyword in inner}
    named = re.search(r"^[^:]*?([^.:\[\]]+)(?:\[[0-9]+\])*: ", text)
    for keyword in sorted(keywords, key=lambda keyword: (named is None or keyword != named[1], -len(keyword))):
        if re.search(rf"(?<![\w$]){re.escape(keyword)}(?!\w)", text):
            return keyword
    return next((reason for reason in _NO_KEYWORD if reason in text), None)


def _is_stricter(record: dict[str, Any], value: Any) -> bool:
    """Whether a valid value may be kept out: formats are enforced, and what stands beside $ref in old drafts."""
    schema = json.dumps(record["schema"])
    if '"format"' in schema:
        return not validator_of(record["schema"]).is_valid(exact(json.dumps(value)))
    return record.get("draft") == "draft7" and '"$ref"' in schema


class DeadEndError(AssertionError):
    """Nothing can follow, though the text has not ended."""


def byte_compiler() -> GrammarCompiler:
    """Grammars over a vocabulary with a token for each byte, its id."""
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,))


def exact(text: str) -> Any:
    """JSON with its numbers as they are written: 35.8 is a multiple of 0.01."""
    return json.loads(text, parse_float=_exact_number)


def _exact_number(text: str) -> Any:
    exponent = text.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > 400:
        return float(text)
    number = Fraction(text)
    return number.numerator if number.denominator == 1 else number


def validator_of(schema: Any) -> Any:
    """A validator for values of `exact` that checks formats. Raises re.error for a pattern that Python cannot read."""
    cls = jsonschema.Draft202012Validator
    if isinstance(schema, dict):
        cls = jsonschema.validators.validator_for(schema, cls)
    schema = exact(json.dumps(schema))
    for _, inner in list(subschemas("", schema)):
        if isinstance(inner, dict):
            if isinstance(inner.get("pattern"), str):
                inner["pattern"] = _ecma_pattern(inner["pattern"])
            if isinstance(inner.get("patternProperties"), dict):
                named = inner["patternProperties"].items()
                inner["patternProperties"] = {_ecma_pattern(pattern): value for pattern, value in named}
    return cls(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def _ecma_pattern(pattern: str) -> str:
    """The pattern with the ASCII classes of ECMA 262, which Python takes for Unicode ones. Not \\s: it is Unicode in both."""
    parts, in_class = [], False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        in_class = part == "[" or (in_class and part != "]")
        ascii_class = {"\\w": "A-Za-z0-9_", "\\d": "0-9", "\\W": "^A-Za-z0-9_", "\\D": "^0-9"}.get(part)
        if ascii_class is not None and not (in_class and ascii_class[0] == "^"):
            part = ascii_class if in_class else f"[{ascii_class}]"
        parts.append(part)
    pattern = "".join(parts)
    re.compile(pattern)
    return pattern


def random_text(grammar: Grammar, draw: random.Random, max_tokens: int = 600) -> str | None:
    """A text by random choices among the tokens allowed, in favour of ends; None: it had not ended after max_tokens.
    Raises DeadEndError."""
    vocabulary = grammar.vocabulary
    constraint, data = Constraint(grammar, SamplingParams(max_tokens=None), (END,)), b""
    for i in range(max_tokens):
        if constraint.is_complete:
            return data.decode()
        choices = np.flatnonzero(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")).tolist()
        if END in choices:
            if draw.random() < 0.3:
                return data.decode()
            choices.remove(END)
        ends = [token_id for token_id in choices if token_id in _CLOSING]
        token_id = draw.choice(ends if ends and draw.random() < (0.4 if i < max_tokens // 2 else 0.9) else choices)
        data += vocabulary.tokens[token_id]
        constraint.accept(token_id)
        constraint.find_mask()
        if constraint.error is not None:
            raise DeadEndError(f"{constraint.error}: {data!r}")
    return None


def accepts(grammar: Grammar, value: Any) -> bool:
    """Whether a grammar lets through a JSON value as text without blanks, in some order of its properties."""
    matcher = grammar.matcher.deep_copy()
    orders = iter(range(_MAX_ORDERS))
    return any(matcher.is_accepting() for _ in _write(matcher, value, orders))


def _write(matcher: Any, value: Any, orders: Iterator[int]) -> Iterator[None]:
    """Yields with `matcher` behind the value, for each way to write it; then takes all of it back."""
    if isinstance(value, dict):
        yield from _write_members(matcher, "{", list(value.items()), orders) if value else _write_text(matcher, "{}")
    elif isinstance(value, list):
        yield from _write_items(matcher, "[", value, 0, orders) if value else _write_text(matcher, "[]")
    elif isinstance(value, float) and value == int(value):
        for text in {repr(value), str(int(value))}:
            yield from _write_text(matcher, text)
    else:
        yield from _write_text(matcher, json.dumps(value, ensure_ascii=False))


def _write_text(matcher: Any, text: str) -> Iterator[None]:
    token_ids = list(text.encode())
    count = matcher.try_consume_tokens(token_ids)
    if count == len(token_ids):
        yield
    matcher.rollback(count)


def _write_items(matcher: Any, before: str, items: list[Any], i: int, orders: Iterator[int]) -> Iterator[None]:
    for _ in _write_text(matcher, before):
        for _ in _write(matcher, items[i], orders):
            if i + 1 < len(items):
                yield from _write_items(matcher, ",", items, i + 1, orders)
            else:
                yield from _write_text(matcher, "]")


def _write_members(matcher: Any, before: str, members: list[Any], orders: Iterator[int]) -> Iterator[None]:
    for i, (name, value) in enumerate(members):
        if next(orders, None) is None:
            return
        others = members[:i] + members[i + 1 :]
        for _ in _write_text(matcher, f"{before}{json.dumps(name, ensure_ascii=False)}:"):
            for _ in _write(matcher, value, orders):
                if others:
                    yield from _write_members(matcher, ",", others, orders)
                else:
                    yield from _write_text(matcher, "}")
