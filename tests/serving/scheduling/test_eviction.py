from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from serving.scheduling.eviction import EvictionCause, EvictionOrder, RecomputeCost
from serving.scheduling.page_allocator import PageAllocator
from serving.scheduling.prefix_cache import CachedPage, PrefixCache

ROOT = Path(__file__).parents[3]
# Of Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release, Apache-2.0): 60 conversations of three or more
# requests and 90 of one, drawn at random, without requests of more than 40 blocks.
TRACE = ROOT / "tests" / "data" / "traces" / "mooncake_conversation_excerpt.jsonl"
BY_POSITION = RecomputeCost(token=1.0, pair=0.1)


class Pool:
    """An allocator whose sequences are published and given back at once, pages of one token."""

    def __init__(self, num_pages: int, **settings):
        self.cache = PrefixCache(page_size=1)
        self.order = EvictionOrder(1, num_pages, **settings)
        self.allocator = PageAllocator(num_pages + 1, self.cache, self.order)

    def run(self, tokens, tenant="a") -> int:
        """Returns how many pages were found."""
        chain = self.cache.new_chain(b"", tenant)
        self.cache.extend(chain, tokens)
        match = self.cache.match_prefix(chain, len(tokens))
        for page in match:
            self.allocator.share(page.page_id)
        new = self.allocator.try_allocate(len(tokens) - len(match), tenant)
        page_ids = [page.page_id for page in match] + new
        chain.restart(match)
        self.cache.publish(chain, page_ids, len(tokens))
        self.allocator.check_integrity([page_ids])
        self.allocator.free(page_ids, after_step=0)
        self.allocator.check_integrity([])
        return len(match)

    def found(self, tokens) -> int:
        chain = self.cache.new_chain(b"")
        self.cache.extend(chain, tokens)
        return len(self.cache.match_prefix(chain, len(tokens)))


def test_of_pages_as_old_the_one_that_is_dearest_to_compute_stays():
    pool = Pool(12, cost=BY_POSITION)
    long, short = list(range(100, 108)), list(range(200, 204))
    pool.run(long)
    pool.run(short)
    pool.run(range(300, 302))
    assert pool.found(short) == 2 and pool.found(long) == 8


def test_what_is_used_again_outlives_what_is_not_and_what_is_not_used_any_more_ages():
    pool = Pool(8)
    for _ in range(3):
        pool.run([1, 2])
    for index in range(6):
        pool.run([100 * index + 10, 100 * index + 11])
    assert pool.found([1, 2]) == 2
    for index in range(100):
        pool.run([1000 * index + 10, 1000 * index + 11])
    assert pool.found([1, 2]) == 0


def test_no_page_goes_before_the_pages_after_it(rng):
    pool = Pool(30, cost=RecomputeCost(token=1.0, pair=-0.01))  # by value alone the head of a chain would go first
    for _ in range(300):
        pool.run([rng.randrange(3) for _ in range(rng.randint(1, 9))], rng.choice("abc"))
        pages = [pool.cache.page(page_id) for page_id in pool.order]
        assert all(page.parent.is_live for page in pages if isinstance(page.parent, CachedPage))
    assert pool.allocator.num_evictions > 100


def test_a_tenant_within_its_floor_loses_nothing_to_others_and_may_give_up_its_own():
    pool = Pool(20, floor_pages=4)
    pool.run(range(10, 14), "small")
    for index in range(20):
        pool.run(range(100 * index + 100, 100 * index + 106), "large")
    assert pool.found(range(10, 14)) == 4
    assert pool.order.num_pages_for("small") == 16 and pool.order.num_pages_for("large") == 16
    pool.run(range(20, 24), "small")  # in place of its own, which are the oldest
    assert pool.found(range(10, 14)) == 0 and pool.order.num_by_cause[EvictionCause.OTHER] == 0
    pool.run(range(30, 33), "third")
    assert pool.found(range(20, 24)) == 4
    assert pool.order.num_by_cause[EvictionCause.OTHER] == 3 and pool.order.num_by_cause[EvictionCause.FLOOR] == 0


def test_floors_keep_at_most_half_of_the_pool_and_give_way_where_there_is_nothing_else():
    pool = Pool(20, floor_pages=10)
    pool.run(range(10, 20), "a")
    pool.run(range(20, 30), "b")
    assert [pool.order.num_pages_for(name) for name in ("a", "b", "c")] == [10, 10, 10]
    pool.run(range(100, 115), "c")
    assert pool.order.num_by_cause == {EvictionCause.OWN: 0, EvictionCause.OTHER: 0, EvictionCause.FLOOR: 15}


def test_random_use_by_many_tenants_takes_the_least_value_that_the_rules_let_go(rng):
    pool = Pool(40, floor_pages=6, cost=BY_POSITION)
    take = pool.order.take

    def checked_take(tenant: str, num_pages: int) -> list[int]:
        left = dict(pool.order._pages)
        items = {page_id: page.eviction_item for page_id, page in left.items()}
        parents = {page_id: page.parent for page_id, page in left.items()}
        expected = []
        for _ in range(num_pages):
            sizes = Counter(page.owner for page in left.values())
            held_up = {id(parents[page_id]) for page_id in left}
            leaves = [page for page in left.values() if id(page) not in held_up]
            allowed = [page for page in leaves if page.owner == tenant or sizes[page.owner] > 6] or leaves
            expected.append(min(allowed, key=lambda page: items[page.page_id]).page_id)
            del left[expected[-1]]
        assert take(tenant, num_pages) == expected
        return expected

    pool.order.take = checked_take
    for _ in range(600):
        pool.run([rng.randrange(4) for _ in range(rng.randint(1, 12))], rng.choice("aaabcdefgh"))
    assert sum(pool.order.num_by_cause.values()) > 300


@pytest.fixture(scope="module")
def trace():
    spec = importlib.util.spec_from_file_location("prefix_cache_trace", ROOT / "benchmarks" / "prefix_cache_trace.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_an_endless_pool_finds_what_a_recorded_trace_repeats(trace):
    requests = trace.read_trace(TRACE)
    counts = trace.replay(requests, page_size=512, num_pages=None)
    assert counts.num_evictions == 0
    assert abs(counts.block_rate - trace.repeated_block_share(requests)) < 0.01


def test_the_policy_finds_no_fewer_tokens_than_least_recently_used(trace):
    """Tasks that all begin with one of ten instructions, some more often than others: the usual mix of an API."""
    random_source = random.Random(5)
    popularity = [1 / rank for rank in range(1, 11)]
    requests = []
    for number in range(1500):
        (task,) = random_source.choices(range(10), popularity)
        instructions = range(100 * task, 100 * task + 4 + task)
        own = range(2000 + 20 * number, 2000 + 20 * number + random_source.randint(1, 8))
        requests.append(
            trace.TraceRequest(num_tokens=512 * (len(instructions) + len(own)), hash_ids=(*instructions, *own))
        )
    policy, lru = (trace.replay(requests, page_size=512, num_pages=60, cost=cost) for cost in (None, trace.LRU))
    print(f"hit rates {policy.token_rate:.3f} and {lru.token_rate:.3f}")
    assert policy.num_hit_tokens >= lru.num_hit_tokens and policy.recompute_cost <= lru.recompute_cost


def test_on_recorded_conversations_the_policy_stays_near_least_recently_used(trace):
    requests = trace.read_trace(TRACE)
    policy, lru = (
        trace.replay(requests, page_size=512, num_pages=600, cost=cost, concurrency=4) for cost in (None, trace.LRU)
    )
    print(f"hit rates {policy.token_rate:.3f} and {lru.token_rate:.3f}")
    assert policy.num_evictions > 0 and policy.token_rate > lru.token_rate - 0.02
