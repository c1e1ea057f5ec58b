"""Time of one `Scheduler.schedule()` on the host: 256 running, 2,000 waiting, contexts of 4K tokens.

Pure Python without a device: tokens are made up. The queue is kept full, so that requests end, are admitted, and pages
are taken and evicted as in a server under load. Prints JSON: CPU microseconds of a call, of all steps and of those that
admit; and of `update()`.

  python -m benchmarks.scheduler_step [--steps 3000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import time

import numpy as np

from configs.scheduling import SchedulingConfig
from serving.request import Request, RequestContext, SamplingParams
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.scheduler import Scheduler

NUM_RUNNING, NUM_WAITING, CONTEXT = 256, 2000, 4096
TOKENS = tuple(i * 7919 % 128_000 for i in range(10 * CONTEXT))
TENANTS = [f"tenant {number}" for number in range(16)]


def make_request(rng: random.Random, number: int) -> Request:
    num_output = rng.randint(256, 1024)
    num_prompt = CONTEXT - num_output
    first = rng.randrange(len(TOKENS) - CONTEXT)
    return Request(
        request_id=str(number),
        prompt_token_ids=TOKENS[first : first + num_prompt],
        params=SamplingParams(max_tokens=num_output),
        max_total_tokens=CONTEXT,
        context=RequestContext(tenant=rng.choice(TENANTS), priority=rng.choice((0, 0, 10))),
    )


def measure(num_steps: int, policy: SchedulingConfig) -> tuple[list[float], list[float], list[float]]:
    """Seconds of schedule(), of those that admitted, and of update()."""
    rng = random.Random(0)
    config = SchedulerConfig(
        page_size=16,
        num_pages=NUM_RUNNING * CONTEXT // 16 + 1,
        decode_sizes=(NUM_RUNNING,),
        max_model_len=CONTEXT,
        prefill_token_buckets=(512, 2048),
        query_block=32,
        policy=policy,
    )
    scheduler = Scheduler(config)
    times, admitting, updating = [], [], []
    in_flight = None
    number = step = 0
    while len(times) < num_steps:
        while scheduler.num_waiting < NUM_WAITING:
            scheduler.add(make_request(rng, number))
            number += 1
        started_s = time.thread_time()
        schedule = scheduler.schedule(step * 0.02)
        seconds = time.thread_time() - started_s
        if scheduler.num_running == NUM_RUNNING or times:  # from a full batch on
            times.append(seconds)
            if schedule is not None and schedule.resets:
                admitting.append(seconds)
        step += 1
        if in_flight is not None:
            tokens = np.full((in_flight.num_decode_steps, NUM_RUNNING), 1, np.int32)
            started_s = time.thread_time()
            scheduler.update(in_flight, tokens)
            updating.append(time.thread_time() - started_s)
        in_flight = schedule
    return times, admitting, updating


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    args = parser.parse_args()
    policies = {
        "one_class": SchedulingConfig(),
        "two_classes_budgets": SchedulingConfig(
            class_names=("interactive", "batch"),
            class_priorities=(0, 10),
            default_tenant_kv_tokens=CONTEXT * NUM_RUNNING // len(TENANTS),
            long_prefill_tokens=2048,
            max_long_prefills=4,
        ),
    }
    gc.freeze()
    for name, policy in policies.items():
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(measure, args.steps, policy)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            continue
        figures: dict[str, object] = {"case": name, "steps": args.steps}
        for kind, seconds in zip(
            ("schedule", "schedule_admitting", "update"), measure(args.steps, policy), strict=True
        ):
            for share in (50, 99):
                figures[f"{kind}_p{share}_us"] = (
                    round(float(np.percentile(seconds, share)) * 1e6, 1) if seconds else None
                )
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
