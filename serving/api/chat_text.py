"""The text of one chat completion as parts of a message: content, reasoning, and the calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.api.schema import ChatCall
from serving.api.token_text import TokenText, prompt_text
from serving.request import RequestError
from serving.text.output_deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from serving.text.reasoning_parsers import CLOSE, OPEN
from serving.text.tokenizer import Tokenizer
from serving.text.tool_parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputParser,
    detect_reasoning_format,
    detect_tool_format,
)

PROMPT_END_TOKENS = 16  # in which a prompt may open reasoning


@dataclass(frozen=True, kw_only=True)
class OutputFormats:
    """How a model writes tool calls and reasoning. None: it does not, or nobody knows how."""

    tool: str | None = None
    reasoning: str | None = None
    has_skipped_marks: bool = False  # marks of its reasoning are control tokens
    end_texts: tuple[str, ...] = ()  # of the tokens that end its turn

    @classmethod
    def of_model(
        cls, config: ServerConfig, tokenizer: Tokenizer | None, model_type: str | None, eos_token_ids: Sequence[int]
    ) -> OutputFormats:
        """The formats that the config names, or else those that the chat template shows."""
        if tokenizer is None:
            return cls()
        template = tokenizer.chat_template
        tool, reasoning = config.tool_call_format, config.reasoning_format
        if tool == "auto":
            tool = detect_tool_format(tokenizer.named_chat_templates.get("tool_use", template), model_type) or "none"
        if reasoning == "auto":
            reasoning = detect_reasoning_format(template) or "none"
        skipped = {
            text for text, token in tokenizer.special_token_texts.items() if token in tokenizer.special_token_ids
        }
        return cls(
            tool=None if tool == "none" else tool,
            reasoning=None if reasoning == "none" else reasoning,
            has_skipped_marks=reasoning == "harmony" or (reasoning != "none" and bool({OPEN, CLOSE} & skipped)),
            end_texts=tuple(tokenizer.token_text(token_id) for token_id in eos_token_ids),
        )

    def needs_special_tokens(self, call: ChatCall) -> bool:
        """Whether the text must be decoded with control tokens in it, for the marks among them."""
        return self.has_skipped_marks or bool(
            call.tool_names and self.tool and TOOL_FORMATS[self.tool].needs_special_tokens
        )

    def check(self, call: ChatCall) -> None:
        """Raises RequestError for tools whose calls could not be told from text."""
        if call.tool_names and self.tool is None:
            raise RequestError("tools", "are not available: how this model calls them is not known")


def check_formats(config: ServerConfig) -> None:
    """Raises ConfigError for a format that there is no parser for."""
    for name, known in (("tool_call_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
        value = getattr(config, name)
        if value not in ("auto", "none", *known):
            raise ConfigError(f"ServerConfig.{name} must be auto, none or one of {', '.join(known)}; got {value!r}")


def prompt_end(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> str:
    """The text of a prompt's end, control tokens included."""
    return prompt_text(tokenizer, token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)


class ChatText:
    """Takes text in increments and gives deltas, as `choices[].delta` of a stream has them.

    prompt: the end of the prompt's text.
    """

    def __init__(self, call: ChatCall, formats: OutputFormats, prompt: str, tokenizer: Tokenizer | None):
        end_texts: tuple[str, ...] = ()
        if formats.needs_special_tokens(call) and tokenizer is not None:
            stops = [token_id for token_id in call.params.stop_token_ids if token_id in tokenizer.special_token_ids]
            end_texts = (*formats.end_texts, *map(tokenizer.token_text, stops))
        self._make_parser = lambda: OutputParser(
            tool_format=formats.tool,
            reasoning_format=formats.reasoning,
            tool_names=call.tool_names,
            prompt=prompt,
            end_texts=end_texts,
        )
        self._parser = self._make_parser()
        self._max_calls = None if call.parallel_tool_calls else 1
        self._has_calls = False
        self._reasoning_tokens: _ReasoningTokens | None = None
        if formats.reasoning is not None:
            decoder = TokenText(tokenizer, skip_special_tokens=call.params.skip_special_tokens)
            self._reasoning_tokens = _ReasoningTokens(self._make_parser(), decoder)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Deltas that became sure with `text`; `token_ids` are the tokens that came with it."""
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.add(token_ids)
        return self._shown(self._parser.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        """Deltas at the end."""
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.finish()
        return self._shown(self._parser.finish())

    def whole(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The message of a whole text, without its role."""
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.add(token_ids)
            self._reasoning_tokens.finish()
        parsed = collect(self._kept([*self._parser.feed(text), *self._parser.finish()]))
        message: dict[str, Any] = {"content": parsed.content}
        if parsed.reasoning is not None:
            message |= _reasoning(parsed.reasoning)
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": call.type, "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        elif parsed.content is None:
            message["content"] = ""
        return message

    def finish_reason(self, reason: str) -> str:
        """What the answer gives as its end, where the engine says `reason`."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning_tokens.count if self._reasoning_tokens is not None else 0

    def _kept(self, deltas: Sequence[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart | ToolCallArguments):
                if self._max_calls is not None and delta.index >= self._max_calls:
                    continue
                self._has_calls = True
            kept.append(delta)
        return kept

    def _shown(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        return [_as_json(delta) for delta in self._kept(deltas)]


class _ReasoningTokens:
    """Counts the tokens of a completion that are reasoning: those whose text the parser gives out as such.

    A token whose text is a mark, or is held back, counts as what is given out next. Token by token, and so the same
    in a stream as at the end.
    """

    def __init__(self, parser: OutputParser, decoder: TokenText):
        self._parser = parser
        self._decoder = decoder
        self._num_pending = 0
        self._is_reasoning = False
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._num_pending += 1
            self._take(self._parser.feed(self._decoder.add(token_id)))

    def finish(self) -> None:
        self._take(self._parser.finish())
        if self._is_reasoning:
            self.count += self._num_pending

    def _take(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._is_reasoning = isinstance(deltas[0], ReasoningDelta)
            if self._is_reasoning:
                self.count += self._num_pending
            self._num_pending = 0
            self._is_reasoning = isinstance(deltas[-1], ReasoningDelta)


def text_part(kind: str, text: str) -> dict[str, Any]:
    """A delta of content or reasoning."""
    return {"content": text} if kind == "content" else _reasoning(text)


def _as_json(delta: Delta) -> dict[str, Any]:
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart():
            function = {"name": delta.name, "arguments": ""}
            return {
                "tool_calls": [{"index": delta.index, "id": delta.call_id, "type": delta.type, "function": function}]
            }
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}  # vLLM's name, and DeepSeek's
