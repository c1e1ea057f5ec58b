"""Preemption by swapping to host memory in a whole engine: the very bits come back, and nothing is left behind."""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs.checks import ConfigError
from serving import LLM, SamplingParams
from serving.engine import Engine
from serving.execution import memory
from serving.metrics import EngineMetrics
from serving.request import FinishReason
from serving.scheduling.swap import HostCopy

TINY = Path(__file__).parents[1] / "data" / "tiny"
NUM_PAGES, PAGE_SIZE, CONTEXT = 49, 8, 384  # the pool holds one sequence of the whole context, for four slots
FORMATS = ["auto", "int8"]


def make_llm(**overrides) -> LLM:
    settings = {
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_num_seqs": 4,
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "prefill_token_buckets": (64,),
        "query_block": 16,
        "max_decode_steps": 4,
        "swap_bytes": 2**22,
        "preemption": "swap",
        "show_progress": False,
    }
    return LLM(f"dummy:{TINY}", **(settings | overrides))


@functools.cache
def swap_llm(kv_dtype: str) -> LLM:
    return make_llm(kv_dtype=kv_dtype)


def fresh_engine(kv_dtype: str) -> Engine:
    engine = swap_llm(kv_dtype).engine
    engine.restart_scheduler(static_batching=False)
    return engine


def make_rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def check_idle(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["swap_host_bytes"] == 0
    assert stats["num_free_pages"] == NUM_PAGES - 1 and stats["num_free_slots"] == 4
    assert engine.num_compiles_while_serving == 0


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_four_sequences_in_a_pool_for_one_have_the_bits_of_their_solo_runs(kv_dtype):
    """Prompts of one query block, prefilled together: no other program runs than in a solo run, so swapping is all that
    could change a bit. Penalties: counts of output tokens return as well."""
    rng = make_rng()
    prompts = [rng.integers(0, 301, int(n)).tolist() for n in rng.integers(1, 17, 4)]
    common = {"max_tokens": 290, "ignore_eos": True, "logprobs": 5, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    params = [SamplingParams(seed=i, temperature=float(rng.choice([0.0, 1.0])), **common) for i in range(4)]
    engine = fresh_engine(kv_dtype)
    outputs = swap_llm(kv_dtype).generate(prompts, params, use_tqdm=False)
    stats = engine.stats()
    print({name: value for name, value in stats.items() if "swap" in name or name == "num_preemptions"})
    assert stats["num_swap_outs"] == stats["num_swap_ins"] == stats["num_preemptions"] >= 3
    assert stats["num_prefill_tokens"] == sum(map(len, prompts))
    assert stats["swap_out_bytes"] >= stats["swap_in_bytes"] > 0
    check_idle(engine)
    for prompt, setting, output in zip(prompts, params, outputs, strict=True):
        engine.restart_scheduler(static_batching=False)
        (alone,) = swap_llm(kv_dtype).generate([prompt], setting, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def kv_of(engine: Engine, page_ids: list[int], num_tokens: int) -> list[np.ndarray]:
    """K, V and scales of a sequence's first tokens, by layer."""
    found = []
    for layer in engine.runner._kv_cache:
        pages = np.asarray(layer.pages)[page_ids].swapaxes(1, 2)
        found.append(pages.reshape(-1, *pages.shape[2:])[:num_tokens])
        if layer.scales is not None and layer.scales.ndim > 1:
            scales = np.moveaxis(np.asarray(layer.scales)[page_ids], 3, 1)
            found.append(scales.reshape(-1, *scales.shape[2:])[:num_tokens])
    return found


def check_round_trip(engine: Engine, prompt: list[int]) -> None:
    """Preempt a sequence, overwrite the whole pool, and let it return: its K/V must be there to the bit."""
    scheduler, runner = engine.scheduler, engine.runner
    request_id = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=CONTEXT - len(prompt), ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine._read_pending()
    (sequence,) = scheduler._running  # its prompt took four chunks
    num_tokens = sequence.num_confirmed_tokens
    assert num_tokens > len(prompt)
    expected = kv_of(engine, sequence.page_ids, num_tokens)
    scheduler._preempt(sequence, for_whom=sequence.request, reason="pages")
    copy = sequence.host_copy
    assert isinstance(copy, HostCopy)
    (out,), _ = scheduler.host_pool.take_step()
    runner._page_swap.swap_out(runner._kv_cache, out)
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(copy.batches)}
    assert kinds == {"pinned_host"}
    runner._kv_cache = jax.tree.map(lambda x: jax.numpy.full_like(x, 3) if x.ndim > 1 else x, runner._kv_cache)
    engine.step()
    assert scheduler.host_pool.num_swap_ins == 1 and not copy.batches
    for got, want in zip(kv_of(engine, sequence.page_ids, num_tokens), expected, strict=True):
        assert np.array_equal(got.view(np.uint8), want.view(np.uint8))
    engine.discard(request_id)
    while engine.has_work():
        engine.step()
    scheduler.check_integrity()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_pages_come_back_to_the_bit_with_their_scales(kv_dtype):
    engine = make_llm(kv_dtype=kv_dtype, enable_prefix_caching=False).engine
    check_round_trip(engine, make_rng().integers(0, 301, 250).tolist())  # two batches of pages


def test_random_requests_with_cancels_get_their_solo_tokens():
    """Bounded host memory, so some are swapped and some computed again; shared prefixes, penalties, stop tokens."""
    rng = make_rng()
    llm = make_llm(swap_bytes=2**18)
    engine = llm.engine
    prefixes = [rng.integers(0, 301, int(n)).tolist() for n in (8, 30)]
    work = []
    for i in range(24):
        prompt = prefixes[i % 2] * int(rng.integers(2)) + rng.integers(0, 301, int(rng.integers(1, 60))).tolist()
        settings = {"temperature": float(rng.choice([0.0, 1.0])), "max_tokens": int(rng.integers(60, 250))}
        if rng.random() < 0.3:
            settings["repetition_penalty"] = float(rng.uniform(0.8, 1.5))
        if rng.random() < 0.3:
            settings["stop_token_ids"] = tuple(int(t) for t in rng.integers(0, 301, 2))
        if rng.random() < 0.2:
            settings |= {"prompt_logprobs": 0, "logprobs": 2}
        work.append((prompt, SamplingParams(seed=i, ignore_eos=True, **settings)))
    cancelled = {str(i): int(rng.integers(1, 80)) for i in rng.choice(24, 6, replace=False)}
    streamed: dict[str, list[int]] = {str(i): [] for i in range(24)}
    finished: dict[str, FinishReason] = {}
    num_added = num_steps = 0
    while num_added < 24 or engine.has_work():
        while num_added < 24 and num_added <= num_steps // 3:
            engine.add(*work[num_added], request_id=str(num_added))
            num_added += 1
        deltas = engine.step()
        for request_id, step in cancelled.items():
            if step == num_steps:
                deltas += engine.abort(request_id)
        for delta in deltas:
            streamed[delta.request_id] += delta.new_token_ids
            if delta.request_finished:
                finished[delta.request_id] = delta.finish_reason
        engine.scheduler.check_integrity()
        num_steps += 1
    stats = llm.stats()
    print({name: value for name, value in stats.items() if "swap" in name or name == "num_preemptions"})
    assert 0 < stats["num_swap_ins"] <= stats["num_swap_outs"] <= stats["num_preemptions"]
    check_idle(engine)
    solo = swap_llm("auto")
    for i, (prompt, params) in enumerate(work):
        (expected,) = solo.generate([prompt], params, use_tqdm=False)
        tokens = expected.outputs[0].token_ids
        if finished[str(i)] is FinishReason.ABORT:
            assert streamed[str(i)] == tokens[: len(streamed[str(i)])], (i, params)
        else:
            assert streamed[str(i)] == tokens, (i, params)


def test_auto_decides_by_rates_measured_at_start():
    llm = make_llm(preemption="auto")
    rates = llm.engine.runner.swap_rates
    assert rates.out_bytes_per_s > 0 and rates.in_bytes_per_s > 0 and rates.prefill_tokens_per_s > 0
    assert llm.engine.scheduler.config.swap.rates is rates
    assert swap_llm("auto").engine.scheduler.config.swap.rates is None


def test_the_ledger_counts_pages_on_their_way_and_names_host_memory():
    llm = swap_llm("auto")
    ledger = llm.engine.runner.ledger
    page_bytes = 2 * 2 * 2 * 16 * 4 * PAGE_SIZE  # of 2 layers, 2 heads of 16
    assert ledger.swap_staging == 2 * 5 * 16 * page_bytes
    parts = ledger.weights + ledger.slot_table + ledger.workspace + ledger.swap_staging + ledger.kv_pool + ledger.slack
    assert parts == ledger.device
    assert "host memory for pages of preempted sequences, all devices: 4.0 MiB" in str(ledger)


@pytest.mark.parametrize("swap_bytes", [1, 2**50], ids=["less_than_a_batch", "more_than_the_host"])
def test_host_memory_that_is_of_no_use_or_not_there_is_refused(swap_bytes):
    with pytest.raises(ConfigError, match=rf"EngineConfig\.swap_bytes={swap_bytes} must be 0, or from 65,536"):
        make_llm(swap_bytes=swap_bytes)


@pytest.mark.parametrize(("limit", "gib"), [(None, 63), ("2", 1), ("none", 63)])
def test_page_locked_memory_of_gpus_ends_at_the_limit_of_xla(monkeypatch, limit, gib):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    if limit is not None:
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", limit)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    assert memory.pinned_host_bytes("gpu") == gib * 2**30
    assert memory.pinned_host_bytes("cpu") == 2**40


def test_metrics_count_swaps_both_ways():
    engine = fresh_engine("auto")
    metrics = EngineMetrics(engine, model_name="tiny")
    try:
        params = SamplingParams(temperature=0.0, max_tokens=290, ignore_eos=True)
        swap_llm("auto").generate([[1, 2, 3], [4, 5, 6]], params, use_tqdm=False)
        values, stats = metrics.values(), engine.stats()
        assert (
            values["headrace_swap_outs_total"][()]
            == values["headrace_swap_ins_total"][()]
            == stats["num_swap_outs"]
            > 0
        )
        both = {("out",): stats["swap_out_bytes"], ("in",): stats["swap_in_bytes"]}
        assert values["headrace_swap_bytes_total"] == both
        assert values["headrace_swap_host_bytes"][()] == 0
    finally:
        engine.observers = ()
