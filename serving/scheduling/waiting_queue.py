"""Who is next: requests that wait, by class, then fairly between tenants, then by priority and arrival.

Within a class each tenant has a virtual time, the tokens that it was served over its weight, and the tenant with the
least is next: start-time fair queueing (Goyal, Vin and Cheng 1996, "Start-time Fair Queueing") with the cost of a
request charged as it becomes known, prompt tokens at admission and output tokens as they are generated (Sheng et al.
2024, "Fairness in Serving Large Language Models"). A tenant that comes back is lifted to the class's virtual time, so
that it cannot save up.

Only heads are compared: picking costs one look at each tenant that waits in the best class, however many requests wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.scheduling import SchedulingConfig

MIN_STALE = 64  # entries of a heap that are left in it after they have gone, before it is made anew

Order = tuple[int, int]
_Key = tuple[bool, int, Order, int]  # was not placed before, priority, order of arrival, number of the push
_FIRST_PRIORITY = -(2**63)  # before every one that a request can have


@dataclass(eq=False, slots=True, kw_only=True)
class Entry[Item]:
    """A request as the queue knows it, from its arrival to its end, waiting or not."""

    item: Item
    tenant: str
    base_class: int  # that of its priority
    class_index: int  # what it counts as: waiting makes it better
    priority: int  # within class and tenant
    order: Order  # of arrival
    deadline_s: float | None = None  # still not placed then: expired; may be taken off
    was_placed: bool = False  # goes before all of its class and tenant that were not
    num_tokens: int = 0  # to compute at most, when it began to wait
    is_long: bool = False
    key: _Key | None = None  # None: not waiting


def _is_current(node: tuple[Any, ...]) -> bool:
    """Whether the entry at a node's end still waits under the key before it."""
    return node[-1].key is node[-2]


def _compact(heap: list[Any], num_current: int) -> None:
    """Drop what has gone once it is most of the heap, so that requests that end unplaced leave nothing behind."""
    if len(heap) > 2 * num_current + MIN_STALE:
        heap[:] = [node for node in heap if _is_current(node)]
        heapq.heapify(heap)


@dataclass(slots=True)
class _Tenant[Item]:
    """What one tenant has waiting in one class: heaps of short and of long requests, stale entries among them."""

    service: float  # virtual time: tokens over weight
    num_waiting: int = 0
    heaps: tuple[list[tuple[_Key, Entry[Item]]], list[tuple[_Key, Entry[Item]]]] = field(
        default_factory=lambda: ([], [])
    )

    def head(self, may_be_long: bool) -> Entry[Item] | None:
        best: tuple[_Key, Entry[Item]] | None = None
        for heap in self.heaps[: 1 + may_be_long]:
            while heap and not _is_current(heap[0]):
                heapq.heappop(heap)
            if heap and (best is None or heap[0][0] < best[0]):
                best = heap[0]
        return None if best is None else best[1]


class _ClassQueue[Item]:
    """The tenants of one class, and its virtual time: the start tag of the request placed last."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.tenants: dict[str, _Tenant[Item]] = {}
        self.waiting: dict[str, _Tenant[Item]] = {}  # those with something waiting
        self._num_kept = 64

    def push(self, entry: Entry[Item]) -> None:
        assert entry.key is not None
        tenant = self.tenant(entry.tenant)
        if tenant.num_waiting == 0:
            tenant.service = max(tenant.service, self.virtual_time)
            self.waiting[entry.tenant] = tenant
        tenant.num_waiting += 1
        heapq.heappush(tenant.heaps[entry.is_long], (entry.key, entry))

    def remove(self, entry: Entry[Item]) -> None:
        """The entry's key says that it is stale."""
        tenant = self.waiting[entry.tenant]
        tenant.num_waiting -= 1
        if tenant.num_waiting == 0:
            del self.waiting[entry.tenant]
        for heap in tenant.heaps:
            _compact(heap, tenant.num_waiting)

    def tenant(self, name: str) -> _Tenant[Item]:
        tenant = self.tenants.get(name)
        if tenant is None:
            if len(self.tenants) >= 2 * self._num_kept:
                self._forget()
            tenant = self.tenants[name] = _Tenant(self.virtual_time)
        return tenant

    def _forget(self) -> None:
        """Those who would be lifted to the virtual time anyway: names are clients' to make up."""
        for name in [n for n, t in self.tenants.items() if not t.num_waiting and t.service <= self.virtual_time]:
            del self.tenants[name]
        self._num_kept = max(64, len(self.tenants))


@dataclass(slots=True)
class WaitingLoad:
    """What waits, placed before or not, by the class of its own priority."""

    num_requests: list[int]
    num_tokens: list[int]  # to compute at most
    num_pairs: list[int]  # of their queries and keys


class WaitingQueue[Item]:
    """Entries that wait, in the order in which they are to be placed. Times are of one clock, in seconds."""

    def __init__(self, config: SchedulingConfig):
        self._config = config
        num_classes = len(config.class_names)
        self.load = WaitingLoad([0] * num_classes, [0] * num_classes, [0] * num_classes)
        self._classes: list[_ClassQueue[Item]] = [_ClassQueue() for _ in config.class_names]
        self._entries: dict[Order, Entry[Item]] = {}  # by order of arrival
        self._parked: dict[Order, Entry[Item]] = {}  # by order of arrival
        self._ageing: list[tuple[float, int, _Key, Entry[Item]]] = []  # heap: when, tie, key it had then
        self._deadlines: list[tuple[float, int, _Key, Entry[Item]]] = []  # heap, of those never placed
        self._numbers = itertools.count()
        self._weights: dict[str, float] = {}  # of tenants named in the config
        for name in config.tenant_names:
            self._weights[name] = config.weight(name)

    def __len__(self) -> int:
        return len(self._entries) + len(self._parked)

    def __iter__(self) -> Iterator[Entry[Item]]:
        return iter([*list(self._entries.values()), *self.parked])  # copies: other threads may ask

    def __contains__(self, entry: Entry[Item]) -> bool:
        return entry.key is not None or entry.order in self._parked

    @property
    def parked(self) -> list[Entry[Item]]:
        return list(self._parked.values())

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def virtual_time(self, class_index: int) -> float:
        """Of a class: rises, in tokens over weight."""
        return self._classes[class_index].virtual_time

    def entry(self, item: Item, *, tenant: str, priority: int, order: Order, deadline_s: float | None) -> Entry[Item]:
        """An entry that does not wait yet."""
        class_index = self._config.class_of(priority)
        return Entry(
            item=item,
            tenant=tenant,
            base_class=class_index,
            class_index=class_index,
            priority=priority,
            order=order,
            deadline_s=deadline_s,
        )

    def push(self, entry: Entry[Item], *, num_tokens: int, now_s: float) -> None:
        """`num_tokens`: to compute at most. One that was placed before goes before all of its class and tenant."""
        assert entry.key is None
        entry.num_tokens = num_tokens
        long_tokens = self._config.long_prefill_tokens
        entry.is_long = 0 < long_tokens < num_tokens
        self._entries[entry.order] = entry
        self._insert(entry, now_s)
        self._count(entry, 1)

    def _count(self, entry: Entry[Item], sign: int) -> None:
        index, num_tokens, load = entry.base_class, entry.num_tokens, self.load
        load.num_requests[index] += sign
        load.num_tokens[index] += sign * num_tokens
        load.num_pairs[index] += sign * (num_tokens * (num_tokens + 1) // 2)

    def remove(self, entry: Entry[Item]) -> None:
        """It is placed, or has ended."""
        self._count(entry, -1)
        if self._parked.pop(entry.order, None) is None:
            self._take_off(entry)

    def _take_off(self, entry: Entry[Item]) -> None:
        assert entry.key is not None
        entry.key = None
        del self._entries[entry.order]
        self._classes[entry.class_index].remove(entry)
        for heap in (self._ageing, self._deadlines):
            _compact(heap, len(self._entries))

    def park(self, entry: Entry[Item]) -> None:
        """Let an entry wait without being placed, ageing or expiring, until `unpark`: for a moment."""
        self._take_off(entry)
        self._parked[entry.order] = entry

    def unpark(self, entry: Entry[Item], now_s: float) -> None:
        del self._parked[entry.order]
        self._entries[entry.order] = entry
        self._insert(entry, now_s)

    def placed(self, entry: Entry[Item], num_tokens: int) -> None:
        """Remove an entry that runs now and charge its tenant for `num_tokens`, those to compute, the first time: a
        preemption is not the tenant's fault."""
        self.remove(entry)
        entry.deadline_s = None
        queue = self._classes[entry.class_index]
        queue.virtual_time = max(queue.virtual_time, queue.tenant(entry.tenant).service)
        if not entry.was_placed:
            entry.was_placed = True
            self.charge(entry.class_index, entry.tenant, num_tokens)

    def charge(self, class_index: int, tenant: str, num_tokens: int) -> None:
        """The tenant was served so many tokens more in the class."""
        weight = self._weights.get(tenant, self._config.default_tenant_weight)
        self._classes[class_index].tenant(tenant).service += num_tokens / weight

    def head(
        self, *, may_be_long: bool = True, is_over: Callable[[Entry[Item]], bool] | None = None
    ) -> Entry[Item] | None:
        """The entry to place next; None: there is none.

        `may_be_long`: False passes over long requests. `is_over`: whether an entry would take its tenant over its
        budget, which in a class puts it behind all whom it would not.
        """
        for queue in self._classes:
            best, best_key = None, None
            for tenant in queue.waiting.values():
                entry = tenant.head(may_be_long)
                if entry is not None:
                    key = (is_over is not None and is_over(entry), tenant.service, entry.key)
                    if best_key is None or key < best_key:
                        best, best_key = entry, key
            if best is not None:
                return best
        return None

    def advance(self, now_s: float) -> list[Entry[Item]]:
        """Let entries age; returns, and removes, those that were never placed and whose deadline has passed."""
        while self._ageing and self._ageing[0][0] <= now_s:
            when_s, _, key, entry = heapq.heappop(self._ageing)
            if entry.key is key:
                self._make_better(entry, when_s)
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, key, entry = heapq.heappop(self._deadlines)
            if entry.key is key and entry.deadline_s is not None:
                self.remove(entry)
                expired.append(entry)
        return expired

    def _insert(self, entry: Entry[Item], since_s: float) -> None:
        entry.key = (not entry.was_placed, entry.priority, entry.order, next(self._numbers))
        self._classes[entry.class_index].push(entry)
        ageing_s = self._config.class_ageing_s
        if ageing_s and entry.priority > _FIRST_PRIORITY:
            heapq.heappush(self._ageing, (since_s + ageing_s, next(self._numbers), entry.key, entry))
        if entry.deadline_s is not None:
            heapq.heappush(self._deadlines, (entry.deadline_s, next(self._numbers), entry.key, entry))

    def _make_better(self, entry: Entry[Item], now_s: float) -> None:
        """One class up, as the best of its priorities; in the first class, before every priority: by arrival."""
        entry.key = None
        self._classes[entry.class_index].remove(entry)
        if entry.class_index > 0:
            entry.class_index -= 1
            entry.priority = self._config.class_priorities[entry.class_index]
        else:
            entry.priority = _FIRST_PRIORITY
        self._insert(entry, now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError where the queue's maps disagree."""
        for order, entry in self._entries.items():
            assert entry.order == order and entry.key is not None
        assert all(entry.key is None for entry in self._parked.values())
        for index in range(len(self._classes)):
            tokens = [entry.num_tokens for entry in self if entry.base_class == index]
            assert self.load.num_requests[index] == len(tokens) and self.load.num_tokens[index] == sum(tokens)
        found = [
            entry
            for queue in self._classes
            for tenant in queue.waiting.values()
            for heap in tenant.heaps
            for key, entry in heap
            if entry.key is key
        ]
        assert sorted(entry.order for entry in found) == sorted(self._entries)
        for index, queue in enumerate(self._classes):
            assert queue.waiting.keys() == {name for name, tenant in queue.tenants.items() if tenant.num_waiting}
            num_waiting = sum(tenant.num_waiting for tenant in queue.waiting.values())
            assert num_waiting == sum(entry.class_index == index for entry in found)
