"""Records of requests as an engine makes them, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving.observer import RequestRecord, request_record
from serving.operations.trace_context import TraceContext
from serving.request import FinishReason, Request, RequestContext, RequestStatus, SamplingParams

STOP = "planted-stop-text"  # what a client sent: it must not come out again
TRACE = TraceContext(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331", is_sampled=True)


def _record(reason: FinishReason = FinishReason.LENGTH, trace: TraceContext | None = TRACE, **params) -> RequestRecord:
    """Two completions: arrived at 10, given slots at 11 and 12, first tokens at 13, ends at 15 and 17."""
    requests = [
        Request(
            request_id="request-1",
            prompt_token_ids=(1, 2, 3),
            params=SamplingParams(n=2, max_tokens=9, stop=(STOP,), **params),
            max_total_tokens=12,
            child_index=index,
            context=RequestContext(tenant="acme", operation="chat", trace=trace),
            status=RequestStatus.FINISHED,
            output_token_ids=[5] * (index + 3),
            num_cached_tokens=2,
            num_preemptions=index,
            finish_reason=reason,
            arrival_time_s=10.0,
            first_scheduled_time_s=11.0 + index,
            first_token_time_s=13.0,
            last_token_time_s=15.0 + index,
            finish_time_s=15.0 + 2 * index,
        )
        for index in range(2)
    ]
    return request_record(requests)


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    return _record


@pytest.fixture
def record() -> RequestRecord:
    return _record()
