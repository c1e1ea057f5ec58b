"""Spans of requests, as an exporter gets them."""

from __future__ import annotations

import http.server
import threading
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from serving.operations.trace_context import TraceContext
from serving.operations.tracing import RequestTracer, otlp_provider
from serving.request import FinishReason


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before_ns = time.time_ns()
    tracer = RequestTracer("tiny", provider, now=lambda: 20.0)
    tracer.zero_ns = before_ns - 20 * 10**9
    return tracer


def test_a_request_is_a_span_of_its_callers_trace(tracer, exporter, make_record):
    tracer.request_finished(make_record(temperature=0.5, seed=2**64 - 1))
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat tiny" and span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331" and span.parent.is_remote
    assert span.end_time - span.start_time == 7 * 10**9
    assert 0 <= span.start_time - (tracer.zero_ns + 10 * 10**9) < 60 * 10**9
    assert [(event.name, event.timestamp - span.start_time) for event in span.events] == [("first_token", 3 * 10**9)]
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "request-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.e2e": 7.0,
    }
    assert "planted" not in span.to_json()


def test_what_the_caller_does_not_sample_is_not_sent(tracer, exporter, make_record):
    trace = TraceContext(trace_id="1" * 32, span_id="2" * 16, is_sampled=False)
    tracer.request_finished(make_record(trace=trace))
    assert exporter.get_finished_spans() == ()


def test_without_a_caller_a_request_is_a_trace_of_its_own(tracer, exporter, make_record):
    tracer.request_finished(make_record(trace=None))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.status.status_code is StatusCode.UNSET


def test_a_fault_of_the_engine_is_an_error(tracer, exporter, make_record):
    tracer.request_finished(make_record(FinishReason.ERROR))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == "engine_error"


def test_spans_arrive_at_a_collector(make_record):
    bodies = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        provider = otlp_provider(f"http://127.0.0.1:{server.server_port}/v1/traces")
        RequestTracer("tiny", provider).request_finished(make_record())
        provider.shutdown()
        server.shutdown()
    ((path, body),) = bodies
    assert path == "/v1/traces" and b"gen_ai.usage.input_tokens" in body and b"headrace" in body
    assert b"planted" not in body
