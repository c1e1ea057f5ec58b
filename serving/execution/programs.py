"""The step programs, as pure functions to be compiled once per bucket.

`decode(R, K)`: K steps of the first R slots in one dispatch. `prefill(T)`: T prompt tokens in rows of `query_block`, reading
earlier pages. `mixed(T, R)`: both in one pass over the weights. Each takes donated state and one packed int32 input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from layers import decoder
from layers.kv_cache import KVCache
from layers.sampling import chosen_and_top_logprobs, sample
from layers.step_inputs import AttentionRows, StepInputs
from serving.execution.slot_table import SlotTable, accept_tokens
from serving.scheduling.schedule import Schedule

Bind = Callable[[dict[str, Array]], decoder.Decoder]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step sampled. K steps, the first R slots, M log-probs. tokens: -1 no token, -2 logits not usable."""

    tokens: Array  # [K, R] int32
    logprobs: Array  # [K, R] float32
    top_ids: Array  # [K, R, M] int32
    top_logprobs: Array  # [K, R, M] float32


@dataclass(frozen=True)
class InputLayout:
    """Where things lie in the packed int32 step input: S slots, T prefill tokens in R rows of Q.

    Per slot: run (decodes), stop (deactivate), append index (-1 none), append page, sample source (-1: none, else the
    index of the prefill token whose logits give this slot's next token). Then per row: slot, start, length. Then tokens.
    """

    num_slots: int
    num_prefill_tokens: int
    query_block: int

    @property
    def num_rows(self) -> int:
        return self.num_prefill_tokens // self.query_block

    @property
    def size(self) -> int:
        return 5 * self.num_slots + 3 * self.num_rows + self.num_prefill_tokens

    def split(self, packed):
        """packed [size] -> (per slot [5, S], per row [3, R], tokens [T])."""
        a, b = 5 * self.num_slots, 5 * self.num_slots + 3 * self.num_rows
        return packed[:a].reshape(5, -1), packed[a:b].reshape(3, -1), packed[b:]

    def pack(self, schedule: Schedule) -> tuple[np.ndarray, dict[int, int]]:
        """The schedule as one vector, and for each chunk (by its place) the prefill token index it starts at."""
        packed = np.zeros(self.size, np.int32)
        slots, rows, tokens = self.split(packed)
        slots[2] = slots[4] = -1
        for slot, _ in schedule.decode:
            slots[0, slot] = 1
        slots[1, list(schedule.deactivate)] = 1
        for append in schedule.page_appends:
            slots[2, append.slot], slots[3, append.slot] = append.page_index, append.page_id
        row, starts = 0, {}
        for place, chunk in enumerate(schedule.prefill):
            starts[place] = row * self.query_block
            num_tokens = len(chunk.token_ids)
            tokens[starts[place] : starts[place] + num_tokens] = chunk.token_ids
            for offset in range(0, num_tokens, self.query_block):
                length = min(self.query_block, num_tokens - offset)
                rows[:, row] = chunk.slot, chunk.start + offset, length
                row += 1
            if chunk.samples:
                slots[4, chunk.slot] = starts[place] + num_tokens - 1
        return packed, starts


def _begin_step(table: SlotTable, slots: Array) -> SlotTable:
    num_slots = slots.shape[1]
    index = jnp.where(slots[2] >= 0, slots[2], table.page_table.shape[1])  # out of range: dropped
    page_table = table.page_table.at[jnp.arange(num_slots), index].set(slots[3], mode="drop")
    return replace(table, page_table=page_table, active=table.active & (slots[1] == 0))


def _decode_rows(table: SlotTable, run: Array) -> AttentionRows:
    """A row for each of the first run.shape[0] slots."""
    num_rows = run.shape[0]
    # slices of their own: as part of a kernel's call they would keep that out of command buffers
    page_table, starts = lax.optimization_barrier((table.page_table[:num_rows], table.positions[:num_rows]))
    return AttentionRows(
        page_table=page_table,
        starts=starts,
        lengths=run.astype(jnp.int32),
        rope_lens=table.rope_lens[:num_rows],
        num_queries=1,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """What the sampler needs of a forward pass, a row for each of the first R slots."""

    hidden: Array  # [R, D], of the token whose logits give the slot's next token
    positions: Array  # [R] int32, that token's position
    sampled: Array  # [R] bool: the slots that take a token


def sample_step(
    bind: Bind, max_logprobs: int, params: dict[str, Array], table: SlotTable, inputs: SampleInputs
) -> tuple[SlotTable, StepOutput]:
    """Choose a token for each sampled slot and advance it -> new table and the step's output (K = 1)."""
    return _sample(bind(params), max_logprobs, table, inputs)


def _sample(
    model: decoder.Decoder, max_logprobs: int, table: SlotTable, inputs: SampleInputs
) -> tuple[SlotTable, StepOutput]:
    logits = decoder.logits(model, inputs.hidden)
    tokens = sample(logits, table.sampling, inputs.positions + 1)
    num_rows = tokens.shape[0]
    logprobs, top_ids, top_logprobs = lax.cond(
        (table.wants_logprobs[:num_rows] & inputs.sampled).any(),
        lambda: chosen_and_top_logprobs(logits, tokens, max_logprobs),
        lambda: (
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros((num_rows, max_logprobs), jnp.int32),
            jnp.zeros((num_rows, max_logprobs), jnp.float32),
        ),
    )
    table = accept_tokens(table, tokens, inputs.positions, inputs.sampled)
    tokens = jnp.where(inputs.sampled, tokens, -1)
    return table, StepOutput(tokens[None], logprobs[None], top_ids[None], top_logprobs[None])


def _decode_forward(
    model: decoder.Decoder, kv_cache: KVCache, table: SlotTable, slots: Array, num_rows: int
) -> tuple[KVCache, SampleInputs]:
    run = (table.active & (slots[0] > 0))[:num_rows]
    inputs = StepInputs(token_ids=table.token_ids[:num_rows], rows=(_decode_rows(table, run),))
    kv_cache, hidden = decoder.forward(model, kv_cache, inputs)
    return kv_cache, SampleInputs(hidden, table.positions[:num_rows], run)


def decode(
    bind: Bind,
    layout: InputLayout,
    num_rows: int,
    params: dict[str, Array],
    kv_cache: KVCache,
    table: SlotTable,
    packed: Array,
) -> tuple[KVCache, SlotTable, SampleInputs]:
    """The forward pass of one decode step of the first `num_rows` slots, to be followed by `sample_step`."""
    slots, _, _ = layout.split(packed)
    table = _begin_step(table, slots)
    kv_cache, sample_inputs = _decode_forward(bind(params), kv_cache, table, slots, num_rows)
    return kv_cache, table, sample_inputs


def decode_many(
    bind: Bind,
    layout: InputLayout,
    num_rows: int,
    num_steps: int,
    max_logprobs: int,
    params: dict[str, Array],
    kv_cache: KVCache,
    table: SlotTable,
    packed: Array,
) -> tuple[KVCache, SlotTable, StepOutput]:
    """`num_steps` whole decode steps of the first `num_rows` slots. A slot that stops writes nothing from then on."""
    model = bind(params)
    slots, _, _ = layout.split(packed)
    table = _begin_step(table, slots)

    def body(k, carry):
        kv_cache, table, output = carry
        kv_cache, sample_inputs = _decode_forward(model, kv_cache, table, slots, num_rows)
        table, step = _sample(model, max_logprobs, table, sample_inputs)
        return kv_cache, table, jax.tree.map(lambda all_, one: all_.at[k].set(one[0]), output, step)

    empty = StepOutput(
        jnp.zeros((num_steps, num_rows), jnp.int32),
        jnp.zeros((num_steps, num_rows), jnp.float32),
        jnp.zeros((num_steps, num_rows, max_logprobs), jnp.int32),
        jnp.zeros((num_steps, num_rows, max_logprobs), jnp.float32),
    )
    return lax.fori_loop(0, num_steps, body, (kv_cache, table, empty))


def prefill(
    bind: Bind,
    layout: InputLayout,
    num_decode_rows: int,
    params: dict[str, Array],
    kv_cache: KVCache,
    table: SlotTable,
    packed: Array,
) -> tuple[KVCache, SlotTable, SampleInputs, Array]:
    """T prompt tokens and one decode step of the first `num_decode_rows` slots in the same pass (`mixed`; 0: none).

    To be followed by `sample_step`, for the same slots (all, where none decode): the chunks' slots must be among them.
    Also returns the hidden states [T, D] of the prefill tokens, for prompt log-probs.
    """
    slots, rows, tokens = layout.split(packed)
    table = _begin_step(table, slots)
    row_slots, starts, lengths = rows
    prefill_rows = AttentionRows(
        page_table=table.page_table[row_slots],
        starts=starts,
        lengths=lengths,
        rope_lens=table.rope_lens[row_slots],
        num_queries=layout.query_block,
    )
    if num_decode_rows:
        run = (table.active & (slots[0] > 0))[:num_decode_rows]
        inputs = StepInputs(
            token_ids=jnp.concatenate([table.token_ids[:num_decode_rows], tokens]),
            rows=(_decode_rows(table, run), prefill_rows),
        )
    else:
        inputs = StepInputs(token_ids=tokens, rows=(prefill_rows,))
    kv_cache, hidden = decoder.forward(bind(params), kv_cache, inputs)

    num_sampled = num_decode_rows or layout.num_slots
    source = slots[4, :num_sampled]
    from_prefill = source >= 0
    last = jnp.maximum(source, 0)
    positions = jnp.where(
        from_prefill, starts[last // layout.query_block] + last % layout.query_block, table.positions[:num_sampled]
    )
    index = jnp.where(from_prefill, num_decode_rows + last, jnp.arange(num_sampled) if num_decode_rows else 0)
    sampled = from_prefill | (run if num_decode_rows else False)
    return kv_cache, table, SampleInputs(hidden[index], positions, sampled), hidden[num_decode_rows:]


def score(
    bind: Bind, num_top: int, params: dict[str, Array], hidden: Array, start: Array, targets: Array
) -> tuple[Array, Array, Array]:
    """Prompt log-probs of Q consecutive tokens: hidden [T, D] from index `start`, targets [Q] the tokens that follow.

    Returns chosen [Q], top ids [Q, num_top], top log-probs [Q, num_top].
    """
    rows = lax.dynamic_slice_in_dim(hidden, start, targets.shape[0])
    return chosen_and_top_logprobs(decoder.logits(bind(params), rows), targets, num_top)
