"""Tells the reasoning in a model's output from its answer."""

from __future__ import annotations

import contextlib

from serving.text.incremental_parser import MAX_HELD_CHARS, SPACE, IncrementalParser, Malformed, Steps, other_than_first

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(IncrementalParser):
    """`<think>reasoning</think>answer`: Qwen3, DeepSeek R1 and V3.1, SmolLM3, Kimi K2 Thinking.

    Reasoning begins with a tag that only white space precedes, or, with `starts_inside`, at once: the prompt ended
    with the tag (`reasoning_is_open`), and one more at the beginning is left out. Tags elsewhere are text. White space
    beside the tags is left out. Without the closing tag all of the output is reasoning.

    ends_before: further texts that end reasoning, and belong to the answer.
    """

    def __init__(self, *, starts_inside: bool, ends_before: tuple[str, ...] = ()):
        super().__init__()
        self._starts_inside = starts_inside
        self._ends = (CLOSE, *ends_before)
        self._pending: list[str] = []  # white space that a tag may follow
        self._num_pending = 0

    def _parse(self) -> Steps[None]:
        with contextlib.suppress(Malformed):  # more white space than is held is text
            yield from self._run(SPACE)
        leading = self._let_go()
        opener = yield from self._starts_with(OPEN)
        if opener is not None:
            self._skip(OPEN)
        if opener is not None or self._starts_inside:
            leading = ""
            yield from self._run(SPACE, _leave_out)
            end = yield from self._until(self._ends, other_than_first(*self._ends), self._emit_trimmed)
            if end is None:
                self._emit_reasoning("".join(self._pending))
                return
            if end == CLOSE:
                self._skip(CLOSE)
                yield from self._run(SPACE, _leave_out)
        self._emit_content(leading)
        while (yield from self._peek()):
            self._take(len(self._text) - self._at, self._emit_content)

    def _skip(self, marker: str) -> None:
        self._take(len(marker), _leave_out)

    def _emit_trimmed(self, text: str) -> None:
        """Gives out reasoning up to the white space at its end, of which not more than MAX_HELD_CHARS are kept."""
        rest = text.rstrip()
        if rest:
            self._emit_reasoning("".join(self._pending) + rest)
            self._pending.clear()
            self._num_pending = 0
        self._pending.append(text[len(rest) :])
        self._num_pending += len(text) - len(rest)
        if self._num_pending > MAX_HELD_CHARS:  # and the rest of this white space is given out as it comes
            self._emit_reasoning("".join(self._pending))
            self._pending.clear()


def _leave_out(text: str) -> None:
    pass


def reasoning_is_open(prompt: str) -> bool:
    """Whether the prompt ends inside reasoning that its last text, the opening tag, began."""
    return prompt.rstrip().endswith(OPEN)
