"""Reasoning told from the answer, with the opening tag in the output or in the prompt."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.incremental_parser import MAX_HELD_CHARS
from serving.text.output_deltas import ContentDelta, ReasoningDelta, collect
from serving.text.reasoning_parsers import ThinkParser, reasoning_is_open
from serving.text.tool_parsers import OutputParser

ASSISTANT = "<|start|>assistant"


def parsed(pieces, **options):
    parser = OutputParser(**options)
    return collect([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


# (output, whether the prompt ends with the tag, reasoning, content)
SAMPLES = [
    ("<think>\nOne, two.\n</think>\n\nThree.", False, "One, two.", "Three."),
    ("\n <think>a</think>b", False, "a", "b"),
    ("One, two.\n</think>\n\nThree.", True, "One, two.", "Three."),
    ("<think>\nOne.</think>Two.", True, "One.", "Two."),  # the tag once more
    ("\n\n</think>\n\nThree.", True, None, "Three."),
    ("<think>\n\n</think>\n\nThree.", False, None, "Three."),
    ("No reasoning.", False, None, "No reasoning."),
    (" \n", False, None, " \n"),
    ("", True, None, None),
    ("Cut off in the mid", True, "Cut off in the mid", None),
    ("<think>Cut off \n", False, "Cut off \n", None),
    ("<think>a </thin b</think>c", False, "a </thin b", "c"),
    ("<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
    ("Tags like <think> are text </think>.", False, None, "Tags like <think> are text </think>."),
    ("<thin", False, None, "<thin"),
    ("a</thi", True, "a</thi", None),
    ("ünï 東京 \U0001f327</think>\u00a0é", True, "ünï 東京 \U0001f327", "é"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), SAMPLES)
def test_reasoning_is_told_from_the_answer_for_every_cut(text, is_open, reasoning, content):
    prompt = "<|im_start|>assistant\n" + ("<think>\n" if is_open else "")
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in cuts:
        output = parsed(pieces, reasoning_format="think", prompt=prompt)
        assert (output.reasoning, output.content) == (reasoning, content), pieces


def test_reasoning_is_given_out_as_it_comes():
    parser = ThinkParser(starts_inside=True)
    assert parser.feed("One ") == [ReasoningDelta("One")]
    assert parser.feed("two</th") == [ReasoningDelta(" two")]
    assert parser.feed("ink>\n") == []
    assert parser.feed("Three") == [ContentDelta("Three")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),  # reasoning switched off
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_end_of_the_prompt_tells_whether_reasoning_is_open(prompt, is_open):
    assert reasoning_is_open(prompt) == is_open


def test_a_model_that_always_reasons_may_leave_out_the_opening_tag():
    output = parsed(["Hm.\n</think>\nYes."], reasoning_format="deepseek_r1", prompt="<｜Assistant｜>")
    assert (output.reasoning, output.content) == ("Hm.", "Yes.")


def test_calls_in_reasoning_are_reasoning_and_calls_after_it_are_calls():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}</think>\n\n{call}"
    output = parsed(list(text), reasoning_format="think", tool_format="hermes", tool_names=["now"])
    assert output.reasoning == f"I could {call}"
    assert output.content is None
    assert [call.name for call in output.tool_calls] == ["now"]


def test_kimis_calls_end_reasoning_that_was_not_closed():
    text = "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    options = {"reasoning_format": "think", "tool_format": "kimi_k2", "prompt": "<think>"}
    output = parsed(list(text), tool_names=["now"], **options)
    assert (output.reasoning, output.content) == ("Hm.", None)
    assert [call.call_id for call in output.tool_calls] == ["functions.now:0"]
    assert parsed([text], **options).reasoning == text


def test_harmonys_channels_are_reasoning_content_and_calls():
    text = (
        "<|channel|>analysis<|message|>Need the time.<|end|>"
        f"{ASSISTANT}<|channel|>analysis to=python code<|message|>print(1)<|call|>"
        f"{ASSISTANT}<|channel|>commentary<|message|>Let me look.<|end|>"
        f"{ASSISTANT}<|channel|>final<|message|>It is noon.<|return|>"
    )
    for pieces in ([text], list(text)):
        for options in ({"reasoning_format": "harmony"}, {"tool_format": "harmony", "tool_names": ["now"]}):
            output = parsed(pieces, **options)
            assert output.reasoning == "Need the time.\nprint(1)"
            assert output.content == "Let me look.\nIt is noon."
            assert output.tool_calls == ()


def test_harmony_output_cut_off_in_a_header_shows_none_of_it():
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{ASSISTANT}<|channel|>final<|message|>Yes"
    for end in range(len("<|channel|>"), len(text)):
        output = parsed([text[:end]], reasoning_format="harmony")
        # Of a marker that is cut off, no more than a piece of it, where it could be text.
        assert (output.content or "").split("<")[0] in ("", "Y", "Ye")
        assert "assistant" not in (output.content or "")
        assert "final" not in (output.content or "")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", " ", "\n", "a", "</", "think>", "é", "<|stop|>"]), max_size=20
    ),
    st.booleans(),
    st.data(),
)
def test_the_joined_result_does_not_depend_on_how_the_text_is_cut(fragments, starts_inside, data):
    text = "".join(fragments)
    outputs = []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    for pieces in ([text], list(text), [text[a:b] for a, b in itertools.pairwise(bounds)]):
        parser = ThinkParser(starts_inside=starts_inside, ends_before=("<|stop|>",))
        outputs.append(collect([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert (outputs[0].reasoning, outputs[0].content) == expected_parts(text, starts_inside)


def expected_parts(text, starts_inside):
    """The rule read off the documentation, on the whole text."""
    rest = text.lstrip()
    if not starts_inside and not rest.startswith("<think>"):
        return None, text or None
    rest = rest.removeprefix("<think>")
    end = re.search(r"</think>|<\|stop\|>", rest)
    if end is None:
        return rest.lstrip() or None, None
    answer = rest[end.end() :].lstrip() if end[0] == "</think>" else rest[end.start() :]
    return rest[: end.start()].strip() or None, answer or None


@pytest.mark.parametrize("text", ["a" + " " * 2**20, " " * 2**20, "<" * 2**18, "</think" * 2**17])
def test_little_is_held_of_a_megabyte(text):
    parser = ThinkParser(starts_inside=False)
    deltas = parser.feed("<think>x")
    for start in range(0, len(text), 4096):
        deltas += parser.feed(text[start : start + 4096])
        assert sum(map(len, parser._pending)) <= MAX_HELD_CHARS
        assert len(parser._text) <= 4096 + 32
    assert collect(deltas + parser.finish()).reasoning == "x" + text
