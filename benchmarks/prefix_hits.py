"""The prefix cache of the simulated engine against what a trace's own hash ids allow.

  python benchmarks/prefix_hits.py TRACE.jsonl [--pool_tokens 300000000] [--page_size 512]

The trace has `hash_ids` (Mooncake's do). With a pool that holds all of it, the share of blocks found should be the
trace's own: the share of blocks, in runs from the start of a prompt, that an earlier prompt had too. One JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from tqdm import tqdm

from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step_time import LinearStepTime
from serving.simulation.scenarios import H200_8B, scheduler_config
from serving.simulation.simulator import Simulator
from serving.simulation.trace import BLOCK_TOKENS, block_hit_rate, read_trace, scale_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pool_tokens", type=int, default=300_000_000, help="KV tokens; the default holds all")
    parser.add_argument("--page_size", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--load", type=float, default=1.0, help="times the rate of the trace")
    args = parser.parse_args()
    trace = scale_rate(read_trace(args.trace), args.load)
    engine = dataclasses.replace(H200_8B, page_size=args.page_size, num_pages=args.pool_tokens // args.page_size + 1)
    simulator = Simulator(Scheduler(scheduler_config(engine)), LinearStepTime())
    with tqdm(total=len(trace), unit="request", disable=None) as bar:
        simulator.progress = lambda done, total: bar.update(done - bar.n) and None
        result = simulator.run(trace)
    num_blocks = sum(len(request.hash_ids) for request in trace)
    num_cached_blocks = sum(request.num_cached_tokens for request in result.requests) / BLOCK_TOKENS
    figures = {
        "trace": args.trace.name,
        "trace_block_hit_rate": round(block_hit_rate(trace), 4),
        "simulated_block_hit_rate": round(num_cached_blocks / num_blocks, 4),
        "pool_tokens": args.pool_tokens,
        "evictions": simulator.scheduler.page_allocator.num_evictions,
        **result.summary(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
