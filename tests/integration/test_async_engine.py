"""The engine in its own thread: streams, cancels, refusals, and what happens when the thread dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from http_harness import Brake

from serving import AsyncEngine, RequestError, SamplingParams
from serving.async_engine import EngineDeadError

TINY = Path(__file__).parents[1] / "data" / "tiny"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def async_engine(tiny_llm):
    engine = AsyncEngine(tiny_llm.engine)
    yield engine
    engine.close()
    assert not engine.is_alive
    stats = tiny_llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_free_pages"] == stats["num_pages"] - 1


async def collect(engine, prompt, params=GREEDY, **kwargs):
    streamed, last = [], None
    async for delta, output in engine.generate(prompt, params, **kwargs):
        streamed += delta.new_token_ids
        last = output
    return streamed, last


def test_many_streams_at_once_each_get_their_own_tokens_in_order(tiny_llm, async_engine):
    prompts = [[i, i + 1, i + 2] for i in range(40)]

    async def main():
        return await asyncio.gather(*(collect(async_engine, prompt) for prompt in prompts))

    results = asyncio.run(main())
    async_engine.close()
    expected = tiny_llm.generate(prompts, GREEDY, use_tqdm=False)
    for (streamed, output), alone in zip(results, expected, strict=True):
        assert streamed == output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.finished and len(streamed) == 12


def test_chat_streams_what_the_rendered_prompt_gives_and_stats_count_it(tiny_llm, async_engine, monkeypatch):
    rendered = []

    def render_chat(messages, **template_args):  # the tiny model has no tokenizer, so no template
        rendered.append((messages, template_args))
        return [7, 8, 9]

    async def chat():
        stream = async_engine.chat([{"role": "user", "content": "x"}], GREEDY, add_generation_prompt=False)
        return [token_id async for delta, _ in stream for token_id in delta.new_token_ids]

    with pytest.raises(RequestError, match="messages: need a chat template, and this model has none"):
        asyncio.run(chat())
    num_requests = async_engine.stats()["num_requests"]
    monkeypatch.setattr(tiny_llm.engine, "render_chat", render_chat)
    streamed = asyncio.run(chat())
    assert rendered == [([{"role": "user", "content": "x"}], {"add_generation_prompt": False})]
    assert async_engine.stats()["num_requests"] == num_requests + 1
    assert streamed == asyncio.run(collect(async_engine, [7, 8, 9]))[0]


def test_leaving_a_stream_early_frees_its_pages_and_disturbs_nobody(tiny_llm, async_engine):
    long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)

    async def leave_after(count):
        async for delta, _ in async_engine.generate([7, 8, 9], long):
            count -= len(delta.new_token_ids)
            if count <= 0:
                break

    async def main():
        leavers = [leave_after(n) for n in (1, 2, 5, 10) for _ in range(10)]
        results = await asyncio.gather(collect(async_engine, [1, 2, 3]), *leavers)
        while async_engine.engine.stats()["num_running"]:
            await asyncio.sleep(0.01)
        return results[0][0]

    streamed = asyncio.run(main())
    async_engine.close()
    assert streamed == tiny_llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_cancelled_task_aborts_its_request(async_engine, monkeypatch):
    brake = Brake(monkeypatch, async_engine, 3)

    async def main():
        task = asyncio.create_task(collect(async_engine, [1], SamplingParams(max_tokens=90, ignore_eos=True)))
        while brake.num_steps:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        brake.num_steps = None
        while async_engine.engine.has_work():
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_refused_request_raises_in_its_caller_alone(async_engine):
    async def main():
        bad = [collect(async_engine, [301]), collect(async_engine, []), collect(async_engine, "text")]
        return await asyncio.gather(collect(async_engine, [1, 2]), *bad, return_exceptions=True)

    good, *bad = asyncio.run(main())
    assert len(good[0]) == 12
    assert all(isinstance(error, RequestError) for error in bad)


def test_a_duplicate_id_leaves_the_first_stream_alone(async_engine, monkeypatch):
    brake = Brake(monkeypatch, async_engine)

    async def main():
        first = asyncio.create_task(collect(async_engine, [1, 2], request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="request_id"):
            await collect(async_engine, [3], request_id="same")
        brake.num_steps = None
        return await first

    assert len(asyncio.run(main())[0]) == 12


class _BrokenList(list):
    def __iter__(self):
        raise OSError("no items today")


class _BrokenText:
    def __str__(self):
        raise OSError("no text today")

    __repr__ = __str__


def test_whatever_a_request_raises_is_its_callers_alone(async_engine):
    async def main():
        bad = [collect(async_engine, _BrokenList([1])), collect(async_engine, [_BrokenText()])]
        bad += [collect(async_engine, [1], request_id=request_id) for request_id in ([1], {}, "", 5)]
        results = await asyncio.gather(collect(async_engine, [1, 2]), *bad, return_exceptions=True)
        for request_id in ([1], {}, None):
            with pytest.raises(RequestError, match="request_id"):
                async_engine.abort(request_id)
        return [*results, await collect(async_engine, [3])]

    good, iterated, shown, *named, last = asyncio.run(main())
    assert len(good[0]) == len(last[0]) == 12
    assert isinstance(iterated, OSError)
    assert str(shown) == "prompt_token_ids[0]: must be an integer, got a _BrokenText"
    assert all(isinstance(error, RequestError) and error.field == "request_id" for error in named)


def test_an_unexpected_error_in_the_engines_thread_reaches_the_caller_that_caused_it(async_engine, monkeypatch):
    add_checked = async_engine.engine.add_checked

    def fails_for_five(checked, request_id=None, **options):
        if checked.token_ids == (5,):
            raise OSError("not today")
        return add_checked(checked, request_id, **options)

    monkeypatch.setattr(async_engine.engine, "add_checked", fails_for_five)

    async def main():
        return await asyncio.gather(collect(async_engine, [5]), collect(async_engine, [1]), return_exceptions=True)

    bad, good = asyncio.run(main())
    assert isinstance(bad, OSError) and len(good[0]) == 12


def test_ids_of_callers_are_passed_over_when_the_engine_names_a_request(async_engine):
    async def main():
        _, output = await collect(async_engine, [1])
        number = int(output.request_id.removeprefix("request-"))
        taken = [f"request-{number + ahead}" for ahead in range(1, 4)]
        named = [collect(async_engine, [2], request_id=request_id) for request_id in taken]
        return await asyncio.gather(*named, collect(async_engine, [3]))

    results = asyncio.run(main())
    assert len({output.request_id for _, output in results}) == 4


def test_abort_by_id_ends_the_stream_with_its_output(async_engine, monkeypatch):
    brake = Brake(monkeypatch, async_engine, 5)

    async def main():
        last = None
        async for _, output in async_engine.generate([1], SamplingParams(max_tokens=90, ignore_eos=True), "mine"):
            async_engine.abort("mine")
            last = output
        brake.num_steps = None  # for the step in flight
        return last

    assert str(asyncio.run(main()).outputs[0].finish_reason) == "abort"


def test_close_while_a_request_runs_leaves_no_step_in_flight(tiny_llm, async_engine):
    async def main():
        async for _ in async_engine.generate([1], SamplingParams(max_tokens=90, ignore_eos=True)):
            async_engine.close()

    asyncio.run(main())
    assert not tiny_llm.engine.has_work()


_ENDS_WHILE_A_REQUEST_RUNS = """
import asyncio, sys
from configs.engine import EngineConfig
from serving import AsyncEngine, SamplingParams

config = EngineConfig(dtype="float32", max_model_len=1024, max_num_seqs=1, prefill_token_buckets=(32,),
                      num_pages=65, max_decode_steps=1)
engine = AsyncEngine.from_source(sys.argv[1], config)
loop = asyncio.new_event_loop()
stream = engine.generate([1], SamplingParams(max_tokens=None, ignore_eos=True))
loop.run_until_complete(anext(stream))
print("running:", engine.engine.has_work())
"""


def test_the_interpreter_may_end_while_a_request_runs():
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_WHILE_A_REQUEST_RUNS, f"dummy:{TINY}"], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout, "Exception" in ended.stderr) == (0, "running: True\n", False), ended.stderr


class _SlowTokenizer:
    """Encodes any text as token 1, and only once it is told to."""

    def __init__(self):
        self.go_on = threading.Event()

    def encode(self, text, *, add_special_tokens, allow_special_text):
        assert self.go_on.wait(timeout=60)
        return [1]

    def token_bytes(self, token_id, *, skip_special_tokens=False):
        return b"x"


def test_a_text_that_takes_long_to_encode_holds_up_no_other_stream(async_engine, monkeypatch):
    tokenizer = _SlowTokenizer()
    monkeypatch.setattr(async_engine.engine, "tokenizer", tokenizer)

    async def main():
        slow = asyncio.create_task(collect(async_engine, "a text"))
        await asyncio.sleep(0)
        streamed, _ = await collect(async_engine, [1, 2])
        assert len(streamed) == 12 and not slow.done()
        tokenizer.go_on.set()
        return await slow

    streamed, output = asyncio.run(main())
    assert len(streamed) == 12 and output.prompt == "a text"


def test_a_text_far_beyond_the_context_is_refused_unencoded(async_engine, monkeypatch):
    monkeypatch.setattr(async_engine.engine, "tokenizer", _SlowTokenizer())  # it would wait for ever
    with pytest.raises(RequestError, match="prompt: has 6145 characters; the context holds 96 tokens"):
        asyncio.run(collect(async_engine, "x" * (96 * 64 + 1)))


def test_after_close_calls_raise(async_engine):
    async_engine.close()
    with pytest.raises(EngineDeadError):
        asyncio.run(collect(async_engine, [1]))


class _BrokenEngine:
    """Accepts a request and fails at its first step."""

    def __init__(self):
        self.requests = []

    def check(self, prompt, params):
        return prompt

    def add_checked(self, checked, request_id, **_options):
        self.requests.append(f"request-{len(self.requests)}")
        return self.requests[-1]

    def has_work(self):
        return bool(self.requests)

    def step(self):
        raise RuntimeError("device lost")


def test_when_the_thread_dies_every_waiting_and_later_call_raises():
    engine = AsyncEngine(_BrokenEngine())

    async def main():
        return await asyncio.gather(*(collect(engine, [1]) for _ in range(3)), return_exceptions=True)

    results = asyncio.run(main())
    assert all(isinstance(error, EngineDeadError) for error in results)
    assert "device lost" in str(results[0].__cause__)
    with pytest.raises(EngineDeadError):
        asyncio.run(collect(engine, [1]))
