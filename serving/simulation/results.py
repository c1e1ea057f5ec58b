"""What a simulated run brought: every request, and their summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.scheduling.scheduler import SchedulerStats

PERCENTILES = (50, 90, 99)


@dataclass(kw_only=True, slots=True)
class RequestResult:
    """One request as its client saw it. Times in seconds from the start of the run."""

    index: int  # in the trace
    arrival_s: float
    class_name: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int  # wanted
    refused: str | None = None  # why it was not admitted
    retry_after_s: float | None = None  # what a refused client was told
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0  # that came
    max_gap_s: float = 0.0  # the longest time between two reads that brought it tokens
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None  # None: refused, or unfinished when the run ended

    @property
    def is_complete(self) -> bool:
        return self.num_tokens >= self.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """Whether it was answered in full, within both targets."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        return (
            self.is_complete
            and ttft_s is not None
            and (slo.ttft_s is None or ttft_s <= slo.ttft_s)
            and (slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s)
        )


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Latency targets in seconds; None: any latency will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None


type Slos = Callable[[RequestResult], Slo]  # the targets of a request


@dataclass(kw_only=True)
class RunResult:
    """A whole run. `duration_s` and `busy_s` are of the virtual clock; the others are what simulating them took."""

    requests: list[RequestResult]
    stats: SchedulerStats
    duration_s: float  # from the first arrival to the last read
    busy_s: float  # in which the device ran
    wall_s: float
    cpu_s: float  # of the processor, which other processes do not stretch
    hit_rate: float = field(init=False)  # prompt tokens found in the prefix cache, of those looked up

    def __post_init__(self) -> None:
        self.hit_rate = self.stats.num_prefix_hit_tokens / max(self.stats.num_prefix_query_tokens, 1)

    @property
    def arrivals_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def speed(self) -> float:
        """Virtual seconds that a second of a processor simulates."""
        return self.duration_s / max(self.cpu_s, 1e-9)

    def summary(self, slos: Slos | None = None) -> dict[str, Any]:
        """The figures of the run and of its requests, as `summarise` gives them."""
        stats = self.stats
        return {
            **summarise(self.requests, self.duration_s, slos, self.arrivals_s),
            "hit_rate": round(self.hit_rate, 4),
            "preemptions_a_request": round(stats.num_preemptions / max(len(self.requests), 1), 4),
            "device_busy": round(self.busy_s / max(self.duration_s, 1e-9), 4),
            "steps": stats.num_steps,
            "duration_s": round(self.duration_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "speed": round(self.speed, 1),
        }

    def groups(self, key: Callable[[RequestResult], str]) -> dict[str, list[RequestResult]]:
        """The requests by `key`, such as class or tenant, in order of their names."""
        groups: dict[str, list[RequestResult]] = {}
        for request in self.requests:
            groups.setdefault(key(request), []).append(request)
        return dict(sorted(groups.items()))


def summarise(
    requests: Sequence[RequestResult], duration_s: float, slos: Slos | None = None, arrivals_s: float = 0.0
) -> dict[str, Any]:
    """Percentiles of TTFT and TPOT over the requests that have them, in ms, beside what was completed.

    Goodput counts the requests that were answered in full within their targets, a second of `duration_s`, and as
    `good_arrivals_rps` a second of `arrivals_s`, in which they came: the end of a short run, while the last are
    answered and nobody comes, does not count against it. Attainment is their share of all requests, refused ones
    included, and `admitted_attainment` without them.
    """
    figures: dict[str, Any] = {
        "requests": len(requests),
        "complete": sum(request.is_complete for request in requests),
        "refused": sum(request.refused is not None for request in requests),
    }
    for name, values_s in (
        ("ttft_ms", [r.ttft_s for r in requests if r.ttft_s is not None]),
        ("tpot_ms", [r.tpot_s for r in requests if r.tpot_s is not None]),
        ("max_gap_ms", [r.max_gap_s for r in requests if r.num_tokens > 1]),
    ):
        for percentile in PERCENTILES:
            value = float(np.percentile(values_s, percentile)) * 1e3 if values_s else None
            figures[f"{name}_p{percentile}"] = None if value is None else round(value, 2)
    num_good = sum(request.meets(slos(request) if slos else Slo()) for request in requests)
    figures["goodput_rps"] = round(num_good / max(duration_s, 1e-9), 3)
    figures["good_arrivals_rps"] = round(num_good / max(arrivals_s or duration_s, 1e-9), 3)
    figures["attainment"] = round(num_good / max(len(requests), 1), 4)
    figures["admitted_attainment"] = round(num_good / max(len(requests) - figures["refused"], 1), 4)
    figures["output_tokens_per_s"] = round(sum(r.num_tokens for r in requests) / max(duration_s, 1e-9), 1)
    return figures
