"""What a stream's chunks look like on the wire is what each chunk made by itself would be."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from configs.server import ServerConfig
from serving.api.chat_text import OutputFormats
from serving.api.errors import GenerationError
from serving.api.event_stream import EventEncoder
from serving.api.grpc_messages import ChunkMessages, response_message
from serving.api.responses import Answer, ChatAnswer, CompletionAnswer
from serving.api.schema import parse_chat, parse_completion
from serving.engine import OutputDelta
from serving.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprob

TEXTS = ["Once", "", ' "upon"\n', "\\ a\t\x00", "é\u2028\U0001f600", "<think>", "why", "</think>", "end"]
LOGPROBS = (TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.5))),)


def answer_of(kind: str, formats: OutputFormats, **fields: Any) -> Answer:
    checked: Any = [SimpleNamespace(token_ids=(1, 2, 3), text="abc")]
    config = ServerConfig()
    fields = {"stream": True, "n": 2, **fields}
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        answer: Answer = ChatAnswer(parse_chat(body, config, {}), checked, model="m é", tokenizer=None, formats=formats)
    else:
        call = parse_completion({"prompt": "abc", **fields}, config, {})
        answer = CompletionAnswer(call, checked, model="m é", tokenizer=None)
    answer.id, answer._created = "an-id", 12
    return answer


def delta(index: int, text: str, *, logprobs: bool, finish: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(
        request_id="r",
        index=index,
        new_token_ids=(5,),
        new_text=text,
        new_logprobs=LOGPROBS if logprobs else None,
        finish_reason=finish,
        request_finished=False,
    )


def items(*, logprobs: bool) -> list[Any]:
    deltas = [(0, delta(i, text, logprobs=logprobs), None) for text in TEXTS for i in (0, 1)]
    ends = [(0, delta(i, "!", logprobs=logprobs, finish=FinishReason.LENGTH), None) for i in (0, 1)]
    return deltas + ends


def ended_by_error() -> tuple[int, OutputDelta, RequestOutput]:
    output = CompletionOutput(index=0, text="", token_ids=[], error="it broke")
    whole = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=(1,), prompt_logprobs=None, outputs=[output], finished=True
    )
    return 0, delta(0, "", logprobs=False, finish=FinishReason.ERROR), whole


CASES = [
    ("completion", {}),
    ("completion", {"stream_options": {"include_usage": True}}),
    ("completion", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("completion", {"return_token_ids": True}),
    ("completion", {"echo": True}),
    ("completion", {"logprobs": 1}),
    ("chat", {}),
    ("chat", {"stream_options": {"include_usage": True}}),
    ("chat", {"logprobs": True, "top_logprobs": 1}),
]


@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize(("kind", "fields"), CASES, ids=lambda value: json.dumps(value))
def test_events_and_messages_are_those_of_each_chunk(kind, fields, reasoning):
    formats = OutputFormats(reasoning=reasoning)
    given = items(logprobs="logprobs" in fields)
    plain, http, grpc = (answer_of(kind, formats, **fields) for _ in range(3))
    chunks = [chunk for item in given for chunk in plain.chunks(*item)] + plain.last_chunks()
    encoder, messages = EventEncoder(http), ChunkMessages(grpc)
    events = [event for item in given for event in encoder.events(item)] + encoder.last_events()
    dumps = [json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in chunks]
    assert events == [f"data: {text}\n\n".encode() for text in [*dumps, "[DONE]"]]
    sent = [message for item in given for message in messages.messages([item])] + messages.last_messages()
    assert sent == [response_message(chunk) for chunk in chunks]
    assert [m.SerializeToString() for m in sent] == [response_message(c).SerializeToString() for c in chunks]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_messages_of_a_late_stream_hold_the_text_of_several_steps(kind):
    one_by_one, late = (answer_of(kind, OutputFormats(), n=1) for _ in range(2))
    given = [item for item in items(logprobs=False) if item[1].index == 0]
    chunks = [message for item in given for message in ChunkMessages(one_by_one).messages([item])]
    merged = list(ChunkMessages(late).messages(given))
    assert len(merged) == (2 if kind == "completion" else 4) < len(chunks)  # a chat: role, first text, text, end

    def texts(sent: list[Any]) -> str:
        return "".join(choice.text + choice.message.content for message in sent for choice in message.choices)

    assert texts(merged) == texts(chunks) == "".join(TEXTS) + "!"
    assert merged[-1].choices[0].finish_reason == "length"


def test_text_before_an_error_is_sent_before_it():
    messages = ChunkMessages(answer_of("completion", OutputFormats(), n=1)).messages(
        [(0, delta(0, "so far", logprobs=False), None), ended_by_error()]
    )
    assert next(messages).choices[0].text == "so far"
    with pytest.raises(GenerationError, match="it broke"):
        next(messages)
