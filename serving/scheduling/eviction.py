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

Every page takes O(log n) amortised, but for one taken in spite of a floor, which looks at every tenant. As a rule a
parent is worth less than the page after it, so a sequence's pages go one after the other without a search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from serving.scheduling.prefix_cache import CachedPage, EvictionItem

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


@dataclass(eq=False, slots=True)
class _Tenant:
    num_pages: int = 0
    leaves: list[EvictionItem] = field(default_factory=list)  # a heap; stale items are dropped when they come up
    offered: EvictionItem | None = None  # its item among those that anybody may take


def _item(page: CachedPage) -> EvictionItem:
    assert page.eviction_item is not None, page.page_id
    return page.eviction_item


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
        self._pages: dict[int, CachedPage] = {}
        self._costs: list[float] = []  # of a page by its number, as far as asked for
        self._tenants: dict[str, _Tenant] = {}
        self._offers: list[tuple[EvictionItem, str]] = []  # a heap: the first leaf of each tenant above its floor

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._pages

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    def num_pages_for(self, tenant: str) -> int:
        """Pages that `tenant` may take without going below another's floor."""
        owned = self._tenants.get(tenant)
        own_protected = min(owned.num_pages, self.floor_pages) if owned is not None else 0
        return len(self) - min(self._num_protected - own_protected, self._max_protected)

    def add(self, pages: Iterable[CachedPage]) -> None:
        """Nobody holds these pages any more; of a sequence, the last comes first."""
        costs, owners = self._costs, set()
        for page in pages:
            parent, uses = page.parent, 1 + page.num_hits
            if isinstance(parent, CachedPage):
                parent.num_idle_children += 1
                if not parent.is_live:
                    uses = 0  # it cannot be found any more
            while page.index >= len(costs):
                costs.append(self.cost.of_page(len(costs), self.page_size))
            self._num_added += 1
            page.eviction_item = (self._clock + uses * costs[page.index], self._num_added, page.page_id)
            self._pages[page.page_id] = page
            tenant = self._tenants.get(page.owner)
            if tenant is None:
                tenant = self._tenants[page.owner] = _Tenant()
            tenant.num_pages += 1
            self._num_protected += tenant.num_pages <= self.floor_pages
            if page.num_idle_children == 0:
                heapq.heappush(tenant.leaves, page.eviction_item)
            owners.add(page.owner)
        for owner in owners:
            self._offer(owner)

    def remove(self, page_id: int) -> None:
        """The page is held again."""
        page = self._pages[page_id]
        leaf = self._drop(page)
        if leaf is not None:
            self._push_leaf(leaf)
        self._offer(page.owner)

    def take(self, tenant: str, num_pages: int) -> list[int]:
        """Give up pages for `tenant`; returns their ids. There must be so many."""
        page_ids: list[int] = []
        while len(page_ids) < num_pages:
            item, cause = self._first(tenant)
            self._clock = max(self._clock, item[0])
            page = self._pages[item[2]]
            owner, leaf = page.owner, None
            leaves = self._tenants[owner].leaves  # of which `item` is the first
            num_before = len(page_ids)
            max_run = num_pages - num_before
            if cause is not EvictionCause.OWN:
                max_run = min(max_run, max(self._tenants[owner].num_pages - self.floor_pages, 1))
            for _ in range(max_run):
                page_ids.append(page.page_id)
                leaf = self._drop(page)
                if leaf is None or leaf.owner != owner or _item(leaf) > item:
                    break
                page = leaf  # worth less than what was the least of all, so now the least itself
            self.num_by_cause[cause] += len(page_ids) - num_before
            if leaf is not None and leaf.owner == owner:
                heapq.heapreplace(leaves, _item(leaf))
            else:
                heapq.heappop(leaves)
                if leaf is not None:
                    self._push_leaf(leaf)
            self._offer(owner)
        return page_ids

    def clear(self) -> list[int]:
        """Forget all pages; returns their ids."""
        page_ids = list(self._pages)
        for page_id in page_ids:
            self.remove(page_id)
        return page_ids

    def _drop(self, page: CachedPage) -> CachedPage | None:
        """Forget a page; returns its parent where that is a leaf now."""
        del self._pages[page.page_id]
        page.eviction_item = None
        tenant = self._tenants[page.owner]
        self._num_protected -= tenant.num_pages <= self.floor_pages
        tenant.num_pages -= 1
        if tenant.num_pages == 0:
            del self._tenants[page.owner]
        parent = page.parent
        if isinstance(parent, CachedPage):
            parent.num_idle_children -= 1
            if parent.num_idle_children == 0 and parent.eviction_item is not None:
                return parent
        return None

    def _push_leaf(self, page: CachedPage) -> None:
        heapq.heappush(self._tenants[page.owner].leaves, _item(page))
        self._offer(page.owner)

    def _first(self, tenant: str) -> tuple[EvictionItem, EvictionCause]:
        """The page to give up next for `tenant`, and why that one."""
        own = self._first_leaf(self._tenants[tenant]) if tenant in self._tenants else None
        item = self._first_offer()
        if item is None or (own is not None and own < item):
            item = own
        if item is None:
            leaves = map(self._first_leaf, self._tenants.values())
            return min(leaf for leaf in leaves if leaf is not None), EvictionCause.FLOOR
        is_own = self._pages[item[2]].owner == tenant
        return item, EvictionCause.OWN if is_own else EvictionCause.OTHER

    def _is_leaf(self, item: EvictionItem) -> bool:
        """Whether the item is that of a page that is here still, or again, and may go."""
        page = self._pages.get(item[2])
        return page is not None and page.eviction_item is item and page.num_idle_children == 0

    def _first_leaf(self, tenant: _Tenant) -> EvictionItem | None:
        leaves = tenant.leaves
        if len(leaves) > 2 * tenant.num_pages + _SLACK:
            leaves[:] = filter(self._is_leaf, dict.fromkeys(leaves))
            heapq.heapify(leaves)
        while leaves and not self._is_leaf(leaves[0]):
            heapq.heappop(leaves)
        return leaves[0] if leaves else None

    def _is_above_floor(self, owner: str) -> bool:
        tenant = self._tenants.get(owner)
        return tenant is not None and tenant.num_pages > self.floor_pages

    def _offer(self, owner: str) -> None:
        """Let anybody find the tenant's first leaf, if it is above its floor."""
        if not self._is_above_floor(owner):
            return
        tenant = self._tenants[owner]
        item = self._first_leaf(tenant)
        if item is not None and item is not tenant.offered:
            if self._offers and self._offers[0][1] == owner:  # this one takes its place
                heapq.heapreplace(self._offers, (item, owner))
            else:
                heapq.heappush(self._offers, (item, owner))
            tenant.offered = item

    def _first_offer(self) -> EvictionItem | None:
        if len(self._offers) > 2 * len(self._tenants) + _SLACK:
            self._offers = [(t.offered, name) for name, t in self._tenants.items() if t.offered is not None]
            heapq.heapify(self._offers)
        while self._offers:
            item, owner = self._offers[0]
            tenant = self._tenants.get(owner)
            if tenant is not None and tenant.offered is item:
                if self._is_above_floor(owner) and self._first_leaf(tenant) is item:
                    return item
                tenant.offered = None
                heapq.heappop(self._offers)
                self._offer(owner)
            else:
                heapq.heappop(self._offers)
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError where counts, tenants and leaves disagree."""
        by_tenant: dict[str, list[CachedPage]] = {}
        num_children = dict.fromkeys(self._pages, 0)
        for page_id, page in self._pages.items():
            assert page.page_id == page_id and page.eviction_item is not None and page.eviction_item[2] == page_id
            by_tenant.setdefault(page.owner, []).append(page)
            parent = page.parent
            if isinstance(parent, CachedPage) and self._pages.get(parent.page_id) is parent:
                num_children[parent.page_id] += 1
        assert {name: len(pages) for name, pages in by_tenant.items()} == {
            name: tenant.num_pages for name, tenant in self._tenants.items()
        }
        assert self._num_protected == sum(min(len(pages), self.floor_pages) for pages in by_tenant.values())
        assert num_children == {page_id: page.num_idle_children for page_id, page in self._pages.items()}
        for name, tenant in self._tenants.items():
            leaves = {p.eviction_item for p in by_tenant[name] if p.eviction_item and p.num_idle_children == 0}
            assert leaves <= set(tenant.leaves), name
            if leaves and self._is_above_floor(name):
                # An offer may be stale, of a page that got a child or is held again, but never above the first leaf.
                assert tenant.offered is not None and tenant.offered <= min(leaves), name
                assert (tenant.offered, name) in self._offers, name
