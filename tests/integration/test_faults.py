"""What a fault, an interrupt or a reused id may and may not do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from serving import LLM, RequestError, SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def drain(engine):
    while engine.has_work():
        engine.step()


def test_an_interrupt_ends_the_call_between_steps_and_leaves_nothing(tiny_llm, monkeypatch):
    engine = tiny_llm.engine
    expected = tiny_llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    step, count = engine.step, 0

    def step_with_ctrl_c():
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)  # while the step runs
        return step()

    monkeypatch.setattr(engine, "step", step_with_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stats = tiny_llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_free_pages"] == stats["num_pages"] - 1
    assert tiny_llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_scores_of_an_aborted_request_never_reach_a_new_one_of_its_id(tiny_llm):
    engine = tiny_llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    engine.add([9] * 40, params, request_id="again")
    engine.step()  # its chunk is in flight
    engine.abort("again")
    engine.collect("again")
    engine.add([1, 2, 3, 4], params, request_id="again")
    drain(engine)
    got = [entry.logprob for entry in engine.collect("again").prompt_logprobs[1:]]
    (alone,) = tiny_llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)
    assert got == [entry.logprob for entry in alone.prompt_logprobs[1:]]


def test_a_prompt_that_scores_not_finite_ends_in_an_error(tiny_llm):
    runner = tiny_llm.engine.runner
    weights = runner.params["embed/weight"]
    poisoned = np.array(weights)
    poisoned[300] = np.nan
    runner.params["embed/weight"] = jax.device_put(poisoned, weights.sharding)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    try:
        bad, good = tiny_llm.generate([[1, 300, 2], [1, 5, 2]], params, use_tqdm=False)
    finally:
        runner.params["embed/weight"] = weights
    assert str(bad.outputs[0].finish_reason) == "error" and "not finite" in bad.outputs[0].error
    assert str(good.outputs[0].finish_reason) == "length"


def test_a_caller_given_id_that_looks_like_ours_is_passed_over(tiny_llm):
    engine = tiny_llm.engine
    taken = [f"request-{i}" for i in range(2000)]
    for request_id in taken[:1500]:
        engine.add([1], GREEDY, request_id=request_id)
    assert engine.add([2], GREEDY) not in taken[:1500]
    for request_id in list(engine._groups):
        engine.discard(request_id)
    drain(engine)


@pytest.mark.parametrize("request_id", ["", "x" * 257, 5])
def test_request_ids_are_strings_of_bounded_length(tiny_llm, request_id):
    with pytest.raises(RequestError, match="request_id"):
        tiny_llm.engine.add([1], GREEDY, request_id=request_id)


@pytest.mark.parametrize("params", [{}, None, 5])
def test_settings_of_another_type_are_refused(tiny_llm, params):
    with pytest.raises(RequestError, match="sampling_params"):
        tiny_llm.engine.add([1], params)


def test_numbers_larger_than_any_float_are_refused():
    for value in (10**400, -(10**400), 10**5000):
        with pytest.raises(RequestError, match="temperature"):
            SamplingParams(temperature=value)


def test_min_tokens_with_nothing_but_stops_allowed_is_refused(tiny_llm):
    with pytest.raises(RequestError, match="min_tokens: 2 holds back"):
        tiny_llm.engine.add([1], SamplingParams(min_tokens=2, allowed_token_ids=[7]))  # 7 ends the sequence


def test_a_top_p_too_small_for_float32_keeps_the_best_token(tiny_llm):
    greedy = tiny_llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    tiny = SamplingParams(temperature=1.0, top_p=1e-50, max_tokens=6, ignore_eos=True)
    assert tiny_llm.generate([[1, 2, 3]], tiny, use_tqdm=False)[0].outputs[0].token_ids == greedy


def test_after_a_fault_of_the_device_the_engine_says_so_and_does_not_hang():
    llm = LLM(
        f"dummy:{TINY}",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        prefill_token_buckets=(32,),
        max_decode_steps=1,
        kv_cache_bytes=2**22,
        show_progress=False,
    )

    def broken(_schedule):
        raise MemoryError("device lost")

    llm.engine.runner.dispatch = broken
    with pytest.raises(MemoryError, match="device lost"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
