"""Logits to token ids, with every setting per row. Pure; a row's result does not depend on the other rows.

Order, as vLLM documents it: masks, bias and bans, min_tokens, penalties (repetition: CTRL, Keskar et al. 2019), temperature,
min_p (Nguyen et al. 2024), top_k, top_p (Holtzman et al. 2020), then a Gumbel-max draw. Shapes: S rows, V padded
vocabulary; the padded tail has logit -inf on entry and is never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Sampling settings of S rows. Values that turn a stage off: temperature 0, top_k 0, top_p 1, min_p 0,
    penalties 1, 0, 0, uses_vocab False (then masks, bias, counts and seen are not read)."""

    temperature: Array  # [S] float32
    top_k: Array  # [S] int32
    top_p: Array  # [S] float32
    min_p: Array  # [S] float32
    repetition_penalty: Array  # [S] float32
    presence_penalty: Array  # [S] float32
    frequency_penalty: Array  # [S] float32
    keys: Array  # [S, 2] uint32, raw threefry keys; folded with the token's position
    stop_ids: Array  # [S, E] int32, -1 where unused
    min_positions: Array  # [S] int32: no stop id is sampled at a position below this
    uses_vocab: Array  # [S] bool
    masks: Array  # [S, ceil(V / 32)] int32, a bit for each token, lowest first: those set may be chosen
    bias: Array  # [S, V] float32, added to the logits; -inf bans
    output_counts: Array  # [S, V] int32
    prompt_seen: Array  # [S, V] bool


def _apply_vocab(logits: Array, rows: SamplingRows) -> Array:
    biased = logits + rows.bias
    counts = rows.output_counts
    penalty = jnp.where(rows.prompt_seen | (counts > 0), rows.repetition_penalty[:, None], 1.0)
    penalised = jnp.where(biased > 0, biased / penalty, biased * penalty)
    penalised -= rows.frequency_penalty[:, None] * counts
    penalised -= rows.presence_penalty[:, None] * (counts > 0)
    bits = (rows.masks[:, :, None] >> jnp.arange(32)) & 1
    may_choose = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(rows.uses_vocab[:, None], jnp.where(may_choose, penalised, -jnp.inf), logits)


def _sort_keys(x: Array) -> Array:
    """Map float32 to uint32 so that unsigned order equals float order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(keys: Array, holds) -> Array:
    """Largest uint32 t per row for which `holds(keys >= t)` is true; `holds` is monotone and true at t = 0.

    Bit by bit from the top: 32 passes over [S, V] and no sort.
    """

    def set_bit(i, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(keys >= candidate[:, None]), candidate, threshold)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def _keep_top_k(logits: Array, top_k: Array) -> Array:
    """Mask to -inf all but the top_k best of each row (ties with the last are kept); 0 keeps all."""
    keys = _sort_keys(logits)
    threshold = _largest_key(keys, lambda kept: kept.sum(-1, dtype=jnp.int32) >= top_k)
    return jnp.where((keys >= threshold[:, None]) | (top_k == 0)[:, None], logits, -jnp.inf)


def _keep_top_p(logits: Array, top_p: Array) -> Array:
    """Mask to -inf what lies outside the smallest set of best tokens whose probability reaches top_p."""
    keys = _sort_keys(logits)
    probs = jax.nn.softmax(logits, axis=-1)
    threshold = _largest_key(keys, lambda kept: jnp.where(kept, probs, 0.0).sum(-1) >= top_p)
    threshold = jnp.minimum(threshold, keys.max(-1))  # the best token stays, also where top_p is 0 in float32
    kept = (keys >= threshold[:, None]) | (top_p >= 1.0)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def _keep_min_p(logits: Array, min_p: Array) -> Array:
    best = logits.max(-1, keepdims=True)
    bound = best + jnp.log(min_p)[:, None]  # log 0 = -inf keeps all
    return jnp.where(logits >= bound, logits, -jnp.inf)


def _draw(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = _keep_min_p(scaled, rows.min_p)
    scaled = lax.cond((rows.top_k > 0).any(), _keep_top_k, lambda x, _: x, scaled, rows.top_k)
    scaled = lax.cond((rows.top_p < 1.0).any(), _keep_top_p, lambda x, _: x, scaled, rows.top_p)

    def row_noise(key, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), position), logits.shape[1:])

    drawn = jnp.argmax(scaled + jax.vmap(row_noise)(rows.keys, positions), axis=-1)
    return jnp.where(rows.temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def _hold_back_stops(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    hits = jnp.where(rows.stop_ids >= 0, rows.stop_ids, logits.shape[1])  # out of range: dropped
    mask = jnp.zeros(logits.shape, bool).at[jnp.arange(logits.shape[0])[:, None], hits].set(True, mode="drop")
    return jnp.where(mask & (positions < rows.min_positions)[:, None], -jnp.inf, logits)


def _greedy(logits: Array) -> Array:
    """The best token of each row, or -2: the best of a row with NaN is NaN (XLA's order of argmax)."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(best), tokens, -2)


def _sample(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    usable = jnp.isfinite(logits.max(-1))
    logits = lax.cond(rows.uses_vocab.any(), _apply_vocab, lambda x, _: x, logits, rows)
    logits = _hold_back_stops(logits, rows, positions)
    usable &= jnp.isfinite(logits.max(-1))
    tokens = lax.cond(
        (rows.temperature > 0).any(), _draw, lambda x, *_: jnp.argmax(x, -1).astype(jnp.int32), logits, rows, positions
    )
    return jnp.where(usable, tokens, -2)


def sample(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    """Choose one token for each of the first R rows.

    logits: [R, V] float32. positions: [R] int32, the position the new token takes in its sequence.
    Returns [R] int32: the token id, or -2 where the row's logits are not usable (NaN, +inf, or nothing left to
    choose), which is that row's fault alone.
    """
    num_rows = logits.shape[0]

    def first(array: Array) -> Array:
        return array[:num_rows]

    # Where no row asks for more than the best token, one pass over the logits does. The rows are cut inside the
    # branch: a branch's operands are buffers, and [R, V] copies of bias, counts and seen would be made at every step.
    needs_more = (
        first(rows.uses_vocab) | (first(rows.temperature) > 0) | (positions < first(rows.min_positions))
    ).any()
    return lax.cond(
        needs_more,
        lambda logits, rows, positions: _sample(logits, jax.tree.map(first, rows), positions),
        lambda logits, *_: _greedy(logits),
        logits,
        rows,
        positions,
    )


def _top(values: Array, num_top: int) -> tuple[Array, Array]:
    """The `num_top` largest of each row [R, V], best first, ties by index -> values and indices [R, num_top].

    As many passes as results: `lax.top_k` is a sort on a GPU, by a library call that no command buffer can hold.
    """
    num_rows = values.shape[0]

    def take_best(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, top, ids = carry
        best = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        top = top.at[:, i].set(jnp.take_along_axis(rest, best[:, None], axis=-1)[:, 0])
        return rest.at[jnp.arange(num_rows), best].set(-jnp.inf), top, ids.at[:, i].set(best)

    shape = (num_rows, num_top)
    _, top, ids = lax.fori_loop(
        0, num_top, take_best, (values, jnp.zeros(shape, values.dtype), jnp.zeros(shape, jnp.int32))
    )
    return top, ids


def chosen_and_top_logprobs(logits: Array, tokens: Array, num_top: int) -> tuple[Array, Array, Array]:
    """Natural log-probs of the raw distribution at temperature 1.

    logits [S, V] float32, tokens [S] int32 -> chosen [S] float32, top ids [S, num_top] int32, top log-probs
    [S, num_top] float32, best first.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    top, ids = _top(logprobs, num_top)
    return chosen, ids, top
