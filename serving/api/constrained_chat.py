"""What the output of a chat must match: tool calls that are required, tools that are strict, and JSON after reasoning."""

from __future__ import annotations

from typing import Any

from serving.api.chat_text import OutputFormats
from serving.api.output_constraint import OutputConstraint
from serving.api.schema import ChatCall
from serving.api.tools import ToolSpec
from serving.request import RequestError, StructuredOutput
from serving.structured.schema_check import check_schema
from serving.structured.tool_calls import Reasoning, TaggedJson, tagged_json
from serving.text.reasoning_parsers import CLOSE, OPEN, reasoning_is_open
from serving.text.tokenizer import Tokenizer
from serving.text.tool_parsers import TOOL_FORMATS, CallFrame, call_frame

_HARMONY_ANSWER = "<|channel|>final<|message|>"


def chat_constraint(
    call: ChatCall, formats: OutputFormats, prompt: str, tokenizer: Tokenizer
) -> OutputConstraint | None:
    """What the output must match; None: anything. `prompt`: the end of the prompt's text. Raises RequestError.

    That of the call itself holds for the answer after reasoning. Where tools may be called, it holds for an answer
    that calls none.
    """
    constraint, choice = call.constraint, call.tool_choice.mode
    reasoning = _reasoning(formats, prompt)
    may_call = bool(call.tool_names)
    if choice in ("required", "named"):
        if constraint is not None:
            raise RequestError(constraint.field, f"does not go with tool_choice {choice}: the output is a call")
        return _grammar("tool_choice", _calls(call, formats, tokenizer, reasoning))
    if constraint is None:
        if may_call and any(tool.strict for tool in call.tools):
            return _grammar("tools", _strict_calls(call, formats, tokenizer))
        return None
    if not may_call and reasoning is None:
        return constraint
    if constraint.kind not in ("json_schema", "json_object"):
        if may_call:
            raise RequestError(constraint.field, "does not go with tools: set tool_choice to none")
        if reasoning is not None and (reasoning.is_open or formats.reasoning == "harmony"):
            raise RequestError(
                constraint.field, f"does not go with reasoning, which {constraint.kind} does not foresee"
            )
        return constraint
    schema = constraint.value if constraint.kind == "json_schema" else {"type": "object"}
    check_schema(constraint.field, schema)
    answer = TaggedJson(begin=_HARMONY_ANSWER if formats.reasoning == "harmony" else "", schema=schema)
    if may_call:
        return _grammar(constraint.field, _calls(call, formats, tokenizer, reasoning, otherwise=answer))
    return _grammar(constraint.field, tagged_json([answer], tokenizer, reasoning=reasoning))


def _grammar(field: str, structured: StructuredOutput) -> OutputConstraint:
    return OutputConstraint(kind=structured.kind, value=structured.value, field=field)


def _reasoning(formats: OutputFormats, prompt: str) -> Reasoning | None:
    if formats.reasoning is None:
        return None
    if formats.reasoning == "harmony":
        return Reasoning(
            begin="<|channel|>analysis<|message|>", end="<|end|>", after="<|start|>assistant", is_open=False
        )
    return Reasoning(begin=OPEN, end=CLOSE, is_open=formats.reasoning == "deepseek_r1" or reasoning_is_open(prompt))


def _calls(
    call: ChatCall,
    formats: OutputFormats,
    tokenizer: Tokenizer,
    reasoning: Reasoning | None,
    otherwise: TaggedJson | None = None,
) -> StructuredOutput:
    frame = _frame(call, formats)
    has_one = call.tool_choice.mode == "named" or not call.parallel_tool_calls or frame.separator is None
    return tagged_json(
        [TaggedJson(begin=text.prefix, schema=text.schema, end=text.suffix) for text in frame.calls],
        tokenizer,
        max_calls=1 if has_one else None,
        separator=frame.separator or "",
        before=frame.begin,
        after=frame.end,
        otherwise=otherwise,
        reasoning=reasoning,
    )


def _strict_calls(call: ChatCall, formats: OutputFormats, tokenizer: Tokenizer) -> StructuredOutput:
    """Any text, in which each call is one of a tool, with arguments that fit."""
    frame = _frame(call, formats)
    assert formats.tool is not None
    openers = getattr(TOOL_FORMATS[formats.tool].parser, "openers", ())
    tags = [
        TaggedJson(begin=frame.begin + text.prefix, schema=text.schema, end=text.suffix + frame.end)
        for text in frame.calls
    ]
    triggers = [opener for opener in openers if all(tag.begin.startswith(opener) for tag in tags)]
    if not triggers:
        index = next(index for index, tool in enumerate(call.tools) if tool.strict)
        raise RequestError(
            f"tools[{index}].function.strict", "cannot be kept with this model unless tool_choice asks for a call"
        )
    max_calls = None if call.parallel_tool_calls else 1
    return tagged_json(tags, tokenizer, min_calls=0, max_calls=max_calls, trigger=triggers[0])


def _frame(call: ChatCall, formats: OutputFormats) -> CallFrame:
    assert formats.tool is not None  # or the call was refused
    tools = [(index, tool) for index, tool in enumerate(call.tools) if tool.name in call.tool_names]
    specs = [(tool.name, _arguments_schema(f"tools[{index}].function.parameters", tool)) for index, tool in tools]
    try:
        return call_frame(formats.tool, specs)
    except ValueError as error:
        raise RequestError("tools", str(error)) from None


def _arguments_schema(field: str, tool: ToolSpec) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    if schema["type"] != "object":
        raise RequestError(f"{field}.type", f"must be object, got {schema['type']!r}")
    check_schema(field, schema)
    return schema
