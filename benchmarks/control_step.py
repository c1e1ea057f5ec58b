"""Time that the SLO controller and admission control take of a step: 256 running, 2,000 waiting, contexts of 4K tokens.

The load of `scheduler_step.py`, its steps timed by the linear model. Prints JSON, CPU microseconds: of `limits`, of
`snapshot` with `publish`, of `observe`, of the three together in a step, and of the `decide` of a request.

  python -m benchmarks.control_step [--steps 3000] [--profile]
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

from benchmarks.scheduler_step import CONTEXT, NUM_RUNNING, NUM_WAITING, make_request
from configs.scheduling import SchedulingConfig
from serving.scheduling.admission import AdmissionControl
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.slo_controller import SloController
from serving.scheduling.step_time import LinearStepTime, StepWork

POLICIES = {
    "one_class": SchedulingConfig(class_ttft_s=(2.0,), class_tpot_s=(0.2,)),
    "two_classes": SchedulingConfig(
        class_names=("interactive", "batch"), class_priorities=(0, 10), class_ttft_s=(2.0, 0.0), class_tpot_s=(0.2, 0.0)
    ),
}


def measure(num_steps: int, policy: SchedulingConfig) -> dict[str, list[float]]:
    rng = random.Random(0)
    config = SchedulerConfig(
        page_size=16,
        num_pages=NUM_RUNNING * CONTEXT // 8 + 1,
        decode_sizes=(64, NUM_RUNNING),
        max_model_len=CONTEXT,
        prefill_token_buckets=(512, 2048),
        query_block=32,
        policy=policy,
    )
    scheduler, device = Scheduler(config), LinearStepTime()
    controller = SloController(scheduler, policy, OnlineStepTime(device, config.prefill_token_buckets))
    admission = AdmissionControl(policy)
    times: dict[str, list[float]] = {"limits": [], "snapshot": [], "observe": [], "step": [], "decide": []}
    in_flight = None
    number, now_s = 0, 0.0

    def clocked(name: str, call, *args):
        started_s = time.thread_time()
        result = call(*args)
        times[name].append(time.thread_time() - started_s)
        return result

    for step in range(num_steps + 1000):
        if step == 1000:  # the batch is full
            for values in times.values():
                values.clear()
        while scheduler.num_waiting < NUM_WAITING:
            request = make_request(rng, number)
            request.arrival_time_s = now_s
            scheduler.add(request)
            number += 1
        limits = clocked("limits", controller.limits, now_s)
        snapshot = clocked("snapshot", controller.snapshot, now_s)
        admission.publish(snapshot)
        clocked("decide", admission.decide, 0, 1000, now_s)
        schedule = scheduler.schedule(now_s, limits)
        work = None if schedule is None else StepWork.of(schedule)
        if in_flight is not None:
            pending, pending_work = in_flight
            seconds = device.predict_s(pending_work) * rng.lognormvariate(0.0, 0.03)
            now_s += seconds
            tokens = np.full((pending.num_decode_steps, NUM_RUNNING), 1, np.int32)
            for event in scheduler.update(pending, tokens):
                event.request.last_token_time_s = now_s
                if event.request.first_token_time_s is None:
                    event.request.first_token_time_s = now_s
            clocked("observe", controller.observe, pending_work, seconds)
        else:
            times["observe"].append(0.0)
        in_flight = None if schedule is None else (schedule, work)
        times["step"].append(sum(times[name][-1] for name in ("limits", "snapshot", "observe")))
    assert scheduler.num_running > 0.9 * min(controller.plan.max_num_seqs, NUM_RUNNING), scheduler.num_running
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    args = parser.parse_args()
    gc.freeze()
    for name, policy in POLICIES.items():
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(measure, args.steps, policy)
            pstats.Stats(profile).sort_stats("tottime").print_stats("slo_controller|online_step_time|admission|lengths")
            continue
        figures: dict[str, object] = {"case": name, "steps": args.steps}
        for kind, seconds in measure(args.steps, policy).items():
            for share in (50, 99):
                figures[f"{kind}_p{share}_us"] = round(float(np.percentile(seconds, share)) * 1e6, 1)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
