"""Sampling through the whole engine: what each setting does, and that it does it to its own request only."""

from __future__ import annotations

import collections

import jax
import numpy as np
import pytest

from serving import SamplingParams
from serving.request import RequestError

VOCAB_SIZE = 301


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(llm, prompt, **fields):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | fields))
    return generate(llm, [prompt], params)[0].outputs[0].token_ids


def reference_logprobs(llm, token_ids, num_top=20):
    """The raw distribution after `token_ids`, from the engine's own scoring path: {id: log-prob} of the best."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_top, ignore_eos=True)
    (output,) = generate(llm, [token_ids], params)
    return dict(output.outputs[0].logprobs[0].top)


def test_a_seeded_result_does_not_depend_on_slot_batch_or_neighbours(tiny_llm):
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
    alone = generate(tiny_llm, [[1, 2, 3]], seeded)[0].outputs[0].token_ids
    rng = np.random.default_rng()
    for _ in range(5):
        others = [rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 20))).tolist() for _ in range(7)]
        settings = [
            SamplingParams(temperature=float(rng.choice([0.0, 1.0])), max_tokens=24, ignore_eos=True) for _ in others
        ]
        place = int(rng.integers(8))
        outputs = generate(
            tiny_llm, [*others[:place], [1, 2, 3], *others[place:]], [*settings[:place], seeded, *settings[place:]]
        )
        assert outputs[place].outputs[0].token_ids == alone


def test_unseeded_requests_differ_and_seeds_differ(tiny_llm):
    outputs = generate(tiny_llm, [[1, 2, 3]] * 4, SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True))
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 4
    drawn = {
        tuple(tokens(tiny_llm, [1, 2, 3], temperature=2.0, seed=seed, max_tokens=16)) for seed in (0, 1, -1, 2**64 - 1)
    }
    assert len(drawn) == 3  # -1 and 2**64 - 1 are the same 64 bits


def test_n_completions_are_whole_distinct_and_those_of_their_own_request(tiny_llm):
    params = SamplingParams(temperature=1.5, seed=5, n=4, max_tokens=12, ignore_eos=True)
    first, second = generate(tiny_llm, [[1, 2, 3], [9, 8]], params)
    for output in (first, second):
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert all(len(c.token_ids) == 12 for c in output.outputs)
        assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    again = generate(tiny_llm, [[1, 2, 3]], params)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in first.outputs]
    alone = tokens(tiny_llm, [1, 2, 3], temperature=1.5, seed=5, max_tokens=12)
    assert alone == first.outputs[0].token_ids  # child 0 has the seed itself


def test_draws_follow_the_distribution(tiny_llm):
    """2,000 draws at temperature 1 against the engine's own log-probs. Bound: 5 standard deviations of a count."""
    probs = {i: np.exp(lp) for i, lp in reference_logprobs(tiny_llm, [4, 5, 6]).items()}
    outputs = generate(
        tiny_llm, [[4, 5, 6]] * 20, SamplingParams(temperature=1.0, n=100, max_tokens=1, ignore_eos=True)
    )
    counts = collections.Counter(c.token_ids[0] for o in outputs for c in o.outputs)
    for token_id, p in probs.items():
        assert abs(counts[token_id] - 2000 * p) <= 5 * np.sqrt(2000 * p * (1 - p)), (token_id, counts[token_id], p)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"top_k": 3}, lambda ps: sorted(ps.values())[-3]),
        ({"min_p": 0.9}, lambda ps: 0.9 * max(ps.values())),
        ({"top_p": 0.05}, lambda ps: _top_p_bound(ps, 0.05)),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_support_shrinks_as_the_definition_says(tiny_llm, fields, rule):
    probs = {i: np.exp(lp) for i, lp in reference_logprobs(tiny_llm, [4, 5, 6]).items()}
    allowed = {i for i, p in probs.items() if p >= rule(probs) * (1 - 1e-5)}
    assert 1 <= len(allowed) < 20
    outputs = generate(
        tiny_llm, [[4, 5, 6]] * 4, SamplingParams(temperature=1.0, n=100, max_tokens=1, ignore_eos=True, **fields)
    )
    drawn = {c.token_ids[0] for o in outputs for c in o.outputs}
    assert drawn == allowed  # 400 draws: the least likely allowed token is missed with probability under 1e-9


def _top_p_bound(probs, top_p):
    total = 0.0
    for p in sorted(probs.values(), reverse=True):
        total += p
        if total >= top_p:
            return p
    raise AssertionError("the 20 best do not reach top_p")


def test_bias_allowed_and_banned_tokens(tiny_llm):
    greedy = tokens(tiny_llm, [1, 2, 3])
    assert tokens(tiny_llm, [1, 2, 3], logit_bias={42: 100.0}) == [42] * 24
    assert set(tokens(tiny_llm, [1, 2, 3], allowed_token_ids=(5, 6))) <= {5, 6}
    assert greedy[0] not in tokens(tiny_llm, [1, 2, 3], banned_token_ids=(greedy[0],))
    assert tokens(tiny_llm, [1, 2, 3], allowed_token_ids=(5,), temperature=2.0) == [5] * 24
    assert tokens(tiny_llm, [1, 2, 3]) == greedy  # nothing of it stays in the slot


def test_the_padded_vocabulary_tail_is_never_sampled(tiny_llm):
    """301 tokens in 304 rows: at a temperature that makes all tokens alike, 2,000 draws stay inside."""
    outputs = generate(tiny_llm, [[1]] * 20, SamplingParams(temperature=100.0, n=100, max_tokens=1, ignore_eos=True))
    drawn = [c.token_ids[0] for o in outputs for c in o.outputs]
    assert min(drawn) >= 0 and max(drawn) < VOCAB_SIZE and len(set(drawn)) > 200


def test_penalties_count_what_they_say(tiny_llm):
    """Presence and frequency count output only; repetition counts prompt and output."""
    (first,) = tokens(tiny_llm, [1, 2, 3], max_tokens=1)
    prompt = [1, 2, 3]
    for _ in range(3):  # a prompt that ends in what greedy picks next, so that the pick is in the prompt
        (first,) = tokens(tiny_llm, prompt, max_tokens=1)
        if first in prompt:
            break
        prompt = [first, *prompt]
    greedy = tokens(tiny_llm, [first, *prompt], max_tokens=1)
    prompt = [first, *prompt]
    assert tokens(tiny_llm, prompt, max_tokens=1, presence_penalty=100.0) == greedy
    assert tokens(tiny_llm, prompt, max_tokens=1, frequency_penalty=100.0) == greedy
    distinct = tokens(tiny_llm, prompt, max_tokens=24, presence_penalty=100.0)
    assert len(set(distinct)) == 24
    assert len(set(tokens(tiny_llm, prompt, max_tokens=24, frequency_penalty=100.0))) == 24
    repeated = tokens(tiny_llm, prompt, max_tokens=24, repetition_penalty=100.0)
    assert len(set(repeated)) == 24 or min(collections.Counter(repeated).values()) >= 1
    assert not set(repeated[:8]) & set(prompt)


def test_min_tokens_holds_back_every_stop(tiny_llm):
    free = tokens(tiny_llm, [1, 2, 3], max_tokens=40)
    stop = free[2]
    assert tokens(tiny_llm, [1, 2, 3], max_tokens=40, stop_token_ids=[stop]) == free[: free.index(stop) + 1]
    held = tokens(tiny_llm, [1, 2, 3], max_tokens=40, stop_token_ids=[stop], min_tokens=10)
    assert len(held) >= 10 and stop not in held[:10]


def test_logprobs_zero_gives_the_chosen_token_only(tiny_llm):
    for num_top in (0, 1, 5, 20):
        params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=num_top, ignore_eos=True)
        for entry in generate(tiny_llm, [[1, 2]], params)[0].outputs[0].logprobs:
            assert len(entry.top) == num_top
            if num_top:
                assert entry.top[0] == (entry.token_id, entry.logprob)


def test_prompt_logprobs_are_the_same_past_a_prefix_hit(tiny_llm):
    for length in (7, 8, 9, 17):  # around the page size of 8
        prompt = np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, logprobs=1, ignore_eos=True)
        first, second = (generate(tiny_llm, [prompt], params)[0] for _ in range(2))
        assert first.prompt_logprobs == second.prompt_logprobs and len(first.prompt_logprobs) == length


def test_a_row_that_is_not_finite_ends_its_own_request_only(tiny_llm):
    """Token 300's embedding is NaN: the request that holds it fails, its neighbours and later users of its pages do not."""
    runner = tiny_llm.engine.runner
    good = [[i, i + 1, i + 2] for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, banned_token_ids=(300,))
    expected = [o.outputs[0].token_ids for o in generate(tiny_llm, good, params)]
    weights = runner.params["embed/weight"]
    try:
        for value in (np.nan, np.inf):
            poisoned = np.array(weights)
            poisoned[300] = value
            runner.params["embed/weight"] = jax.device_put(poisoned, weights.sharding)
            outputs = generate(tiny_llm, [*good[:3], [5, 300, 6], *good[3:]], params)
            bad = outputs.pop(3).outputs[0]
            assert str(bad.finish_reason) == "error" and "not finite" in bad.error and bad.token_ids == []
            assert [o.outputs[0].token_ids for o in outputs] == expected
    finally:
        runner.params["embed/weight"] = weights
    # Fill every page that the failed request may have held.
    many = [np.random.default_rng(i).integers(0, 299, 60).tolist() for i in range(40)]
    assert all(len(o.outputs[0].token_ids) == 20 for o in generate(tiny_llm, many, params))
    assert [o.outputs[0].token_ids for o in generate(tiny_llm, good, params)] == expected


def test_a_temperature_too_small_to_divide_by_is_greedy(tiny_llm):
    greedy = tokens(tiny_llm, [1, 2, 3])
    assert tokens(tiny_llm, [1, 2, 3], temperature=1e-9) == greedy
    assert tokens(tiny_llm, [1, 2, 3], temperature=1e-300, top_p=0.5) == greedy


@pytest.mark.parametrize(("priority", "name"), [([1], "priority"), ("high", "priority"), ([0, True], "prompts[1]")])
def test_priorities_of_a_call_are_one_for_all_or_one_a_prompt(tiny_llm, priority, name):
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
    with pytest.raises(RequestError) as refused:
        tiny_llm.generate([[1, 2], [3]], params, use_tqdm=False, priority=priority)
    assert refused.value.field == name
    expected = [output.outputs[0].token_ids for output in tiny_llm.generate([[1, 2], [3]], params, use_tqdm=False)]
    for given in (7, [5, -5]):
        outputs = tiny_llm.generate([[1, 2], [3]], params, use_tqdm=False, priority=given)
        assert [output.outputs[0].token_ids for output in outputs] == expected
