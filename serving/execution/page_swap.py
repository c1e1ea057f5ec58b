"""Copies pages between the pool and host memory, in batches of a fixed number of pages.

A batch leaves the pool by one program, into arrays of its own; from there it is copied to the host while the device goes
on. Programs run in the order of their dispatch, so the pages may be given away at once: whatever writes them next runs
after they were gathered. The way back is the same: a copy to the device, then one program that writes the pages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from configs.checks import ConfigError
from layers.kv_cache import KVCache, LayerKV, stacked_pages
from serving.execution.program_plan import SWAP_PAGES_BATCH, like
from serving.scheduling.schedule import NULL_PAGE
from serving.scheduling.swap import SwapIn, SwapOut

HOST_MEMORY = "pinned_host"  # page-locked, so that copies run beside programs and at the link's full rate
MAX_STAGED = 4  # batches on their way, in each direction: what they take of the device's memory is bounded
NUM_TIMED = 8  # batches of a measurement


def staging_bytes(page_nbytes: int) -> int:
    """Device memory of all batches on their way, where a device has `page_nbytes` of a page."""
    return 2 * (MAX_STAGED + 1) * SWAP_PAGES_BATCH * page_nbytes


class PageSwap:
    """Swaps for one engine. `program(name)` gives the compiled "swap out" and "swap in" of the program plan.

    Raises ConfigError where the devices know no page-locked host memory.
    """

    def __init__(self, kv_cache: KVCache, mesh: Mesh, program: Callable[[str], Any]):
        device = mesh.devices.flat[0]
        if HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
            raise ConfigError(f"EngineConfig.swap_bytes: {device} offers no {HOST_MEMORY} memory")
        abstract = stacked_pages(like(kv_cache), SWAP_PAGES_BATCH)
        self._device_sharding: LayerKV[NamedSharding] = jax.tree.map(lambda x: x.sharding, abstract)
        self._host_sharding: LayerKV[NamedSharding] = jax.tree.map(
            lambda x: x.sharding.with_memory_kind(HOST_MEMORY), abstract
        )
        self._num_pages = kv_cache[0].pages.shape[0]
        self._program = program
        self._outgoing: deque[Any] = deque()  # results that are ready once a batch is off the device
        self._incoming: deque[Any] = deque()  # and once one has been written to its pages
        self.batch_nbytes = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(abstract))

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page with its scales, of all devices together."""
        return self.batch_nbytes // SWAP_PAGES_BATCH

    def swap_out(self, kv_cache: KVCache, out: SwapOut) -> None:
        """Begin to copy pages to the host, where `out.copy.batches` has them."""
        for first in range(0, len(out.page_ids), SWAP_PAGES_BATCH):
            page_ids = out.page_ids[first : first + SWAP_PAGES_BATCH]
            out.copy.batches.append(self._copy_out(kv_cache, page_ids))

    def swap_in(self, kv_cache: KVCache, swap_in: SwapIn) -> KVCache:
        """Write a copy's pages, from `swap_in.first` on, to pages of the donated pool, and give up the copy."""
        targets = [self._num_pages] * swap_in.first + list(swap_in.page_ids)  # those before are there: written nowhere
        for place, batch in enumerate(swap_in.copy.batches):
            start = place * SWAP_PAGES_BATCH
            if start + SWAP_PAGES_BATCH > swap_in.first:
                kv_cache = self._copy_in(kv_cache, batch, targets[start : start + SWAP_PAGES_BATCH])
        swap_in.copy.batches.clear()
        return kv_cache

    def _copy_out(self, kv_cache: KVCache, page_ids: Sequence[int]) -> Any:
        padded = np.full(SWAP_PAGES_BATCH, NULL_PAGE, np.int32)
        padded[: len(page_ids)] = page_ids
        batch = jax.device_put(self._program("swap out")(kv_cache, padded), self._host_sharding)
        _wait_for_oldest(self._outgoing, batch)
        return batch

    def _copy_in(self, kv_cache: KVCache, batch: Any, page_ids: Sequence[int]) -> KVCache:
        # one past the pool and on, so that none is there twice
        padded = self._num_pages + np.arange(SWAP_PAGES_BATCH, dtype=np.int32)
        is_target = np.array(page_ids) < self._num_pages
        padded[: len(page_ids)][is_target] = np.array(page_ids)[is_target]
        staged = jax.device_put(batch, self._device_sharding)
        kv_cache, done = self._program("swap in")(kv_cache, staged, padded)
        _wait_for_oldest(self._incoming, done)
        return kv_cache

    def measure(self, kv_cache: KVCache) -> tuple[KVCache, float, float]:
        """The pool, unchanged, and bytes per second to the host and back, all devices together."""
        for _ in range(2):  # what a first call sets up is not timed
            started_s = time.perf_counter()
            batches = [self._copy_out(kv_cache, [NULL_PAGE]) for _ in range(NUM_TIMED)]
            jax.block_until_ready(batches)
            out_s = time.perf_counter() - started_s
            started_s = time.perf_counter()
            for batch in batches:
                kv_cache = self._copy_in(kv_cache, batch, [])
            jax.block_until_ready(kv_cache)
            in_s = time.perf_counter() - started_s
        self._outgoing.clear()
        self._incoming.clear()
        num_bytes = NUM_TIMED * self.batch_nbytes
        return kv_cache, num_bytes / out_s, num_bytes / in_s


def _wait_for_oldest(on_their_way: deque[Any], newest: Any) -> None:
    """Wait until at most MAX_STAGED are on their way."""
    on_their_way.append(newest)
    if len(on_their_way) > MAX_STAGED:
        jax.block_until_ready(on_their_way.popleft())
