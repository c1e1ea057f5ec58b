"""Reads a tool call and its JSON arguments out of output text.

A call starts, and can no longer be taken back, once its name is known and its arguments have begun as an object
(`{` and then `"` or `}`). Until then it is held, and whatever is wrong with it makes it content, as it was written.
From then on its arguments are given out as they come, up to the brace that closes them: text that only brackets and
strings are looked at in, so that it may be anything a model takes for JSON (`{"a": 1,}`). They end before that where
the output ends, or at a character that no JSON has outside strings; such arguments are a partial call.
"""

from __future__ import annotations

import json
import re
import uuid

from serving.text.incremental_parser import SPACE, Emit, IncrementalParser, Malformed, Steps
from serving.text.output_deltas import Delta, ToolCallArguments, ToolCallStart

_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE_STRINGS = re.compile(r"[-+.,:\w\s]+", re.ASCII)
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)


class CallReader(IncrementalParser):
    """Base of the parsers that give tool calls. Only `tool_names` are called: a call of another name is content."""

    def __init__(self, tool_names: frozenset[str]):
        super().__init__()
        self.tool_names = tool_names
        self.num_calls = 0
        self._is_undecided = False  # what is held may be the beginning of a call that has not started

    def _new_call_id(self) -> str:
        return f"call_{uuid.uuid4().hex}"

    def _start_call(self, name: str, call_id: str | None = None) -> None:
        self._close_delta()
        index = self.num_calls
        self._deltas.append(ToolCallStart(index, call_id or self._new_call_id(), name))
        self.num_calls += 1
        self._let_go()
        self._is_undecided = False

        def delta_of(text: str) -> Delta:
            return ToolCallArguments(index, text)

        self._arguments_delta = delta_of

    def _emit_arguments(self, text: str) -> None:
        self._emit(self._arguments_delta, text)

    def _known(self, name: str) -> str:
        """`name`. Raises Malformed where it is not a tool's."""
        if name not in self.tool_names:
            raise Malformed
        return name

    def _space(self) -> Steps[None]:
        yield from self._run(SPACE)

    def _call_of(self, name: str, call_id: str | None = None) -> Steps[None]:
        """Reads the arguments of a call whose name was read, and starts it."""
        yield from self._space()
        opening = yield from self._open_arguments()
        self._start_call(name, call_id)
        self._emit_arguments(opening)
        yield from self._close_brackets(self._emit_arguments)

    def _call_object(self, *, needs_arguments: bool = False) -> Steps[None]:
        """Reads and starts a call written as `{"name": ..., "arguments": {...}}`, with `parameters` for `arguments`.

        The two may come in any order, other keys are passed over, and arguments that are missing or null are `{}`
        (with needs_arguments, such an object is no call). A brace that is missing at the end is not missed.
        """
        yield from self._expect("{")
        self._is_undecided = True
        name: str | None = None
        arguments: str | None = None  # read before the name
        has_started = False
        while True:
            yield from self._space()
            if (yield from self._take_marker("}")):
                break
            key = yield from self._string()
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            if key == '"name"' and name is None:
                name = self._known(_unquoted((yield from self._string())))
            elif key in ('"arguments"', '"parameters"') and arguments is None and not has_started:
                if (yield from self._take_marker("null")):
                    arguments = "{}"
                elif name is None:
                    arguments = yield from self._whole_arguments()
                else:
                    yield from self._call_of(name)
                    has_started = True
            else:
                yield from self._any_value()
            if name is not None and arguments is not None and not has_started:
                self._start_call(name)
                self._emit_arguments(arguments)
                has_started = True
            yield from self._space()
            if not (yield from self._take_marker(",")) and (yield from self._need()) != "}":
                if has_started:
                    return
                raise Malformed
        if not has_started:
            if name is None or needs_arguments:
                raise Malformed
            self._start_call(name)
            self._emit_arguments("{}")
        self._let_go()  # a fault from here on does not make the end of this call content

    def _call_array(self) -> Steps[None]:
        """Reads and starts the calls of an array of objects as of `_call_object`, which may be empty."""
        yield from self._expect("[")
        yield from self._space()
        if (yield from self._take_marker("]")):
            return
        while True:
            yield from self._call_object()
            yield from self._space()
            if not (yield from self._take_marker(",")):
                break
            yield from self._space()
        yield from self._expect("]")

    def _open_arguments(self) -> Steps[str]:
        """Takes the beginning of an object."""
        mark = len(self._held)
        yield from self._expect("{")
        yield from self._space()
        if (yield from self._need()) not in '"}':
            raise Malformed
        return "".join(self._held[mark:])

    def _whole_arguments(self) -> Steps[str]:
        mark = len(self._held)
        yield from self._open_arguments()
        yield from self._close_brackets()
        return "".join(self._held[mark:])

    def _close_brackets(self, emit: Emit | None = None, depth: int = 1) -> Steps[None]:
        """Takes text until as many brackets are closed as are open. Memory does not grow with the depth."""
        while depth:
            yield from self._run(_OUTSIDE_STRINGS, emit)
            character = yield from self._need()
            if character == '"':
                yield from self._string_characters(emit)
            elif character in "{}[]":
                self._take(1, emit)
                depth += 1 if character in "{[" else -1
            else:
                raise Malformed

    def _any_value(self) -> Steps[None]:
        character = yield from self._need()
        if character == '"':
            yield from self._string_characters()
        elif character in "{[":
            self._take(1)
            yield from self._close_brackets()
        elif _SCALAR.match(character):
            yield from self._run(_SCALAR)
        else:
            raise Malformed

    def _string(self) -> Steps[str]:
        """A JSON string as it is written, with its quotes."""
        mark = len(self._held)
        if (yield from self._need()) != '"':
            raise Malformed
        yield from self._string_characters()
        return "".join(self._held[mark:])

    def _string_characters(self, emit: Emit | None = None) -> Steps[None]:
        self._take(1, emit)
        while True:
            yield from self._run(_IN_STRING, emit)
            character = yield from self._need()
            self._take(1, emit)
            if character == '"':
                return
            yield from self._need()
            self._take(1, emit)


def _unquoted(string: str) -> str:
    """The text of a JSON string. Raises Malformed."""
    try:
        text: str = json.loads(string)
    except ValueError:
        raise Malformed from None
    return text
