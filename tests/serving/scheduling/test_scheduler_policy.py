"""Classes, tenants, deadlines and long prompts through the scheduler, with a device that knows what pages must hold."""

from __future__ import annotations

import math

import pytest

from configs.scheduling import SchedulingConfig
from serving.request import FinishReason
from serving.scheduling.schedule import StepLimits
from serving.scheduling.scheduler import MAX_PAUSE

CLASSES = {"class_names": ("fast", "slow"), "class_priorities": (0, 10)}
SLOW = 10


def policy_engine(tools, *, depth=1, check_interval=1, policy=None, **changes):
    config = tools.make_config(policy=SchedulingConfig(**(CLASSES if policy is None else policy)), **changes)
    return tools.Engine(config, depth=depth, check_interval=check_interval)


def finish_step(engine, request):
    """Steps until the request has finished."""
    while not request.is_finished:
        assert engine.step()
    return len(engine.schedules)


def jain(values):
    """Jain's index of fairness (Jain, Chiu and Hawe 1984): 1 where all are equal, 1 / n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


# Classes


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_s37_urgent_requests_are_first_where_a_full_pool_is_others_who_resume(tools, rng, depth):
    engine = policy_engine(tools, depth=depth, num_pages=41, decode_sizes=(13,), max_decode_steps=1)
    low = [
        engine.add(tools.make_request(f"low{i}", tools.random_prompt(rng, 12), max_tokens=40, priority=SLOW))
        for i in range(10)
    ]
    while engine.scheduler.num_waiting or not engine.scheduler.num_running:
        engine.step()
        if engine.scheduler.page_allocator.num_free_pages < 3:
            break
    urgent = [engine.add(tools.make_request(f"u{i}", tools.random_prompt(rng, 20), max_tokens=8)) for i in range(3)]
    before = len(engine.schedules)
    while any(request.num_computed_tokens < 20 for request in urgent):
        engine.step()  # asserts that who is placed is running, once, with its pages and tokens consistent
    assert len(engine.schedules) - before <= 6  # their 60 tokens by 16, but for steps between
    placed = [reset.request.request_id[0] for schedule in engine.schedules[before:] for reset in schedule.resets]
    assert placed[:3] == ["u", "u", "u"]
    engine.run()
    engine.check_outputs()
    assert all(request.num_output_tokens == 40 for request in low)
    assert all(request.num_preemptions == 0 for request in urgent)


def test_s37_an_urgent_request_takes_a_slot_where_none_is_free(tools, rng):
    engine = policy_engine(tools, decode_sizes=(2,))
    for index in range(2):
        engine.add(tools.make_request(f"low{index}", tools.random_prompt(rng, 8), max_tokens=60, priority=SLOW))
    for _ in range(5):
        engine.step()
    urgent = engine.add(tools.make_request("urgent", [1, 2, 3], max_tokens=4))
    assert finish_step(engine, urgent) <= 20
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_preemptions == 1


BACKGROUND = StepLimits(
    max_prefill_tokens=16,
    max_num_seqs=6,
    max_background_seqs=2,
    max_background_prefill_tokens=4,
    background_priority=SLOW,
)


def background_engine(tools):
    engine = policy_engine(
        tools, decode_sizes=(6,), prefill_token_buckets=(4, 8, 16), num_pages=200, max_decode_steps=1
    )
    engine.limits = BACKGROUND
    return engine


def prompt_tokens(schedule):
    return {chunk.request.request_id: len(chunk.token_ids) for chunk in schedule.prefill}


def test_background_has_the_bucket_that_others_leave_it_and_comes_after_those_who_came_later(tools, rng):
    engine = background_engine(tools)
    engine.add(tools.make_request("low", tools.random_prompt(rng, 40), max_tokens=8, priority=SLOW))
    engine.step()
    engine.step()
    assert [prompt_tokens(schedule) for schedule in engine.schedules] == [{"low": 4}] * 2
    engine.add(tools.make_request("fast", tools.random_prompt(rng, 20), max_tokens=8))
    engine.step()
    engine.step()
    # 16 of the 20 alone; then the 4 that are left, which are a whole bucket
    assert [prompt_tokens(schedule) for schedule in engine.schedules[2:]] == [{"fast": 16}, {"fast": 4}]
    engine.add(tools.make_request("next", tools.random_prompt(rng, 12), max_tokens=8))
    engine.step()
    assert prompt_tokens(engine.schedules[4]) == {"next": 12, "low": 4}  # of a bucket of 16
    engine.run()
    engine.check_outputs()


def test_background_sits_out_steps_full_of_others_prompts_but_not_for_ever(tools, rng):
    engine = background_engine(tools)
    for name in ("low0", "low1", "low2"):
        engine.add(tools.make_request(name, tools.random_prompt(rng, 4), max_tokens=40, priority=SLOW))
    for _ in range(6):
        engine.step()
    low = [request for _, request in engine.schedules[-1].decode]
    assert [request.request_id for request in low] == ["low0", "low1"]  # no more than may run
    engine.add(tools.make_request("fast", tools.random_prompt(rng, 100), max_tokens=8))
    before = len(engine.schedules)
    for _ in range(7):
        engine.step()
    num_decoding = [len(schedule.decode) for schedule in engine.schedules[before:]]
    assert num_decoding == [0] * MAX_PAUSE + [2] + [0, 2]  # the last chunk is no more than a bucket of background
    engine.run()
    engine.check_outputs()


def test_nobody_gives_way_in_vain_or_more_often_than_max_preemptions(tools, rng):
    policy = {**CLASSES, "max_preemptions": 2}
    engine = policy_engine(tools, policy=policy, decode_sizes=(2,), num_pages=33, max_decode_steps=1)
    low = engine.add(tools.make_request("low", tools.random_prompt(rng, 8), max_tokens=110, priority=SLOW))
    engine.add(tools.make_request("first", tools.random_prompt(rng, 60), max_tokens=60))
    for _ in range(12):
        engine.step()
    # All that "low" holds would not let it in beside "first".
    engine.add(tools.make_request("large", tools.random_prompt(rng, 100), max_tokens=4))
    for _ in range(10):
        engine.step()
    assert low.num_preemptions == 0
    for index in range(30):
        engine.add(tools.make_request(f"u{index}", tools.random_prompt(rng, 8), max_tokens=2))
        for _ in range(4):
            engine.step()
    engine.run()
    engine.check_outputs()
    assert low.num_preemptions <= 2


def test_the_lowest_class_ends_under_a_stream_of_better_requests_by_its_age(tools, rng):
    ended_at = {}
    for ageing_s in (0.0, 10.0):
        engine = policy_engine(tools, policy={**CLASSES, "class_ageing_s": ageing_s}, decode_sizes=(1,))
        engine.add(tools.make_request("running", [1], max_tokens=4))
        low = engine.add(tools.make_request("low", [2], max_tokens=4, priority=SLOW))
        for second in range(60):
            engine.now_s = float(second)
            for child in range(2):
                engine.add(
                    tools.make_request(
                        f"{second}.{child}", [3, second], max_tokens=4, priority=-1, arrival_time_s=engine.now_s
                    )
                )
            for _ in range(4):
                engine.step()
            if low.is_finished:
                ended_at[ageing_s] = second
                break
        engine.run()
        engine.check_outputs()
    assert list(ended_at) == [10.0] and 20 <= ended_at[10.0] <= 25


@pytest.mark.parametrize("num_children", [1, 3])
def test_s36_s38_preempted_requests_of_two_classes_end_whole_and_are_preempted_boundedly(tools, rng, num_children):
    policy = {**CLASSES, "class_ageing_s": 20.0, "max_preemptions": 3}
    engine = policy_engine(tools, policy=policy, num_pages=31, decode_sizes=(8,))
    for index in range(40):
        engine.now_s = float(index)
        prompt = tools.random_prompt(rng, 8)
        for child in range(num_children):
            engine.add(
                tools.make_request(
                    f"{index}",
                    prompt,
                    max_tokens=40,
                    child_index=child,
                    priority=rng.choice((0, SLOW)),
                    arrival_time_s=engine.now_s,
                )
            )
        for _ in range(4):
            engine.step()
    while engine.step():
        engine.now_s += 1.0
    engine.check_idle()
    engine.check_outputs()
    preemptions = [request.num_preemptions for request in engine.requests.values()]
    print("preemptions", sum(preemptions), "most of one request", max(preemptions))
    assert sum(preemptions) > 0 and all(request.num_output_tokens == 40 for request in engine.requests.values())
    # Beyond max_preemptions only where nothing else can give way, and each time with twice the room.
    assert max(preemptions) <= 3 + 1 + math.ceil(math.log2(12))


def test_two_that_fill_the_pool_do_not_push_each_other_out_without_end(tools, rng):
    engine = policy_engine(tools, policy={"max_preemptions": 0}, num_pages=14, decode_sizes=(2,), max_model_len=52)
    for index in range(2):
        prompt = tools.random_prompt(rng, 10 + index)
        engine.add(tools.make_request(f"{index}", prompt, max_tokens=40, max_model_len=52))
    engine.run(max_steps=400)
    engine.check_outputs()


# Deadlines


def test_a_request_without_a_slot_by_its_deadline_ends_and_one_that_began_goes_on(tools):
    engine = policy_engine(tools, decode_sizes=(1,))
    began = engine.add(tools.make_request("began", [1], max_tokens=30, deadline_s=1.0))
    late = engine.add(tools.make_request("late", [2], max_tokens=30, deadline_s=1.0))
    patient = engine.add(tools.make_request("patient", [3], max_tokens=30, deadline_s=1e6))
    engine.step()
    engine.now_s = 1.0
    engine.step()
    assert engine.expired == [late] and late.finish_reason is FinishReason.TIMEOUT and late.error
    engine.run()
    assert (began.finish_reason, patient.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert engine.scheduler.stats.num_deadline_drops == 1
    engine.check_outputs()


def test_completions_of_a_request_that_has_begun_outlive_its_deadline_together(tools):
    engine = policy_engine(tools, decode_sizes=(1,))
    for child in range(3):
        engine.add(tools.make_request("r", [1], max_tokens=5, child_index=child, deadline_s=1.0))
    for _ in range(8):
        engine.step()
    engine.now_s = 2.0
    engine.run()
    assert engine.expired == [] and all(r.num_output_tokens == 5 for r in engine.requests.values())


# Tenants


def test_saturated_tenants_of_ten_times_different_lengths_are_served_equal_tokens(tools, rng):
    """Four tenants with requests of 10, 100, 30 and 60 tokens, all with a queue at all times."""
    engine = policy_engine(tools, policy={}, decode_sizes=(8,), num_pages=257, check_interval=50)
    lengths = {"a": (5, 5), "b": (40, 60), "c": (20, 10), "d": (10, 50)}
    for number in range(1200):
        for tenant, (num_prompt, num_output) in lengths.items():
            if number < 12000 // (num_prompt + num_output):
                prompt = tools.random_prompt(rng, num_prompt)
                engine.add(tools.make_request(f"{tenant}{number}", prompt, max_tokens=num_output, tenant=tenant))
    for _ in range(900):
        engine.step()
    served = dict.fromkeys(lengths, 0)
    for request in engine.requests.values():
        served[request.context.tenant] += request.num_computed_tokens
    print(served, jain(list(served.values())))
    assert max(served.values()) < 11000, "a queue ran empty: the tenants were not saturated"
    assert min(served.values()) > 1000
    assert jain(list(served.values())) >= 0.95


def test_a_tenant_borrows_an_idle_pool_and_gives_back_first(tools, rng):
    policy = {"tenant_names": ("big", "small"), "tenant_kv_tokens": (64, 64)}
    engine = policy_engine(tools, policy=policy, num_pages=33, decode_sizes=(8,))  # 128 tokens
    for index in range(6):
        engine.add(tools.make_request(f"big{index}", tools.random_prompt(rng, 12), max_tokens=40, tenant="big"))
    for _ in range(12):
        engine.step()
    held = engine.scheduler._budgets.held
    assert held["big"] > 64  # nobody else is there
    small = [
        engine.add(tools.make_request(f"small{i}", tools.random_prompt(rng, 12), max_tokens=12, tenant="small"))
        for i in range(2)
    ]
    for _ in range(8):
        engine.step()
    assert all(request.num_computed_tokens for request in small)
    engine.run()
    engine.check_outputs()
    assert all(request.num_preemptions == 0 for request in small)
    assert engine.scheduler.stats.num_preemptions > 0


# Long prompts


def test_s39_streams_and_short_prompts_do_not_wait_for_a_long_prompt(tools, rng):
    policy = {"long_prefill_tokens": 8, "max_long_prefills": 1}
    engine = policy_engine(
        tools, policy=policy, decode_sizes=(16,), num_pages=400, max_model_len=512, prefill_token_buckets=(16,)
    )
    streams = [engine.add(tools.make_request(f"s{i}", [i, i + 1], max_tokens=90)) for i in range(8)]
    while any(request.num_output_tokens == 0 for request in streams):
        engine.step()
    long_ones = [
        engine.add(tools.make_request(f"long{i}", tools.random_prompt(rng, 128), max_tokens=4, max_model_len=512))
        for i in range(2)
    ]
    engine.step()
    engine.step()
    short = engine.add(tools.make_request("short", tools.random_prompt(rng, 8), max_tokens=4))
    before = len(engine.schedules)
    while short.num_output_tokens == 0:
        engine.step()
    assert len(engine.schedules) - before <= 2  # not the 16 of two long prompts
    while any(not request.num_output_tokens for request in long_ones):
        engine.step()
    for schedule in engine.schedules[before:]:
        assert len(schedule.decode) >= 8 - sum(request.is_finished for request in streams)
        assert sum(chunk.request in long_ones for chunk in schedule.prefill) <= 1
        has_short = any(chunk.request not in long_ones for chunk in schedule.prefill)
        assert not has_short or all(len(c.token_ids) <= 8 for c in schedule.prefill if c.request in long_ones)
    assert any(len(c.token_ids) == 16 for s in engine.schedules for c in s.prefill if c.request in long_ones)
    engine.run()
    engine.check_outputs()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one(tools, rng):
    policy = {"long_prefill_tokens": 8}
    engine = policy_engine(
        tools, policy=policy, decode_sizes=(8,), num_pages=400, max_model_len=512, prefill_token_buckets=(16,)
    )
    long_one = engine.add(tools.make_request("long", tools.random_prompt(rng, 160), max_tokens=2, max_model_len=512))
    for index in range(60):
        engine.add(tools.make_request(f"{index}", tools.random_prompt(rng, 8), max_tokens=1))
        engine.add(tools.make_request(f"{index}b", tools.random_prompt(rng, 8), max_tokens=1))
        engine.step()
        if long_one.is_finished:
            break
    assert long_one.is_finished and index <= 30
    engine.run()
    engine.check_outputs()


# All of it


@pytest.mark.parametrize("trial", range(4))
def test_outputs_in_random_company_of_classes_tenants_and_long_prompts_equal_solo_outputs(tools, rng, trial):
    policy = {
        "class_names": ("x", "y", "z"),
        "class_priorities": (0, 5, 10),
        "class_ageing_s": rng.choice([0.0, 20.0]),
        "tenant_names": ("a", "b"),
        "tenant_weights": (1.0, 3.0),
        "tenant_kv_tokens": (rng.choice([0, 30]), 60),
        "long_prefill_tokens": rng.choice([0, 8, 20]),
        "max_preemptions": rng.choice([0, 1, 4]),
    }
    engine = policy_engine(
        tools,
        policy=policy,
        depth=rng.choice([0, 1, 2]),
        num_pages=25 + rng.randint(0, 30),
        decode_sizes=(rng.randint(2, 8),),
        max_model_len=96,
        max_decode_steps=rng.choice([1, 4]),
        prefill_token_buckets=(rng.choice([8, 32]),),
    )
    print(engine.config, engine.depth)
    prefixes = [tools.random_prompt(rng, 20) for _ in range(2)]
    for index in range(60):
        engine.now_s += rng.random() * 3
        prompt = [*rng.choice(prefixes)[: rng.randint(0, 20)], *tools.random_prompt(rng, rng.randint(1, 30))]
        shared = {
            "max_model_len": 96,
            "seed": index,
            "tenant": rng.choice("abc"),
            "priority": rng.randint(-1, 12),
            "deadline_s": engine.now_s + rng.random() * 30 if rng.random() < 0.3 else None,
            "arrival_time_s": engine.now_s,
        }
        max_tokens = rng.randint(1, 40)
        for child in range(rng.choice([1, 1, 3])):
            engine.add(tools.make_request(f"r{index}", prompt, max_tokens, child_index=child, **shared))
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.05:
            engine.scheduler.abort(f"r{rng.randrange(index + 1)}")
    while engine.step():
        engine.now_s += 0.5
    engine.check_idle()
    engine.check_outputs()
    timed_out = [r for r in engine.requests.values() if r.finish_reason is FinishReason.TIMEOUT]
    assert timed_out == engine.expired or sorted(map(id, timed_out)) == sorted(map(id, engine.expired))
    assert all(not request.output_token_ids for request in timed_out)


@pytest.mark.parametrize("num_pages", [20, 22, 24])
def test_a_request_placed_by_preemption_keeps_its_slot_in_the_step_that_places_it(tools, num_pages):
    policy = SchedulingConfig(class_names=("interactive", "batch"), class_priorities=(0, 10))
    engine = tools.Engine(
        tools.make_config(num_pages=num_pages, decode_sizes=(4, 8), prefill_token_buckets=(64,), policy=policy)
    )
    for i in range(5):
        engine.add(tools.make_request(f"batch{i}", range(i * 5, i * 5 + 12), 30, priority=10))
    for _ in range(3):
        engine.step()
    engine.add(tools.make_request("one", [40] * 4, 4))
    engine.add(tools.make_request("two", [41] * 24, 4))
    engine.run()
    engine.check_outputs()


def test_tenants_whose_pages_just_pass_their_budgets_do_not_push_each_other_out(tools):
    policy = SchedulingConfig(default_tenant_kv_tokens=38)
    config = tools.make_config(
        page_size=16, num_pages=65, decode_sizes=(1,), prefill_token_buckets=(64,), policy=policy
    )
    engine = tools.Engine(config)
    engine.add(tools.make_request("a", [1] * 34, 4, tenant="a"))
    engine.step()
    engine.add(tools.make_request("b", [2] * 34, 4, tenant="b"))
    engine.run()
    assert engine.scheduler.stats.num_preemptions == 0 and engine.scheduler.stats.num_prefill_tokens == 68


def test_a_prompt_held_back_by_a_step_s_limits_is_not_kept_from_the_next_by_a_long_dispatch(tools):
    engine = tools.Engine(
        tools.make_config(num_pages=400, decode_sizes=(8,), prefill_token_buckets=(16,), max_decode_steps=4)
    )
    for i in range(3):
        engine.add(tools.make_request(f"decodes{i}", range(i, i + 4), 100))
    engine.step()
    engine.add(tools.make_request("prompt", [5] * 40, 4))
    engine.step()
    engine.limits = StepLimits(max_prefill_tokens=0, max_num_seqs=8)
    for _ in range(2):
        engine.step()
    assert [schedule.num_decode_steps for schedule in engine.schedules[-2:]] == [1, 1]
