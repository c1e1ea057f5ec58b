"""Keeps the text of control tokens in what a client sends from becoming those tokens in a rendered chat.

A chat template writes its own markers (`<|im_start|>`) between texts of the client, and the result is one string.
Before rendering, each character of the client's texts with which a control token could begin is exchanged for a
character that appears nowhere else, its stand-in. In the rendered text no control token then begins in the client's
part, whatever the template joins it with; once the text has been split at the template's own markers, the stand-ins
are changed back, and ordinary text is encoded whole, as it would be without markers near it.

Templates look into messages too (`'</think>' in content`). Strings that stand in the template's expressions are
therefore left readable, where they are no part of a control token. A template that still renders another text than
it would without stand-ins (one that escapes every `<`, say) gets them only where a control token seems to begin.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Characters that are printable, have no case, are no white space and hardly occur: SignWriting, then rare ideographs.
_CANDIDATES = (range(0x1D800, 0x1DA00), range(0x20000, 0x2A6D7))
_ANY_CANDIDATE = re.compile("[\U0001d800-\U0001d9ff\U00020000-\U0002a6d6]")


class ControlTextHider:
    """For one vocabulary's control tokens and one template's strings."""

    def __init__(self, control_texts: Iterable[str], template_strings: Iterable[str]):
        texts = {text for text in control_texts if text.strip()}
        # A token that begins with a letter or a space is hidden where it stands whole, at its first visible
        # character; any other at its first character, wherever that stands.
        whole = {text for text in texts if text[0].isalnum() or text[0].isspace()}
        self._second: dict[str, set[str]] = {}
        for text in sorted(texts - whole):
            self._second.setdefault(text[0], set()).add(text[1:2])
        self.originals = sorted({*self._second, *(text.strip()[0] for text in whole)})
        readable = {text for text in template_strings if self._is_harmless(text, texts - whole)}
        before = f"(?P<readable>{_alternatives(readable)})|{_alternatives(whole)}"
        self._everywhere = re.compile("|".join((before, *map(re.escape, self._second))))
        self._at_tokens = re.compile("|".join((before, *map(self._seems_to_begin, self._second))))
        self._any_original = re.compile("|".join(map(re.escape, self.originals)) or "(?!)")

    def _is_harmless(self, text: str, control_texts: set[str]) -> bool:
        """Whether `text` holds a first character, and no control token could begin at any of them."""
        starts = [index for index, character in enumerate(text) if character in self._second]
        return bool(starts) and not any(
            control.startswith(text[start:]) or text.startswith(control, start)
            for start in starts
            for control in control_texts
        )

    def _seems_to_begin(self, first: str) -> str:
        """Expression for `first` before the second character of a token, or where a template may join another text."""
        seconds = self._second[first]
        return re.escape(first) + ("" if "" in seconds else rf"(?=[{''.join(map(re.escape, sorted(seconds)))}]|\s|\Z)")

    def is_needed(self, value: Any) -> bool:
        """Whether a JSON value holds any character that `hide` could exchange."""
        return any(self._any_original.search(text) for text in _strings(value))

    def hide(self, value: Any, stand_ins: StandIns, *, everywhere: bool) -> Any:
        """A copy of a JSON value with stand-ins in its strings and keys: everywhere, or where a token seems to begin."""
        pattern = self._everywhere if everywhere else self._at_tokens

        def exchange(match: re.Match[str]) -> str:
            found = match[0]
            if match.lastgroup == "readable":
                return found
            at = len(found) - len(found.lstrip())
            return found[:at] + stand_ins.stand_in_of[found[at]] + found[at + 1 :]

        return _map_strings(value, lambda text: pattern.sub(exchange, text))


class StandIns:
    """The stand-ins of one rendering. `end_mark`: one more character that occurs nowhere, to mark a place with."""

    def __init__(self, originals: Iterable[str], *values: Any):
        """For `originals`, none of them in the strings of the JSON `values`. Raises ValueError if none are left."""
        taken = {
            character for value in values for text in _strings(value) for character in _ANY_CANDIDATE.findall(text)
        }
        free = (chr(code) for code in itertools.chain(*_CANDIDATES) if chr(code) not in taken)
        try:
            self.stand_in_of: Mapping[str, str] = {original: next(free) for original in originals}
            self.end_mark = next(free)
        except StopIteration:
            raise ValueError("uses too many different characters") from None
        self._table = str.maketrans({stand_in: original for original, stand_in in self.stand_in_of.items()})

    def restore(self, text: str) -> str:
        return text.translate(self._table)


def _alternatives(texts: Iterable[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value
