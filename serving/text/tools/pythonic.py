"""Calls written as Python: `[get_weather(city="Oslo", days=3), now()]`. Read, never run."""

from __future__ import annotations

import json
import re

from serving.text.incremental_parser import Malformed, Steps
from serving.text.tools.tool_parser import ToolParser

MAX_DEPTH = 64  # of values inside each other

_TOOL_NAME = re.compile(r"[-.\w]+", re.ASCII)
_IDENTIFIER = re.compile(r"\w+")
_WORD = re.compile(r"[-+.\w]+", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_JSON_OF_WORD = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_ESCAPE = re.compile(r"\\(\n|[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3})")
_CHARACTER_OF_ESCAPE = dict(zip("\n\\'\"abfnrtv", ["", "\\", "'", '"', *"\a\b\f\n\r\t\v"], strict=True))


class PythonicParser(ToolParser):
    """A list of calls as the whole answer (Llama 3.2 and 4, Gemma 3), between `<|python_start|>` and `<|python_end|>`
    (Llama 4), or in a fence of `tool_code`, where one call needs no brackets (Gemma).

    Arguments are keywords with literals: strings, numbers as JSON has them, True, False, None, lists and dicts with
    strings as keys, also JSON's own spellings, and `**{...}`. Each call is given out when it is complete, its
    arguments written as JSON; a call that is cut off or has anything else in it is content.
    """

    openers = ("<|python_start|>", "```tool_code")
    openers_at_start = ("[",)
    closers = ("<|python_end|>", "```")

    def _calls(self, opener: str) -> Steps[None]:
        yield from self._space()
        if opener and (yield from self._need()) != "[":
            yield from self._python_call()
        else:
            yield from self._expect("[")
            while True:
                yield from self._python_call()
                if not (yield from self._take_marker(",")):
                    break
            yield from self._expect("]")
        if opener:
            yield from self._space()
            yield from self._expect(*self.closers)

    def _python_call(self) -> Steps[None]:
        """Reads a call and the white space around it."""
        yield from self._space()
        yield from self._need()
        self._is_undecided = True
        name = self._known((yield from self._text_of(_TOOL_NAME)))
        yield from self._space()
        yield from self._expect("(")
        yield from self._space()
        keys: set[str] = set()
        members: list[str] = []
        while not (yield from self._take_marker(")")):
            if (yield from self._take_marker("**")):
                members += yield from self._members(keys)
            else:
                key = yield from self._text_of(_IDENTIFIER)
                yield from self._space()
                yield from self._expect("=")
                members.append((yield from self._member(keys, key, depth=1)))
            yield from self._comma_or(")")
        self._start_call(name)
        self._emit_arguments(f"{{{', '.join(members)}}}")
        yield from self._space()

    def _text_of(self, characters: re.Pattern[str]) -> Steps[str]:
        mark = len(self._held)
        yield from self._run(characters)
        yield from self._need()
        return "".join(self._held[mark:])

    def _member(self, keys: set[str], key: str, depth: int) -> Steps[str]:
        if not key or key in keys:
            raise Malformed
        keys.add(key)
        yield from self._space()
        value = yield from self._value(depth)
        return f"{json.dumps(key, ensure_ascii=False)}: {value}"

    def _members(self, keys: set[str], depth: int = 0) -> Steps[list[str]]:
        members: list[str] = []
        yield from self._expect("{")
        yield from self._space()
        while not (yield from self._take_marker("}")):
            key = yield from self._python_string()
            yield from self._space()
            yield from self._expect(":")
            members.append((yield from self._member(keys, key, depth + 1)))
            yield from self._comma_or("}")
        return members

    def _comma_or(self, end: str) -> Steps[None]:
        yield from self._space()
        if (yield from self._take_marker(",")):
            yield from self._space()
        elif (yield from self._need()) != end:
            raise Malformed

    def _value(self, depth: int) -> Steps[str]:
        """A literal, as JSON."""
        if depth > MAX_DEPTH:
            raise Malformed
        character = yield from self._need()
        if character in "\"'":
            return json.dumps((yield from self._python_string()), ensure_ascii=False)
        if character == "{":
            return f"{{{', '.join((yield from self._members(set(), depth)))}}}"
        if character == "[":
            self._take(1)
            yield from self._space()
            items: list[str] = []
            while not (yield from self._take_marker("]")):
                items.append((yield from self._value(depth + 1)))
                yield from self._comma_or("]")
            return f"[{', '.join(items)}]"
        word = yield from self._text_of(_WORD)
        if word in _JSON_OF_WORD:
            return _JSON_OF_WORD[word]
        if _NUMBER.fullmatch(word) is None:
            raise Malformed
        return word

    def _python_string(self) -> Steps[str]:
        """The text of a string literal, also of a triple-quoted one, and of one with line feeds in it."""
        quote = yield from self._need()
        if quote not in "\"'":
            raise Malformed
        end = quote * 3 if (yield from self._take_marker(quote * 3)) else quote
        if end == quote:
            self._take(1)
        mark = len(self._held)
        while True:
            yield from self._run(_PLAIN[quote])
            if (yield from self._need()) == "\\":
                self._take(1)
                yield from self._need()
                self._take(1)
            elif (yield from self._starts_with(end)) is not None:
                break
            else:
                self._take(1)
        text = "".join(self._held[mark:])
        self._take(len(end))
        # Models write characters beyond U+FFFF as two escapes, as in JSON; one of them alone is no character.
        text = _ESCAPE.sub(_unescaped, text)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _unescaped(escape: re.Match[str]) -> str:
    kind = escape[1]
    if kind in _CHARACTER_OF_ESCAPE:
        return _CHARACTER_OF_ESCAPE[kind]
    code = int(kind[1:], 16) if kind[0] in "xuU" else int(kind, 8)
    return chr(code) if code < 0x110000 else "\ufffd"
