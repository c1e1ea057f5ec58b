"""Content with tool calls in it."""

from __future__ import annotations

from serving.text.incremental_parser import MAX_HELD_CHARS, SPACE, Malformed, OutputEnded, Steps, other_than_first
from serving.text.tools.call_reader import CallReader


class ToolParser(CallReader):
    """Base of the formats in which marked calls stand in content.

    A subclass says with which `openers` calls begin, and reads them in `_calls`. What is no call is content, as it was
    written: after a fault, from the opener or from the end of the last call that had started up to the fault, where
    reading goes on. White space is left out where nothing but calls stands between it and the start or the end.

    Where the output ends inside a call, a call that has started stands as far as it goes, its arguments cut off; one
    that has not is content. What is missing after the arguments is not missed.
    """

    openers: tuple[str, ...]
    openers_at_start: tuple[str, ...] = ()  # that are openers as the first text that is not white space
    closers: tuple[str, ...] = ()  # end calls, and are left out after calls with a fault

    def __init__(self, tool_names: frozenset[str]):
        super().__init__(tool_names)
        self._other = other_than_first(*self.openers)
        self._has_content = False
        # White space at the start or after a call, which is content only if other content follows; None after that.
        self._outer_space: list[str] | None = []
        self._num_outer_space = 0

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
        if self._outer_space and not self.num_calls:
            self._emit_content("".join(self._outer_space))

    def _calls_or_content(self, opener: str) -> Steps[None]:
        self._is_undecided = True
        num_calls_before = self.num_calls
        self._take(len(opener))
        try:
            yield from self._calls(opener)
            self._let_go()
        except Malformed:
            self._emit_text(self._let_go())
            if self.closers and self.num_calls > num_calls_before:
                yield from self._take_marker(*self.closers)
                self._let_go()
        except OutputEnded:
            held = self._let_go()
            if self._is_undecided:
                self._emit_text(held)
        if self.num_calls > num_calls_before:
            self._outer_space = []
            self._num_outer_space = 0

    def _emit_text(self, text: str) -> None:
        if self._outer_space is not None:
            if self.num_calls and not self._has_content:
                text = text.lstrip()
            self._outer_space.append(text)
            self._num_outer_space += len(text)
            if not text or (text.isspace() and self._num_outer_space <= MAX_HELD_CHARS):
                return
            text = "".join(self._outer_space)
            self._outer_space = None
            self._has_content = True
        self._emit_content(text)
