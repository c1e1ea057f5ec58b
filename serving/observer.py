"""What the engine tells those who watch it: one record a step and one a request. No JAX here.

Records hold counts and times, and no prompt or output, so that nothing that is made of them can give one away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from serving.bench.figures import Rows
from serving.request import FinishReason, Request, RequestContext, SamplingParams
from serving.scheduling.schedule import Preemption, Schedule
from serving.scheduling.scheduler import StepEvent

type Phase = Literal["decode", "prefill", "mixed"]
PHASES: tuple[Phase, ...] = ("decode", "prefill", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A completion got its first output token."""

    child_index: int
    num_prompt_tokens: int
    wait_s: float  # since the request arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, when its tokens were read.

    `duration_s` runs from its dispatch, or from the reading of the step before where that is later, to its own
    reading: what the host sees of the device's time, and so not less than it.
    """

    phase: Phase
    read_time_s: float
    duration_s: float
    num_decode_slots: int  # of the program
    num_decode_steps: int  # forward passes over them
    prefill_bucket: int  # token places of the program; 0 without prefill
    decode_rows: Rows  # of each live slot: keys that its first token sees, tokens sampled
    prefill_rows: Rows  # of each chunk: keys that its first token sees, tokens
    num_decode_tokens: int
    num_prefill_tokens: int
    num_sampled_chunks: int
    prefill_tokens_by_tenant: Mapping[str, int]
    decode_tokens_by_tenant: Mapping[str, int]
    gaps_s: Mapping[float, int]  # since the tokens that a completion got before: how many completions
    first_tokens: Sequence[FirstToken]
    preemptions: Sequence[Preemption] = ()  # decided since the step before


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRecord:
    """One of a request's completions, ended. Times are of the engine's clock; None: it did not come so far."""

    num_output_tokens: int
    finish_reason: FinishReason
    num_preemptions: int
    first_scheduled_time_s: float | None
    first_token_time_s: float | None
    last_token_time_s: float | None
    finish_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request whose completions have all ended."""

    request_id: str
    context: RequestContext
    params: SamplingParams  # its `stop` is text of the client: not for logs or traces
    num_prompt_tokens: int
    num_cached_tokens: int
    arrival_time_s: float
    completions: tuple[CompletionRecord, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(completion.num_output_tokens for completion in self.completions)


class EngineObserver:
    """Called in the engine's thread: must be quick. One that raises is taken off the engine, which goes on."""

    def step_begun(self) -> None:
        """A call of `Engine.step` begins; the device may be waited for in it."""

    def step_ended(self) -> None:
        """It has ended, by whatever end."""

    def step_read(self, record: StepRecord) -> None:
        """A step's tokens have come; the requests that end with it are reported after it."""

    def request_finished(self, record: RequestRecord) -> None:
        """The last completion of a request has ended."""


def step_record(
    schedule: Schedule, events: Sequence[StepEvent], *, read_time_s: float, started_time_s: float
) -> StepRecord:
    """The record of a step that was just read; to be made before the events are worked on."""
    chunk_slots = {chunk.slot for chunk in schedule.prefill}
    num_keys, num_sampled, first_tokens = [], [], []
    prefill_tenants: dict[str, int] = {}
    decode_tenants: dict[str, int] = {}
    last_times_s: dict[float, int] = {}
    for event in events:  # once for each running sequence: kept short
        request, count = event.request, len(event.new_token_ids)
        if not count:
            continue
        if event.slot not in chunk_slots:
            # The newest of the tokens known before is the input of the first pass, which sees them all.
            num_keys.append(len(request.prompt_token_ids) + len(request.output_token_ids) - count)
            num_sampled.append(count)
            tenant = request.context.tenant
            decode_tenants[tenant] = decode_tenants.get(tenant, 0) + count
        last_time_s = request.last_token_time_s
        if last_time_s is not None:
            last_times_s[last_time_s] = last_times_s.get(last_time_s, 0) + 1
        else:
            first_tokens.append(
                FirstToken(
                    child_index=request.child_index,
                    num_prompt_tokens=request.num_prompt_tokens,
                    wait_s=read_time_s - request.arrival_time_s,
                )
            )
    for chunk in schedule.prefill:
        tenant = chunk.request.context.tenant
        prefill_tenants[tenant] = prefill_tenants.get(tenant, 0) + len(chunk.token_ids)
    return StepRecord(
        phase="decode" if not schedule.prefill else "mixed" if schedule.decode else "prefill",
        read_time_s=read_time_s,
        duration_s=read_time_s - started_time_s,
        num_decode_slots=schedule.num_decode_slots,
        num_decode_steps=schedule.num_decode_steps,
        prefill_bucket=schedule.prefill_bucket,
        decode_rows=(num_keys, num_sampled),
        prefill_rows=(
            [chunk.start + 1 for chunk in schedule.prefill],
            [len(chunk.token_ids) for chunk in schedule.prefill],
        ),
        num_decode_tokens=sum(num_sampled),
        num_prefill_tokens=schedule.num_prefill_tokens,
        num_sampled_chunks=sum(chunk.samples for chunk in schedule.prefill),
        prefill_tokens_by_tenant=prefill_tenants,
        decode_tokens_by_tenant=decode_tenants,
        gaps_s={read_time_s - time_s: count for time_s, count in last_times_s.items()},
        first_tokens=first_tokens,
        preemptions=schedule.preemptions,
    )


def request_record(requests: Sequence[Request]) -> RequestRecord:
    """The record of a request from its completions, which have all ended."""
    first = requests[0]
    completions = []
    for request in requests:
        assert request.finish_reason is not None and request.finish_time_s is not None, request.request_id
        completions.append(
            CompletionRecord(
                num_output_tokens=request.num_output_tokens,
                finish_reason=request.finish_reason,
                num_preemptions=request.num_preemptions,
                first_scheduled_time_s=request.first_scheduled_time_s,
                first_token_time_s=request.first_token_time_s,
                last_token_time_s=request.last_token_time_s,
                finish_time_s=request.finish_time_s,
            )
        )
    return RequestRecord(
        request_id=first.request_id,
        context=first.context,
        params=first.params,
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
        arrival_time_s=first.arrival_time_s,
        completions=tuple(completions),
    )
