"""Continuous batching under pressure gives every request what it would get alone."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from serving import LLM, SamplingParams
from serving.request import FinishReason

TINY = Path(__file__).parents[1] / "data" / "tiny"
NUM_REQUESTS = 300
NUM_PAGES = 99  # of 8 tokens; a sequence of 768 takes 96


def make_llm(**overrides) -> LLM:
    settings = {
        "dtype": "float32",
        "max_model_len": 768,
        "max_num_seqs": 8,
        "page_size": 8,
        "prefill_token_buckets": (32, 128),
        "query_block": 16,
        "max_decode_steps": 8,
        "show_progress": False,
    }
    return LLM(f"dummy:{TINY}", **(settings | overrides))


def random_params(rng: np.random.Generator, num_prompt_tokens: int) -> SamplingParams:
    """Every kind of sampling setting, with lengths up to 700 tokens in all."""
    room = 700 - num_prompt_tokens
    fields: dict = {
        "max_tokens": int(np.clip(np.exp(rng.normal(4.0, 1.2)), 1, room)),
        "ignore_eos": bool(rng.random() < 0.7),
        "seed": int(rng.integers(2**63)),
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0])),
    }
    fields["min_tokens"] = int(rng.integers(0, fields["max_tokens"] + 1)) if rng.random() < 0.2 else 0
    if rng.random() < 0.3:
        fields["top_k"] = int(rng.integers(1, 400))
    if rng.random() < 0.3:
        fields["top_p"] = float(rng.uniform(0.1, 1.0))
    if rng.random() < 0.2:
        fields["min_p"] = float(rng.uniform(0.0, 0.5))
    if rng.random() < 0.2:
        fields |= {
            "repetition_penalty": float(rng.uniform(0.8, 1.5)),
            "presence_penalty": float(rng.uniform(-1, 1)),
            "frequency_penalty": float(rng.uniform(-0.5, 0.5)),
        }
    if rng.random() < 0.1:
        fields["logit_bias"] = {int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, 301, 5)}
    if rng.random() < 0.1:
        fields["allowed_token_ids"] = tuple(int(t) for t in rng.choice(301, 40, replace=False))
    if rng.random() < 0.1:
        fields["banned_token_ids"] = tuple(int(t) for t in rng.choice(301, 10, replace=False))
    if rng.random() < 0.2:
        fields["stop_token_ids"] = tuple(int(t) for t in rng.integers(0, 301, 2))
    if rng.random() < 0.2:
        fields["logprobs"] = int(rng.integers(0, 6))
    return SamplingParams(**fields)


@pytest.mark.slow
def test_three_hundred_requests_equal_their_solo_runs_through_preemption_and_cancels():
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 301, int(n)).tolist() for n in (7, 8, 64, 150)]
    work = []
    for _ in range(NUM_REQUESTS):
        own = rng.integers(0, 301, int(np.clip(np.exp(rng.normal(3.5, 1.3)), 1, 500))).tolist()
        prompt = prefixes[rng.integers(len(prefixes))] + own if rng.random() < 0.4 else own
        work.append((prompt, random_params(rng, len(prompt))))
    arrivals = np.sort(rng.integers(0, 300, NUM_REQUESTS))  # steps
    cancels = {int(i): int(rng.integers(1, 120)) for i in rng.choice(NUM_REQUESTS, 30, replace=False)}

    # The pool holds one sequence of the whole context and little more, for eight slots.
    llm = make_llm(num_pages=NUM_PAGES)
    engine = llm.engine
    streamed: dict[str, list[int]] = {str(i): [] for i in range(NUM_REQUESTS)}
    finished: dict[str, FinishReason] = {}
    step = next_arrival = 0
    ages: dict[int, int] = {}
    while next_arrival < NUM_REQUESTS or engine.has_work():
        while next_arrival < NUM_REQUESTS and arrivals[next_arrival] <= step:
            engine.add(*work[next_arrival], request_id=str(next_arrival))
            ages[next_arrival] = step
            next_arrival += 1
        deltas = engine.step()
        for i, after in cancels.items():
            if i in ages and str(i) not in finished and step - ages[i] >= after:
                deltas += engine.abort(str(i))
        for delta in deltas:
            streamed[delta.request_id] += delta.new_token_ids
            if delta.request_finished:
                finished[delta.request_id] = delta.finish_reason
        engine.scheduler.check_integrity()
        step += 1
    stats = llm.stats()
    print({name: stats[name] for name in ("num_preemptions", "num_cached_tokens", "num_decode_dispatches")})
    assert stats["num_preemptions"] >= 30
    assert stats["num_cached_tokens"] > 0
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_free_pages"] == NUM_PAGES - 1
    assert stats["num_free_slots"] == 8
    assert engine.num_compiles_while_serving == 0
    assert set(finished.values()) <= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}

    solo = make_llm(num_pages=NUM_PAGES, enable_prefix_caching=False)
    num_aborted = 0
    for i, (prompt, params) in enumerate(work):
        (expected,) = solo.generate([prompt], params, use_tqdm=False)
        tokens = expected.outputs[0].token_ids
        if finished[str(i)] is FinishReason.ABORT:
            num_aborted += 1
            assert streamed[str(i)] == tokens[: len(streamed[str(i)])], (i, params)
        else:
            assert streamed[str(i)] == tokens, (i, params)
            assert finished[str(i)] == expected.outputs[0].finish_reason
    assert num_aborted <= len(cancels)


@pytest.mark.slow
def test_programs_of_several_sizes_give_the_tokens_of_one_size():
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 301, int(n)).tolist() for n in rng.integers(1, 17, 8)]
    # penalties: the dense rows over the vocabulary move with a slot too
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=30, ignore_eos=True)
    common = {"enable_prefix_caching": False, "prefill_token_buckets": (16,)}
    expected = make_llm(**common).generate(prompts, params, use_tqdm=False)
    llm = make_llm(decode_slot_buckets=(1, 4, 8), **common)
    engine = llm.engine
    engine.runner.run_empty_steps()  # leaves no trace
    finished = 0
    for index, prompt in enumerate(prompts):
        engine.add(prompt, params, request_id=str(index))
        for _ in range(2):  # the next prompt is prefilled while those before it decode
            finished += sum(delta.request_finished for delta in engine.step())
    while engine.has_work():
        finished += sum(delta.request_finished for delta in engine.step())
    assert finished == 8
    assert engine.scheduler.stats.num_slot_moves > 0
    for index, output in enumerate(expected):
        assert engine.collect(str(index)).outputs[0].token_ids == output.outputs[0].token_ids
    calls = engine.runner.num_calls
    assert {report.name for report in engine.runner.reports if report.name.startswith("mixed(")} == {
        "mixed(16, 4)",
        "mixed(16, 8)",
    }
    assert calls["mixed(16, 4)"] >= 3 and calls["mixed(16, 8)"] and calls["mixed(16, 4)"] + calls["mixed(16, 8)"] == 7
    assert calls["decode(1, 8)"] + calls["decode(1, 1)"] and calls["decode(4, 8)"]
    assert engine.num_compiles_while_serving == 0


def test_decode_logits_do_not_depend_on_the_other_slots():
    """Bitwise: the 20 best log-probs of every step, alone and beside 1, 6 and 7 others (all slots busy)."""
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 301, int(n)).tolist() for n in rng.integers(1, 17, 8)]
    params = [
        SamplingParams(temperature=float(rng.choice([0.0, 1.0])), seed=i, max_tokens=40, ignore_eos=True, logprobs=20)
        for i in range(8)
    ]
    llm = make_llm(enable_prefix_caching=False, prefill_token_buckets=(128,))  # all prompts in one prefill
    results = []
    for others in (0, 1, 6, 7):
        outputs = llm.generate(prompts[: others + 1], params[: others + 1], use_tqdm=False)
        results.append([(e.token_id, e.logprob, e.top) for e in outputs[0].outputs[0].logprobs])
    assert all(result == results[0] for result in results)
