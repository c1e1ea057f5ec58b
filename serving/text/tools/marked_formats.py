"""Formats in which markers stand around the name and the arguments of a call."""

from __future__ import annotations

import re

from serving.text.incremental_parser import Malformed, OutputEnded, Steps, other_than_first
from serving.text.tools.tool_parser import ToolParser

_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>.+):\d{1,9}", re.DOTALL)


class MarkedParser(ToolParser):
    """Base for calls between `call_begin` and `call_end`, in a section from `section_begin` to `section_end`.

    The section's markers may be missing. Where its end is missing, it ends with the last call.
    """

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str

    def _calls(self, opener: str) -> Steps[None]:
        if opener == self.section_begin:
            yield from self._space()
            if (yield from self._take_marker(self.section_end)):
                return
            yield from self._expect(self.call_begin)
        while True:
            self._is_undecided = True
            yield from self._space()
            yield from self._one_call()
            self._let_go()  # a fault from here on does not make the end of this call content
            yield from self._space()
            yield from self._expect(self.call_end)
            yield from self._space()
            if not (yield from self._take_marker(self.call_begin)):
                break
        yield from self._take_marker(self.section_end)

    def _one_call(self) -> Steps[None]:
        raise NotImplementedError

    def _text_before(self, marker: str) -> Steps[str]:
        """The text up to a marker, without the white space around it; the marker is taken too."""
        mark = len(self._held)
        ends = (marker, self.call_begin, self.call_end, self.section_begin, self.section_end)
        found = yield from self._until(ends, other_than_first(*ends))
        if found is None:
            raise OutputEnded
        if found != marker:
            raise Malformed
        text = "".join(self._held[mark:]).strip()
        self._take(len(marker))
        return text


class DeepSeekParser(MarkedParser):
    """DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, and the JSON in a fence on lines of its own.

    V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
    """

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    openers = (section_begin, call_begin)
    closers = (call_end, section_end)

    def _one_call(self) -> Steps[None]:
        name = yield from self._text_before("<｜tool▁sep｜>")
        yield from self._space()
        is_fenced = (yield from self._need()) != "{"
        if is_fenced:
            if name != "function":
                raise Malformed
            name = yield from self._text_before("```json")
        yield from self._call_of(self._known(name))
        yield from self._space()
        if is_fenced:
            yield from self._expect("```")


class KimiParser(MarkedParser):
    """Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    The text before the arguments is the call's id, which the model expects to find again beside the result.
    https://github.com/MoonshotAI/Kimi-K2/blob/main/docs/tool_call_guidance.md
    """

    section_begin = "<|tool_calls_section_begin|>"
    section_end = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"
    openers = (section_begin, call_begin)
    closers = (call_end, section_end)

    def __init__(self, tool_names: frozenset[str]):
        super().__init__(tool_names)
        self._given_ids: set[str] = set()

    def _one_call(self) -> Steps[None]:
        call_id = yield from self._text_before("<|tool_call_argument_begin|>")
        numbered = _NUMBERED.fullmatch(call_id)
        if numbered is None:
            raise Malformed
        name = self._known(numbered["name"])
        is_new = call_id not in self._given_ids
        self._given_ids.add(call_id)
        yield from self._call_of(name, call_id if is_new else None)
