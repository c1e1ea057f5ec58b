"""Checks GGUF vocabularies against llamacpp_vectors.json and records how their pre-tokenizers split those texts.

    python make_pre_tokenizer_splits.py FOLDER

FOLDER holds llama.cpp's ggml-vocab-*.gguf (vendor/llama.cpp/models in the source archive of llama-cpp-python 0.3.36).
Only vocabularies whose every id is equal are recorded, so the splits stand for models whose vocabularies, for their
size or licence, are not here. Writes pre_tokenizer_splits.json: by tag, for each text the pieces' lengths in bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from checkpoints.gguf_reader import read_gguf
from serving.text.pre_tokenizers import PRE_TOKENIZERS
from serving.text.tokenizer import load_tokenizer

HERE = Path(__file__).parent


def main() -> None:
    splits: dict[str, list[list[int]]] = {}
    for vectors in json.loads((HERE / "llamacpp_vectors.json").read_text(encoding="utf-8")):
        path = Path(sys.argv[1]) / f"ggml-vocab-{vectors['vocab']}.gguf"
        metadata = read_gguf(path).metadata
        if metadata.get("tokenizer.ggml.model") not in ("gpt2", "llama"):
            print(f"{vectors['vocab']}: model {metadata.get('tokenizer.ggml.model')} is not supported")
            continue
        tokenizer = load_tokenizer(metadata)
        assert tokenizer is not None
        texts = [case["s"] for case in vectors["cases"]]
        ids = [tokenizer.encode(text, add_special_tokens=False, allow_special_text=True) for text in texts]
        num_equal = sum(got == case["ids"] for got, case in zip(ids, vectors["cases"], strict=True))
        print(f"{vectors['vocab']}: {num_equal} of {len(texts)} equal")
        if metadata["tokenizer.ggml.model"] == "gpt2" and num_equal == len(texts):
            tag = metadata["tokenizer.ggml.pre"]
            pre_tokenizer = PRE_TOKENIZERS[tag].build()
            splits[tag] = [[len(piece) for piece, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]
    lines = [f" {json.dumps(tag)}: {json.dumps(lengths, separators=(',', ':'))}" for tag, lengths in splits.items()]
    (HERE / "pre_tokenizer_splits.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
