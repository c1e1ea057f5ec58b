"""Answers in OpenAI's form, as JSON objects: whole, and in chunks of a stream. HTTP and batch files send them."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.api.chat_text import ChatText, OutputFormats, prompt_end, text_part
from serving.api.errors import GenerationError, GivenUpError, QueueTimeoutError
from serving.api.schema import ChatCall, CompletionCall, GenerationCall
from serving.api.token_text import TokenText, prompt_text, prompt_token_texts, shown_token, token_bytes
from serving.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from serving.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serving.engine import CheckedRequest, OutputDelta

MIN_LOGPROB = -9999.0  # JSON has no infinity


class PlainText(NamedTuple):
    """What a chunk says that has but text: `kind` is text (of a completion), content or reasoning (of a chat)."""

    choice: int  # its index
    kind: str
    text: str


class Answer(ABC):
    """The answer to one call, which may have several requests of the engine: one for each prompt.

    Feed it every delta for a stream, or give it the outputs at the end. Raises GenerationError for a request that the
    engine failed, and GivenUpError for one that it gave up because it stops.
    """

    kind: str  # "object" of a whole answer
    chunk_kind: str
    id_prefix: str

    def __init__(
        self, call: GenerationCall, checked: Sequence[CheckedRequest], *, model: str, tokenizer: Tokenizer | None
    ):
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._checked = checked
        self._model = model
        self._tokenizer = tokenizer
        self._params = call.params
        self._return_token_ids = call.return_token_ids
        self._stream = call.stream
        self._created = int(time.time())
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._is_started = [False] * (len(checked) * call.params.n)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer for the outputs of every prompt, in order."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._num_cached_tokens += output.num_cached_tokens
            for completion in output.outputs:
                check_end(completion.finish_reason, completion.error)
                self._num_output_tokens += len(completion.token_ids)
                choice = self._choice(self._index(prompt_index, completion.index), output, completion)
                choices.append({**choice, **self._token_ids(prompt_index, completion.token_ids)})
        return {**self._head(self.kind), "choices": choices, "usage": self.usage()}

    def chunks(self, prompt_index: int, delta: OutputDelta, output: RequestOutput | None) -> list[dict[str, Any]]:
        """Chunks for what a step added to one completion; `output` comes with the last delta of a prompt."""
        news = self.news(prompt_index, delta, output)
        return [self.text_chunk(news)] if isinstance(news, PlainText) else news

    def news(
        self, prompt_index: int, delta: OutputDelta, output: RequestOutput | None
    ) -> PlainText | list[dict[str, Any]]:
        """As `chunks`, but only the text of a chunk that has nothing else to say: `text_chunk` makes it.

        Nearly all chunks are such, and differ in nothing else: a door need not make them anew each time.
        """
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT):
            check_end(delta.finish_reason, output.outputs[delta.index].error if output is not None else None)
        self._num_output_tokens += len(delta.new_token_ids)
        if output is not None:
            self._num_cached_tokens += output.num_cached_tokens
        index = self._index(prompt_index, delta.index)
        is_first = not self._is_started[index]
        self._is_started[index] = True
        choices = self._chunk_choices(index, prompt_index, delta, is_first)
        assert self._stream is not None
        if isinstance(choices, PlainText):
            if not self._return_token_ids and not self._stream.continuous_usage_stats:
                return choices
            choices = [self._text_choice(choices)]
        if choices:
            choices[0] |= self._token_ids(prompt_index, delta.new_token_ids, with_prompt=is_first)
        return [self._chunk(choice) for choice in choices]

    def text_chunk(self, news: PlainText) -> dict[str, Any]:
        return self._chunk(self._text_choice(news))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        assert self._stream is not None
        chunk = {**self._head(self.chunk_kind), "choices": [choice]}
        if self._stream.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif self._stream.include_usage:
            chunk["usage"] = None
        return chunk

    def last_chunks(self) -> list[dict[str, Any]]:
        """What follows the last choice of a stream."""
        if self._stream is None or not self._stream.include_usage:
            return []
        return [{**self._head(self.chunk_kind), "choices": [], "usage": self.usage()}]

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, whatever n is."""
        num_prompt_tokens = sum(len(request.token_ids) for request in self._checked)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
        }

    def _num_reasoning_tokens(self) -> int:
        return 0

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A choice of the whole answer."""

    @abstractmethod
    def _chunk_choices(
        self, index: int, prompt_index: int, delta: OutputDelta, is_first: bool
    ) -> PlainText | list[dict[str, Any]]:
        """Choices of one chunk each, none where nothing of the delta may be shown yet; or what is one `_text_choice`."""

    @abstractmethod
    def _text_choice(self, news: PlainText) -> dict[str, Any]:
        """The choice of a chunk that gives some text and says nothing else."""

    def _index(self, prompt_index: int, child_index: int) -> int:
        return prompt_index * self._params.n + child_index

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _token_ids(
        self, prompt_index: int, token_ids: Sequence[int], *, with_prompt: bool = True
    ) -> dict[str, list[int]]:
        if not self._return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self._checked[prompt_index].token_ids)} if with_prompt else {}
        return {**prompt, "token_ids": list(token_ids)}

    def _prompt_logprobs(self, output: RequestOutput, num_top: int) -> list[dict[str, Any] | None]:
        """vLLM's form, without ranks: for each token an object from token ids to log-probs."""
        entries: list[dict[str, Any] | None] = []
        for entry in output.prompt_logprobs or ():
            if entry is None:
                entries.append(None)
                continue
            pairs = dict([*entry.top[:num_top], (entry.token_id, entry.logprob)])
            entries.append(
                {
                    str(token_id): {
                        "logprob": _finite(logprob),
                        "decoded_token": shown_token(self._tokenizer, token_id),
                    }
                    for token_id, logprob in pairs.items()
                }
            )
        return entries


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, call: CompletionCall, checked: Sequence[CheckedRequest], *, model: str, tokenizer: Tokenizer | None
    ):
        super().__init__(call, checked, model=model, tokenizer=tokenizer)
        self._echo = call.echo
        self._show_prompt_logprobs = call.show_prompt_logprobs
        self._token_texts: dict[int, TokenText] = {}  # of streams, by choice
        self._text_offsets: dict[int, int] = {}

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        skip = self._params.skip_special_tokens
        text = completion.text
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = _Logprobs(self._tokenizer, self._params.logprobs)
        if self._echo and logprobs is not None:
            texts = prompt_token_texts(
                self._tokenizer, output.prompt_token_ids, output.prompt, skip_special_tokens=skip
            )
            logprobs.add(texts, output.prompt_logprobs or ())
            text = "".join(texts) + text
        elif self._echo:
            text = self._prompt_text(output.prompt, output.prompt_token_ids) + text
        if logprobs is not None:
            decoder = TokenText(self._tokenizer, skip_special_tokens=skip)
            logprobs.add([decoder.add(token_id) for token_id in completion.token_ids], completion.logprobs or ())
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.as_json(),
            "finish_reason": str(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if self._show_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(output, self._params.prompt_logprobs or 0)
        return choice

    def _chunk_choices(
        self, index: int, prompt_index: int, delta: OutputDelta, is_first: bool
    ) -> PlainText | list[dict[str, Any]]:
        text = delta.new_text
        if is_first and self._echo:  # never with log-probs in a stream
            checked = self._checked[prompt_index]
            text = self._prompt_text(checked.text, checked.token_ids) + text
        has_tokens = bool(delta.new_token_ids) and (self._return_token_ids or self._params.logprobs is not None)
        if not text and not has_tokens and delta.finish_reason is None:
            return []
        logprobs = None
        if self._params.logprobs is not None:
            if is_first:
                self._token_texts[index] = TokenText(
                    self._tokenizer, skip_special_tokens=self._params.skip_special_tokens
                )
            decoder = self._token_texts[index]
            entries = _Logprobs(self._tokenizer, self._params.logprobs, self._text_offsets.get(index, 0))
            entries.add([decoder.add(token_id) for token_id in delta.new_token_ids], delta.new_logprobs or ())
            self._text_offsets[index] = entries.end
            logprobs = entries.as_json()
        if logprobs is None and delta.finish_reason is None:
            return PlainText(index, "text", text)
        finish_reason = None if delta.finish_reason is None else str(delta.finish_reason)
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}]

    def _text_choice(self, news: PlainText) -> dict[str, Any]:
        return {"index": news.choice, "text": news.text, "logprobs": None, "finish_reason": None}

    def _prompt_text(self, text: str | None, token_ids: Sequence[int]) -> str:
        if text is not None:
            return text
        return prompt_text(self._tokenizer, token_ids, skip_special_tokens=self._params.skip_special_tokens)


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        call: ChatCall,
        checked: Sequence[CheckedRequest],
        *,
        model: str,
        tokenizer: Tokenizer | None,
        formats: OutputFormats,
    ):
        super().__init__(call, checked, model=model, tokenizer=tokenizer)
        end = prompt_end(tokenizer, checked[0].token_ids)
        self._new_text = lambda: ChatText(call, formats, end, tokenizer)
        self._texts: dict[int, ChatText] = {}  # by choice

    def _num_reasoning_tokens(self) -> int:
        return sum(text.num_reasoning_tokens for text in self._texts.values())

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        answer = super().whole(outputs)
        if self._params.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(outputs[0], self._params.prompt_logprobs)
        return answer

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        text = self._texts[index] = self._new_text()
        message = text.whole(completion.text, completion.token_ids)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": text.finish_reason(str(completion.finish_reason)),
            "stop_reason": completion.stop_reason,
        }

    def _chunk_choices(
        self, index: int, prompt_index: int, delta: OutputDelta, is_first: bool
    ) -> PlainText | list[dict[str, Any]]:
        if is_first:
            self._texts[index] = self._new_text()
        text = self._texts[index]
        parts: list[Mapping[str, Any]] = [{"role": "assistant", "content": ""}] if is_first else []
        parts += text.feed(delta.new_text, delta.new_token_ids)
        if delta.finish_reason is not None:
            parts += text.finish()
        has_tokens = bool(delta.new_token_ids) and (self._return_token_ids or self._params.logprobs is not None)
        if not parts and (has_tokens or delta.finish_reason is not None):
            parts = [{}]
        if len(parts) == 1 and not is_first and delta.finish_reason is None and delta.new_logprobs is None:
            for kind in ("content", "reasoning"):
                if kind in parts[0]:
                    return PlainText(index, kind, parts[0][kind])
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": dict(part), "logprobs": None, "finish_reason": None} for part in parts
        ]
        if choices:
            choices[-1]["logprobs"] = self._logprobs(delta.new_logprobs)
        if delta.finish_reason is not None:
            choices[-1]["finish_reason"] = text.finish_reason(str(delta.finish_reason))
        return choices

    def _text_choice(self, news: PlainText) -> dict[str, Any]:
        delta = text_part(news.kind, news.text)
        return {"index": news.choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        return {
            "content": [
                {
                    **self._logprob(entry.token_id, entry.logprob),
                    "top_logprobs": [self._logprob(*pair) for pair in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": shown_token(self._tokenizer, token_id),
            "bytes": token_bytes(self._tokenizer, token_id),
            "logprob": _finite(logprob),
        }


class _Logprobs:
    """`logprobs` of completions: four lists, of an entry a token."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, start: int = 0):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offsets: list[int] = []
        self.end = start  # characters of the text so far

    def add(self, texts: Sequence[str], entries: Sequence[TokenLogprob | None]) -> None:
        for text, entry in zip(texts, entries, strict=True):
            self._tokens.append(text)
            self._text_offsets.append(self.end)
            self.end += len(text)
            self._token_logprobs.append(None if entry is None else _finite(entry.logprob))
            self._top_logprobs.append(None if entry is None else self._top(entry))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens and, as OpenAI has it, the chosen one beside them where it is none of them."""
        pairs = [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(shown_token(self._tokenizer, token_id), _finite(logprob))
        return top

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._text_offsets,
        }


def check_end(reason: FinishReason | None, error: str | None) -> None:
    """Raise GenerationError, GivenUpError or QueueTimeoutError for a completion that did not end by itself."""
    if reason is FinishReason.ERROR:
        raise GenerationError(error or "the request failed while it ran")
    if reason is FinishReason.ABORT:
        raise GivenUpError("the server is stopping and has given up the request")
    if reason is FinishReason.TIMEOUT:
        raise QueueTimeoutError("the request was not begun within the time that it would wait in the queue")


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
