"""Chunks of an answer as events of a stream, in the form of server-sent events."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from serving.api.responses import Answer, PlainText

if TYPE_CHECKING:
    from serving.async_engine import RequestDelta

DONE_EVENT = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_TEXT = "\0"  # stands for a chunk's text in a frame: nothing else in a chunk has this character


def event(value: dict[str, Any]) -> bytes:
    return f"data: {_ENCODER.encode(value)}\n\n".encode()


class EventEncoder:
    """The events of one answer: `event` of each chunk. What chunks of mere text have in common is encoded once."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._frames: dict[tuple[int, str], list[str]] = {}  # what is around the text, by choice and kind

    def events(self, item: RequestDelta) -> list[bytes]:
        """What a step added to one completion; raises as `Answer.chunks` does."""
        news = self._answer.news(*item)
        if not isinstance(news, PlainText):
            return [event(chunk) for chunk in news]
        frame = self._frames.get(news[:2])
        if frame is None:
            chunk = self._answer.text_chunk(news._replace(text=_TEXT))
            frame = event(chunk).decode().split(encode_basestring(_TEXT))
            self._frames[news[:2]] = frame
        return [encode_basestring(news.text).join(frame).encode()]

    def last_events(self) -> list[bytes]:
        return [*map(event, self._answer.last_chunks()), DONE_EVENT]
