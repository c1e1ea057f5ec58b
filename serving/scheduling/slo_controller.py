"""Decides each step how many prompt tokens it may take beside the decoding rows, and how many sequences may run.

The mean time of a request's output tokens (TPOT) is what was promised, so a request that is ahead of its target lends
what it has gained: a step may take as long as every running request can still make good. As many sequences run as end
the most requests a second and can be sustained: of B that run, B / O end in a step (O the mean output), each end brings
a prompt of P tokens to compute, and the steps with that share of prefill must meet the target on average.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from configs.scheduling import SchedulingConfig
from serving.request import Request
from serving.scheduling.admission import LoadSnapshot, num_pairs
from serving.scheduling.lengths import LengthStats
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.schedule import StepLimits
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.step_time import StepWork

REPLAN_STEPS = 16  # steps for which the running batch is decided
ROWS_A_STEP = 64  # of those that run, that a step can afford to look at
DEBT_SHARE = 0.05  # of requests may end before they have made good what they lent
TPOT_ATTAINMENT = 0.97  # of requests: the target is held lower while fewer meet it
LEARNING = 0.01  # of the target, for a request that missed it
MIN_SHARE = 0.5
POOL_SHARE = 0.97  # of the pages that running sequences may come to need by expectation
MAX_RISE = 1.15  # of the batch from one decision to the next
BATCH_STEP = 1.15  # between the batches that are compared
STAYING = 1.02  # how much better another batch must be
TIE = 1.005  # between rates that count as equal
MAX_NEW_SEQS = 8  # that a look at the pages lets in, once they are scarce: the next knows more
RATE_S = 3.0  # in which rates forget
LEAST_PREFILL = 0.1  # of steps carry prompts, however tight the target
FILLING = 0.85  # of the batch: below it, prompts come in as fast as targets allow, above it at the least cost


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the engine can sustain, by prediction."""

    max_num_seqs: int  # that meet the target with the prefill they need
    num_busy: float  # of them, that prefill keeps busy
    prefill_bucket: int  # that brings in the prompts of that batch at the least cost
    step_s: float  # mean of a step at that batch
    full_prefill_tokens_per_s: float  # beside the whole batch
    requests_per_s: float  # that end, and so can begin, at that batch


class SloController:
    """`limits` before each `schedule`, `observe` after each step was read. Pure arithmetic; one thread.

    step_time: corrected here by what is observed. Without a target of TPOT only pages and slots bound the batch.
    """

    def __init__(self, scheduler: Scheduler, targets: SchedulingConfig, step_time: OnlineStepTime):
        self.scheduler, self.targets, self.step_time = scheduler, targets, step_time
        self.lengths = LengthStats()
        self.tpot_share = 0.9  # of the target that is aimed at
        config = scheduler.config
        self.plan = Plan(
            max_num_seqs=config.max_num_seqs,
            num_busy=config.max_num_seqs,
            prefill_bucket=config.prefill_token_buckets[-1],
            step_s=0.0,
            full_prefill_tokens_per_s=math.inf,
            requests_per_s=math.inf,
        )
        scheduler.ended = []
        self._ended = scheduler.ended
        self._steps_to_look = 0
        self._classes: set[int] = set()  # of those that ran at the last look
        self._spare_s = math.inf  # until when the next step may last
        self._num_that_fit = config.max_num_seqs
        self._num_prefilling_tokens = 0  # to be dispatched of prompts that have a slot
        self._num_rows = 0  # that decode in the next step
        self._step_times: dict[tuple[int, int], float] = {}  # predicted since the last plan, by rows and bucket
        self._num_slots: dict[tuple[int, int], int] = {}  # of the program, by rows and bucket
        self._max_num_seqs = config.max_num_seqs
        self._free_kv_tokens = math.inf  # that those running will not come to need
        self._num_output_tokens = scheduler.stats.num_output_tokens
        self._steps_to_plan = 0
        self._mean_keys = 0.0  # that a decoding row reads
        self._pairs_a_token = 0.0  # of prefill
        self._pending_s = 0.0  # of the step that is in flight, as predicted when it was allowed
        self._horizon = 1
        self._tokens_per_s = 0.0  # output, of late
        self._counted_s: float | None = None
        self._num_interactive = 0  # running, with a target
        self._mean_interactive = 0.0  # of late

    # Observations

    def observe(self, work: StepWork, duration_s: float) -> None:
        """A step of this work took so long, as the host saw it."""
        self.step_time.observe(work, duration_s)
        if work.num_decode_rows:
            keys = work.decode_kv_tokens / (work.num_decode_rows * work.num_decode_steps)
            self._mean_keys += (keys - self._mean_keys) * (0.02 if self._mean_keys else 1.0)
        if work.num_prefill_tokens:
            pairs = work.prefill_kv_pairs / work.num_prefill_tokens
            self._pairs_a_token += (pairs - self._pairs_a_token) * (0.05 if self._pairs_a_token else 1.0)

    def _count_ended(self, now_s: float) -> None:
        num_output_tokens = self.scheduler.stats.num_output_tokens
        passed_s = 0.0 if self._counted_s is None else now_s - self._counted_s
        if passed_s > 0:
            rate = (num_output_tokens - self._num_output_tokens) / passed_s
            self._tokens_per_s += (rate - self._tokens_per_s) * -math.expm1(-passed_s / RATE_S)
        self._counted_s = now_s
        self.lengths.sampled(num_output_tokens - self._num_output_tokens)
        self._num_output_tokens = num_output_tokens
        for request in self._ended:
            if request.num_computed_tokens or request.num_output_tokens:
                self.lengths.ended(
                    request.num_prompt_tokens,
                    request.num_prompt_tokens - request.num_cached_tokens,
                    request.num_output_tokens,
                )
                self._learn_share(request)
        self._ended.clear()

    def _learn_share(self, request: Request) -> None:
        target_s = self.targets.class_tpot_s[self.targets.class_of(request.context.priority)]
        first_s, last_s = request.first_token_time_s, request.last_token_time_s
        if target_s and first_s is not None and last_s is not None and request.num_output_tokens > 1:
            is_met = last_s - first_s <= target_s * (request.num_output_tokens - 1)
            self.tpot_share += LEARNING * ((1 - TPOT_ATTAINMENT) if is_met else -TPOT_ATTAINMENT)
            self.tpot_share = min(max(self.tpot_share, MIN_SHARE), 1.0)

    # Limits

    def limits(self, now_s: float) -> StepLimits:
        self._count_ended(now_s)
        scheduler, targets = self.scheduler, self.targets
        if self._steps_to_plan <= 0:
            self._steps_to_plan = REPLAN_STEPS
            self._horizon = max(self.lengths.output_quantile(DEBT_SHARE), 1)
            self._step_times.clear()
            # Whoever runs now, the batch leaves room for the class with the tightest target.
            self.plan = self._make_plan(self._tightest_s(targets.class_tpot_s))
        self._steps_to_plan -= 1
        prompts = scheduler.prefilling_requests
        self._num_prefilling_tokens = sum(request.num_tokens - request.num_computed_tokens for request in prompts)
        self._num_rows = scheduler.num_running - len(prompts)
        decode_s = self._step_s(self._num_rows, 0) if self._num_rows else 0.0
        if self._steps_to_look <= 0:
            self._steps_to_look = scheduler.num_running // ROWS_A_STEP
            self._look(decode_s)
        else:
            self._steps_to_look -= 1
            self._spare_s += decode_s  # what each row that decodes has gained at least, where its target is no less
        max_prefill_tokens = self._prefill_tokens(prompts, decode_s, now_s)
        self._max_num_seqs = max_num_seqs = max(min(self.plan.max_num_seqs, self._num_that_fit), 1)
        max_background = None
        if targets.background_priority is not None:
            self._mean_interactive += (self._num_interactive - self._mean_interactive) * 0.01
            reserve = max(self._num_interactive, self._mean_interactive + 2 * math.sqrt(self._mean_interactive))
            max_background = max(max_num_seqs - math.ceil(reserve), 0)
        max_background_prefill_tokens = None
        if max_background is not None and targets.background_step_s:
            num_rows, max_background_prefill_tokens = self._background_limits()
            max_background = min(max_background, num_rows)
        return StepLimits(
            max_prefill_tokens=max_prefill_tokens,
            max_num_seqs=max_num_seqs,
            max_background_seqs=max_background,
            max_background_prefill_tokens=max_background_prefill_tokens,
            background_priority=targets.background_priority or 0,
        )

    def _look(self, decode_s: float) -> None:
        """Pass over all that runs."""
        targets, running = self.targets, self.scheduler.running_requests
        if len(targets.class_names) > 1:
            background = targets.background_priority
            priorities = [request.context.priority for request, _ in running]
            self._classes = {targets.class_of(priority) for priority in set(priorities)}
            if background is not None:
                self._num_interactive = sum(priority < background for priority in priorities)
        self._spare_s = self._find_spare_s(running, decode_s)
        self._num_that_fit = self._find_num_that_fit(running)

    @property
    def _target_s(self) -> float:
        """The tightest TPOT of those that run and wait; 0: none has one."""
        targets_s = self.targets.class_tpot_s
        if len(targets_s) > 1:
            num_waiting = self.scheduler.waiting_load.num_requests
            targets_s = tuple(s for i, s in enumerate(targets_s) if num_waiting[i] or i in self._classes)
        return self._tightest_s(targets_s)

    def _tightest_s(self, targets_s: Iterable[float]) -> float:
        """What is aimed at for the tightest of these targets, 0 those that are none. Never below `_least_s`."""
        target_s = min((s for s in targets_s if s), default=0.0)
        return max(target_s * self.tpot_share, self._least_s()) if target_s else 0.0

    def _least_s(self) -> float:
        """Mean step of one row that decodes while prompts come in slowly. A target below it would stop them for ever."""
        decode_s = self._step_s(1, 0)
        mixed_s = self._step_s(1, self.scheduler.config.prefill_token_buckets[0])
        return decode_s + LEAST_PREFILL * max(mixed_s - decode_s, 0.0)

    def _step_s(self, num_rows: int, bucket: int) -> float:
        """Of a step of so many rows of the usual context, beside a full bucket. As of the last plan."""
        key = num_rows, bucket
        seconds = self._step_times.get(key)
        if seconds is None:
            num_slots = self._num_slots.get(key)
            if num_slots is None:
                num_slots = self.scheduler.config.decode_size(num_rows, bucket) if num_rows else 0
                self._num_slots[key] = num_slots
            num_keys, num_pairs = num_rows * self._mean_keys, bucket * self._pairs_a_token
            seconds = self.step_time.pass_s(bucket, num_slots, num_keys, num_pairs)
            self._step_times[key] = seconds
        return seconds

    def _prefill_tokens(self, prompts: list[Request], decode_s: float, now_s: float) -> int:
        """The largest bucket with which every running request can still meet its target, by prediction; 0: none."""
        buckets = self.scheduler.config.prefill_token_buckets
        num_rows, target_s = self._num_rows, self._target_s
        has_prompts = bool(self._num_prefilling_tokens or self.scheduler.num_waiting)
        is_bound = bool(num_rows and target_s)
        allowed_s = self._spare_s - (now_s + self._pending_s) if is_bound else math.inf
        bucket, step_s = 0, decode_s
        if has_prompts:
            # A batch that is far from full has prompts come in fast; one that is full has them at the least cost.
            largest = self.plan.prefill_bucket
            if not is_bound:
                largest = buckets[-1]
            elif self.scheduler.num_running < FILLING * self.plan.num_busy:
                largest = self._fastest_bucket(num_rows, target_s)
            if self.targets.max_step_s:
                largest = min(largest, self._largest_bucket(prompts))
            for size in buckets:
                if size > largest:
                    break
                with_bucket_s = self._step_s(num_rows, size)
                if with_bucket_s > allowed_s:
                    break
                bucket, step_s = size, with_bucket_s
        self._pending_s = step_s
        return bucket if has_prompts else buckets[-1]

    def _largest_bucket(self, prompts: list[Request]) -> int:
        """That keeps `max_step_s` with a chunk of the prompt that is furthest on, or the smallest there is."""
        config, num_rows = self.scheduler.config, self._num_rows
        buckets = config.prefill_token_buckets
        if not num_rows:
            return buckets[-1]
        start = max((request.num_computed_tokens for request in prompts), default=0)
        num_seqs = min(self.scheduler.num_running + 1, config.max_num_seqs)  # with the one whose prompt it is
        num_keys = num_rows * self._mean_keys

        def step_s(bucket: int) -> float:
            num_slots = config.decode_size(num_seqs, bucket)
            return self.step_time.pass_s(bucket, num_slots, num_keys, bucket * start + num_pairs(bucket))

        return max((b for b in buckets if step_s(b) <= self.targets.max_step_s), default=buckets[0])

    def _background_limits(self) -> tuple[int, int]:
        """(sequences of background, prompt tokens of a step with them) that keep `background_step_s`. By themselves, so that
        they stay as many while others come and go."""
        most_s, config = self.targets.background_step_s, self.scheduler.config
        buckets = config.prefill_token_buckets

        def keeps(num_rows: int, bucket: int) -> bool:
            return self._step_s(num_rows, bucket) <= most_s

        num_rows = bisect.bisect_left(range(1, config.max_num_seqs + 1), True, key=lambda n: not keeps(n, buckets[0]))
        return num_rows, max((b for b in buckets if keeps(self._num_rows, b)), default=buckets[0])

    def _fastest_bucket(self, num_rows: int, target_s: float) -> int:
        """With which prompts come in fastest beside so many rows, in steps that meet the target on average; the largest
        of those that are about as fast."""
        rates = {
            bucket: self._prefill_rate(num_rows, (bucket,), target_s)
            for bucket in self.scheduler.config.prefill_token_buckets
        }
        return max(bucket for bucket, rate in rates.items() if rate >= max(rates.values()) / TIE)

    def _find_spare_s(self, running: list[tuple[Request, int]], decode_s: float) -> float:
        """Until when the next step may last, so that every request meets its target by its horizon.

        After the step in flight a request has had m tokens in t seconds; k more bring it to the horizon, or to the
        next token where it is beyond it. The next step and k - 1 that only decode must end by (m + k - 1) targets.
        """
        targets, horizon = self.targets, self._horizon
        target_of = [self._tightest_s((target_s,)) for target_s in targets.class_tpot_s]
        target_s = target_of[0]
        is_single = len(target_of) == 1
        least_s = math.inf
        if is_single and not target_s:
            return least_s
        for request, num_future_tokens in running:  # kept short
            first_s = request.first_token_time_s
            if first_s is None:
                continue
            if not is_single:
                target_s = target_of[targets.class_of(request.context.priority)]
                if not target_s:
                    continue
            num_tokens = num_future_tokens - len(request.prompt_token_ids)
            spare_s = target_s * num_tokens + first_s
            if num_tokens + 1 < horizon:
                spare_s += (horizon - num_tokens - 1) * (target_s - decode_s)
            if spare_s < least_s:
                least_s = spare_s
        return least_s

    # What others are told

    def snapshot(self, now_s: float) -> LoadSnapshot:
        """For admission, as of the last `limits`."""
        plan, lengths = self.plan, self.lengths
        load, num_running = self.scheduler.waiting_load, self.scheduler.num_running
        rate = plan.full_prefill_tokens_per_s
        if not self.scheduler.num_waiting and num_running < FILLING * plan.num_busy:
            buckets = self.scheduler.config.prefill_token_buckets
            rate = max(rate, self._prefill_rate(self._num_rows, buckets, self._target_s))
        return LoadSnapshot(
            time_s=now_s,
            waiting_requests=tuple(load.num_requests),
            waiting_tokens=tuple(load.num_tokens),
            waiting_pairs=tuple(load.num_pairs),
            prefilling_tokens=self._num_prefilling_tokens,
            num_running=num_running,
            num_free_slots=max(self._max_num_seqs - num_running, 0),
            free_kv_tokens=self._free_kv_tokens,
            prefill_tokens_per_s=max(rate, 1e-9),
            full_prefill_tokens_per_s=max(plan.full_prefill_tokens_per_s, 1e-9),
            pairs_a_token=self._pairs_a_token,
            pair_s=self.step_time.pair_s,
            ends_per_s=max(plan.requests_per_s, 1e-9),
            ended_kv_tokens=lengths.mean_prompt_tokens + lengths.mean_output_tokens,
            step_s=plan.step_s,
        )

    def saturation(self) -> dict[str, float]:
        """How much of what can be sustained is used, 0 to 1, by what would run out; the largest is what does.

        compute: output tokens a second of late, of those that the planned batch would bring; slots: that have a
        sequence, of those that may; pages: that those running will come to need, by expectation.
        """
        config, plan = self.scheduler.config, self.plan
        pool_tokens = (config.num_pages - 1) * config.page_size
        planned = plan.num_busy / plan.step_s if plan.step_s else math.inf
        num_running = self.scheduler.num_running
        return {
            "compute": min(self._tokens_per_s / planned, 1.0) if num_running else 0.0,
            "slots": min(num_running / self._max_num_seqs, 1.0),
            "pages": min(max(1 - self._free_kv_tokens / pool_tokens, 0.0), 1.0) if num_running else 0.0,
        }

    # The running batch

    def _make_plan(self, target_s: float) -> Plan:
        """The batch and bucket that end the most requests a second within the target. What there is stays while it is
        nearly as good, so that noise does not move it. Of batches that are as good the largest: a sequence that ends
        should find another that is ready."""
        config = self.scheduler.config
        largest, buckets = config.max_num_seqs, config.prefill_token_buckets
        # Up by little and little: what was learnt of small batches may not hold for large ones.
        highest = min(largest, math.ceil(MAX_RISE * max(self.plan.max_num_seqs, 8))) if target_s else largest
        best_rate, best_rows, best_bucket = 0.0, 1, buckets[0]
        for bucket in buckets:
            for num_rows in {*self._batches(highest), self.plan.max_num_seqs}:
                num_busy, step_s = self._sustained(num_rows, bucket)
                if target_s and step_s > target_s:
                    continue
                rate = num_busy / step_s
                if num_rows >= self.plan.max_num_seqs and bucket == self.plan.prefill_bucket:
                    rate *= STAYING
                if rate > TIE * best_rate or (rate > best_rate / TIE and num_rows > best_rows):
                    best_rate, best_rows, best_bucket = rate, num_rows, bucket
        num_busy, step_s = self._sustained(best_rows, best_bucket)
        # Beyond what keeps the bucket full there is nothing to gain, and a target to lose.
        best_rows = min(best_rows, math.ceil(1.25 * num_busy + 2 * math.sqrt(num_busy))) if target_s else largest
        outputs = max(self.lengths.mean_output_tokens, 1.0)
        return Plan(
            max_num_seqs=best_rows,
            num_busy=num_busy,
            prefill_bucket=best_bucket,
            step_s=step_s,
            full_prefill_tokens_per_s=self._prefill_rate(round(num_busy), (best_bucket,), target_s),
            requests_per_s=num_busy / (outputs * step_s),
        )

    def _batches(self, highest: int) -> list[int]:
        """Batches to choose from: each program's size, and some between them."""
        sizes = {size for size in self.scheduler.config.decode_sizes if size <= highest}
        sizes |= {
            min(round(BATCH_STEP**power), highest) for power in range(math.ceil(math.log(highest, BATCH_STEP)) + 1)
        }
        return sorted(sizes)

    def _sustained(self, num_rows: int, bucket: int) -> tuple[float, float]:
        """(rows that are busy, mean seconds of a step) when `num_rows` sequences may run, and what ends is replaced
        through steps that carry a full bucket. Fewer are busy where every step does and still too few come in."""
        prompts_a_row = self.lengths.mean_computed_tokens / max(self.lengths.mean_output_tokens, 1.0)
        num_busy = min(float(num_rows), bucket / prompts_a_row) if prompts_a_row else float(num_rows)
        share = num_busy * prompts_a_row / bucket
        rows = max(math.ceil(num_busy), 1)
        decode_s = self._step_s(rows, 0)
        return num_busy, decode_s + share * (self._step_s(rows, bucket) - decode_s)

    def _prefill_rate(self, num_rows: int, buckets: Iterable[int], target_s: float) -> float:
        """Prompt tokens a second beside so many rows, with the best of the buckets, in steps that meet the target on
        average."""
        decode_s = self._step_s(num_rows, 0) if num_rows else 0.0
        best = 0.0
        for bucket in buckets:
            mixed_s = self._step_s(num_rows, bucket)
            share = 1.0
            if num_rows and target_s and mixed_s > target_s:
                share = max(target_s - decode_s, 0.0) / (mixed_s - decode_s)
            best = max(best, share * bucket / (share * mixed_s + (1 - share) * decode_s))
        return best

    def _find_num_that_fit(self, running: list[tuple[Request, int]]) -> int:
        """Sequences that may run so that pages last, by expectation, until they end.

        The most tokens that those running come to hold is found as in Gong et al. 2025 (Past-Future scheduler):
        at the end of each, in order of the ends, those left have grown by as many tokens as it had to go.
        """
        config, lengths = self.scheduler.config, self.lengths
        pool_tokens = POOL_SHARE * (config.num_pages - 1) * config.page_size
        new_remaining = lengths.remaining_tokens(0)
        held_tokens = sum(num_tokens for _, num_tokens in running)
        self._free_kv_tokens = pool_tokens - held_tokens - len(running) * new_remaining
        if not running or self._free_kv_tokens > 0.5 * pool_tokens:
            return config.max_num_seqs
        load = self.scheduler.waiting_load
        new_tokens = lengths.mean_prompt_tokens
        if any(load.num_requests):
            new_tokens = sum(load.num_tokens) / sum(load.num_requests)
        tokens = np.array([num_tokens for _, num_tokens in running])
        outputs = tokens - np.array([len(request.prompt_token_ids) for request, _ in running])
        most = np.array([request.max_total_tokens for request, _ in running]) - tokens
        remaining = np.minimum(lengths.remaining_tokens_of(outputs), most)
        order = np.argsort(-remaining)  # the last to end first
        remaining, held = remaining[order], np.cumsum(tokens[order])
        peaks = held + np.arange(1, len(running) + 1) * remaining
        self._free_kv_tokens = pool_tokens - float(peaks.max())
        # Newcomers end after the first `place` of them, and add to every peak from their own on.
        place = int((remaining >= new_remaining).sum())
        if place and peaks[:place].max() > pool_tokens:
            return len(running)
        held_before = float(held[place - 1]) if place else 0.0
        num_more = (pool_tokens - held_before - place * new_remaining) / (new_tokens + new_remaining)
        if place < len(running):
            slack = (pool_tokens - peaks[place:]) / (new_tokens + remaining[place:])
            num_more = min(num_more, float(slack.min()))
        return len(running) + min(max(math.floor(num_more), 0), MAX_NEW_SEQS)
