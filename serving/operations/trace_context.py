"""W3C trace context (https://www.w3.org/TR/trace-context/): which trace and span a caller's request belongs to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_STATE_MEMBER = re.compile(
    r"(?:[a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A span of a trace: ids in lower-case hexadecimal, 32 and 16 digits, and what other tracers passed along."""

    trace_id: str
    span_id: str
    is_sampled: bool = False
    state: str = ""  # the header tracestate, as it came

    @property
    def traceparent(self) -> str:
        """The header that hands this span on as the parent of what is called next."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(
            trace_id=self.trace_id, span_id=secrets.token_hex(8), is_sampled=self.is_sampled, state=self.state
        )


def parse_trace_context(traceparent: str | None, tracestate: Sequence[str] = ()) -> TraceContext | None:
    """The caller's span from its headers. None: there is none, or it is malformed and, as the standard has it, ignored.

    tracestate: the values of all headers of that name, in order; malformed ones are dropped whole, and the span stays.
    """
    match = _PARENT.fullmatch(traceparent.strip(" \t")) if traceparent is not None else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(
        trace_id=trace_id, span_id=span_id, is_sampled=bool(int(flags, 16) & 1), state=_parse_state(tracestate)
    )


def _parse_state(headers: Sequence[str]) -> str:
    members = [member.strip(" \t") for header in headers for member in header.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    state = ",".join(members)
    if (
        len(members) > MAX_STATE_MEMBERS
        or len(state) > MAX_STATE_CHARS
        or len(keys) < len(members)
        or not all(_STATE_MEMBER.fullmatch(member) for member in members)
    ):
        return ""
    return state
