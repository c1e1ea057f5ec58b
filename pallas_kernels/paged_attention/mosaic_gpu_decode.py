"""Decode attention for Hopper (sm_90a) in Pallas Mosaic GPU: one or a few queries a row, bound by reading KV.

The keys of a row are cut into chunks whose size depends on the row's own length only, so a row's bits do not depend on
the other rows. A work item is one chunk of one KV head. A fixed grid of blocks walks the items; each block, one
warpgroup, fills a ring of key and value tiles with TMA, a copy a page, and computes on tensor cores with the keys on
the 64-row side and the queries of the group (few) on the other,

    S^T [keys, N] = K Q^T,    O^T [H, N] += V^T P^T,

with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Items leave float32 partial results; a second
kernel merges the chunks of each row (Dao et al. 2023, Flash-Decoding).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_gpu_registers
from pallas_kernels.paged_attention.reference import LOWEST_MAX, MASKED_SCORE

LOG2E = math.log2(math.e)
TILE = 64  # keys a step: the row count of one wgmma
MAX_COLUMNS = 64  # query columns a KV head; more is the prefill kernel's work
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
# Quantised values are multiplied in float16, which holds them exactly. It holds queries times this exactly from 2**-13
# to 2**20 (larger become that), and smaller ones to within 2**-21.
QUERY_SCALE = 2.0**-4
LARGEST_QUERY = float(jnp.finfo(jnp.float16).max)
# Probabilities reach up to 2 to this, so that float16 holds them down to 2**-29 of the largest with all its bits.
PROBABILITY_HEADROOM = 15
LEAST_VALUE_SCALE = 2.0**-90  # so that its logarithm is finite, and sums divided by it


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that change the speed; only `chunks` changes bits. `default_tuning` says what to take where nothing is measured.

    Attributes:
      num_stages: tiles of K and of V in flight in a block.
      num_blocks: persistent blocks of the grid; a multiple of the card's multiprocessors.
      chunks: (up to this many keys, most keys a chunk), ascending: small chunks fill the card with few rows, large ones
        save merging.
      is_interpretable: whether quantised values are widened by way of shared memory. Slower; interpret mode supports
        nothing else.
    """

    num_stages: int
    num_blocks: int
    chunks: tuple[tuple[int, int], ...]
    is_interpretable: bool = False


def default_tuning(num_rows: int, num_kv_heads: int, num_columns: int, head_dim: int, dtype: jnp.dtype) -> Tuning:
    """Of a program of `num_rows` rows, `num_columns` query columns a KV head and pages of `dtype`: what an H200 was
    fastest with, or should be.

    Two stages and as many blocks as a multiprocessor has shared memory and registers for, up to 4. Rows of up to 2,048 keys
    whole and longer ones in chunks of 1,024 where rows and heads alone keep the blocks busy, else shorter chunks. Of rows of
    65,536, 131,072 and 262,144 keys, as many chunks as 8 KV heads make work for 396 blocks of.
    """
    most = 3  # 168 registers a thread
    if dtype.itemsize == 1:
        most = 2 if head_dim > 128 or num_columns > 16 else 3 if num_columns > 8 else 4
    ring_bytes = 2 * 2 * TILE * head_dim * dtype.itemsize
    blocks_per_multiprocessor = min(most, 200 * 1024 // ring_bytes)
    chunks: tuple[tuple[int, int], ...]
    if num_rows * num_kv_heads >= 1024:
        chunks = ((2048, 2048), (32768, 1024))
    elif num_rows * num_kv_heads >= 128:
        chunks = ((2048, 512), (32768, 1024))
    else:
        chunks = ((4096, 256), (16384, 512), (32768, 1024))
    chunks = (*chunks, (65536, 1344), (131072, 2688), (1 << 30, 5376))
    return Tuning(num_stages=2, num_blocks=132 * blocks_per_multiprocessor, chunks=chunks)


def supports(
    q: jax.Array, kv_pages: jax.Array, kv_scales: jax.Array | None = None, sinks: jax.Array | None = None
) -> bool:
    """Whether this kernel takes these shapes and dtypes: queries in bfloat16, pages in that or quantised. Not float32,
    which tensor cores multiply in 11 bits only: the reference serves it."""
    _, num_queries, _, num_groups, head_dim = q.shape
    page_size = kv_pages.shape[2]
    if kv_scales is None:
        has_pages = kv_pages.dtype == jnp.bfloat16 and head_dim in (64, 80, 96, 128, 256)
    else:
        # scales a token arrive in pieces of 128 bytes or more
        has_pages = head_dim in (64, 128, 256) and (kv_scales.ndim == 1 or page_size >= 16)
    return (
        q.dtype == jnp.bfloat16
        and has_pages
        and num_queries * num_groups <= MAX_COLUMNS
        and page_size % 8 == 0
        and (TILE % page_size == 0 or page_size % TILE == 0)
    )


def chunk_size(length: jax.Array, chunks: tuple[tuple[int, int], ...]) -> jax.Array:
    """Keys a chunk for rows that end at `length`: even chunks, in whole tiles, no larger than `chunks` says."""
    most = jnp.full_like(length, chunks[-1][1])
    for up_to, chunk in reversed(chunks[:-1]):
        most = jnp.where(length <= up_to, chunk, most)
    num_chunks = jnp.maximum(-(-length // most), 1)
    return -(-length // (num_chunks * TILE)) * TILE


def max_chunks(max_length: int, chunks: tuple[tuple[int, int], ...]) -> int:
    """Most chunks that a row of up to `max_length` keys can have."""
    lower_bounds = (0, *(up_to for up_to, _ in chunks))
    return max(
        -(-min(up_to, max_length) // chunk)
        for (up_to, chunk), lower_bound in zip(chunks, lower_bounds, strict=False)
        if lower_bound < max_length
    )


def _value_parts(head_dim: int, width: int) -> tuple[tuple[int, int], ...]:
    """(first, width) of the parts in which a head's values are dealt with, of multiples of 64 for wgmma. Where these do
    not fill head_dim the last part begins early, and what two parts hold is the same bits."""
    width = width // 64 * 64
    return tuple((min(first, head_dim - width), width) for first in range(0, head_dim, width))


def _widened(tile) -> jax.Array:
    """8-bit values of shared memory in float16, by way of Pallas alone."""
    if tile.dtype == jnp.int8:
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA_8BIT).astype(jnp.float16)
    wide = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(jnp.float16)
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["items", "num_items", "first_item", "num_chunks"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one call. The same for all layers of a step, so XLA computes it once."""

    items: jax.Array  # [W, 3] int32: row, first key, end key
    num_items: jax.Array  # [1] int32
    first_item: jax.Array  # [R] int32
    num_chunks: jax.Array  # [R] int32


def make_plan(
    starts: jax.Array,
    lengths: jax.Array,
    max_length: int,
    sliding_window: int | None,
    chunks: tuple[tuple[int, int], ...],
) -> Plan:
    """Cut rows into items: rows with larger chunks first, a row's chunks one after the other."""
    num_rows = starts.shape[0]
    end = jnp.where(lengths > 0, starts + lengths, 0)
    first = jnp.zeros_like(end) if sliding_window is None else jnp.maximum(starts - (sliding_window - 1), 0)
    chunk = jnp.maximum(chunk_size(end, chunks), TILE)  # also where there is nothing to cut
    num_chunks = jnp.where(lengths > 0, -(-end // chunk) - first // chunk, 0)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    goes_before = (chunk[None, :] > chunk[:, None]) | (
        (chunk[None, :] == chunk[:, None]) & (row[None, :] < row[:, None])
    )
    first_item = jnp.where(goes_before, num_chunks[None, :], 0).sum(1, dtype=jnp.int32)
    # the row of item w: the one with first_item <= w < first_item + num_chunks
    item = jnp.arange(num_rows * max_chunks(max_length, chunks), dtype=jnp.int32)
    is_mine = (item[:, None] >= first_item) & (item[:, None] < first_item + num_chunks)  # [W, R]

    def of_row(values: jax.Array) -> jax.Array:
        return jnp.where(is_mine, values, 0).sum(1, dtype=jnp.int32)

    chunk_W = of_row(chunk)
    begin_W = (of_row(first // chunk) + item - of_row(first_item)) * chunk_W
    # from a multiple of the tile on, so that whole pages are read
    first_key_W = jnp.maximum(begin_W, of_row(first) // TILE * TILE)
    end_key_W = jnp.minimum(begin_W + chunk_W, of_row(end))
    items = jnp.stack([of_row(jnp.broadcast_to(row, num_chunks.shape)), first_key_W, end_key_W], axis=1)
    return Plan(items, num_chunks.sum(keepdims=True, dtype=jnp.int32), first_item, num_chunks.astype(jnp.int32))


def _attend(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    plan: Plan,
    kv_scales: jax.Array | None,
    *,
    num_queries: int,
    num_groups: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    tuning: Tuning,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [R, K, N, H] -> each item's partial result: O^T [W, K, H, N], and per column the maximum (of log2) and sum."""
    num_kv_heads, num_columns, head_dim = q.shape[1:]
    num_items = plan.items.shape[0]
    page_size = kv_pages.shape[2]
    num_stages, num_blocks = tuning.num_stages, tuning.num_blocks
    num_copies = max(1, TILE // page_size)  # of a tile
    copy_rows = TILE // num_copies
    is_quantised = kv_scales is not None
    is_scaled_by_token = kv_scales is not None and kv_scales.ndim == 4
    is_in_registers = is_quantised and not tuning.is_interpretable
    value_parts = _value_parts(head_dim, head_dim)

    def body(items, count, table, starts, q, pool, *refs):
        *scales, out, out_max, out_sum = refs[: -len(scratch)]
        shared = dict(zip(scratch, refs[-len(scratch) :], strict=True))
        names = ("q_s", "k_s", "v_s", "p_s", "q_full", "k_full", "v_full")
        q_s, k_s, v_s, p_s, q_full, k_full, v_full = (shared[name] for name in names)
        block = lax.axis_index("block")
        total = count[0] * num_kv_heads
        to_score = scale
        if is_quantised:
            to_score = scale / QUERY_SCALE
            if not is_scaled_by_token:
                to_score = to_score * scales[0][0]
        # scores are powers of 2 after this factor; a soft cap, and quantised keys, apply their own
        in_log2 = 1.0 if softcap is not None or is_quantised else to_score * LOG2E

        def item_of(turn):
            # back and forth: a block that took a longer item takes a shorter one next
            is_odd = lax.rem(turn, jnp.int32(2)) == 1
            return turn * num_blocks + jnp.where(is_odd, num_blocks - 1 - block, block)

        def load_item(turn):
            item = item_of(turn)
            w, head = lax.div(item, jnp.int32(num_kv_heads)), lax.rem(item, jnp.int32(num_kv_heads))
            first, end = items[w, 1], items[w, 2]
            first_tile = lax.div(first, jnp.int32(TILE))
            return w, head, items[w, 0], end, first_tile, lax.div(end + (TILE - 1), jnp.int32(TILE)) - first_tile

        def page_ids(row, end, tile):
            """Of the tile that starts at key tile * TILE. Past the row's last page, that page again: what others hold,
            NaN perhaps, must not meet this row's probabilities, though they are 0 there."""
            first_page, last_page = lax.div(tile * TILE, jnp.int32(page_size)), lax.div(end - 1, jnp.int32(page_size))
            return tuple(table[row, jnp.minimum(first_page + i, last_page)] for i in range(num_copies))

        def copy_tile(part, slot, ids, head, tile):
            """part: 0 keys, and the scales of both, 1 values."""
            first_row = 0 if page_size <= TILE else lax.rem(tile * TILE, jnp.int32(page_size))
            rows = pl.ds(first_row, copy_rows)
            ring, full = (k_s, k_full.at[slot]) if part == 0 else (v_s, v_full.at[slot])
            for i, page_id in enumerate(ids):
                place = ring.at[slot, pl.ds(i * copy_rows, copy_rows)]
                plgpu.copy_gmem_to_smem(pool.at[page_id, part, rows, head], place, full)
                if is_scaled_by_token and part == 0:
                    plgpu.copy_gmem_to_smem(scales[0].at[page_id, :, head, rows], shared["scales_s"].at[slot, i], full)

        def first_ids(item):
            _, _, row, end, first_tile, _ = item
            return tuple(page_ids(row, end, first_tile + stage) for stage in range(num_stages))

        def begin_item(item, ids):
            """Start the copies of an item's queries and first tiles. All slots must be free."""
            _, head, row, _, first_tile, num_tiles = item
            plgpu.copy_gmem_to_smem(q.at[row, head], q_s, q_full)
            for stage in range(num_stages):

                @pl.when(stage < num_tiles)
                def _(stage=stage):
                    copy_tile(0, stage, ids[stage], head, first_tile + stage)
                    copy_tile(1, stage, ids[stage], head, first_tile + stage)

        def scores(slot):
            keys = k_s.at[slot]
            if is_in_registers:
                keys = mosaic_gpu_registers.widened_keys(keys)
            elif is_quantised:
                shared["wide_k_s"][...] = _widened(keys)
                plgpu.commit_smem()
                keys = shared["wide_k_s"]

            def product(acc):
                plgpu.wgmma(acc, keys, q_s.T)
                return acc[...]

            return pl.run_scoped(product, plgpu.ACC((TILE, num_columns), jnp.float32))

        def weighted_values(values):
            """Of each part; `values` in registers, if there."""

            def product(acc, first, width):
                left = values if is_in_registers else values.at[:, pl.ds(first, width)].T
                plgpu.wgmma(acc, left, p_s.T)
                return acc[...]

            return [
                pl.run_scoped(
                    functools.partial(product, first=first, width=width),
                    plgpu.ACC((width, num_columns), jnp.float32),
                )
                for first, width in value_parts
            ]

        def masked(s, tile, start, end):
            shape = (TILE, num_columns)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + tile * TILE
            is_seen = key < end
            query = start
            if num_queries > 1:
                column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                query = query + lax.div(column, jnp.int32(num_groups))
                is_seen &= key <= query
            if sliding_window is not None:
                is_seen &= key > query - sliding_window
            return jnp.where(is_seen, s, MASKED_SCORE)

        def scales_of(slot):
            """Of the tile's keys, and of its values, in powers of 2."""
            scales_s = shared["scales_s"].at[slot]
            if tuning.is_interpretable:
                k_scale_T, v_scale_T = (scales_s[:, part].reshape(TILE) for part in (0, 1))
            else:
                k_scale_T, v_scale_T = (mosaic_gpu_registers.row_scales(scales_s, part) for part in (0, 1))
            return k_scale_T, jnp.log2(jnp.maximum(v_scale_T, LEAST_VALUE_SCALE))

        def run_item(turn, item):
            w, head, row, end, first_tile, num_tiles = item
            # what the next item needs is read now, so that its copies start without waiting; page ids only where
            # registers are left for them
            after = load_item(jnp.minimum(turn + 1, num_turns - 1))
            ids_of_after = None if is_quantised else first_ids(after)
            start = starts[row]
            plgpu.barrier_wait(q_full)

            def step(t, carry):
                ids_before, ids, max_N, sum_TN, outs = carry  # ids_before: of bfloat16 alone
                slot = lax.rem(t, jnp.int32(num_stages))
                ids_after = page_ids(row, end, first_tile + t + num_stages + 1)
                plgpu.barrier_wait(k_full.at[slot])
                if is_scaled_by_token:
                    k_scale_T, v_scale_T = scales_of(slot)
                s = scores(slot)
                if is_scaled_by_token:
                    s = s * lax.broadcast_in_dim(k_scale_T * (to_score * LOG2E), s.shape, [0])
                elif is_quantised and softcap is None:
                    s = s * (to_score * LOG2E)
                if softcap is not None:
                    # tanh by way of exp2: the hardware's own is good to 11 bits only
                    in_cap = 2 / softcap if is_scaled_by_token else to_score * (2 * LOG2E / softcap)
                    e = jnp.exp2(s * in_cap)
                    s = (1 - 2 / (e + 1)) * (softcap * LOG2E)
                if is_scaled_by_token:
                    # a value's scale is part of its weight's exponent: weights are as large as float16 has them best
                    s = s + lax.broadcast_in_dim(v_scale_T, s.shape, [0])
                s = masked(s, first_tile + t, start, end)
                # The maximum over keys crosses the warps and holds barriers of all four: past it each has done
                # reading this slot of K, and the slot of V and P of the tile before.
                most_N = s.max(axis=0) * in_log2
                new_max_N = jnp.maximum(max_N, most_N - PROBABILITY_HEADROOM if is_quantised else most_N)
                rescale_N = jnp.exp2(max_N - new_max_N)
                p = jnp.exp2(s * in_log2 - lax.broadcast_in_dim(new_max_N, s.shape, [1]))
                p_in_sum = p * lax.broadcast_in_dim(jnp.exp2(-v_scale_T), p.shape, [0]) if is_scaled_by_token else p
                sum_TN = sum_TN * lax.broadcast_in_dim(rescale_N, s.shape, [1]) + p_in_sum
                outs = [out * lax.broadcast_in_dim(rescale_N, out.shape, [1]) for out in outs]

                @pl.when(t + num_stages < num_tiles)
                def refill_keys():
                    copy_tile(0, slot, ids, head, first_tile + t + num_stages)

                if not is_quantised:

                    @pl.when((t > 0) & (t - 1 + num_stages < num_tiles))
                    def refill_values_of_tile_before():
                        slot_before = lax.rem(t + (num_stages - 1), jnp.int32(num_stages))
                        copy_tile(1, slot_before, ids_before, head, first_tile + t - 1 + num_stages)

                p_s.T[...] = p.astype(p_s.dtype)
                plgpu.barrier_wait(v_full.at[slot])
                values = v_s.at[slot]
                if is_in_registers:
                    values = mosaic_gpu_registers.widened_values(values)
                elif is_quantised:
                    shared["wide_v_s"][...] = _widened(values)
                    values = shared["wide_v_s"]
                plgpu.commit_smem()  # holds a barrier of all warps
                if is_quantised:
                    # widened values have left their slot

                    @pl.when(t + num_stages < num_tiles)
                    def refill_values():
                        copy_tile(1, slot, ids, head, first_tile + t + num_stages)

                outs = [out + product for out, product in zip(outs, weighted_values(values), strict=True)]
                return ids, ids_after, new_max_N, sum_TN, outs

            carry = (
                page_ids(row, end, first_tile + num_stages - 1),
                page_ids(row, end, first_tile + num_stages),
                plgpu.layout_cast(jnp.full((num_columns,), LOWEST_MAX, jnp.float32), PER_COLUMN),
                plgpu.layout_cast(jnp.zeros((TILE, num_columns), jnp.float32), plgpu.Layout.WGMMA),
                [
                    plgpu.layout_cast(jnp.zeros((width, num_columns), jnp.float32), plgpu.Layout.WGMMA)
                    for _, width in value_parts
                ],
            )
            *_, max_N, sum_TN, outs = lax.fori_loop(0, num_tiles, step, carry)
            sum_N = sum_TN.sum(axis=0)  # crosses the warps: past it all slots are free

            @pl.when(turn + 1 < num_turns)
            def begin_next():
                begin_item(after, first_ids(after) if ids_of_after is None else ids_of_after)

            for (first, width), out_HN in zip(value_parts, outs, strict=True):
                if is_quantised and not is_scaled_by_token:
                    out_HN = out_HN * scales[0][1]
                place = out.at[w, head, pl.ds(first, width)]
                if is_in_registers:
                    mosaic_gpu_registers.store_in_order(place, out_HN)
                else:
                    place[...] = out_HN
            out_max.at[w, head][...] = max_N
            out_sum.at[w, head][...] = sum_N
            return after

        turns = lax.div(total + (num_blocks - 1), jnp.int32(num_blocks))
        num_turns = jnp.where((turns > 0) & (item_of(turns - 1) >= total), turns - 1, turns)

        @pl.when(num_turns > 0)
        def run():
            item = load_item(0)
            begin_item(item, first_ids(item))
            lax.fori_loop(0, num_turns, run_item, item)

    transforms = mosaic_gpu_registers.swizzled(head_dim, kv_pages.dtype.itemsize)
    # the two sides of a product are swizzled alike
    product_transforms = mosaic_gpu_registers.swizzled(head_dim, q.dtype.itemsize)
    ring = plgpu.SMEM((num_stages, TILE, head_dim), kv_pages.dtype, transforms=transforms)
    scratch: dict[str, Any] = dict(
        q_s=plgpu.SMEM((num_columns, head_dim), q.dtype, transforms=product_transforms),
        k_s=ring,
        v_s=ring,
        p_s=plgpu.SMEM((num_columns, TILE), q.dtype, transforms=product_transforms),
        q_full=plgpu.Barrier(),
        k_full=plgpu.Barrier(num_arrivals=num_copies * (1 + is_scaled_by_token), num_barriers=num_stages),
        v_full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages),
    )
    if is_scaled_by_token:
        scratch["scales_s"] = plgpu.SMEM((num_stages, num_copies, 2, copy_rows), jnp.float32)
    if is_quantised and tuning.is_interpretable:
        wide = plgpu.SMEM((TILE, head_dim), q.dtype, transforms=product_transforms)
        scratch |= dict(wide_k_s=wide, wide_v_s=wide)
    per_column = jax.ShapeDtypeStruct((num_items, num_kv_heads, num_columns), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, num_kv_heads, head_dim, num_columns), jnp.float32),
            per_column,
            per_column,
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode",
    )(plan.items, plan.num_items, page_table, starts, q, kv_pages, *(() if kv_scales is None else (kv_scales,)))


def _merge(
    partial: tuple[jax.Array, jax.Array, jax.Array],
    lengths: jax.Array,
    plan: Plan,
    sinks: jax.Array | None,
    *,
    num_queries: int,
    num_groups: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Merge the items of each row -> [R, K, Q * G, H]; zeros for queries that are none."""
    _, num_kv_heads, head_dim, num_columns = partial[0].shape
    num_rows = lengths.shape[0]
    # fill the card where rows are few
    value_parts = _value_parts(head_dim, 64 if num_rows * num_kv_heads < 264 else head_dim)
    block_dims = value_parts[0][1]
    # items loaded at a time: many into up to 64 registers a thread, then what is left in smaller numbers
    most = max(2, min(16, 8192 // (block_dims * num_columns)))
    merge_sizes = (most, 4, 1) if most > 4 else (most, 1)

    def body(out_W, max_W, sum_W, lengths, first_item, num_chunks, *refs):
        *sinks, out, out_s = refs
        index, part = lax.axis_index("row_head"), lax.axis_index("part")
        row, head = lax.div(index, jnp.int32(num_kv_heads)), lax.rem(index, jnp.int32(num_kv_heads))
        dims = pl.ds(jnp.minimum(part * block_dims, head_dim - block_dims), block_dims)
        first, count = first_item[row], num_chunks[row]
        shape = (block_dims, num_columns)

        def merge_next(size, chunk, carry):
            """`size` chunks from `chunk` on, whose loads are under way at once."""
            max_N, sum_N, out_HN = carry
            items = [first + chunk + i for i in range(size)]
            maxima, sums = (
                [plgpu.load(per_column.at[w, head], layout=PER_COLUMN, optimized=False) for w in items]
                for per_column in (max_W, sum_W)
            )
            outs = [plgpu.load(out_W.at[w, head, dims], layout=plgpu.Layout.WGMMA, optimized=False) for w in items]
            new_max_N = functools.reduce(jnp.maximum, maxima, max_N)
            rescale_N = jnp.exp2(max_N - new_max_N)
            sum_N, out_HN = sum_N * rescale_N, out_HN * lax.broadcast_in_dim(rescale_N, shape, [1])
            for item_max, item_sum, item_out in zip(maxima, sums, outs, strict=True):
                weight = jnp.exp2(item_max - new_max_N)
                sum_N = sum_N + weight * item_sum
                out_HN = out_HN + lax.broadcast_in_dim(weight, shape, [1]) * item_out
            return new_max_N, sum_N, out_HN

        carry = (
            plgpu.layout_cast(jnp.full((num_columns,), LOWEST_MAX, jnp.float32), PER_COLUMN),
            plgpu.layout_cast(jnp.zeros((num_columns,), jnp.float32), PER_COLUMN),
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
        )
        begin = jnp.int32(0)
        for size in merge_sizes:
            turns = lax.div(count - begin, jnp.int32(size))
            step = functools.partial(
                lambda size, begin, i, carry: merge_next(size, begin + i * size, carry), size, begin
            )
            carry = lax.fori_loop(0, turns, step, carry)
            begin = begin + turns * size
        max_N, sum_N, out_HN = carry
        if sinks:
            group_N = lax.rem(
                plgpu.broadcasted_iota(jnp.int32, (num_columns,), 0, layout=PER_COLUMN), jnp.int32(num_groups)
            )
            sink_N = plgpu.layout_cast(jnp.full((num_columns,), LOWEST_MAX, jnp.float32), PER_COLUMN)
            for group in range(num_groups):
                sink_N = jnp.where(group_N == group, sinks[0][head, group] * LOG2E, sink_N)
            new_max_N = jnp.maximum(max_N, sink_N)
            rescale_N = jnp.exp2(max_N - new_max_N)
            sum_N = sum_N * rescale_N + jnp.exp2(sink_N - new_max_N)
            out_HN = out_HN * lax.broadcast_in_dim(rescale_N, shape, [1])
        sum_HN = lax.broadcast_in_dim(sum_N, shape, [1])
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        is_query = lax.div(column, jnp.int32(num_groups)) < lengths[row]
        out_HN = jnp.where(is_query, out_HN / jnp.where(is_query, sum_HN, 1.0), 0.0)
        out_s.T[...] = out_HN.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            out_s.at[pl.ds(0, num_queries * num_groups)],
            out.at[row, head, :, dims],
        )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_kv_heads, num_queries * num_groups, head_dim), dtype),
        grid=(num_rows * num_kv_heads, len(value_parts)),
        grid_names=("row_head", "part"),
        scratch_types=[plgpu.SMEM((num_columns, block_dims), dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
    )(*partial, lengths, plan.first_item, plan.num_chunks, *(() if sinks is None else (sinks,)))


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
    """See `api.paged_attention`; for what `supports` takes. Pool places that a row's last page holds past its end must
    be finite; pages that no row has may hold anything."""
    num_rows, num_queries, num_kv_heads, num_groups, head_dim = q.shape
    num_columns = num_queries * num_groups
    if tuning is None:
        tuning = default_tuning(num_rows, num_kv_heads, num_columns, head_dim, kv_pages.dtype)
    q_RKNH = jnp.swapaxes(q, 1, 2).reshape(num_rows, num_kv_heads, num_columns, head_dim)
    if kv_scales is not None:
        q_RKNH = jnp.clip(q_RKNH.astype(jnp.float32) * QUERY_SCALE, -LARGEST_QUERY, LARGEST_QUERY).astype(jnp.float16)
        if not tuning.is_interpretable:
            q_RKNH = mosaic_gpu_registers.order_like_widened_keys(q_RKNH)
    q_RKNH = jnp.pad(q_RKNH, ((0, 0), (0, 0), (0, -num_columns % 8), (0, 0)))  # wgmma takes multiples of 8 columns
    plan = make_plan(starts, lengths, page_table.shape[1] * kv_pages.shape[2], sliding_window, tuning.chunks)
    static = dict(num_queries=num_queries, num_groups=num_groups)
    partial = _attend(
        q_RKNH,
        kv_pages,
        page_table,
        starts,
        plan,
        kv_scales,
        **static,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        tuning=tuning,
    )
    out = _merge(partial, lengths, plan, sinks, **static, dtype=q.dtype)
    return jnp.swapaxes(out.reshape(num_rows, num_kv_heads, num_queries, num_groups, head_dim), 1, 2)
