"""A long prompt beside sequences that decode, on a tiny model: counted in steps, for times are another machine's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving import LLM, SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
NUM_USERS, LONG_PROMPT = 6, 200


def run(prefill_token_buckets: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """For each step that prefills the long prompt: its tokens of that prompt, and the users that decode in it."""
    llm = LLM(
        f"dummy:{TINY}",
        dtype="float32",
        max_num_seqs=NUM_USERS + 1,
        page_size=16,
        max_model_len=256,
        prefill_token_buckets=prefill_token_buckets,
        query_block=8,
        max_decode_steps=1,
        num_pages=200,
        show_progress=False,
    )
    engine, rng = llm.engine, np.random.default_rng(0)
    schedules = []
    dispatch = engine.runner.dispatch

    def logged_dispatch(schedule, *args):
        schedules.append(schedule)
        return dispatch(schedule, *args)

    engine.runner.dispatch = logged_dispatch
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for _ in range(NUM_USERS):
        engine.add(rng.integers(3, 300, 8).tolist(), params)
    while len(schedules) < 20:
        engine.step()
    long_id = engine.add(rng.integers(3, 300, LONG_PROMPT).tolist(), SamplingParams(max_tokens=1, ignore_eos=True))
    chunks, users = [], []
    while engine.has_work():
        engine.step()
    for schedule in schedules:
        num_tokens = sum(len(c.token_ids) for c in schedule.prefill if c.request.request_id == long_id)
        if num_tokens:
            chunks.append(num_tokens)
            users.append(len(schedule.decode))
    return chunks, users


def test_every_step_of_a_long_prefill_brings_every_user_a_token():
    chunks, users = run(prefill_token_buckets=(32,))
    assert chunks == [32] * 6 + [8]
    assert users == [NUM_USERS] * len(chunks)
