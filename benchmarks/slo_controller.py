"""The SLO controller in the simulator: against every fixed batch, and with admission control under overload.

  python benchmarks/slo_controller.py batch --traces DIR     the controller against fixed batches, saturated
  python benchmarks/slo_controller.py overload --traces DIR  goodput from 0.5 to 5 times of capacity

`--traces` holds azure2023_conv.csv, azure2023_code.csv and mooncake_conversation.jsonl. The device is the linear model of
an 8B model on one H200, with 3% of noise; the controller starts from a prior that is wrong by up to a half and learns.
Lines of JSON on standard output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serving.scheduling.config import SchedulerConfig
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.schedule import StepLimits
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.slo_controller import SloController
from serving.scheduling.step_time import LinearStepTime, StepWork
from serving.scheduling.targets import ServiceTargets
from serving.simulation.results import RunResult
from serving.simulation.simulator import Simulator
from serving.simulation.trace import TraceRequest, read_trace

TRACES = ("azure2023_conv.csv", "azure2023_code.csv", "mooncake_conversation.jsonl")
TPOT_S = (0.015, 0.025, 0.05)
FIXED = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PRIOR = LinearStepTime(
    base_s=3e-3, decode_row_s=10e-6, decode_kv_token_s=40e-9, prefill_token_s=14e-6, prefill_pair_s=0.6e-9
)


class NoisyStepTime:
    """The device: the linear model, each step times a log-normal number."""

    def __init__(self, seed: int = 0):
        self._model, self._rng = LinearStepTime(), np.random.default_rng(seed)

    def predict_s(self, work: StepWork) -> float:
        return self._model.predict_s(work) * float(np.exp(self._rng.normal(0.0, 0.03)))


def scheduler_config() -> SchedulerConfig:
    return SchedulerConfig(
        page_size=16,
        num_pages=900_000 // 16,
        decode_sizes=(8, 32, 64, 128, 256),
        max_model_len=131_072,
        prefill_token_buckets=(512, 1024, 2048, 4096),
        query_block=32,
        max_decode_steps=8,
        enable_prefix_caching=True,
    )


def controlled(targets: ServiceTargets) -> tuple[Simulator, SloController]:
    simulator = Simulator(Scheduler(scheduler_config()), NoisyStepTime())
    config = simulator.scheduler.config
    controller = SloController(
        simulator.scheduler, targets, OnlineStepTime(PRIOR, config.prefill_token_buckets)
    )
    simulator.limits, simulator.observe = controller.limits, controller.observe
    return simulator, controller


def fixed(batch: int, budget: int) -> Simulator:
    simulator = Simulator(Scheduler(scheduler_config()), NoisyStepTime())
    limits = StepLimits(max_prefill_tokens=budget, max_num_seqs=batch)
    simulator.limits = lambda now_s: limits
    return simulator


def good_rate(result: RunResult, tpot_s: float, start_s: float, end_s: float) -> float:
    """Requests a second that ended in [start_s, end_s) and met the target."""
    good = [
        r
        for r in result.requests
        if r.is_complete and r.last_token_s is not None and start_s <= r.last_token_s < end_s
        and (r.tpot_s is None or r.tpot_s <= tpot_s)
    ]
    return len(good) / (end_s - start_s)


def batch(traces: Path, seconds: float, names: list[str], tpots: list[float]) -> None:
    for name in names:
        requests = [dataclasses.replace(r, arrival_s=0.0) for r in read_trace(traces / name)[:6000]]
        requests = [r for r in requests if r.num_prompt_tokens + r.num_output_tokens < 131_072]
        results = {}
        for size in FIXED:
            for budget in (512, 1024, 4096):
                results[size, budget] = fixed(size, budget).run(requests, until_s=seconds)
        for tpot_s in tpots:
            targets = ServiceTargets(class_tpot_s=(tpot_s,))
            simulator, controller = controlled(targets)
            result = simulator.run(requests, until_s=seconds)
            start_s = seconds / 4
            rates = {key: good_rate(value, tpot_s, start_s, seconds) for key, value in results.items()}
            best = max(rates, key=lambda key: rates[key])
            ours = good_rate(result, tpot_s, start_s, seconds)
            ended = [r for r in result.requests if r.is_complete and r.last_token_s is not None and r.last_token_s >= start_s]
            figures = {
                "trace": name,
                "tpot_ms": tpot_s * 1e3,
                "best_fixed": best,
                "best_rps": round(rates[best], 3),
                "rps": round(ours, 3),
                "share": round(ours / max(rates[best], 1e-9), 3),
                "attainment": round(sum(r.tpot_s is None or r.tpot_s <= tpot_s for r in ended) / max(len(ended), 1), 3),
                "batch": controller.plan.max_num_seqs,
                "tpot_share": round(controller.tpot_share, 3),
                "error": round(controller.step_time.relative_error, 4),
                "wall_s": round(result.wall_s, 1),
                "steps": result.stats.num_steps,
                "preemptions": result.stats.num_preemptions,
            }
            print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("batch", "overload"))
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the virtual clock")
    parser.add_argument("--trace", action="append", choices=TRACES, help="only these; repeatable")
    parser.add_argument("--tpot", type=float, action="append", help="seconds; repeatable")
    args = parser.parse_args()
    batch(args.traces, args.seconds, args.trace or list(TRACES), args.tpot or list(TPOT_S))


if __name__ == "__main__":
    main()
