"""The harmony format of gpt-oss, in which reasoning, content and tool calls are messages in channels.

https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re

from serving.text.incremental_parser import Emit, Malformed, OutputEnded, Steps, other_than_first
from serving.text.tools.call_reader import CallReader

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_IN_HEADER = ("<|constrain|>", _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_OTHER = other_than_first("<")


class HarmonyParser(CallReader):
    """Output after a prompt that ends with `<|start|>assistant`.

    A message of channel `analysis` is reasoning, also one to a recipient that is no function (`python`, `browser`);
    one to `functions.NAME` is a call of that tool; any other is content, as `commentary` to nobody is, which the
    model writes for the user before calls. Messages of a kind are joined by a line feed.

    A message to a function that is no tool of the request or without a JSON object is content, without its header;
    a broken header is content too, and one that the end of the output cuts off is left out. Reading goes on at the next
    marker.
    """

    def __init__(self, tool_names: frozenset[str]):
        super().__init__(tool_names)
        self._given: set[str] = set()  # kinds of which a message was given out

    def _parse(self) -> Steps[None]:
        marker = yield from self._starts_with(_CHANNEL, _MESSAGE, _START, "<|constrain|>", " to=", "to=")
        while True:
            if marker is not None and marker not in _ENDS:
                yield from self._message()
            marker = yield from self._until((_START, _CHANNEL, _MESSAGE, *_ENDS), _OTHER, self._text_emit("content"))
            if marker is None:
                return
            if marker in _ENDS:
                self._take(len(marker))
                self._let_go()

    def _message(self) -> Steps[None]:
        try:
            header = yield from self._header()
        except Malformed:
            self._text_emit("content")(self._let_go())
            return
        except OutputEnded:
            held = self._let_go()
            if not held.startswith("<|"):
                self._text_emit("content")(held)
            return
        self._let_go()
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name in self.tool_names:
            yield from self._call_or_content(name)
            return
        is_function = recipient is not None and recipient[1].startswith("functions.")
        is_reasoning = (channel is not None and channel[1] == "analysis") or (recipient is not None and not is_function)
        yield from self._until(
            (_START, _CHANNEL, *_ENDS), _OTHER, self._text_emit("reasoning" if is_reasoning else "content")
        )

    def _header(self) -> Steps[str]:
        """Takes what comes before the text of a message. Raises Malformed where another message begins before it."""
        markers = (_START, _MESSAGE, *_IN_HEADER, *_ENDS)
        mark = len(self._held)
        if (yield from self._starts_with(_START)) is not None:
            self._take(len(_START))
        while True:
            marker = yield from self._until(markers, _OTHER)
            if marker is None:
                raise OutputEnded
            if marker not in (_MESSAGE, *_IN_HEADER):
                raise Malformed
            self._take(len(marker))
            if marker == _MESSAGE:
                return "".join(self._held[mark:])

    def _call_or_content(self, name: str) -> Steps[None]:
        try:
            yield from self._space()
            if (yield from self._starts_with(_START, *_ENDS)) is not None:
                self._start_call(name)
                self._emit_arguments("{}")
            else:
                yield from self._call_of(name)
                yield from self._space()
        except (Malformed, OutputEnded):
            self._text_emit("content")(self._let_go())
        self._let_go()

    def _text_emit(self, kind: str) -> Emit:
        """Gives out the text of one message."""
        give = self._emit_reasoning if kind == "reasoning" else self._emit_content
        is_first = True

        def emit(text: str) -> None:
            nonlocal is_first
            if is_first and text:
                if kind in self._given:
                    give("\n")
                self._given.add(kind)
                is_first = False
            give(text)

        return emit
