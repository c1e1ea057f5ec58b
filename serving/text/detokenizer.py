"""Output text token by token: whole characters only, and nothing that could still become a stop string."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """The part of `serving.text.tokenizer.Tokenizer` that is needed here."""

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes: ...


class IncrementalDetokenizer:
    """Turns the output tokens of one completion into text, and finds its stop strings.

    The pieces that `add` and `finish` return, joined, are `text`. Without a stop string in it that is exactly
    `tokenizer.decode(output_ids, skip_special_tokens=..., continuation=True)`: the bytes of the tokens as UTF-8, with
    U+FFFD for what is none. The output goes on after the prompt, so a space that the first token brings stays
    (" Paris" after "The capital is"), in a stream as in a whole answer.

    A stop string ends the text at its first character, wherever it lies in a token, or after its last one with
    `include_stop_str_in_output`. The match that is complete first counts, of several complete at the same character
    the longest. Matches are looked for in output text alone, and count once `min_tokens` tokens are there: the token
    that completes the match must be number `min_tokens` or a later one.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: tuple[str, ...] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._matchers = [_StopMatcher(text) for text in stop]
        self._include_stop = include_stop_str_in_output
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may be the beginning of a stop string
        self._released: list[str] = []
        self.stopped: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._released)

    def add(self, token_id: int) -> str:
        """Text that became sure with this token; none after a stop string was found."""
        if self.stopped is not None:
            return ""
        self._num_tokens += 1
        data = self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip_special_tokens)
        return self._advance(self._decoder.decode(data))

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that was never completed. No token may follow."""
        if self.stopped is not None:
            return ""
        piece = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            piece += self._release(self._held)
            self._held = ""
        return piece

    def _advance(self, new_text: str) -> str:
        if not self._matchers:
            return self._release(new_text)
        may_stop = self._num_tokens >= self._min_tokens
        for index, character in enumerate(new_text):
            complete = [matcher for matcher in self._matchers if matcher.advance(character)]
            if complete and may_stop:
                self.stopped = max((matcher.stop for matcher in complete), key=len)
                end = len(self._held) + index + 1
                cut = end if self._include_stop else end - len(self.stopped)
                return self._release((self._held + new_text)[:cut])
        available = self._held + new_text
        sure = len(available) - max(matcher.num_matched for matcher in self._matchers)
        self._held = available[sure:]
        return self._release(available[:sure])

    def _release(self, piece: str) -> str:
        if piece:
            self._released.append(piece)
        return piece


class _StopMatcher:
    """How much of the beginning of `stop` the text so far ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0  # < len(stop): a complete match falls back to its longest shorter one
        # borders[n]: length of the longest proper prefix of stop[:n] that it also ends with
        self._borders = [0, 0]
        for character in stop[1:]:
            length = self._borders[-1]
            while length and stop[length] != character:
                length = self._borders[length]
            self._borders.append(length + 1 if stop[length] == character else 0)

    def advance(self, character: str) -> bool:
        """Whether the text ends with the whole stop string after this character."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        if self.num_matched == len(self.stop):
            self.num_matched = self._borders[self.num_matched]
            return True
        return False
