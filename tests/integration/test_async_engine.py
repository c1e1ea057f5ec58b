"""The engine in its own thread: streams, cancels, refusals, and what happens when the thread dies."""

from __future__ import annotations

import asyncio

import pytest

from serving import AsyncEngine, RequestError, SamplingParams
from serving.async_engine import EngineDeadError

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


def test_a_cancelled_task_aborts_its_request(async_engine):
    async def main():
        task = asyncio.create_task(collect(async_engine, [1], SamplingParams(max_tokens=90, ignore_eos=True)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
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


def test_a_duplicate_id_leaves_the_first_stream_alone(async_engine):
    async def main():
        first = asyncio.create_task(collect(async_engine, [1, 2], request_id="same"))
        await asyncio.sleep(0)
        second = asyncio.create_task(collect(async_engine, [3], request_id="same"))
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = asyncio.run(main())
    assert len(first[0]) == 12 and isinstance(second, RequestError)


def test_after_close_calls_raise(async_engine):
    async_engine.close()
    with pytest.raises(EngineDeadError):
        asyncio.run(collect(async_engine, [1]))


class _BrokenEngine:
    """Accepts a request and fails at its first step."""

    def __init__(self):
        self.requests = []

    def add(self, prompt, params, request_id):
        self.requests.append(request_id)

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
