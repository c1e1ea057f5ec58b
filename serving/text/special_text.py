"""Finding the text of special tokens (markers such as `<|im_end|>`) in a longer text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, kw_only=True)
class SpecialToken:
    """A token that stands for one exact text. `lstrip` and `rstrip`: it takes the white space beside it with it."""

    token_id: int
    text: str
    visible: bool = False  # a marker that belongs to decoded text
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False  # not inside a word


def looks_special(text: str) -> bool:
    """Whether a token is a control marker by its spelling: some models forget to flag theirs as special."""
    for opening, closing in (("<|", "|>"), ("<｜", "｜>"), ("[|", "|]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            return True
    return re.fullmatch(r"<unused\d+>|<pad>|<mask>|<2mass>|\[@BOS@\]", text) is not None


class SpecialTextSplitter:
    """Splits text at special tokens: at each place the longest token, from left to right."""

    def __init__(self, tokens: Iterable[SpecialToken]):
        self._tokens = {token.text: token for token in tokens}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile(f"[{''.join(map(re.escape, lengths))}]" if lengths else r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """Ordinary pieces of `text` as strings (none empty) and special tokens as their ids, in order."""
        pieces: list[str | int] = []
        start = search_from = 0
        while candidate := self._first.search(text, search_from):
            at = candidate.start()
            token = self._match(text, at)
            if token is None:
                search_from = at + 1
                continue
            before = text[start:at]
            if token.lstrip:
                before = before.rstrip()
            if before:
                pieces.append(before)
            pieces.append(token.token_id)
            start = at + len(token.text)
            if token.rstrip:
                start = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # matches the empty string too
            search_from = start
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def _match(self, text: str, at: int) -> SpecialToken | None:
        for length in self._lengths[text[at]]:
            token = self._tokens.get(text[at : at + length])
            if token is None:
                continue
            if token.single_word and (_is_word(text[at - 1 : at]) or _is_word(text[at + length : at + length + 1])):
                continue
            return token
        return None


def _is_word(character: str) -> bool:
    return re.match(r"\w", character) is not None
