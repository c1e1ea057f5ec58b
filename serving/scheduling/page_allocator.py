"""Who holds which page of the KV pool. Every page but the null page is in exactly one of four states:

free         nobody's; content is garbage
held         ref_count > 0 sequences have it in their page tables
quarantined  ref_count 0, but a dispatched step may still write it
evictable    ref_count 0, in the prefix cache: still found by a prefix hit, taken when nothing is free
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from serving.scheduling.eviction import EvictionOrder
from serving.scheduling.prefix_cache import PrefixCache
from serving.scheduling.schedule import NULL_PAGE


class PageAllocator:
    """Reference-counted pages [1, num_pages). Page ids are ints; steps are counted from 1 and complete in order."""

    def __init__(
        self, num_pages: int, prefix_cache: PrefixCache | None = None, eviction_order: EvictionOrder | None = None
    ):
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._prefix_cache = prefix_cache
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: low ids first
        if eviction_order is None:
            eviction_order = EvictionOrder(1 if prefix_cache is None else prefix_cache.page_size, num_pages)
        self._evictable = eviction_order
        self._quarantine: dict[int, int] = {}  # page id -> the last step that may write it
        self._completed_step = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that `try_allocate` could give now: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def num_pages_for(self, tenant: str) -> int:
        """Of these, pages that are not kept for other tenants' cached prefixes."""
        return len(self._free) + self._evictable.num_pages_for(tenant)

    @property
    def num_evictions(self) -> int:
        """Cached pages given up since start."""
        return sum(self._evictable.num_by_cause.values())

    @property
    def num_evictions_by_cause(self) -> dict[str, int]:
        return {str(cause): count for cause, count in self._evictable.num_by_cause.items()}

    @property
    def num_evictable_pages(self) -> int:
        return len(self._evictable)

    @property
    def num_quarantined_pages(self) -> int:
        return len(self._quarantine)

    @property
    def writable_quarantined_pages(self) -> list[int]:
        """Quarantined pages without the cached ones, which are full and so not written by any step in flight."""
        return [p for p in self._quarantine if self._prefix_cache is None or p not in self._prefix_cache]

    @property
    def num_held_pages(self) -> int:
        return self.num_pages - 1 - self.num_free_pages - self.num_quarantined_pages

    def occupancy(self, max_cells: int) -> list[tuple[float, float]]:
        """(share of pages in use, share cached and free to take) of at most `max_cells` equal runs of pages in order.

        For a picture: any thread may ask, and while a step is decided the counts may be a step apart.
        """
        ref_counts = list(self._ref_counts)
        cached = bytearray(self.num_pages)
        for page_id in list(self._evictable):
            cached[page_id] = 1
        num_pages = self.num_pages - 1
        num_cells = min(max_cells, num_pages)
        bounds = [1 + num_pages * cell // num_cells for cell in range(num_cells + 1)]
        return [
            (sum(count > 0 for count in ref_counts[a:b]) / (b - a), sum(cached[a:b]) / (b - a))
            for a, b in itertools.pairwise(bounds)
        ]

    def ref_count(self, page_id: int) -> int:
        return self._ref_counts[page_id]

    def is_evictable(self, page_id: int) -> bool:
        """Whether the page counts as free now and would not once shared."""
        return page_id in self._evictable

    def try_allocate(self, num_pages: int, tenant: str = "") -> list[int] | None:
        """Hand out `num_pages` pages with ref_count 1, evicting cached pages where too few are free. None: too few.

        Pages kept for other tenants than `tenant` go last.
        """
        if num_pages > self.num_free_pages:
            return None
        page_ids = [self._free.pop() for _ in range(min(num_pages, len(self._free)))]
        if len(page_ids) < num_pages:
            assert self._prefix_cache is not None
            evicted = self._evictable.take(tenant, num_pages - len(page_ids))
            for page_id in evicted:
                self._prefix_cache.remove(page_id)
            page_ids += evicted
        for page_id in page_ids:
            self._ref_counts[page_id] = 1
        return page_ids

    def share(self, page_id: int) -> None:
        """One more holder of a page that is held, or cached and unreferenced (quarantined or not: a published page
        is full, so steps in flight do not write it)."""
        if self._ref_counts[page_id] == 0:
            assert self._prefix_cache is not None and page_id in self._prefix_cache, page_id
            if page_id in self._evictable:
                self._evictable.remove(page_id)
            else:
                del self._quarantine[page_id]
        self._ref_counts[page_id] += 1
        if self._prefix_cache is not None and page_id in self._prefix_cache:
            self._prefix_cache.page(page_id).num_hits += 1

    def free(self, page_ids: Sequence[int], after_step: int) -> None:
        """One holder less of each page, given in the order of their sequence.

        Pages that nobody holds any more are quarantined until step `after_step`, the last dispatched one that may
        write them, has completed; 0 or a completed step frees them at once.
        """
        ref_counts, released = self._ref_counts, []
        for page_id in reversed(page_ids):  # so the tail of a chain is the first to be evicted
            assert page_id != NULL_PAGE and ref_counts[page_id] > 0, page_id
            ref_counts[page_id] -= 1
            if ref_counts[page_id] == 0:
                if after_step > self._completed_step:
                    self._quarantine[page_id] = after_step
                else:
                    released.append(page_id)
        self._release(released)

    def forget_cached_pages(self) -> int:
        """Empty the prefix cache; returns how many pages it had. Pages that nobody holds are free then."""
        if self._prefix_cache is None:
            return 0
        self._free += reversed(self._evictable.clear())
        return self._prefix_cache.clear()

    def step_completed(self, step_id: int) -> None:
        """No step up to `step_id` writes any more: release what waited for that."""
        assert step_id > self._completed_step, (step_id, self._completed_step)
        self._completed_step = step_id
        released = [page_id for page_id, step in self._quarantine.items() if step <= step_id]
        for page_id in released:
            del self._quarantine[page_id]
        self._release(released)

    def _release(self, page_ids: Sequence[int]) -> None:
        cache = self._prefix_cache
        if cache is None:
            self._free += page_ids
            return
        cached = []
        for page_id in page_ids:
            page = cache.find(page_id)
            if page is None:
                self._free.append(page_id)
            else:
                cached.append(page)
        self._evictable.add(cached)

    def check_integrity(self, page_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless `page_tables`, of all holders, and the four states account for every page."""
        holders = Counter(page_id for page_ids in page_tables for page_id in page_ids)
        assert NULL_PAGE not in holders and self._ref_counts[NULL_PAGE] == 0
        for page_id in range(1, self.num_pages):
            assert self._ref_counts[page_id] == holders[page_id], (page_id, self._ref_counts[page_id], holders[page_id])
        held = [page_id for page_id in range(1, self.num_pages) if self._ref_counts[page_id]]
        places = Counter([*held, *self._free, *self._evictable, *self._quarantine])
        assert sorted(places) == list(range(1, self.num_pages)) and max(places.values()) == 1, places
        assert all(step > self._completed_step for step in self._quarantine.values())
        self._evictable.check_integrity()
        for page_id in range(1, self.num_pages):
            is_cached = self._prefix_cache is not None and page_id in self._prefix_cache
            assert not (page_id in self._evictable and not is_cached), page_id
        assert not any(self._prefix_cache is not None and page_id in self._prefix_cache for page_id in self._free)
