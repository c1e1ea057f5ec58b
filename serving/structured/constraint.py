"""One completion's place in its grammar, and the tokens that may come next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.request import SamplingParams, StructuredOutput
from serving.structured.vocabulary import ModelTokenTable


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar. What llguidance finds out while it is followed is shared by all its matchers."""

    structured: StructuredOutput
    vocabulary: ModelTokenTable
    matcher: Any  # llguidance.LLMatcher at the start; copied, never advanced
    first_mask: np.ndarray  # [W] int32
    num_bytes: int  # that it took when it was compiled


def library_call(function: Callable[..., Any], *args: Any) -> Any:
    """What the call returns, or a text: what llguidance raised. Its panics are no Exception."""
    try:
        return function(*args)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return f"{type(error).__name__}: {error}"[:500]


class Constraint:
    """Follows one completion. After each token (`accept`) find the mask for the next one.

    `mask`: [W] int32, a bit for each token, lowest first, never empty unless `is_complete` or `error` is set.
    `is_complete`: nothing but an end of sequence can follow. `error`: why the completion cannot go on, for its client.
    """

    def __init__(self, grammar: Grammar, params: SamplingParams, stop_token_ids: Collection[int]):
        vocabulary = grammar.vocabulary
        self.grammar = grammar
        self.matcher = library_call(grammar.matcher.deep_copy)  # where it raised, a text: nothing of it works
        self.mask = np.zeros(vocabulary.mask_size, np.int32)
        self.is_complete = False
        self.error: str | None = None
        self._num_tokens = 0
        self._min_tokens = params.min_tokens
        self._eos = vocabulary.mask(vocabulary.eos_token_ids)
        self._stops = vocabulary.mask(stop_token_ids)
        self._usable = vocabulary.usable & ~vocabulary.mask(params.banned_token_ids)
        if params.allowed_token_ids is not None:
            self._usable &= vocabulary.mask(params.allowed_token_ids)
        if params.ignore_eos:
            self._usable &= ~self._eos
        self.take_mask(grammar.first_mask)

    def accept(self, token_id: int) -> None:
        """The completion goes on with this token."""
        if self.error is None and not self.is_complete:
            self._num_tokens += 1
            self._guard(self._accept, token_id)

    def find_mask(self) -> None:
        """Set `mask`, `is_complete` or `error` for the next token."""
        mask = np.zeros_like(self.mask)
        self._guard(self.matcher.unsafe_compute_mask_ptr, mask.ctypes.data, mask.nbytes)
        if self.error is None:
            self.take_mask(mask)

    def take_mask(self, mask: np.ndarray) -> None:
        """The same from a mask [W] int32 that llguidance computed."""
        self._guard(self._take_mask, mask)

    def _accept(self, token_id: int) -> None:
        if self.matcher.consume_token(token_id):
            self.is_complete = self.matcher.is_stopped() and self.matcher.is_accepting()
        else:
            self._fail(f"token {token_id} does not follow: {self.matcher.get_error()[:300]}")

    def _take_mask(self, mask: np.ndarray) -> None:
        if self.matcher.is_error():
            self._fail(self.matcher.get_error()[:300])
            return
        self.mask = mask & self._usable
        left = self.mask & ~self._eos
        if self._num_tokens < self._min_tokens:
            left &= ~self._stops  # the sampler holds them back
        if left.any():
            return
        if self.matcher.is_accepting():
            self.is_complete = True
        else:
            self._fail("no token is left by allowed_token_ids, banned_token_ids, stop tokens under min_tokens and it")

    def _guard(self, function: Callable[..., None], *args: Any) -> None:
        error = library_call(function, *args)
        if isinstance(error, str):
            self._fail(error)

    def _fail(self, reason: str) -> None:
        self.error = f"the structured output cannot go on after {self._num_tokens} tokens: {reason}"
