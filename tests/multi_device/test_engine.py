"""The whole engine on 1, 2, 4 and 8 devices: the same greedy tokens in float32."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from serving import LLM, SamplingParams
from serving.engine import build_engine

TINY = Path(__file__).parents[1] / "data" / "tiny"  # 8 query heads on 2 KV heads: from 4 devices on, KV heads replicate


def make_llm(tensor_parallel_size: int, kv_dtype: str = "auto", **overrides) -> LLM:
    settings = {
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 4,
        "prefill_token_buckets": (64,),
        "query_block": 16,
        "max_decode_steps": 1,
        "kv_cache_bytes": 2**22,
        "show_progress": False,
    }
    return LLM(
        f"dummy:{TINY}",
        tensor_parallel_size=tensor_parallel_size,
        kv_dtype=kv_dtype,
        **(settings | overrides),
    )


@pytest.mark.slow
def test_every_number_of_devices_gives_the_same_greedy_tokens(capfd):
    rng = np.random.default_rng(1)  # fixed: a tie within float32 rounding would be no fault of the sharding
    prompts = [rng.integers(0, 301, int(n)).tolist() for n in (1, 5, 17, 40, 60, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    expected = None
    for size in (1, 2, 4, 8):
        llm = make_llm(size)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [o.outputs[0].token_ids for o in outputs]
        expected = expected or tokens
        assert tokens == expected, size
        assert llm.engine.num_compiles_while_serving == 0
        for name in ("decode(4, 1)", "prefill(64)", "mixed(64, 4)"):
            text = llm.engine.runner.program_text(name)
            all_reduces = len(re.findall(r" all-reduce(?:-start)?\(", text))
            # two a block, and one for the embedding's split vocabulary
            assert all_reduces == (0 if size == 1 else 2 * 2 + 1), (size, name, all_reduces)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_quantised_pages_and_their_scales_split_as_the_heads_do(kv_dtype):
    rng = np.random.default_rng(1)  # fixed, as above: a value between two steps of the dtype is such a tie too
    prompts = [rng.integers(0, 301, int(n)).tolist() for n in (1, 17, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens = []
    for size, heads_a_shard in ((1, 2), (2, 1), (4, 1)):
        llm = make_llm(size, kv_dtype)
        runner = llm.engine.runner
        tokens.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
        # of a token: keys and values of 2 layers, 16 numbers of a byte and a scale of four
        assert runner.ledger.kv_token_bytes == 2 * 2 * heads_a_shard * (16 + 4)
        assert llm.engine.num_compiles_while_serving == 0
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.slow
def test_swapped_pages_come_back_to_the_devices_that_had_them():
    """A pool for one sequence of the whole context, three of them: bits of solo runs, on two devices with int8 KV."""
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 301, int(n)).tolist() for n in (3, 16, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=5)
    llm = make_llm(2, "int8", kv_cache_bytes=None, num_pages=7, swap_bytes=2**20, preemption="swap")
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats()
    assert stats["num_swap_outs"] == stats["num_swap_ins"] == stats["num_preemptions"] > 0
    assert stats["swap_host_bytes"] == 0 and stats["num_free_pages"] == 6
    for prompt, output in zip(prompts, outputs, strict=True):
        llm.engine.restart_scheduler(static_batching=False)
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    assert llm.engine.num_compiles_while_serving == 0


@pytest.mark.slow
def test_s44_a_request_past_its_deadline_ends_for_all_devices_at_once_whatever_the_clock_says():
    """One scheduler decides for all devices, which have no clock of their own; that of the host jumps about here."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        prefill_token_buckets=(64,),
        query_block=16,
        max_decode_steps=1,
        num_pages=65,
    )
    times_s = itertools.cycle([0.0, 1e6, -1e6, 5.0, 4.0])
    engine = build_engine(f"dummy:{TINY}", config, MeshConfig(tensor=4), now=lambda: next(times_s))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    late, neighbour = list(range(1, 100, 2)), [7, 8, 9]
    known = {}
    for prompt in (late, neighbour):
        request_id = engine.add(prompt, params)
        while engine.has_work():
            engine.step()
        known[len(prompt)] = engine.collect(request_id).outputs[0].token_ids
    before = engine.stats()
    for num_steps in range(13):  # from before it has begun, over its prefill, to its last token
        engine.add(late, params, request_id="late")
        engine.add(neighbour, params, request_id="neighbour")
        for _ in range(num_steps):
            engine.step()
        assert [delta.request_finished for delta in engine.abort("late")] == [True]
        while engine.has_work():
            engine.step()
        ended = engine.collect("late").outputs[0]
        assert ended.finish_reason == "abort" and ended.token_ids == known[len(late)][: len(ended.token_ids)]
        assert engine.collect("neighbour").outputs[0].token_ids == known[len(neighbour)]
        after = engine.stats()
        assert (after["num_free_pages"], after["num_free_slots"]) == (before["num_free_pages"], 4)
        engine.scheduler.check_integrity()


def test_impossible_splits_are_refused_at_start_with_the_reason():
    with pytest.raises(ConfigError, match=r"MeshConfig.tensor=3 cannot split ModelConfig.num_heads=8"):
        make_llm(3)
    with pytest.raises(ConfigError, match="16"):
        make_llm(16)
