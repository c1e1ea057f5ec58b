"""A tiny model with random weights that has text: a token for every byte, some merges, control tokens, unused rows."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serving import LLM, SamplingParams
from serving.structured.compiler import GrammarCompiler
from serving.structured.constraint import Constraint, Grammar
from serving.text.byte_level import CHARACTER_OF_BYTE
from serving.text.tokenizer import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[2] / "data" / "tiny"
MERGES = ['" :', '{ "', '" ,', "t r", "u e", "tr ue", "n u", "l l", "nu ll", "a b", "ab c", "Ġ Ġ", "1 2", "Ã ©"]
CONTROLS = ("<s>", "<|end|>", "<|call|>")
CONTEXT = 256
VOCAB_SIZE = 301


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer files; returns the id of <|end|>. Fewer tokens than the model has rows (301)."""
    vocab = {CHARACTER_OF_BYTE[byte]: byte for byte in range(256)}
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    added = []
    for text in (*CONTROLS, "<tool_call>"):
        added.append(
            {
                "id": len(vocab) + len(added),
                "content": text,
                "special": text in CONTROLS,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": MERGES,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return len(vocab) + CONTROLS.index("<|end|>")


@pytest.fixture(scope="session")
def text_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_text")
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    eos_token_id = write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos_token_id}))
    return folder


@pytest.fixture(scope="session")
def make_llm(text_model) -> Callable[..., LLM]:
    def make(**overrides) -> LLM:
        settings = {
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "max_num_seqs": 8,
            "page_size": 8,
            "prefill_token_buckets": (32,),
            "query_block": 16,
            "max_decode_steps": 4,
            "kv_cache_bytes": 2**22,
            "show_progress": False,
        }
        return LLM(f"dummy:{text_model}", **(settings | overrides))

    return make


@pytest.fixture(scope="session")
def llm(make_llm) -> LLM:
    return make_llm()


@pytest.fixture(scope="session")
def tokenizer(text_model) -> Tokenizer:
    return load_tokenizer(text_model)


@pytest.fixture(scope="session")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)


def allowed(constraint: Constraint) -> list[int]:
    return np.flatnonzero(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture(scope="session")
def random_text(tokenizer) -> Callable[[Grammar, random.Random], str | None]:
    """A text by random choices among what is allowed, a little in favour of ends; None: it found none in 500 tokens."""
    (eos,) = tokenizer.eos_token_ids
    closing = {ord(character) for character in '"]}'}

    def walk(grammar: Grammar, rng: random.Random) -> str | None:
        constraint, token_ids = Constraint(grammar, SamplingParams(max_tokens=None), (eos,)), []
        for _ in range(500):
            assert constraint.error is None, constraint.error
            if constraint.is_complete:
                break
            choices = allowed(constraint)
            if eos in choices and rng.random() < 0.3:
                break
            choices = [i for i in choices if i != eos]
            ends = [i for i in choices if i in closing]
            token_ids.append(rng.choice(ends if ends and rng.random() < 0.4 else choices))
            constraint.accept(token_ids[-1])
            constraint.find_mask()
        else:
            return None
        return b"".join(map(tokenizer.token_bytes, token_ids)).decode()

    return walk


@pytest.fixture(scope="session")
def follows() -> Callable[[Grammar, str], bool]:
    """Whether a grammar lets a text through, whole or as a beginning, byte by byte."""

    def check(grammar: Grammar, text: str) -> bool:
        constraint = Constraint(grammar, SamplingParams(max_tokens=None), ())
        for byte in text.encode():
            if constraint.is_complete or byte not in allowed(constraint):
                return False
            constraint.accept(byte)
            constraint.find_mask()
        return True

    return check
