"""How long requests of late were, and so how long those that run will be."""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

NUM_RECENT = 512  # finished requests that lengths are known of
SORT_EVERY = 32  # finished requests
FORGET = 1 - 1 / 128  # what a finished request leaves of the weight of those before it
FIRST_OUTPUT_TOKENS = 256.0  # expected of an output before any was seen


class LengthStats:
    """Means over the requests of late. Outputs that have not ended count for what they have (the maximum-likelihood
    mean of censored exponential lengths: tokens over ends), so that a start with long outputs is not mistaken for
    short ones, which end first."""

    def __init__(self) -> None:
        self._output_tokens = FIRST_OUTPUT_TOKENS
        self._ends = 1.0
        self._prompt_tokens = self._computed_tokens = 0.0
        self._prompts = 0.0
        self._recent: deque[int] = deque(maxlen=NUM_RECENT)
        self._sorted: list[int] = []
        self._suffix: list[int] = [0]  # sums of self._sorted from each place on
        self._num_unsorted = 0

    @property
    def mean_output_tokens(self) -> float:
        return self._output_tokens / self._ends

    @property
    def mean_prompt_tokens(self) -> float:
        """Of requests that have ended."""
        return self._prompt_tokens / self._prompts if self._prompts else 0.0

    @property
    def mean_computed_tokens(self) -> float:
        """Of a prompt, without prefix hits."""
        return self._computed_tokens / self._prompts if self._prompts else 0.0

    def sampled(self, num_tokens: int) -> None:
        """Output tokens that came, of whatever request."""
        self._output_tokens += num_tokens

    def ended(self, num_prompt_tokens: int, num_computed_tokens: int, num_output_tokens: int) -> None:
        self._output_tokens *= FORGET
        self._ends = self._ends * FORGET + 1
        self._prompt_tokens = self._prompt_tokens * FORGET + num_prompt_tokens
        self._computed_tokens = self._computed_tokens * FORGET + num_computed_tokens
        self._prompts = self._prompts * FORGET + 1
        self._recent.append(num_output_tokens)
        self._num_unsorted += 1
        if self._num_unsorted >= SORT_EVERY or len(self._recent) <= SORT_EVERY:
            self._sort()

    def _sort(self) -> None:
        self._num_unsorted = 0
        self._sorted = sorted(self._recent)
        self._suffix = [0]
        for length in reversed(self._sorted):
            self._suffix.append(self._suffix[-1] + length)
        self._suffix.reverse()

    def remaining_tokens(self, num_output_tokens: int) -> float:
        """Output tokens still to come of a request that has so many: the mean over those of late that were longer."""
        index = bisect.bisect_right(self._sorted, num_output_tokens)
        num_longer = len(self._sorted) - index
        if num_longer < 4:  # longer than nearly all: nothing is known but that it goes on
            return self.mean_output_tokens
        return self._suffix[index] / num_longer - num_output_tokens

    def remaining_tokens_of(self, num_output_tokens: np.ndarray) -> np.ndarray:
        """`remaining_tokens` of each."""
        lengths = np.array(self._sorted, np.int64)
        index = np.searchsorted(lengths, num_output_tokens, side="right")
        num_longer = len(lengths) - index
        means = np.array(self._suffix, np.float64)[index] / np.maximum(num_longer, 1) - num_output_tokens
        return np.where(num_longer < 4, self.mean_output_tokens, means)

    def output_quantile(self, share: float) -> int:
        """So many output tokens, or fewer, had this share of the requests of late."""
        return self._sorted[int(share * len(self._sorted))] if self._sorted else 1
