"""Formats of tool calls by name: which a model uses, their parsers, and the text of a call that is forced.

Markers of most formats are control tokens: where `needs_special_tokens`, and for harmony's reasoning, the text must be
decoded with `skip_special_tokens=False`; `OutputParser` leaves out the end-of-turn token that then ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.text.incremental_parser import IncrementalParser
from serving.text.output_deltas import ContentDelta, Delta
from serving.text.reasoning_parsers import ThinkParser, reasoning_is_open
from serving.text.tools.call_reader import CallReader
from serving.text.tools.harmony import HarmonyParser
from serving.text.tools.json_formats import HermesParser, Llama3Parser, MistralParser, PhiParser
from serving.text.tools.marked_formats import DeepSeekParser, KimiParser
from serving.text.tools.pythonic import PythonicParser

type JsonSchema = Mapping[str, Any]

_NAME = re.compile(r"[-.\w]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class FrameTexts:
    """The text of calls, with NAME for the name of a tool, around the JSON of the arguments."""

    prefix: str
    suffix: str
    begin: str = ""
    separator: str | None = None  # None: not more than one call
    end: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """`marks`: sets of texts, of which a chat template for the format has all of one."""

    parser: type[CallReader]
    frame: FrameTexts
    marks: tuple[tuple[str, ...], ...]
    model_types: tuple[str, ...] = ()  # of config.json
    needs_special_tokens: bool = True


_JSON_CALL = '{"name": "NAME", "arguments": '

# In the order in which templates are looked at: a template may tell of a format after its own.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "harmony": ToolFormat(
        parser=HarmonyParser,
        frame=FrameTexts(
            prefix="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", suffix="<|call|>"
        ),
        marks=(("<|start|>", "<|channel|>", "<|message|>"),),
        model_types=("gpt_oss",),
    ),
    "kimi_k2": ToolFormat(
        parser=KimiParser,
        # One call, since the number after the name counts them.
        frame=FrameTexts(
            begin=KimiParser.section_begin,
            prefix=f"{KimiParser.call_begin}functions.NAME:0<|tool_call_argument_begin|>",
            suffix=KimiParser.call_end,
            end=KimiParser.section_end,
        ),
        marks=((KimiParser.section_begin,),),
        model_types=("kimi_k2",),
    ),
    # V3.1: its template switches thinking, and writes calls in a form of its own, which the same parser reads.
    "deepseek_v31": ToolFormat(
        parser=DeepSeekParser,
        frame=FrameTexts(
            begin=DeepSeekParser.section_begin,
            prefix=f"{DeepSeekParser.call_begin}NAME<｜tool▁sep｜>",
            suffix=DeepSeekParser.call_end,
            separator="",
            end=DeepSeekParser.section_end,
        ),
        marks=((DeepSeekParser.section_begin, "thinking"),),
    ),
    "deepseek_v3": ToolFormat(
        parser=DeepSeekParser,
        frame=FrameTexts(
            begin=DeepSeekParser.section_begin,
            prefix=f"{DeepSeekParser.call_begin}function<｜tool▁sep｜>NAME\n```json\n",
            suffix=f"\n```{DeepSeekParser.call_end}",
            separator="\n",
            end=DeepSeekParser.section_end,
        ),
        marks=((DeepSeekParser.section_begin,),),
        model_types=("deepseek_v3",),
    ),
    "mistral_v11": ToolFormat(
        parser=MistralParser,
        frame=FrameTexts(prefix="[TOOL_CALLS]NAME[ARGS]", suffix="", separator=""),
        marks=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    "mistral": ToolFormat(
        parser=MistralParser,
        frame=FrameTexts(begin="[TOOL_CALLS][", prefix=_JSON_CALL, suffix="}", separator=", ", end="]"),
        marks=(("[TOOL_CALLS]",),),
        model_types=("mistral",),
    ),
    "hermes": ToolFormat(
        parser=HermesParser,
        frame=FrameTexts(prefix=f"<tool_call>\n{_JSON_CALL}", suffix="}\n</tool_call>", separator="\n"),
        marks=(("<tool_call>",),),
        model_types=("qwen2", "qwen3", "qwen3_moe", "smollm3"),
        needs_special_tokens=False,
    ),
    "phi": ToolFormat(
        parser=PhiParser,
        frame=FrameTexts(begin="<|tool_call|>[", prefix=_JSON_CALL, suffix="}", separator=", ", end="]<|/tool_call|>"),
        marks=(("<|tool_call|>",), ("functools",), ("<|tool|>",)),
        model_types=("phi3",),
    ),
    "pythonic": ToolFormat(
        parser=PythonicParser,
        frame=FrameTexts(begin="[", prefix="NAME(**", suffix=")", separator=", ", end="]"),
        marks=(("[func_name1(",), ("<|python_start|>",), ("tool_code",)),
        model_types=("gemma3_text", "gemma3", "llama4"),
    ),
    "llama3_json": ToolFormat(
        parser=Llama3Parser,
        frame=FrameTexts(prefix='{"name": "NAME", "parameters": ', suffix="}"),
        marks=(("<|python_tag|>",), ('"parameters": dictionary',)),
        model_types=("llama",),
    ),
}

# Marks of formats that no parser here reads, in templates that have marks of others too (Qwen3-Coder, DeepSeek V3.2).
_UNREADABLE_MARKS = ("<function=", "DSML")


def detect_tool_format(template: str | None, model_type: str | None = None) -> str | None:
    """The format in which a model calls tools, a key of `TOOL_FORMATS`; None where it takes none or an unknown one.

    template: the text of the chat template that is used for requests with tools. model_type: as in config.json,
    asked where the template has tools in it without showing how they are called, or is None.
    """
    if template is not None:
        if any(mark in template for mark in _UNREADABLE_MARKS):
            return None
        for name, tool_format in TOOL_FORMATS.items():
            if any(all(mark in template for mark in marks) for marks in tool_format.marks):
                return name
        if "tools" not in template:
            return None
    return next((name for name, entry in TOOL_FORMATS.items() if model_type in entry.model_types), None)


def detect_reasoning_format(template: str | None) -> str | None:
    """How a model marks its reasoning, by its chat template: "harmony", "think", or None where it does not.

    "deepseek_r1" is "think" of a model that always reasons, and may leave out the opening tag.
    """
    if template is None:
        return None
    if all(mark in template for mark in TOOL_FORMATS["harmony"].marks[0]):
        return "harmony"
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template and "thinking" not in template else "think"


REASONING_FORMATS = ("harmony", "think", "deepseek_r1")


class OutputParser:
    """Takes the output of one completion apart: reasoning first, then tool calls out of what is left.

    `feed` takes the detokenised text in increments, `finish` is called at the end; both return deltas, of which each
    text is final. The joined deltas do not depend on how the text was cut.
    """

    def __init__(
        self,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        tool_names: Iterable[str] = (),
        prompt: str = "",
        end_texts: Iterable[str] = (),
    ):
        """tool_names: of the request's tools; none where tools are not to be called. Only they are called.

        prompt: the end of the prompt's text, which tells whether reasoning is open already. end_texts: the texts of
        the model's end-of-turn tokens; one that ends the output is left out. Raises KeyError or ValueError for an
        unknown format.
        """
        names = frozenset(tool_names)
        entry = TOOL_FORMATS[tool_format] if tool_format is not None else None
        if reasoning_format not in (*REASONING_FORMATS, None):
            raise ValueError(
                f"reasoning_format must be one of {', '.join(REASONING_FORMATS)}; got {reasoning_format!r}"
            )
        self._stages: list[IncrementalParser] = []
        if "harmony" in (reasoning_format, tool_format):
            self._end = _EndTrimmer(())  # its ends of messages have a meaning
            self._stages.append(HarmonyParser(names))
            return
        self._end = _EndTrimmer(end_texts)
        if reasoning_format is not None:
            self._stages.append(
                ThinkParser(
                    starts_inside=reasoning_format == "deepseek_r1" or reasoning_is_open(prompt),
                    # Kimi K2 Thinking may go over to its calls without closing its reasoning.
                    ends_before=(KimiParser.section_begin,) if tool_format == "kimi_k2" and names else (),
                )
            )
        if entry is not None and names:
            self._stages.append(entry.parser(names))

    def feed(self, text: str) -> list[Delta]:
        return self._through([ContentDelta(self._end.feed(text))], is_last=False)

    def finish(self) -> list[Delta]:
        return self._through([ContentDelta(self._end.finish())], is_last=True)

    def _through(self, deltas: list[Delta], *, is_last: bool) -> list[Delta]:
        for stage in self._stages:
            parsed: list[Delta] = []
            for delta in deltas:
                parsed += stage.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
            deltas = parsed + stage.finish() if is_last else parsed
        return [delta for delta in deltas if delta != ContentDelta("")]


class _EndTrimmer:
    """Leaves out one of some texts at the end of the output."""

    def __init__(self, end_texts: Iterable[str]):
        self._end_texts = tuple(text for text in end_texts if text)
        self._firsts = {text[0] for text in self._end_texts}
        self._longest = max(map(len, self._end_texts), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        at = len(text)
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start] in self._firsts and any(end.startswith(text[start:]) for end in self._end_texts):
                at = start
                break
        self._held = text[at:]
        return text[:at]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return "" if held in self._end_texts else held


@dataclass(frozen=True, kw_only=True)
class CallText:
    """A call of one tool: the prefix, JSON that fits the schema, and the suffix."""

    name: str
    prefix: str
    schema: JsonSchema
    suffix: str


@dataclass(frozen=True, kw_only=True)
class CallFrame:
    """The text of one or more calls: `begin`, any of `calls`, then others each after `separator`, and `end`.

    separator: None where there can be only one call. Nothing but the JSON may vary; inside it white space between
    tokens may be as JSON allows. Markers in these texts are the model's control tokens where it has such.
    """

    begin: str
    calls: tuple[CallText, ...]
    separator: str | None
    end: str


def call_frame(tool_format: str, tools: Sequence[tuple[str, JsonSchema | None]]) -> CallFrame:
    """The text that answers a request whose tool_choice is `required`, or, for one tool, names it.

    tools: names, with the schema of the arguments (None: any object). What the format's parser reads as these calls
    and nothing else. It stands where the answer begins: in harmony in place of a message, after `<|start|>assistant`.
    Raises KeyError for an unknown format, ValueError for a name that has other characters than letters, digits and `-_.`.
    """
    for name, _ in tools:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a tool's name has letters, digits and any of -_. alone; got {name!r}")
    texts = TOOL_FORMATS[tool_format].frame
    return CallFrame(
        begin=texts.begin,
        calls=tuple(
            CallText(
                name=name,
                prefix=texts.prefix.replace("NAME", name),
                schema={"type": "object"} if schema is None else schema,
                suffix=texts.suffix,
            )
            for name, schema in tools
        ),
        separator=texts.separator,
        end=texts.end,
    )
