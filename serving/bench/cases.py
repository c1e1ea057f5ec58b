"""The work that is timed: sizes and seeds are shared with other engines' benchmarks. Imports no JAX."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.checks import ConfigError

type Case = tuple[int, int]  # sequences, prompt tokens of each
type Prompt = dict[str, list[int]]

DECODE_CASES: tuple[Case, ...] = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (128, 4096))
PREFILL_CASES: tuple[Case, ...] = ((1, 4096), (32, 2048))
DECODE_STEPS = 128
MIXED_REQUESTS = 512

DECODE_SEED = PREFILL_SEED = 0
BATCHING_SEED = 3
MIXED_SEED = 7
WARM_UP: Case = (4, 128)
WARM_UP_OUTPUT = 8
WARM_UP_SEED = 1


def prompts_of(rng: np.random.Generator, lengths: Sequence[int], vocab_size: int) -> list[Prompt]:
    """A prompt of random token ids for each length; a hundred ids at either end, often special, are left out."""
    return [{"prompt_token_ids": rng.integers(100, vocab_size - 100, int(n)).tolist()} for n in lengths]


def mixed_lengths(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """ShareGPT-like lengths: lognormal input (median about 500) and output (about 200), clipped; tokens."""
    num_input = np.clip(np.exp(rng.normal(6.2, 0.9, count)), 16, 4096).astype(int)
    num_output = np.clip(np.exp(rng.normal(5.3, 0.7, count)), 16, 1024).astype(int)
    return num_input, num_output


def read_lengths(path: str, count: int) -> list[tuple[int, int]]:
    """The first `count` rows of a CSV file with columns input_tokens and output_tokens. Raises ConfigError."""
    try:
        with Path(path).open(newline="") as file:
            rows = [(int(row["input_tokens"]), max(int(row["output_tokens"]), 2)) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--lengths={path}: {error!r}") from error
    if len(rows) < count:
        raise ConfigError(f"--num_requests={count}: {path} has {len(rows)} rows")
    return rows[:count]
