"""Swapping preempted sequences to the host: when, what, in which order, and that nothing is left behind."""

from __future__ import annotations

import pytest

from configs.checks import ConfigError
from serving.request import FinishReason, StructuredOutput
from serving.scheduling.config import RopeRegime
from serving.scheduling.swap import SwapConfig, SwapRates

ROOMY = SwapConfig(host_bytes=1000, page_bytes=1)


def make_engine(tools, *, swap=ROOMY, num_pages=9, **changes):
    """Pages of 4 for two sequences of 16: two that grow to 30 do not fit."""
    return tools.Engine(tools.make_config(num_pages=num_pages, max_model_len=32, swap=swap, **changes))


def add_two(tools, engine, rng, max_tokens=26, **params):
    prompts = [tools.random_prompt(rng, 4) for _ in range(2)]
    return [
        engine.add(tools.make_request(name, prompt, max_tokens, max_model_len=32, **params))
        for name, prompt in zip(("old", "young"), prompts, strict=True)
    ]


def run_until_swapped(engine):
    while not engine.scheduler.host_pool.num_swap_outs:
        assert engine.step()


def copies(engine):
    return [e.item.host_copy for e in engine.scheduler._waiting if e.item.host_copy is not None]


# 2,000 bytes at 100 and 400 bytes/s take 20 + 5 s, and so do 50 tokens at 2 tokens/s.
@pytest.mark.parametrize(
    ("num_bytes", "num_tokens", "is_faster"),
    [(2000, 50, False), (1999, 50, True), (2000, 51, True), (2001, 50, False), (2000, 49, False)],
)
def test_swap_is_chosen_iff_the_bytes_both_ways_take_less_time_than_the_tokens(num_bytes, num_tokens, is_faster):
    rates = SwapRates(out_bytes_per_s=100.0, in_bytes_per_s=400.0, prefill_tokens_per_s=2.0)
    assert rates.is_swap_faster(num_bytes, num_tokens) is is_faster


@pytest.mark.parametrize(("prefill_tokens_per_s", "is_swapped"), [(1.0, True), (1e9, False)])
def test_a_preempted_sequence_takes_the_way_that_the_rates_say(tools, rng, prefill_tokens_per_s, is_swapped):
    rates = SwapRates(out_bytes_per_s=10.0, in_bytes_per_s=10.0, prefill_tokens_per_s=prefill_tokens_per_s)
    engine = make_engine(tools, swap=SwapConfig(host_bytes=1000, page_bytes=1, rates=rates))
    add_two(tools, engine, rng)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions > 0
    pool = engine.scheduler.host_pool
    assert pool.num_swap_outs == pool.num_swap_ins == (engine.scheduler.stats.num_preemptions if is_swapped else 0)


@pytest.mark.parametrize("rate", ["out_bytes_per_s", "in_bytes_per_s", "prefill_tokens_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_cannot_be_are_refused(rate, value):
    values = {"out_bytes_per_s": 1.0, "in_bytes_per_s": 1.0, "prefill_tokens_per_s": 1.0}
    with pytest.raises(ConfigError, match=rate):
        SwapRates(**(values | {rate: value}))


def test_a_swapped_sequence_decodes_on_and_nothing_is_computed_twice(tools, rng):
    engine = make_engine(tools, enable_prefix_caching=False)
    _, young = add_two(tools, engine, rng)
    engine.run()
    engine.check_outputs()
    assert young.num_preemptions > 0
    assert engine.scheduler.host_pool.num_swap_ins == young.num_preemptions
    assert engine.scheduler.stats.num_prefill_tokens == 8
    returns = [schedule for schedule in engine.schedules if schedule.swap_ins]
    for schedule in returns:
        (reset,) = schedule.resets
        assert reset.is_decoding and (reset.slot, young) in schedule.decode


def test_a_full_host_pool_leaves_recompute(tools, rng):
    engine = make_engine(tools, swap=SwapConfig(host_bytes=2, page_bytes=1), enable_prefix_caching=False)
    add_two(tools, engine, rng)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions > 0 and engine.scheduler.host_pool.num_swap_outs == 0


def test_a_copy_takes_host_memory_for_whole_batches(tools, rng):
    engine = make_engine(tools, swap=SwapConfig(host_bytes=1000, page_bytes=10, batch_pages=3))
    add_two(tools, engine, rng)
    run_until_swapped(engine)
    (copy,) = copies(engine)
    pool = engine.scheduler.host_pool
    assert pool.num_used_bytes == -(-copy.num_pages // 3) * 30
    assert pool.num_out_bytes == copy.num_pages * 10
    engine.run()
    engine.check_outputs()


def test_case_s40_pages_are_copied_before_whoever_gets_them_next_writes(tools, rng):
    """The pages of a swapped sequence go to another in the very step that copies them: the copy comes first."""
    engine = make_engine(tools, enable_prefix_caching=False)
    add_two(tools, engine, rng)
    run_until_swapped(engine)
    schedule = engine.schedules[-1]
    (out,) = schedule.swap_outs
    assert {append.page_id for append in schedule.page_appends} & set(out.page_ids)
    engine.run()  # the device compares every place with what it must hold
    engine.check_outputs()


def test_pages_that_the_prefix_cache_kept_are_shared_again_and_not_copied_back(tools, rng):
    """A prefix that a running sequence holds stays; the rest was evicted."""
    engine = make_engine(tools, num_pages=11)
    prefix = tools.random_prompt(rng, 8)
    for name in ("old", "young"):
        prompt = prefix + tools.random_prompt(rng, 2)
        engine.add(tools.make_request(name, prompt, 22, max_model_len=32))
        engine.step()
        engine.step()
    run_until_swapped(engine)
    engine.run()
    engine.check_outputs()
    swap_ins = [swap_in for schedule in engine.schedules for swap_in in schedule.swap_ins]
    assert swap_ins and all(swap_in.first >= 2 for swap_in in swap_ins)


def test_pages_that_the_prefix_cache_forgot_come_back_from_the_host(tools, rng):
    engine = make_engine(tools)
    add_two(tools, engine, rng)
    run_until_swapped(engine)
    engine.scheduler.page_allocator.forget_cached_pages()
    engine.run()
    engine.check_outputs()
    swap_ins = [swap_in for schedule in engine.schedules for swap_in in schedule.swap_ins]
    assert swap_ins[0].first == 0


@pytest.mark.parametrize("is_dispatched", [True, False], ids=["copied", "not_copied_yet"])
def test_an_ended_request_gives_up_its_copy(tools, rng, is_dispatched):
    engine = make_engine(tools)
    _, young = add_two(tools, engine, rng)
    scheduler = engine.scheduler
    if is_dispatched:
        run_until_swapped(engine)
    else:
        for _ in range(4):
            engine.step()
        while engine.in_flight:
            engine.update()
        scheduler._preempt(scheduler._running[-1], for_whom=scheduler._running[0].request, reason="pages")
    (copy,) = copies(engine)
    assert bool(copy.batches) is is_dispatched
    scheduler.abort("young")
    scheduler.check_integrity()
    assert scheduler.host_pool.num_used_bytes == 0 and not copy.batches
    engine.run()
    engine.check_outputs()
    assert young.finish_reason is FinishReason.ABORT
    assert bool(copy.batches) is False


def test_a_prompt_preempted_between_its_chunks_goes_on_with_the_next_chunk(tools, rng):
    engine = make_engine(tools, num_pages=17, prefill_token_buckets=(8,), enable_prefix_caching=False)
    request = engine.add(tools.make_request("a", tools.random_prompt(rng, 20), 4, max_model_len=32))
    engine.step()
    engine.update()
    scheduler = engine.scheduler
    scheduler._preempt(scheduler._running[-1], for_whom=scheduler._running[0].request, reason="pages")
    engine.check_integrity()
    engine.run()
    engine.check_outputs()
    chunks = [chunk for schedule in engine.schedules for chunk in schedule.prefill]
    assert [chunk.start for chunk in chunks] == [0, 8, 16] and request.num_preemptions == 1


def test_what_is_not_confirmed_is_computed_again(tools, rng):
    """A chunk in flight may turn out not finite: its sequence is not copied."""
    engine = make_engine(tools, num_pages=17, prefill_token_buckets=(8,), enable_prefix_caching=False)
    engine.add(tools.make_request("a", tools.random_prompt(rng, 20), 4, max_model_len=32))
    engine.step()
    scheduler = engine.scheduler
    scheduler._preempt(scheduler._running[-1], for_whom=scheduler._running[0].request, reason="pages")
    assert scheduler.host_pool.num_swap_outs == 0
    engine.run()
    engine.check_outputs()


def test_constrained_rows_return_with_their_last_token_known(tools, rng):
    engine = make_engine(tools)
    add_two(tools, engine, rng, structured=StructuredOutput.json_object())
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.host_pool.num_swap_ins > 0


@pytest.mark.parametrize("limit", [8, 11, 20, 23])
def test_a_swapped_sequence_keeps_its_rope_regime(tools, rng, limit):
    engine = make_engine(tools, rope=RopeRegime(longrope_limit=limit))
    add_two(tools, engine, rng)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.host_pool.num_swap_outs > 0


def test_under_memory_pressure_swapped_requests_get_their_solo_outputs(tools, rng):
    """Three times as many sequences as the pool holds, in host memory for all, some or few of them."""
    num_swaps = 0
    for host_bytes in (10, 40, 1000):
        swap = SwapConfig(host_bytes=host_bytes, page_bytes=1, batch_pages=rng.randint(1, 3))
        config = tools.make_config(num_pages=26, decode_sizes=(8,), max_model_len=96, swap=swap, page_size=4)
        engine = tools.Engine(config)
        prefixes = [tools.random_prompt(rng, 20) for _ in range(2)]
        for index in range(24):
            prompt = [*rng.choice(prefixes)[: rng.randint(0, 20)], *tools.random_prompt(rng, rng.randint(1, 8))]
            max_tokens = rng.randint(20, 60)
            engine.add(tools.make_request(f"r{index}", prompt, max_tokens, max_model_len=96, seed=index))
            for _ in range(rng.randint(0, 4)):
                engine.step()
            if rng.random() < 0.1:
                engine.scheduler.abort(f"r{rng.randint(0, index)}")
        engine.run()
        engine.check_outputs()
        num_swaps += engine.scheduler.host_pool.num_swap_ins
    assert num_swaps > 0
