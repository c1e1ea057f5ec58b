"""Cases of other engines about structured output, penalties and the context's end, through HTTP. Named by their ids."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from http_harness import CONTEXT, Servers, check_idle, poison, servers

from configs.server import ServerConfig
from serving.request import NotNowError
from serving.structured.constraint import Constraint

LETTERS = list(range(ord("a"), ord("z") + 1))
COMPLETIONS = "/v1/completions"
NEIGHBOUR = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS, "max_tokens": 40}
DIGITS = {"prompt": "a", "structured_outputs": {"regex": "[0-9]{12}"}, "max_tokens": 20}


@pytest.fixture(scope="module")
def url(engine):
    with servers() as running:
        yield _start(running, engine)


def _start(running: Servers, engine: Any) -> str:
    return running.start_service(ServerConfig(served_model_name="tiny"), engine)[0]


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def engine_is_left_as_it_was(engine):
    yield
    check_idle(engine)


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


class Neighbour:
    """A stream that runs meanwhile; its text must be what it is alone."""

    def __init__(self, url: str):
        self._url = url
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._text = ""

    def _run(self) -> None:
        with (
            httpx.Client(base_url=self._url, timeout=60) as client,
            client.stream("POST", COMPLETIONS, json={**NEIGHBOUR, "stream": True}) as response,
        ):
            for line in response.iter_lines():
                self._has_begun.set()
                if line.startswith("data: {"):
                    self._text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def __enter__(self) -> None:
        self._thread.start()
        assert self._has_begun.wait(60)

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        with httpx.Client(base_url=self._url, timeout=60) as client:
            assert self._text == ok(client.post(COMPLETIONS, json=NEIGHBOUR))["choices"][0]["text"] != ""


BROKEN = [
    ({"regex": "a**"}, "structured_outputs.regex"),
    ({"regex": "[a"}, "structured_outputs.regex"),
    ({"regex": "(a"}, "structured_outputs.regex"),
    ({"regex": "a{2,1}"}, "structured_outputs.regex"),
    ({"regex": "("}, "structured_outputs.regex"),
    ({"grammar": 'start: "a'}, "structured_outputs.grammar"),
    ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
    ({"grammar": "start: start"}, "structured_outputs.grammar"),
    ({"json": {"type": "string", "pattern": 5}}, "structured_outputs.json"),
    ({"json": {"type": "string", "pattern": "[a"}}, "structured_outputs.json"),
    ({"json": {"patternProperties": {"(": {}}}}, "structured_outputs.json"),
    ({"json": "{"}, "structured_outputs.json"),
]


def test_s17_broken_patterns_and_grammars_are_refused_and_hurt_no_neighbour(http, url):
    with Neighbour(url):
        for structured, param in BROKEN:
            for path, prompt in (
                (COMPLETIONS, {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                for stream in (False, True):
                    body = {**prompt, "structured_outputs": structured, "max_tokens": 5, "stream": stream}
                    assert refused(http.post(path, json=body))["param"].startswith(param), structured


def test_s28_penalties_hold_on_repeating_text_and_logprobs_are_the_models_own(http):
    """There are no drafts: fields that ask for them are refused, and a repeating prompt gets what its penalties say."""
    for field in ("speculative_config", "num_speculative_tokens", "draft_model", "prediction"):
        assert refused(http.post(COMPLETIONS, json={"prompt": "a", field: 5}))["param"] == field
    prompt = [*b"abc" * 8]
    base = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS, "max_tokens": 24}
    texts = {}
    for name in ("presence_penalty", "frequency_penalty"):
        for penalty in (-2, 0, 2):
            body = {**base, name: penalty, "logprobs": 3, "return_token_ids": True}
            choice = ok(http.post(COMPLETIONS, json=body))["choices"][0]
            token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            scored = {"prompt": prompt + token_ids, "max_tokens": 0, "echo": True, "logprobs": 0}
            own = ok(http.post(COMPLETIONS, json=scored))["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]
            assert len(token_ids) == 24 and logprobs == pytest.approx(own, abs=1e-4) and max(logprobs) < 0
            texts[name, penalty] = token_ids
    for name in ("presence_penalty", "frequency_penalty"):
        kinds = [len(set(texts[name, penalty])) for penalty in (-2, 0, 2)]
        assert kinds[0] <= kinds[1] <= kinds[2] and kinds[0] < kinds[2], texts
    assert texts["presence_penalty", 0] == texts["frequency_penalty", 0]


@pytest.mark.parametrize("stream", [False, True])
def test_s30_a_repeating_prompt_ends_at_the_context_with_length(http, stream):
    body = {"prompt": [*b"abc" * CONTEXT][: CONTEXT - 3], "temperature": 0, "ignore_eos": True, "stream": stream}
    refused(http.post(COMPLETIONS, json={**body, "max_tokens": 4}))
    body["max_tokens"] = 3
    if not stream:
        answer = ok(http.post(COMPLETIONS, json=body))
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == CONTEXT
        return
    lines = http.post(COMPLETIONS, json={**body, "stream_options": {"include_usage": True}}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-2]["choices"][0]["finish_reason"] == "length" and events[-1]["usage"]["total_tokens"] == CONTEXT


def test_s45_s65_no_caller_can_say_anything_about_a_hand_off_of_kv(http):
    for field in (
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_room",
        "disaggregated_params",
        "ec_transfer_params",
    ):
        for value in ({}, {"do_remote_prefill": True, "remote_block_ids": [1]}, "x", 7):
            assert refused(http.post(COMPLETIONS, json={"prompt": "a", field: value}))["param"] == field


def test_s68_a_schema_that_fails_only_when_it_is_compiled_fails_its_request_alone(http, url):
    with Neighbour(url):
        for schema, named in (
            ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
            ({"$ref": "#/$defs/nope"}, "$ref"),
            ({"$ref": "#"}, "matches no text"),
            (False, "false"),
            ({"type": "integer", "multipleOf": 999983}, "compile"),
        ):
            error = refused(http.post(COMPLETIONS, json={"prompt": "a", "structured_outputs": {"json": schema}}))
            assert error["param"].startswith("structured_outputs.json") and named in error["message"], schema
        # Everything is valid by the empty schema; a number would go on for ever.
        for schema in ({}, True):
            body = {"prompt": "a", "structured_outputs": {"json": schema}, "max_tokens": 8, "logit_bias": {"110": 100}}
            assert ok(http.post(COMPLETIONS, json=body))["choices"][0]["text"] == "null"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_compiled_now_may_be_later(http, engine, monkeypatch, stream):
    def busy(structured: Any) -> Any:
        raise NotNowError("structured", "cannot be compiled now: others are being compiled")

    monkeypatch.setattr(engine.engine._grammars, "compile", busy)
    response = http.post(COMPLETIONS, json={**DIGITS, "stream": stream})
    error = refused(response, 503)
    assert "cannot be compiled now" in error["message"] and response.headers["retry-after"] == "1"
    monkeypatch.undo()
    assert len(ok(http.post(COMPLETIONS, json=DIGITS))["choices"][0]["text"]) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_s68_a_failure_of_the_grammar_at_the_fifth_token_ends_its_request_alone(http, url, monkeypatch, stream):
    accept = Constraint.accept

    def fail_at_five(constraint: Constraint, token_id: int) -> None:
        if constraint.grammar.structured.value == "[0-9]{12}" and constraint._num_tokens == 4:
            constraint._guard(lambda: 1 // 0)
        accept(constraint, token_id)

    monkeypatch.setattr(Constraint, "accept", fail_at_five)
    with Neighbour(url):
        response = http.post(COMPLETIONS, json={**DIGITS, "stream": stream})
        if stream:
            events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
            assert "error" in events[-1] and 1 <= len(events) - 1 <= 5
        else:
            assert refused(response, 500)["code"] == "generation_failed"
        other = ok(http.post(COMPLETIONS, json={**DIGITS, "structured_outputs": {"regex": "[0-9]{11}"}}))
        assert len(other["choices"][0]["text"]) == 11
    monkeypatch.undo()
    assert len(ok(http.post(COMPLETIONS, json=DIGITS))["choices"][0]["text"]) == 12


def test_s68_a_token_below_zero_never_reaches_the_grammar(http, engine, monkeypatch):
    """What the sampler says where a row's numbers are not finite."""
    accepted = []
    accept = Constraint.accept

    def note(constraint: Constraint, token_id: int) -> None:
        accepted.append(token_id)
        accept(constraint, token_id)

    poison(monkeypatch, engine, lambda request: request.params.structured is not None)
    monkeypatch.setattr(Constraint, "accept", note)
    assert "not finite" in refused(http.post(COMPLETIONS, json=DIGITS), 500)["message"]
    assert len(accepted) == 2 and min(accepted) >= 0
