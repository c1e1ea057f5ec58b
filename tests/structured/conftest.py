"""A tiny model with random weights that has text: a token for every byte, some merges, control tokens, unused rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from serving import LLM
from serving.text.byte_level import CHARACTER_OF_BYTE

TINY = Path(__file__).parents[1] / "data" / "tiny"
MERGES = ['" :', '{ "', '" ,', "t r", "u e", "tr ue", "n u", "l l", "nu ll", "a b", "ab c", "Ġ Ġ", "1 2", "Ã ©"]
CONTROLS = ("<s>", "<|end|>", "<|call|>")
CONTEXT = 256


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


def make_llm(folder: Path, **overrides) -> LLM:
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
    return LLM(f"dummy:{folder}", **(settings | overrides))


@pytest.fixture(scope="session")
def llm(text_model) -> LLM:
    return make_llm(text_model)
