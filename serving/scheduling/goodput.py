"""Which requests were served as their class is promised: what counts as goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from configs.scheduling import SchedulingConfig
from serving.request import FinishReason, RequestContext

type Outcome = tuple[str, bool, bool]  # class, whether TTFT was met, whether TPOT was


class EndedCompletion(Protocol):
    """As `serving.observer.CompletionRecord` has it; times of the engine's clock."""

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def first_token_time_s(self) -> float | None: ...
    @property
    def last_token_time_s(self) -> float | None: ...
    @property
    def finish_time_s(self) -> float: ...


class EndedRequest(Protocol):
    """As `serving.observer.RequestRecord` has it."""

    @property
    def context(self) -> RequestContext: ...
    @property
    def arrival_time_s(self) -> float: ...
    @property
    def completions(self) -> Sequence[EndedCompletion]: ...


def outcome(record: EndedRequest, config: SchedulingConfig) -> Outcome | None:
    """Whether the slowest of a request's completions met the targets of its class. A class without a target meets it;
    what ended by a fault or a deadline misses both. None: its client gave one of them up, which tells nothing.

    TPOT is (last token - first token) / (tokens - 1), and met with a single token, as benchmarks have it (vLLM's
    `vllm bench serve --goodput`). A scored prompt, which samples nothing, counts to its end.
    """
    index = config.class_of(record.context.priority)
    ttft_target_s, tpot_target_s = config.class_ttft_s[index], config.class_tpot_s[index]
    ttft_met = tpot_met = True
    for completion in record.completions:
        if completion.finish_reason is FinishReason.ABORT:
            return None
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT):
            ttft_met = tpot_met = False
            continue
        first_s, last_s = completion.first_token_time_s, completion.last_token_time_s
        begun_s = completion.finish_time_s if first_s is None else first_s
        if ttft_target_s and begun_s - record.arrival_time_s > ttft_target_s:
            ttft_met = False
        num_gaps = completion.num_output_tokens - 1
        if tpot_target_s and num_gaps > 0 and first_s is not None and last_s is not None:
            tpot_met = tpot_met and (last_s - first_s) / num_gaps <= tpot_target_s
    return config.class_names[index], ttft_met, tpot_met


class GoodputCounters:
    """Requests that ended, by outcome."""

    def __init__(self, config: SchedulingConfig):
        self._config = config
        self.counts: Counter[Outcome] = Counter()

    def add(self, record: EndedRequest) -> None:
        result = outcome(record, self._config)
        if result is not None:
            self.counts[result] += 1

    def num_good(self, class_name: str) -> int:
        """Requests of a class that met both targets."""
        return self.counts[class_name, True, True]
