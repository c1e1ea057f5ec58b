"""`response_format` and `structured_outputs`: what the output must match, read from a request."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from configs.server import ServerConfig
from serving.api.fields import Boolean, Text, check_keys
from serving.api.strict_json import decode_object
from serving.request import MAX_CHOICES, RequestError, SamplingParams, StructuredKind, StructuredOutput, shown

MAX_SCHEMA_NAME_CHARS = 64  # as OpenAI has it


@dataclass(frozen=True, kw_only=True)
class OutputConstraint:
    """What an output must match.

    `value` is None for json_object, the schema (an object or a boolean) for json_schema, the text of a regex or a
    grammar, and a tuple of texts for choice. `field` is the request's field that holds it, for messages.
    """

    kind: StructuredKind
    value: Any
    field: str


def constrained(params: SamplingParams, constraint: OutputConstraint | None) -> SamplingParams:
    """`params` under `constraint`. Raises RequestError for one that is malformed; `Engine.check` compiles it."""
    if constraint is None:
        return params
    try:
        structured = StructuredOutput(kind=constraint.kind, value=constraint.value)
        return dataclasses.replace(params, structured=structured)
    except RequestError as error:
        raise error_of_request(error, constraint) from None


def error_of_request(error: RequestError, constraint: OutputConstraint) -> RequestError:
    """An error of SamplingParams.structured with the name of the request's own field."""
    inner = error.field.removeprefix("structured").removeprefix(f".{constraint.kind}")
    if not error.field.startswith("structured"):
        return error
    return RequestError(constraint.field + inner, str(error).removeprefix(f"{error.field}: "))


def read_response_format(name: str, value: object, config: ServerConfig) -> OutputConstraint | None:
    """The constraint of `response_format`; None for {"type": "text"}."""
    given = check_keys(name, value, ("type", "json_schema"), ("type",))
    kind = given["type"]
    if kind != "json_schema" and "json_schema" in given:
        raise RequestError(f"{name}.json_schema", f"does not go with type {shown(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputConstraint(kind="json_object", value=None, field=name)
    if kind != "json_schema":
        raise RequestError(f"{name}.type", f"must be text, json_object or json_schema; got {shown(kind)}")
    inner = f"{name}.json_schema"
    schema = check_keys(inner, given.get("json_schema"), ("name", "description", "schema", "strict"), ("name",))
    Text(MAX_SCHEMA_NAME_CHARS).read(f"{inner}.name", schema["name"])
    Text(config.max_grammar_chars, 0).read(f"{inner}.description", schema.get("description", ""))
    Boolean().read(f"{inner}.strict", schema.get("strict", False))
    if "schema" not in schema:  # OpenAI's own models have it optional: any object
        return OutputConstraint(kind="json_object", value=None, field=name)
    inner = f"{inner}.schema"
    return OutputConstraint(kind="json_schema", value=read_json_schema(inner, schema["schema"], config), field=inner)


def read_structured_outputs(name: str, value: object, config: ServerConfig) -> OutputConstraint:
    """The constraint of `structured_outputs`: an object with one of json, json_object, regex, choice and grammar."""
    given = check_keys(name, value, ("json", "json_object", "regex", "choice", "grammar"))
    if len(given) != 1:
        raise RequestError(name, f"must have one of json, json_object, regex, choice, grammar; has {len(given)}")
    ((key, item),) = given.items()
    return read_constraint(f"{name}.{key}", key, item, config)


def read_constraint(name: str, key: str, item: object, config: ServerConfig) -> OutputConstraint:
    """The constraint that one of the keys of `structured_outputs` gives; `name` is that of the field that has it."""
    if key == "json":
        if isinstance(item, str):  # a schema as text, as some clients send it
            item = _schema_of_text(name, item, config)
        return OutputConstraint(kind="json_schema", value=read_json_schema(name, item, config), field=name)
    if key == "json_object":
        if item is not True:
            raise RequestError(name, f"must be true, got {shown(item)}")
        return OutputConstraint(kind="json_object", value=None, field=name)
    if key == "choice":
        if not isinstance(item, list) or not 1 <= len(item) <= MAX_CHOICES:
            raise RequestError(name, f"must be a list of 1 to {MAX_CHOICES} texts")
        texts = tuple(Text(config.max_grammar_chars).read(f"{name}[{i}]", text) for i, text in enumerate(item))
        return OutputConstraint(kind="choice", value=texts, field=name)
    text = Text(config.max_grammar_chars).read(name, item)
    return OutputConstraint(kind="regex" if key == "regex" else "grammar", value=text, field=name)


def read_json_schema(name: str, value: object, config: ServerConfig) -> Any:
    """A JSON schema that is within the limits on depth and size; what it means is its compiler's to check."""
    if not isinstance(value, dict | bool):
        raise RequestError(name, f"must be a JSON schema, an object; got {shown(value)}")
    level, depth = [value], 0
    while level:
        if depth > config.max_schema_depth:
            raise RequestError(name, f"holds values more than {config.max_schema_depth} deep inside each other")
        inside = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inside for child in (item.values() if isinstance(item, dict) else item)]
        depth += 1
    num_chars = len(json.dumps(value))
    if num_chars > config.max_grammar_chars:
        raise RequestError(name, f"has {num_chars} characters; at most {config.max_grammar_chars} are accepted")
    return value


def _schema_of_text(name: str, text: str, config: ServerConfig) -> Any:
    Text(config.max_grammar_chars).read(name, text)
    return decode_object(text.encode("utf-8", "replace"), max_depth=config.max_json_depth, name=name)
