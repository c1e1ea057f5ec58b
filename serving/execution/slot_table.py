"""The slot table on the device: what a decode step needs to know of each slot, donated through every step.

Sampled tokens stay here: the host never feeds them back. The host changes a row by one packed int32 vector
(`pack_reset`) when a request gets a slot, and appends pages through each step's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from layers.sampling import SamplingRows
from serving.request import MAX_STOP_TOKEN_IDS, Request, SamplingParams
from serving.scheduling.schedule import SlotReset

MAX_EOS_IDS = 16  # a model's end-of-sequence ids, beside a request's own stop ids
NUM_STOP_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """S slots, P pages a sequence. `active` slots decode; the device clears it when a sequence stops."""

    token_ids: Array  # [S] int32, last sampled token: the next decode step's input
    positions: Array  # [S] int32, its position
    active: Array  # [S] bool
    page_table: Array  # [S, P] int32
    rope_lens: Array  # [S] int32, length that dynamic and longrope rope see at least
    limits: Array  # [S] int32, tokens (prompt + output) at which the sequence ends
    wants_logprobs: Array  # [S] bool
    sampling: SamplingRows


_FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_FIELDS = (
    "slot",
    "rope_len",
    "limit",
    "wants_logprobs",
    "uses_vocab",
    "key_high",
    "key_low",
    "min_position",
    "top_k",
    "is_decoding",
    "token_id",
    "position",
    *_FLOAT_FIELDS,
)
_AT = {name: i for i, name in enumerate(_FIELDS)}


def make_slot_table(num_slots: int, max_pages: int, padded_vocab_size: int) -> SlotTable:
    """An empty table: every slot inactive, every page the null page."""

    def zeros(*shape: int, dtype=jnp.int32) -> Array:
        return jnp.zeros((num_slots, *shape), dtype)

    return SlotTable(
        token_ids=zeros(),
        positions=zeros(),
        active=zeros(dtype=bool),
        page_table=zeros(max_pages),
        rope_lens=zeros(),
        limits=zeros(),
        wants_logprobs=zeros(dtype=bool),
        sampling=SamplingRows(
            temperature=zeros(dtype=jnp.float32),
            top_k=zeros(),
            top_p=zeros(dtype=jnp.float32) + 1,
            min_p=zeros(dtype=jnp.float32),
            repetition_penalty=zeros(dtype=jnp.float32) + 1,
            presence_penalty=zeros(dtype=jnp.float32),
            frequency_penalty=zeros(dtype=jnp.float32),
            keys=zeros(2, dtype=jnp.uint32),
            stop_ids=zeros(NUM_STOP_IDS) - 1,
            min_positions=zeros(),
            uses_vocab=zeros(dtype=bool),
            masks=zeros(-(-padded_vocab_size // 32)) - 1,
            bias=zeros(padded_vocab_size, dtype=jnp.float32),
            output_counts=zeros(padded_vocab_size),
            prompt_seen=zeros(padded_vocab_size, dtype=bool),
        ),
    )


def request_key(request: Request) -> tuple[int, int]:
    """The raw threefry key of a request: its seed, mixed with the child's index (splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    x = (request.seed + request.child_index * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    return x >> 32, x & 0xFFFFFFFF


def uses_vocab(params: SamplingParams) -> bool:
    """Whether a request needs its dense rows over the vocabulary (masks, bias, counts, seen)."""
    return params.uses_penalties or params.uses_bias or params.structured is not None


def pack_reset_size(max_pages: int) -> int:
    """Length of `pack_reset`'s vector."""
    return len(_FIELDS) + NUM_STOP_IDS + max_pages


def pack_reset(reset: SlotReset, max_pages: int) -> np.ndarray:
    """One slot's new row as an int32 vector: scalars (floats by their bits), stop ids, page table."""
    request, params = reset.request, reset.request.params
    row = np.zeros(pack_reset_size(max_pages), np.int32)
    high, low = request_key(request)
    ints = {
        "slot": reset.slot,
        "rope_len": max(request.num_prompt_tokens, request.rope_len),
        "limit": request.max_total_tokens,
        "wants_logprobs": params.logprobs is not None,
        "uses_vocab": uses_vocab(params),
        "min_position": request.num_prompt_tokens + params.min_tokens,
        "top_k": max(params.top_k, 0),
        "is_decoding": reset.is_decoding,
    }
    if reset.is_decoding:
        ints |= {"token_id": request.output_token_ids[-1], "position": request.num_tokens - 1}
    for name, value in ints.items():
        row[_AT[name]] = value
    row[[_AT["key_high"], _AT["key_low"]]] = np.array([high, low], np.uint32).view(np.int32)
    floats = {name: getattr(params, name) for name in _FLOAT_FIELDS}
    if params.is_greedy:
        floats["temperature"] = 0.0
    for name, value in floats.items():
        row[_AT[name]] = np.float32(value).view(np.int32)
    stops = row[len(_FIELDS) : len(_FIELDS) + NUM_STOP_IDS]
    stops[:] = -1
    stops[: len(request.stop_token_ids)] = request.stop_token_ids
    row[len(_FIELDS) + NUM_STOP_IDS :][: len(reset.page_ids)] = reset.page_ids
    return row


def reset_slot(table: SlotTable, packed: Array) -> SlotTable:
    """Write one row from `pack_reset`'s vector; unless it decodes on at once, the slot is inactive until its last
    prefill chunk is sampled."""
    slot = packed[_AT["slot"]]

    def put(array: Array, value: Array) -> Array:
        return array.at[slot].set(value.astype(array.dtype))

    def number(name: str) -> Array:
        return lax.bitcast_convert_type(packed[_AT[name]], jnp.float32)

    sampling = replace(
        table.sampling,
        **{name: put(getattr(table.sampling, name), number(name)) for name in _FLOAT_FIELDS},
        top_k=put(table.sampling.top_k, packed[_AT["top_k"]]),
        min_positions=put(table.sampling.min_positions, packed[_AT["min_position"]]),
        uses_vocab=put(table.sampling.uses_vocab, packed[_AT["uses_vocab"]] != 0),
        keys=put(
            table.sampling.keys,
            lax.bitcast_convert_type(packed[_AT["key_high"] : _AT["key_low"] + 1], jnp.uint32),
        ),
        stop_ids=put(table.sampling.stop_ids, packed[len(_FIELDS) : len(_FIELDS) + NUM_STOP_IDS]),
    )
    return replace(
        table,
        token_ids=put(table.token_ids, packed[_AT["token_id"]]),
        positions=put(table.positions, packed[_AT["position"]]),
        active=put(table.active, packed[_AT["is_decoding"]] != 0),
        page_table=put(table.page_table, packed[len(_FIELDS) + NUM_STOP_IDS :]),
        rope_lens=put(table.rope_lens, packed[_AT["rope_len"]]),
        limits=put(table.limits, packed[_AT["limit"]]),
        wants_logprobs=put(table.wants_logprobs, packed[_AT["wants_logprobs"]] != 0),
        sampling=sampling,
    )


def move_slots(table: SlotTable, moves: Array) -> SlotTable:
    """Carry rows moves[0] to rows moves[1], none of which is among the first; one past the table: no move."""
    source, target = moves
    moved = jax.tree.map(lambda rows: rows.at[target].set(rows[source], mode="drop", unique_indices=True), table)
    return replace(moved, active=moved.active.at[source].set(False, mode="drop"))


def vocab_rows(request: Request, padded_vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Dense rows over the padded vocabulary of one request: bias float32, output counts int32, prompt seen bool."""
    params = request.params
    bias = np.zeros(padded_vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0.0
    for token_id, value in params.logit_bias.items():
        bias[token_id] += value
    bias[list(params.banned_token_ids)] = -np.inf
    counts = np.bincount(request.output_token_ids, minlength=padded_vocab_size).astype(np.int32)
    seen = np.zeros(padded_vocab_size, bool)
    seen[list(request.prompt_token_ids)] = True
    return bias, counts, seen


def set_vocab_rows(table: SlotTable, slot: Array, bias: Array, counts: Array, seen: Array) -> SlotTable:
    """Write one slot's dense rows (see `vocab_rows`), with a mask that lets every token through."""
    s = table.sampling
    return replace(
        table,
        sampling=replace(
            s,
            masks=s.masks.at[slot].set(-1),
            bias=s.bias.at[slot].set(bias),
            output_counts=s.output_counts.at[slot].set(counts),
            prompt_seen=s.prompt_seen.at[slot].set(seen),
        ),
    )


def set_masks(table: SlotTable, slots: Array, masks: Array) -> SlotTable:
    """Write the masks [B, ceil(V / 32)] int32 of slots [B] int32, none twice; one past the table: no slot."""
    s = table.sampling
    return replace(table, sampling=replace(s, masks=s.masks.at[slots].set(masks, mode="drop")))


def accept_tokens(table: SlotTable, tokens: Array, input_positions: Array, sampled: Array) -> SlotTable:
    """Advance the first R rows, where `sampled` [R] bool, by their new token [R] (-2: not usable); stop those that
    ended.

    The same rules as the host's scheduler: a stop id, or prompt + output reaching the limit.
    """
    num_rows = tokens.shape[0]
    positions = input_positions + 1
    took = sampled & (tokens >= 0)
    is_stop = (table.sampling.stop_ids[:num_rows] == tokens[:, None]).any(-1)
    is_stop &= positions >= table.sampling.min_positions[:num_rows]
    going_on = took & ~is_stop & (positions + 1 < table.limits[:num_rows])

    def put(array: Array, where: Array, values: Array) -> Array:
        return array.at[:num_rows].set(jnp.where(where, values, array[:num_rows]))

    counts = table.sampling.output_counts
    counts = counts.at[jnp.arange(num_rows), jnp.maximum(tokens, 0)].add(took.astype(jnp.int32))
    return replace(
        table,
        token_ids=put(table.token_ids, took, tokens),
        positions=put(table.positions, took, positions),
        active=put(table.active, sampled, going_on),
        sampling=replace(table.sampling, output_counts=counts),
    )
