"""Requests with their arrival times: from files, made up, and changed in rate or extent."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.checks import ConfigError
from configs.scheduling import MIN_PRIORITY
from serving.request import DEFAULT_TENANT

BLOCK_TOKENS = 512  # prompt tokens that one of a trace's hash ids stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One request to come. Times in seconds from the start of the trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()  # one for each BLOCK_TOKENS prompt tokens; prompts share the blocks of equal ids
    class_name: str = "default"
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # the lower, the sooner
    timeout_s: float | None = None  # after its arrival; still queued then, it is dropped

    def prompt(self, unique_id: int) -> tuple[int, ...]:
        """Token ids that equal another request's as far as their hash ids do; without any, `unique_id` alone does.

        Only the first token of a block tells it from others: a page's hash chains over the pages before it.
        """
        if not self.hash_ids:
            return (unique_id, 1, *_ZEROS[: self.num_prompt_tokens - 2])[: self.num_prompt_tokens]
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens += (hash_id, 2, *_ZEROS[: BLOCK_TOKENS - 2])
        return tuple(tokens[: self.num_prompt_tokens])


_ZEROS = (0,) * 2**20

type Trace = Sequence[TraceRequest]


# Files


def read_trace(path: Path, *, requests_per_s: float | None = None, seed: int = 0) -> list[TraceRequest]:
    """The requests of a file, by arrival.

    A .csv has the columns arrival_ms, input_tokens and output_tokens, and may have priority and tenant; a .jsonl objects
    with the same fields and, if prompts share prefixes, hash_ids. A file without arrival_ms gets Poisson arrivals of `requests_per_s`.
    Raises ConfigError that names file, line and field.
    """
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
        first_line = 2
    elif path.suffix == ".jsonl":
        rows = [_json_object(path, number, line) for number, line in enumerate(path.read_text().splitlines(), start=1)]
        first_line = 1
    else:
        raise ConfigError(f"{path}: a trace is a .csv or a .jsonl file")
    if not rows:
        raise ConfigError(f"{path}: holds no requests")
    has_arrivals = "arrival_ms" in rows[0]
    if has_arrivals and requests_per_s is not None:
        raise ConfigError(f"requests_per_s={requests_per_s} is for traces without arrival_ms, which {path} has")
    if not has_arrivals and requests_per_s is None:
        raise ConfigError(f"{path}: has no arrival_ms: requests_per_s is needed")
    if requests_per_s is None:
        times_s = [_number(path, first_line + i, row, "arrival_ms") / 1e3 for i, row in enumerate(rows)]
    else:
        times_s = arrivals(len(rows), requests_per_s, seed=seed)
    requests = []
    for index, (row, arrival_s) in enumerate(zip(rows, times_s, strict=True)):
        line = first_line + index
        num_prompt_tokens = int(_number(path, line, row, "input_tokens", minimum=1))
        hash_ids = row.get("hash_ids", ())
        if hash_ids and len(hash_ids) != math.ceil(num_prompt_tokens / BLOCK_TOKENS):
            raise ConfigError(
                f"{path}:{line}: hash_ids has {len(hash_ids)} entries; input_tokens={num_prompt_tokens} "
                f"are {math.ceil(num_prompt_tokens / BLOCK_TOKENS)} blocks of {BLOCK_TOKENS}"
            )
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=int(_number(path, line, row, "output_tokens", minimum=1)),
                hash_ids=tuple(hash_ids),
                priority=int(_number(path, line, row, "priority", minimum=MIN_PRIORITY)) if "priority" in row else 0,
                tenant=str(row.get("tenant", DEFAULT_TENANT)),
            )
        )
    return sorted(requests, key=lambda request: request.arrival_s)


def _json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}:{line}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:{line}: must be a JSON object")
    return value


def _number(path: Path, line: int, row: dict[str, Any], field: str, minimum: float = 0.0) -> float:
    try:
        value = float(row[field])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}:{line}: {field} must be a number, got {row.get(field)!r}") from None
    if not minimum <= value < math.inf:
        raise ConfigError(f"{path}:{line}: {field} must be at least {minimum:g}, got {row[field]!r}")
    return value


# Made-up requests


def arrivals(count: int, requests_per_s: float, *, cv: float = 1.0, seed: int = 0, start_s: float = 0.0) -> list[float]:
    """`count` arrival times of a renewal process with gamma-distributed gaps, in seconds.

    cv: coefficient of variation of the gaps; 1 is a Poisson process, more is burstier, 0 evenly spaced.
    """
    if cv == 0.0:
        return [start_s + (i + 1) / requests_per_s for i in range(count)]
    shape = 1.0 / cv**2
    gaps_s = np.random.default_rng(seed).gamma(shape, 1.0 / (shape * requests_per_s), count)
    return (start_s + np.cumsum(gaps_s)).tolist()


@dataclass(frozen=True, kw_only=True)
class Load:
    """A stream of like requests: gamma arrivals, log-normal lengths."""

    requests_per_s: float
    prompt_tokens: int  # mean
    output_tokens: int  # mean
    length_cv: float = 0.0  # coefficient of variation of both lengths; 0: all equal the mean
    arrival_cv: float = 1.0  # of the gaps between arrivals; 1: Poisson
    start_s: float = 0.0
    class_name: str = "default"
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    timeout_s: float | None = None

    def requests(self, duration_s: float, seed: int) -> list[TraceRequest]:
        """Those that arrive before `duration_s`."""
        rng = np.random.default_rng(seed)
        expected = max(duration_s - self.start_s, 0.0) * self.requests_per_s
        count = int(expected + 10 * math.sqrt(expected) * max(self.arrival_cv, 1.0)) + 10  # enough, then cut
        times_s = arrivals(count, self.requests_per_s, cv=self.arrival_cv, seed=seed, start_s=self.start_s)
        times_s = [time_s for time_s in times_s if time_s < duration_s]
        prompts = self._lengths(rng, self.prompt_tokens, len(times_s))
        outputs = self._lengths(rng, self.output_tokens, len(times_s))
        return [
            TraceRequest(
                arrival_s=time_s,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                class_name=self.class_name,
                tenant=self.tenant,
                priority=self.priority,
                timeout_s=self.timeout_s,
            )
            for time_s, num_prompt_tokens, num_output_tokens in zip(times_s, prompts, outputs, strict=True)
        ]

    def _lengths(self, rng: np.random.Generator, mean: int, count: int) -> list[int]:
        sigma2 = math.log1p(self.length_cv**2)
        lengths = rng.lognormal(math.log(mean) - sigma2 / 2, math.sqrt(sigma2), count)
        return np.maximum(lengths.round(), 1).astype(int).tolist()


def mix(loads: Iterable[Load], duration_s: float, seed: int = 0) -> list[TraceRequest]:
    """The requests of several streams together, by arrival. Streams are independent of each other."""
    return merge(load.requests(duration_s, seed=seed * 1000 + index) for index, load in enumerate(loads))


# Changes


def merge(traces: Iterable[Trace]) -> list[TraceRequest]:
    """Several traces as one, by arrival."""
    return sorted((request for trace in traces for request in trace), key=lambda request: request.arrival_s)


def scale_rate(trace: Trace, factor: float) -> list[TraceRequest]:
    """The same requests `factor` times as fast."""
    return [dataclasses.replace(request, arrival_s=request.arrival_s / factor) for request in trace]


def window(trace: Trace, start_s: float, duration_s: float) -> list[TraceRequest]:
    """The requests that arrive in [start_s, start_s + duration_s), from time 0 on."""
    return [
        dataclasses.replace(request, arrival_s=request.arrival_s - start_s)
        for request in trace
        if start_s <= request.arrival_s < start_s + duration_s
    ]


def keep(trace: Trace, test: Callable[[TraceRequest], bool]) -> list[TraceRequest]:
    return [request for request in trace if test(request)]


def requests_per_s(trace: Trace) -> float:
    """The mean rate between the first and the last arrival."""
    span_s = trace[-1].arrival_s - trace[0].arrival_s if trace else 0.0
    return (len(trace) - 1) / span_s if span_s > 0 else 0.0


def block_hit_rate(trace: Trace) -> float:
    """Share of prompt blocks that an earlier request began with too: what an endless prefix cache could serve."""
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for request in trace:
        num_blocks += len(request.hash_ids)
        num_hits += next((i for i, h in enumerate(request.hash_ids) if h not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    return num_hits / num_blocks if num_blocks else 0.0
