"""Tiny checkpoints of every dense family against an independent implementation (tests/data/arch/README.md).

Every greedy token equal and log-probs within 1e-4, the bound that the files state, through the whole engine: with
large chunks, with small chunks and pages, and again from the prefix cache.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving import LLM, SamplingParams

ARCH = Path(__file__).parents[1] / "data" / "arch"
VARIANTS = (
    "gemma2",
    "gemma3",
    "llama_bias",
    "llama_dynamic",
    "llama_linear",
    "llama_llama3",
    "llama_plain",
    "llama_yarn",
    "mistral_sliding",
    "phi3_longrope",
    "phi3_longrope_partial",
    "phi3_sliding",
    "qwen2_plain",
    "qwen2_sliding",
    "qwen3_tied",
)
LAYOUTS = {
    "one chunk": {"prefill_token_buckets": (192,), "query_block": 64, "page_size": 16, "max_decode_steps": 8},
    "small chunks and pages": {"prefill_token_buckets": (16,), "query_block": 8, "page_size": 4, "max_decode_steps": 1},
}


def _close(got: dict[int, float], expected: dict[int, float], tolerance: float) -> None:
    both = got.keys() & expected.keys()
    assert len(both) >= len(expected) - 1  # the last of the best may change places with the next
    assert {i: got[i] for i in both} == pytest.approx({i: expected[i] for i in both}, abs=tolerance)


def _check(expected: dict, output, tolerance: float) -> None:
    completion = output.outputs[0]
    assert completion.token_ids == expected["greedy_token_ids"]
    for step, entry in zip(expected["greedy_top5"], completion.logprobs, strict=True):
        _close(dict(entry.top), dict(map(tuple, step)), tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_and_logprobs_equal_the_independent_implementation(variant, layout):
    expected = json.loads((ARCH / variant / "expected.json").read_text())
    tolerance = expected["tolerance"]["logprob_abs"]
    llm = LLM(
        str(ARCH / variant),
        dtype="float32",
        max_num_seqs=4,
        kv_cache_bytes=2**24,
        show_progress=False,
        **LAYOUTS[layout],
    )
    prompts = [{"prompt_token_ids": p["prompt_token_ids"]} for p in expected["prompts"]]
    scored = SamplingParams(temperature=0.0, max_tokens=expected["max_tokens"], logprobs=5, prompt_logprobs=0)
    plain = SamplingParams(temperature=0.0, max_tokens=expected["max_tokens"], logprobs=5)
    for prompt, output in zip(expected["prompts"], llm.generate(prompts, scored, use_tqdm=False), strict=True):
        _check(prompt, output, tolerance)
        got = [None if entry is None else entry.logprob for entry in output.prompt_logprobs]
        assert got[0] is None
        assert got[1:] == pytest.approx(prompt["prompt_logprobs"][1:], abs=tolerance)
    # The same prompts again: all their full pages are in the prefix cache now.
    hits = 0
    for prompt, output in zip(expected["prompts"], llm.generate(prompts, plain, use_tqdm=False), strict=True):
        _check(prompt, output, tolerance)
        hits += output.num_cached_tokens
    assert hits > 0
    stats = llm.stats()
    assert stats["num_free_pages"] == llm.engine.runner.num_pages - 1
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert llm.engine.num_compiles_while_serving == 0
