"""Completions and beams that share pages, on a tiny engine: pages, outputs, preemption; beams against a plain search."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serving import LLM, BeamSearchParams, RequestError, RequestOutput, SamplingParams
from serving.request import FinishReason
from serving.scheduling.scheduler import Scheduler

TINY = Path(__file__).parents[1] / "data" / "tiny"
CONTEXT, PAGE_SIZE, NUM_PAGES = 2112, 16, 400


def make_llm(folder: Path, **fields) -> LLM:
    config = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    values = {
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_num_seqs": 8,
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "prefill_token_buckets": (256,),
        "query_block": 16,
        "max_decode_steps": 1,
    }
    return LLM(f"dummy:{folder}", show_progress=False, **(values | fields))


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def scheduler(llm: LLM, **changes) -> Iterator[Scheduler]:
    """Run with another scheduler over the same engine; at the end no page of it is held."""
    engine, usual = llm.engine, llm.engine.scheduler
    engine.scheduler = Scheduler(dataclasses.replace(usual.config, **changes))
    try:
        yield engine.scheduler
        assert engine.scheduler.page_allocator.num_held_pages == 0
        engine.scheduler.check_integrity()
    finally:
        engine.scheduler = usual


def run(llm: LLM, *requests: tuple[list[int], SamplingParams]) -> tuple[list[RequestOutput], int]:
    """The outputs, and the most pages that were held at once."""
    engine = llm.engine
    ids = [engine.add(prompt, params) for prompt, params in requests]
    most = 0
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
        most = max(most, engine.scheduler.page_allocator.num_held_pages)
    return [engine.collect(request_id) for request_id in ids], most


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 301, num_tokens).tolist()


def drawn(n: int, **fields) -> SamplingParams:
    return SamplingParams(**({"n": n, "temperature": 1.0, "seed": 5, "max_tokens": 20, "ignore_eos": True} | fields))


# Completions of one prompt


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_eight_completions_of_a_2k_prompt_hold_less_than_1_3_times_the_pages_of_one(llm, prefix_caching):
    prompt = random_prompt(2041)
    with scheduler(llm, enable_prefix_caching=prefix_caching):
        (one,), pages_of_one = run(llm, (prompt, drawn(1)))
        llm.engine.reset_prefix_cache()
        num_computed = llm.engine.scheduler.stats.num_prefill_tokens
        (eight,), pages_of_eight = run(llm, (prompt, drawn(8)))
        assert llm.engine.scheduler.stats.num_prefill_tokens - num_computed == 2041 + 7
    print("pages", pages_of_one, pages_of_eight)
    assert pages_of_eight < 1.3 * pages_of_one
    assert one.outputs[0].token_ids == eight.outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in eight.outputs}) == 8
    assert llm.stats()["num_compiles_while_serving"] == 0


@pytest.mark.parametrize("num_tokens", [17, 32, 40])
def test_forked_completions_have_the_outputs_of_completions_that_compute_the_prompt_themselves(llm, num_tokens):
    """Log-probs to 1e-5: the prompt's last token is computed alone, in a product of another size."""
    request = (random_prompt(num_tokens), drawn(4, logprobs=2, prompt_logprobs=1))
    with scheduler(llm) as forking:
        (forked,), _ = run(llm, request)
        assert forking.stats.num_forks == 3
    with scheduler(llm, static_batching=True) as plain:
        (alone,), _ = run(llm, request)
        assert plain.stats.num_forks == 0
    for output, other in zip(forked.outputs, alone.outputs, strict=True):
        assert output.token_ids == other.token_ids
        for entry, other_entry in zip(output.logprobs, other.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other_entry.logprob, abs=1e-5)
    assert forked.prompt_logprobs == alone.prompt_logprobs


def test_s36_three_completions_each_survive_preemption(llm):
    requests = [(random_prompt(40, seed), drawn(3, seed=seed, max_tokens=60)) for seed in range(3)]
    with scheduler(llm):
        expected, _ = run(llm, *requests)
    with scheduler(llm, num_pages=12) as small:
        outputs, _ = run(llm, *requests)
        assert small.stats.num_preemptions > 0 and small.stats.num_forks > 0
    for output, other in zip(outputs, expected, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in other.outputs]
        assert all(o.finish_reason is FinishReason.LENGTH for o in output.outputs)


def test_completions_aborted_at_any_step_give_back_their_pages(llm):
    engine = llm.engine
    for num_steps in range(6):
        with scheduler(llm, enable_prefix_caching=num_steps % 2 == 0):
            request_id = engine.add(random_prompt(500), drawn(4))
            for _ in range(num_steps):
                engine.step()
            engine.abort(request_id)
            while engine.has_work():
                engine.step()
            assert all(o.finish_reason is FinishReason.ABORT for o in engine.collect(request_id).outputs)


def test_copied_pages_have_their_scales(tmp_path):
    llm = make_llm(tmp_path, kv_dtype="int8", max_model_len=96, num_pages=64, max_num_seqs=4)
    request = (random_prompt(44), drawn(4, max_tokens=30))
    with scheduler(llm):
        (forked,), _ = run(llm, request)
    with scheduler(llm, static_batching=True):
        (alone,), _ = run(llm, request)
    assert [o.token_ids for o in forked.outputs] == [o.token_ids for o in alone.outputs]


# Beams


class PlainModel:
    """The tiny model in numpy: float32, the whole sequence at once, no pages. Weights are those of the engine."""

    def __init__(self, llm: LLM):
        self.params = {name: np.asarray(value) for name, value in llm.engine.runner.params.items()}
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def log_probs(self, token_ids: list[int]) -> np.ndarray:
        """[vocabulary] after the last token."""
        key = tuple(token_ids)
        if key not in self.known:
            self.known[key] = self._forward(token_ids)
        return self.known[key]

    def _forward(self, token_ids: list[int]) -> np.ndarray:
        p, length = self.params, len(token_ids)
        angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, 16, 2) / 16)
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        causal = np.where(np.tril(np.ones((length, length), bool)), 0, -np.inf).astype(np.float32)
        x = p["embed/weight"][token_ids]
        for layer in range(2):
            w = {name.split("/", 2)[2]: value for name, value in p.items() if name.startswith(f"layers/{layer}/")}
            heads = np.einsum("td,kghd->tkgh", norm(x, w["attn_norm/weight"]), w["qkv/kernel"])
            q, k, v = heads[:, :, :4], heads[:, :, 4], heads[:, :, 5]
            q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos, sin)
            scores = np.einsum("tkgh,skh->kgts", q, k) / 4 + causal
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("kgts,skh->tkgh", scores / scores.sum(-1, keepdims=True), v)
            x = x + np.einsum("tkgh,dkgh->td", mixed, w["o/kernel"])
            gate, up = np.einsum("td,pfd->ptf", norm(x, w["mlp_norm/weight"]), w["gate_up/kernel"])
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down/kernel"].T
        logits = (norm(x[-1:], p["final_norm/weight"]) @ p["lm_head/weight"].T)[0, :301]
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def search(self, prompt, width, max_tokens, stop_ids, length_penalty) -> list[tuple[list[int], float]]:
        """The `width` best (tokens, sum of log-probs): every candidate scored anew, every ended beam kept."""

        def score(beam):
            tokens, logprob = beam
            return logprob / (len(prompt) + len(tokens) - (tokens[-1] in stop_ids)) ** length_penalty

        live, ended = [([], 0.0)], []
        for _ in range(max_tokens):
            longer = []
            for tokens, logprob in live:
                log_probs = self.log_probs(prompt + tokens)
                for token_id in np.argsort(-log_probs, kind="stable")[: 2 * width].tolist():
                    beam = ([*tokens, token_id], logprob + float(log_probs[token_id]))
                    (ended if token_id in stop_ids else longer).append(beam)
            live = sorted(longer, key=score, reverse=True)[:width]
        return sorted([*ended, *live], key=score, reverse=True)[:width]


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.fixture(scope="module")
def plain(llm) -> PlainModel:
    return PlainModel(llm)


def beams(output: RequestOutput) -> list[tuple[list[int], float]]:
    return [(o.token_ids, o.cumulative_logprob) for o in output.outputs]


def check_beams(found, expected) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-4)


@pytest.mark.parametrize(
    ("num_tokens", "width", "max_tokens", "length_penalty", "num_stops"),
    [
        (15, 4, 20, 1.0, 0),
        (16, 4, 6, 1.0, 2),
        (17, 3, 18, 0.0, 3),
        (5, 10, 4, 2.0, 6),
        (33, 2, 12, -1.0, 1),
        (30, 1, 5, 1.0, 0),
    ],
)
def test_beams_are_those_of_a_plain_search(llm, plain, num_tokens, width, max_tokens, length_penalty, num_stops):
    prompt = random_prompt(num_tokens, seed=num_tokens)
    # Tokens that beams come by: the model's own end, and some of what an open search finds.
    likely = [token for tokens, _ in plain.search(prompt, width, 3, (), 1.0) for token in tokens]
    stops = tuple(dict.fromkeys(likely))[:num_stops]
    params = BeamSearchParams(
        beam_width=width, max_tokens=max_tokens, length_penalty=length_penalty, stop_token_ids=stops
    )
    expected = plain.search(prompt, width, max_tokens, (*stops, 7), length_penalty)
    for prefix_caching in (True, False):
        with scheduler(llm, enable_prefix_caching=prefix_caching):
            (output,), _ = run(llm, (prompt, params.sampling_params()))
        check_beams(beams(output), expected)
        for o in output.outputs:
            stopped = o.token_ids[-1] in (*stops, 7)
            assert o.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert o.stop_reason == (o.token_ids[-1] if stopped else None)
    if num_stops:
        assert any(o.finish_reason is FinishReason.STOP for o in output.outputs)


def test_four_beams_of_a_2k_prompt_hold_less_than_1_3_times_the_pages_of_one_completion(llm):
    prompt = random_prompt(2041)
    params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True, logprobs=1)
    with scheduler(llm, enable_prefix_caching=False) as counted:
        _, pages_of_one = run(llm, (prompt, drawn(1)))
        num_computed = counted.stats.num_prefill_tokens
        (output,), pages_of_four = run(llm, (prompt, params.sampling_params()))
        assert counted.stats.num_prefill_tokens - num_computed == 2041 + 4 * 19
    print("pages", pages_of_one, pages_of_four)
    assert pages_of_four < 1.3 * pages_of_one
    for o in output.outputs:
        assert [entry.token_id for entry in o.logprobs] == o.token_ids
        assert sum(entry.logprob for entry in o.logprobs) == pytest.approx(o.cumulative_logprob, abs=1e-4)


def test_beams_in_company_under_memory_pressure_are_those_of_a_plain_search(llm, plain):
    """Pages for two or three sequences: kept pages are dropped, beams and others preempted."""
    prompts = [random_prompt(num_tokens, seed=num_tokens) for num_tokens in (33, 40)]
    params = BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True).sampling_params()
    other = drawn(3, max_tokens=60)
    with scheduler(llm):
        expected, _ = run(llm, (random_prompt(40), other))
    with scheduler(llm, num_pages=12, enable_prefix_caching=False) as small:
        outputs, _ = run(llm, *((prompt, params) for prompt in prompts), (random_prompt(40), other))
        print(small.stats)
    for prompt, output in zip(prompts, outputs, strict=False):
        check_beams(beams(output), plain.search(prompt, 3, 30, (), 1.0))
    assert [o.token_ids for o in outputs[-1].outputs] == [o.token_ids for o in expected[0].outputs]


def test_a_search_aborted_at_any_step_gives_back_its_pages(llm):
    engine = llm.engine
    for num_steps in range(8):
        with scheduler(llm, enable_prefix_caching=False):
            params = BeamSearchParams(beam_width=3, max_tokens=30).sampling_params()
            request_id = engine.add(random_prompt(300), params)
            for _ in range(num_steps):
                engine.step()
            deltas = engine.abort(request_id)
            assert [delta.request_finished for delta in deltas] == [False, False, True]
            assert engine.abort(request_id) == []
            while engine.has_work():
                engine.step()
            assert all(o.finish_reason is FinishReason.ABORT for o in engine.collect(request_id).outputs)


def test_more_beams_than_the_engine_has_log_probs_for_are_refused(llm):
    with pytest.raises(RequestError, match="n: 11 beams need 22 log-probs a token; this engine's max_logprobs is 20"):
        llm.beam_search([[1, 2]], BeamSearchParams(beam_width=11), use_tqdm=False)
    (output,) = llm.beam_search([[1, 2]], BeamSearchParams(beam_width=10, max_tokens=2), use_tqdm=False)
    assert len(output.outputs) == 10
