"""What a fault, an interrupt or a reused id may and may not do."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.source import open_source
from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from serving import LLM, RequestError, SamplingParams
from serving.engine import build_engine

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

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell runs this in the background
    monkeypatch.setattr(engine, "step", step_with_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
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
    others = [token_id for token_id in range(301) if token_id != 7]
    with pytest.raises(RequestError, match="min_tokens: 2 holds back every token that is not banned"):
        tiny_llm.engine.add([1], SamplingParams(min_tokens=2, banned_token_ids=others))
    (output,) = tiny_llm.generate([[1]], SamplingParams(banned_token_ids=others), use_tqdm=False)
    assert output.outputs[0].stop_reason == 7


def test_no_page_is_held_after_a_call_that_a_stop_token_ended(tiny_llm):
    params = SamplingParams(temperature=0.0, logit_bias={7: 100.0}, max_tokens=20)
    (output,) = tiny_llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert str(output.outputs[0].finish_reason) == "stop" and not tiny_llm.engine.has_work()
    stats = tiny_llm.stats()
    assert stats["num_free_pages"] == stats["num_pages"] - 1


def test_settings_cannot_change_and_still_copy_pickle_and_compare():
    given = {1: 2.0}
    params = SamplingParams(logit_bias=given)
    given[10**6] = 1.0
    for change in (
        lambda bias: bias.__setitem__(5, 1.0),
        lambda bias: bias.__delitem__(1),
        lambda bias: bias.update({5: 1.0}),
        lambda bias: bias.__ior__({5: 1.0}),
        lambda bias: bias.clear(),
    ):
        with pytest.raises(TypeError, match="cannot change"):
            change(params.logit_bias)
    assert params.logit_bias == {1: 2.0} == dataclasses.asdict(params)["logit_bias"]
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params
    with pytest.raises(TypeError, match="cannot change"):
        pickle.loads(pickle.dumps(params)).logit_bias[5] = 1.0


def test_calls_of_several_threads_queue_up_and_get_their_own_tokens(tiny_llm):
    prompts = [[i, i + 1] for i in range(12)]
    expected = [output.outputs[0].token_ids for output in tiny_llm.generate(prompts, GREEDY, use_tqdm=False)]
    with ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(lambda prompt: tiny_llm.generate([prompt], GREEDY, use_tqdm=False)[0], prompts))
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_call_from_inside_a_call_is_refused_and_leaves_the_engine_whole(tiny_llm):
    def calls_again(**_):
        return tiny_llm.generate([[1]], GREEDY, use_tqdm=False)

    with pytest.raises(RuntimeError, match="from inside a generate"):
        tiny_llm.generate([[1]], GREEDY, use_tqdm=calls_again)
    assert tiny_llm.stats()["num_running"] == 0
    assert len(tiny_llm.generate([[1]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"suppress_tokens": [301]}, "banned_token_ids: 301 is outside the vocabulary"),
        ({"stop_strings": ["x"]}, "stop: 'x' needs a tokenizer"),
        ({"min_new_tokens": 64}, "min_tokens: 64 does not fit"),
    ],
)
def test_a_model_whose_own_defaults_no_request_could_run_with_is_refused_at_start(defaults, message):
    source = open_source(f"dummy:{TINY}")
    source.generation_config = defaults
    config = EngineConfig(dtype="float32", max_model_len=64, prefill_token_buckets=(32,))
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        build_engine(source, config, MeshConfig())


def test_a_default_of_more_tokens_than_the_context_holds_fills_the_context(tiny_llm, monkeypatch):
    defaults = {"max_new_tokens": 4096, "suppress_tokens": [7]}  # 7 ends the sequence
    monkeypatch.setattr(tiny_llm.engine, "generation_config", defaults)
    (output,) = tiny_llm.generate([[1, 2]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 94  # of 96


@pytest.mark.parametrize("folder", ["a\0b", str(TINY / "config.json")], ids=["nul", "a file"])
def test_a_compilation_cache_that_cannot_be_a_folder_is_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"compilation_cache_dir=.* cannot be used"):
        LLM(f"dummy:{TINY}", compilation_cache_dir=folder, show_progress=False)


def test_a_keyword_that_is_no_setting_is_refused_by_name():
    with pytest.raises(TypeError, match="'max_num_seq'"):
        LLM(f"dummy:{TINY}", max_num_seq=1, show_progress=False)


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

    def broken(*_args):
        raise MemoryError("device lost")

    llm.engine.runner.dispatch = broken
    with pytest.raises(MemoryError, match="device lost"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
