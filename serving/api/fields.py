"""Kinds of request fields: what a value must be, and how it is read. The tests make bad input from these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serving.request import RequestError, shown


class Kind(Protocol):
    def read(self, name: str, value: object) -> Any:
        """The value as the schema keeps it. `value` is decoded JSON and not None. Raises RequestError."""


@dataclass(frozen=True)
class Integer:
    low: int
    high: int

    def read(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(name, f"must be an integer, got {shown(value)}")
        if not self.low <= value <= self.high:
            raise RequestError(name, f"must be in [{self.low}, {self.high}], got {shown(value)}")
        return value


@dataclass(frozen=True)
class Number:
    low: float
    high: float

    def read(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(name, f"must be a number, got {shown(value)}")
        if not self.low <= value <= self.high:  # NaN too
            raise RequestError(name, f"must be a finite number in [{self.low}, {self.high}], got {shown(value)}")
        return float(value)


@dataclass(frozen=True)
class Boolean:
    def read(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise RequestError(name, f"must be true or false, got {shown(value)}")
        return value


@dataclass(frozen=True)
class Text:
    max_chars: int
    min_chars: int = 1

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise RequestError(name, f"must be a string, got {shown(value)}")
        if not self.min_chars <= len(value) <= self.max_chars:
            raise RequestError(name, f"must have {self.min_chars} to {self.max_chars} characters, has {len(value)}")
        return value


@dataclass(frozen=True)
class Texts:
    """One string or a list of them."""

    max_items: int
    max_chars: int

    def read(self, name: str, value: object) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise RequestError(name, f"must be a string or a list of strings, got {shown(value)}")
        if len(items) > self.max_items:
            raise RequestError(name, f"has {len(items)} entries; at most {self.max_items} are accepted")
        return tuple(Text(self.max_chars).read(f"{name}[{index}]", item) for index, item in enumerate(items))


@dataclass(frozen=True)
class TokenIds:
    """A list of token ids; the vocabulary is checked by the engine."""

    max_items: int
    min_items: int = 0

    def read(self, name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise RequestError(name, f"must be a list of token ids, got {shown(value)}")
        if not self.min_items <= len(value) <= self.max_items:
            raise RequestError(name, f"must have {self.min_items} to {self.max_items} entries, has {len(value)}")
        return read_token_ids(name, value)


@dataclass(frozen=True)
class TokenNumbers:
    """An object from token ids, as JSON's strings or as integers, to numbers."""

    max_items: int
    low: float
    high: float

    def read(self, name: str, value: object) -> dict[int, float]:
        if not isinstance(value, dict):
            raise RequestError(name, f"must map token ids to numbers, got {shown(value)}")
        if len(value) > self.max_items:
            raise RequestError(name, f"has {len(value)} entries; at most {self.max_items} are accepted")
        number = Number(self.low, self.high)
        by_id: dict[int, float] = {}
        for key, item in value.items():
            token_id = _key_id(name, key)
            if token_id in by_id:  # as "1" and "01"
                raise RequestError(name, f"has the token id {token_id} twice")
            by_id[token_id] = number.read(f"{name}[{token_id}]", item)
        return by_id


@dataclass(frozen=True)
class Choice:
    """One of a few strings."""

    values: tuple[str, ...]

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise RequestError(name, f"must be one of {', '.join(self.values)}; got {shown(value)}")
        return value


@dataclass(frozen=True)
class Only:
    """A field whose other values ask for what is not offered: `values` are those that ask for nothing."""

    values: tuple[Any, ...]
    reason: str

    def read(self, name: str, value: object) -> None:
        if not any(type(value) is type(known) and value == known for known in self.values):
            raise RequestError(name, f"{self.reason}; got {shown(value)}")


@dataclass(frozen=True)
class NoEffect:
    """Any value: the field says something about the client and nothing about the tokens."""

    def read(self, name: str, value: object) -> None:
        return None


@dataclass(frozen=True)
class Structure:
    """A value with a form of its own; `examples` are some that are right."""

    reader: Callable[[str, object], Any]
    examples: tuple[Any, ...]

    def read(self, name: str, value: object) -> Any:
        return self.reader(name, value)


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a request. Null counts as absent, and `default` is what an absent one means.

    `to` is the field of SamplingParams or of the call that it sets, "" for none. Sampling fields have no default here:
    the model's own comes first (`serving.text.generation_config`).
    """

    name: str
    kind: Kind
    endpoints: frozenset[str]
    to: str = ""
    default: Any = None
    is_sampling: bool = False


def read_token_ids(name: str, value: Sequence[object]) -> tuple[int, ...]:
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 2**31:
            raise RequestError(f"{name}[{index}]", f"must be a token id, an integer of 0 or more; got {shown(item)}")
    return tuple(value)  # type: ignore[arg-type]


def check_keys(name: str, value: object, known: Sequence[str], required: Sequence[str] = ()) -> dict[str, Any]:
    """`value` as an object with no keys but `known`, keys of null left out. Raises RequestError."""
    if not isinstance(value, dict):
        raise RequestError(name, f"must be an object, got {shown(value)}")
    for key in value:
        if key not in known:
            raise RequestError(f"{name}.{short(key)}", f"is not known; known are {', '.join(known)}")
    given = {key: item for key, item in value.items() if item is not None}
    for key in required:
        if key not in given:
            raise RequestError(f"{name}.{key}", "is missing")
    return given


def short(key: object) -> str:
    """A key of a client's as the name of a field in a message."""
    text = key if isinstance(key, str) else shown(key)
    return text if len(text) <= 80 else text[:77] + "..."


def _key_id(name: str, key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        key = int(key)
    if type(key) is not int or not 0 <= key < 2**31:
        raise RequestError(name, f"has the key {shown(key)}, which is no token id")
    return key
