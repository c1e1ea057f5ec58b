"""Schemas of public collections, with values that they accept and refuse. All of them, at length: `make proofs`."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from json_proofs import byte_compiler, prove, read_records


@pytest.fixture(scope="module")
def compiler():
    compiler = byte_compiler()
    yield compiler
    compiler.close()


@pytest.mark.parametrize(("name", "num_schemas"), [("json_schema_test_suite", 640), ("jsonschemabench_sample", 100)])
def test_texts_are_valid_and_known_values_are_let_through_or_kept_out_as_they_should(compiler, name, num_schemas):
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    faults = []
    for record in draw.sample(read_records(name), num_schemas):
        seen, wrong = prove(compiler, record, draw, num_texts=2)
        counts += seen
        faults += [(record["name"], fault) for fault in wrong]
    assert not faults
    assert counts["schemas"] == num_schemas and counts["accepted"] > 0.4 * num_schemas
    assert counts["texts"] > counts["accepted"] and counts["invalid values kept out"] > 0.5 * counts["accepted"]
