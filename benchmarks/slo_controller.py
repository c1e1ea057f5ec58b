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
from pathlib import Path

import numpy as np

from configs.scheduling import SchedulingConfig
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.schedule import StepLimits
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step_time import LinearStepTime, StepWork
from serving.simulation.control import SimulatedControl
from serving.simulation.results import RunResult, Slo
from serving.simulation.simulator import Simulator
from serving.simulation.trace import arrivals, read_trace

TRACES = ("azure2023_conv.csv", "azure2023_code.csv", "mooncake_conversation.jsonl")
TPOT_S = (0.015, 0.025, 0.05)
FACTORS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0)
FIXED = (4, 8, 16, 32, 64, 96, 128, 256)


class NoisyStepTime:
    """The device: the linear model, each step times a log-normal number."""

    def __init__(self, seed: int = 0):
        self._model, self._rng = LinearStepTime(), np.random.default_rng(seed)

    def predict_s(self, work: StepWork) -> float:
        return self._model.predict_s(work) * float(np.exp(self._rng.normal(0.0, 0.03)))


def scheduler_config(policy: SchedulingConfig) -> SchedulerConfig:
    return SchedulerConfig(
        policy=policy,
        page_size=16,
        num_pages=900_000 // 16,
        decode_sizes=(8, 32, 64, 128, 256),
        max_model_len=131_072,
        prefill_token_buckets=(512, 1024, 2048, 4096),
        query_block=32,
        max_decode_steps=8,
        enable_prefix_caching=True,
    )


def controlled(policy: SchedulingConfig) -> tuple[Simulator, SimulatedControl]:
    simulator = Simulator(Scheduler(scheduler_config(policy)), NoisyStepTime())
    return simulator, SimulatedControl(simulator, LinearStepTime())


def fixed(batch: int, budget: int) -> Simulator:
    simulator = Simulator(Scheduler(scheduler_config(SchedulingConfig())), NoisyStepTime())
    limits = StepLimits(max_prefill_tokens=budget, max_num_seqs=batch)
    simulator.limits = lambda now_s: limits
    return simulator


def good_rate(result: RunResult, tpot_s: float, start_s: float, end_s: float) -> float:
    """Requests a second that ended in [start_s, end_s) and met the target."""
    good = [
        r
        for r in result.requests
        if r.is_complete
        and r.last_token_s is not None
        and start_s <= r.last_token_s < end_s
        and (r.tpot_s is None or r.tpot_s <= tpot_s)
    ]
    return len(good) / (end_s - start_s)


def batch(traces: Path, seconds: float, names: list[str], tpots: list[float], sizes: list[int]) -> None:
    for name in names:
        requests = [dataclasses.replace(r, arrival_s=0.0) for r in read_trace(traces / name)[:6000]]
        requests = [r for r in requests if r.num_prompt_tokens + r.num_output_tokens < 131_072]
        results = {}
        for size in sizes:
            for budget in (512, 1024):
                results[size, budget] = fixed(size, budget).run(requests, until_s=seconds)
        for tpot_s in tpots:
            simulator, control = controlled(SchedulingConfig(class_tpot_s=(tpot_s,), admission_control=False))
            controller = control.controller
            result = simulator.run(requests, until_s=seconds)
            start_s = seconds / 4
            rates = {key: good_rate(value, tpot_s, start_s, seconds) for key, value in results.items()}
            best = max(rates, key=lambda key: rates[key])
            ours = good_rate(result, tpot_s, start_s, seconds)
            ended = [
                r for r in result.requests if r.is_complete and r.last_token_s is not None and r.last_token_s >= start_s
            ]
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


def overload(traces: Path, seconds: float, names: list[str], factors: list[float], targets: SchedulingConfig) -> None:
    """Poisson arrivals of a trace's requests at `factors` of what the engine sustains, measured first."""
    ttft_s, tpot_s = targets.class_ttft_s[0], targets.class_tpot_s[0]
    for name in names:
        requests = [r for r in read_trace(traces / name) if r.num_prompt_tokens + r.num_output_tokens < 131_072]
        simulator, _ = controlled(dataclasses.replace(targets, admission_control=False))
        at_once = [dataclasses.replace(r, arrival_s=0.0) for r in (requests * 2)[: int(60 * seconds)]]
        capacity = good_rate(simulator.run(at_once, until_s=1.5 * seconds), tpot_s, seconds / 2, 1.5 * seconds)
        for factor in factors:
            times_s = arrivals(int(capacity * factor * seconds), capacity * factor)
            offered = [
                dataclasses.replace(requests[i % len(requests)], arrival_s=time_s) for i, time_s in enumerate(times_s)
            ]
            simulator, control = controlled(targets)
            assert control.admission is not None
            result = simulator.run(offered)
            start_s = seconds / 4
            taken = [r for r in result.requests if r.refused is None and r.arrival_s >= start_s]
            good = [r for r in taken if r.meets(Slo(ttft_s=ttft_s, tpot_s=tpot_s))]
            figures = {
                "trace": name,
                "offered": factor,
                "capacity_rps": round(capacity, 3),
                "goodput_rps": round(len(good) / (seconds - start_s), 3),
                "of_capacity": round(len(good) / (seconds - start_s) / capacity, 3),
                "attainment": round(len(good) / max(len(taken), 1), 4),
                "ttft_met": round(sum(r.meets(Slo(ttft_s=ttft_s)) for r in taken) / max(len(taken), 1), 4),
                "tpot_met": round(sum(r.meets(Slo(tpot_s=tpot_s)) for r in taken) / max(len(taken), 1), 4),
                "refused": sum(r.refused is not None for r in result.requests),
                "ttft_p50_p99_s": [round(float(np.percentile([r.ttft_s for r in taken], q)), 3) for q in (50, 99)],
                "caution": round(control.admission.caution, 2),
                "tpot_share": round(control.controller.tpot_share, 3),
                "decide_us": round(1e6 * control.decide_s / control.num_decided, 1),
                "preemptions": result.stats.num_preemptions,
                "wall_s": round(result.wall_s, 1),
            }
            print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("batch", "overload"))
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the virtual clock")
    parser.add_argument("--trace", action="append", choices=TRACES, help="only these; repeatable")
    parser.add_argument("--tpot", type=float, action="append", help="seconds; repeatable")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds")
    parser.add_argument("--fixed", type=int, action="append", help="batch to compare with; repeatable")
    parser.add_argument("--factor", type=float, action="append", help="of capacity; repeatable")
    args = parser.parse_args()
    names = args.trace or list(TRACES)
    if args.experiment == "batch":
        batch(args.traces, args.seconds, names, args.tpot or list(TPOT_S), args.fixed or list(FIXED))
    else:
        tpot_s = (args.tpot or [0.05])[0]
        targets = SchedulingConfig(class_ttft_s=(args.ttft,), class_tpot_s=(tpot_s,))
        overload(args.traces, args.seconds, names, args.factor or list(FACTORS), targets)


if __name__ == "__main__":
    main()
