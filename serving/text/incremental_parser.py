"""A parser that is fed its text in increments, and gives the same for every way to cut the text.

A subclass writes `_parse` as one generator over the text. It looks ahead with `_peek` and `_starts_with`, and uses up
characters with `_take` and `_run`; each of them yields while more text is needed, and what they return follows from
the characters alone. Each character is looked at a fixed number of times at most, however it arrives.

Characters that may turn out to be part of a call are held until that is decided; at most MAX_HELD_CHARS of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from serving.text.output_deltas import ContentDelta, Delta, ReasoningDelta

MAX_HELD_CHARS = 2**18

type Steps[T] = Generator[None, None, T]
type Emit = Callable[[str], None]

SPACE = re.compile(r"\s+")


class Malformed(Exception):
    """The text at hand is no call. Never leaves a parser."""


class OutputEnded(Exception):
    """The output is over where more was needed. Never leaves a parser."""


class IncrementalParser:
    """Base of the parsers of output text. One object serves one completion."""

    def __init__(self) -> None:
        self._text = ""  # fed and, from _at on, not used up
        self._at = 0
        self._ended = False
        self._held: list[str] = []
        self._num_held = 0
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []  # of the delta being put together
        self._delta_of_pieces: Callable[[str], Delta] | None = None
        self._steps = self._parse()

    def feed(self, text: str) -> list[Delta]:
        """What has become certain with the next characters of the output."""
        assert not self._ended
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the output. Nothing may be fed any more."""
        self._ended = True
        return self._advance()

    def _parse(self) -> Steps[None]:
        raise NotImplementedError

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        self._close_delta()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _peek(self) -> Steps[str]:
        """The next character, or "" at the end of the output."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _need(self) -> Steps[str]:
        """The next character. Raises OutputEnded where there is none."""
        character = yield from self._peek()
        if not character:
            raise OutputEnded
        return character

    def _starts_with(self, *markers: str) -> Steps[str | None]:
        """The marker with which the text goes on, or None. No marker may begin with another one."""
        longest = max(map(len, markers))
        while True:
            ahead = self._text[self._at : self._at + longest]
            for marker in markers:
                if ahead.startswith(marker):
                    return marker
            if self._ended or not any(marker.startswith(ahead) for marker in markers):
                return None
            yield

    def _take(self, num_chars: int, emit: Emit | None = None) -> None:
        """Uses up characters that were seen: they are emitted, or held. Raises Malformed where too many are held."""
        if emit is not None:
            piece = self._text[self._at : self._at + num_chars]
            self._at += num_chars
            emit(piece)
            return
        # Cut at the very character, since where parsing goes on must not depend on the increments.
        allowed = min(num_chars, MAX_HELD_CHARS - self._num_held)
        self._held.append(self._text[self._at : self._at + allowed])
        self._num_held += allowed
        self._at += allowed
        if allowed < num_chars:
            raise Malformed

    def _run(self, run_of: re.Pattern[str], emit: Emit | None = None) -> Steps[None]:
        """Takes the characters of a class, given as an expression for one or more of them, up to the first other."""
        while (yield from self._peek()):
            match = run_of.match(self._text, self._at)
            if match is None:
                return
            self._take(match.end() - self._at, emit)

    def _take_marker(self, *markers: str) -> Steps[bool]:
        """Whether the text goes on with one of them; it is then held."""
        marker = yield from self._starts_with(*markers)
        if marker is not None:
            self._take(len(marker))
        return marker is not None

    def _expect(self, *markers: str) -> Steps[None]:
        """Takes one of the markers. Raises Malformed, or OutputEnded where the output is over before."""
        if (yield from self._take_marker(*markers)):
            return
        if self._ended:
            rest = self._text[self._at : self._at + max(map(len, markers))]
            if any(marker.startswith(rest) for marker in markers):
                self._take(len(rest))
                raise OutputEnded
        raise Malformed

    def _until(self, markers: tuple[str, ...], other: re.Pattern[str], emit: Emit | None = None) -> Steps[str | None]:
        """Takes text up to a marker, which is returned and not taken; None at the end of the output.

        other: one or more characters with none of which a marker begins.
        """
        while True:
            yield from self._run(other, emit)
            if not (yield from self._peek()):
                return None
            marker = yield from self._starts_with(*markers)
            if marker is not None:
                return marker
            self._take(1, emit)

    def _let_go(self) -> str:
        """The held text, which is held no longer."""
        held = "".join(self._held)
        self._held.clear()
        self._num_held = 0
        return held

    def _emit_content(self, text: str) -> None:
        self._emit(ContentDelta, text)

    def _emit_reasoning(self, text: str) -> None:
        self._emit(ReasoningDelta, text)

    def _emit(self, delta_of: Callable[[str], Delta], text: str) -> None:
        if text:
            if self._delta_of_pieces is not delta_of:
                self._close_delta()
                self._delta_of_pieces = delta_of
            self._pieces.append(text)

    def _close_delta(self) -> None:
        if self._delta_of_pieces is not None:
            self._deltas.append(self._delta_of_pieces("".join(self._pieces)))
            self._pieces.clear()
            self._delta_of_pieces = None


def other_than_first(*markers: str) -> re.Pattern[str]:
    """One or more characters with none of which a marker begins."""
    return re.compile(f"[^{re.escape(''.join(sorted({marker[0] for marker in markers})))}]+")
