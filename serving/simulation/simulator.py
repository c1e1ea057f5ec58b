"""A discrete-event simulator around the real scheduler: only the device, its tokens and the clock are made up.

It runs one step ahead as the engine does: step n + 1 is scheduled and dispatched before the tokens of step n are
read, and a request that arrives meanwhile waits for the next schedule. Lengths are the trace's: a request ends by its
max_total_tokens and never by a stop token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from serving.request import Request, RequestContext, RequestError, SamplingParams
from serving.scheduling.schedule import Schedule, StepLimits
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step_time import StepTimeModel, StepWork
from serving.scheduling.tenants import RateLimits
from serving.simulation.results import RequestResult, RunResult
from serving.simulation.trace import TraceRequest

HOST_S = 0.5e-3  # of scheduling, dispatching and reading a step
PROGRESS_INTERVAL = 256  # steps


# What a controller believes of the device before it has seen a step: wrong by up to a half.
@dataclass(slots=True)
class _InFlight:
    """A step that was dispatched and not read."""

    schedule: Schedule
    work: StepWork
    dispatched_s: float
    end_s: float  # when the device has run it


class Simulator:
    """Replays a trace through `scheduler`, which must be new, on a device that takes `step_time` for a step.

    host_s: seconds of the host for each step; what the device does meanwhile hides it.
    check_integrity: check the scheduler after every schedule and update; slow.

    Tenants are held to the rate limits of the scheduler's policy; for its SLO control see `control`.

    The hooks may be set before `run`:
    limits: now -> StepLimits or None, before each schedule; passed on to it.
    observe: the work of a step and the seconds it took as the host saw it, after its read.
    admit: a request and now -> None to take it, or the seconds after which a refused client may try again.
    progress: requests done, of all.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTimeModel,
        *,
        host_s: float = HOST_S,
        check_integrity: bool = False,
    ):
        self.scheduler = scheduler
        self.step_time = step_time
        self.host_s = host_s
        self.check_integrity = check_integrity
        self.limits: Callable[[float], StepLimits | None] | None = None
        self.observe: Callable[[StepWork, float], None] | None = None
        self.admit: Callable[[Request, float], float | None] | None = None
        self.progress: Callable[[int, int], None] | None = None
        self.now_s = 0.0
        self._busy_s = 0.0
        self._last_read_s = 0.0
        self._live: dict[str, tuple[Request, RequestResult]] = {}
        config = scheduler.config
        self._rate_limits = RateLimits(config.policy) if config.policy.has_rate_limits else None

    def run(self, trace: Sequence[TraceRequest], until_s: float | None = None) -> RunResult:
        """Replay `trace`, sorted by arrival, to its end or to `until_s` of the virtual clock, which leaves the rest
        unfinished."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        scheduler = self.scheduler
        results = [_result(index, request) for index, request in enumerate(trace)]
        num_arrived = 0
        pending: _InFlight | None = None
        self.now_s = self._last_read_s = device_free_s = trace[0].arrival_s if trace else 0.0
        while until_s is None or self.now_s < until_s:
            while num_arrived < len(trace) and trace[num_arrived].arrival_s <= self.now_s:
                self._arrive(trace[num_arrived], results[num_arrived])
                num_arrived += 1
            if self.progress is not None and scheduler.stats.num_steps % PROGRESS_INTERVAL == 0:
                self.progress(num_arrived - len(self._live), len(trace))
            schedule = self._schedule()
            if schedule is None and pending is not None:
                self._read(pending)
                pending = None
                schedule = self._schedule()
            following = None
            if schedule is not None:
                work = StepWork.of(schedule)
                seconds = self.step_time.predict_s(work)
                self.now_s += self.host_s
                device_free_s = max(self.now_s, device_free_s) + seconds
                self._busy_s += seconds
                following = _InFlight(schedule, work, self.now_s, device_free_s)
            elif pending is None:
                if num_arrived == len(trace):
                    break
                self.now_s = max(self.now_s, trace[num_arrived].arrival_s)
            if pending is not None:
                self._read(pending)
            pending = following
        for request, result in self._live.values():  # unfinished at `until_s`
            _close(request, result)
        self._live.clear()
        if self.progress is not None:
            self.progress(len(trace), len(trace))
        return RunResult(
            requests=results,
            stats=scheduler.stats,
            duration_s=self.now_s - trace[0].arrival_s if trace else 0.0,
            busy_s=self._busy_s,
            wall_s=time.perf_counter() - started_s,
            cpu_s=time.process_time() - started_cpu_s,
        )

    def _arrive(self, wanted: TraceRequest, result: RequestResult) -> None:
        index = result.index
        request = Request(
            request_id=str(index),
            prompt_token_ids=wanted.prompt(index),
            params=_PARAMS,
            max_total_tokens=wanted.num_prompt_tokens + wanted.num_output_tokens,
            context=_context(wanted),
            seed=index,
            arrival_time_s=wanted.arrival_s,
        )
        if self._rate_limits is not None:
            num_tokens = wanted.num_prompt_tokens
            wait_s = self._rate_limits.try_take(wanted.tenant, num_tokens=num_tokens, now_s=wanted.arrival_s)
            if wait_s:
                result.refused, result.retry_after_s = "rate limit", wait_s
                return
        retry_after_s = self.admit(request, self.now_s) if self.admit is not None else None
        if retry_after_s is not None:
            result.refused, result.retry_after_s = "overloaded", retry_after_s
            return
        try:
            self.scheduler.add(request)
        except RequestError as error:
            result.refused = str(error)
            return
        self._live[request.request_id] = request, result

    def _schedule(self) -> Schedule | None:
        limits = self.limits(self.now_s) if self.limits is not None else None
        schedule = self.scheduler.schedule(self.now_s, limits)
        for request in self.scheduler.take_expired():
            _close(*self._live.pop(request.request_id))
        if self.check_integrity:
            self.scheduler.check_integrity()
        if schedule is not None:
            for reset in schedule.resets:
                if reset.request.first_scheduled_time_s is None:
                    reset.request.first_scheduled_time_s = self.now_s
        return schedule

    def _read(self, step: _InFlight) -> None:
        self.now_s = max(self.now_s, step.end_s)
        started_s = max(step.dispatched_s, self._last_read_s)
        self._last_read_s = self.now_s
        events = self.scheduler.update(step.schedule, _tokens(step.schedule))
        if self.check_integrity:
            self.scheduler.check_integrity()
        if self.observe is not None:
            self.observe(step.work, self.now_s - started_s)
        for event in events:
            request, result = self._live[event.request.request_id]
            if event.new_token_ids:
                if self._rate_limits is not None:
                    self._rate_limits.take_output(result.tenant, len(event.new_token_ids), self.now_s)
                if result.last_token_s is None:
                    result.first_token_s = request.first_token_time_s = self.now_s
                else:
                    result.max_gap_s = max(result.max_gap_s, self.now_s - result.last_token_s)
                result.last_token_s = request.last_token_time_s = self.now_s
            if event.finished:
                request.finish_time_s = self.now_s
                _close(request, result)
                del self._live[request.request_id]


_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


def _context(wanted: TraceRequest) -> RequestContext:
    deadline_s = None if wanted.timeout_s is None else wanted.arrival_s + wanted.timeout_s
    return RequestContext(tenant=wanted.tenant, priority=wanted.priority, deadline_s=deadline_s)


def _result(index: int, wanted: TraceRequest) -> RequestResult:
    return RequestResult(
        index=index,
        arrival_s=wanted.arrival_s,
        class_name=wanted.class_name,
        tenant=wanted.tenant,
        priority=wanted.priority,
        num_prompt_tokens=wanted.num_prompt_tokens,
        num_output_tokens=wanted.num_output_tokens,
    )


def _close(request: Request, result: RequestResult) -> None:
    result.num_tokens = request.num_output_tokens
    result.num_preemptions = request.num_preemptions
    result.num_cached_tokens = request.num_cached_tokens
    result.finish_reason = None if request.finish_reason is None else str(request.finish_reason)


def _tokens(schedule: Schedule) -> np.ndarray:
    """What the step samples: a token id that no other request samples. Int32 [num_decode_steps, slots]."""
    rows = [*schedule.decode, *((chunk.slot, chunk.request) for chunk in schedule.prefill)]
    tokens = [0] * (max(slot for slot, _ in rows) + 1)
    for slot, request in rows:
        tokens[slot] = request.seed
    return np.array([tokens] * schedule.num_decode_steps, np.int32)
