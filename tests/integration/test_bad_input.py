"""What must be refused at the door, with field and value, and leave the engine as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from configs.checks import ConfigError
from serving import LLM, RequestError, SamplingParams

VOCAB_SIZE, CONTEXT = 301, 96
GOOD = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def engine_is_untouched(tiny_llm):
    """After each case the engine is idle, every page is free, and a good request gets its golden tokens."""
    golden = tiny_llm.generate([[1, 2, 3]], GOOD, use_tqdm=False)[0].outputs[0].token_ids
    yield
    stats = tiny_llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_free_pages"] == stats["num_pages"] - 1
    assert tiny_llm.generate([[1, 2, 3]], GOOD, use_tqdm=False)[0].outputs[0].token_ids == golden


@pytest.mark.parametrize("model", [3, None, b"folder", "", " "])
def test_what_is_no_model_source_is_refused_by_its_value(model):
    with pytest.raises(ConfigError, match="model") as refusal:
        LLM(model, show_progress=False)
    assert repr(model) in str(refusal.value) or model is None


def test_a_model_may_be_named_by_a_path(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        LLM(tmp_path / "nothing", show_progress=False)


def tokens(llm, prompt, **fields):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | fields))
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [-1], [2**31], [0, 1, VOCAB_SIZE], [1.5], [True], [None], ["1"]])
def test_token_ids_outside_the_vocabulary_are_refused_by_place_and_value(tiny_llm, prompt):
    with pytest.raises(RequestError, match=r"prompts\[0\]: prompt_token_ids\[\d\]: .*(vocabulary \[0, 301\)|integer)"):
        tiny_llm.generate([{"prompt_token_ids": prompt}], GOOD, use_tqdm=False)


def test_an_integer_too_long_to_show_is_refused_by_place(tiny_llm):
    with pytest.raises(RequestError, match=r"prompt_token_ids\[1\]: a number too long to show is outside"):
        tiny_llm.generate([[1, 10**5000]], GOOD, use_tqdm=False)


def test_the_first_and_last_token_ids_are_accepted(tiny_llm):
    assert len(tokens(tiny_llm, {"prompt_token_ids": [0, VOCAB_SIZE - 1]})) == 4
    assert len(tokens(tiny_llm, {"prompt_token_ids": np.array([0, 300])})) == 4


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": []}, {"prompt_token_ids": [[]]}, {"prompt_token_ids": [[1]]}, []]
)
def test_empty_and_nested_prompts_are_refused(tiny_llm, prompt):
    with pytest.raises(RequestError, match="prompt_token_ids"):
        tiny_llm.generate([prompt], GOOD, use_tqdm=False)


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "a", "prompt_token_ids": [1]},
        {"promt": "a"},
        {},
        {"prompt": 5},
        {"prompt_token_ids": "12"},
        {"prompt_token_ids": [1], "temperature": 1},
    ],
)
def test_prompt_objects_with_wrong_keys_or_types_are_refused(tiny_llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        tiny_llm.generate([prompt], GOOD, use_tqdm=False)


def test_a_text_prompt_needs_a_tokenizer(tiny_llm):
    with pytest.raises(RequestError, match="prompt: is text, and this model has no tokenizer"):
        tiny_llm.generate(["hello"], GOOD, use_tqdm=False)
    with pytest.raises(RequestError, match="stop: 'x' needs a tokenizer"):
        tiny_llm.generate([[1]], SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(RequestError, match="messages: need a chat template"):
        tiny_llm.chat([{"role": "user", "content": "hi"}], GOOD, use_tqdm=False)


def test_the_context_limit_is_exact(tiny_llm):
    prompt = [5] * CONTEXT
    assert len(tokens(tiny_llm, prompt[: CONTEXT - 1], max_tokens=1)) == 1
    for length in (CONTEXT, CONTEXT + 1):
        with pytest.raises(RequestError, match=f"prompt: has {length} tokens; the context holds {CONTEXT}"):
            tokens(tiny_llm, [5] * length, max_tokens=1)
    with pytest.raises(
        RequestError, match=f"max_tokens: 2 and a prompt of {CONTEXT - 1} tokens exceed the context of {CONTEXT}"
    ):
        tokens(tiny_llm, prompt[: CONTEXT - 1], max_tokens=2)
    assert len(tokens(tiny_llm, prompt[: CONTEXT - 3], max_tokens=None)) == 3  # fills the rest
    assert len(tokens(tiny_llm, prompt[:1], max_tokens=CONTEXT - 1)) == CONTEXT - 1


def test_scoring_takes_a_prompt_of_the_whole_context_and_makes_no_token(tiny_llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (output,) = tiny_llm.generate([[5, 6] * (CONTEXT // 2)], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [] and str(output.outputs[0].finish_reason) == "length"
    assert len(output.prompt_logprobs) == CONTEXT and output.prompt_logprobs[0] is None
    assert all(len(entry.top) == 2 for entry in output.prompt_logprobs[1:])
    with pytest.raises(RequestError, match=f"prompt: has {CONTEXT + 1} tokens"):
        tiny_llm.generate([[5] * (CONTEXT + 1)], params, use_tqdm=False)
    with pytest.raises(RequestError, match="max_tokens: is 0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7])
def test_top_k_off_or_beyond_the_vocabulary_changes_nothing(tiny_llm, top_k):
    plain = tokens(tiny_llm, [1, 2, 3], temperature=1.5, seed=3, max_tokens=20)
    assert tokens(tiny_llm, [1, 2, 3], temperature=1.5, seed=3, max_tokens=20, top_k=top_k) == plain


def test_top_k_of_one_is_greedy(tiny_llm):
    greedy = tokens(tiny_llm, [1, 2, 3], max_tokens=20)
    assert tokens(tiny_llm, [1, 2, 3], temperature=1.5, seed=3, max_tokens=20, top_k=1) == greedy


WRONG_FIELDS = [
    ("n", [0, -1, 10**6, 1.5, "1", None, True]),
    ("temperature", [-0.1, math.nan, math.inf, 1e9, "1", None, True]),
    ("top_p", [0.0, -1, 1.1, math.nan, "x", None]),
    ("top_k", [-2, 2**31, 1.5, "1", None]),
    ("min_p", [-0.1, 1.1, math.nan, None]),
    ("seed", [2**64, -(2**63) - 1, 1.5, "1"]),
    ("max_tokens", [-1, 2**31, 1.5, "1", True]),
    ("min_tokens", [-1, 17, 2**31, None]),
    ("logprobs", [-1, 21, 10**6, 1.5, True]),
    ("prompt_logprobs", [-1, 21]),
    ("repetition_penalty", [0, -1, math.nan, math.inf, None]),
    ("presence_penalty", [math.nan, math.inf, -1e9, "1"]),
    ("frequency_penalty", [math.nan, -math.inf, 1e9]),
    (
        "logit_bias",
        [{-1: 1.0}, {"AI": 1.0}, {"1.5": 1}, {1.5: 1}, {1: math.nan}, {1: 1e9}, {1: math.inf}, {1: "x"}, [1]],
    ),
    ("logit_bias", [{i: 0.0 for i in range(1025)}]),
    ("stop", ["\ud800", ["a", "b\udfff"]]),
    ("stop", ["", [""], ["a", ""], [1], 5, ["x"] * 17, ["x" * 2000]]),
    ("stop_token_ids", [[-1], [2**31], ["1"], [1] * 17, "12", 5]),
    ("allowed_token_ids", [[], [-1], "1", [1.5]]),
    ("banned_token_ids", [[-1], [None], 7]),
    ("ignore_eos", [1, "yes", None]),
    ("include_stop_str_in_output", [0]),
    ("skip_special_tokens", ["no"]),
    ("use_beam_search", [1, "yes", None]),
    ("length_penalty", [math.nan, math.inf, 11, "1", None]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG_FIELDS for v in values], ids=lambda v: ascii(v)[:24]
)
def test_wrong_sampling_values_are_refused_by_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("allowed_token_ids", [1, VOCAB_SIZE]),
        ("banned_token_ids", [VOCAB_SIZE]),
        ("banned_token_ids", list(range(VOCAB_SIZE))),
    ],
)
def test_token_ids_in_settings_are_checked_against_the_vocabulary(tiny_llm, field, value):
    with pytest.raises(RequestError, match=f"{field}.*301"):
        tokens(tiny_llm, [1, 2], **{field: value})


def test_one_refused_prompt_refuses_the_call_before_anything_runs(tiny_llm):
    before = tiny_llm.stats()["num_output_tokens"]
    with pytest.raises(RequestError):
        tiny_llm.generate([[1, 2], [VOCAB_SIZE]], GOOD, use_tqdm=False)
    assert tiny_llm.stats()["num_output_tokens"] == before


def test_settings_must_be_one_or_one_a_prompt(tiny_llm):
    with pytest.raises(RequestError, match="sampling_params: has 1 entries for 2 prompts"):
        tiny_llm.generate([[1], [2]], [GOOD], use_tqdm=False)
    assert tiny_llm.generate([], GOOD, use_tqdm=False) == []


@pytest.mark.parametrize(
    "params",
    [5, "x", {"n": 1}, (GOOD for _ in range(1)), [5], [None]],
    ids=lambda params: "a generator" if isinstance(params, Iterator) else ascii(params),
)
def test_settings_of_another_type_are_refused_with_field_and_value(tiny_llm, params):
    with pytest.raises(RequestError, match=r"^sampling_params(\[0\])?: must be SamplingParams.*, got "):
        tiny_llm.generate([[1]], params, use_tqdm=False)


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}], ids=ascii)
def test_chats_of_another_type_are_refused_with_field_and_value(tiny_llm, messages):
    with pytest.raises(RequestError, match=r"^messages: must be a list of messages or of such lists, got "):
        tiny_llm.chat(messages, GOOD, use_tqdm=False)


def test_no_completion_is_built_before_every_prompt_was_checked(tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm.engine, "add_checked", None)  # calling it would be a TypeError
    with pytest.raises(RequestError, match=r"prompts\[3\]: prompt_token_ids\[0\]: 999 is outside"):
        tiny_llm.generate([[1, 2]] * 3 + [[999]], SamplingParams(n=128), use_tqdm=False)


def test_a_live_request_id_cannot_be_used_twice(tiny_llm):
    engine = tiny_llm.engine
    engine.add([1, 2], GOOD, request_id="same")
    with pytest.raises(RequestError, match="request_id: 'same' is in use"):
        engine.add([3], GOOD, request_id="same")
    while engine.has_work():
        engine.step()
    assert len(engine.collect("same").outputs[0].token_ids) == 4
    engine.add([3], GOOD, request_id="same")
    engine.abort("same")
    while engine.has_work():
        engine.step()
    assert str(engine.collect("same").outputs[0].finish_reason) == "abort"


def test_settings_that_are_wrong_together_are_refused_by_field():
    with pytest.raises(RequestError, match="banned_token_ids: must be a list"):
        SamplingParams(allowed_token_ids=[1], banned_token_ids=5)
    with pytest.raises(RequestError, match="allowed_token_ids: are all banned"):
        SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[2, 1])
    with pytest.raises(RequestError, match="min_tokens: 5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
