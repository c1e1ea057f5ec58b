"""GGUF metadata to tokenizer: flags, token types, end tokens, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from serving.text.tokenizer import TokenizerError, load_tokenizer

SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"]
    + [f"<0x{byte:02X}>" for byte in range(256)]
    + ["▁", "a", "b", "ab", "▁ab", "<tool>", "[PAD263]"],
    "tokenizer.ggml.scores": [0.0] * 259 + [-1e9, -5.0, -6.0, -1.0, -2.0, 0.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5 + [4, 5],
}


def with_(metadata, **changes):
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def test_no_vocabulary_means_no_tokenizer():
    assert load_tokenizer({}) is None
    assert load_tokenizer(None) is None
    assert load_tokenizer({"tokenizer.ggml.model": "no_vocab"}) is None


def test_beginning_and_end_tokens_follow_the_flags(byte_metadata):
    tokenizer = load_tokenizer(byte_metadata)
    assert tokenizer.encode("hello", add_special_tokens=True) == [259, 257, 258]
    assert tokenizer.encode("hello", add_special_tokens=False) == [257, 258]
    assert tokenizer.encode("", add_special_tokens=True) == [259]
    both = load_tokenizer(with_(byte_metadata, add_eos_token=True))
    assert both.encode("he", add_special_tokens=True) == [259, 256, 261]
    neither = load_tokenizer(with_(byte_metadata, add_bos_token=False))
    assert neither.encode("", add_special_tokens=True) == []
    assert neither.bos_token_id == 259
    assert neither.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_beginning_token_is_not_doubled_where_the_text_spells_it(byte_tokenizer):
    assert byte_tokenizer.encode("<s>he", add_special_tokens=True, allow_special_text=True) == [259, 256]
    assert byte_tokenizer.encode("<s>he", add_special_tokens=True) == [259, *b"<s>", 256]


def test_llama3_tags_add_the_beginning_token_where_the_file_is_silent(byte_metadata):
    silent = {key: value for key, value in byte_metadata.items() if "add_bos" not in key}
    assert load_tokenizer(silent).encode("", add_special_tokens=True) == []
    assert load_tokenizer(with_(silent, pre="llama-bpe")).encode("", add_special_tokens=True) == [259]


def test_ignore_merges_takes_a_whole_word_from_the_vocabulary(byte_metadata):
    tokens = [*byte_metadata["tokenizer.ggml.tokens"], "hello"]
    metadata = with_(byte_metadata, tokens=tokens, token_type=[1] * 259 + [3] * 3 + [1])
    assert load_tokenizer(metadata).encode("hello", add_special_tokens=False) == [257, 258]
    assert load_tokenizer(with_(metadata, pre="llama3")).encode("hello", add_special_tokens=False) == [262]


def test_control_tokens_are_read_from_text_only_where_allowed(byte_tokenizer):
    text = "he<|im_end|>he"
    assert byte_tokenizer.encode(text, add_special_tokens=False) == [256, *b"<|im_end|", ord(">"), 256]
    ids = byte_tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
    assert ids == [256, 261, 256]
    assert byte_tokenizer.decode(ids) == "hehe"
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert byte_tokenizer.token_bytes(261) == b"<|im_end|>"
    assert byte_tokenizer.token_bytes(261, skip_special_tokens=True) == b""
    assert byte_tokenizer.token_text(0xE2) == "\ufffd"
    assert byte_tokenizer.token_bytes(0xE2) == b"\xe2"
    assert byte_tokenizer.token_bytes(300) == byte_tokenizer.token_bytes(-1) == b""  # rows of a padded embedding


def test_control_token_that_a_word_could_spell_is_not_made_by_ordinary_text(byte_metadata):
    """Vocabularies that ignore merges take whole words: "sop" as one would be GLM's control token."""
    tokens = [*byte_metadata["tokenizer.ggml.tokens"], "sop"]
    metadata = with_(byte_metadata, pre="glm4", tokens=tokens, token_type=[1] * 259 + [3] * 4)
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("sop", add_special_tokens=False) == list(b"sop")
    assert tokenizer.encode("sop", add_special_tokens=False, allow_special_text=True) == [262]


def test_user_defined_tokens_are_always_read_and_markers_among_them_are_control_tokens(byte_metadata):
    tokens = [*byte_metadata["tokenizer.ggml.tokens"], "<tool_call>", "<|turn|>", "<｜User｜>"]
    tokenizer = load_tokenizer(with_(byte_metadata, tokens=tokens, token_type=[1] * 259 + [3] * 3 + [4] * 3))
    assert tokenizer.encode("a<tool_call>", add_special_tokens=False) == [ord("a"), 262]
    assert tokenizer.decode([262]) == "<tool_call>"
    assert set(tokenizer.special_token_texts.values()) == {259, 260, 261, 263, 264}
    assert tokenizer.special_token_ids == {259, 260, 261}  # the file flags them so; the others belong to the text
    assert tokenizer.decode([261, 263, 264]) == "<|turn|><｜User｜>"
    assert tokenizer.encode("<|turn|><｜User｜>", add_special_tokens=False) == list("<|turn|><｜User｜>".encode())
    assert tokenizer.encode("<|turn|><｜User｜>", add_special_tokens=False, allow_special_text=True) == [263, 264]


def test_end_tokens_are_the_files_and_the_templates_end_of_turn(byte_metadata, phi3):
    assert phi3.eos_token_ids == (32000, 32007)  # <|endoftext|> of the file, <|end|> of the template
    metadata = with_(byte_metadata, eos_token_id=10, eot_token_id=11, eom_token_id=10)
    assert load_tokenizer(metadata).eos_token_ids == (10, 11)
    with_template = {**metadata, "tokenizer.chat_template": "{{ messages }}<|im_end|>"}
    assert load_tokenizer(with_template).eos_token_ids == (10, 11, 261)
    assert load_tokenizer(with_template).chat_template == "{{ messages }}<|im_end|>"


def test_numpy_values_are_taken_like_lists(byte_metadata):
    metadata = with_(
        byte_metadata,
        token_type=np.array(byte_metadata["tokenizer.ggml.token_type"], np.int32),
        bos_token_id=np.uint32(259),
        add_bos_token=np.bool_(True),
    )
    assert load_tokenizer(metadata).encode("he", add_special_tokens=True) == [259, 256]


def test_sentencepiece_adds_a_space_after_every_special_token_and_takes_it_away_again():
    tokenizer = load_tokenizer(SENTENCEPIECE)
    ab, space_ab = 262, 263
    assert tokenizer.encode("ab", add_special_tokens=True) == [1, space_ab]
    assert tokenizer.encode("ab</s>ab", add_special_tokens=False, allow_special_text=True) == [space_ab, 2, space_ab]
    assert tokenizer.encode("ab<tool>ab", add_special_tokens=False) == [space_ab, 264, space_ab]
    assert tokenizer.decode([1, space_ab]) == "ab"
    assert tokenizer.decode([space_ab], continuation=True) == " ab"
    assert tokenizer.decode([1, space_ab], skip_special_tokens=False) == "<s> ab"
    without = load_tokenizer(with_(SENTENCEPIECE, add_space_prefix=False))
    assert without.encode("ab<tool>ab", add_special_tokens=False) == [ab, 264, ab]
    assert without.encode(" ab", add_special_tokens=False) == [space_ab]
    assert without.decode([space_ab]) == " ab"


def test_sentencepiece_spells_unknown_characters_in_bytes():
    tokenizer = load_tokenizer(with_(SENTENCEPIECE, add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("aé\x00", add_special_tokens=True)
    assert ids == [260, 3 + 0xC3, 3 + 0xA9, 3 + 0x00]
    assert tokenizer.decode(ids) == "aé\x00"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_phi3_markers_swallow_the_white_space_after_them(phi3):
    """As its tokenizer.json says (rstrip); the template's line feed after <|user|> makes no token."""
    ids = phi3.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", add_special_tokens=False, allow_special_text=True)
    assert ids == [32010, *phi3.encode("Hi", add_special_tokens=False), 32007, 32001]


def test_halves_of_surrogate_pairs_become_replacement_marks(byte_tokenizer):
    assert byte_tokenizer.encode("a\ud83d", add_special_tokens=False) == [ord("a"), *"\ufffd".encode()]
    assert byte_tokenizer.encode("\ud83d\ude00", add_special_tokens=False) == list("😀".encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model='rwkv' is not supported"),
        ({"model": 3}, r"tokenizer\.ggml\.model=3 is not supported"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": [1, 2]}, "tokens must be a list of strings"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "tokens holds 'a' twice"),
        ({"token_type": [1]}, "token_type must hold a type from 1 to 6 for each of 262 tokens"),
        ({"token_type": [9] * 262}, "token_type must hold a type from 1 to 6"),
        ({"token_type": ["x"] * 262}, "token_type must be a list of finite numbers"),
        ({"merges": []}, "merges is missing or empty"),
        ({"merges": ["h"]}, "merges holds 'h'"),
        ({"merges": ["q q"]}, "merges holds 'q q'"),
        ({"bos_token_id": 262}, "bos_token_id=262 is outside the 262 tokens"),
        ({"eos_token_id": -1}, "eos_token_id=-1 is outside"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ({"bos_token_id": None}, "add_bos_token is set, but the file names no such token"),
        ({"add_sep_token": True}, r"add_sep_token=True is not supported"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(byte_metadata, changes, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(with_(byte_metadata, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores must hold a number for each of 266 tokens"),
        ({"scores": [0.0]}, "scores must hold a number for each of 266 tokens"),
        ({"scores": [float("nan")] * 266}, "scores must be a list of finite numbers"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces=True is not supported"),
        ({"token_type": [2, 3, 3, 1] + [6] * 255 + [1] * 7}, "not a SentencePiece model that can be used"),
    ],
)
def test_sentencepiece_metadata_that_cannot_be_used_is_refused(changes, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(with_(SENTENCEPIECE, **changes))
