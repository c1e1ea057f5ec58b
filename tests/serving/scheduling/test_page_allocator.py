from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.scheduling.page_allocator import PageAllocator
from serving.scheduling.prefix_cache import PrefixCache


def publish(cache: PrefixCache, page_ids: list[int], first_token: int) -> None:
    """Publish pages of one token each: tokens first_token, first_token + 1, ..."""
    chain = cache.new_chain(b"")
    cache.extend(chain, range(first_token, first_token + len(page_ids)))
    cache.publish(chain, page_ids, len(page_ids))


def test_every_page_but_the_null_page_can_be_allocated_once():
    allocator = PageAllocator(8)
    assert sorted(allocator.try_allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free_pages == 0
    assert allocator.try_allocate(1) is None


def test_a_request_for_too_many_pages_takes_none():
    allocator = PageAllocator(4)
    assert allocator.try_allocate(4) is None
    assert allocator.num_free_pages == 3


def test_a_shared_page_is_free_only_when_its_last_holder_gave_it_back():
    allocator = PageAllocator(3)
    page_ids = allocator.try_allocate(1)
    allocator.share(page_ids[0])
    allocator.free(page_ids, after_step=0)
    assert allocator.num_free_pages == 1 and allocator.ref_count(page_ids[0]) == 1
    allocator.free(page_ids, after_step=0)
    assert allocator.num_free_pages == 2
    with pytest.raises(AssertionError):
        allocator.free(page_ids, after_step=0)


def test_pages_are_quarantined_until_the_last_step_that_may_write_them_has_completed():
    allocator = PageAllocator(5)
    first, second = allocator.try_allocate(2), allocator.try_allocate(2)
    allocator.free(first, after_step=1)
    allocator.free(second, after_step=2)
    assert (allocator.num_free_pages, allocator.num_quarantined_pages) == (0, 4)
    assert allocator.try_allocate(1) is None
    allocator.step_completed(1)
    assert (allocator.num_free_pages, allocator.num_quarantined_pages) == (2, 2)
    assert sorted(allocator.try_allocate(2)) == sorted(first)
    allocator.step_completed(2)
    assert (allocator.num_free_pages, allocator.num_quarantined_pages) == (2, 0)


def test_pages_freed_after_a_completed_step_are_free_at_once():
    allocator = PageAllocator(3)
    page_ids = allocator.try_allocate(2)
    allocator.step_completed(4)
    allocator.free(page_ids, after_step=4)
    assert allocator.num_free_pages == 2


def test_cached_pages_are_evicted_least_recently_used_first_and_the_tail_of_a_chain_before_its_head():
    cache = PrefixCache(page_size=1)
    allocator = PageAllocator(7, cache)
    older, newer = allocator.try_allocate(3), allocator.try_allocate(3)
    publish(cache, older, first_token=100)
    publish(cache, newer, first_token=200)
    allocator.free(older, after_step=0)
    allocator.free(newer, after_step=0)
    assert allocator.num_free_pages == 6
    evicted = [allocator.try_allocate(1)[0] for _ in range(6)]
    assert evicted == [*reversed(older), *reversed(newer)]
    assert len(cache) == 0 and allocator.num_evictions == 6


def test_free_pages_are_taken_before_cached_ones():
    cache = PrefixCache(page_size=1)
    allocator = PageAllocator(5, cache)
    cached = allocator.try_allocate(2)
    publish(cache, cached, first_token=0)
    allocator.free(cached, after_step=0)
    assert not set(allocator.try_allocate(2)) & set(cached)
    assert len(cache) == 2


def test_a_cached_page_can_be_shared_again_while_evictable_and_while_quarantined():
    cache = PrefixCache(page_size=1)
    allocator = PageAllocator(3, cache)
    page_ids = allocator.try_allocate(2)
    publish(cache, page_ids, first_token=0)
    allocator.free(page_ids[:1], after_step=0)
    allocator.free(page_ids[1:], after_step=1)
    assert allocator.writable_quarantined_pages == []
    for page_id in page_ids:
        allocator.share(page_id)
    assert allocator.num_free_pages == allocator.num_quarantined_pages == 0
    allocator.check_integrity([page_ids])
    allocator.step_completed(1)
    allocator.check_integrity([page_ids])


def test_forgotten_pages_are_free_once_nobody_holds_or_writes_them_and_are_found_no_more():
    cache = PrefixCache(page_size=1)
    allocator = PageAllocator(7, cache)
    held, quarantined, evictable = (allocator.try_allocate(2) for _ in range(3))
    for page_ids, first_token in ((held, 10), (quarantined, 20), (evictable, 30)):
        publish(cache, page_ids, first_token)
    allocator.free(quarantined, after_step=1)
    allocator.free(evictable, after_step=0)
    assert allocator.forget_cached_pages() == 6 and len(cache) == 0
    allocator.check_integrity([held])
    assert sorted(allocator.try_allocate(2)) == sorted(evictable) and allocator.num_evictions == 0
    allocator.step_completed(1)
    assert sorted(allocator.try_allocate(2)) == sorted(quarantined)
    assert allocator.forget_cached_pages() == 0 == PageAllocator(3).forget_cached_pages()


def test_a_page_that_nobody_holds_and_nobody_cached_cannot_be_shared():
    allocator = PageAllocator(3, PrefixCache(page_size=1))
    page_ids = allocator.try_allocate(1)
    allocator.free(page_ids, after_step=0)
    with pytest.raises(AssertionError):
        allocator.share(page_ids[0])


def test_check_integrity_sees_a_page_table_that_the_allocator_does_not_know_of():
    allocator = PageAllocator(4)
    page_ids = allocator.try_allocate(2)
    allocator.check_integrity([page_ids])
    for wrong in ([], [page_ids, page_ids], [[*page_ids, 3]], [[0, *page_ids]]):
        with pytest.raises(AssertionError):
            allocator.check_integrity(wrong)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "free", "share", "publish", "step"]), st.integers(0, 50)), max_size=120
)


@given(num_pages=st.integers(2, 12), operations=OPERATIONS)
def test_any_order_of_operations_keeps_every_page_accounted_for(num_pages, operations):
    cache = PrefixCache(page_size=1)
    allocator = PageAllocator(num_pages, cache)
    holders: list[list[int]] = []
    step = next_token = 0
    for name, number in operations:
        if name == "allocate":
            available = allocator.num_free_pages
            page_ids = allocator.try_allocate(number % 5)
            assert (page_ids is None) == (number % 5 > available)
            if page_ids:
                holders.append(page_ids)
        elif name == "step":
            step += 1
            allocator.step_completed(step)
        elif holders:
            page_ids = holders[number % len(holders)]
            if name == "free":
                holders.remove(page_ids)
                allocator.free(page_ids, after_step=step + number % 3)
            elif name == "share":
                for page_id in page_ids:
                    allocator.share(page_id)
                holders.append(list(page_ids))
            elif not any(page_id in cache for page_id in page_ids):
                publish(cache, page_ids, next_token)
                next_token += 100
        allocator.check_integrity(holders)
        cache.check_integrity()
    for page_ids in holders:
        allocator.free(page_ids, after_step=0)
    allocator.step_completed(step + 3)
    assert allocator.num_free_pages == num_pages - 1
