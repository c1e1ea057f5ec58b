"""Checks that the frozen configs run on themselves. Every error names the field and the value."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import Any


class ConfigError(ValueError):
    """A configuration value is of the wrong type, out of range, or contradicts another."""


def _name(owner: object, field: str) -> str:
    return f"{type(owner).__name__}.{field}"


def check_int(owner: object, field: str, *, minimum: int, maximum: int | None = None, optional: bool = False) -> None:
    """Raise ConfigError unless `owner.field` is an int (not a bool) in [minimum, maximum], or None where optional."""
    value = getattr(owner, field)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{_name(owner, field)} must be an integer, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        bound = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise ConfigError(f"{_name(owner, field)} must be {bound}, got {value}")


def check_float(
    owner: object,
    field: str,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float | None = None,
    optional: bool = False,
) -> None:
    """Raise ConfigError unless `owner.field` is a finite number in [minimum, maximum] and, if given, > above."""
    value = getattr(owner, field)
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # an integer may be larger than any float
        raise ConfigError(f"{_name(owner, field)} must be a finite number, got {value!r}")
    if not minimum <= value <= maximum or (above is not None and not value > above):
        bound = f"> {above}" if above is not None else f">= {minimum}"
        if maximum < math.inf:
            bound += f" and <= {maximum}"
        raise ConfigError(f"{_name(owner, field)} must be {bound}, got {value!r}")


def check_bool(owner: object, field: str, *, optional: bool = False) -> None:
    """Raise ConfigError unless `owner.field` is True or False, or None where optional."""
    value = getattr(owner, field)
    if not isinstance(value, bool) and not (value is None and optional):
        raise ConfigError(f"{_name(owner, field)} must be true or false, got {value!r}")


def check_choice(owner: object, field: str, choices: Collection[Any], *, optional: bool = False) -> None:
    """Raise ConfigError unless `owner.field` is one of `choices`, or None where optional."""
    value = getattr(owner, field)
    if value is None and optional:
        return
    if not isinstance(value, str | int) or value not in choices:
        raise ConfigError(f"{_name(owner, field)} must be one of {', '.join(map(str, choices))}; got {value!r}")


def check_int_tuple(owner: object, field: str, *, minimum: int) -> None:
    """Raise ConfigError unless `owner.field` is a tuple of ints, each >= minimum."""
    value = getattr(owner, field)
    if not isinstance(value, tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise ConfigError(f"{_name(owner, field)} must be a tuple of integers, got {value!r}")
    if any(v < minimum for v in value):
        raise ConfigError(f"{_name(owner, field)} must hold integers >= {minimum}, got {value!r}")


def fail(owner: object, field: str, reason: str) -> None:
    """Raise ConfigError saying why `owner.field` with its value cannot be."""
    raise ConfigError(f"{_name(owner, field)}={getattr(owner, field)!r} {reason}")
