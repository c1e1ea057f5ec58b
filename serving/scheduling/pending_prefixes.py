"""Full pages that running requests are computing and will publish: worth waiting for rather than computing again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.scheduling.prefix_cache import PageChain

Order = tuple[int, tuple[int, int]]  # class, then that of arrival: who comes first is served first


@dataclass(eq=False, slots=True)
class _Producer:
    page_hashes: list[bytes]
    next_page: int
    stop_page: int


class PendingPrefixes:
    """Maps hashes of pages to the producer that computes them, named by its place in the order of service.

    A hash alone decides whom a request waits for: a collision costs the wait, since a hit compares tokens.
    """

    def __init__(self) -> None:
        self._producer_of: dict[bytes, Order] = {}
        self._producers: dict[Order, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producer_of)

    def announce(self, order: Order, chain: PageChain, start_page: int, stop_page: int) -> None:
        """A request admitted just now will compute pages [start_page, stop_page), at least one, of its chain."""
        producer = self._producers[order] = _Producer(chain.page_hashes, start_page, stop_page)
        for page_hash in producer.page_hashes[start_page : producer.stop_page]:
            if order <= self._producer_of.get(page_hash, order):  # the older one is sooner done
                self._producer_of[page_hash] = order

    def published(self, order: Order, num_pages: int) -> None:
        """The first `num_pages` pages of a producer were offered to the cache."""
        producer = self._producers.get(order)
        if producer is not None:
            self._forget(order, producer, min(num_pages, producer.stop_page))
            if producer.next_page == producer.stop_page:
                del self._producers[order]

    def withdraw(self, order: Order) -> None:
        """The producer runs no more."""
        producer = self._producers.pop(order, None)
        if producer is not None:
            self._forget(order, producer, producer.stop_page)

    def run_length(self, page_hashes: Sequence[bytes], order: Order) -> int:
        """How many of `page_hashes`, from the first, one producer older than `order` is computing."""
        first = self._producer_of.get(page_hashes[0]) if page_hashes else None
        if first is None or first >= order:
            return 0
        num_pages = 0
        while num_pages < len(page_hashes) and self._producer_of.get(page_hashes[num_pages]) == first:
            num_pages += 1
        return num_pages

    def is_pending(self, page_hash: bytes, order: Order) -> bool:
        """Whether a producer older than `order` is computing the page."""
        return self._producer_of.get(page_hash, order) < order

    def _forget(self, order: Order, producer: _Producer, stop_page: int) -> None:
        for page_hash in producer.page_hashes[producer.next_page : stop_page]:
            if self._producer_of.get(page_hash) == order:
                del self._producer_of[page_hash]
        producer.next_page = max(producer.next_page, stop_page)

    def check_integrity(self, num_published: dict[Order, int]) -> None:
        """Raise AssertionError unless every producer is among `num_published` (pages offered, by order of the running)
        and every pending page is one that its producer has yet to offer."""
        assert self._producers.keys() <= num_published.keys()
        pending = set()
        for order, producer in self._producers.items():
            assert num_published[order] <= producer.next_page < producer.stop_page
            pending.update(producer.page_hashes[producer.next_page : producer.stop_page])
        assert self._producer_of.keys() <= pending
        assert set(self._producer_of.values()) <= self._producers.keys()
