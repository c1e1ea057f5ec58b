"""A span for each request, made when it has ended. OpenTelemetry (extra `otel`) is imported where a tracer is made.

Spans hold names, settings, counts and durations; no prompt, completion or stop text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from configs.checks import ConfigError
from serving.observer import EngineObserver, RequestRecord
from serving.operations import genai_names as names
from serving.request import FinishReason


def span_attributes(record: RequestRecord, model_name: str) -> dict[str, Any]:
    """The span's attributes by the GenAI conventions; what does not hold for the request is left out."""
    params, completions = record.params, record.completions
    first = completions[0]
    attributes: dict[str, Any] = {
        names.OPERATION_NAME: record.context.operation,
        names.PROVIDER_NAME: "headrace",
        names.REQUEST_MODEL: model_name,
        names.REQUEST_MAX_TOKENS: params.max_tokens,
        names.REQUEST_TEMPERATURE: params.temperature,
        names.REQUEST_TOP_P: params.top_p,
        names.REQUEST_TOP_K: params.top_k if params.top_k > 0 else None,
        # As text where it does not fit the 64 signed bits that an attribute has.
        names.REQUEST_SEED: params.seed if params.seed is None or params.seed < 2**63 else str(params.seed),
        names.REQUEST_CHOICE_COUNT: params.n if params.n > 1 else None,
        names.RESPONSE_ID: record.request_id,
        names.RESPONSE_MODEL: model_name,
        names.RESPONSE_FINISH_REASONS: [str(completion.finish_reason) for completion in completions],
        names.USAGE_INPUT_TOKENS: record.num_prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: record.num_output_tokens,
        names.LATENCY_E2E: end_time_s(record) - record.arrival_time_s,
    }
    if first.first_scheduled_time_s is not None:
        attributes[names.LATENCY_TIME_IN_QUEUE] = first.first_scheduled_time_s - record.arrival_time_s
        if first.first_token_time_s is not None and first.last_token_time_s is not None:
            attributes[names.LATENCY_TIME_TO_FIRST_TOKEN] = first.first_token_time_s - record.arrival_time_s
            attributes[names.LATENCY_TIME_IN_MODEL_PREFILL] = first.first_token_time_s - first.first_scheduled_time_s
            attributes[names.LATENCY_TIME_IN_MODEL_DECODE] = first.last_token_time_s - first.first_token_time_s
    if is_error(record):
        attributes[names.ERROR_TYPE] = "engine_error"
    return {name: value for name, value in attributes.items() if value is not None}


def end_time_s(record: RequestRecord) -> float:
    return max(completion.finish_time_s for completion in record.completions)


def is_error(record: RequestRecord) -> bool:
    return any(completion.finish_reason is FinishReason.ERROR for completion in record.completions)


def otlp_provider(endpoint: str) -> Any:
    """A provider that sends spans to an OTLP/HTTP collector, in a thread of its own, a batch at a time.

    endpoint: an URL such as http://localhost:4318/v1/traces. Call `shutdown` of what is returned to send the rest.
    Raises ConfigError without the extra `otel`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("traces need OpenTelemetry: install headrace[otel]") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "headrace"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class RequestTracer(EngineObserver):
    """Makes spans with `provider`, or with the one that OpenTelemetry was set up with.

    Spans end in the engine's thread, so the provider's processor must not send them there: use a batching one, as
    `otlp_provider` does. `now` is the engine's clock. Raises ConfigError without the extra `otel`.
    """

    def __init__(self, model_name: str, provider: Any = None, *, now: Callable[[], float] = time.monotonic):
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigError("traces need OpenTelemetry: install headrace[otel]") from None
        self._trace = trace
        self._tracer = trace.get_tracer("headrace", tracer_provider=provider)
        self._model_name = model_name
        self._epoch_ns = time.time_ns() - round(now() * 1e9)  # of the clock's zero

    def request_finished(self, record: RequestRecord) -> None:
        trace, parent = self._trace, None
        if record.context.trace is not None:
            caller = record.context.trace
            parent = trace.set_span_in_context(
                trace.NonRecordingSpan(
                    trace.SpanContext(
                        trace_id=int(caller.trace_id, 16),
                        span_id=int(caller.span_id, 16),
                        is_remote=True,
                        trace_flags=trace.TraceFlags(int(caller.is_sampled)),
                        trace_state=trace.TraceState.from_header([caller.state]),
                    )
                )
            )
        span = self._tracer.start_span(
            f"{record.context.operation} {self._model_name}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=self._ns(record.arrival_time_s),
            attributes=span_attributes(record, self._model_name),
        )
        first_token_s = record.completions[0].first_token_time_s
        if first_token_s is not None:
            span.add_event("first_token", timestamp=self._ns(first_token_s))
        if is_error(record):
            span.set_status(trace.StatusCode.ERROR)
        span.end(end_time=self._ns(end_time_s(record)))

    def _ns(self, time_s: float) -> int:
        """A time of the engine's clock in nanoseconds since 1970."""
        return self._epoch_ns + round(time_s * 1e9)
