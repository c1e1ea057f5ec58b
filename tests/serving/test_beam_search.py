"""The search alone against one that keeps every candidate and runs to the end, over log-probs that are a table."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import BeamSearchParams, RequestError, SamplingParams
from serving.beam_search import BeamSearch

VOCAB_SIZE = 12


def log_probs(seed: int, token_ids: tuple[int, ...]) -> list[tuple[int, float]]:
    """(token, log-prob) of every token after these, best first; coarse, so that equal scores turn up."""
    rng = random.Random(f"{seed} {token_ids}")
    return sorted(((t, -rng.randrange(1, 40) / 8) for t in range(VOCAB_SIZE)), key=lambda item: -item[1])


def search_everything(seed, width, num_prompt_tokens, max_tokens, stop_ids, length_penalty):
    """The `width` best (tokens, sum of log-probs) as vLLM's loop finds them: all ended beams kept, no early end."""

    def score(beam):
        tokens, logprob, has_ended = beam
        return logprob / (num_prompt_tokens + len(tokens) - has_ended) ** length_penalty

    live, ended = [((), 0.0, False)], []
    for _ in range(max_tokens):
        longer = []
        for tokens, logprob, _ in live:
            for token_id, value in log_probs(seed, tokens)[: 2 * width]:
                beam = ((*tokens, token_id), logprob + value, token_id in stop_ids)
                (ended if beam[2] else longer).append(beam)
        live = sorted(longer, key=score, reverse=True)[:width]
    return [beam[:2] for beam in sorted([*ended, *live], key=score, reverse=True)[:width]]


@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 5),
    num_prompt_tokens=st.integers(1, 9),
    max_tokens=st.integers(1, 7),
    stop_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
)
def test_the_best_beams_are_those_of_a_search_that_drops_nothing(
    seed, width, num_prompt_tokens, max_tokens, stop_ids, length_penalty
):
    search = BeamSearch(
        width=width,
        num_prompt_tokens=num_prompt_tokens,
        max_output_tokens=max_tokens,
        stop_token_ids=sorted(stop_ids),
        length_penalty=length_penalty,
    )
    num_steps = 0
    while not search.is_done:
        before = search.live
        parents = search.advance([log_probs(seed, beam.token_ids) for beam in before])
        num_steps += 1
        assert [before[parent].token_ids for parent in parents] == [beam.token_ids[:-1] for beam in search.live]
    assert num_steps <= max_tokens
    best = search.best()
    assert len(best) == width
    assert [(beam.token_ids, beam.cumulative_logprob) for beam in best] == search_everything(
        seed, width, num_prompt_tokens, max_tokens, stop_ids, length_penalty
    )
    assert all((beam.stop_token_id is not None) == (beam.token_ids[-1] in stop_ids) for beam in best)


def test_a_search_ends_once_no_live_beam_can_come_to_be_better():
    search = BeamSearch(
        width=1, num_prompt_tokens=1, max_output_tokens=1000, stop_token_ids=(0,), length_penalty=0.0, num_logprobs=1
    )
    search.advance([[(0, -0.1), (1, -3.0)]])
    assert search.is_done
    (beam,) = search.best()
    assert (beam.token_ids, beam.stop_token_id) == ((0,), 0)
    assert [(entry.token_id, entry.logprob, entry.top) for entry in beam.logprobs] == [(0, -0.1, ((0, -0.1),))]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("stop", ("a",)),
        ("min_tokens", 1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", -1.0),
        ("frequency_penalty", 0.5),
        ("logit_bias", {1: 1.0}),
        ("allowed_token_ids", (1,)),
        ("banned_token_ids", (1,)),
        ("include_stop_str_in_output", True),
    ],
    ids=lambda value: str(value),
)
def test_what_chooses_tokens_otherwise_is_refused_by_field_and_value(field, value):
    with pytest.raises(RequestError, match="use_beam_search") as caught:
        SamplingParams(use_beam_search=True, **{field: value})
    assert caught.value.field == field


def test_settings_of_a_search_become_settings_of_a_request():
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5, stop_token_ids=(4,)).sampling_params()
    assert (params.n, params.use_beam_search, params.length_penalty) == (3, True, 0.5)
    assert SamplingParams(use_beam_search=True, top_k=-1, top_p=1.0).use_beam_search
    with pytest.raises(RequestError, match="n: must be in"):
        BeamSearchParams(beam_width=0).sampling_params()
    with pytest.raises(RequestError, match="max_tokens: is 0"):
        SamplingParams(use_beam_search=True, max_tokens=0, prompt_logprobs=0)
    with pytest.raises(RequestError, match=r"length_penalty: 0.5 is for beams: it needs use_beam_search=true"):
        SamplingParams(length_penalty=0.5)
