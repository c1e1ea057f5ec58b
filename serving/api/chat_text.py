"""The text of one chat completion as parts of a message: where tool calls and reasoning are to be read out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serving.api.schema import ChatCall


class ChatText(Protocol):
    """Takes text in increments and gives deltas, as `choices[].delta` of a stream has them."""

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """Deltas that became sure with `text`."""

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """Deltas at the end."""

    def joined(self, deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All deltas as one message, without its role."""

    def finish_reason(self, reason: str) -> str:
        """What the answer gives as its end, where the engine says `reason`."""


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        return [{"content": text}] if text else []

    def finish(self) -> Sequence[Mapping[str, Any]]:
        return []

    def joined(self, deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"content": "".join(delta["content"] for delta in deltas)}

    def finish_reason(self, reason: str) -> str:
        return reason


def chat_text(call: ChatCall) -> ChatText:
    """What reads the text of a completion of `call`."""
    return PlainText()
