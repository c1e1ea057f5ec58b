"""What a chat's output must match: which texts the grammar lets through, read back by the parser of the same format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from http_harness import END, VOCAB_SIZE, byte_tokenizer

from configs.server import ServerConfig
from serving.api.chat_text import ChatText, OutputFormats
from serving.api.constrained_chat import chat_constraint
from serving.api.output_constraint import constrained
from serving.api.schema import ChatCall, parse_chat
from serving.request import RequestError, SamplingParams
from serving.structured.compiler import GrammarCompiler
from serving.structured.constraint import Constraint
from serving.text.tool_parsers import TOOL_FORMATS

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}},
}
OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (END,))
    yield compiler
    compiler.close()


def chat_call(**fields: Any) -> ChatCall:
    return parse_chat({"messages": [{"role": "user", "content": "a"}], **fields}, ServerConfig())


@pytest.fixture(scope="module")
def verdict(tokenizer, compiler):
    def check(call: ChatCall, formats: OutputFormats, text: str, prompt: str = "") -> str:
        """whole: the text may end here; begun: it may go on; refused."""
        constraint = chat_constraint(call, formats, prompt, tokenizer)
        structured = constrained(call.params, constraint).structured
        assert structured is not None
        follower = Constraint(compiler.compile(structured), SamplingParams(max_tokens=None), (END,))
        for byte in text.encode():
            bits = np.unpackbits(follower.mask.view(np.uint8), bitorder="little")
            if follower.is_complete or not bits[byte]:
                return "refused"
            follower.accept(byte)
            follower.find_mask()
            assert follower.error is None
        bits = np.unpackbits(follower.mask.view(np.uint8), bitorder="little")
        return "whole" if follower.is_complete or bits[END] else "begun"

    return check


def text_of(formats: OutputFormats, arguments: list[str]) -> str:
    frame = TOOL_FORMATS[formats.tool].frame
    calls = [frame.prefix.replace("NAME", "weather") + json + frame.suffix for json in arguments]
    return frame.begin + (frame.separator or "").join(calls) + frame.end


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_come_is_one_that_the_format_s_parser_reads(verdict, tokenizer, name, choice):
    formats = OutputFormats(tool=name)
    call = chat_call(tools=TOOLS, tool_choice=choice)
    right = text_of(formats, ['{"city": "Oslo", "days": 2}'])
    assert verdict(call, formats, right) == "whole"
    message = ChatText(call, formats, "", tokenizer).whole(right, [])
    (read,) = message["tool_calls"]
    assert read["function"]["name"] == "weather" and not message["content"]
    assert json.loads(read["function"]["arguments"]) == {"city": "Oslo", "days": 2}
    assert verdict(call, formats, right[:-1]) == "begun"
    for wrong in (
        "hello",
        right.replace("weather", "whether"),
        right.replace("2", '"2"'),
        right.replace("city", "town"),
    ):
        assert verdict(call, formats, wrong) == "refused", wrong
    other = text_of(formats, ["{}"]).replace("weather", "now")
    assert verdict(call, formats, other) == ("whole" if choice == "required" else "refused")


@pytest.mark.parametrize("name", [name for name, entry in TOOL_FORMATS.items() if entry.frame.separator is not None])
def test_several_calls_may_come_where_they_are_asked_for(verdict, tokenizer, name):
    formats = OutputFormats(tool=name)
    two = text_of(formats, ['{"city": "a"}', '{"city": "b"}'])
    call = chat_call(tools=TOOLS, tool_choice="required")
    assert verdict(call, formats, two) == "whole"
    assert len(ChatText(call, formats, "", tokenizer).whole(two, [])["tool_calls"]) == 2
    for one in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}):
        assert verdict(chat_call(tools=TOOLS, **one), formats, two) == "refused"


def test_reasoning_may_come_before_a_call_and_must_where_the_prompt_opened_it(verdict):
    formats = OutputFormats(tool="hermes", reasoning="think")
    call = chat_call(tools=TOOLS, tool_choice="required")
    right = text_of(formats, ['{"city": "a"}'])
    for text in (right, f"<think>\nany </thin <tool_call> text\n</think>\n\n{right}", f"<think></think>{right}"):
        assert verdict(call, formats, text) == "whole", text
    assert verdict(call, formats, f"<think>a</think>b{right}") == "refused"
    assert verdict(call, formats, f"text</think>{right}", OPEN_PROMPT) == "whole"
    assert verdict(call, formats, right, OPEN_PROMPT) == "begun"  # it is reasoning


def test_a_response_format_holds_for_the_answer_after_reasoning(verdict):
    formats = OutputFormats(reasoning="think")
    for response_format, right in ((JSON_SCHEMA, '{"x": 1}'), ({"type": "json_object"}, '{"a": [{}]}')):
        call = chat_call(response_format=response_format)
        assert verdict(call, formats, right) == verdict(call, formats, f"<think>so {{</think>\n{right}") == "whole"
        assert verdict(call, formats, f"so</think>{right}", OPEN_PROMPT) == "whole"
        assert verdict(call, formats, "[1]") == "refused"
        assert verdict(call, OutputFormats(), right) == "whole"
        assert verdict(call, OutputFormats(), "<") == "refused"
    harmony = OutputFormats(reasoning="harmony")
    text = '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{"x": 1}'
    assert verdict(chat_call(response_format=JSON_SCHEMA), harmony, text) == "whole"


def test_a_response_format_beside_tools_holds_for_an_answer_without_a_call(verdict):
    formats = OutputFormats(tool="hermes")
    call = chat_call(tools=TOOLS, response_format=JSON_SCHEMA)
    assert verdict(call, formats, '{"x": 1}') == verdict(call, formats, text_of(formats, ['{"city": "a"}'])) == "whole"
    assert verdict(call, formats, "hello") == "refused"
    none = chat_call(tools=TOOLS, response_format=JSON_SCHEMA, tool_choice="none")
    assert verdict(none, formats, "<tool_call>") == "refused"


def strict_tools(strict: bool) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": strict}}]


def test_a_strict_tool_may_be_called_in_any_text_with_arguments_that_fit(verdict, tokenizer):
    formats = OutputFormats(tool="hermes", reasoning="think")
    call = chat_call(tools=strict_tools(True))
    right = text_of(formats, ['{"city": "a"}'])
    for text in ("", "hello", f"<think>a</think>one moment{right}", f"{right}\n{right}"):
        assert verdict(call, formats, text) == "whole", text
    assert verdict(call, formats, right.replace("city", "town")) == "refused"
    assert chat_constraint(chat_call(tools=strict_tools(False)), formats, "", tokenizer) is None
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.strict: cannot be kept"):
        chat_constraint(call, OutputFormats(tool="pythonic"), "", tokenizer)


def test_text_in_a_schema_that_means_something_in_grammars_is_only_text(verdict):
    formats = OutputFormats(tool="hermes")
    odd = '%json {"a" %llguidance {"x": 1} "[temperature=2]" \\ \\% start: /a/'
    schema = {"type": "object", "description": odd, "properties": {"a": {"const": odd}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    call = chat_call(tools=tools, tool_choice="required")
    assert verdict(call, formats, text_of(formats, [json.dumps({"a": odd})])) == "whole"


@pytest.mark.parametrize(
    ("fields", "formats", "message"),
    [
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": JSON_SCHEMA},
            {},
            "response_format.json_schema",
        ),
        (
            {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
            {},
            "structured_outputs.regex: does not go with tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            {},
            "tools[0].function.parameters.type: must be object",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
                ]
            },
            {},
            "tools[0].function.parameters.properties.a.not: is not supported",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a:b"}}]}, {}, "tools: a tool's name has letters"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            {"reasoning": "think"},
            "response_format.json_schema.schema.not: is not supported",
        ),
        ({"structured_outputs": {"regex": "a"}}, {"reasoning": "deepseek_r1"}, "structured_outputs.regex: does not go"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tokenizer, fields, formats, message):
    if "tools" in fields and "structured_outputs" not in fields:
        fields = {"tool_choice": "required", **fields}
    with pytest.raises(RequestError) as refused:
        chat_constraint(chat_call(**fields), OutputFormats(**{"tool": "hermes", **formats}), "", tokenizer)
    assert str(refused.value).startswith(message)
