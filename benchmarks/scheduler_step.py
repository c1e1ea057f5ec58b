"""Time that the host takes to decide and take in a step: 256 running, 2,000 waiting, contexts of 4K tokens.

Pure Python without a device: tokens are made up, and the clock goes by a step-time model. The queue is kept full, so
that requests end, are admitted, and pages are taken and evicted as in a server under load. Prints JSON for each case:
CPU microseconds of each call and of a step, which is all calls together; `schedule_admitting` is of those that admit.

  python -m benchmarks.scheduler_step [--case NAME]... [--steps 3000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from configs.scheduling import SchedulingConfig
from serving.request import Request, RequestContext, SamplingParams
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.slo_controller import SloController
from serving.scheduling.step_time import LinearStepTime, StepWork

NUM_RUNNING, NUM_WAITING, CONTEXT = 256, 2000, 4096
TOKENS = tuple(i * 7919 % 128_000 for i in range(10 * CONTEXT))
NUM_WARM_UP = 600  # steps, after which the batch is full: of 256, or of what control lets run
TENANTS = [f"tenant {number}" for number in range(16)]
STEP_TIME = LinearStepTime()

CASES: dict[str, tuple[SchedulingConfig, int]] = {  # and decode steps of a dispatch
    "one_class": (SchedulingConfig(), 1),
    "two_classes_budgets": (
        SchedulingConfig(
            class_names=("interactive", "batch"),
            class_priorities=(0, 10),
            default_tenant_kv_tokens=CONTEXT * NUM_RUNNING // len(TENANTS),
            long_prefill_tokens=2048,
            max_long_prefills=4,
        ),
        1,
    ),
    "eight_decode_steps": (SchedulingConfig(), 8),
    "slo_control": (SchedulingConfig(class_ttft_s=(5.0,), class_tpot_s=(0.2,)), 1),
}


class Timer:
    """CPU seconds of this thread, by what it did."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.step_s = 0.0

    def __call__[T](self, name: str, call: Callable[..., T], *args: Any) -> T:
        started_s = time.thread_time()
        result = call(*args)
        seconds = time.thread_time() - started_s
        self.seconds[name].append(seconds)
        self.step_s += seconds
        return result

    def end_step(self, *, admits: bool) -> None:
        self.seconds["step"].append(self.step_s)
        if admits:
            self.seconds["schedule_admitting"].append(self.seconds["schedule"][-1])
        self.step_s = 0.0


def make_request(rng: random.Random, number: int, now_s: float) -> Request:
    num_output = rng.randint(256, 1024)
    num_prompt = CONTEXT - num_output
    first = rng.randrange(len(TOKENS) - CONTEXT)
    return Request(
        request_id=str(number),
        prompt_token_ids=TOKENS[first : first + num_prompt],
        params=SamplingParams(max_tokens=num_output),
        max_total_tokens=CONTEXT,
        context=RequestContext(tenant=rng.choice(TENANTS), priority=rng.choice((0, 0, 10))),
        arrival_time_s=now_s,
    )


def measure(num_steps: int, policy: SchedulingConfig, num_decode_steps: int) -> dict[str, list[float]]:
    rng = random.Random(0)
    config = SchedulerConfig(
        page_size=16,
        num_pages=NUM_RUNNING * CONTEXT // 16 + 1,
        decode_sizes=(NUM_RUNNING,),
        max_model_len=CONTEXT,
        prefill_token_buckets=(512, 2048),
        query_block=32,
        max_decode_steps=num_decode_steps,
        policy=policy,
    )
    scheduler = Scheduler(config)
    controller = None
    if policy.controls_steps:
        controller = SloController(scheduler, policy, OnlineStepTime(STEP_TIME, config.prefill_token_buckets))
    timer, num_warm_up = Timer(), NUM_WARM_UP
    in_flight = work = limits = None
    number, now_s = 0, 0.0
    while num_warm_up or len(timer.seconds["step"]) < num_steps:
        while scheduler.num_waiting < NUM_WAITING:
            request = make_request(rng, number, now_s)
            request.hashed_prompt = scheduler.hash_prompt(request)  # as the engine's doors do, beside its loop
            scheduler.add(request)
            number += 1
        if controller is not None:
            limits = timer("limits", controller.limits, now_s)
            timer("snapshot", controller.snapshot, now_s)
        schedule = timer("schedule", scheduler.schedule, now_s, limits)
        following = StepWork.of(schedule) if schedule is not None else None
        if in_flight is not None:
            tokens = np.full((in_flight.num_decode_steps, NUM_RUNNING), 1, np.int32)
            duration_s = STEP_TIME.predict_s(work)
            now_s += duration_s
            if controller is not None:
                timer("observe", controller.observe, work, duration_s)
            for event in timer("update", scheduler.update, in_flight, tokens):
                event.request.last_token_time_s = now_s
                if event.request.first_token_time_s is None:
                    event.request.first_token_time_s = now_s
        in_flight, work = schedule, following
        if num_warm_up:
            num_warm_up, timer = num_warm_up - 1, Timer()
        else:
            timer.end_step(admits=schedule is not None and bool(schedule.resets))
    return timer.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    args = parser.parse_args()
    gc.freeze()
    for name in args.case or CASES:
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(measure, args.steps, *CASES[name])
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            continue
        figures: dict[str, object] = {"case": name, "steps": args.steps}
        for kind, seconds in measure(args.steps, *CASES[name]).items():
            for share in (50, 99):
                figures[f"{kind}_p{share}_us"] = round(float(np.percentile(seconds, share)) * 1e6, 1)
        figures["load_average"] = round(os.getloadavg()[0], 1)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
