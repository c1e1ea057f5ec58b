"""The scheduler's promises one by one. S31 to S43 name faults that other engines had in public."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xxhash

from serving.request import FinishReason, RequestError, RequestStatus, StructuredOutput
from serving.scheduling.config import RopeRegime
from serving.scheduling.scheduler import NO_TOKEN, Scheduler

# Admission and prefill


def test_a_prompt_is_split_into_chunks_of_the_budget_and_samples_only_at_its_end(tools):
    engine = tools.Engine(tools.make_config(prefill_token_buckets=(8, 16)))
    request = engine.add(tools.make_request("r", range(37), max_tokens=3))
    engine.run()
    chunks = [chunk for schedule in engine.schedules for chunk in schedule.prefill]
    assert [(c.start, len(c.token_ids), c.samples) for c in chunks] == [(0, 16, False), (16, 16, False), (32, 5, True)]
    assert [len(schedule.resets) for schedule in engine.schedules] == [1, 0, 0, 0, 0]
    assert request.num_output_tokens == 3
    engine.check_outputs()


def test_several_requests_share_the_budget_of_one_step_each_padded_to_query_blocks(tools):
    engine = tools.Engine(tools.make_config(prefill_token_buckets=(16,), query_block=4, enable_prefix_caching=False))
    for index, num_tokens in enumerate((5, 2, 9)):  # padded: 8, 4, and 4 left of 16 for the third
        engine.add(tools.make_request(f"r{index}", range(num_tokens)))
    engine.step()
    assert [len(chunk.token_ids) for chunk in engine.schedules[0].prefill] == [5, 2, 4]
    assert engine.scheduler.stats.num_prefill_padding_tokens == 3 + 2
    engine.step()
    assert [len(chunk.token_ids) for chunk in engine.schedules[1].prefill] == [5]
    assert {slot for slot, _ in engine.schedules[1].decode} == {0, 1}
    engine.run()
    engine.check_outputs()


def test_running_requests_keep_decoding_while_a_long_prompt_is_prefilled(tools, rng):
    engine = tools.Engine(tools.make_config(max_model_len=128))
    for index in range(3):
        engine.add(tools.make_request(f"short{index}", range(index, index + 4), max_tokens=40))
    engine.step()
    engine.add(tools.make_request("long", tools.random_prompt(rng, 100)))
    for _ in range(7):  # 100 tokens by 16
        engine.step()
        assert len(engine.schedules[-1].decode) == 3 and engine.schedules[-1].num_decode_steps == 1
    assert engine.schedules[-1].prefill[0].samples
    engine.run()
    engine.check_outputs()


def test_waiting_requests_are_admitted_in_order_of_arrival_and_none_jumps_ahead(tools):
    engine = tools.Engine(tools.make_config(num_pages=13, decode_sizes=(4,)))  # 12 pages of 4 tokens
    engine.add(tools.make_request("first", range(32), max_tokens=8))
    engine.add(tools.make_request("large", range(100, 132), max_tokens=8))
    engine.add(tools.make_request("small", [1, 2], max_tokens=2))  # would fit at once
    engine.run()
    order = [reset.request.request_id for schedule in engine.schedules for reset in schedule.resets]
    assert order == ["first", "large", "small"]
    engine.check_outputs()


def test_a_request_without_output_is_scored_and_finishes_after_its_last_chunk(tools):
    engine = tools.Engine(tools.make_config(max_model_len=32))
    request = engine.add(tools.make_request("r", range(32), max_tokens=0, prompt_logprobs=0, max_model_len=32))
    engine.run()
    assert not any(chunk.samples for schedule in engine.schedules for chunk in schedule.prefill)
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.LENGTH, [])
    assert engine.scheduler.stats.num_decode_slot_steps == 0


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_sequences_reach_the_context_limit_exactly_and_no_further(tools, page_size):
    # The pool holds C - 1 tokens and no page more: the last token is never computed.
    context = 65
    config = tools.make_config(
        page_size=page_size, num_pages=64 // page_size + 1, max_model_len=context, max_decode_steps=min(page_size, 8)
    )
    for num_prompt in (1, context - 2, context - 1):
        engine = tools.Engine(config)
        prompt = [index % 50 for index in range(num_prompt)]
        request = engine.add(tools.make_request("r", prompt, context, max_model_len=context))
        engine.run()  # the device asserts that no position is at or past the limit
        assert request.num_tokens == context and request.finish_reason is FinishReason.LENGTH
        engine.check_outputs()


def test_what_can_never_run_is_refused_with_the_sizes_named(tools):
    scheduler = Scheduler(tools.make_config(num_pages=5, max_model_len=64))  # 4 pages of 4 tokens
    scheduler.add(tools.make_request("fits", range(16), max_tokens=1))
    cases = [
        (tools.make_request("a", []), "prompt: holds no tokens"),
        (tools.make_request("b", range(100), max_tokens=1), "101; this engine holds sequences of at most 64"),
        (tools.make_request("c", range(10), max_tokens=8), "18, which takes 5 pages of 4 tokens; the pool has 4"),
        (tools.make_request("d", range(10), max_tokens=8, max_model_len=10), "10; the prompt of 10 tokens needs 11"),
        (tools.make_request("fits", range(3)), "'fits' is in use"),
    ]
    for request, message in cases:
        with pytest.raises(RequestError, match=message):
            scheduler.add(request)
    assert scheduler.num_waiting == 1
    scheduler.check_integrity()


@pytest.mark.parametrize(("num_preemptions", "is_admitted"), [(0, True), (1, False), (2, False)])
def test_an_admission_leaves_pages_to_grow_and_more_of_them_after_each_preemption(tools, num_preemptions, is_admitted):
    engine = tools.Engine(tools.make_config(num_pages=5))  # 4 pages of 4 tokens
    engine.add(tools.make_request("a", range(8), max_tokens=8))  # holds 2, may grow to 4
    request = engine.add(tools.make_request("b", [1, 2, 3], max_tokens=2))  # needs 1 of the 2 that are free
    request.num_preemptions = num_preemptions
    engine.step()
    assert len(engine.schedules[0].resets) == 1 + is_admitted
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions == 0


def test_a_request_is_not_admitted_where_it_would_be_preempted_in_the_next_step(tools):
    engine = tools.Engine(tools.make_config(num_pages=5))
    engine.add(tools.make_request("a", range(8), max_tokens=8))
    engine.add(tools.make_request("b", range(10, 18), max_tokens=2))  # needs the 2 pages that "a" will need
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions == 0


# Decode


def test_many_steps_are_dispatched_at_once_only_when_nobody_could_be_admitted(tools):
    engine = tools.Engine(tools.make_config(decode_sizes=(2,), max_decode_steps=4))
    engine.add(tools.make_request("a", range(4), max_tokens=40))
    engine.step()
    assert engine.schedules[-1].num_decode_steps == 1  # prefill
    engine.step()
    assert engine.schedules[-1].num_decode_steps == 4
    engine.add(tools.make_request("b", range(10, 14), max_tokens=30))
    engine.step()
    assert engine.schedules[-1].num_decode_steps == 1 and engine.schedules[-1].prefill
    engine.add(tools.make_request("c", range(20, 24), max_tokens=3))  # no slot for it
    engine.step()
    assert engine.schedules[-1].num_decode_steps == 4 and not engine.schedules[-1].prefill
    engine.run()
    engine.check_outputs()


def test_while_a_request_waits_for_a_slot_no_dispatch_goes_past_the_end_of_a_running_one(tools):
    engine = tools.Engine(tools.make_config(decode_sizes=(2,), max_decode_steps=4))
    engine.add(tools.make_request("a", range(4), max_tokens=40))
    engine.add(tools.make_request("b", range(10, 14), max_tokens=8))  # 1 from prefill, 4 at once, then 3 single
    engine.add(tools.make_request("c", range(20, 24), max_tokens=8))
    for _ in range(5):
        engine.step()
    assert [schedule.num_decode_steps for schedule in engine.schedules] == [1, 4, 1, 1, 1]
    engine.run()
    engine.check_outputs()


def test_in_a_large_batch_a_waiting_request_does_not_cost_the_others_their_long_dispatches(tools):
    # 32 slots, dispatches of 4 steps: at most one in 16 of 128 slot steps, eight, may be idle while a request waits.
    for num_short, num_steps in ((1, 4), (4, 4), (5, 1)):  # an output of 3 is 1 token of prefill and 2 steps; 2 idle
        config = tools.make_config(decode_sizes=(32,), num_pages=600, prefill_token_buckets=(128,), max_decode_steps=4)
        engine = tools.Engine(config)
        for index in range(33):
            max_tokens = 3 if index < num_short else 40
            engine.add(tools.make_request(f"r{index}", [index, 1, 2, 3], max_tokens))
        engine.step()
        engine.step()
        assert engine.scheduler.num_waiting == 1
        assert [schedule.num_decode_steps for schedule in engine.schedules] == [1, num_steps]
        engine.run()
        engine.check_outputs()


def test_a_slot_about_to_be_free_is_not_kept_from_a_waiting_request_by_a_long_dispatch(tools):
    engine = tools.Engine(tools.make_config(decode_sizes=(2,), max_decode_steps=4))
    engine.add(tools.make_request("a", range(4), max_tokens=40))
    engine.add(tools.make_request("b", range(10, 14), max_tokens=1))  # its only token is in flight at the second step
    engine.add(tools.make_request("c", range(20, 24), max_tokens=8))
    for _ in range(3):
        engine.step()
    assert [schedule.num_decode_steps for schedule in engine.schedules] == [1, 1, 1]
    assert [reset.request.request_id for reset in engine.schedules[2].resets] == ["c"]
    engine.run()
    engine.check_outputs()


def test_long_dispatches_serve_a_full_engine_with_a_queue(tools, rng):
    """Counts of the steps without prefill while requests wait and 64 slots are busy: nearly all are long ones."""
    config = tools.make_config(
        decode_sizes=(64,),
        page_size=16,
        num_pages=2000,
        max_model_len=512,
        prefill_token_buckets=(64, 256),
        max_decode_steps=8,
    )
    engine = tools.Engine(config, check_interval=50)
    for index in range(192):  # 250 output tokens in the mean: two of 64 end in eight steps, 8 of 512 slot steps idle
        engine.add(
            tools.make_request(f"r{index}", tools.random_prompt(rng, 8), rng.randint(100, 400), max_model_len=512)
        )
    num_steps = {1: 0, 8: 0}
    while engine.step():
        schedule = engine.schedules[-1]
        if engine.scheduler.num_waiting and not schedule.prefill:
            num_steps[schedule.num_decode_steps] += 1
    print("dispatches of one and of eight steps:", num_steps)
    assert num_steps[8] > 2 * num_steps[1]
    engine.check_outputs()


def test_a_mixed_step_runs_over_the_smallest_size_that_holds_its_decode_and_prefill_slots(tools):
    config = tools.make_config(
        decode_sizes=(1, 2, 8), num_pages=200, prefill_token_buckets=(4, 64), max_decode_steps=1, query_block=4
    )
    engine = tools.Engine(config)

    def sizes() -> tuple[int, int]:
        return engine.schedules[-1].prefill_bucket, engine.schedules[-1].num_decode_slots

    engine.add(tools.make_request("a", range(4), max_tokens=40))
    engine.step()
    assert sizes() == (4, 0)
    engine.add(tools.make_request("b", range(10, 14), max_tokens=40))
    engine.step()
    assert sizes() == (4, 2)  # slot 0 decodes, slot 1 is prefilled
    engine.add(tools.make_request("c", range(20, 50), max_tokens=40))
    engine.step()
    assert sizes() == (64, 8)  # 8 slots beside 64 tokens are one row in nine: no smaller program was made
    engine.step()
    assert sizes() == (0, 8)
    engine.run()
    engine.check_outputs()


def test_the_end_of_one_request_does_not_cost_the_others_their_long_dispatches(tools):
    engine = tools.Engine(tools.make_config(decode_sizes=(2,), max_decode_steps=4))
    engine.add(tools.make_request("a", range(4), max_tokens=33))
    engine.add(tools.make_request("b", range(10, 14), max_tokens=3))
    engine.run()
    assert [schedule.num_decode_steps for schedule in engine.schedules] == [1] + [4] * 8
    assert engine.scheduler.stats.num_decode_steps == 32
    engine.check_outputs()


def test_the_youngest_waits_for_a_page_rather_than_lose_the_ones_it_has(tools):
    # 8 pages of 4 tokens. After one long dispatch "a" and "b" hold 4 and 3 pages and need one more each.
    config = tools.make_config(num_pages=9, prefill_token_buckets=(32,), max_decode_steps=4)
    engine = tools.Engine(config, depth=0)
    engine.add(tools.make_request("a", range(12), max_tokens=9))
    engine.add(tools.make_request("b", range(20, 28), max_tokens=12))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions == 0
    steps = [(len(schedule.decode), schedule.num_decode_steps) for schedule in engine.schedules]
    # Prefill, both, then "a" alone by single steps until its pages are free.
    assert steps[:6] == [(0, 1), (2, 4), (1, 1), (1, 1), (1, 1), (1, 1)]


def test_a_slot_gets_at_most_one_page_a_step_and_only_when_it_needs_it(tools):
    engine = tools.Engine(tools.make_config(page_size=4, max_decode_steps=4))
    engine.add(tools.make_request("r", range(5), max_tokens=40))
    engine.run()  # the device asserts one append a slot, in order
    assert sum(len(schedule.page_appends) for schedule in engine.schedules) == math.ceil(44 / 4) - math.ceil(5 / 4)
    assert engine.max_unused_page_tokens < 4


@pytest.mark.parametrize("max_decode_steps", [1, 4])
def test_a_stop_token_ends_a_request_that_has_min_tokens_before_it(tools, rng, max_decode_steps):
    engine = tools.Engine(tools.make_config(max_decode_steps=max_decode_steps))
    prompt = tools.random_prompt(rng, 9)
    output, _, _ = tools.solo(tools.make_request("solo", prompt, max_tokens=60), RopeRegime())
    stop = output[10]
    first = output.index(stop)
    early = engine.add(tools.make_request("early", prompt, max_tokens=60, stop_token_ids=[stop]))
    exact = engine.add(tools.make_request("exact", prompt, max_tokens=60, stop_token_ids=[stop], min_tokens=first))
    late = engine.add(tools.make_request("late", prompt, max_tokens=60, stop_token_ids=[stop], min_tokens=first + 1))
    engine.run()
    assert (early.finish_reason, early.stop_reason) == (FinishReason.STOP, stop)
    assert early.output_token_ids == exact.output_token_ids == output[: first + 1]
    assert late.num_output_tokens >= first + 2
    engine.check_outputs()


def test_a_request_finished_early_is_deactivated_and_its_tokens_in_flight_are_dropped(tools):
    engine = tools.Engine(tools.make_config(max_decode_steps=1))
    request = engine.add(tools.make_request("r", range(4), max_tokens=40))
    other = engine.add(tools.make_request("other", range(10, 14), max_tokens=40))
    for _ in range(4):
        engine.step()
    output = list(request.output_token_ids)
    assert engine.scheduler.finish(request, FinishReason.STOP, "stop string")
    assert not engine.scheduler.finish(request, FinishReason.ABORT)
    assert engine.scheduler.page_allocator.num_quarantined_pages > 0
    engine.step()
    assert engine.schedules[-1].deactivate == (0,)
    engine.step()
    assert engine.scheduler.page_allocator.num_quarantined_pages == 0
    assert request.output_token_ids == output
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "stop string")
    engine.run()
    assert other.num_output_tokens == 40


def test_an_id_may_be_used_again_while_a_step_of_its_first_owner_is_in_flight(tools):
    engine = tools.Engine(tools.make_config())
    engine.add(tools.make_request("r", range(4), max_tokens=40))
    engine.step()
    engine.step()
    engine.scheduler.abort("r")
    second = engine.add(tools.make_request("r", range(30, 38), max_tokens=20))
    engine.run()
    assert second.num_output_tokens == 20
    engine.check_outputs()


def test_a_slot_that_stopped_where_the_host_would_go_on_ends_its_request_with_an_error(tools):
    scheduler = Scheduler(tools.make_config())
    request = tools.make_request("r", range(4), max_tokens=9)
    scheduler.add(request)
    schedule = scheduler.schedule()
    events = scheduler.update(schedule, np.full((1, 4), NO_TOKEN, np.int32))
    assert [event.finished for event in events] == [True]
    assert request.finish_reason is FinishReason.ERROR and "device stopped" in request.error
    scheduler.check_integrity()


def test_steps_must_be_updated_in_the_order_they_were_scheduled(tools):
    scheduler = Scheduler(tools.make_config())
    scheduler.add(tools.make_request("r", range(4), max_tokens=9))
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.update(second, np.full((second.num_decode_steps, 4), 1, np.int32))


def test_when_all_tokens_to_come_are_in_flight_the_scheduler_asks_for_an_update(tools):
    engine = tools.Engine(tools.make_config())
    engine.add(tools.make_request("r", range(4), max_tokens=1))
    schedule = engine.scheduler.schedule()
    assert engine.scheduler.schedule() is None and engine.scheduler.needs_drain
    (event,) = engine.scheduler.update(schedule, engine.runner.run(schedule))
    assert event.finished and len(event.new_token_ids) == 1
    assert engine.scheduler.schedule() is None and not engine.scheduler.needs_drain
    assert not engine.scheduler.has_work()


# Logits that are not finite


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_request_with_logits_that_are_not_finite_ends_alone_and_its_pages_are_zeroed(tools, rng, depth, after):
    engine = tools.Engine(tools.make_config(num_pages=40), depth=depth)
    shared = tools.random_prompt(rng, 12)
    requests = [engine.add(tools.make_request(f"r{index}", [*shared, index], max_tokens=20)) for index in range(4)]
    engine.runner.poison_after[("r2", 0)] = after
    engine.run()  # the device asserts that nobody ever gets a page with NaN
    assert [request.finish_reason for request in requests] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert "not finite" in requests[2].error and requests[2].num_output_tokens == after
    zeroed = [page_id for schedule in engine.schedules for page_id in schedule.zero_pages]
    assert zeroed and 0 not in zeroed
    engine.check_outputs()
    again = engine.add(tools.make_request("again", [*shared, 2], max_tokens=20))
    engine.run()
    assert again.output_token_ids == tools.solo(again, RopeRegime())[0]


def test_a_poisoned_page_is_forgotten_even_if_it_was_published_before(tools):
    engine = tools.Engine(tools.make_config())
    request = engine.add(tools.make_request("r", range(8), max_tokens=20))
    engine.runner.poison_after[("r", 0)] = 10
    engine.run()
    assert request.finish_reason is FinishReason.ERROR
    assert len(engine.scheduler.prefix_cache) == 0


def test_a_chunk_before_the_last_may_report_logits_that_are_not_finite(tools):
    scheduler = Scheduler(tools.make_config())
    request = tools.make_request("r", range(40), max_tokens=9)
    scheduler.add(request)
    schedule = scheduler.schedule()
    assert not schedule.prefill[0].samples
    (event,) = scheduler.update(schedule, np.full((1, 4), -2, np.int32))
    assert event.finished and request.finish_reason is FinishReason.ERROR
    assert scheduler.page_allocator.num_free_pages == 64 and len(scheduler.prefix_cache) == 0


def test_pages_poisoned_in_flight_after_the_request_ended_are_zeroed_too(tools):
    engine = tools.Engine(tools.make_config(max_decode_steps=1))
    request = engine.add(tools.make_request("r", range(8), max_tokens=40))
    engine.add(tools.make_request("other", range(20, 28), max_tokens=40))
    engine.runner.poison_after[("r", 0)] = 5
    engine.finish_after[("r", 0)] = 5  # a stop string, read while the step of the sixth token is in flight
    engine.run()
    assert request.finish_reason is FinishReason.STOP
    assert [bool(schedule.zero_pages) for schedule in engine.schedules].count(True) == 1
    assert not engine.runner.is_nan.any()
    engine.check_outputs()


# Prefix cache


def test_a_repeated_prompt_is_found_up_to_but_never_including_its_last_token(tools):
    for num_tokens, num_cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (37, 36)):
        engine = tools.Engine(tools.make_config())
        engine.add(tools.make_request("first", range(num_tokens), max_tokens=1))
        engine.run()
        second = engine.add(tools.make_request("second", range(num_tokens), max_tokens=5))
        engine.run()
        assert second.num_cached_tokens == num_cached
        engine.check_outputs()


def test_output_tokens_are_found_by_the_next_turn_of_a_conversation(tools):
    engine = tools.Engine(tools.make_config())
    first = engine.add(tools.make_request("first", range(10), max_tokens=11))
    engine.run()
    turn = [*range(10), *first.output_token_ids, 7, 8, 9]
    second = engine.add(tools.make_request("second", turn, max_tokens=5))
    engine.run()
    assert second.num_cached_tokens == 20  # 10 + 11 - 1 tokens have K/V: 5 pages
    engine.check_outputs()


def test_a_preempted_request_publishes_again_what_was_evicted_meanwhile(tools):
    engine = tools.Engine(tools.make_config(num_pages=13, max_decode_steps=1))  # 12 pages of 4 tokens
    engine.add(tools.make_request("old", range(8), max_tokens=33))  # 10 pages in the end
    young = engine.add(tools.make_request("young", range(20, 28), max_tokens=20))  # 7 pages
    engine.run()
    assert young.num_preemptions > 0 and engine.scheduler.page_allocator.num_evictions > 0
    turn = [*young.prompt_token_ids, *young.output_token_ids]
    follow_up = engine.add(tools.make_request("follow-up", turn, max_tokens=2))
    engine.run()
    assert follow_up.num_cached_tokens == 24  # of 27 with K/V
    engine.check_outputs()


def test_requests_that_want_prompt_logprobs_compute_every_prompt_token_but_publish(tools):
    engine = tools.Engine(tools.make_config())
    requests = []
    for name, params in (("a", {"prompt_logprobs": 1}), ("b", {"prompt_logprobs": 1}), ("c", {})):
        requests.append(engine.add(tools.make_request(name, range(20), max_tokens=3, **params)))
        engine.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 16]
    engine.check_outputs()


def test_requests_of_different_salts_share_nothing(tools):
    engine = tools.Engine(tools.make_config())
    cached = []
    for index, salt in enumerate((b"", b"a", b"b", b"a")):
        request = engine.add(tools.make_request(f"r{index}", range(20), max_tokens=3, cache_salt=salt))
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 16]


def test_without_prefix_caching_nothing_is_found(tools):
    engine = tools.Engine(tools.make_config(enable_prefix_caching=False))
    for name in ("a", "b"):
        request = engine.add(tools.make_request(name, range(20), max_tokens=3))
        engine.run()
        assert request.num_cached_tokens == 0
    assert engine.scheduler.stats.num_prefix_query_tokens == 0


def test_outputs_stay_right_when_hashes_of_8_bits_collide_all_the_time(tools, rng):
    engine = tools.Engine(tools.make_config(num_pages=200, decode_sizes=(4,)))
    engine.scheduler.prefix_cache.hash_fn = lambda data: xxhash.xxh3_128_digest(data)[:1]
    prefixes = [tools.random_prompt(rng, 24) for _ in range(40)]
    for index in range(300):
        prompt = [*rng.choice(prefixes)[: rng.randint(1, 24)], *tools.random_prompt(rng, rng.randint(0, 8))]
        engine.add(tools.make_request(f"r{index}", prompt, max_tokens=rng.randint(1, 9)))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_prefix_hit_tokens > 0


def test_eight_samples_of_one_long_prompt_take_less_than_1_3_times_the_pages_of_one(tools, rng):
    config = tools.make_config(
        page_size=16,
        num_pages=1000,
        decode_sizes=(8,),
        max_model_len=4200,
        prefill_token_buckets=(512,),
        query_block=32,
    )
    engine = tools.Engine(config)
    prompt = tools.random_prompt(rng, 4096)
    for child in range(8):
        engine.add(tools.make_request("r", prompt, max_tokens=60, child_index=child, max_model_len=4200))
    most = 0
    while engine.step():
        most = max(most, engine.scheduler.page_allocator.num_held_pages)
    engine.check_idle()
    engine.check_outputs()
    print("pages held", most)
    assert most < 1.3 * math.ceil((4096 + 59) / 16)


# Rope


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_sequence_that_outgrows_its_longrope_limit_is_recomputed_from_its_start(tools, rng, depth, max_decode_steps):
    limit = 24
    config = tools.make_config(rope=RopeRegime(longrope_limit=limit), max_decode_steps=max_decode_steps)
    engine = tools.Engine(config, depth=depth)
    for index, num_tokens in enumerate((limit - 10, limit - 1, limit, limit + 1)):
        engine.add(tools.make_request(f"r{index}", tools.random_prompt(rng, num_tokens), max_tokens=20))
    engine.run()
    requests = engine.requests.values()
    assert [request.rope_len for request in requests] == [limit + 1] * 4
    assert engine.scheduler.stats.num_rope_restarts == 3
    assert engine.scheduler.stats.num_preemptions == 0 and not any(request.num_preemptions for request in requests)
    engine.check_outputs()


def test_a_sequence_that_ends_at_its_longrope_limit_is_not_recomputed(tools, rng):
    # 25 tokens: the last is sampled at position 24 and never computed.
    engine = tools.Engine(tools.make_config(rope=RopeRegime(longrope_limit=24)))
    engine.add(tools.make_request("r", tools.random_prompt(rng, 20), max_tokens=5))
    engine.run()
    assert engine.scheduler.stats.num_rope_restarts == 0
    engine.check_outputs()


def test_pages_of_the_short_and_the_long_regime_are_not_mixed_up(tools):
    engine = tools.Engine(tools.make_config(rope=RopeRegime(longrope_limit=24)))
    cached = []
    for index, num_tokens in enumerate((20, 40, 20, 40)):
        request = engine.add(tools.make_request(f"r{index}", [i % 50 for i in range(num_tokens)], max_tokens=2))
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 16, 36]
    engine.check_outputs()


def test_pages_of_dynamically_scaled_prompts_serve_only_prompts_of_equal_length(tools):
    engine = tools.Engine(tools.make_config(rope=RopeRegime(dynamic_limit=24)))
    cached = []
    for index, num_tokens in enumerate((20, 24, 40, 44, 40)):
        request = engine.add(tools.make_request(f"r{index}", [i % 50 for i in range(num_tokens)], max_tokens=8))
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 20, 0, 0, 36]
    engine.check_outputs()


# Faults that other engines had


@pytest.mark.parametrize("num_requests", [2, 5, 8])
def test_s31_batches_of_odd_lengths_read_their_own_pages(tools, rng, num_requests):
    config = tools.make_config(page_size=16, decode_sizes=(8,), max_decode_steps=8, max_model_len=256)
    engine = tools.Engine(config)
    for index in range(num_requests):
        prompt = tools.random_prompt(rng, 2 * rng.randint(0, 30) + 1)
        engine.add(tools.make_request(f"r{index}", prompt, max_tokens=2 * rng.randint(0, 20) + 1))
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_s32_after_2000_random_lengths_every_page_is_free_again(tools, rng, page_size):
    config = tools.make_config(
        page_size=page_size,
        num_pages=16 * 72 // page_size,
        decode_sizes=(16,),
        prefill_token_buckets=(128,),
        max_decode_steps=min(8, page_size),
    )
    engine = tools.Engine(config, check_interval=20)
    for index in range(2000):
        engine.add(tools.make_request(f"r{index}", tools.random_prompt(rng, rng.randint(1, 40)), rng.randint(1, 20)))
        while engine.scheduler.num_waiting > 32:
            engine.step()
    engine.run()  # checks that the pool is as at the start
    engine.check_outputs()


@pytest.mark.parametrize("page_size", [4, 16])
def test_s33_shared_prefixes_around_a_page_boundary_under_eviction_pressure(tools, rng, page_size):
    config = tools.make_config(page_size=page_size, num_pages=10, decode_sizes=(8,), max_model_len=4 * page_size)
    engine = tools.Engine(config)
    prefix = tools.random_prompt(rng, 2 * page_size)
    lengths = (page_size - 1, page_size, page_size + 1, 2 * page_size)
    for round_index in range(12):
        for client in range(8):
            tail = tools.random_prompt(rng, 1) if client % 2 else []
            prompt = [*prefix[: lengths[client % 4]], *tail]
            engine.add(tools.make_request(f"{round_index}.{client}", prompt, max_tokens=page_size))
        if round_index % 4 == 0:
            engine.run()
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_prefix_hit_tokens > 0
    assert engine.scheduler.page_allocator.num_evictions > 0


@pytest.mark.parametrize("num_children", [1, 3])
def test_s35_s36_preempted_requests_return_all_of_their_output_once(tools, rng, num_children):
    engine = tools.Engine(tools.make_config(num_pages=25, decode_sizes=(6,)))  # 24 pages: two sequences of 48 tokens
    for index in range(6):
        prompt = tools.random_prompt(rng, 10)
        for child in range(num_children):
            engine.add(tools.make_request(f"r{index}", prompt, max_tokens=38, child_index=child, seed=index))
    engine.run()  # the loop asserts that what was streamed is the output, chunk by chunk
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions > 0
    assert all(request.num_output_tokens == 38 for request in engine.requests.values())


def test_s37_a_request_placed_in_a_step_is_not_preempted_in_it(tools, rng):
    engine = tools.Engine(tools.make_config(num_pages=41, decode_sizes=(13,), max_decode_steps=1))
    for index in range(10):
        engine.add(tools.make_request(f"low{index}", tools.random_prompt(rng, 12), max_tokens=60))
    for _ in range(20):
        engine.step()
    assert engine.scheduler.num_running == 10 or engine.scheduler.stats.num_preemptions > 0
    for index in range(3):
        engine.add(tools.make_request(f"late{index}", tools.random_prompt(rng, 12), max_tokens=10))
    engine.run()  # asserts in each step: who is placed is running, once, with its pages and tokens consistent
    assert engine.scheduler.stats.num_preemptions > 0
    engine.check_outputs()


def test_s38_a_stream_of_equals_starves_nobody_and_preempts_nobody_without_end(tools, rng):
    # 30 pages of 4 tokens for up to 8 sequences of 12 pages each: overcommitted threefold.
    engine = tools.Engine(tools.make_config(num_pages=31, decode_sizes=(8,)))
    waited: dict[str, int] = {}
    finished: list[int] = []
    for index in range(120):
        engine.add(tools.make_request(f"{index}", tools.random_prompt(rng, 8), max_tokens=40))
        for _ in range(4):
            engine.step()
        for request in engine.requests.values():
            if request.is_finished and request.request_id not in waited:
                waited[request.request_id] = len(engine.schedules)
                finished.append(int(request.request_id))
    engine.run()
    engine.check_outputs()
    preemptions = [request.num_preemptions for request in engine.requests.values()]
    print("preemptions", sum(preemptions), "most of one request", max(preemptions))
    assert sum(preemptions) > 0
    # A request is let in again only with twice the room of the time before: log2 of 12 pages, and the first time.
    assert max(preemptions) <= 1 + math.ceil(math.log2(12))
    assert preemptions[0] == 0  # the oldest always progresses
    # Equal work is done in order of arrival, but for the eight that run at once.
    assert all(abs(place - number) <= 8 for place, number in enumerate(finished))


def test_s41_500_streams_closed_after_their_first_tokens_leave_full_capacity(tools, rng):
    engine = tools.Engine(tools.make_config())
    for index in range(500):
        request = engine.add(tools.make_request(f"r{index}", tools.random_prompt(rng, rng.randint(1, 40)), 60))
        while not request.output_token_ids:
            engine.step()
        assert engine.scheduler.abort(request.request_id) == [request]
    engine.run()
    engine.check_outputs()
    last = engine.add(tools.make_request("last", range(64), max_tokens=64))
    engine.run()
    assert last.num_output_tokens == 64


def test_s42_dropped_requests_never_start_or_stop_within_a_step(tools):
    engine = tools.Engine(tools.make_config(decode_sizes=(1,)))
    running = engine.add(tools.make_request("running", range(4), max_tokens=100))
    queued = [engine.add(tools.make_request(f"queued{index}", range(index, 20), max_tokens=5)) for index in range(5)]
    for _ in range(3):
        engine.step()
    for request in queued:
        assert engine.scheduler.abort(request.request_id) == [request]
        assert engine.scheduler.abort(request.request_id) == []
    assert engine.scheduler.num_waiting == 0
    num_schedules, num_tokens = len(engine.schedules), running.num_output_tokens
    engine.scheduler.abort("running")
    engine.run()
    assert len(engine.schedules) == num_schedules and running.num_output_tokens == num_tokens
    assert {reset.request.request_id for schedule in engine.schedules for reset in schedule.resets} == {"running"}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", range(8))
def test_s43_a_prompt_of_six_chunks_may_be_dropped_before_or_after_any_of_them(tools, rng, depth, num_steps):
    engine = tools.Engine(tools.make_config(), depth=depth)
    prompt = tools.random_prompt(rng, 6 * 16 - 3)
    dropped = engine.add(tools.make_request("dropped", prompt, max_tokens=20))
    other = engine.add(tools.make_request("other", tools.random_prompt(rng, 5), max_tokens=30))
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort("dropped") == [dropped]
    engine.scheduler.check_integrity()
    twin = engine.add(tools.make_request("twin", prompt, max_tokens=20))
    engine.run()
    assert dropped.finish_reason is FinishReason.ABORT and dropped.status is RequestStatus.FINISHED
    assert twin.num_output_tokens == 20 and other.num_output_tokens == 30
    engine.check_outputs()


# Static batching, for comparison


def test_sequences_left_in_high_slots_move_down_so_that_smaller_programs_do(tools, rng):
    engine = tools.Engine(tools.make_config(decode_sizes=(2, 8), num_pages=200, prefill_token_buckets=(64,)))
    for index in range(8):  # the last two outlive the others
        engine.add(tools.make_request(f"r{index}", tools.random_prompt(rng, 6), max_tokens=6 if index < 6 else 20))
    engine.run()
    engine.check_outputs()
    sizes = [schedule.num_decode_slots for schedule in engine.schedules if schedule.decode]
    assert sizes == sorted(sizes, reverse=True) and sizes.count(2) >= 3, sizes
    moves = [move for schedule in engine.schedules for move in schedule.moves]
    assert sorted(move.source for move in moves) == [6, 7] and sorted(move.target for move in moves) == [0, 1]
    assert engine.scheduler.stats.num_slot_moves == 2


def test_static_batching_admits_only_into_an_empty_engine(tools, rng):
    engine = tools.Engine(tools.make_config(static_batching=True, decode_sizes=(3,)))
    for index in range(7):
        engine.add(tools.make_request(f"r{index}", tools.random_prompt(rng, 10), max_tokens=rng.randint(1, 30)))
    admitted = []
    while True:
        was_empty = engine.scheduler.num_running == 0
        num_schedules = len(engine.schedules)
        if not engine.step():
            break
        if len(engine.schedules) > num_schedules and engine.schedules[-1].resets:
            assert was_empty
            admitted.append(len(engine.schedules[-1].resets))
    assert admitted == [3, 3, 1]
    engine.check_idle()
    engine.check_outputs()


def test_continuous_batching_pays_a_fraction_of_the_slot_steps_of_static_batching(tools, rng):
    # Output lengths log-normal with sigma 1: of 16 drawn the longest is about 6 times the median.
    lengths = [min(max(int(rng.lognormvariate(3.4, 1.0)), 1), 500) for _ in range(200)]
    prompts = [tools.random_prompt(rng, rng.randint(4, 40)) for _ in lengths]
    slot_steps = {}
    for static in (False, True):
        config = tools.make_config(
            page_size=16,
            num_pages=700,
            decode_sizes=(16,),
            max_model_len=640,
            prefill_token_buckets=(256,),
            max_decode_steps=1,
            static_batching=static,
        )
        engine = tools.Engine(config, check_interval=50)
        for index, (prompt, num_tokens) in enumerate(zip(prompts, lengths, strict=True)):
            engine.add(tools.make_request(f"r{index}", prompt, num_tokens, max_model_len=640))
        engine.run()
        slot_steps[static] = engine.scheduler.stats.num_decode_slot_steps
        assert engine.scheduler.stats.num_output_tokens == sum(lengths)
    print("slot steps: continuous", slot_steps[False], "static", slot_steps[True], "tokens", sum(lengths))
    assert slot_steps[False] < slot_steps[True] / 2


def test_a_request_that_needs_its_last_token_decodes_every_second_step_and_holds_up_nobody(tools):
    engine = tools.Engine(tools.make_config(max_decode_steps=4))
    slow = engine.add(tools.make_request("slow", [1, 2, 3], 10, structured=StructuredOutput.json_object()))
    fast = engine.add(tools.make_request("fast", [4, 5, 6], 30))
    engine.run()
    engine.check_outputs()
    decodes = [[request.request_id for _, request in schedule.decode] for schedule in engine.schedules]
    decodes = [ids for ids in decodes if ids]
    with_slow = [i for i, ids in enumerate(decodes) if "slow" in ids]
    assert with_slow == list(range(1, 19, 2))  # the first token is the prompt's
    assert all("fast" in ids for ids in decodes)
    assert all(
        schedule.num_decode_steps == 1 for schedule in engine.schedules if slow in [r for _, r in schedule.decode]
    )
    assert 4 in {schedule.num_decode_steps for schedule in engine.schedules} and fast.num_output_tokens == 30


def test_alone_a_request_that_needs_its_last_token_decodes_at_every_step(tools):
    engine = tools.Engine(tools.make_config())
    engine.add(tools.make_request("slow", [1, 2, 3], 10, structured=StructuredOutput.json_object()))
    engine.run()
    engine.check_outputs()
    assert len(engine.schedules) == 10 and engine.scheduler.stats.num_drains == 10
