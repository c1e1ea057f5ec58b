"""The mask in the sampler against numpy, and that rows without one do not notice."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.sampling import sample
from serving.execution.slot_table import make_slot_table, set_masks, set_vocab_rows

NUM_ROWS, VOCAB = 6, 75  # no multiple of 32
WORDS = 3


def random_rows(rng):
    """Settings of every kind; rows 0 to 3 have dense rows, of which 0 to 2 a mask."""
    rows = make_slot_table(NUM_ROWS, 1, VOCAB).sampling
    return replace(
        rows,
        temperature=jnp.asarray([0.0, 1.0, 0.7, 0.0, 1.0, 0.0], jnp.float32),
        top_k=jnp.asarray([0, 0, 3, 0, 4, 0], jnp.int32),
        keys=jnp.asarray(rng.integers(0, 2**32, (NUM_ROWS, 2)), jnp.uint32),
        repetition_penalty=jnp.asarray([1.0, 1.3, 1.0, 1.0, 1.0, 1.0], jnp.float32),
        uses_vocab=jnp.arange(NUM_ROWS) < 4,
        bias=jnp.asarray(rng.normal(size=(NUM_ROWS, VOCAB)), jnp.float32),
        output_counts=jnp.asarray(rng.integers(0, 2, (NUM_ROWS, VOCAB)), jnp.int32),
    )


def packed(allowed: np.ndarray) -> np.ndarray:
    """[R, V] bool to [R, W] int32, bit by bit."""
    words = np.zeros((len(allowed), WORDS), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32)


def test_a_masked_row_chooses_as_if_the_other_logits_were_not_there():
    rng = np.random.default_rng()
    choose = jax.jit(sample)
    for _ in range(20):
        rows = random_rows(rng)
        logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32) * 3
        positions = jnp.asarray(rng.integers(0, 100, NUM_ROWS), jnp.int32)
        allowed = np.ones((NUM_ROWS, VOCAB), bool)
        allowed[:3] = rng.random((3, VOCAB)) < rng.choice([0.05, 0.5])
        allowed[:3, rng.integers(VOCAB)] = True
        # Rows without dense rows must not read theirs: no bit set.
        words = np.where(np.asarray(rows.uses_vocab)[:, None], packed(allowed), 0)
        tokens = np.asarray(choose(logits, replace(rows, masks=jnp.asarray(words)), positions))
        expected = np.asarray(choose(np.where(allowed, logits, -np.inf), rows, positions))
        assert tokens.tolist() == expected.tolist()
        assert all(allowed[row, token] for row, token in enumerate(tokens))
        greedy = np.where(allowed[0], logits[0] + np.asarray(rows.bias)[0], -np.inf)
        assert tokens[0] == int(np.argmax(greedy))
        without = np.asarray(choose(logits, rows, positions))
        assert tokens[3:].tolist() == without[3:].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_seen_under_a_mask(value):
    rng = np.random.default_rng(1)
    rows = random_rows(rng)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    logits[1, 40] = value
    allowed = np.ones((NUM_ROWS, VOCAB), bool)
    allowed[1, 40] = False
    tokens = sample(logits, replace(rows, masks=jnp.asarray(packed(allowed))), jnp.arange(NUM_ROWS))
    assert [int(token) == -2 for token in tokens] == [row == 1 for row in range(NUM_ROWS)]


def test_a_row_whose_mask_leaves_nothing_is_not_usable_and_the_others_are():
    rows = random_rows(np.random.default_rng(2))
    allowed = np.ones((NUM_ROWS, VOCAB), bool)
    allowed[2] = False
    tokens = sample(
        np.zeros((NUM_ROWS, VOCAB), np.float32), replace(rows, masks=jnp.asarray(packed(allowed))), jnp.arange(6)
    )
    assert [int(token) == -2 for token in tokens] == [row == 2 for row in range(NUM_ROWS)]


def test_masks_are_set_by_slot_and_a_new_request_begins_without_one():
    table = make_slot_table(4, 1, VOCAB)
    assert (np.asarray(table.sampling.masks) == -1).all()
    masks = np.arange(1, 10, dtype=np.int32).reshape(3, WORDS)
    table = set_masks(table, jnp.asarray([2, 4, 0], jnp.int32), jnp.asarray(masks))  # 4: past the table
    assert np.asarray(table.sampling.masks).tolist() == [[7, 8, 9], [-1] * 3, [1, 2, 3], [-1] * 3]
    dense = (jnp.zeros(VOCAB), jnp.zeros(VOCAB, jnp.int32), jnp.zeros(VOCAB, bool))
    table = set_vocab_rows(table, jnp.int32(2), *dense)
    assert np.asarray(table.sampling.masks)[2].tolist() == [-1] * 3
