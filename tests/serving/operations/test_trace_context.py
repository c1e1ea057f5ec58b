"""The headers of W3C trace context; cases from the standard's own rules and examples."""

from __future__ import annotations

import pytest

from serving.operations.trace_context import TraceContext, parse_trace_context

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-01", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-03", True),  # flags of later versions are left alone
        (f"  00-{TRACE_ID}-{SPAN_ID}-01\t", True),
        (f"01-{TRACE_ID}-{SPAN_ID}-01", True),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-later", True),
    ],
)
def test_a_callers_span_is_read(header, is_sampled):
    context = parse_trace_context(header)
    assert context == TraceContext(trace_id=TRACE_ID, span_id=SPAN_ID, is_sampled=is_sampled)
    assert context.traceparent == f"00-{TRACE_ID}-{SPAN_ID}-{int(is_sampled):02}"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n00-{TRACE_ID}-{SPAN_ID}-01",
        f"cc-{TRACE_ID}-{SPAN_ID}-01.later",
        f"00-{TRACE_ID[:-1]}\u0663-{SPAN_ID}-01",
        "-" * 100_000,
    ],
)
def test_a_malformed_header_is_no_span(header):
    assert parse_trace_context(header) is None


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        ([], ""),
        (["rojo=00f067aa0ba902b7"], "rojo=00f067aa0ba902b7"),
        (["rojo=1, congo=2", "acme@vendor=3"], "rojo=1,congo=2,acme@vendor=3"),
        (["a=1,,b=2,"], "a=1,b=2"),
        (["a=1,a=2"], ""),
        (["A=1"], ""),
        (["a=\u00e9"], ""),
        (["a=1\r\nx-evil: 1"], ""),
        ([f"k{i}=1" for i in range(32)], ",".join(f"k{i}=1" for i in range(32))),
        ([f"k{i}=1" for i in range(33)], ""),
        (["a=" + "x" * 256], "a=" + "x" * 256),
        (["a=" + "x" * 257], ""),
        (["a=" + "x" * 200, "b=" + "x" * 200, "c=" + "x" * 200], ""),
    ],
)
def test_the_state_of_other_tracers_is_carried_whole_or_not_at_all(headers, state):
    context = parse_trace_context(f"00-{TRACE_ID}-{SPAN_ID}-01", headers)
    assert context is not None and context.state == state


def test_a_child_is_a_new_span_of_the_same_trace():
    parent = TraceContext(trace_id=TRACE_ID, span_id=SPAN_ID, is_sampled=True, state="a=1")
    children = [parent.child() for _ in range(50)]
    assert {(c.trace_id, c.is_sampled, c.state) for c in children} == {(TRACE_ID, True, "a=1")}
    assert len({SPAN_ID, *(c.span_id for c in children)}) == 51
    assert all(parse_trace_context(c.traceparent, [c.state]) == c for c in children)
