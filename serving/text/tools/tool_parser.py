"""Content with tool calls in it."""

from __future__ import annotations

from serving.text.incremental_parser import MAX_HELD_CHARS, SPACE, Malformed, OutputEnded, Steps, other_than_first
from serving.text.tools.call_reader import CallReader


class ToolParser(CallReader):
    """Base of the formats in which marked calls stand in content.

    A subclass says with which `openers` calls begin, and reads them in `_calls`. What is no call is content, as it was
    written: after a fault, from the opener or from the end of the last call that had started up to the fault, where
    reading goes on. White space is left out before a call that nothing else precedes, and after a call.

    Where the output ends inside a call, a call that has started stands as far as it goes, its arguments cut off; one
    that has not is content. What is missing after the arguments is not missed.
    """

    openers: tuple[str, ...]
    openers_at_start: tuple[str, ...] = ()  # that are openers as the first text that is not white space
    closers: tuple[str, ...] = ()  # end calls, and are left out after calls with a fault

    def __init__(self, tool_names: frozenset[str]):
        super().__init__(tool_names)
        self._other = other_than_first(*self.openers)
        self._leading_space: list[str] | None = []  # None once content has begun
        self._num_leading = 0

    def _calls(self, opener: str) -> Steps[None]:
        """Reads the calls after an opener. Raises Malformed at the first character that does not belong there."""
        raise NotImplementedError

    def _parse(self) -> Steps[None]:
        yield from self._run(SPACE, self._emit_text)
        if self.openers_at_start:
            opener = yield from self._starts_with(*self.openers_at_start)
            if opener is not None:
                yield from self._calls_or_content("")
        while True:
            opener = yield from self._until(self.openers, self._other, self._emit_text)
            if opener is None:
                break
            yield from self._calls_or_content(opener)
        if self._leading_space and not self.num_calls:
            self._emit_content("".join(self._leading_space))

    def _calls_or_content(self, opener: str) -> Steps[None]:
        self._is_undecided = True
        num_calls_before = self.num_calls
        self._take(len(opener))
        try:
            yield from self._calls(opener)
            self._let_go()
        except Malformed:
            held = self._let_go()
            self._emit_text(held.lstrip() if self.num_calls > num_calls_before else held)
            if self.closers and self.num_calls > num_calls_before:
                yield from self._take_marker(*self.closers)
                self._let_go()
        except OutputEnded:
            held = self._let_go()
            if self._is_undecided:
                self._emit_text(held)
        if self.num_calls > num_calls_before:
            self._leading_space = self._leading_space and []
            yield from self._run(SPACE, _leave_out)

    def _emit_text(self, text: str) -> None:
        if self._leading_space is None:
            self._emit_content(text)
            return
        self._leading_space.append(text)
        self._num_leading += len(text)
        if self._num_leading > MAX_HELD_CHARS or not text.isspace():
            self._emit_content("".join(self._leading_space))
            self._leading_space = None


def _leave_out(text: str) -> None:
    pass
