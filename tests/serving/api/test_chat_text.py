"""Messages and deltas out of scripted output texts: tool calls, reasoning, and that a stream is the whole in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from http_harness import END, byte_tokenizer
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.api.chat_text import ChatText, OutputFormats, check_formats
from serving.api.schema import ChatCall, parse_chat
from serving.request import RequestError

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look_up", "now")
]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a \\"b\\" }"}}\n</tool_call>'
HERMES = OutputFormats(tool="hermes", reasoning="think")
CONFIG = ServerConfig()


def chat_call(**fields: Any) -> ChatCall:
    return parse_chat({"messages": [{"role": "user", "content": "a"}], **fields}, CONFIG)


def chat_text(call: ChatCall, formats: OutputFormats = HERMES, prompt: str = "") -> ChatText:
    return ChatText(call, formats, prompt, byte_tokenizer())


def whole(
    call: ChatCall, text: str, formats: OutputFormats = HERMES, prompt: str = ""
) -> tuple[dict[str, Any], str, int]:
    """(message, finish reason, reasoning tokens); a stream in random pieces must say the same."""
    parser = chat_text(call, formats, prompt)
    message = parser.whole(text, list(text.encode()))
    ChatCompletionMessage.model_validate({"role": "assistant", **message}, strict=True)
    result = message, parser.finish_reason("stop"), parser.num_reasoning_tokens
    for _ in range(5):
        seed = random.randrange(2**32)
        assert streamed(call, text, formats, prompt, seed) == _without_ids(result), f"seed {seed}"
    return result


def _without_ids(result: tuple[dict[str, Any], str, int]) -> tuple[dict[str, Any], str, int]:
    message, *rest = json.loads(json.dumps(result))
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    message["content"] = message["content"] or ""
    return message, *rest


def streamed(
    call: ChatCall, text: str, formats: OutputFormats, prompt: str, seed: int
) -> tuple[dict[str, Any], str, int]:
    parser, rng = chat_text(call, formats, prompt), random.Random(seed)
    deltas, data = [], text.encode()
    start = 0
    while start < len(data):
        end = start + rng.randint(1, 12)
        deltas += parser.feed(data[start:end].decode(), list(data[start:end]))
        start = end
    deltas += parser.finish()
    message: dict[str, Any] = {"content": ""}
    for delta in deltas:
        ChoiceDelta.model_validate(delta, strict=True)
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls) and part["function"]["arguments"] == ""
                calls.append({"type": part["type"], "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message, parser.finish_reason("stop"), parser.num_reasoning_tokens


def test_text_without_formats_is_content_and_an_empty_one_too():
    for text in ("hello <tool_call>", ""):
        assert whole(chat_call(), text, OutputFormats()) == ({"content": text}, "stop", 0)


def test_a_call_beside_content_and_reasoning():
    text = f"<think>\nlet me\n</think>\n\nOne moment.\n{CALL}"
    message, reason, num_reasoning = whole(chat_call(tools=TOOLS), text)
    (call,) = message.pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "look_up", "arguments": '{"q": "a \\"b\\" }"}'}}
    assert message == {"content": "One moment.\n", "reasoning": "let me", "reasoning_content": "let me"}
    assert reason == "tool_calls"
    assert num_reasoning == len("<think>\nlet me")


def test_a_message_of_calls_alone_has_null_content_and_a_call_cut_off_ends_as_the_engine_says():
    parser = chat_text(chat_call(tools=TOOLS))
    message = parser.whole(CALL[:-20], [])
    assert message["content"] is None and len(message["tool_calls"]) == 1
    assert parser.finish_reason("length") == "length"


def test_without_tools_or_with_tool_choice_none_the_text_of_a_call_is_content():
    for call in (chat_call(), chat_call(tools=TOOLS, tool_choice="none")):
        assert whole(call, CALL) == ({"content": CALL}, "stop", 0)
        assert call.template_args.tools is None


def test_a_named_tool_alone_is_called_and_others_are_content():
    call = chat_call(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert whole(call, CALL)[0]["content"] == CALL


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_tool_calls_false_is_at_most_one_call(parallel):
    message, reason, _ = whole(chat_call(tools=TOOLS, parallel_tool_calls=parallel), f"{CALL}\n{CALL}")
    assert len(message["tool_calls"]) == (2 if parallel else 1) and reason == "tool_calls"


def test_reasoning_that_the_prompt_opened_and_reasoning_without_an_end():
    text = "so\n</think>yes"
    expected = {"content": "yes", "reasoning": "so", "reasoning_content": "so"}
    assert whole(chat_call(), text, prompt="<|im_start|>assistant\n<think>\n")[0] == expected
    assert whole(chat_call(), "<think>all of it")[0] == {
        "content": "",
        "reasoning": "all of it",
        "reasoning_content": "all of it",
    }
    assert whole(chat_call(), "<think>all")[2] == len("<think>all")
    assert whole(chat_call(), text)[0] == {"content": text}


def template_of(*texts: str) -> str:
    return "{# tools #}" + "".join(texts)


def test_formats_are_read_from_the_template_and_flags_override_them():
    def formats(template: str | None, **flags: str) -> OutputFormats:
        return OutputFormats.of_model(ServerConfig(**flags), byte_tokenizer(template=template), "llama", (END,))

    found = formats(template_of("<tool_call>", "</think>"))
    assert (found.tool, found.reasoning, found.end_texts) == ("hermes", "think", ("<|im_end|>",))
    assert formats(template_of()).tool == "llama3_json"  # by the model's type
    plain = formats("{{ messages }}")
    assert (plain.tool, plain.reasoning) == (None, None)
    assert formats(None, tool_call_format="mistral", reasoning_format="think").tool == "mistral"
    off = formats(template_of("<tool_call>", "</think>"), tool_call_format="none", reasoning_format="none")
    assert (off.tool, off.reasoning) == (None, None)
    assert OutputFormats.of_model(ServerConfig(), None, "qwen3", ()) == OutputFormats()


def test_an_unknown_format_is_refused_at_start():
    for fields in ({"tool_call_format": "herms"}, {"reasoning_format": ""}):
        (name,) = fields
        with pytest.raises(ConfigError, match=f"ServerConfig.{name} must be auto, none or one of "):
            check_formats(ServerConfig(**fields))
    with pytest.raises(ConfigError, match=r"ServerConfig\.tool_call_format"):
        ServerConfig(tool_call_format=None)  # type: ignore[arg-type]


def test_tools_of_a_model_whose_calls_nobody_can_read_are_refused():
    unknown = OutputFormats(reasoning="think")
    with pytest.raises(RequestError, match=r"^tools: are not available"):
        unknown.check(chat_call(tools=TOOLS))
    unknown.check(chat_call(tools=TOOLS, tool_choice="none"))
    HERMES.check(chat_call(tools=TOOLS))


def test_control_tokens_are_decoded_only_where_marks_are_such():
    call, tools = chat_call(), chat_call(tools=TOOLS)
    assert not HERMES.needs_special_tokens(tools)
    phi = OutputFormats(tool="phi")
    assert phi.needs_special_tokens(tools) and not phi.needs_special_tokens(call)
    assert OutputFormats(reasoning="harmony", has_skipped_marks=True).needs_special_tokens(call)
    ended = OutputFormats(tool="phi", end_texts=("<|im_end|>",))
    assert (
        whole(tools, 'x<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|><|im_end|>', ended)[1]
        == "tool_calls"
    )
    assert whole(tools, "hello<|im_end|>", ended)[0] == {"content": "hello"}
