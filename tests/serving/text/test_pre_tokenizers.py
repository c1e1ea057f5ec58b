"""How texts are split before byte-level BPE. Splits by tag were recorded from vocabularies whose every id was right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.text.pre_tokenizers import PRE_TOKENIZERS
from serving.text.tokenizer import TokenizerError, load_tokenizer

DATA = Path(__file__).parents[2] / "data" / "tokenizers"
SPLITS = json.loads((DATA / "pre_tokenizer_splits.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("tag", SPLITS)
def test_texts_split_as_recorded(tag, vectors):
    pre_tokenizer = PRE_TOKENIZERS[tag].build()
    for case, lengths in zip(vectors[tag], SPLITS[tag], strict=True):
        pieces = pre_tokenizer.pre_tokenize_str(case["s"])
        assert [len(piece) for piece, _ in pieces] == lengths, case["s"]


@pytest.mark.parametrize(
    ("tag", "text", "pieces"),
    [  # derived from the expressions by hand
        ("gpt-4o", "HelloWorld's 12345", ["Hello", "World's", " ", "123", "45"]),
        ("llama4", "HTMLParser DON'T", ["HTMLParser", " DON'T"]),
        ("tekken", "helloWorld 42", ["hello", "World", " ", "4", "2"]),
        ("deepseek-v3", "x=1234 _a", ["x", "=", "123", "4", " _", "a"]),
        ("default", "a 12345!", ["a", " ", "123", "45", "!"]),
        ("smollm", "Ⅷ 2x", ["Ⅷ", " ", "2", "x"]),
        ("llama3", "I'LL go\n\n  on", ["I", "'LL", " go", "\n\n", " ", " on"]),
        ("qwen2", "I'll 12", ["I", "'ll", " ", "1", "2"]),
        ("gpt-2", "I'LL 12", ["I", "'", "LL", " 12"]),
    ],
)
def test_expressions_of_other_tags_split_as_they_say(tag, text, pieces):
    split = PRE_TOKENIZERS[tag].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@pytest.mark.parametrize("tag", PRE_TOKENIZERS)
def test_every_tag_builds_and_loses_no_byte(tag):
    text = "naïve café\r\n\t  12 345,6 𝔘nicode 日本語 한국어 e\u0301 👨‍👩‍👧 'S \x00 don't  "
    pieces = PRE_TOKENIZERS[tag].build().pre_tokenize_str(text)
    assert sum(len(piece) for piece, _ in pieces) == len(text.encode())


def test_unknown_and_missing_tags_are_refused_by_name(byte_metadata):
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.ggml\.pre='novel-bpe' is not known; known are default, gpt-2"
    ):
        load_tokenizer({**byte_metadata, "tokenizer.ggml.pre": "novel-bpe"})
    without = {key: value for key, value in byte_metadata.items() if key != "tokenizer.ggml.pre"}
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is missing"):
        load_tokenizer(without)


def test_qwen2_text_is_normalised_and_gpt2_text_is_not(byte_metadata):
    decomposed, composed = "e\u0301", "\u00e9"
    qwen2 = load_tokenizer({**byte_metadata, "tokenizer.ggml.pre": "qwen2"})
    gpt2 = load_tokenizer(byte_metadata)
    assert qwen2.encode(decomposed, add_special_tokens=False) == list(composed.encode())
    assert gpt2.encode(decomposed, add_special_tokens=False) == list(decomposed.encode())
