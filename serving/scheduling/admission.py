"""Whether a request that comes now is taken: by how long it would wait for its first token.

The engine's thread publishes a `LoadSnapshot` each step; the doors decide on it in their own thread, in microseconds
and without a lock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from configs.scheduling import SchedulingConfig

LEARNING = 0.01  # what a new wait counts in the mean of them: long enough to remember how predictions swing
MARGIN = 0.9  # of the limit that is used
AT_RISK = 0.3  # of its limit: a request predicted to wait less says nothing of the predictions that decide
DEVIATIONS = 2.0  # standard ones, above the mean
MAX_RATIO = 10.0
MAX_RETRY_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSnapshot:
    """What stands before a newcomer, and how fast it goes. Rates are predictions."""

    time_s: float
    waiting_requests: tuple[int, ...]  # by class
    waiting_tokens: tuple[int, ...]  # by class
    waiting_pairs: tuple[int, ...]  # of their queries and keys, by class: what makes long prompts dear
    prefilling_tokens: int  # to compute of the prompts that have a slot
    num_running: int
    num_free_slots: int  # of those that may run
    free_kv_tokens: float  # places that those running will not come to need
    prefill_tokens_per_s: float  # now
    full_prefill_tokens_per_s: float  # once the batch is full
    pairs_a_token: float  # that the rates include
    pair_s: float  # of each one more
    ends_per_s: float  # requests, which give back a slot
    ended_kv_tokens: float  # places that each of them gives back
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """`wait_s`: predicted to the first token."""

    action: Literal["accept", "queue", "refuse"]
    wait_s: float
    limit_s: float = math.inf  # what it must not exceed
    own_s: float = 0.0  # of `wait_s`, what the prompt itself takes
    retry_after_s: int = 0  # of a refused one: predicted until it would be taken


def num_pairs(num_tokens: int) -> int:
    """Of a query and a key that it sees, in a prompt."""
    return num_tokens * (num_tokens + 1) // 2


def _more_pairs_s(snapshot: LoadSnapshot, num_tokens: int, pairs: int) -> float:
    return snapshot.pair_s * max(pairs - num_tokens * snapshot.pairs_a_token, 0.0)


def own_prefill_s(snapshot: LoadSnapshot, num_tokens: int) -> float:
    """Seconds that a prompt of `num_tokens` takes once it is its turn."""
    prefill_s = num_tokens / snapshot.prefill_tokens_per_s + _more_pairs_s(snapshot, num_tokens, num_pairs(num_tokens))
    return prefill_s + 2 * snapshot.step_s  # one in flight, and the last of its own


def predicted_wait_s(
    snapshot: LoadSnapshot, num_tokens: int, num_ahead: int, tokens_ahead: int, pairs_ahead: int = 0
) -> float:
    """Seconds to the first token of a prompt of `num_tokens`, with so many requests and their tokens to go before it:
    what takes longest of computing them, of slots and of pages to come free, and then its own prefill."""
    prefill_s = (snapshot.prefilling_tokens + tokens_ahead) / snapshot.full_prefill_tokens_per_s
    prefill_s += _more_pairs_s(snapshot, tokens_ahead, pairs_ahead)
    num_missing = num_ahead + 1 - snapshot.num_free_slots
    slots_s = num_missing / snapshot.ends_per_s if num_missing > 0 else 0.0
    missing_tokens = tokens_ahead + num_tokens - snapshot.free_kv_tokens
    pages_s = 0.0
    if missing_tokens > 0:
        pages_s = missing_tokens / (snapshot.ends_per_s * max(snapshot.ended_kv_tokens, 1.0))
    return max(prefill_s, slots_s, pages_s) + own_prefill_s(snapshot, num_tokens)


class AdmissionControl:
    """Decides on the newest snapshot and on what was taken since. Belongs to one thread, but `publish` to another."""

    def __init__(self, config: SchedulingConfig):
        self._config = config
        self._snapshot: LoadSnapshot | None = None
        self._taken: deque[tuple[float, int, int, int]] = deque()  # since then: time, class, requests, tokens
        self._mean_ratio, self._variance = 1.0, 0.02  # of waits and their predictions

    def publish(self, snapshot: LoadSnapshot) -> None:
        """Any thread: the next decision is made on it."""
        self._snapshot = snapshot

    def decide(self, priority: int, num_tokens: int, now_s: float, *, num_requests: int = 1) -> Decision:
        """On `num_requests` completions of prompts of `num_tokens` together; changes nothing."""
        config, snapshot = self._config, self._snapshot
        if snapshot is None:
            return Decision(action="accept", wait_s=0.0)
        class_index = config.class_of(priority)
        while self._taken and self._taken[0][0] <= snapshot.time_s:
            self._taken.popleft()
        num_ahead = sum(snapshot.waiting_requests[: class_index + 1])
        tokens_ahead = sum(snapshot.waiting_tokens[: class_index + 1])
        pairs_ahead = sum(snapshot.waiting_pairs[: class_index + 1])
        for _, other_index, count, tokens in self._taken:
            if other_index <= class_index:
                num_ahead += count
                tokens_ahead += tokens
                pairs_ahead += num_pairs(tokens)
        wait_s = predicted_wait_s(snapshot, num_tokens, num_ahead + num_requests - 1, tokens_ahead, pairs_ahead)
        limit_s = self._limit_s(class_index)
        excess_s = self.caution * wait_s - MARGIN * limit_s
        # An idle engine takes what it is given: nothing would be better later.
        is_idle = not num_ahead and not snapshot.num_running
        if excess_s > 0 and not is_idle:
            return Decision(
                action="refuse",
                wait_s=wait_s,
                limit_s=limit_s,
                own_s=own_prefill_s(snapshot, num_tokens),
                retry_after_s=min(max(math.ceil(excess_s), 1), MAX_RETRY_S),
            )
        return Decision(action="queue" if num_ahead else "accept", wait_s=wait_s, limit_s=limit_s)

    def take(self, priority: int, num_tokens: int, now_s: float, *, num_requests: int = 1) -> Decision:
        """`decide`, and unless it refuses count the request as one that later ones wait behind."""
        decision = self.decide(priority, num_tokens, now_s, num_requests=num_requests)
        if decision.action != "refuse":
            self._taken.append((now_s, self._config.class_of(priority), num_requests, num_tokens))
        return decision

    def learn(self, priority: int, predicted_s: float, waited_s: float) -> None:
        """A request that was taken with the prediction `predicted_s` got its first token after `waited_s`."""
        class_index = self._config.class_of(priority)
        if predicted_s < AT_RISK * self._limit_s(class_index):
            return
        ratio = min(waited_s / predicted_s, MAX_RATIO)
        difference = ratio - self._mean_ratio
        self._mean_ratio += LEARNING * difference
        self._variance += LEARNING * (difference**2 - self._variance)

    @property
    def caution(self) -> float:
        """Factor on predictions, learnt from how they came out: nearly all requests wait less than it says."""
        return max(self._mean_ratio + DEVIATIONS * math.sqrt(self._variance), 0.5)

    def _limit_s(self, class_index: int) -> float:
        return self._config.class_ttft_s[class_index] or self._config.max_queue_s
