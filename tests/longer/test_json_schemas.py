"""JSON schemas at length: public collections, schemas drawn at random, and texts of an engine. `make proofs` runs it."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from http_harness import VOCAB_SIZE, byte_tokenizer
from json_proofs import DeadEndError, accepts, byte_compiler, exact, prove, random_text, read_records, validator_of

from serving import LLM, SamplingParams
from serving.request import FinishReason, RequestError, StructuredOutput
from serving.structured.compiler import GrammarCompiler

TINY = Path(__file__).parents[1] / "data" / "tiny"
COLLECTIONS = ["json_schema_test_suite", "jsonschemabench_sample"]
NUM_RANDOM_SCHEMAS = 8000
NUMBERS = [-10, -3, -2.5, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2, 2.5, 2.25, 3, 7, 10, 10.5, 100, 99.9, 0.1, 0.001]
NAMES = ["a", "b", "ab", "c"]
STRINGS = ["", "a", "ab", "abc", "b", "ba"]


@pytest.fixture
def draw() -> random.Random:
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def compiler():
    compiler = byte_compiler()
    yield compiler
    compiler.close()


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_text_of_a_public_schema_is_valid_and_no_invalid_value_passes(compiler, draw, name):
    counts: Counter[str] = Counter()
    faults = []
    for record in read_records(name):
        seen, wrong = prove(compiler, record, draw, num_texts=30)
        counts += seen
        faults += [(record["name"], fault) for fault in wrong]
    for what, count in counts.most_common():
        print(f"{count:7} {what}")
    assert not faults


def test_what_random_schemas_let_through_is_valid(compiler, draw):
    counts: Counter[str] = Counter()
    faults, dead_ends = [], []
    for _ in range(NUM_RANDOM_SCHEMAS):
        schema = random_schema(draw)
        try:
            grammar = compiler.compile(StructuredOutput.json_schema(schema))
        except RequestError:
            counts["refused"] += 1
            continue
        counts["accepted"] += 1
        try:
            texts = [random_text(grammar, draw, 300) for _ in range(6)]
        except DeadEndError as error:  # into a schema that no value matches, which was not seen at the start
            counts["dead ends"] += 1
            dead_ends.append((json.dumps(schema), str(error)))
            continue
        texts += [json.dumps(value) for value in (random_value(draw) for _ in range(20)) if accepts(grammar, value)]
        validator = validator_of(schema)
        for text in texts:
            counts["texts without an end" if text is None else "texts"] += 1
            try:
                if text is not None and not validator.is_valid(exact(text)):
                    faults.append((json.dumps(schema), text))
            except RecursionError:  # of jsonschema, for a schema that refers to itself alone
                counts["no answer by jsonschema"] += 1
    print(counts, dead_ends[:3])
    assert not faults and counts["dead ends"] < counts["accepted"] // 50
    assert counts["accepted"] > NUM_RANDOM_SCHEMAS // 3 and counts["texts"] > 4 * counts["accepted"]


def test_an_engine_at_temperature_1_writes_valid_texts(draw):
    llm = LLM(
        f"dummy:{TINY}",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        page_size=8,
        prefill_token_buckets=(32,),
        query_block=16,
        max_decode_steps=1,
        num_pages=1025,
        show_progress=False,
    )
    engine = llm.engine
    engine.tokenizer = byte_tokenizer()
    engine._grammars = GrammarCompiler(engine.tokenizer, VOCAB_SIZE, engine.eos_token_ids)
    # A random model does not care to come to an end.
    bias = (
        {ord(blank): -100.0 for blank in " \n\r\t"}
        | dict.fromkeys(b'"]}', 4.0)
        | dict.fromkeys(engine.eos_token_ids, 8.0)
    )
    records, params = [], []
    for record in draw.sample([record for name in COLLECTIONS for record in read_records(name)], 400):
        structured = StructuredOutput.json_schema(record["schema"])
        setting = SamplingParams(structured=structured, temperature=1.0, max_tokens=400, logit_bias=bias)
        try:
            engine.check([1], setting)
            validator_of(record["schema"])
        except (RequestError, re.error):
            continue
        records.append(record)
        params.append(setting)
    counts: Counter[Any] = Counter()
    faults = []
    for record, output in zip(records, llm.generate([[1]] * len(params), params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        counts[completion.finish_reason] += 1
        if completion.finish_reason is FinishReason.STOP:
            text = completion.text.removesuffix("\x07")  # token 7 ends a sequence here, and is a byte as well
            try:
                validator_of(record["schema"]).validate(exact(text))
            except (ValueError, jsonschema.ValidationError) as error:
                faults.append((record["name"], completion.text, str(error)[:300]))
        elif completion.finish_reason is not FinishReason.LENGTH:
            faults.append((record["name"], completion.text, completion.error))
    print(counts)
    assert not faults
    assert counts[FinishReason.STOP] > 100


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.choice(["number", "string", "other", "array", "object"] if depth < 2 else ["number", "string"])
    if kind == "array":
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == "object":
        return {name: random_value(draw, depth + 1) for name in draw.sample(NAMES, draw.randrange(4))}
    return draw.choice({"number": [*NUMBERS, 2.0, 11, 12], "string": STRINGS, "other": [True, False, None]}[kind])


def random_schema(draw: random.Random) -> dict[str, Any]:
    """A schema of the keywords that are supported, in any order, of either of two drafts."""
    is_old = draw.random() < 0.4
    draft = "http://json-schema.org/draft-07/schema#" if is_old else "https://json-schema.org/draft/2020-12/schema"
    schema = _schema(draw, 0, is_old)
    while not isinstance(schema, dict):
        schema = _schema(draw, 0, is_old)
    return {"$schema": draft, **schema, "$defs": {name: _schema(draw, 2, is_old) for name in "xy"}}


def _schema(draw: random.Random, depth: int, is_old: bool) -> Any:
    def some(keywords: dict[str, Any], share: float) -> dict[str, Any]:
        return {keyword: value() for keyword, value in keywords.items() if draw.random() < share}

    def inner() -> Any:
        return _schema(draw, depth + 1, is_old)

    def inners() -> list[Any]:
        return [inner() for _ in range(draw.randrange(1, 3))]

    def one_of(choices: list[Any]) -> Any:
        return lambda: draw.choice(choices)

    def keywords(kind: str) -> dict[str, Any]:
        match kind:
            case "number":
                bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
                found = some(dict.fromkeys(bounds, one_of(NUMBERS)), 0.35)
                found |= some({"multipleOf": one_of([1, 2, 3, 0.5, 0.1, 0.25, 1.5, 0.01])}, 0.2)
                return found | some({"type": one_of(["integer", "number"])}, 0.8)
            case "string":
                found = some({"minLength": one_of([0, 1, 2]), "maxLength": one_of([0, 1, 2, 3])}, 0.3)
                found |= some({"pattern": one_of(["^a", "b$", "^ab?$", "a", "^[^b]*$", "^$", r"\w"])}, 0.3)
                found |= some({"format": one_of(["date", "time", "date-time", "hostname", "uuid", "ipv4"])}, 0.1)
                return found | some({"type": lambda: "string"}, 0.8)
            case "array":
                lengths = some({"minItems": one_of([0, 1, 2]), "maxItems": one_of([0, 1, 2, 3])}, 0.3)
                if is_old:
                    found = some({"items": draw.choice([inner, inners, inners])}, 0.8)
                    if isinstance(found.get("items"), list):
                        found |= some({"additionalItems": inner}, 0.6)
                else:
                    found = some({"prefixItems": inners, "items": inner}, 0.5)
                return lengths | found | some({"type": lambda: "array"}, 0.8)
            case "object":
                found = some(
                    {"properties": lambda: {n: inner() for n in draw.sample(NAMES, draw.randrange(1, 4))}}, 0.7
                )
                found |= some({"patternProperties": lambda: {draw.choice(["^a", "b$", "^c$"]): inner()}}, 0.3)
                found |= some({"required": lambda: draw.sample(NAMES, draw.randrange(1, 3))}, 0.5)
                found |= some({"minProperties": one_of([0, 1, 2]), "maxProperties": one_of([0, 1, 2, 3])}, 0.15)
                return found | some({"additionalProperties": inner}, 0.5) | some({"type": lambda: "object"}, 0.8)
            case "values":
                return {"const": random_value(draw)} if draw.random() < 0.5 else {"enum": [random_value(draw), "a", 2]}
            case "several":
                return {draw.choice(["allOf", "allOf", "anyOf", "oneOf"]): inners()}
        return {"$ref": draw.choice(["#/$defs/x", "#/$defs/y"])} if depth else {}

    if draw.random() < 0.04:
        return draw.random() < 0.5
    kinds = ["number", "string", "values"]
    if depth < 3:
        kinds += ["number", "array", "array", "object", "several", "several", "reference"]
    found = {}
    for _ in range(2 if draw.random() < 0.4 else 1):
        found |= keywords(draw.choice(kinds))
    return dict(draw.sample(list(found.items()), len(found)))
