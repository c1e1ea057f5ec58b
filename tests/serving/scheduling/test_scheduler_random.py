"""Long random runs of the scheduler against a device that knows what every page must hold."""

from __future__ import annotations

import pytest

from serving.request import FinishReason, RequestError, StructuredOutput
from serving.scheduling.config import RopeRegime
from serving.scheduling.swap import SwapConfig

NUM_REQUESTS = 60


def random_engine(tools, rng, **changes):
    """An engine of random small sizes: tiny pools, so that preemption, eviction and stalls happen all the time."""
    page_size = changes.pop("page_size", None) or rng.choice([1, 4, 16, 64])
    max_model_len = changes.get("max_model_len") or max(24, rng.choice([page_size * 2 + 3, page_size * 4, 96]))
    min_pages = -(-(max_model_len - 1) // page_size) + 1  # one longest sequence and the null page
    query_block = rng.choice([1, 4, 8])
    max_pinned_pages = rng.choice([0, 0, 3])
    values = {
        "page_size": page_size,
        "num_pages": min_pages + max_pinned_pages + rng.choice([0, 1, min_pages, 4 * min_pages]),
        "max_pinned_pages": max_pinned_pages,
        "prefix_cache_scope": rng.choice(["shared", "tenant"]),
        "prefix_cache_floor": rng.choice([0.0, 0.1, 0.5, 1.0]),
        "prefix_wait_tokens": rng.choice([None, 1, page_size + 1]),
        "decode_sizes": tuple(sorted({rng.randint(1, 8) for _ in range(rng.choice([1, 1, 3]))})),
        "max_model_len": max_model_len,
        "query_block": query_block,
        "prefill_token_buckets": (query_block * rng.randint(1, 8),),
        "max_decode_steps": min(rng.choice([1, 8]), page_size),
        "enable_prefix_caching": rng.random() < 0.8,
        "swap": None if rng.random() < 0.5 else random_swap(rng),
    }
    return tools.Engine(tools.make_config(**(values | changes)), depth=rng.choice([0, 1, 1, 1, 2]))


def random_swap(rng):
    """Room for no, some or all preempted sequences."""
    return SwapConfig(host_bytes=rng.choice([1, 20, 1000]), page_bytes=1, batch_pages=rng.randint(1, 4))


def random_request(tools, rng, config, prefixes, index):
    """Half the prompts start with a common prefix; lengths reach the context limit; some have n > 1, stop tokens,
    min_tokens, a salt, another tenant, a structured output, or score only."""
    max_prompt = config.max_model_len - 1
    prompt = list(rng.choice(prefixes)) if rng.random() < 0.5 else []
    prompt += tools.random_prompt(rng, rng.randint(1, max(1, max_prompt // 2)))
    prompt = prompt[:max_prompt]
    max_tokens = rng.choice([1, 2, rng.randint(1, config.max_model_len), config.max_model_len])
    params = {}
    if rng.random() < 0.4:
        params["stop_token_ids"] = tuple(rng.sample(range(tools.VOCAB_SIZE), 2))
        params["min_tokens"] = rng.randint(0, min(5, max_tokens))
    if rng.random() < 0.1:
        params["prompt_logprobs"] = 0
        if rng.random() < 0.5:
            params.pop("min_tokens", None)
            max_tokens = 0
    if rng.random() < 0.25:
        params["structured"] = StructuredOutput.json_object()
    num_children = rng.choice([1, 1, 1, 3])
    shared = {
        "seed": rng.randrange(4),
        "cache_salt": rng.choice([b"", b"", b"salt"]),
        "tenant": rng.choice(["a", "a", "b", "c"]),
        "max_model_len": config.max_model_len,
    }
    return [
        tools.make_request(f"r{index}", prompt, max_tokens, child_index=child, **shared, **params)
        for child in range(num_children)
    ]


def drive(tools, rng, engine, *, num_requests=NUM_REQUESTS, with_faults=True):
    """Random arrivals, aborts at any stage, stop strings, NaNs, pinned prefixes and a prefix cache that is emptied, until
    all is done; outputs must be solo outputs."""
    config = engine.config
    prefixes = [tools.random_prompt(rng, rng.randint(1, config.max_model_len)) for _ in range(3)]
    arrival_rate = rng.choice([0.05, 0.3, 1.0])
    index = 0
    pinned = []
    while True:
        while index < num_requests and rng.random() < arrival_rate:
            for request in random_request(tools, rng, config, prefixes, index):
                key = (request.request_id, request.child_index)
                if with_faults and rng.random() < 0.05:
                    engine.runner.poison_after[key] = rng.randint(0, 10)
                if with_faults and rng.random() < 0.15:
                    engine.finish_after[key] = rng.randint(1, 10)
                engine.add(request)
            index += 1
        if with_faults and rng.random() < 0.03 and index:
            ended = engine.scheduler.abort(f"r{rng.randrange(index)}")
            assert all(request.finish_reason is FinishReason.ABORT for request in ended)
            engine.scheduler.check_integrity()
        if with_faults and rng.random() < 0.03:
            engine.scheduler.reset_prefix_cache()
            engine.scheduler.check_integrity()
        if config.max_pinned_pages and config.enable_prefix_caching and rng.random() < 0.05:
            if pinned and rng.random() < 0.3:
                engine.scheduler.unpin_prefix(pinned.pop())
            else:
                request = tools.make_request("pin", rng.choice(prefixes), tenant="a")
                try:
                    engine.scheduler.pin_prefix(request)
                except RequestError as error:
                    assert error.field == "prompt"
                else:
                    if request.prompt_token_ids not in [other.prompt_token_ids for other in pinned]:
                        pinned.append(request)
            engine.scheduler.check_integrity()
        if not engine.step() and index == num_requests:
            break
    for request in pinned:
        engine.scheduler.unpin_prefix(request)
    engine.check_idle()
    engine.check_outputs()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("trial", range(6))
def test_outputs_in_random_company_equal_solo_outputs(tools, rng, page_size, trial):
    engine = random_engine(tools, rng, page_size=page_size)
    print(engine.config, "depth", engine.depth)
    drive(tools, rng, engine)


@pytest.mark.parametrize("rope_type", ["longrope_limit", "dynamic_limit"])
@pytest.mark.parametrize("trial", range(4))
def test_outputs_equal_solo_outputs_where_keys_depend_on_the_length(tools, rng, rope_type, trial):
    engine = random_engine(tools, rng, rope=RopeRegime(**{rope_type: rng.randint(1, 60)}))
    print(engine.config, "depth", engine.depth)
    drive(tools, rng, engine)


@pytest.mark.parametrize("trial", range(2))
def test_outputs_equal_solo_outputs_in_static_batches(tools, rng, trial):
    engine = random_engine(tools, rng, static_batching=True)
    print(engine.config, "depth", engine.depth)
    drive(tools, rng, engine)


def test_under_memory_pressure_every_request_gets_its_solo_output(tools, rng):
    """A pool of one or two longest sequences, eight slots, long outputs, shared prefixes: preemption all the time."""
    num_preemptions = num_requests = 0
    for page_size, max_decode_steps in ((4, 1), (4, 4), (16, 8), (1, 1)):
        min_pages = 96 // page_size + 1
        engine = random_engine(
            tools,
            rng,
            page_size=page_size,
            num_pages=min_pages + rng.randint(0, min_pages),
            max_pinned_pages=0,
            decode_sizes=(8,),
            max_model_len=96,
            max_decode_steps=max_decode_steps,
            query_block=4,
            prefill_token_buckets=(32,),
        )
        print(engine.config, "depth", engine.depth)
        prefixes = [tools.random_prompt(rng, 20) for _ in range(4)]
        for index in range(40):
            prompt = [*rng.choice(prefixes)[: rng.randint(0, 20)], *tools.random_prompt(rng, rng.randint(1, 10))]
            max_tokens = rng.randint(30, 60)
            engine.add(tools.make_request(f"r{index}", prompt, max_tokens, max_model_len=96, seed=index))
            for _ in range(rng.randint(0, 4)):
                engine.step()
        engine.run()
        engine.check_outputs()
        most = max(request.num_preemptions for request in engine.requests.values())
        print("preemptions", engine.scheduler.stats.num_preemptions, "most of one request", most)
        num_preemptions += engine.scheduler.stats.num_preemptions
        num_requests += len(engine.requests)
    # Enough for the run to mean something: at least five in a hundred requests.
    assert num_preemptions >= num_requests // 20
