"""What requests share through the prefix cache: waiting for each other, tenants, pinned prefixes."""

from __future__ import annotations

import pytest

from configs.checks import ConfigError
from serving.request import FinishReason, RequestError

PREFIX = list(range(32))  # eight pages of 4 tokens


def waiting_engine(tools, **changes):
    return tools.Engine(tools.make_config(**({"prefix_wait_tokens": 8, "decode_sizes": (8,)} | changes)))


def test_requests_that_begin_alike_and_come_together_compute_their_prefix_once(tools):
    engine = waiting_engine(tools)
    for index in range(6):
        engine.add(tools.make_request(f"r{index}", [*PREFIX, 40 + index], max_tokens=4))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_prefill_tokens == 33 + 5
    assert engine.scheduler.stats.num_prefix_waits == 5
    assert [r.num_cached_tokens for r in engine.requests.values()] == [0, 32, 32, 32, 32, 32]


def test_a_prompt_hashed_beforehand_is_not_hashed_again_and_shares_as_any_other(tools):
    engine = tools.Engine(tools.make_config())
    engine.add(tools.make_request("first", PREFIX, max_tokens=1))
    engine.run()
    second = tools.make_request("second", [*PREFIX, 40], max_tokens=1)
    second.hashed_prompt = engine.scheduler.hash_prompt(second)
    hashed = []
    cache = engine.scheduler.prefix_cache
    hash_fn, cache.hash_fn = cache.hash_fn, lambda data: hashed.append(data) or hash_fn(data)
    engine.add(second)
    engine.run()
    engine.check_outputs()
    assert second.num_cached_tokens == 32 and not hashed


def test_hashes_made_for_another_salt_are_not_used(tools):
    engine = tools.Engine(tools.make_config(prefix_cache_scope="tenant"))
    first = tools.make_request("first", PREFIX, max_tokens=1, tenant="a")
    engine.add(first)
    engine.run()
    second = tools.make_request("second", [*PREFIX, 40], max_tokens=1, tenant="b")
    second.hashed_prompt = engine.scheduler.hash_prompt(first)
    engine.add(second)
    engine.run()
    engine.check_outputs()
    assert second.num_cached_tokens == 0


def test_completions_of_one_request_share_the_full_pages_of_its_prompt(tools):
    engine = waiting_engine(tools)
    for child in range(4):
        engine.add(tools.make_request("r", PREFIX[:30], max_tokens=4, child_index=child))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_prefill_tokens == 30 + 3 * 1


def test_a_request_that_shares_nothing_is_not_held_up_by_those_that_wait_before_it(tools):
    engine = waiting_engine(tools)
    first = engine.add(tools.make_request("first", PREFIX))
    alike = engine.add(tools.make_request("alike", [*PREFIX, 40]))
    other = engine.add(tools.make_request("other", range(41, 50)))
    for _ in range(2):
        engine.step()
    assert first.num_computed_tokens > 0 and alike.num_computed_tokens == 0
    while other.num_computed_tokens == 0:
        assert alike.num_computed_tokens == 0
        engine.step()
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("wait_tokens", [None, 36])
def test_less_than_the_configured_prefix_is_not_waited_for(tools, wait_tokens):
    engine = waiting_engine(tools, prefix_wait_tokens=wait_tokens, prefill_token_buckets=(128,))
    for index in range(3):
        engine.add(tools.make_request(f"r{index}", [*PREFIX, 40 + index], max_tokens=1))
    engine.run()
    assert engine.scheduler.stats.num_prefix_waits == 0
    assert engine.scheduler.stats.num_prefill_tokens == 3 * 33


def test_requests_of_other_salts_and_those_that_score_their_prompt_do_not_wait(tools):
    engine = waiting_engine(tools)
    engine.add(tools.make_request("r", PREFIX, max_tokens=1))
    engine.add(tools.make_request("salt", PREFIX, max_tokens=1, cache_salt=b"other"))
    engine.add(tools.make_request("score", PREFIX, max_tokens=1, prompt_logprobs=0))
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.num_prefix_waits == 0


@pytest.mark.parametrize("end", ["abort", "not finite"])
def test_a_request_goes_on_by_itself_when_the_one_that_it_waits_for_ends(tools, end):
    engine = waiting_engine(tools, prefill_token_buckets=(24,))
    engine.add(tools.make_request("first", PREFIX, max_tokens=4))
    alike = engine.add(tools.make_request("alike", [*PREFIX, 40], max_tokens=4))
    if end == "not finite":
        engine.runner.poison_after[("first", 0)] = 0
    engine.step()
    engine.step()
    if end == "abort":
        engine.scheduler.abort("first")
    engine.run()
    engine.check_outputs()
    assert alike.finish_reason is FinishReason.LENGTH and engine.scheduler.stats.num_prefix_waits == 1


def test_s64_tenants_find_their_own_prefixes_alone_where_the_scope_is_the_tenant(tools):
    cached = {}
    for scope in ("shared", "tenant"):
        engine = tools.Engine(tools.make_config(prefix_cache_scope=scope))
        cached[scope] = []
        for index, (tenant, salt) in enumerate([("a", b""), ("b", b""), ("a", b""), ("b", b"x"), ("b", b"x")]):
            name = f"r{index}"
            request = engine.add(tools.make_request(name, PREFIX[:20], max_tokens=3, tenant=tenant, cache_salt=salt))
            engine.run()
            cached[scope].append(request.num_cached_tokens)
    assert cached == {"shared": [0, 16, 16, 0, 16], "tenant": [0, 0, 16, 0, 16]}


def test_no_salt_of_a_tenants_own_reaches_anothers_and_no_process_repeats_them(tools):
    salts = []
    for _ in range(2):
        scheduler = tools.Engine(tools.make_config(prefix_cache_scope="tenant")).scheduler
        for tenant, salt in (("ann", b""), ("bob", b""), ("ann", b"bob"), ("annbob", b"")):
            salts.append(scheduler._salts.salt(tools.make_request("r", [1], tenant=tenant, cache_salt=salt), b""))
    assert len(set(salts)) == 8
    assert not any(salt.startswith((b"/ann", b"/bob")) for salt in salts)


def flooded_hit_rate(tools, rng, floor: float, num_rounds: int = 150) -> float:
    """Hit rate of nine tenants that each ask now and then with a prompt of their own, beside one that floods the pool."""
    config = tools.make_config(
        num_pages=201,
        decode_sizes=(8,),
        prefill_token_buckets=(64,),
        prefix_cache_scope="tenant",
        prefix_cache_floor=floor,
    )
    engine = tools.Engine(config, check_interval=20)
    prompts = {name: tools.random_prompt(rng, 24) for name in "abcdefghi"}
    hits = total = 0
    for index in range(num_rounds):
        name = "abcdefghi"[index % 9]
        tail = tools.random_prompt(rng, 2)
        asked = engine.add(tools.make_request(f"{name}{index}", [*prompts[name], *tail], max_tokens=2, tenant=name))
        for flood in range(3):
            prompt = tools.random_prompt(rng, 40)
            engine.add(tools.make_request(f"flood{index}.{flood}", prompt, max_tokens=20, tenant="flood"))
        while not asked.is_finished:
            engine.step()
        if index >= 9:
            hits, total = hits + asked.num_cached_tokens, total + asked.num_prompt_tokens
    engine.run()
    engine.check_outputs()
    return hits / total


def test_with_floors_a_tenant_at_twenty_times_its_share_takes_under_5_points_of_the_others_hit_rate(tools, rng):
    alone = 24 / 26
    with_floors, without = flooded_hit_rate(tools, rng, 0.05), flooded_hit_rate(tools, rng, 0.0)
    print(f"{alone:.3f} alone, {with_floors:.3f} with floors, {without:.3f} without")
    assert with_floors > alone - 0.05 and without < alone - 0.05


def pin_engine(tools, **changes):
    return tools.Engine(tools.make_config(**({"num_pages": 25, "max_pinned_pages": 8, "max_model_len": 60} | changes)))


def fill(tools, rng, engine, num_requests=12):
    for _ in range(num_requests):
        name = f"fill{len(engine.requests)}"
        engine.add(tools.make_request(name, tools.random_prompt(rng, 20), max_tokens=20, max_model_len=60))
    while engine.step():
        pass


def test_a_pinned_prefix_outlives_any_pressure_until_it_is_unpinned(tools, rng):
    engine = pin_engine(tools)
    scheduler = engine.scheduler
    pin = tools.make_request("pin", [*PREFIX[:22], 45])  # five full pages
    assert scheduler.pin_prefix(pin) == scheduler.pin_prefix(pin) == 5
    engine.add(tools.make_request("first", PREFIX[:24], max_tokens=2))  # pinned before it was computed
    fill(tools, rng, engine)
    assert scheduler.num_pinned_pages == 5
    again = engine.add(tools.make_request("again", PREFIX[:24], max_tokens=2))
    fill(tools, rng, engine)
    assert again.num_cached_tokens == 20
    assert scheduler.unpin_prefix(pin) == 5 and scheduler.num_pinned_pages == 0
    fill(tools, rng, engine)
    last = engine.add(tools.make_request("last", PREFIX[:24], max_tokens=2))
    engine.run()
    assert last.num_cached_tokens == 0
    engine.check_outputs()


def test_what_is_cached_already_is_pinned_at_once_and_a_reset_keeps_the_pin_but_not_the_pages(tools, rng):
    engine = pin_engine(tools)
    engine.add(tools.make_request("first", PREFIX[:24], max_tokens=2))
    engine.run()
    pin = tools.make_request("pin", PREFIX[:24])
    engine.scheduler.pin_prefix(pin)
    assert engine.scheduler.num_pinned_pages == 6
    assert engine.scheduler.reset_prefix_cache() == 6 and engine.scheduler.num_pinned_pages == 0
    second = engine.add(tools.make_request("second", PREFIX[:24], max_tokens=2))
    fill(tools, rng, engine)
    third = engine.add(tools.make_request("third", PREFIX[:24], max_tokens=2))
    fill(tools, rng, engine, 1)
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 20)
    engine.scheduler.unpin_prefix(pin)
    engine.run()


def test_a_pinned_page_that_went_wrong_is_given_up(tools):
    engine = pin_engine(tools)
    pin = tools.make_request("pin", PREFIX[:20])
    engine.scheduler.pin_prefix(pin)
    engine.runner.poison_after[("first", 0)] = 3
    engine.add(tools.make_request("first", PREFIX[:20], max_tokens=8))
    while engine.step():
        pass
    assert engine.scheduler.num_pinned_pages == 0
    engine.add(tools.make_request("second", PREFIX[:24], max_tokens=2))
    while engine.step():
        pass
    assert engine.scheduler.num_pinned_pages == 5
    engine.scheduler.unpin_prefix(pin)
    engine.run()
    engine.check_outputs()


def test_pins_are_refused_by_name(tools):
    scheduler = pin_engine(tools).scheduler
    scheduler.pin_prefix(tools.make_request("pin", PREFIX[:20]))
    scheduler.pin_prefix(tools.make_request("pin", PREFIX))  # shares five of its eight pages
    for prompt, reason in (([49, *PREFIX], "max_pinned_pages is 8"), (PREFIX[:3], "a page to pin takes 4")):
        with pytest.raises(RequestError, match=reason) as raised:
            scheduler.pin_prefix(tools.make_request("pin", prompt))
        assert raised.value.field == "prompt"
    for prompt, tenant in ((PREFIX[:16], "default"), ([1] * 8, "default")):
        with pytest.raises(RequestError, match="is not pinned"):
            scheduler.unpin_prefix(tools.make_request("pin", prompt, tenant=tenant))
    off = tools.Engine(tools.make_config(enable_prefix_caching=False)).scheduler
    with pytest.raises(RequestError, match="enable_prefix_caching"):
        off.pin_prefix(tools.make_request("pin", PREFIX))


def test_no_request_may_count_on_pages_for_pinned_prefixes(tools):
    engine = pin_engine(tools, max_model_len=100)
    with pytest.raises(RequestError, match="8 of them for pinned prefixes"):
        engine.add(tools.make_request("r", [1] * 40, max_tokens=26, max_model_len=100))
    with pytest.raises(ConfigError, match="max_pinned_pages"):
        tools.make_config(num_pages=10, max_pinned_pages=9)
