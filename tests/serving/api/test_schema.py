"""The request schema: bad input made from its own table, and what good input means."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from typing import Any

import pytest
from bad_requests import MESSAGES, SMALLEST, edge_values, fields_of

from configs.server import ServerConfig
from serving.api.fields import (
    Boolean,
    Choice,
    Integer,
    Number,
    Text,
    Texts,
    TokenIds,
)
from serving.api.schema import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    ENDPOINTS,
    TOKENIZE,
    ChatCall,
    CompletionCall,
    StreamOptions,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
    request_fields,
)
from serving.api.strict_json import decode_object
from serving.request import (
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    RequestError,
    SamplingParams,
)

CONFIG = ServerConfig(max_body_bytes=4096, max_id_chars=40)
PARSERS = {COMPLETIONS: parse_completion, CHAT: parse_chat, TOKENIZE: parse_tokenize, DETOKENIZE: parse_detokenize}


def parse(endpoint: str, body: object, config: ServerConfig = CONFIG) -> Any:
    return PARSERS[endpoint](body, config)


def cases() -> list[Any]:
    return [pytest.param(e, field, id=f"{e}-{field.name}") for e, field in fields_of(CONFIG)]


@pytest.mark.parametrize(("endpoint", "field"), cases())
def test_every_value_of_every_field_is_a_call_or_a_request_error(endpoint, field):
    outcomes = {"refused": 0, "accepted": 0}
    for value in edge_values(field):
        try:
            call = parse(endpoint, {**SMALLEST[endpoint], field.name: value})
        except RequestError as error:
            outcomes["refused"] += 1
            assert error.field and len(str(error)) < 1500, value
        else:
            outcomes["accepted"] += 1
            assert type(call).__name__.endswith("Call")
    assert outcomes["accepted"] >= 1
    if field.to:  # a field without an effect may take anything
        assert outcomes["refused"] >= 1


@pytest.mark.parametrize(("endpoint", "field"), cases())
def test_a_value_of_a_wrong_type_is_refused_under_the_name_of_its_field(endpoint, field):
    wrong: dict[type, Any] = {Integer: "1", Number: "1", Boolean: "true", Text: 1, Texts: 1, TokenIds: "1", Choice: 1}
    value = wrong.get(type(field.kind), 1.5)
    if not field.to:
        return
    with pytest.raises(RequestError) as refused:
        parse(endpoint, {**SMALLEST[endpoint], field.name: value})
    assert refused.value.field.startswith(field.name)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_means_absent_and_a_missing_field_is_named(endpoint):
    names = [field.name for field in request_fields(CONFIG) if endpoint in field.endpoints]
    smallest = SMALLEST[endpoint]
    assert parse(endpoint, {**dict.fromkeys(names), **smallest}) == parse(endpoint, smallest)
    for body in ({}, dict.fromkeys(names)):
        with pytest.raises(RequestError, match=next(iter(smallest))):
            parse(endpoint, body)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("body", [None, [], "a", 1, True, [["prompt", "a"]]])
def test_a_body_that_is_no_object_is_refused(endpoint, body):
    with pytest.raises(RequestError, match="body: must be a JSON object"):
        parse(endpoint, body)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", ["temprature", "guided_json_", "top_k ", "", "x" * 10_000, "MODEL", "\0"])
def test_an_unknown_field_is_refused_by_name(endpoint, name):
    with pytest.raises(RequestError, match="is not a field of") as refused:
        parse(endpoint, {**SMALLEST[endpoint], name: None})
    assert refused.value.field == (name if len(name) < 80 else name[:77] + "...")


REFUSED = [
    (COMPLETIONS, {"suffix": "b"}, "suffix: is not offered"),
    (COMPLETIONS, {"best_of": 2}, "best_of: 2 is not n=1"),
    (COMPLETIONS, {"priority": False}, "priority: must be an integer"),
    (COMPLETIONS, {"priority": 2**31}, "priority: must be in"),
    (COMPLETIONS, {"max_queue_s": -1}, "max_queue_s: must be"),
    (COMPLETIONS, {"kv_transfer_params": {}}, "kv_transfer_params: is not for clients to set"),
    (COMPLETIONS, {"bad_words": ["a"]}, "bad_words: is not offered"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options: needs stream=true"),
    (
        COMPLETIONS,
        {"stream": True, "echo": True, "logprobs": 0},
        "echo: with log-probs of the prompt cannot be streamed",
    ),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs: with log-probs of the prompt cannot"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens: is 0, which is allowed only with prompt_logprobs"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens: 17 is above max_tokens=16"),
    (COMPLETIONS, {"prompt": [], "n": 1}, "prompt: is an empty list"),
    (COMPLETIONS, {"prompt": [[]]}, r"prompt\[0\]: is an empty list"),
    (COMPLETIONS, {"prompt": ["a", 1]}, r"prompt\[1\]: must be a string"),
    (COMPLETIONS, {"prompt": [1, "a"]}, r"prompt\[1\]: must be a token id"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, r"prompt\[1\]: must be a list of token ids"),
    (COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}, "n: times prompts is 1152; at most 1024"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs: must have one of"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens: is not max_tokens"),
    (CHAT, {"top_logprobs": 0}, "top_logprobs: needs logprobs=true"),
    (CHAT, {"service_tier": "flex"}, "service_tier: has no tiers"),
    (CHAT, {"store": True}, "store: is not offered"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template: is not offered"),
    (CHAT, {"functions": []}, "functions: is OpenAI's old form"),
    (CHAT, {"tool_choice": "required"}, "tool_choice: is required, and there are no tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f f"}}]}, r"tools\[0\].function.name: must have"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, r"messages\[0\].role: must be one of"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: is missing"),
    (TOKENIZE, {"messages": MESSAGES}, "prompt: and messages"),
    (TOKENIZE, {"add_generation_prompt": True}, "add_generation_prompt: goes with messages alone"),
]


@pytest.mark.parametrize(("endpoint", "extra", "message"), REFUSED)
def test_what_cannot_be_had_is_refused_by_name(endpoint, extra, message):
    with pytest.raises(RequestError, match=re.compile(message)):
        parse(endpoint, {**SMALLEST[endpoint], **extra})


def test_fields_without_a_part_in_the_tokens_change_nothing():
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    for endpoint in (COMPLETIONS, CHAT):
        assert parse(endpoint, {**SMALLEST[endpoint], **harmless}) == parse(endpoint, SMALLEST[endpoint])


def test_a_completion_says_what_its_body_says():
    body = {
        "model": "m",
        "prompt": [[1, 2], [3]],
        "n": 2,
        "best_of": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -1,
        "stop": "x",
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 3,
        "min_tokens": 2,
        "logprobs": 1,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"5": 1},
        "allowed_token_ids": [5, 6],
        "banned_token_ids": [6],
        "skip_special_tokens": False,
        "echo": True,
        "request_id": "mine",
        "return_token_ids": True,
    }
    call = parse_completion(body, CONFIG)
    assert call == CompletionCall(
        model="m",
        prompts=((1, 2), (3,)),
        echo=True,
        request_id="mine",
        return_token_ids=True,
        params=SamplingParams(
            n=2,
            temperature=0.0,
            top_p=0.5,
            top_k=5,
            min_p=0.1,
            seed=-1,
            stop=("x",),
            stop_token_ids=(4,),
            include_stop_str_in_output=True,
            ignore_eos=True,
            max_tokens=3,
            min_tokens=2,
            logprobs=1,
            prompt_logprobs=1,
            repetition_penalty=1.5,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            logit_bias={5: 1.0},
            allowed_token_ids=(5, 6),
            banned_token_ids=(6,),
            skip_special_tokens=False,
        ),
    )


def test_every_sampling_parameter_has_a_field():
    settable = {field.to for field in request_fields(CONFIG) if field.is_sampling}
    assert settable | {"structured"} == set(SamplingParams.__dataclass_fields__)  # made of several fields


def test_a_chat_fills_the_context_by_default_and_the_models_own_settings_come_before_ours():
    defaults = {"temperature": 0.3, "top_k": 7}
    call = parse_chat({"messages": MESSAGES, "top_k": 2, "logprobs": True}, CONFIG, defaults)
    assert isinstance(call, ChatCall)
    assert call.params == SamplingParams(max_tokens=None, temperature=0.3, top_k=2, logprobs=0)
    assert parse_completion({"prompt": "a"}, CONFIG, defaults).params.max_tokens == 16
    assert parse_chat({"messages": MESSAGES}, CONFIG, {"max_tokens": 9}).params.max_tokens == 9
    assert defaults == {"temperature": 0.3, "top_k": 7}


def test_a_message_that_goes_on_opens_no_new_turn():
    messages = [*MESSAGES, {"role": "assistant", "content": "b"}]
    args = parse_chat({"messages": messages, "continue_final_message": True}, CONFIG).template_args
    assert (args.add_generation_prompt, args.continue_final_message) == (False, True)
    assert parse_chat({"messages": messages}, CONFIG).template_args.add_generation_prompt


def test_stream_options_are_read():
    options = {"include_usage": True, "continuous_usage_stats": None}
    call = parse_completion({"prompt": "a", "stream": True, "stream_options": options}, CONFIG)
    assert call.stream == StreamOptions(include_usage=True)
    assert parse_completion({"prompt": "a"}, CONFIG).stream is None


def test_s16_a_giant_count_is_refused_before_anything_is_made():
    for body in ({"prompt": "a", "n": 10**6}, {"prompt": ["a"] * 10**5}):
        with pytest.raises(RequestError, match=r"n: must be in|prompt: has 100000 prompts"):
            parse_completion(body, CONFIG)


@pytest.mark.parametrize("salt", ["a/../b", "a\0b", "ключ", "x" * 40, " "])
def test_s64_any_accepted_salt_has_one_size_below_the_door(salt):
    call = parse_completion({"prompt": "a", "cache_salt": salt}, CONFIG)
    assert len(call.cache_salt) == 16
    assert call.cache_salt != parse_completion({"prompt": "a", "cache_salt": salt + "."}, ServerConfig()).cache_salt


@pytest.mark.parametrize("salt", ["", "x" * 41, "x" * 10**6, 5, ["a"], {}])
def test_s64_other_salts_are_refused(salt):
    with pytest.raises(RequestError, match="cache_salt"):
        parse_completion({"prompt": "a", "cache_salt": salt}, CONFIG)


def test_limits_of_the_server_are_within_those_of_sampling_params():
    limits = ServerConfig()
    assert (limits.max_n, limits.max_stop_strings, limits.max_stop_chars) == (
        MAX_N,
        MAX_STOP_STRINGS,
        MAX_STOP_STRING_CHARS,
    )
    with pytest.raises(RequestError, match=r"n: must be in \[1, 2\]"):
        parse_completion({"prompt": "a", "n": 3}, ServerConfig(max_n=2))


BAD_JSON = [
    b"",
    b"{",
    b'{"a": 1,}',
    b"[1]",
    b"null",
    b'"a"',
    b'{"a": 1, "a": 1}',
    b'{"b": {"a": 1, "a": 1}}',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b'{"\\udc00": 1}',
    b'{"a": ["\\ud83d", "\\ude00"]}',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"a": ' + b"[" * 10**6,
    b'{"a":' * 10**5,
    b'{"a": "' + b'\\"' * 10**5,
    b'{"a": 1} x',
]


@pytest.mark.parametrize("data", BAD_JSON, ids=lambda data: repr(data[:20]))
def test_json_is_decoded_strictly(data):
    with pytest.raises(RequestError, match=r"^body: "):
        decode_object(data, max_depth=64)


def test_good_json_is_decoded_as_python_does():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        scalars = [None, True, 1, -5, 2**64, 0.5, "", "a", '"[{\\', "😀", "\u2028", "é"]
        kind = rng.randrange(3 if depth < 6 else 1)
        if kind == 0:
            return rng.choice(scalars)
        if kind == 1:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice('abcdef[]"\\'): value(depth + 1) for _ in range(rng.randrange(4))}

    for _ in range(300):
        given = {"a": value(0)}
        for escape in (True, False):
            assert decode_object(json.dumps(given, ensure_ascii=escape).encode(), max_depth=64) == given


def test_the_doors_import_no_jax():
    script = "import sys, serving.api.http_server, serving.api.service; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
