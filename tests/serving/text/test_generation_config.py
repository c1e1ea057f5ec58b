"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import pytest

from configs.checks import ConfigError
from serving.request import RequestError, SamplingParams
from serving.text.generation_config import default_fields, default_sampling, eos_token_ids, ignored_keys

LLAMA3 = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "max_length": 4096,
    "top_p": 0.9,
    "transformers_version": "4.42.3",
}


def test_request_comes_before_server_flag_before_file_before_engine():
    assert default_sampling({}) == SamplingParams()
    assert default_sampling(LLAMA3) == SamplingParams(temperature=0.6, top_p=0.9)
    flags = {"temperature": 0.5, "max_tokens": 100}
    assert default_sampling(LLAMA3, server_flags=flags) == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=100)
    given = default_sampling(LLAMA3, server_flags=flags, temperature=0.0, seed=3)
    assert given == SamplingParams(temperature=0.0, top_p=0.9, max_tokens=100, seed=3)


def test_every_supported_key_reaches_its_field():
    fields = default_fields(
        {
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "min_p": 0.1,
            "repetition_penalty": 1.05,
            "max_new_tokens": 64,
            "min_new_tokens": 2,
            "stop_strings": ["a", "b"],
            "suppress_tokens": [5, 6],
        }
    )
    assert SamplingParams(**fields) == SamplingParams(
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.05,
        max_tokens=64,
        min_tokens=2,
        stop=("a", "b"),
        banned_token_ids=(5, 6),
    )


def test_no_sampling_means_greedy_and_a_request_may_still_sample():
    config = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
    assert default_fields(config) == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert default_sampling(config, temperature=1.0) == SamplingParams(temperature=1.0, repetition_penalty=1.1)


def test_more_new_tokens_than_the_context_holds_means_up_to_its_end():
    config = {"max_new_tokens": 64}
    assert default_fields(config, max_model_len=65) == {"max_tokens": 64}
    assert default_fields(config, max_model_len=64) == {"max_tokens": None}
    assert default_sampling(config, max_model_len=64, max_tokens=70).max_tokens == 70
    assert default_sampling(config, server_flags={"max_tokens": 8}, max_model_len=64).max_tokens == 8


def test_null_counts_as_absent_and_neutral_values_as_nothing():
    assert (
        default_fields({"top_k": None, "do_sample": None, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": []}) == {}
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"top_p": 1.5}, "top_p: must be a finite number in"),
        ({"top_k": 1.5}, "top_k: must be an integer"),
        ({"max_new_tokens": -1}, "max_tokens: must be in"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"stop_strings": [""]}, r"stop\[0\]"),
        ({"do_sample": "no"}, "do_sample must be true or false, got 'no'"),
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6 is not supported"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3 is not supported"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id=2 is not supported"),
        ({"typical_p": 0.9}, "typical_p=0.9 is not supported"),
    ],
)
def test_wrong_and_unsupported_values_are_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=f"generation_config.json.*{message}"):
        default_fields(config)


def test_wrong_flags_and_requests_are_told_apart():
    with pytest.raises(ConfigError, match="server flag: top_p"):
        default_fields({}, {"top_p": 0})
    with pytest.raises(ConfigError, match="no such sampling field: topp"):
        default_fields({}, {"topp": 0.5})
    with pytest.raises(RequestError, match="top_p"):
        default_sampling(LLAMA3, top_p=2.0)


def test_keys_without_a_part_in_sampling_are_named():
    assert ignored_keys({**LLAMA3, "custom": 1}) == ["bos_token_id", "custom", "max_length", "transformers_version"]


def test_end_ids_of_all_sources_are_united():
    assert eos_token_ids(LLAMA3, {"eos_token_id": 128001}, vocab_size=128256) == (128001, 128008, 128009)
    assert eos_token_ids({}, {"eos_token_id": 2}, tokenizer_eos_token_ids=(2, 7), vocab_size=10) == (2, 7)
    assert eos_token_ids({"eos_token_id": None}, vocab_size=10) == ()
    for wrong in (10, -1, True, "2", [1, 10]):
        with pytest.raises(ConfigError, match=r"eos_token_id must hold ids in \[0, 10\)"):
            eos_token_ids({"eos_token_id": wrong}, vocab_size=10)
