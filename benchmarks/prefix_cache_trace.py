"""Hit rate of the prefix cache over a trace of requests that say which blocks of tokens they share (Mooncake's form).

    python benchmarks/prefix_cache_trace.py TRACE.jsonl --page_size 16 --pool_tokens 3000000

Drives the cache, the allocator and the eviction order alone, without a model: each request looks up its prompt, computes
what is missing, and gives its pages back once `--concurrency` later ones have come. Prints the share of blocks that the
trace itself repeats, and the shares of blocks and tokens found in the cache: with an endless pool (the default), and
otherwise under the eviction policy and under plain LRU beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.scheduling.eviction import EvictionOrder, RecomputeCost
from serving.scheduling.page_allocator import PageAllocator
from serving.scheduling.prefix_cache import PrefixCache

BLOCK_SIZE = 512  # tokens that a hash id of the trace stands for
LRU = RecomputeCost(token=0.0, pair=0.0)  # all values equal: recency alone decides


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    num_tokens: int
    hash_ids: tuple[int, ...]  # of each block from the first, the last may be a partial one


@dataclass(kw_only=True)
class HitCounts:
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_blocks: int = 0  # of the trace, partial last ones included
    recompute_cost: float = 0.0  # of the pages that were not found
    num_evictions: int = 0

    @property
    def token_rate(self) -> float:
        return self.num_hit_tokens / max(self.num_tokens, 1)

    @property
    def block_rate(self) -> float:
        return self.num_hit_tokens / BLOCK_SIZE / max(self.num_blocks, 1)


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    requests = []
    with path.open() as lines:
        for line in lines:
            if max_requests is not None and len(requests) == max_requests:
                break
            record = json.loads(line)
            requests.append(TraceRequest(num_tokens=record["input_tokens"], hash_ids=tuple(record["hash_ids"])))
    return requests


def repeated_block_share(requests: Iterable[TraceRequest]) -> float:
    """Share of the trace's blocks that an earlier request had in the same place of the same prefix."""
    seen: set[int] = set()
    num_blocks = num_repeated = 0
    for request in requests:
        num_blocks += len(request.hash_ids)
        for hash_id in request.hash_ids:
            if hash_id not in seen:
                break
            num_repeated += 1
        seen.update(request.hash_ids)
    return num_repeated / max(num_blocks, 1)


def prompt_tokens(request: TraceRequest) -> np.ndarray:
    """Token ids in which every block is unlike every other."""
    ids = np.asarray(request.hash_ids, np.int64)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
    return ids.reshape(-1)[: request.num_tokens].astype(np.int32)


def replay(
    requests: list[TraceRequest],
    *,
    page_size: int,
    num_pages: int | None,
    cost: RecomputeCost | None = None,
    concurrency: int = 1,
    progress: bool = False,
) -> HitCounts:
    """Look up and cache every prompt in order. num_pages: of the pool; None: more than the trace fills."""
    if num_pages is None:
        num_pages = 2 + sum(r.num_tokens // page_size + 1 for r in requests)
    cache = PrefixCache(page_size)
    order = EvictionOrder(page_size, num_pages, cost)
    allocator = PageAllocator(num_pages, cache, order)
    page_cost = RecomputeCost()
    running: deque[list[int]] = deque()
    counts = HitCounts()
    started_s = last_s = time.monotonic()
    for number, request in enumerate(requests):
        tokens = prompt_tokens(request)
        num_full = len(tokens) // page_size
        chain = cache.new_chain(b"")
        cache.extend(chain, tokens[: num_full * page_size])
        match = cache.match_prefix(chain, (len(tokens) - 1) // page_size)
        for page in match:
            allocator.share(page.page_id)
        while (new := allocator.try_allocate(num_full - len(match))) is None and running:
            allocator.free(running.popleft(), after_step=0)
        if new is None:
            raise SystemExit(f"request {number} of {request.num_tokens} tokens does not fit the pool")
        page_ids = [page.page_id for page in match] + new
        chain.restart(match)
        cache.publish(chain, page_ids, num_full)
        counts.num_tokens += len(tokens)
        counts.num_blocks += len(request.hash_ids)
        counts.num_hit_tokens += len(match) * page_size
        counts.recompute_cost += sum(page_cost.of_page(index, page_size) for index in range(len(match), num_full))
        running.append(page_ids)
        if len(running) >= concurrency:
            allocator.free(running.popleft(), after_step=0)
        if progress and time.monotonic() - last_s > 5:
            last_s = time.monotonic()
            share = (number + 1) / len(requests)
            left_s = (last_s - started_s) * (1 - share) / share
            print(f"  {share:4.0%}, {left_s:.0f} s left", file=sys.stderr, flush=True)
    counts.num_evictions = allocator.num_evictions
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--page_size", type=int, default=512, help="tokens (default: 512, the trace's blocks)")
    parser.add_argument("--pool_tokens", type=int, help="of the pool; not given: endless")
    parser.add_argument("--concurrency", type=int, default=32, help="requests that hold pages at once (default: 32)")
    parser.add_argument("--max_requests", type=int)
    args = parser.parse_args()
    requests = read_trace(args.trace, args.max_requests)
    print(f"{len(requests)} requests; the trace repeats {repeated_block_share(requests):.2%} of its blocks")
    num_pages = None if args.pool_tokens is None else args.pool_tokens // args.page_size + 1
    policies: dict[str, RecomputeCost | None] = {"policy": None} if num_pages is None else {"policy": None, "LRU": LRU}
    pool = "an endless pool" if num_pages is None else f"a pool of {args.pool_tokens:,} tokens"
    for name, cost in policies.items():
        started_s = time.monotonic()
        counts = replay(
            requests,
            page_size=args.page_size,
            num_pages=num_pages,
            cost=cost,
            concurrency=args.concurrency,
            progress=True,
        )
        print(
            f"{name}, {pool}, pages of {args.page_size}: {counts.block_rate:.2%} of blocks and "
            f"{counts.token_rate:.2%} of tokens hit, "
            f"recompute cost {counts.recompute_cost:.4g}, {counts.num_evictions:,} evictions, "
            f"{time.monotonic() - started_s:.1f} s"
        )


if __name__ == "__main__":
    main()
