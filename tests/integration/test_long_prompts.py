"""A long prompt beside sequences that decode, on a tiny model: counted in steps, for times are another machine's."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from serving import LLM, SamplingParams
from serving.request import RequestContext
from serving.scheduling.schedule import StepLimits

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


def test_background_that_sits_out_steps_with_others_prompts_has_its_solo_tokens():
    llm = LLM(
        f"dummy:{TINY}",
        dtype="float32",
        max_num_seqs=4,
        page_size=16,
        max_model_len=256,
        prefill_token_buckets=(8, 32),
        query_block=8,
        max_decode_steps=1,
        num_pages=100,
        enable_prefix_caching=False,
        show_progress=False,
    )
    engine, rng = llm.engine, np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [rng.integers(3, 300, length).tolist() for length in (8, 20, 150)]
    solo = [list(llm.generate([prompt], params)[0].outputs[0].token_ids) for prompt in prompts]
    limits = StepLimits(
        max_prefill_tokens=32,
        max_num_seqs=4,
        max_background_seqs=2,
        max_background_prefill_tokens=8,
        background_priority=1,
    )
    schedules, schedule = [], engine.scheduler.schedule

    def limited(now_s, _):
        schedules.append(schedule(now_s, limits))
        return schedules[-1]

    engine.scheduler.schedule = limited
    ids = [engine.add(prompt, params, context=RequestContext(priority=1)) for prompt in prompts[:2]]
    outputs = defaultdict(list)

    def step():
        for delta in engine.step():
            outputs[delta.request_id] += delta.new_token_ids

    for _ in range(8):
        step()
    ids.append(engine.add(prompts[2], params))
    while engine.has_work():
        step()
    paused = [
        s for s in schedules if s is not None and s.prefill and len(s.prefill[0].token_ids) == 32 and not s.decode
    ]
    assert len(paused) >= 3
    assert [outputs[request_id] for request_id in ids] == solo
