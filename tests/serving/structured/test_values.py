"""StructuredOutput as a value: what it accepts, what it keeps, what it refuses, all without a model."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from serving.request import (
    MAX_CHOICES,
    MAX_STRUCTURED_CHARS,
    MAX_STRUCTURED_DEPTH,
    RequestError,
    SamplingParams,
    StructuredOutput,
)


def nested(depth: int):
    value: dict = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


def test_a_schema_is_kept_as_json_text_in_its_own_order_however_it_came():
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"enum": (1, 2.5, None)}}}
    text = '{"type":"object","properties":{"b":{"const":"\\u00e9"},"a":{"enum":[1,2.5,null]}}}'
    from_dict, from_text = StructuredOutput.json_schema(schema), StructuredOutput.json_schema(text.replace(":", " : "))
    assert from_dict.value == text and from_dict == from_text and hash(from_dict) == hash(from_text)
    assert StructuredOutput.json_schema(True).value == StructuredOutput.json_schema("true").value == "true"
    assert StructuredOutput.from_fields({"kind": "json_schema", "value": schema}) == from_dict


def test_values_are_frozen_and_can_be_copied_pickled_and_made_again():
    for structured in (
        StructuredOutput.json_schema({"type": "integer"}),
        StructuredOutput.json_object(),
        StructuredOutput.regex("a+"),
        StructuredOutput.choice(("a", "b")),
        StructuredOutput.grammar('start: "a"'),
    ):
        params = SamplingParams(structured=structured)
        assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params == dataclasses.replace(params)
        assert StructuredOutput(kind=structured.kind, value=structured.value) == structured
        with pytest.raises(dataclasses.FrozenInstanceError):
            structured.value = "b"
    assert SamplingParams().structured is None


cyclic: dict = {}
cyclic["items"] = cyclic
huge_int_text = '{"minimum": ' + "9" * 5000 + "}"

WRONG = [
    ("yaml", "a", "structured.kind"),
    (None, "a", "structured.kind"),
    (["regex"], "a", "structured.kind"),
    ("json_schema", None, "json_schema"),
    ("json_schema", 5, "json_schema"),
    ("json_schema", [], "json_schema"),
    ("json_schema", "", "not JSON"),
    ("json_schema", '{"type": "integer"', "not JSON"),
    ("json_schema", '{"type": "integer", "type": "string"}', "twice"),
    ("json_schema", "[" * 100000, "not JSON"),
    ("json_schema", huge_int_text, "json_schema"),
    ("json_schema", {"minimum": 2**63}, "json_schema"),
    ("json_schema", {"minimum": float("nan")}, "json_schema"),
    ("json_schema", '{"minimum": Infinity}', "json_schema"),
    ("json_schema", {"minimum": {1}}, "json_schema"),
    ("json_schema", {1: "a"}, "key 1"),
    ("json_schema", {"const": "\ud800"}, "surrogate"),
    ("json_schema", {"\udfff": 1}, "surrogate"),
    ("json_schema", nested(MAX_STRUCTURED_DEPTH + 1), "deep"),
    ("json_schema", cyclic, "deep"),
    ("json_schema", {"const": "a" * MAX_STRUCTURED_CHARS}, "characters"),
    ("json_schema", " " * MAX_STRUCTURED_CHARS + "{}", "characters"),
    ("json_object", {"type": "object"}, "takes no value"),
    ("regex", "", "not empty"),
    ("regex", None, "not empty"),
    ("regex", b"a", "not empty"),
    ("regex", "\ud800", "surrogate"),
    ("regex", "a" * (MAX_STRUCTURED_CHARS + 1), "characters"),
    ("choice", [], "not empty"),
    ("choice", "yes", "not JSON"),
    ("choice", '"yes"', "list"),
    ("choice", {"a": 1}, "list"),
    ("choice", ["a", 5], "choice[1]"),
    ("choice", ["\ud800"], "choice[0]"),
    ("choice", ["a"] * (MAX_CHOICES + 1), "entries"),
    ("choice", ["a" * MAX_STRUCTURED_CHARS], "characters"),
    ("grammar", "", "not empty"),
    ("grammar", ["start"], "not empty"),
]


@pytest.mark.parametrize(("kind", "value", "part"), WRONG, ids=[f"{i}-{kind}" for i, (kind, _, _) in enumerate(WRONG)])
def test_a_wrong_form_is_refused_with_its_field(kind, value, part):
    with pytest.raises(RequestError) as refused:
        StructuredOutput(kind=kind, value=value)
    assert part in str(refused.value) and refused.value.field.startswith("structured")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "fields", [None, "regex", {}, {"value": "a"}, {"kind": "regex", "value": "a", "more": 1}, {5: 1, "kind": "regex"}]
)
def test_fields_that_are_not_kind_and_value_are_refused(fields):
    with pytest.raises(RequestError, match="structured"):
        StructuredOutput.from_fields(fields)


def test_sampling_params_take_nothing_else():
    for wrong in ("a+", {"kind": "regex", "value": "a"}, 5):
        with pytest.raises(RequestError, match="structured"):
            SamplingParams(structured=wrong)


def test_the_deepest_schema_is_accepted():
    assert StructuredOutput.json_schema(nested(MAX_STRUCTURED_DEPTH)).value.count("{") == MAX_STRUCTURED_DEPTH
