"""Which cached page that nobody holds is given up next: the one whose loss costs least, of a tenant that may lose it.

A page's value is that of GreedyDual-Size-Frequency (Cherkasova 1998, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69R1, after Cao and Irani 1997), set when it was last used:

    value = clock + uses * cost / bytes

The page of least value goes and the clock rises to its value, so what is not used again grows old beside what is. The
cost is that of computing the page anew, which grows with its position; all pages have the same bytes. Two rules come
before value:

- Leaves first. A page is found only through its parent, so none goes while a page after it is kept here.
- Floors. A tenant's pages are not given up for another tenant while it has no more than its floor, as long as others
  have some to give; together, floors protect at most MAX_PROTECTED of the pool.

Every operation takes O(log n) amortised, but for a page taken in spite of a floor, which looks at every tenant.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from serving.scheduling.prefix_cache import CachedPage

MAX_PROTECTED = 0.5  # of the pool; the rest is for whoever runs
_SLACK = 64  # stale heap entries that are not worth a rebuild


class EvictionCause(StrEnum):
    """Whom a page was given up for."""

    OWN = "own"  # its own tenant
    OTHER = "other"  # another tenant; its own was above its floor
    FLOOR = "floor"  # another tenant, in spite of the floor: there was nothing else, or floors had too much


@dataclass(frozen=True, kw_only=True)
class RecomputeCost:
    """What computing tokens anew costs, in any one unit: a token by itself, and each pair of a query and a key that it
    sees. The default is the ratio of an 8B model (16e9 FLOPs a token, 4 * 32 layers * 4096 a pair).
    """

    token: float = 1.0
    pair: float = 3.3e-5

    def of_page(self, index: int, page_size: int) -> float:
        """Cost of the page number `index` of a sequence."""
        first = index * page_size
        return page_size * (self.token + self.pair * (first + (page_size + 1) / 2))


DENSE_8B = RecomputeCost()

_Item = tuple[float, int, int]  # value, order of addition, page id: the smallest goes first


@dataclass(eq=False, slots=True)
class _Entry:
    page: CachedPage
    item: _Item


@dataclass(eq=False, slots=True)
class _Tenant:
    pages: dict[int, _Entry] = field(default_factory=dict)
    leaves: list[_Item] = field(default_factory=list)  # a heap; stale items are dropped when they come up
    offered: _Item | None = None  # its item among those that anybody may take


class EvictionOrder:
    """The cached pages that nobody holds. Iterates over their ids.

    cost: of a page by its number in the sequence. floor_pages: what each tenant keeps. num_pages: of the pool.
    """

    def __init__(self, page_size: int, num_pages: int, cost: RecomputeCost | None = None, floor_pages: int = 0):
        self.page_size = page_size
        self.cost = cost or DENSE_8B
        self.floor_pages = floor_pages
        self.num_by_cause = dict.fromkeys(EvictionCause, 0)
        self._max_protected = int(MAX_PROTECTED * num_pages)
        self._clock = 0.0
        self._num_added = 0
        self._num_protected = 0  # pages within their tenant's floor
        self._owner_of: dict[int, str] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._offers: list[tuple[_Item, str]] = []  # a heap: the first leaf of each tenant above its floor

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._owner_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._owner_of)

    def num_pages_for(self, tenant: str) -> int:
        """Pages that `tenant` may take without going below another's floor."""
        owned = self._tenants.get(tenant)
        own_protected = min(len(owned.pages), self.floor_pages) if owned is not None else 0
        return len(self) - min(self._num_protected - own_protected, self._max_protected)

    def add(self, page: CachedPage) -> None:
        """Nobody holds this page any more."""
        assert page.page_id not in self._owner_of, page.page_id
        is_orphan = isinstance(page.parent, CachedPage) and not page.parent.is_live  # cannot be found any more
        uses = 0 if is_orphan else 1 + page.num_hits
        value = self._clock + uses * self.cost.of_page(page.index, self.page_size)
        self._num_added += 1
        entry = _Entry(page, (value, self._num_added, page.page_id))
        tenant = self._tenants.setdefault(page.owner, _Tenant())
        self._owner_of[page.page_id] = page.owner
        tenant.pages[page.page_id] = entry
        self._num_protected += len(tenant.pages) <= self.floor_pages
        if isinstance(page.parent, CachedPage):
            page.parent.num_idle_children += 1
        if page.num_idle_children == 0:
            heapq.heappush(tenant.leaves, entry.item)
        self._offer(page.owner)

    def remove(self, page_id: int) -> None:
        """The page is held again."""
        owner = self._owner_of.pop(page_id)
        tenant = self._tenants[owner]
        self._num_protected -= len(tenant.pages) <= self.floor_pages
        page = tenant.pages.pop(page_id).page
        parent = page.parent
        if isinstance(parent, CachedPage):
            parent.num_idle_children -= 1
            if parent.num_idle_children == 0 and self._owner_of.get(parent.page_id) is not None:
                self._push_leaf(parent)
        if not tenant.pages:
            del self._tenants[owner]
        else:
            self._offer(owner)

    def take(self, tenant: str) -> int:
        """Give up a page for `tenant`; returns its id. There must be one."""
        own = self._first_leaf(self._tenants[tenant]) if tenant in self._tenants else None
        item = self._first_offer()
        if item is None or (own is not None and own < item):
            item = own
        cause = EvictionCause.OWN if item is not None and item is own else EvictionCause.OTHER
        if item is None:
            item = min(leaf for leaf in map(self._first_leaf, self._tenants.values()) if leaf is not None)
            cause = EvictionCause.FLOOR
        value, _, page_id = item
        if cause is EvictionCause.OTHER and self._owner_of[page_id] == tenant:
            cause = EvictionCause.OWN
        self.num_by_cause[cause] += 1
        self._clock = max(self._clock, value)
        self.remove(page_id)
        return page_id

    def clear(self) -> list[int]:
        """Forget all pages; returns their ids."""
        page_ids = list(self._owner_of)
        for page_id in page_ids:
            self.remove(page_id)
        return page_ids

    def _push_leaf(self, page: CachedPage) -> None:
        owner = self._owner_of[page.page_id]
        tenant = self._tenants[owner]
        entry = tenant.pages[page.page_id]
        if entry.page is page:
            heapq.heappush(tenant.leaves, entry.item)
            self._offer(owner)

    def _first_leaf(self, tenant: _Tenant) -> _Item | None:
        if len(tenant.leaves) > 2 * len(tenant.pages) + _SLACK:
            tenant.leaves = [e.item for e in tenant.pages.values() if e.page.num_idle_children == 0]
            heapq.heapify(tenant.leaves)
        while tenant.leaves:
            item = tenant.leaves[0]
            entry = tenant.pages.get(item[2])
            if entry is not None and entry.item is item and entry.page.num_idle_children == 0:
                return item
            heapq.heappop(tenant.leaves)
        return None

    def _is_above_floor(self, tenant: _Tenant) -> bool:
        return len(tenant.pages) > self.floor_pages

    def _offer(self, owner: str) -> None:
        """Let anybody find the tenant's first leaf, if it is above its floor."""
        tenant = self._tenants[owner]
        item = self._first_leaf(tenant) if self._is_above_floor(tenant) else None
        if item is not None and item is not tenant.offered:
            heapq.heappush(self._offers, (item, owner))
            tenant.offered = item

    def _first_offer(self) -> _Item | None:
        if len(self._offers) > 2 * len(self._tenants) + _SLACK:
            self._offers = [(t.offered, name) for name, t in self._tenants.items() if t.offered is not None]
            heapq.heapify(self._offers)
        while self._offers:
            item, owner = self._offers[0]
            tenant = self._tenants.get(owner)
            if tenant is not None and tenant.offered is item:
                if self._is_above_floor(tenant) and self._first_leaf(tenant) is item:
                    return item
                tenant.offered = None
                heapq.heappop(self._offers)
                self._offer(owner)
            else:
                heapq.heappop(self._offers)
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError where counts, tenants and leaves disagree."""
        by_tenant = {name: set(tenant.pages) for name, tenant in self._tenants.items()}
        assert all(by_tenant.values())
        assert {page_id: name for name, pages in by_tenant.items() for page_id in pages} == self._owner_of
        assert self._num_protected == sum(min(len(pages), self.floor_pages) for pages in by_tenant.values())
        pages = {page_id: entry.page for tenant in self._tenants.values() for page_id, entry in tenant.pages.items()}
        num_children = dict.fromkeys(pages, 0)
        for page in pages.values():
            parent = page.parent
            if isinstance(parent, CachedPage) and pages.get(parent.page_id) is parent:
                num_children[parent.page_id] += 1
        assert num_children == {page_id: page.num_idle_children for page_id, page in pages.items()}
        for name, tenant in self._tenants.items():
            leaves = {e.item for e in tenant.pages.values() if e.page.num_idle_children == 0}
            assert leaves <= set(tenant.leaves), name
            if leaves and self._is_above_floor(tenant):
                # An offer may be stale, of a page that got a child or is held again, but never above the first leaf.
                assert tenant.offered is not None and tenant.offered <= min(leaves), name
                assert (tenant.offered, name) in self._offers, name
