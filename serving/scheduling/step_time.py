"""What a step has to do, in counts, and how long that takes.

A step-time model is anything with `predict_s(work)`; `LinearStepTime` is the one with fixed coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from configs.checks import check_float
from serving.scheduling.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """One dispatch in counts. Those of the program are paid whoever is in it; those of rows and tokens are live."""

    num_decode_slots: int = 0  # of the program
    num_decode_rows: int = 0  # slots that decode
    num_decode_steps: int = 1  # forward passes
    decode_kv_tokens: int = 0  # keys that decoding rows read, summed over rows and steps
    prefill_bucket: int = 0  # of the program, tokens
    num_prefill_tokens: int = 0
    prefill_kv_pairs: int = 0  # of a chunk's query and a key that it sees, summed over the queries

    @classmethod
    def of(cls, schedule: Schedule) -> StepWork:
        """The work of a schedule. Only right after `schedule()` gave it: the next one moves its requests on.

        A row that reaches its last token within the dispatch is counted as if it ran all the steps.
        """
        num_rows, num_steps = len(schedule.decode), schedule.num_decode_steps
        # A row's last query sees the num_computed_tokens keys that the dispatch leaves, each earlier query one less.
        num_keys = num_steps * sum(request.num_computed_tokens for _, request in schedule.decode)
        num_tokens = num_pairs = 0
        for chunk in schedule.prefill:
            length = len(chunk.token_ids)
            num_tokens += length
            num_pairs += length * chunk.start + length * (length + 1) // 2
        return cls(
            num_decode_slots=schedule.num_decode_slots,
            num_decode_rows=num_rows,
            num_decode_steps=num_steps,
            decode_kv_tokens=num_keys - num_rows * num_steps * (num_steps - 1) // 2,
            prefill_bucket=schedule.prefill_bucket,
            num_prefill_tokens=num_tokens,
            prefill_kv_pairs=num_pairs,
        )


class StepTimeModel(Protocol):
    """Predicts the seconds that a dispatch takes on the device."""

    def predict_s(self, work: StepWork) -> float: ...


@dataclass(frozen=True, kw_only=True)
class LinearStepTime:
    """Step time from fixed coefficients, all in seconds. Raises ConfigError on a negative one.

    Each forward pass takes the longer of reading the weights and multiplying the prompt tokens with them (the
    roofline of Williams et al. 2009 for the matrix products), and on top of it what its rows, keys and pairs take.
    The defaults fit an 8B model in bf16 on one H200: decode steps of 4.5, 10.3, 16.9 and 22 ms for 1 x 1,024,
    128 x 1,024, 256 x 1,024 and 128 x 4,096 rows x keys within 5%, and 42,000 tokens/s for prompts of 4,096 tokens.
    """

    base_s: float = 4.45e-3  # weights read once, and what every pass costs
    decode_row_s: float = 15.5e-6  # a slot of the program: its sampling above all
    decode_kv_token_s: float = 29.75e-9  # a key and value read: 131,072 bytes at 4.4 TB/s
    prefill_token_s: float = 21.75e-6  # a token place of the bucket
    prefill_pair_s: float = 1e-9  # a query times a key and a value, in all layers: 524,288 FLOPs at 524 TFLOP/s

    def __post_init__(self) -> None:
        for field in fields(self):
            check_float(self, field.name, minimum=0.0)

    def predict_s(self, work: StepWork) -> float:
        """Seconds of one dispatch."""
        products_s = max(self.base_s, self.prefill_token_s * work.prefill_bucket)
        return (
            work.num_decode_steps * (products_s + self.decode_row_s * work.num_decode_slots)
            + self.decode_kv_token_s * work.decode_kv_tokens
            + self.prefill_pair_s * work.prefill_kv_pairs
        )
