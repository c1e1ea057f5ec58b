"""Paged attention of many queries a row on Hopper (sm_90a), in Pallas Mosaic GPU: chunked prefill.

The schedule is that of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): in a block, two consumer warpgroups of
64 query rows each share one stream of keys and values that a producer warpgroup copies page by page with TMA. A
consumer starts the scores of one step of keys and the weighted values of the step before together, and computes its
softmax while the tensor cores work on the latter and on what the other consumer started.

A work item is a tile of queries of one row of the batch, times one KV head, times a tile of its query heads. As many
blocks as the card has SMs deal the items out among themselves, longest first and in snake order. A block's items are
one stream of steps: beside the last values of an item go the first scores of the next. What an item computes depends
on its row alone, so a row's bits do not depend on the other rows.

Quantised pages are copied as they are, and the producer, which has little else to do, widens them to bf16 in shared
memory. Every e4m3 and int8 number is one of bf16's, so this is exact, and bf16 queries need no other range as they
would for products in float16. Scales of whole arrays multiply the scores and the result; those of tokens multiply the
scores, and the values as they are widened, which rounds these to bf16 (relative error 2^-9 at most).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_scales import QUANTISED
from pallas_kernels.paged_attention.reference import LOWEST_MAX

LOG2_E = math.log2(math.e)
NUM_CONSUMERS = 2
ROWS_PER_CONSUMER = 64  # of a wgmma
# setmaxnreg of the consumers and of the producer: 2 x 128 threads x 224 + 128 x 56 is what the launch gives, 3 x 128 x 168
COPYING_REGISTERS = (224, 56)
WIDENING_REGISTERS = (208, 88)

WGMMA = plgpu.Layout.WGMMA
WGMMA_ROW = plgpu.Layout.WGMMA.reduce(1)
WGMMA_COLUMN = plgpu.Layout.WGMMA.reduce(0)
WIDENED = plgpu.Layout.WGMMA_UPCAST_4X  # a thread has 8 neighbouring values: reads of 8 bytes, writes of 16
KEYS_A_WIDENING = 64  # rows of that layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes that change the speed; only `block_kv` changes bits.

    Attributes:
      block_kv: keys a step, a multiple of 64, and of the page size or a divisor of it.
      num_key_stages, num_value_stages: steps of keys and of values in shared memory.
      num_query_stages: tiles of queries in shared memory. With 2 the next item's arrive before this one's are done with.
      out_columns: how much of head_dim leaves through shared memory at a time, a divisor of it and a multiple of 64, or
        where 64 does not divide head_dim of 32 or 16.
      num_blocks: persistent blocks, one an SM.
      is_interpretable: whether probabilities reach the second product through shared memory, and its result is added
        in registers. Slower; interpret mode supports nothing else.
    """

    block_kv: int
    num_key_stages: int
    num_value_stages: int
    num_query_stages: int
    out_columns: int
    num_blocks: int = 132
    is_interpretable: bool = False


def default_tuning(head_dim: int, *, is_quantised: bool = False) -> Tuning:
    """Tiles that fit the 227 KiB of shared memory and the registers of a Hopper SM: the most keys a step, then two
    steps, then two tiles of queries, then more steps. Quantised pages need room for one step before it is widened."""
    if head_dim == 256:
        num_key_stages = 1 if is_quantised else 2
        return Tuning(
            block_kv=64, num_key_stages=num_key_stages, num_value_stages=2, num_query_stages=1, out_columns=128
        )
    num_stages = {64: 4, 80: 3, 96: 3, 128: 2}[head_dim]
    return Tuning(
        block_kv=128,
        num_key_stages=num_stages,
        num_value_stages=num_stages,
        num_query_stages=1 if is_quantised and head_dim == 128 else 2,
        out_columns=head_dim,
    )


@dataclasses.dataclass(frozen=True)
class _QueryTile:
    """How the 128 query rows of a block are made up: of `num_queries` queries times `num_groups` query heads.

    A consumer's 64 rows are (head, query), query fastest.
    """

    num_queries: int

    @property
    def num_groups(self) -> int:
        return NUM_CONSUMERS * ROWS_PER_CONSUMER // self.num_queries

    @property
    def consumer_queries(self) -> int:
        return min(self.num_queries, ROWS_PER_CONSUMER)

    @property
    def consumer_groups(self) -> int:
        return ROWS_PER_CONSUMER // self.consumer_queries

    def first_query(self, consumer: jax.Array | int) -> jax.Array | int:
        return consumer * ROWS_PER_CONSUMER if self.num_groups == 1 else 0

    def first_group(self, consumer: jax.Array | int) -> jax.Array | int:
        return 0 if self.num_groups == 1 else consumer * self.consumer_groups


def _query_tile(num_queries: int, num_groups: int) -> _QueryTile:
    """The tile that wastes the fewest rows; of equal ones 64 queries, which needs the fewest copies."""

    def cost(tile: _QueryTile) -> tuple[int, int]:
        num_tiles = -(-num_queries // tile.num_queries) * -(-num_groups // tile.num_groups)
        return num_tiles, abs(tile.num_queries - ROWS_PER_CONSUMER)

    return min((_QueryTile(n) for n in (8, 16, 32, 64, 128)), key=cost)


def supports(
    q: jax.Array, kv_pages: jax.Array, kv_scales: jax.Array | None = None, sinks: jax.Array | None = None
) -> bool:
    """Whether this kernel takes these shapes and dtypes: bf16 queries, pages of 8 to 128 tokens in bf16 with head_dim 64,
    80, 96, 128 and 256, or in e4m3 or int8 with 64, 128 and 256. Not float32, which the tensor cores would round to 11
    bits: the reference serves it."""
    head_dim, page_size = q.shape[4], kv_pages.shape[2]
    is_quantised = kv_pages.dtype in QUANTISED
    return (
        q.dtype == jnp.bfloat16
        and (is_quantised or kv_pages.dtype == jnp.bfloat16)
        and is_quantised == (kv_scales is not None)
        and head_dim in ((64, 128, 256) if is_quantised else (64, 80, 96, 128, 256))
        and page_size in (8, 16, 32, 64, 128)
    )


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "softcap", "tuning"))
def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    kv_scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See `api.paged_attention`; for what `supports` takes, and scale > 0. Pool places past a row's end in its last page
    must be finite; pages that no row has may hold anything."""
    _, num_queries, _, num_groups, head_dim = q.shape
    page_size = kv_pages.shape[2]
    tuning = tuning or default_tuning(head_dim, is_quantised=kv_scales is not None)
    query_tile = _query_tile(num_queries, num_groups)
    num_padding = -num_queries % query_tile.num_queries
    if num_padding:
        q = jnp.pad(q, ((0, 0), (0, num_padding), (0, 0), (0, 0), (0, 0)))
    row_order = _longest_first(starts, lengths)
    kernel = _make_kernel(
        q_shape=q.shape,
        page_size=page_size,
        max_pages=page_table.shape[1],
        kv_dtype=kv_pages.dtype,
        num_scale_axes=0 if kv_scales is None else kv_scales.ndim,
        has_sinks=sinks is not None,
        query_tile=query_tile,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        tuning=tuning,
    )
    optional = (array for array in (kv_scales, sinks) if array is not None)
    out = kernel(row_order, starts, lengths, page_table, q, kv_pages, *optional)
    return out[:, :num_queries] if num_padding else out


def _longest_first(starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """Row numbers by falling number of keys. Comparisons of all pairs: a sort is several kernels on a GPU."""
    num_keys_R = jnp.where(lengths > 0, starts + lengths, 0)
    row_R = jnp.arange(starts.shape[0], dtype=jnp.int32)
    is_before_RR = (num_keys_R[None, :] > num_keys_R[:, None]) | (
        (num_keys_R[None, :] == num_keys_R[:, None]) & (row_R[None, :] < row_R[:, None])
    )
    rank_R = is_before_RR.sum(axis=1, dtype=jnp.int32)
    return jnp.where(rank_R[None, :] == row_R[:, None], row_R[None, :], 0).sum(axis=1, dtype=jnp.int32)


def _make_kernel(
    *,
    q_shape: tuple[int, ...],
    page_size: int,
    max_pages: int,
    kv_dtype: jnp.dtype,
    num_scale_axes: int,
    has_sinks: bool,
    query_tile: _QueryTile,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    tuning: Tuning,
):
    num_rows, num_queries, num_kv_heads, num_groups, head_dim = q_shape
    block_kv, num_query_stages = tuning.block_kv, tuning.num_query_stages
    num_stages = (tuning.num_key_stages, tuning.num_value_stages)
    copy_keys = min(page_size, block_kv)
    num_copies = block_kv // copy_keys  # of a step
    num_query_tiles = num_queries // query_tile.num_queries
    num_group_tiles = -(-num_groups // query_tile.num_groups)
    num_items = num_rows * num_query_tiles * num_kv_heads * num_group_tiles
    num_blocks = min(tuning.num_blocks, num_items)
    num_rounds = -(-num_items // num_blocks)
    consumer_queries, consumer_groups = query_tile.consumer_queries, query_tile.consumer_groups
    is_quantised = num_scale_axes > 0
    has_scale_a_token = num_scale_axes > 1
    consumer_registers, producer_registers = WIDENING_REGISTERS if is_quantised else COPYING_REGISTERS

    def item_of_round(i, block):
        """Round i's item of this block: odd rounds go backwards, so that who had the longest gets the shortest."""
        return num_blocks * i + jnp.where(lax.rem(i, 2) == 1, num_blocks - 1 - block, block)

    def num_rounds_of(block):
        return jnp.where(item_of_round(num_rounds - 1, block) >= num_items, num_rounds - 1, num_rounds)

    class Item:
        """What one item is, and the steps of keys that it sees: num_steps of them from first_step on."""

        def __init__(self, i, block, arrays):
            rest = item_of_round(jnp.int32(i), block)
            rest, group_tile = lax.div(rest, num_group_tiles), lax.rem(rest, num_group_tiles)
            rest, self.kv_head = lax.div(rest, num_kv_heads), lax.rem(rest, num_kv_heads)
            row_rank, tile = lax.div(rest, num_query_tiles), lax.rem(rest, num_query_tiles)
            self.row = arrays.row_order[row_rank]
            self.first_query = (num_query_tiles - 1 - tile) * query_tile.num_queries
            self.first_group = group_tile * query_tile.num_groups
            start, self.length = arrays.starts[self.row], arrays.lengths[self.row]
            self.first_position = start + self.first_query
            last_position = jnp.minimum(self.first_position + query_tile.num_queries, start + self.length) - 1
            first_key = 0 if sliding_window is None else jnp.maximum(self.first_position - (sliding_window - 1), 0)
            self.first_page = lax.div(first_key, page_size) if sliding_window is not None else 0
            self.last_page = jnp.minimum(lax.div(last_position, page_size), max_pages - 1)
            self.first_step = lax.div(first_key, block_kv) if sliding_window is not None else 0
            num_steps = lax.div(last_position, block_kv) + 1 - self.first_step
            self.num_steps = jnp.where(self.first_query < self.length, num_steps, 0)

        def or_other(self, is_other, other):
            """The other item where `is_other`."""
            chosen = copy.copy(self)
            for name, value in vars(self).items():
                setattr(chosen, name, jnp.where(is_other, getattr(other, name), value))
            return chosen

    def produce(block, arrays, scratch):
        plgpu.set_max_registers(producer_registers, action="decrease")
        rings = ((0, scratch.k, scratch.k_full, scratch.k_free), (1, scratch.v, scratch.v_full, scratch.v_free))

        def load_scales(item, part, step, ids):
            """Of a step's keys or values, page by page."""
            place = lax.rem((item.first_step + step) * block_kv, page_size) if page_size > block_kv else 0
            return tuple(
                plgpu.load(
                    arrays.kv_scales.at[page_id, part, item.kv_head, pl.ds(place, copy_keys)],
                    layout=WGMMA_COLUMN,
                    optimized=False,
                )
                for page_id in ids
            )

        def widen(part, slot, scales):
            """Quantised keys or values of one step to bf16. Exact but for values that have a scale a token, which are
            rounded after the product with it; such scales of keys are for the consumers to multiply scores by."""
            raw = scratch.raw.at[part]
            wide = (scratch.k if part == 0 else scratch.v).at[slot]
            if scales is not None:
                scales_room = scratch.k_scales.at[slot] if part == 0 else scratch.v_scales
                for j, page_scales in enumerate(scales):
                    scales_room.at[pl.ds(j * copy_keys, copy_keys)][...] = page_scales
                plgpu.commit_smem()
            is_rounded = part == 1 and scales is not None
            plgpu.barrier_wait(scratch.raw_full.at[part])
            columns = min(head_dim, 128)

            def widen_rows(chunk, _):
                rows = pl.ds(chunk * KEYS_A_WIDENING, KEYS_A_WIDENING)
                for first_column in range(0, head_dim, columns):
                    place = (rows, pl.ds(first_column, columns))
                    values = plgpu.load(raw.at[place], layout=WIDENED)
                    # the compiler has no conversion from e4m3 to bf16, nor from int8 to float32
                    values = values.astype(jnp.bfloat16 if kv_dtype == jnp.int8 else jnp.float32)
                    if is_rounded:
                        row_scales = plgpu.load(scratch.v_scales.at[rows], layout=WIDENED.reduce(1))
                        values = values.astype(jnp.float32) * lax.broadcast_in_dim(row_scales, values.shape, [0])
                    wide.at[place][...] = values.astype(jnp.bfloat16)

            lax.fori_loop(0, block_kv // KEYS_A_WIDENING, widen_rows, None)
            plgpu.commit_smem()

        def produce_item(i, carry):
            num_done_steps, num_done_items = carry
            item = Item(i, block, arrays)

            def copy_queries():
                stage = lax.rem(num_done_items, num_query_stages)

                @pl.when(num_done_items >= num_query_stages)
                def _wait():
                    plgpu.barrier_wait(scratch.q_free.at[stage])

                for consumer, j in itertools.product(range(NUM_CONSUMERS), range(consumer_groups)):
                    first_query = item.first_query + query_tile.first_query(consumer)
                    # a tile of heads may go past the last one: those rows are computed and not stored
                    group = jnp.minimum(item.first_group + query_tile.first_group(consumer) + j, num_groups - 1)
                    plgpu.copy_gmem_to_smem(
                        arrays.q.at[item.row, pl.ds(first_query, consumer_queries), item.kv_head, group],
                        scratch.q.at[stage, consumer, pl.ds(j * consumer_queries, consumer_queries)],
                        scratch.q_full.at[stage],
                    )

            def page_ids(step):
                # Clamped: a step's other pages may hold anything, NaN too, and 0 * NaN is NaN.
                first_key = (item.first_step + step) * block_kv
                pages = (lax.div(first_key, page_size) + j for j in range(num_copies))
                return tuple(arrays.page_table[item.row, jnp.clip(p, item.first_page, item.last_page)] for p in pages)

            def copy_keys_or_values(part, step, ids, room, full):
                place = lax.rem((item.first_step + step) * block_kv, page_size) if page_size > block_kv else 0
                for j, page_id in enumerate(ids):
                    plgpu.copy_gmem_to_smem(
                        arrays.kv_pages.at[page_id, part, pl.ds(place, copy_keys), item.kv_head],
                        room.at[pl.ds(j * copy_keys, copy_keys)],
                        full,
                    )

            def copy_raw(part, step, ids):
                copy_keys_or_values(part, step, ids, scratch.raw.at[part], scratch.raw_full.at[part])

            def produce_step(step, carry):
                num_done, ids = carry
                next_step = jnp.minimum(step + 1, item.num_steps - 1)
                next_ids = page_ids(next_step)  # their latency hides behind the wait
                for part, ring, full, free in rings:
                    slot = lax.rem(num_done, num_stages[part])
                    scales = load_scales(item, part, step, ids) if has_scale_a_token else None

                    @pl.when(num_done >= num_stages[part])
                    def _wait(free=free, slot=slot):
                        plgpu.barrier_wait(free.at[slot])

                    if not is_quantised:
                        copy_keys_or_values(part, step, ids, ring.at[slot], full.at[slot])
                    else:
                        widen(part, slot, scales)
                        plgpu.barrier_arrive(full.at[slot])

                        @pl.when(step + 1 < item.num_steps)
                        def _copy_next(part=part):
                            copy_raw(part, next_step, next_ids)

                    if part == 0:  # after the first keys, whose room is free sooner than that of the queries
                        pl.when(step == 0)(copy_queries)
                return num_done + 1, next_ids

            first_ids = page_ids(0)
            if is_quantised:

                @pl.when(item.num_steps > 0)
                def _copy_first():
                    for part in (0, 1):
                        copy_raw(part, 0, first_ids)

            num_done_steps, _ = lax.fori_loop(0, item.num_steps, produce_step, (num_done_steps, first_ids))
            return num_done_steps, num_done_items + jnp.where(item.num_steps > 0, 1, 0)

        nothing_done = (jnp.int32(0), jnp.int32(0))
        num_done_steps, num_done_items = lax.fori_loop(0, num_rounds_of(block), produce_item, nothing_done)
        # No barrier may be left with a phase that nobody waited for.
        for num_done, num_barriers, free in (
            (num_done_steps, num_stages[0], scratch.k_free),
            (num_done_steps, num_stages[1], scratch.v_free),
            (num_done_items, num_query_stages, scratch.q_free),
        ):
            for slot in range(num_barriers):

                @pl.when(num_done > slot)
                def _wait_for_last(slot=slot, free=free):
                    plgpu.barrier_wait(free.at[slot])

    def consume(consumer, block, arrays, scratch):
        plgpu.set_max_registers(consumer_registers, action="increase")
        out_smem = scratch.out.at[consumer]
        scores_shape, out_shape = (ROWS_PER_CONSUMER, block_kv), (ROWS_PER_CONSUMER, head_dim)
        num_rounds_here = num_rounds_of(block)
        scores_scale, values_scale = jnp.float32(scale), jnp.float32(1)
        if num_scale_axes == 1:
            # a scale of 0, or one that is flushed to it, would make a masked score NaN
            scores_scale = scale * jnp.maximum(arrays.kv_scales[0], 1e-30)
            values_scale = arrays.kv_scales[1]

        def take_turn():
            """Until the other consumer has issued its products: then its softmax and these do not meet."""
            plgpu.barrier_wait(scratch.turn.at[consumer])

        def pass_turn():
            plgpu.barrier_arrive(scratch.turn.at[1 - consumer])

        def query_of_row(shape):
            """Number of each row's query, from the consumer's first one."""
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
            return row if consumer_groups == 1 else row & (consumer_queries - 1)

        def over_columns(per_row):
            return lax.broadcast_in_dim(per_row, out_shape, [0])

        def fill(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def mask_scores(scores, first_position, first_key):
            # a limit a row against the column: their difference would be a register for each score through the loop
            key = plgpu.broadcasted_iota(jnp.int32, scores_shape, 1, layout=WGMMA)
            last_key = query_of_row(scores_shape) + (first_position - first_key)
            is_seen = key <= last_key
            if sliding_window is not None:
                is_seen &= key > last_key - sliding_window
            return jnp.where(is_seen, scores, -jnp.inf)

        def probs_of(scores, item, step, row_max, row_sum):
            """[64, block_kv] scores of an item's step -> probabilities, factor of earlier results, new maximum and sum."""
            log2_scale = scores_scale * LOG2_E
            if softcap is not None:
                # tanh(x) = 1 - 2 / (e^(2x) + 1); the hardware's own tanh is right to 2^-11 only
                power = jnp.exp2(scores * (scores_scale * (2 / softcap * LOG2_E)))
                scores = 1.0 - 2.0 / (power + 1.0)
                log2_scale = softcap * LOG2_E
            first_position = item.first_position + query_tile.first_query(consumer)
            first_key = (item.first_step + step) * block_kv
            is_edge = first_key + (block_kv - 1) > first_position
            if sliding_window is not None:
                is_edge |= first_key <= first_position + (consumer_queries - 1) - sliding_window
            scores = lax.cond(is_edge, lambda s: mask_scores(s, first_position, first_key), lambda s: s, scores)
            new_max = jnp.maximum(row_max, scores.max(axis=1) * log2_scale)
            rescale = jnp.exp2(row_max - new_max)
            probs = jnp.exp2(scores * log2_scale - lax.broadcast_in_dim(new_max, scores_shape, [0]))
            row_sum = row_sum * rescale + probs.sum(axis=1)
            return probs, rescale, new_max, row_sum

        def first_max(item):
            """In the units of `row_max`; the sink's if there is one, which is as one more key before the others."""
            if not has_sinks:
                return fill((ROWS_PER_CONSUMER,), LOWEST_MAX, WGMMA_ROW)
            first_group = item.first_group + query_tile.first_group(consumer)
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS_PER_CONSUMER,), 0, layout=WGMMA_ROW)
            row_group = lax.div(row, consumer_queries)
            row_sinks = fill((ROWS_PER_CONSUMER,), 0, WGMMA_ROW)
            for j in range(consumer_groups):
                sink = arrays.sinks[item.kv_head, jnp.minimum(first_group + j, num_groups - 1)]
                row_sinks = jnp.where(row_group == j, sink, row_sinks)
            return jnp.maximum(row_sinks * LOG2_E, LOWEST_MAX)

        first_sum = fill((ROWS_PER_CONSUMER,), 1 if has_sinks else 0, WGMMA_ROW)

        def key_slot(step):
            return lax.rem(step, num_stages[0])

        def value_slot(step):
            return lax.rem(step, num_stages[1])

        def query_slot(num_items):
            return lax.rem(num_items, num_query_stages)

        def read_scores(scores, slot):
            """The scores of a step from the products with its keys, whose room in shared memory is then free."""
            if has_scale_a_token:
                k_scales = plgpu.load(scratch.k_scales.at[slot], layout=WGMMA_COLUMN)
                scores *= lax.broadcast_in_dim(k_scales, scores_shape, [1])
            return scores

        def operand(probs):
            if not tuning.is_interpretable:
                return probs
            scratch.probs.at[consumer][...] = probs
            plgpu.commit_smem()
            return scratch.probs.at[consumer]

        def first_step(item):
            """The first step of the first item that has any."""
            plgpu.barrier_wait(scratch.q_full.at[0])
            plgpu.barrier_wait(scratch.k_full.at[0])

            def products(scores_ref):
                take_turn()
                plgpu.wgmma(scores_ref, scratch.q.at[0, consumer], scratch.k.at[0].T)
                pass_turn()
                return read_scores(scores_ref[...], 0)

            scores = pl.run_scoped(products, plgpu.ACC(scores_shape))
            plgpu.barrier_arrive(scratch.k_free.at[0])

            @pl.when(item.num_steps == 1)
            def _free_queries():
                plgpu.barrier_arrive(scratch.q_free.at[0])

            probs, _, row_max, row_sum = probs_of(scores, item, 0, first_max(item), first_sum)
            return row_max, row_sum, probs.astype(jnp.bfloat16)

        def next_with_keys(i):
            """The first of this block's items from i on whose queries see any keys, and whether there is one."""

            def look(state):
                i, _ = state
                is_found = Item(i, block, arrays).num_steps > 0
                return jnp.where(is_found, i, i + 1), is_found

            i, is_found = lax.while_loop(lambda s: (s[0] < num_rounds_here) & ~s[1], look, (jnp.int32(i), False))
            return Item(jnp.minimum(i, num_rounds_here - 1), block, arrays), is_found

        def consume_item(i, carry):
            """An item's values, and the scores of all its steps but the first, whose probabilities are in `carry`."""
            num_done_steps, num_done_items, row_max, row_sum, probs = carry
            item = Item(i, block, arrays)
            next_item, has_next_item = next_with_keys(i + 1)

            def wait_keys(step):
                """For what the scores beside this step's values need."""
                is_last = step == item.num_steps - 1

                @pl.when(~is_last | has_next_item)
                def _wait():
                    plgpu.barrier_wait(scratch.k_full.at[key_slot(num_done_steps + step + 1)])

                @pl.when(is_last & has_next_item)
                def _wait_queries():
                    plgpu.barrier_wait(scratch.q_full.at[query_slot(num_done_items + 1)])

            def consume_step(step, carry):
                """The values of a step, and meanwhile the scores of the step after it, which may be the next item's first.
                After the very last step these scores are of nothing, and nobody uses them."""
                acc, row_max, row_sum, probs = carry
                is_last = step == item.num_steps - 1
                v_slot, k_slot = value_slot(num_done_steps + step), key_slot(num_done_steps + step + 1)
                q_slot = query_slot(num_done_items + jnp.where(is_last, 1, 0))
                step_of_scores = jnp.where(is_last, 0, step + 1)
                item_of_scores = item.or_other(is_last, next_item)

                def products(scores_ref, out_ref):
                    if not tuning.is_interpretable:
                        out_ref[...] = acc
                    probs_before = operand(probs)
                    plgpu.barrier_wait(scratch.v_full.at[v_slot])
                    take_turn()
                    plgpu.wgmma(scores_ref, scratch.q.at[q_slot, consumer], scratch.k.at[k_slot].T)
                    plgpu.wgmma(out_ref, probs_before, scratch.v.at[v_slot])
                    pass_turn()
                    scores = read_scores(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1), k_slot)

                    @pl.when(~is_last | has_next_item)
                    def _free_keys():
                        plgpu.barrier_arrive(scratch.k_free.at[k_slot])

                        @pl.when(step_of_scores == item_of_scores.num_steps - 1)
                        def _free_queries():
                            plgpu.barrier_arrive(scratch.q_free.at[q_slot])

                    max_before, sum_before = lax.cond(
                        is_last, lambda: (first_max(next_item), first_sum), lambda: (row_max, row_sum)
                    )
                    state = probs_of(scores, item_of_scores, step_of_scores, max_before, sum_before)
                    # This and the branches of wait_keys keep LLVM and ptxas from making all of it wait for the values.
                    new_probs, rescale, new_max, new_sum = lax.optimization_barrier(state)
                    pl.when(~is_last)(lambda: wait_keys(step + 1))
                    out = out_ref[...]
                    plgpu.barrier_arrive(scratch.v_free.at[v_slot])
                    if tuning.is_interpretable:
                        out += acc
                    rescale = lax.cond(is_last, lambda: values_scale / row_sum, lambda: rescale)
                    # Only now: a product's operands must not be written while another one is under way.
                    return out * over_columns(rescale), new_max, new_sum, new_probs.astype(jnp.bfloat16)

                return pl.run_scoped(products, plgpu.ACC(scores_shape), plgpu.ACC(out_shape))

            pl.when(item.num_steps > 0)(lambda: wait_keys(0))
            carry = (fill(out_shape, 0, WGMMA), row_max, row_sum, probs)
            acc, row_max, row_sum, probs = lax.fori_loop(0, item.num_steps, consume_step, carry)
            store(item, acc)
            num_done_items += jnp.where(item.num_steps > 0, 1, 0)
            return num_done_steps + item.num_steps, num_done_items, row_max, row_sum, probs

        def store(item, acc):
            # Queries past the end have seen keys that are none.
            first_query = item.first_query + query_tile.first_query(consumer)
            acc = jnp.where(query_of_row(out_shape) < item.length - first_query, acc, 0.0).astype(jnp.bfloat16)
            for first_column in range(0, head_dim, tuning.out_columns):
                columns = pl.ds(first_column, tuning.out_columns)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was here before has left
                out_smem[...] = acc[:, first_column : first_column + tuning.out_columns]
                plgpu.commit_smem()
                for j in range(consumer_groups):
                    group = item.first_group + query_tile.first_group(consumer) + j

                    @pl.when(group < num_groups)
                    def _store(j=j, group=group, columns=columns):
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[pl.ds(j * consumer_queries, consumer_queries)],
                            arrays.out.at[item.row, pl.ds(first_query, consumer_queries), item.kv_head, group, columns],
                        )

        @pl.when(consumer == 1)
        def _first_turn():
            pass_turn()

        first_item, has_items = next_with_keys(0)
        nothing = (first_sum, first_sum, plgpu.layout_cast(jnp.zeros(scores_shape, jnp.bfloat16), WGMMA))
        state = lax.cond(has_items, lambda: first_step(first_item), lambda: nothing)
        lax.fori_loop(0, num_rounds_here, consume_item, (jnp.int32(0), jnp.int32(0), *state))

        @pl.when(consumer == 0)
        def _last_turn():
            take_turn()

        plgpu.wait_smem_to_gmem(0)

    def body(*args):
        num_inputs = 6 + is_quantised + has_sinks
        row_order, starts, lengths, page_table, q, kv_pages = args[:6]
        arrays = _Arrays(
            row_order=row_order,
            starts=starts,
            lengths=lengths,
            page_table=page_table,
            q=q,
            kv_pages=kv_pages,
            kv_scales=args[6] if is_quantised else None,
            sinks=args[num_inputs - 1] if has_sinks else None,
            out=args[num_inputs],
        )
        scratch = _Scratch(*args[num_inputs + 1 :])
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _consumer():
            consume(warpgroup, block, arrays, scratch)

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _producer():
            produce(block, arrays, scratch)

    # A tile's rows are as long as head_dim allows: 128, 64 or 32 bytes.
    tile_columns = next(n for n in (64, 32, 16) if head_dim % n == 0)

    def smem(*shape, dtype=jnp.bfloat16, columns=tile_columns):
        swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)  # type: ignore[abstract]
        tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    key_ring, value_ring = (smem(n, block_kv, head_dim) for n in num_stages)
    num_arrivals = 1 if is_quantised else num_copies
    k_full, v_full = (plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=n) for n in num_stages)
    k_free, v_free = (plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=n) for n in num_stages)
    scratch_types = _Scratch(
        q=smem(num_query_stages, NUM_CONSUMERS, ROWS_PER_CONSUMER, head_dim),
        out=smem(NUM_CONSUMERS, ROWS_PER_CONSUMER, tuning.out_columns),
        k=key_ring,
        v=value_ring,
        raw=smem(2, block_kv, head_dim, dtype=kv_dtype, columns=min(head_dim, 128)) if is_quantised else None,
        k_scales=plgpu.SMEM((tuning.num_key_stages, block_kv), jnp.float32) if has_scale_a_token else None,
        v_scales=plgpu.SMEM((block_kv,), jnp.float32) if has_scale_a_token else None,
        probs=smem(NUM_CONSUMERS, ROWS_PER_CONSUMER, block_kv) if tuning.is_interpretable else None,
        raw_full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=2) if is_quantised else None,
        q_full=plgpu.Barrier(num_arrivals=NUM_CONSUMERS * consumer_groups, num_barriers=num_query_stages),
        q_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_query_stages),
        k_full=k_full,
        v_full=v_full,
        k_free=k_free,
        v_free=v_free,
        turn=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
    )
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q_shape, jnp.bfloat16),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[getattr(scratch_types, field.name) for field in dataclasses.fields(_Scratch)],
        # Every shared write is followed by commit_smem and every reuse is behind a barrier of ours. A row of scores lies in
        # one warp, so its maximum and sum need no shared memory.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=not tuning.is_interpretable
        ),
        kernel_name="paged_prefill",
    )


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """References to the arguments and to the result."""

    row_order: Any
    starts: Any
    lengths: Any
    page_table: Any
    q: Any
    kv_pages: Any
    kv_scales: Any
    sinks: Any
    out: Any


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of a block; first their types, then the references."""

    q: Any
    out: Any
    k: Any
    v: Any
    raw: Any
    k_scales: Any
    v_scales: Any
    probs: Any
    raw_full: Any
    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any
