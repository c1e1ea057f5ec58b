"""The prefix cache on a real engine: what it saves, that it changes no bit, and that it tells tenants nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
import numpy as np
import pytest
from http_harness import Requests, Servers, tiny_engine

from configs.checks import ConfigError
from configs.engine import EngineConfig
from configs.server import ServerConfig
from serving import LLM, SamplingParams
from serving.api.http_server import build_admin_app
from serving.api.service import Service
from serving.cli.serve import resolved_engine_config

TINY = Path(__file__).parents[1] / "data" / "tiny"
COMPLETIONS = "/v1/completions"
KEYED = ServerConfig(served_model_name="tiny", api_keys=("key-a", "key-b"), api_key_tenants=("acme", "bolt"))
AS_A, AS_B = ({"Authorization": f"Bearer {key}"} for key in KEYED.api_keys)


def test_a_shared_prefix_is_computed_once_for_a_hundred_requests_which_get_the_same_bits():
    """As 2,048 tokens at a quarter of the size; `benchmarks/prefix_sharing.py` has the whole."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(8, 301, 512).tolist()  # past the end of sequence, 7
    prompts = [prefix + rng.integers(8, 301, 16).tolist() for _ in range(100)]
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=0, ignore_eos=True)
    results, computed = {}, {}
    for is_cached in (True, False):
        llm = LLM(
            f"dummy:{TINY}",
            dtype="float32",
            max_model_len=544,
            max_num_seqs=8,
            page_size=16,
            prefill_token_buckets=(256,),
            query_block=16,
            num_pages=8 * 34 + 1,
            max_decode_steps=1,
            enable_prefix_caching=is_cached,
            show_progress=False,
        )
        # Without the cache a tenth of the requests will do: each is computed from its first token.
        outputs = llm.generate(prompts if is_cached else prompts[::10], params, use_tqdm=False)
        # Later log-probs may differ in the last bit, with the cache or without: mixed programs have products of other sizes.
        results[is_cached] = [(o.outputs[0].token_ids, o.outputs[0].logprobs[0]) for o in outputs]
        computed[is_cached] = llm.stats()["num_prefill_tokens"]
        llm.engine.scheduler.check_integrity()
    assert computed[False] == 10 * 528
    assert computed[True] == 512 + 100 * 16 <= 100 * 528 / 2  # those that came together waited for the first
    assert results[True][::10] == results[False]


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(max_pinned_pages=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def http(running: Servers, engine):
    with httpx.Client(base_url=running.start_service(KEYED, engine)[0], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def admin(running: Servers, engine):
    service = Service(KEYED, "tiny")
    service.attach(engine)
    address = running.start(build_admin_app(service, version="0", config_text="text"), KEYED)
    with httpx.Client(base_url=address, timeout=60, headers=AS_A) as client:
        yield client


def cached_tokens(http: httpx.Client, headers: dict[str, str], prompts: list, **fields) -> int:
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, **fields}
    response = http.post(COMPLETIONS, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def area_under_curve(right: list[int], wrong: list[int]) -> float:
    """How well a threshold tells right guesses from wrong ones: 0.5 not at all, 1.0 always."""
    better = sum((a < b) + 0.5 * (a == b) for a in right for b in wrong)
    return better / (len(right) * len(wrong))


def test_guesses_of_another_tenants_prefix_find_nothing_and_take_as_much_work_as_wrong_ones(http, engine):
    rng = np.random.default_rng(11)
    requests = Requests()
    engine.engine.observers = (requests,)
    num_own = 0
    for round_index in range(25):
        secrets, others = rng.integers(8, 256, (2, 10, 17)).tolist()
        assert cached_tokens(http, AS_A, secrets) == 0
        salt = {"cache_salt": "guess"} if round_index % 2 else {}
        assert cached_tokens(http, AS_B, [*secrets, *others], **salt) == 0
        num_own += cached_tokens(http, AS_A, secrets)
    assert num_own == 25 * 10 * 16  # the same tenant finds both full pages each time
    computed = [r.num_prompt_tokens - r.num_cached_tokens for r in requests.records if r.context.tenant == "bolt"]
    right = [n for index, n in enumerate(computed) if index % 20 < 10]
    wrong = [n for index, n in enumerate(computed) if index % 20 >= 10]
    assert len(right) + len(wrong) == 500 and area_under_curve(right, wrong) <= 0.55


def test_a_prefix_is_pinned_and_unpinned_by_the_admin_routes(http, admin):
    prompt = list(range(100, 140))
    body = {"prompt": prompt, "tenant": "acme"}
    assert admin.post("/pin_prefix", json=body).json() == {"num_pages": 5}
    cached_tokens(http, AS_A, prompt)
    for first in range(8, 200, 4):
        cached_tokens(http, AS_B, [[first, second, *range(50)] for second in range(20, 25)])
    assert cached_tokens(http, AS_A, [*prompt, 9]) == 40
    assert cached_tokens(http, AS_B, [*prompt, 9]) == 0
    assert admin.post("/unpin_prefix", json=body).json() == {"num_pages": 5}
    text = {"prompt": "x" * 20, "cache_salt": "mine"}
    assert admin.post("/pin_prefix", json=text).json() == {"num_pages": 2}
    assert admin.post("/unpin_prefix", json=text).json() == {"num_pages": 2}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/pin_prefix", {"prompt": [8] * 90}, "prompt"),  # eleven pages; max_pinned_pages is 8
        ("/pin_prefix", {"prompt": [8] * 7}, "prompt"),
        ("/pin_prefix", {"prompt": [8] * 9999}, "prompt"),
        ("/pin_prefix", {"prompt": [301] * 9}, "prompt_token_ids[0]"),
        ("/pin_prefix", {"prompt": [[8] * 9]}, "prompt[0]"),
        ("/pin_prefix", {"prompt": 5}, "prompt"),
        ("/pin_prefix", {}, "prompt"),
        ("/pin_prefix", {"prompt": [8] * 9, "tenant": ""}, "tenant"),
        ("/pin_prefix", {"prompt": [8] * 9, "tenant": 5}, "tenant"),
        ("/pin_prefix", {"prompt": [8] * 9, "cache_salt": ""}, "cache_salt"),
        ("/pin_prefix", {"prompt": [8] * 9, "max_tokens": 5}, "max_tokens"),
        ("/unpin_prefix", {"prompt": [9] * 20}, "prompt"),
    ],
)
def test_wrong_pins_are_refused_by_name(admin, path, body, field):
    response = admin.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_s34_nothing_cached_or_pinned_is_found_after_the_cache_was_reset_as_for_new_weights(http, admin):
    prompt = list(range(60, 100))
    admin.post("/pin_prefix", json={"prompt": prompt, "tenant": "acme"}).raise_for_status()
    cached_tokens(http, AS_A, prompt)
    assert cached_tokens(http, AS_A, prompt) == 32
    assert admin.post("/reset_prefix_cache").json()["num_pages"] >= 5
    assert cached_tokens(http, AS_A, prompt) == 0
    assert cached_tokens(http, AS_A, prompt) == 32
    admin.post("/unpin_prefix", json={"prompt": prompt, "tenant": "acme"}).raise_for_status()


def test_a_server_with_tenants_keeps_their_prefixes_apart_unless_told_otherwise(engine):
    config = EngineConfig()
    one_tenant = dataclasses.replace(KEYED, api_key_tenants=("acme", "acme"))
    for server, scope in (
        (KEYED, "tenant"),
        (ServerConfig(tenant_header="X-Tenant"), "tenant"),
        (one_tenant, "shared"),
    ):
        assert resolved_engine_config(config, server).prefix_cache_scope == scope
    shared = EngineConfig(prefix_cache_scope="shared")
    assert resolved_engine_config(shared, KEYED) is shared
    off = EngineConfig(enable_prefix_caching=False)
    assert resolved_engine_config(off, KEYED) is off
    inner = engine.engine
    unset, inner.config = inner.config, dataclasses.replace(inner.config, prefix_cache_scope=None)
    try:
        with pytest.raises(ConfigError, match="prefix_cache_scope"):
            Service(KEYED, "tiny").attach(engine)
        Service(one_tenant, "tiny").attach(engine)
    finally:
        inner.config = unset


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefix_cache_scope", "tenant"), ("prefix_cache_floor", 0.1), ("max_pinned_pages", 3)],
)
def test_settings_of_a_prefix_cache_that_is_off_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}.*contradicts enable_prefix_caching=False"):
        EngineConfig(enable_prefix_caching=False, **{field: value})
