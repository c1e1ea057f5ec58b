"""The parts into which a model's output text falls: content, reasoning and tool calls, piece by piece or whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The first delta of a call. `index` counts the calls of one completion from 0; `call_id` is unique."""

    index: int
    call_id: str
    name: str
    type: Literal["function"] = "function"


@dataclass(frozen=True)
class ToolCallArguments:
    """The next characters of the JSON text of the arguments of call `index`, which has started."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # JSON text as the model wrote it
    type: Literal["function"] = "function"


@dataclass(frozen=True)
class ParsedOutput:
    """A whole output. None where there is no text of that kind."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def collect(deltas: Iterable[Delta]) -> ParsedOutput:
    """All deltas of one completion, joined."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart():
                starts.append(delta)
                arguments.append([])
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    return ParsedOutput(
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(
            ToolCall(start.call_id, start.name, "".join(pieces))
            for start, pieces in zip(starts, arguments, strict=True)
        ),
    )
