"""Finds full pages of earlier sequences by what they hold. Bookkeeping only: the pages are the allocator's.

A page's hash chains over its parent's (xxh3_128, or sha256 where tenants are kept apart), so one look-up a page finds the longest known prefix. Equal hashes
are not trusted: a hit also compares the page's tokens and that its parent is the very page matched before it, so a
collision, by chance or made, costs a miss and never hands over foreign K/V.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

Hash = Callable[[bytes], bytes]
EvictionItem = tuple[float, int, int]  # value, order of addition, page id: the smallest goes first


def sha256_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(eq=False, slots=True)
class CachedPage:
    """One published page. Compared by identity: a page published again is another parent."""

    page_id: int
    page_hash: bytes
    token_bytes: bytes  # page_size int32
    parent: CachedPage | bytes  # bytes: the salt, for the first page of a sequence
    index: int  # in its sequence
    owner: str  # the tenant that published it
    num_hits: int = 0
    # Kept by the eviction order:
    num_idle_children: int = 0  # pages after it that nobody holds
    eviction_item: EvictionItem | None = None  # its place, while nobody holds it
    is_live: bool = True  # False once removed from the cache


@dataclass(eq=False, slots=True)
class PageChain:
    """The full pages of one sequence as the cache sees them: tokens and chained hashes, each computed once.

    `num_published` pages from the start were offered to the cache; `tail` is the cache's page for the last of them
    (not always the sequence's own: another sequence may have published the same tokens first), the salt where there
    is none, or None once the chain cannot go on.
    """

    salt: bytes
    owner: str  # the tenant whose sequence it is
    tail: CachedPage | bytes | None
    num_published: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    page_tokens: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.page_hashes)

    def restart(self, match: Sequence[CachedPage]) -> None:
        """The sequence now holds the pages of `match` and has computed nothing after them."""
        self.num_published = len(match)
        self.tail = match[-1] if match else self.salt


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """The full pages of a prompt: what a chain of its sequence begins with. Tuples of bytes, which the garbage collector
    passes over however many prompts wait."""

    salt: bytes
    page_hashes: tuple[bytes, ...]
    page_tokens: tuple[bytes, ...]


class PrefixCache:
    """Maps hashes of full pages to page ids.

    page_size: tokens. hash_fn: bytes -> digest; a parameter so that tests can force collisions.
    """

    def __init__(self, page_size: int, hash_fn: Hash = xxhash.xxh3_128_digest):
        self.page_size = page_size
        self.hash_fn = hash_fn
        self._by_hash: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._by_page

    def __len__(self) -> int:
        return len(self._by_page)

    def new_chain(self, salt: bytes, owner: str = "", prompt: HashedPrompt | None = None) -> PageChain:
        """A chain of a tenant's sequence, nothing of it published. Chains of different salts never share a page.

        It begins with the pages of `prompt` where that has the same salt.
        """
        chain = PageChain(salt=salt, owner=owner, tail=salt)
        if prompt is not None and prompt.salt == salt:
            chain.page_hashes += prompt.page_hashes
            chain.page_tokens += prompt.page_tokens
        return chain

    def page(self, page_id: int) -> CachedPage:
        return self._by_page[page_id]

    def find(self, page_id: int) -> CachedPage | None:
        """The cached page of this id; None: it is not cached."""
        return self._by_page.get(page_id)

    def extend(self, chain: PageChain, token_ids: Sequence[int]) -> None:
        """Append full pages of tokens to the chain: `token_ids` follow those it holds, a multiple of page_size."""
        assert len(token_ids) % self.page_size == 0, len(token_ids)
        data = struct.pack(f"{len(token_ids)}i", *token_ids)  # several times faster than by way of an array
        parent_hash = chain.page_hashes[-1] if chain.page_hashes else self.hash_fn(chain.salt)
        page_bytes = 4 * self.page_size
        page_tokens = [data[start : start + page_bytes] for start in range(0, len(data), page_bytes)]
        hash_fn = self.hash_fn
        chain.page_tokens += page_tokens
        chain.page_hashes += [parent_hash := hash_fn(parent_hash + tokens) for tokens in page_tokens]

    def match_prefix(self, chain: PageChain, max_pages: int) -> list[CachedPage]:
        """The longest run of cached pages, at most `max_pages`, that hold the chain's first tokens."""
        match: list[CachedPage] = []
        parent: CachedPage | bytes = chain.salt
        for page_hash, tokens in zip(chain.page_hashes[:max_pages], chain.page_tokens, strict=False):
            page = self._by_hash.get(page_hash)
            if page is None or page.parent != parent or page.token_bytes != tokens:
                break
            match.append(page)
            parent = page
        return match

    def publish(self, chain: PageChain, page_ids: Sequence[int], num_full_pages: int) -> list[CachedPage]:
        """Offer the chain's pages [num_published, num_full_pages), held in `page_ids`, which are computed and known.
        Returns those that are new to the cache.

        Where the cache has the same tokens already, its page stays and the chain goes on from there. A hash taken by
        other tokens, or a parent evicted meanwhile, ends the chain: pages after it could never be reached.
        """
        new_pages: list[CachedPage] = []
        by_hash, owner, tail = self._by_hash, chain.owner, chain.tail
        if isinstance(tail, CachedPage) and not tail.is_live:
            tail = None
        for index in range(chain.num_published, num_full_pages):
            if tail is None:
                break
            page_hash, tokens = chain.page_hashes[index], chain.page_tokens[index]
            page = by_hash.get(page_hash)
            if page is None:
                page = CachedPage(page_ids[index], page_hash, tokens, tail, index, owner)
                by_hash[page_hash] = self._by_page[page.page_id] = page
                new_pages.append(page)
                tail = page
            else:
                tail = page if page.parent == tail and page.token_bytes == tokens else None
        chain.num_published, chain.tail = max(chain.num_published, num_full_pages), tail
        return new_pages

    def remove(self, page_id: int) -> None:
        """Forget a page, if it is cached: it is about to be overwritten, or its content is not to be trusted."""
        page = self._by_page.pop(page_id, None)
        if page is not None:
            del self._by_hash[page.page_hash]
            page.is_live = False
            page.parent = b""  # children may outlive it: they must not keep its ancestors alive

    def clear(self) -> int:
        """Forget every page; returns how many there were."""
        page_ids = list(self._by_page)
        for page_id in page_ids:
            self.remove(page_id)
        return len(page_ids)

    def check_integrity(self) -> None:
        """Raise AssertionError where the two maps disagree."""
        assert len(self._by_hash) == len(self._by_page)
        for page_id, page in self._by_page.items():
            assert page.page_id == page_id and page.is_live, page_id
            assert self._by_hash[page.page_hash] is page, page_id
