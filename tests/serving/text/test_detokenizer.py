"""Streamed text: whole characters, no piece of a stop string, and the same text as decoding at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.detokenizer import IncrementalDetokenizer


class Pieces:
    """A vocabulary given as a list of byte strings; the tokenizer interface as far as the detokenizer uses it."""

    def __init__(self, *pieces: bytes, special: frozenset[int] = frozenset()):
        self.pieces = pieces
        self.special = special

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        return b"" if skip_special_tokens and token_id in self.special else self.pieces[token_id]


def stream(tokenizer, token_ids, stop=(), **options):
    """Pieces returned by `add` for each token, and last by `finish`; and the detokenizer."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop, **options)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.add(token_id))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer


def expected_text(text_of_tokens: list[str], stop, *, include_stop: bool, min_tokens: int) -> tuple[str, str | None]:
    """The rule read off the documentation, on the whole text: cut at the match that is complete first."""
    text, counts_from = "", 0
    for index, piece in enumerate(text_of_tokens):
        if index + 1 < min_tokens:
            counts_from += len(piece)
        text += piece
    for end in range(counts_from + 1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def test_s01_no_character_of_a_stop_string_across_three_tokens_appears():
    tokenizer = Pieces(b"one <", b"EN", b"D> two")
    pieces, detokenizer = stream(tokenizer, [0, 1, 2], ("<END>",))
    assert pieces == ["one ", "", "", ""]
    assert detokenizer.stopped == "<END>"
    pieces, detokenizer = stream(tokenizer, [0, 1, 0], ("<END>",))
    assert pieces == ["one ", "", "<ENone ", "<"]
    assert detokenizer.stopped is None


@pytest.mark.parametrize(("stop", "text"), [("wor", "hello "), ("world", "hello "), ("lo wo", "hel")])
def test_s02_a_stop_string_inside_a_token_cuts_exactly_before_the_match(stop, text):
    _, detokenizer = stream(Pieces(b"hello", b" ", b"world!"), [0, 1, 2], (stop,))
    assert (detokenizer.text, detokenizer.stopped) == (text, stop)


def test_s03_a_stop_string_counts_once_min_tokens_are_there():
    tokenizer = Pieces(b"a", b"stop", b"b")
    token_ids = [0, 1, *[2] * 17, 0, 1, 0]  # "stop" is token 2 and again token 21
    _, detokenizer = stream(tokenizer, token_ids, ("stop",), min_tokens=20)
    assert detokenizer.stopped == "stop"
    assert detokenizer.text == "astop" + "b" * 17 + "a"
    _, detokenizer = stream(tokenizer, token_ids, ("stop",), min_tokens=2)
    assert detokenizer.text == "a"  # the token that completes it is number 2
    _, detokenizer = stream(tokenizer, token_ids, ("stop",), min_tokens=30)
    assert detokenizer.stopped is None


def test_s03_a_match_that_begins_before_min_tokens_and_ends_after_counts():
    _, detokenizer = stream(Pieces(b"xst", b"op"), [0, 1], ("stop",), min_tokens=2)
    assert (detokenizer.text, detokenizer.stopped) == ("x", "stop")


def test_s04_a_character_appears_when_it_is_whole(byte_tokenizer):
    token_ids = list("a😀éя".encode())  # ids of the byte tokenizer are the bytes
    pieces, _ = stream(byte_tokenizer, token_ids)
    assert pieces == ["a", "", "", "", "😀", "", "é", "", "я", ""]


def test_s05_broken_utf8_leaves_one_replacement_mark_at_the_very_end(byte_tokenizer):
    pieces, _ = stream(byte_tokenizer, [0x80])  # a lone continuation byte
    assert "".join(pieces) == "\ufffd"
    pieces, _ = stream(byte_tokenizer, [ord("a"), *"😀".encode()[:3]])
    assert pieces == ["a", "", "", "", "\ufffd"]
    assert "".join(pieces) == byte_tokenizer.decode([ord("a"), *"😀".encode()[:3]])


def test_a_held_tail_is_released_when_the_output_ends():
    pieces, detokenizer = stream(Pieces(b"ab", b"\n"), [0, 1], ("\n\nUser",))
    assert pieces == ["ab", "", "\n"]
    assert detokenizer.stopped is None


def test_the_stop_string_is_kept_where_asked_and_text_ends_with_it():
    _, detokenizer = stream(Pieces(b"x", b"END and more"), [0, 1], ("END",), include_stop_str_in_output=True)
    assert detokenizer.text == "xEND"


def test_the_longest_of_stop_strings_complete_at_the_same_character_counts():
    _, detokenizer = stream(Pieces(b"xabc"), [0], ("c", "bc", "abc"))
    assert (detokenizer.text, detokenizer.stopped) == ("x", "abc")
    _, detokenizer = stream(Pieces(b"xabc"), [0], ("abcd", "b"))
    assert (detokenizer.text, detokenizer.stopped) == ("xa", "b")


def test_stop_strings_that_repeat_themselves_are_found():
    for text, stop, expected in (("aaab", "aab", "a"), ("ababac", "abac", "ab"), ("\n\n\n", "\n\n", "")):
        _, detokenizer = stream(Pieces(*(c.encode() for c in text)), range(len(text)), (stop,))
        assert (detokenizer.text, detokenizer.stopped) == (expected, stop)


def test_a_stop_string_may_hold_a_character_that_spans_tokens(byte_tokenizer):
    _, detokenizer = stream(byte_tokenizer, list("x→y".encode()), ("→",))
    assert detokenizer.text == "x"


def test_nothing_follows_a_stop_string():
    detokenizer = IncrementalDetokenizer(Pieces(b"a.b", b"c"), (".",))
    assert detokenizer.add(0) == "a"
    assert detokenizer.add(1) == "" == detokenizer.finish()
    assert detokenizer.text == "a"


def test_special_tokens_are_text_only_where_asked():
    tokenizer = Pieces(b"a", b"<|end|>", special=frozenset([1]))
    assert stream(tokenizer, [0, 1])[1].text == "a"
    assert stream(tokenizer, [0, 1], skip_special_tokens=False)[1].text == "a<|end|>"
    assert stream(tokenizer, [0, 1], ("<|end|>",))[1].stopped is None
    assert stream(tokenizer, [0, 1], ("<|end|>",), skip_special_tokens=False)[1].text == "a"


def test_a_sentencepiece_output_keeps_the_space_that_follows_the_prompt(phi3):
    token_ids = phi3.encode("Paris is", add_special_tokens=False)
    _, detokenizer = stream(phi3, token_ids)
    assert detokenizer.text == " Paris is" == phi3.decode(token_ids, continuation=True)
    assert phi3.decode(token_ids) == "Paris is"


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_random_tokens_of_real_vocabularies_stream_as_they_decode(name, request):
    tokenizer = request.getfixturevalue(name)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for skip in (True, False):
        for _ in range(20):
            token_ids = [generator.randrange(tokenizer.vocab_size) for _ in range(60)]
            pieces, _ = stream(tokenizer, token_ids, skip_special_tokens=skip)
            assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip, continuation=True)


pieces_of_bytes = st.one_of(
    st.binary(max_size=5), st.text("ab\n😀é", max_size=4).map(str.encode), st.text(max_size=3).map(str.encode)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces_of_bytes, max_size=30))
def test_any_bytes_stream_as_they_decode(pieces):
    whole = b"".join(pieces).decode("utf-8", "replace")
    streamed, detokenizer = stream(Pieces(*pieces), range(len(pieces)))
    assert detokenizer.text == whole
    for index, piece in enumerate(streamed[:-1]):  # what is out is right whatever follows
        assert whole.startswith("".join(streamed[: index + 1])), piece


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", min_size=0, max_size=4), max_size=25),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 10),
)
def test_stop_strings_follow_the_documented_rule(texts, stop, include_stop, min_tokens):
    tokenizer = Pieces(*(text.encode() for text in texts))
    pieces, detokenizer = stream(
        tokenizer, range(len(texts)), tuple(stop), include_stop_str_in_output=include_stop, min_tokens=min_tokens
    )
    text, stopped = expected_text(texts, stop, include_stop=include_stop, min_tokens=min_tokens)
    assert (detokenizer.text, detokenizer.stopped) == (text, stopped)
    for index in range(len(pieces)):  # never more out than the text in the end
        assert text.startswith("".join(pieces[:index]))
