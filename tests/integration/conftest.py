"""One tiny engine shared by the tests of a module: compiling is most of what they would spend."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import LLM

TINY = Path(__file__).parents[1] / "data" / "tiny"
VOCAB_SIZE = 301
CONTEXT = 96


@pytest.fixture(scope="module")
def tiny_llm() -> LLM:
    """Random weights, 301 tokens (a size that needs padding), context 96, eight slots, end of sequence 7."""
    return LLM(
        f"dummy:{TINY}",
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=8,
        page_size=8,
        prefill_token_buckets=(128,),
        query_block=16,
        max_decode_steps=1,
        kv_cache_bytes=2**22,
        show_progress=False,
    )
