"""Tokenizers for the tests of this folder: real vocabularies, and a small one with a token for every byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.gguf_reader import read_gguf
from serving.text.byte_level import CHARACTER_OF_BYTE
from serving.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[2] / "data" / "tokenizers"


@pytest.fixture(scope="session")
def vectors() -> dict[str, list[dict[str, Any]]]:
    """llama.cpp's texts and ids, by vocabulary."""
    content = json.loads((DATA / "llamacpp_vectors.json").read_text(encoding="utf-8"))
    return {entry["vocab"]: entry["cases"] for entry in content}


@pytest.fixture(scope="session")
def gpt2_metadata() -> dict[str, Any]:
    return read_gguf(DATA / "ggml-vocab-gpt-2.gguf").metadata


@pytest.fixture(scope="session")
def phi3_metadata() -> dict[str, Any]:
    return read_gguf(DATA / "ggml-vocab-phi-3.gguf").metadata


@pytest.fixture(scope="session")
def gpt2(gpt2_metadata) -> Tokenizer:
    return load_tokenizer(gpt2_metadata)


@pytest.fixture(scope="session")
def phi3(phi3_metadata) -> Tokenizer:
    return load_tokenizer(phi3_metadata)


@pytest.fixture(scope="session")
def byte_metadata() -> dict[str, Any]:
    """256 byte tokens (id = byte), "he" 256, "hel" 257, "lo" 258, <s> 259, <|im_start|> 260, <|im_end|> 261."""
    tokens = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += ["he", "hel", "lo", "<s>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [3] * 3,
        "tokenizer.ggml.merges": ["h e", "he l", "l o"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 261,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.fixture(scope="session")
def byte_tokenizer(byte_metadata) -> Tokenizer:
    return load_tokenizer(byte_metadata)
