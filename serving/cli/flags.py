"""Command-line flags made from dataclass fields: one flag a field, so a new field needs no second place.

A flag holds the parsed value only; ranges and contradictions are the dataclass's own to check.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from serving.request import RequestError, StructuredOutput


def add_dataclass_flags(
    parser: argparse.ArgumentParser,
    cls: type,
    *,
    names: Mapping[str, str] | None = None,
    description: str | None = None,
) -> None:
    """Add a flag for each field of `cls` to `parser`. `names` renames fields whose own name would mislead."""
    group = parser.add_argument_group(cls.__name__, description)
    comments = field_comments(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = (names or {}).get(field.name, field.name)
        hint = hints[field.name]
        default = "" if field.default is dataclasses.MISSING else f" (default {field.default})"
        options: dict[str, Any] = {
            "dest": _dest(cls, field.name),
            "default": argparse.SUPPRESS,
            "metavar": _metavar(hint),
            "help": f"{comments[field.name]}{default}".replace("%", "%%"),
        }
        if hint is bool:
            options |= {"nargs": "?", "const": True}
        if hint == tuple[str, ...]:
            options |= {"action": "append", "help": f"{options['help']}; may be repeated"}
        else:
            options["type"] = _parser_of(hint)
        group.add_argument(f"--{name}", **options)


def field_comments(cls: type) -> dict[str, str]:
    """What the comments above and behind each field of a dataclass say, from its source: the help of its flag."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        field = re.match(r" {4}(\w+): ", line)
        if line.startswith("    # "):
            above.append(line[6:])
            continue
        if field is not None:
            behind = line.partition("  # ")[2]
            comments[field[1]] = " ".join([*above, behind]).strip()
        above = []
    return comments


def given_fields(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that the command line set, by field name."""
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: getattr(args, _dest(cls, name)) for name in names if hasattr(args, _dest(cls, name))}


def _dest(cls: type, field: str) -> str:
    return f"{cls.__name__}.{field}"


def _metavar(hint: Any) -> str:
    inner = _without_none(hint)
    if typing.get_origin(inner) is Literal:
        return "|".join(map(str, typing.get_args(inner)))
    if inner == tuple[int, ...]:
        return "INT,INT,..."
    if inner == tuple[float, ...]:
        return "NUMBER,NUMBER,..."
    if typing.get_origin(inner) is collections.abc.Mapping:
        return "ID:NUMBER,..."
    if inner is StructuredOutput:
        return '{"kind":...,"value":...}'
    return {bool: "true|false", tuple[str, ...]: "TEXT", str: "TEXT"}.get(inner, getattr(inner, "__name__", "").upper())


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return inner
    return hint


def _parser_of(hint: Any) -> Any:
    """A function from a flag's text to a value of type `hint`; it raises ArgumentTypeError."""
    inner = _without_none(hint)
    optional = inner is not hint

    def parse(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        try:
            return _parse(text, inner)
        except RequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"must be {_metavar(inner)}, got {text!r}") from None

    return parse


def _parse(text: str, hint: Any) -> Any:
    if hint is bool:
        return {"true": True, "false": False}[text.lower()]
    if hint in (int, float, str):
        return hint(text)
    if typing.get_origin(hint) is Literal:
        return text  # the dataclass says which are known
    if hint == tuple[int, ...]:
        return tuple(int(part) for part in text.split(",")) if text else ()
    if hint == tuple[float, ...]:
        return tuple(float(part) for part in text.split(",")) if text else ()
    if hint is StructuredOutput:
        return StructuredOutput.from_fields(json.loads(text))
    assert typing.get_origin(hint) is collections.abc.Mapping, f"no flag syntax for {hint}"
    pairs = [part.split(":") for part in text.split(",")]
    values = {int(key): float(value) for key, value in pairs}
    if len(values) < len(pairs):
        raise ValueError("an id is given twice")
    return values
