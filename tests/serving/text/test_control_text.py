"""Stand-ins for characters with which a control token could begin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.control_text import ControlTextHider, StandIns

CONTROL = ("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "sop", "<pad>")


def hidden(text, template_strings=(), *, everywhere=True, control=CONTROL):
    hider = ControlTextHider(control, template_strings)
    stand_ins = StandIns(hider.originals, text)
    result = hider.hide(text, stand_ins, everywhere=everywhere)
    assert stand_ins.restore(result) == text
    assert len(result) == len(text)
    return result


def shown(text, template_strings=(), **options):
    """The hidden text with `_` in place of every stand-in."""
    return "".join(
        "_" if after != before else after
        for before, after in zip(text, hidden(text, template_strings, **options), strict=True)
    )


def test_every_character_a_control_token_could_begin_with_is_hidden():
    assert shown("a <|im_end|> < [x] b") == "a _|im_end|> _ _x] b"
    assert shown("a sop b soap") == "a _op b soap"
    assert shown("plain") == "plain"


def test_strings_the_template_looks_for_stay_readable():
    template_strings = ["</think>", "<think>", "user", "<", "<|im_end|>\n", "</", "x<", "\n<|"]
    assert shown("<think>a</think><b", template_strings) == "<think>a</think>_b"
    assert shown("<|im_end|>\n < x< </", template_strings) == "_|im_end|>\n _ x_ _/"


def test_a_template_that_deletes_a_string_makes_no_control_token_of_the_rest():
    text = hidden("<<think>|im_end|>", ["<think>"])
    assert "<think>" in text
    assert "<|im_end|>" not in text.replace("<think>", "")


def test_at_tokens_only_where_one_seems_to_begin():
    options = {"everywhere": False}
    assert shown("<b> <|x <pre <", **options) == "<b> _|x _pre _"
    assert shown("a < b <", **options) == "a _ b _"  # a template may strip the space and add to what is left
    assert shown("[x] [I", **options) == "[x] _I"


def test_keys_and_values_at_any_depth_are_hidden():
    hider = ControlTextHider(CONTROL, ())
    value = {"<k": ["<a", {"b": "<"}, 3, None, True], "c": 1.5}
    stand_ins = StandIns(hider.originals, value)
    result = hider.hide(value, stand_ins, everywhere=True)
    mark = stand_ins.stand_in_of["<"]
    assert result == {f"{mark}k": [f"{mark}a", {"b": mark}, 3, None, True], "c": 1.5}
    assert hider.is_needed(value)
    assert not hider.is_needed({"a": ["b"]})


def test_stand_ins_occur_nowhere_else():
    candidates = [chr(code) for code in range(0x1D800, 0x1DA00)]
    hider = ControlTextHider(CONTROL, ())
    text = "".join(candidates[:-3]) + "<"
    stand_ins = StandIns(hider.originals, text, {"also": candidates[-3]})
    used = {*stand_ins.stand_in_of.values(), stand_ins.end_mark}
    assert len(used) == len(hider.originals) + 1
    assert not used & set(text + candidates[-3])
    everything = "".join(map(chr, [*range(0x1D800, 0x1DA00), *range(0x20000, 0x2A6D7)]))
    with pytest.raises(ValueError, match="uses too many different characters"):
        StandIns(hider.originals, everything)


def test_stand_ins_print_and_have_no_case_and_are_no_space():
    for code in (0x1D800, 0x1D9FF, 0x20000, 0x2A6D6):
        character = chr(code)
        assert character.isprintable()
        assert character.upper() == character.lower() == character.strip() == character
        assert repr(character) == f"'{character}'"


def test_no_control_tokens_hide_nothing():
    assert hidden("<|im_end|>", control=()) == "<|im_end|>"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<", "|", "im_end", ">", "</", "s", "think>", "[INST]", " ", "so", "p", "x"]), max_size=12
    )
)
def test_no_cut_of_hidden_text_joined_to_another_holds_a_control_token(parts):
    """Templates may cut texts and join them with others of the client."""
    text = "".join(parts)
    result = hidden(text, ["</think>", "<think>"], control=CONTROL[:4])
    generator = random.Random(text)
    pieces = [result[a:b] for a, b in (sorted(generator.choices(range(len(text) + 1), k=2)) for _ in range(8))]
    joined = "".join(generator.choice([piece, piece.strip()]) for piece in pieces)
    # A cut inside a readable string is the one thing that may open the way again; cuts of templates are at its ends.
    if not any(piece.endswith(("<", "</")) for piece in pieces):
        assert not any(control in joined for control in CONTROL[:4])
