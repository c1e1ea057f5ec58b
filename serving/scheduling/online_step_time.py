"""A step-time model that starts from a prior and learns from the steps that ran."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serving.scheduling.step_time import StepTimeModel, StepWork

MEMORY_STEPS = 400  # a step counts for half after ln 2 times as many
PRIOR_STEPS = 0.05  # what the prior weighs, in steps: it decides only what the steps do not show
TOLERANCE = 4.0  # median errors that a step may be off and count in full
MIN_TOLERANCE = 0.1  # however exact the others were, a step this far off, as a share of it, counts in full
MEDIAN_STEP = 1.08
MIN_S = 1e-9
DRIFT_STEPS, DRIFT = 16, 0.05  # so many steps in a row that took more, or less, by this share: all costs have changed
SOLVE_EVERY = 8  # steps, once so many were seen: a coefficient hardly moves in between


class OnlineStepTime:
    """Seconds of a dispatch as a sum of non-negative costs: of a pass over each prefill bucket (0: decode alone), of a
    slot of the program, of a key read and of a pair scored.

    A cost for each bucket, and not for each token, since the buckets are the programs that there are: what a roofline
    bends, or a kernel does better at one size, is in its own number. Costs are factors on those of `prior`, found by
    least squares on relative errors with exponential forgetting (Haykin, Adaptive Filter Theory, recursive least
    squares), held at the ratio that all steps show together where no step tells (ridge). A step far off
    (a compilation, a pause of the host) counts by Huber's weights; where most steps are off, the tolerance widens and
    they count again. Where step after step is off to one side, all costs, and all that was seen, are scaled at once:
    the machine's clock has changed.
    """

    def __init__(self, prior: StepTimeModel, prefill_buckets: Sequence[int]):
        self._columns = {bucket: index for index, bucket in enumerate((0, *prefill_buckets))}
        empty_s = prior.predict_s(StepWork(num_decode_steps=1))

        def marginal(**counts: int) -> float:
            # over many, so that a flat foot of the roofline does not hide the slope
            many = {name: 1024 * count for name, count in counts.items()}
            return max((prior.predict_s(StepWork(**many)) - empty_s) / 1024, 1e-12)

        passes_s = [prior.predict_s(StepWork(prefill_bucket=bucket)) for bucket in self._columns]
        slot_s = marginal(num_decode_slots=1)
        if slot_s <= 1e-12:
            slot_s = passes_s[0] / 1024
        self._prior_costs = [*passes_s, slot_s, marginal(decode_kv_tokens=1), marginal(prefill_kv_pairs=1)]
        size = len(self._prior_costs)
        self._matrix = np.zeros((size, size))
        self._vector = np.zeros(size)
        self._scale = 1.0  # of all steps together, on the prior
        self._costs = list(self._prior_costs)
        self._rows: list[list[float]] = []  # that are not in the matrix yet, as shares of the step's time, weighted
        self._roots: list[float] = []  # of their weights
        self._median_error = 0.3
        self._drift: list[float] = []  # log errors of the newest steps, all of one sign
        self.num_steps = 0

    @property
    def relative_error(self) -> float:
        """Half of the steps of late were nearer to their prediction, as a share of it."""
        return self._median_error

    @property
    def pair_s(self) -> float:
        """Seconds of a query times a key of prefill, in all layers."""
        return self._costs[-1]

    def _counts(self, work: StepWork) -> tuple[int, int, int, int, int]:
        column = self._columns.get(work.prefill_bucket, len(self._columns) - 1)
        num_slots = work.num_decode_slots * work.num_decode_steps
        return column, work.num_decode_steps, num_slots, work.decode_kv_tokens, work.prefill_kv_pairs

    def predict_s(self, work: StepWork) -> float:
        column, num_steps, num_slots, num_keys, num_pairs = self._counts(work)
        costs = self._costs
        seconds = costs[column] * num_steps + costs[-3] * num_slots + costs[-2] * num_keys + costs[-1] * num_pairs
        return max(seconds, MIN_S)

    def pass_s(self, bucket: int, num_slots: float, num_keys: float, num_pairs: float) -> float:
        """`predict_s` of one forward pass, whose counts may be means."""
        costs, column = self._costs, self._columns[bucket]
        return max(costs[column] + costs[-3] * num_slots + costs[-2] * num_keys + costs[-1] * num_pairs, MIN_S)

    def observe(self, work: StepWork, duration_s: float) -> None:
        """A dispatch of this work took so long. Durations that are not above 0 are passed over."""
        if not 0 < duration_s < math.inf:
            return
        predicted_s = self.predict_s(work)
        error = math.log(duration_s / predicted_s)
        self._follow_drift(error)
        error = abs(error)
        tolerance = max(TOLERANCE * self._median_error, MIN_TOLERANCE)
        weight = min(1.0, tolerance / max(error, 1e-9))
        # A running median: it steps up as often as down, whatever the size of an outlier.
        self._median_error *= MEDIAN_STEP if error > self._median_error else 1 / MEDIAN_STEP
        self._median_error = min(max(self._median_error, 1e-3), 10.0)
        column, num_steps, num_slots, num_keys, num_pairs = self._counts(work)
        costs = self._prior_costs
        row = [0.0] * len(costs)
        row[column] = costs[column] * num_steps
        row[-3], row[-2], row[-1] = costs[-3] * num_slots, costs[-2] * num_keys, costs[-1] * num_pairs
        log_ratio = math.log(duration_s / sum(row) / self._scale)
        rate = max(1 / (self.num_steps + 1), 0.01)
        self._scale *= math.exp(rate * min(max(log_ratio, -tolerance), tolerance))
        factor = math.sqrt(weight) / duration_s
        self._rows.append([factor * seconds for seconds in row])
        self._roots.append(math.sqrt(weight))
        self.num_steps += 1
        if self.num_steps <= 64 or self.num_steps % SOLVE_EVERY == 0:
            self._take_in()
            self._solve()

    def _take_in(self) -> None:
        """Add the newest steps to the normal equations."""
        forget = (1 - 1 / MEMORY_STEPS) ** len(self._rows)
        rows = np.array(self._rows)
        self._matrix = forget * self._matrix + rows.T @ rows
        self._vector = forget * self._vector + rows.T @ np.array(self._roots)
        self._rows.clear()
        self._roots.clear()

    def _follow_drift(self, error: float) -> None:
        if self._drift and (error > 0) != (self._drift[-1] > 0):
            self._drift.clear()
        self._drift.append(error)
        if len(self._drift) < DRIFT_STEPS:
            return
        shift = sorted(self._drift)[DRIFT_STEPS // 2]
        self._drift.clear()
        if abs(shift) > DRIFT:
            self._take_in()
            ratio = math.exp(shift)
            self._scale *= ratio
            self._matrix /= ratio**2
            self._vector /= ratio
            self._costs = [ratio * cost for cost in self._costs]

    def _solve(self) -> None:
        """Least squares with factors of at least 0: those that come out below are 0, and the others found again."""
        # the ridge is in the units of the matrix: what a step is to it that the cost makes up alone
        ridge = PRIOR_STEPS / max(self._scale, 1e-9) ** 2
        free = np.arange(len(self._prior_costs))
        factors = np.zeros(len(self._prior_costs))
        while len(free):
            matrix = self._matrix[np.ix_(free, free)] + ridge * np.eye(len(free))
            found = np.linalg.solve(matrix, self._vector[free] + ridge * self._scale)
            if (found >= 0).all():
                factors[free] = found
                break
            free = free[found >= 0]
        self._costs = (factors * np.array(self._prior_costs)).tolist()
