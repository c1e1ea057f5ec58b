"""Preemption by swapping: a sequence's pages are copied to host memory and back, where that takes less time than to
compute them again. Bookkeeping only: the model runner copies.

A copy is made of confirmed K/V alone, and of every page that holds some, shared ones too: whatever becomes of the
prefix cache meanwhile, the sequence goes on with the very bits that it had. Pages that the cache has kept are shared
again at the return and not copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from configs.checks import check_float, check_int
from serving.scheduling.prefix_cache import CachedPage, PrefixCache


@dataclass(frozen=True, kw_only=True)
class SwapRates:
    """What the devices were measured to do. Raises ConfigError."""

    out_bytes_per_s: float  # pages of all devices to host memory
    in_bytes_per_s: float  # and back
    prefill_tokens_per_s: float

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_s", "in_bytes_per_s", "prefill_tokens_per_s"):
            check_float(self, name, above=0.0)

    def is_swap_faster(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether `num_bytes` go out and come back in less time than prefill takes for the tokens that they hold."""
        swap_s = num_bytes / self.out_bytes_per_s + num_bytes / self.in_bytes_per_s
        return swap_s < num_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Host memory for preempted sequences, and when to use it. Raises ConfigError."""

    host_bytes: int
    page_bytes: int  # of a page with its scales, on all devices together
    batch_pages: int = 1  # pages are copied so many at a time, and a copy takes host memory for whole batches
    rates: SwapRates | None = None  # None: swap wherever there is room

    def __post_init__(self) -> None:
        for name in ("host_bytes", "page_bytes", "batch_pages"):
            check_int(self, name, minimum=1)

    def copy_bytes(self, num_pages: int) -> int:
        """Host memory that a copy of `num_pages` pages takes."""
        return -(-num_pages // self.batch_pages) * self.batch_pages * self.page_bytes


@dataclass(eq=False, slots=True, kw_only=True)
class HostCopy:
    """A preempted sequence's K/V of positions [0, num_tokens) in host memory; compared by identity."""

    num_pages: int
    num_tokens: int
    is_decoding: bool  # the sequence goes on by decoding; else the rest of its tokens is prefilled
    cached_pages: tuple[CachedPage, ...]  # its first pages, as far as the prefix cache had them
    batches: list[Any] = field(default_factory=list)  # the model runner's: what it copied, in order

    def live_pages(self) -> list[CachedPage]:
        """Its first pages that the prefix cache has kept ever since, so that they hold what they held."""
        return list(takewhile(lambda page: page.is_live, self.cached_pages))


@dataclass(frozen=True, kw_only=True)
class SwapOut:
    """Copy pages to the host, before the step: nothing else of the step comes first, so that they may be given away."""

    copy: HostCopy
    page_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SwapIn:
    """Write pages [first, first + len(page_ids)) of a copy to `page_ids` before the step. The copy is done with then."""

    copy: HostCopy
    first: int
    page_ids: tuple[int, ...]


class HostPool:
    """Bounded host memory for copies, and what is to be copied in the next step. Without a config it holds nothing."""

    def __init__(self, config: SwapConfig | None, prefix_cache: PrefixCache | None):
        self.config = config
        self.num_used_bytes = 0
        self.num_swap_outs = self.num_swap_ins = 0
        self.num_out_bytes = self.num_in_bytes = 0  # of pages; what fills up a batch is not counted
        self._prefix_cache = prefix_cache
        self._outs: list[SwapOut] = []
        self._ins: list[SwapIn] = []

    def try_swap_out(self, page_ids: Sequence[int], num_tokens: int, *, is_decoding: bool) -> HostCopy | None:
        """Decide whether to copy these pages, which hold `num_tokens` tokens. None: recompute, or no room."""
        config, num_pages = self.config, len(page_ids)
        if config is None or not num_pages:
            return None
        if self.num_used_bytes + config.copy_bytes(num_pages) > config.host_bytes:
            return None
        if config.rates is not None and not config.rates.is_swap_faster(config.copy_bytes(num_pages), num_tokens):
            return None
        cached_pages: list[CachedPage] = []
        if self._prefix_cache is not None:
            for page_id in page_ids:
                page = self._prefix_cache.find(page_id)
                if page is None:
                    break
                cached_pages.append(page)
        copy = HostCopy(
            num_pages=num_pages, num_tokens=num_tokens, is_decoding=is_decoding, cached_pages=tuple(cached_pages)
        )
        self._outs.append(SwapOut(copy=copy, page_ids=tuple(page_ids)))
        self.num_used_bytes += config.copy_bytes(num_pages)
        self.num_swap_outs += 1
        self.num_out_bytes += num_pages * config.page_bytes
        return copy

    def swap_in(self, copy: HostCopy, first: int, page_ids: Sequence[int]) -> None:
        """Bring back pages [first, num_pages) of a copy into `page_ids`; its memory is free for later steps' copies."""
        assert self.config is not None and first + len(page_ids) == copy.num_pages, (first, page_ids, copy)
        self._ins.append(SwapIn(copy=copy, first=first, page_ids=tuple(page_ids)))
        self.num_used_bytes -= self.config.copy_bytes(copy.num_pages)
        self.num_swap_ins += 1
        self.num_in_bytes += len(page_ids) * self.config.page_bytes

    def drop(self, copy: HostCopy) -> None:
        """Nobody will ask for this copy: its sequence has ended."""
        assert self.config is not None
        self._outs = [out for out in self._outs if out.copy is not copy]
        copy.batches.clear()
        self.num_used_bytes -= self.config.copy_bytes(copy.num_pages)

    def take_step(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """What the step that is dispatched now has to copy."""
        outs, ins = tuple(self._outs), tuple(self._ins)
        self._outs, self._ins = [], []
        return outs, ins

    def check_integrity(self, copies: Iterable[HostCopy]) -> None:
        """Raise AssertionError unless `copies`, of all waiting sequences, account for the memory in use."""
        copies = list(copies)
        assert len({id(copy) for copy in copies}) == len(copies)
        if self.config is None:
            assert not copies and not self.num_used_bytes
            return
        assert self.num_used_bytes == sum(self.config.copy_bytes(copy.num_pages) for copy in copies)
        assert self.num_used_bytes <= self.config.host_bytes
        assert {id(out.copy) for out in self._outs} <= {id(copy) for copy in copies}
        assert not self._ins, "a copy is brought back in the step that admits its sequence"
