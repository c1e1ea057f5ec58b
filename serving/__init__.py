"""Headrace's public names: `from serving import LLM, SamplingParams, AsyncEngine`."""

from typing import TYPE_CHECKING, Any

from serving.request import BeamSearchParams, RequestError, RequestOutput, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from serving.async_engine import AsyncEngine
    from serving.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    # JAX takes seconds to import: only what needs it pays.
    if name == "LLM":
        from serving.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from serving.async_engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module 'serving' has no attribute {name!r}")
