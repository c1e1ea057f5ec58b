"""Whose a request is and in what trace, by HTTP's headers or gRPC's metadata: the same rule for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from configs.server import ServerConfig
from serving.api.keys import ApiKeys
from serving.operations.trace_context import TraceContext, parse_trace_context
from serving.request import DEFAULT_TENANT, RequestContext, RequestError

type HeaderValues = Callable[[str], Sequence[bytes]]  # of a name, which is in lower case


def read_tenant(values_of: HeaderValues, config: ServerConfig, keys: ApiKeys) -> str:
    """The tenant that the header of a trusted proxy names, or whose key it is. Raises RequestError."""
    if config.tenant_header is None:
        return keys.tenant_of(values_of("authorization")) or DEFAULT_TENANT
    named = values_of(config.tenant_header.lower())
    if len(named) > 1:
        raise RequestError("tenant", f"{config.tenant_header} is given more than once")
    return RequestContext(tenant=named[0].decode("latin-1")).tenant if named else DEFAULT_TENANT


def read_trace(values_of: HeaderValues) -> TraceContext | None:
    """The caller's span; None where there is none, or not exactly one that is well formed."""
    parents, states = ([value.decode("latin-1") for value in values_of(name)] for name in ("traceparent", "tracestate"))
    return parse_trace_context(parents[0], states) if len(parents) == 1 else None
