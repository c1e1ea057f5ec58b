"""Formats in which a call is a JSON object with its name and arguments, alone or in an array."""

from __future__ import annotations

import re
import secrets
import string

from serving.text.incremental_parser import Malformed, Steps
from serving.text.tools.tool_parser import ToolParser

_NAME = re.compile(r"[-.\w]+", re.ASCII)
_ID = re.compile(r"[A-Za-z0-9]+")


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM3.

    With an array of such objects between the tags: SmolLM2, which writes an empty one for no call.
    """

    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def _calls(self, opener: str) -> Steps[None]:
        yield from self._space()
        if (yield from self._need()) == "[":
            yield from self._call_array()
        else:
            yield from self._call_object()
            yield from self._space()
            while (yield from self._need()) == "{":  # more objects, one a line
                yield from self._call_object()
                yield from self._space()
        yield from self._space()
        yield from self._expect(*self.closers)


class Llama3Parser(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`; several with `;` between.

    Without the tag an object needs its arguments to be a call.
    https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    """

    openers = ("<|python_tag|>",)
    openers_at_start = ("{",)

    def _calls(self, opener: str) -> Steps[None]:
        yield from self._space()
        yield from self._call_object(needs_arguments=not opener)
        while True:
            yield from self._space()
            if not (yield from self._take_marker(";")):
                return
            yield from self._space()
            yield from self._call_object(needs_arguments=not opener)


class PhiParser(ToolParser):
    """`functools[{"name": ..., "arguments": {...}}]` and `<|tool_call|>[...]<|/tool_call|>`: Phi-4-mini."""

    openers = ("functools", "<|tool_call|>")
    closers = ("<|/tool_call|>", "</|tool_call|>")

    def _calls(self, opener: str) -> Steps[None]:
        if opener == "functools":
            yield from self._call_array()
            return
        yield from self._space()
        if (yield from self._need()) == "[":
            yield from self._call_array()
        else:
            yield from self._call_object()
        yield from self._space()
        yield from self._expect(*self.closers)


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]name[ARGS]{...}` from tokenizer version 11 on.

    The newer form may leave out `[ARGS]` and may have `[CALL_ID]` with an id after the name. Templates of Mistral's
    refuse ids that are not nine letters and digits.
    """

    openers = ("[TOOL_CALLS]",)

    def _new_call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self, opener: str) -> Steps[None]:
        yield from self._space()
        if (yield from self._need()) == "[":
            yield from self._call_array()
            return
        name = yield from self._word(_NAME)
        self._known(name)
        call_id = None
        yield from self._space()
        if (yield from self._take_marker("[CALL_ID]")):
            call_id = yield from self._word(_ID)
            yield from self._space()
        yield from self._take_marker("[ARGS]")
        yield from self._call_of(name, call_id)

    def _word(self, characters: re.Pattern[str]) -> Steps[str]:
        mark = len(self._held)
        yield from self._run(characters)
        yield from self._need()
        word = "".join(self._held[mark:])
        if not word:
            raise Malformed
        return word
