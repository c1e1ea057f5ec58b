"""Schemas as llguidance enforces them exactly: some that it would be too lenient with, said in another way."""

from __future__ import annotations

import json
from typing import Any

from serving.structured.grammar_worker import JSON_IN_GRAMMAR
from serving.structured.schema_check import subschemas

# RFC 3339, 5.6, without leap seconds, and without the year 0000, which many readers of dates refuse.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
)
_HOURS_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_MINUTES}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOURS_MINUTES})"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
_MAX_HOSTNAME_CHARS = 253  # RFC 1123, 2.1, and RFC 1035, 2.3.4


def rewrite(kind: str, value: str) -> str:
    """The value of a checked StructuredOutput with its schemas rewritten."""
    if kind == "json_schema":
        return _rewrite_schema(json.loads(value))
    if kind != "grammar":
        return value
    pieces, end = [], 0
    for match in JSON_IN_GRAMMAR.finditer(value):
        start = match.start() + match[0].index("{")
        if start >= end:
            schema, schema_end = json.JSONDecoder().raw_decode(value, start)
            pieces += [value[end:start], _rewrite_schema(schema)]
            end = schema_end
    return "".join(pieces) + value[end:]


def _rewrite_schema(schema: Any) -> str:
    for _, inner in list(subschemas("", schema)):
        if isinstance(inner, dict):
            _rewrite_keywords(inner)
    return json.dumps(schema).replace("%", r"\u0025")  # a "%json {" in a string of it is none of the grammar's


def _rewrite_keywords(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    pattern = _PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is not None:
        # llguidance lets any year have a 29 February, and any minute a second 60.
        del schema["format"]
        if "pattern" not in schema:
            schema["pattern"] = pattern
        elif isinstance(schema.setdefault("allOf", []), list):  # refused otherwise
            schema["allOf"].append({"pattern": pattern})
    if name == "hostname":
        limit = schema.get("maxLength", _MAX_HOSTNAME_CHARS)
        schema["maxLength"] = min(limit, _MAX_HOSTNAME_CHARS) if isinstance(limit, int) else limit
    if isinstance(schema.get("items"), list):
        # It would not see allOf before items and additionalItems behind them together.
        first = {keyword: schema.pop(keyword) for keyword in ("items", "additionalItems") if keyword in schema}
        rest = dict(schema)
        schema.clear()
        schema |= first | rest
