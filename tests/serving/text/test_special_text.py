"""Splitting text at special tokens."""

from __future__ import annotations

import pytest

from serving.text.special_text import SpecialTextSplitter, SpecialToken, looks_special


def splitter(*texts, **flags):
    return SpecialTextSplitter(SpecialToken(token_id=index, text=text, **flags) for index, text in enumerate(texts))


def test_the_longest_token_at_the_leftmost_place_wins():
    split = splitter("<a>", "<a><b>", "b>c").split
    assert split("x<a><b>c") == ["x", 1, "c"]
    assert split("<a><") == [0, "<"]
    assert split("<<a>>") == ["<", 0, ">"]
    assert split("") == []
    assert split("<b>c") == ["<", 2]


def test_tokens_take_the_white_space_beside_them_where_flagged():
    assert splitter("<a>", rstrip=True).split("x <a> \n y") == ["x ", 0, "y"]
    assert splitter("<a>", lstrip=True).split("x \t<a> y") == ["x", 0, " y"]
    assert splitter("<a>", lstrip=True, rstrip=True).split("  <a>  <a> ") == [0, 0]


def test_single_words_are_not_found_inside_words():
    split = splitter("sop", single_word=True).split
    assert split("sop sops asop sop") == [0, " sops asop ", 0]


def test_no_tokens_leave_text_whole():
    assert splitter().split("a <b>") == ["a <b>"]


@pytest.mark.parametrize("text", ["<|im_end|>", "<｜User｜>", "<unused12>", "[|user|]", "<pad>"])
def test_markers_are_known_by_their_look(text):
    assert looks_special(text)


@pytest.mark.parametrize("text", ["<table>", "<think>", "<|>", "a<|x|>", "", "<|", "▁▁", "\n\n"])
def test_other_texts_are_no_markers(text):
    assert not looks_special(text)
