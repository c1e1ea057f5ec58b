"""Every dense architecture against recorded outputs of Hugging Face transformers, through pages, chunks and decode.

The numbers come from tests/data/arch (its README says how they were made): float32, and every log-prob within 1e-4.
Sequences run together, each prompt cut into random chunks, in one program that has both prefill and decode rows.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.source import open_source
from configs.engine import MeshConfig
from layers import decoder
from layers.step_inputs import AttentionRows, StepInputs
from sharding.mesh import make_mesh
from sharding.placement import named_sharding

ARCH = Path(__file__).parent.parent / "data" / "arch"
TOLERANCE = 1e-4  # tests/data/arch/README.md
NUM_PREFILL_ROWS, QUERY_BLOCK, MAX_LEN = 3, 16, 240
VARIANTS = {  # page size of each
    "gemma2": 4,
    "gemma3": 1,
    "llama_bias": 16,
    "llama_dynamic": 4,
    "llama_linear": 16,
    "llama_llama3": 1,
    "llama_plain": 16,
    "llama_yarn": 4,
    "mistral_sliding": 1,
    "phi3_longrope": 4,
    "phi3_longrope_partial": 16,
    "phi3_sliding": 1,
    "qwen2_plain": 4,
    "qwen2_sliding": 16,
    "qwen3_tied": 4,
}


@dataclass
class Sequence:
    """A prompt and its recorded greedy continuation, fed token by token."""

    tokens: list[int]
    num_prompt_tokens: int
    page_ids: list[int]
    num_computed_tokens: int = 0
    rope_len: int = 0
    log_probs: dict[int, np.ndarray] = field(default_factory=dict)  # position -> log-probs of the next token

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens, or after a crossing of longrope's limit the tokens to compute anew."""
        return max(self.num_prompt_tokens, self.rope_len)


def rows_of(chunks: list[tuple[Sequence, int, int, int]], num_rows: int, num_queries: int, max_pages: int):
    """(sequence, start, length, rope length) of each row -> AttentionRows padded to num_rows, and the token ids."""
    page_table = np.zeros((num_rows, max_pages), np.int32)
    starts, lengths, rope_lens = (np.zeros(num_rows, np.int32) for _ in range(3))
    token_ids = np.zeros((num_rows, num_queries), np.int32)
    for row, (sequence, start, length, rope_len) in enumerate(chunks):
        page_table[row, : len(sequence.page_ids)] = sequence.page_ids
        starts[row], lengths[row], rope_lens[row] = start, length, rope_len
        token_ids[row, :length] = sequence.tokens[start : start + length]
    rows = AttentionRows(
        page_table=page_table, starts=starts, lengths=lengths, rope_lens=rope_lens, num_queries=num_queries
    )
    return rows, token_ids.reshape(-1)


def run_sequences(config, params, mesh, sequences: list[Sequence], page_size: int, num_pages: int, rng: random.Random):
    """Run all sequences to their ends, chunk by chunk, and note the log-probs after every token."""
    bind = decoder.bind(config, jnp.float32, 1)

    def step(params, kv_cache, inputs):
        model = bind(params)
        kv_cache, hidden = decoder.forward(model, kv_cache, inputs)
        return kv_cache, jax.nn.log_softmax(decoder.logits(model, hidden))

    compiled = jax.jit(step, donate_argnums=1)
    kv_cache = decoder.make_kv_cache(
        config, num_pages=num_pages, page_size=page_size, dtype=jnp.float32, tensor_shards=1, mesh=mesh
    )
    max_pages = -(-MAX_LEN // page_size)
    longrope_limit = config.rope.original_max_position_embeddings if config.rope.rope_type == "longrope" else None
    while any(s.num_computed_tokens < len(s.tokens) for s in sequences):
        prefill, decode = [], []
        for sequence in sequences:
            start = sequence.num_computed_tokens
            if start == longrope_limit and sequence.rope_len < start < len(sequence.tokens):
                # the sequence passes the limit: its keys are computed anew with the long factors
                sequence.num_computed_tokens, sequence.rope_len = 0, start + 1
                start = 0
            if start >= sequence.num_prefill_tokens and start < len(sequence.tokens):
                decode.append((sequence, start, 1, 0))
            chunk_end = min(start + rng.randint(1, NUM_PREFILL_ROWS * QUERY_BLOCK), sequence.num_prefill_tokens)
            while start < chunk_end and len(prefill) < NUM_PREFILL_ROWS:
                length = min(chunk_end - start, QUERY_BLOCK)
                prefill.append((sequence, start, length, sequence.num_prefill_tokens))
                start += length
        prefill_rows, prefill_ids = rows_of(prefill, NUM_PREFILL_ROWS, QUERY_BLOCK, max_pages)
        decode_rows, decode_ids = rows_of(decode, len(sequences), 1, max_pages)
        inputs = StepInputs(token_ids=np.concatenate([prefill_ids, decode_ids]), rows=(prefill_rows, decode_rows))
        kv_cache, log_probs = compiled(params, kv_cache, inputs)
        log_probs = np.asarray(log_probs)
        assert np.isfinite(log_probs[:, : config.vocab_size]).all()  # also of tokens that are none
        first = 0
        for chunks, num_queries in ((prefill, QUERY_BLOCK), (decode, 1)):
            for row, (sequence, start, length, _) in enumerate(chunks):
                for i in range(length):
                    # of a token computed anew, the first result is what was served
                    sequence.log_probs.setdefault(start + i, log_probs[first + row * num_queries + i])
                sequence.num_computed_tokens = start + length
            first += NUM_PREFILL_ROWS * QUERY_BLOCK


def largest_error(sequence: Sequence, expected: dict) -> float:
    """Largest difference of a recorded log-prob; asserts that the greedy tokens are the recorded ones."""
    num_prompt_tokens = sequence.num_prompt_tokens
    errors = [
        abs(sequence.log_probs[position - 1][sequence.tokens[position]] - log_prob)
        for position, log_prob in enumerate(expected["prompt_logprobs"])
        if position > 0
    ]
    errors += [abs(sequence.log_probs[num_prompt_tokens - 1][i] - p) for i, p in expected["last_top10"]]
    for step, (token_id, top) in enumerate(zip(expected["greedy_token_ids"], expected["greedy_top5"], strict=True)):
        log_probs = sequence.log_probs[num_prompt_tokens - 1 + step]
        assert int(np.argmax(log_probs)) == token_id, f"token {step} after the prompt"
        errors += [abs(log_probs[i] - p) for i, p in top]
    return max(errors)


def check_variant(variant: str, page_size: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    source = open_source(str(ARCH / variant))
    config = source.model_config
    mesh = make_mesh(MeshConfig())
    specs = decoder.param_specs(config, jnp.float32, 1)
    params = source.load_params(specs, {path: named_sharding(mesh, spec) for path, spec in specs.items()}, 1)
    prompts = json.loads((ARCH / variant / "expected.json").read_text())["prompts"]
    pages_per_seq = -(-MAX_LEN // page_size)
    page_ids = rng.sample(range(1, 1 + len(prompts) * pages_per_seq), len(prompts) * pages_per_seq)
    sequences = [
        Sequence(
            tokens=prompt["prompt_token_ids"] + prompt["greedy_token_ids"][:-1],
            num_prompt_tokens=len(prompt["prompt_token_ids"]),
            page_ids=page_ids[i * pages_per_seq : (i + 1) * pages_per_seq],
        )
        for i, prompt in enumerate(prompts)
    ]
    run_sequences(config, params, mesh, sequences, page_size, 1 + len(page_ids), rng)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        error = largest_error(sequence, prompt)
        print(f"{variant}: prompt of {sequence.num_prompt_tokens} tokens, largest error {error:.1e}")
        assert error < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_architecture_gives_the_recorded_tokens_and_log_probs(variant: str) -> None:
    check_variant(variant, VARIANTS[variant], seed=random.SystemRandom().randrange(2**32))


@pytest.mark.parametrize("page_size", [4, 16])
def test_page_size_does_not_change_the_result(page_size: int) -> None:
    check_variant("mistral_sliding", page_size, seed=random.SystemRandom().randrange(2**32))
