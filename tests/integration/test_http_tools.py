"""Tools, reasoning and structured output through HTTP, with the openai client; the model is a random one."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from http_harness import Servers, check_idle, tiny_engine
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from configs.server import ServerConfig

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}in <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
# Spaces are as JSON allows between tokens, and a random model likes them well.
NO_SPACE = {str(token): -100 for token in (9, 10, 13, 32)}


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(template=TEMPLATE, context=512)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(running: Servers, engine):
    """Without reasoning, from which a random model does not come back."""
    return running.start_service(ServerConfig(served_model_name="tiny", reasoning_format="none"), engine)[0]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def engine_is_left_as_it_was(engine):
    yield
    check_idle(engine)


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    answer = client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 300, **fields})
    ChatCompletion.model_validate(answer.model_dump(warnings=False), strict=True)
    return answer


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 10, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_asked_for_comes_with_arguments_of_its_schema(client, choice):
    for seed in range(3):
        answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed)
        (choice_out,) = answer.choices
        assert choice_out.finish_reason == "tool_calls" and choice_out.message.content is None
        (call,) = choice_out.message.tool_calls
        assert call.type == "function" and re.fullmatch(r"call_[0-9a-f]{32}", call.id)
        name, arguments = call.function.name, json.loads(call.function.arguments)
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}[name]
        jsonschema.validate(arguments, schema)
        assert choice == "required" or name == "weather"


def test_s09_a_streamed_call_has_id_index_and_name_first_and_is_the_whole_one(client):
    fields: Any = {"tools": TOOLS, "tool_choice": NAMED, "seed": 5, "temperature": 0, "n": 2}
    whole = ask(client, **fields)
    deltas: dict[int, list[Any]] = {0: [], 1: []}
    reasons, usage = {}, None
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=300,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    ):
        ChatCompletionChunk.model_validate(chunk.model_dump(warnings=False), strict=True)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            deltas[choice.index].append(choice.delta)
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert reasons == {0: "tool_calls", 1: "tool_calls"} and usage == whole.usage
    for choice in whole.choices:
        (expected,) = choice.message.tool_calls
        assert deltas[choice.index][0].role == "assistant"
        parts = [part for delta in deltas[choice.index] for part in delta.tool_calls or ()]
        assert (parts[0].index, parts[0].type, parts[0].function.name) == (0, "function", "weather")
        assert parts[0].id.startswith("call_") and {part.id for part in parts[1:]} == {None}
        assert "".join(part.function.arguments for part in parts) == expected.function.arguments


def test_an_answer_to_a_call_goes_back_into_the_template(client, http):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "mine"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    response = http.post("/tokenize", json={"messages": messages, "tools": TOOLS})
    text = http.post("/detokenize", json={"tokens": response.json()["tokens"]}).json()["prompt"]
    assert text.startswith("weather now in ") and "<tool_call>Oslo</tool_call><|im_end|>" in text
    assert "<think>mine</think>" in text and "<|im_start|>tool\nrain<|im_end|>" in text
    assert ask(client, messages=messages, tools=TOOLS, max_tokens=3).choices[0].finish_reason == "length"
    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    error = refused(http, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [broken]}])
    assert error["param"] == "messages" and "no JSON object" in error["message"]


def test_with_tool_choice_none_tools_are_not_in_the_prompt(client):
    none = ask(client, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert none.usage.prompt_tokens == ask(client, max_tokens=1).usage.prompt_tokens
    assert none.usage.prompt_tokens < ask(client, tools=TOOLS, max_tokens=1).usage.prompt_tokens


def test_a_response_format_is_kept_and_streams_the_same(client):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "rain": {"type": "boolean"}},
        "required": ["city", "rain"],
        "additionalProperties": False,
    }
    fields: Any = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": schema, "strict": True},
        },
        "logit_bias": NO_SPACE,
        "seed": 3,
        "temperature": 0.7,
    }
    (choice,) = ask(client, **fields).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), schema)
    chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=300, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_json_objects_and_what_vllm_calls_structured_outputs(client, http):
    bias = {**NO_SPACE, str(ord("}")): 100}
    assert ask(client, response_format={"type": "json_object"}, logit_bias=bias).choices[0].message.content == "{}"
    for extra, pattern in (
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}}, "[0-9]{3}-[a-c]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" /[bc]/'}}, "a[bc]"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"guided_regex": "x[yz]"}, "x[yz]"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": '{"enum": [1, 2]}'}, "[12]"),
        ({"guided_grammar": "start: /d/"}, "d"),
    ):
        (choice,) = ask(client, extra_body=extra).choices
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.message.content), extra
        completion = client.completions.create(model="tiny", prompt="hello", max_tokens=50, extra_body=extra).choices[0]
        assert completion.finish_reason == "stop" and re.fullmatch(pattern, completion.text), extra


def test_an_answer_in_a_schema_beside_tools_is_either(client):
    fields: Any = {
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"a": 1}}}},
    }
    (answer,) = ask(client, logit_bias={**NO_SPACE, str(ord("{")): 50}, **fields).choices
    assert (json.loads(answer.message.content), answer.finish_reason) == ({"a": 1}, "stop")
    (call,) = ask(client, logit_bias={str(ord("<")): 50}, parallel_tool_calls=False, **fields).choices
    assert call.finish_reason == "tool_calls" and len(call.message.tool_calls) == 1


def test_reasoning_is_told_from_the_answer_and_counted(running, engine):
    url, _ = running.start_service(ServerConfig(served_model_name="tiny"), engine)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        _check_reasoning(client)


def _check_reasoning(client: openai.OpenAI) -> None:
    # The model's only way is spelled out by the grammar; to the parser it is text like any other.
    text = "<think>so be it</think>yes"
    for stream in (False, True):
        fields: Any = {"extra_body": {"structured_outputs": {"choice": [text]}}}
        if not stream:
            answer = ask(client, **fields)
            message, usage = answer.choices[0].message, answer.usage
            content, reasoning, other = message.content, message.reasoning, message.reasoning_content
        else:
            content, reasoning, other, usage = "", "", "", None
            options: Any = {"stream": True, "stream_options": {"include_usage": True}}
            for chunk in client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=99, **options, **fields
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning", "")
                    other += getattr(choice.delta, "reasoning_content", "")
        assert (content, reasoning, other) == ("yes", "so be it", "so be it")
        assert usage.completion_tokens_details.reasoning_tokens == len("<think>so be it")


def test_what_cannot_be_kept_is_refused_by_name(http):
    bad_schema = {"type": "object", "properties": {"a": {"not": {}}}}
    schema = "response_format.json_schema.schema"
    for fields, param, message in (
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": bad_schema}}},
            f"{schema}.properties.a.not",
            "is not supported",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
            schema,
            "strin",
        ),
        ({"structured_outputs": {"json": bad_schema}}, "structured_outputs.json.properties.a.not", "is not supported"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", ""),
        ({"structured_outputs": {"regex": "a**"}}, "structured_outputs.regex", "repeats a repetition"),
        ({"structured_outputs": {"grammar": "start: nope"}}, "structured_outputs.grammar", "nope"),
        ({"guided_regex": "(a"}, "guided_regex", ""),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "cannot go together"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": bad_schema}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties.a.not",
            "is not supported",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice",
            "none of the tools",
        ),
    ):
        error = refused(http, **fields)
        assert error["param"] == param and message in error["message"], (fields, error)
    response = http.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "(a"}})
    assert response.status_code == 400 and response.json()["error"]["param"] == "structured_outputs.regex"
