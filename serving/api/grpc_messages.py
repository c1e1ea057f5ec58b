"""Between gRPC messages and the JSON objects of HTTP: fields go by the same names, so that the schema judges both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from google.protobuf.unknown_fields import UnknownFieldSet

from serving.api.chat_text import text_part
from serving.api.responses import Answer, PlainText
from serving.proto.v1 import serving_pb2 as pb
from serving.request import RequestError

if TYPE_CHECKING:
    from serving.async_engine import RequestDelta

MAX_EXACT_INT = 2**53  # google.protobuf.Value has doubles alone


def parse_message[Kind: Message](kind: type[Kind], data: bytes) -> Kind:
    """Raises RequestError for bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RequestError("request", f"is no {kind.DESCRIPTOR.full_name}, or holds values too deep") from None


def request_body(message: Message, where: str = "") -> dict[str, Any]:
    """The JSON object that an HTTP client would send for `message`.

    Raises RequestError for fields that this server does not know and for what JSON has no form of. `where` goes before
    the names of fields in errors.
    """
    for unknown in UnknownFieldSet(message):
        raise RequestError(f"{where}(number {unknown.field_number})", "is not a field that this server knows")
    return {field.name: _value(f"{where}{field.name}", field, value) for field, value in message.ListFields()}


def _value(name: str, field: FieldDescriptor, value: Any) -> Any:
    kind = field.message_type
    if kind is None:
        return list(value) if field.is_repeated else value
    if kind.GetOptions().map_entry:
        return {str(key): item for key, item in value.items()}  # as JSON has keys
    if not field.is_repeated:
        return _message(name, value)
    if kind is pb.Prompt.DESCRIPTOR and len(value) == 1:
        return _prompt(name, value[0])
    return [_message(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _message(name: str, value: Message) -> Any:
    if isinstance(value, Struct | ListValue | Value):
        return _json(name, value)
    if isinstance(value, pb.Prompt):
        return _prompt(name, value)
    return request_body(value, f"{name}.")


def _prompt(name: str, prompt: pb.Prompt) -> str | list[int]:
    body = request_body(prompt, f"{name}.")
    if "tokens" in body:
        return list(prompt.tokens.token_ids)
    return prompt.text


def _json(name: str, value: Struct | ListValue | Value) -> Any:
    if isinstance(value, Struct):
        return {key: _json(name, item) for key, item in value.fields.items()}
    if isinstance(value, ListValue):
        return [_json(name, item) for item in value.values]
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    if kind in ("struct_value", "list_value"):
        return _json(name, getattr(value, kind))
    item = getattr(value, kind)
    if kind == "number_value":
        if not math.isfinite(item):
            raise RequestError(name, f"holds {item}, which is no JSON")
        if item.is_integer() and abs(item) <= MAX_EXACT_INT:
            return int(item)
    return item


class ChunkMessages:
    """`response_message` of the chunks of one answer. What chunks of mere text have in common is made once."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._empty: pb.GenerateResponse | None = None  # a chunk but for its choice

    def messages(self, batch: Sequence[RequestDelta]) -> Iterator[pb.GenerateResponse]:
        """What steps added to completions; raises as `Answer.chunks` does.

        Text that has come meanwhile for the same choice goes into one message: a message costs gRPC more than a token
        costs the engine, so that a server that is late catches up.
        """
        text: PlainText | None = None  # not given out yet
        for item in batch:
            try:
                news = self._answer.news(*item)
            except Exception:
                if text is not None:
                    yield self._text_message(text)
                raise
            if not news:
                continue
            if text is not None and isinstance(news, PlainText) and news[:2] == text[:2]:
                text = text._replace(text=text.text + news.text)
                continue
            if text is not None:
                yield self._text_message(text)
            text = None
            if isinstance(news, PlainText):
                text = news
            else:
                yield from map(response_message, news)
        if text is not None:
            yield self._text_message(text)

    def _text_message(self, news: PlainText) -> pb.GenerateResponse:
        if self._empty is None:
            self._empty = response_message(self._answer.text_chunk(news))
            del self._empty.choices[:]
        message = pb.GenerateResponse()
        message.CopyFrom(self._empty)
        if news.kind == "text":
            message.choices.add(index=news.choice, text=news.text)
        else:
            message.choices.add(index=news.choice, message=pb.ChatMessage(**text_part(news.kind, news.text)))
        return message

    def last_messages(self) -> list[pb.GenerateResponse]:
        return [response_message(chunk) for chunk in self._answer.last_chunks()]


def response_message(answer: Mapping[str, Any]) -> pb.GenerateResponse:
    """An answer of `serving.api.responses`, or a chunk of one."""
    return pb.GenerateResponse(
        id=answer["id"],
        object=answer["object"],
        created=answer["created"],
        model=answer["model"],
        choices=[_choice(choice) for choice in answer["choices"]],
        usage=answer.get("usage"),
        prompt_logprobs=_prompt_logprobs(answer.get("prompt_logprobs")),
    )


def _choice(choice: Mapping[str, Any]) -> pb.Choice:
    stop = choice.get("stop_reason")
    return pb.Choice(
        index=choice["index"],
        text=choice.get("text"),
        message=choice.get("message", choice.get("delta")),
        logprobs=_logprobs(choice["logprobs"]),
        finish_reason=choice["finish_reason"],
        stop_token_id=stop if isinstance(stop, int) else None,
        stop_string=stop if isinstance(stop, str) else None,
        prompt_token_ids=choice.get("prompt_token_ids"),
        token_ids=choice.get("token_ids"),
        prompt_logprobs=_prompt_logprobs(choice.get("prompt_logprobs")),
    )


def _logprobs(logprobs: Mapping[str, Any] | None) -> list[pb.TokenLogprobs]:
    if logprobs is None:
        return []
    if "content" in logprobs:  # of a chat
        return [
            pb.TokenLogprobs(
                **_token(entry), top_logprobs=[pb.TopLogprob(**_token(top)) for top in entry["top_logprobs"]]
            )
            for entry in logprobs["content"]
        ]
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")]
    return [
        pb.TokenLogprobs(
            token=token,
            logprob=logprob,
            text_offset=offset,
            top_logprobs=[pb.TopLogprob(token=text, logprob=value) for text, value in (top or {}).items()],
        )
        for token, logprob, offset, top in zip(*lists, strict=True)
    ]


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    data = entry["bytes"]
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": None if data is None else bytes(data)}


def _prompt_logprobs(entries: Sequence[Mapping[str, Any] | None] | None) -> list[pb.TokenLogprobs]:
    """Of each token of a prompt, as the HTTP form has it: the best tokens, with the prompt's own among them."""
    return [
        pb.TokenLogprobs(
            top_logprobs=[
                pb.TopLogprob(token_id=int(token_id), token=value["decoded_token"], logprob=value["logprob"])
                for token_id, value in (entry or {}).items()
            ]
        )
        for entry in entries or ()
    ]
