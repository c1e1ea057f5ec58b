"""A simulated device: steps take a fixed time in which the host is free, as on an accelerator, and give made-up tokens.

For looking at what the host costs where there is no accelerator: schedules, pages, text and doors are the real ones, and a
step's input is packed, but nothing is computed or sent. Not for `logprobs`, constraints, penalties or prompts' log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from serving.engine import Engine
from serving.execution.model_runner import PendingStep
from serving.execution.programs import InputLayout
from serving.scheduling.schedule import Schedule
from serving.scheduling.scheduler import NO_TOKEN


class SimulatedTokens:
    """Stands for a step's tokens on the device, there from `ready_s` of the monotonic clock on."""

    def __init__(self, tokens: np.ndarray, ready_s: float):
        self._tokens, self.ready_s = tokens, ready_s

    def is_ready(self) -> bool:
        return time.monotonic() >= self.ready_s

    def block_until_ready(self) -> None:
        time.sleep(max(self.ready_s - time.monotonic(), 0.0))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.block_until_ready()
        return self._tokens


class SimulatedDevice:
    """Takes the place of the engine's device: one step after another, `step_s` for each decode step or prefill."""

    def __init__(self, engine: Engine, step_s: float):
        config = engine.config
        self._step_s = step_s
        self._free_s = 0.0  # when all that was dispatched has run
        self._num_left = np.zeros(config.max_num_seqs, np.int64)  # tokens to the end by length, of each slot
        self._layouts = {
            size: InputLayout(config.max_num_seqs, size, config.query_block)
            for size in (0, *config.prefill_token_buckets)
        }
        engine.runner.dispatch = self.dispatch  # type: ignore[method-assign]

    def dispatch(self, schedule: Schedule, masks: Sequence[Any] = ()) -> PendingStep:
        self._layouts[schedule.prefill_bucket].pack(schedule)
        left = self._num_left
        for move in schedule.moves:
            left[move.target] = left[move.source]
        for reset in schedule.resets:
            left[reset.slot] = reset.request.max_total_tokens - reset.request.num_tokens
        tokens = np.full((schedule.num_decode_steps, left.size), NO_TOKEN, np.int32)
        slots = np.array([slot for slot, _ in schedule.decode], np.int64)
        for step in range(schedule.num_decode_steps):
            self._sample(tokens[step], slots)
        self._sample(tokens[0], np.array([chunk.slot for chunk in schedule.prefill if chunk.samples], np.int64))
        self._free_s = max(self._free_s, time.monotonic()) + self._step_s * schedule.num_decode_steps
        output: Any = SimpleNamespace(tokens=SimulatedTokens(tokens, self._free_s))
        return PendingStep(schedule, output, with_logprobs=False)

    def _sample(self, tokens: np.ndarray, slots: np.ndarray) -> None:
        live = slots[self._num_left[slots] > 0]
        tokens[live] = ord("a") + (self._num_left[live] + live) % 26
        self._num_left[live] -= 1
