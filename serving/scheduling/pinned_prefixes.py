"""Prefixes whose pages are kept whatever else wants the room, such as system prompts that every request begins with."""

from __future__ import annotations

from collections import Counter

from serving.request import RequestError
from serving.scheduling.page_allocator import PageAllocator
from serving.scheduling.prefix_cache import CachedPage, PageChain, PrefixCache


class PinnedPrefixes:
    """Holds the cached pages of pinned prefixes as a sequence would, so that nothing evicts them.

    A pinned page is held from when it is in the cache: at once, or once a request computes it. Emptying the cache gives
    the pages back and leaves the pins. max_pages: that all pins together may hold.
    """

    def __init__(self, cache: PrefixCache, allocator: PageAllocator, max_pages: int):
        self.max_pages = max_pages
        self._cache, self._allocator = cache, allocator
        self._chains: dict[bytes, PageChain] = {}  # by the hash of the last page
        self._num_pins: Counter[bytes] = Counter()  # by page hash
        self._held: dict[bytes, int] = {}  # page hash -> page id

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def num_held_pages(self) -> int:
        return len(self._held)

    @property
    def held_page_ids(self) -> list[int]:
        return list(self._held.values())

    def pin(self, chain: PageChain) -> int:
        """Pin the pages of a chain, which must have some; returns how many. Raises RequestError beyond max_pages."""
        key = chain.page_hashes[-1]
        if key not in self._chains:
            num_new_pages = sum(page_hash not in self._num_pins for page_hash in chain.page_hashes)
            if len(self._num_pins) + num_new_pages > self.max_pages:
                raise RequestError(
                    "prompt",
                    f"takes {num_new_pages} pages beside the {len(self._num_pins)} that are pinned; "
                    f"max_pinned_pages is {self.max_pages}",
                )
            self._chains[key] = chain
            self._num_pins.update(chain.page_hashes)
            for page in self._cache.match_prefix(chain, len(chain)):
                self.hold(page)
        return len(chain)

    def unpin(self, chain: PageChain) -> int:
        """Take back a pin; returns how many pages it had. Raises RequestError where there is none of this prefix."""
        if self._chains.pop(chain.page_hashes[-1], None) is None:
            raise RequestError("prompt", "is not pinned")
        self._num_pins -= Counter(chain.page_hashes)
        for page_hash in chain.page_hashes:
            if page_hash not in self._num_pins:
                self._release(page_hash)
        return len(chain)

    def hold(self, page: CachedPage) -> None:
        """A page is in the cache: keep it, if it is pinned."""
        if page.page_hash in self._num_pins and page.page_hash not in self._held:
            self._allocator.share(page.page_id)
            self._held[page.page_hash] = page.page_id

    def give_back(self, page_ids: set[int], after_step: int) -> None:
        """Hold these pages no more: they leave the cache, and step `after_step` may still write them."""
        for page_hash in [h for h, page_id in self._held.items() if page_id in page_ids]:
            self._release(page_hash, after_step)

    def give_back_all(self) -> None:
        for page_hash in list(self._held):
            self._release(page_hash)

    def _release(self, page_hash: bytes, after_step: int = 0) -> None:
        page_id = self._held.pop(page_hash, None)
        if page_id is not None:
            self._allocator.free([page_id], after_step=after_step)

    def check_integrity(self) -> None:
        """Raise AssertionError where pins, held pages and the cache disagree."""
        assert self._num_pins == sum((Counter(chain.page_hashes) for chain in self._chains.values()), Counter())
        assert len(self._num_pins) <= self.max_pages
        for page_hash, page_id in self._held.items():
            assert page_hash in self._num_pins and page_id in self._cache, page_id
            assert self._cache.page(page_id).page_hash == page_hash, page_id
