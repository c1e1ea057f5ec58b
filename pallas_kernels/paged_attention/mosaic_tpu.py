"""Paged attention for TPUs in Pallas Mosaic: decode, a few queries a row, and prefill over earlier pages.

The grid walks rows and blocks of queries in order. Each step walks the blocks of keys that some query of it sees, while
the pages of the next block, of the next step's first block at the end, come from HBM into the other of two buffers by
one asynchronous copy a page, keys and values of all heads together. Softmax is online (Milakov and Gimelshein 2018; Dao
et al. 2022) in float32. Blocks start at multiples of their size whatever the row, so a row's bits do not depend on the
other rows.

Heads are computed in one of two ways. Joint, where the queries of all heads are few: one product of them all with the
keys of all heads [S * K, H] as they lie, in which scores of a query with another head's key are masked. The matrix unit
takes in each key once, as it must in any case, and keys need not be sorted by head, which takes longer than the wasted
scores do. Else head by head, with the block's heads brought to the front first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.reference import LOWEST_MAX, MASKED_SCORE

LOG2E = math.log2(math.e)
LANES = 128
SUBLANES = 8
VMEM_LIMIT_BYTES = 48 * 2**20  # of 64 MiB on a 7x, 128 MiB on a v5e and v6e; what is used is far less


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that change speed, and bits: they must be a function of shapes and dtypes alone."""

    block_q: int  # queries a grid step
    block_kv: int  # keys a buffer, fetched at a time, a multiple of block_compute and of the page size
    block_compute: int  # keys a turn of the softmax, a multiple of 128
    is_joint: bool  # whether one product takes all heads


def supports(
    q: jax.Array, kv_pages: jax.Array, kv_scales: jax.Array | None = None, sinks: jax.Array | None = None
) -> bool:
    """Whether this kernel takes these shapes and dtypes.

    Not head_dim 64, 80 or 96: to waste no lanes, XLA lays such a pool out with the pages in the lanes, and would copy
    all of it for a kernel that reads whole pages.
    """
    page_size, head_dim = kv_pages.shape[2], kv_pages.shape[4]
    return (
        q.dtype in (jnp.bfloat16, jnp.float32)
        and head_dim % LANES == 0
        and page_size % 16 == 0
        and (LANES % page_size == 0 or page_size % LANES == 0)
    )


def default_tuning(q: jax.Array, kv_pages: jax.Array, kv_scales: jax.Array | None = None) -> Tuning:
    """The heuristic for shapes that nobody tuned.

    Buffers of 2 MiB, which cover the latency of the memory. Turns of 2,048 keys of all heads together, fewer where the
    scores of one product would exceed 512 KiB. Query blocks as large as keep a step's queries, result and sums at some
    8 MiB, since each reads all the keys again. One product for all heads up to 64 queries, where it takes half the
    instructions; at 128 as many.
    """
    _, num_queries, num_kv_heads, num_groups, head_dim = q.shape
    page_size = kv_pages.shape[2]
    has_token_scales = kv_scales is not None and kv_scales.ndim == 4
    is_joint = (
        num_kv_heads > 1
        and num_kv_heads * num_queries * num_groups <= 64
        and is_token_major_pool(kv_pages)
        # else [page_size * K, H] is another order of bytes
        and (head_dim == LANES or num_kv_heads % (SUBLANES if kv_pages.dtype.itemsize > 1 else 4 * SUBLANES) == 0)
        and not has_token_scales
    )
    max_product_rows = min(512, 4096 * LANES // (num_kv_heads * max(head_dim, LANES)))
    block_q = max(1, max_product_rows // num_groups)
    block_q = num_queries if num_queries <= block_q else max(1, block_q // 16 * 16)
    product_rows = block_q * num_groups * (num_kv_heads if is_joint else 1)
    unit = max(page_size, LANES)
    block_compute = max(min(2048 // num_kv_heads, 2**17 // product_rows, 1024) // unit, 1) * unit
    token_bytes = 2 * num_kv_heads * head_dim * kv_pages.dtype.itemsize
    block_kv = max(min(2**21 // token_bytes, 2048) // block_compute, 1) * block_compute
    return Tuning(block_q, block_kv, block_compute, is_joint)


def is_token_major_pool(kv_pages: jax.Array) -> bool:
    """Whether [page_size, K, H] is how XLA lays a pool's page out: if K heads fill whole tiles of sublanes. Else it is
    [K, page_size, H]."""
    num_kv_heads, packing = kv_pages.shape[3], 4 // kv_pages.dtype.itemsize
    return num_kv_heads % SUBLANES == 0 or (num_kv_heads in (1, 2, 4) and num_kv_heads >= packing)


def _attend(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    kv_scales: jax.Array | None,
    sinks: jax.Array | None,
    *,
    num_groups: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    tuning: Tuning,
) -> jax.Array:
    """q [R, B, J, N, H], B blocks of queries; J heads of N queries, or one of all heads' (joint) -> the same."""
    num_rows, num_blocks_q, num_products, num_columns_q, head_dim = q.shape
    is_token_major = is_token_major_pool(kv_pages)
    page_size, num_kv_heads = kv_pages.shape[2:4]
    block_q, block_kv, block_compute = tuning.block_q, tuning.block_kv, tuning.block_compute
    pages_per_block = block_kv // page_size
    has_token_scales = kv_scales is not None and kv_scales.ndim == 4
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    # of a buffer: [S * K, H] joint, else [S, K, H] or [K, S, H]
    rows_per_key = num_kv_heads if tuning.is_joint else 1
    num_columns, page_rows = block_compute * rows_per_key, page_size * rows_per_key

    def body(*unnamed):
        refs = types.SimpleNamespace(**dict(zip(names, unnamed, strict=True)))
        starts, lengths, buffers, semaphores = refs.starts, refs.lengths, refs.buffers, refs.semaphores
        row, block_of_q = pl.program_id(0), pl.program_id(1)

        def sees(row, block_of_q):
            """(first, end) of the keys that some query of a step sees; none where end is 0."""
            first_query = block_of_q * block_q
            num_queries = jnp.clip(lengths[row] - first_query, 0, block_q)
            first_position = starts[row] + first_query
            end = jnp.where(num_queries > 0, first_position + num_queries, 0)
            if sliding_window is None:
                return jnp.int32(0), end
            return jnp.maximum(first_position - (sliding_window - 1), 0), end

        def for_copies(row, table, slot, block, first, end, act: Callable):
            """Of the pages of a block that are seen, into a buffer. Others are not read: they may hold NaN."""
            first_page = jnp.maximum(lax.div(first, jnp.int32(page_size)), block * pages_per_block)
            end_page = jnp.minimum(pl.cdiv(end, page_size), (block + 1) * pages_per_block)

            def copy_page(page, _):
                page_id, index = table(page), page - block * pages_per_block
                place = pl.ds(pl.multiple_of(index * page_rows, page_rows), page_rows)
                buffer = buffers.at[slot, :, place] if is_token_major else buffers.at[slot, :, :, place]
                act(pltpu.make_async_copy(refs.pool.at[page_id], buffer, semaphores.at[slot]))
                if has_token_scales and page_size % LANES == 0:
                    place = pl.ds(pl.multiple_of(index * page_size, page_size), page_size)
                    buffer = refs.scale_buffers.at[slot, :, :, place]
                    act(pltpu.make_async_copy(refs.scales.at[page_id], buffer, semaphores.at[slot]))
                return 0

            lax.fori_loop(first_page, end_page, copy_page, 0)
            if has_token_scales and page_size % LANES:
                keys = pl.ds(pl.multiple_of(block * block_kv, LANES), block_kv)
                buffer = refs.scale_buffers.at[slot]
                act(pltpu.make_async_copy(refs.scales.at[row, :, :, keys], buffer, semaphores.at[slot]))

        def start(row, table, slot, block, first, end):
            for_copies(row, table, slot, block, first, end, lambda copy: copy.start())

        def attend(slot, first_key, offset, last):
            """The queries with `block_compute` keys of a buffer, from `offset` on."""
            place, rows = pl.ds(offset, block_compute), pl.ds(offset * rows_per_key, num_columns)
            # quantised values are exact in q's dtype
            keys, values = (
                (buffers[slot, part, rows] if is_token_major else buffers[slot, part, :, rows]).astype(q.dtype)
                for part in (0, 1)
            )
            if tuning.is_joint:
                keys, values = keys[None], values[None]
                key = first_key + offset + refs.key_of[...]  # [1, S * K]
                is_seen = (refs.head_of[...] == refs.head_of_column[...]) & (key <= last)
            else:
                if is_token_major:
                    keys, values = jnp.swapaxes(keys, 0, 1), jnp.swapaxes(values, 0, 1)
                key = first_key + offset + lax.broadcasted_iota(jnp.int32, (1, block_compute), 1)
                is_seen = key <= last
            if sliding_window is not None:
                is_seen &= key > last - sliding_window
            for j in range(num_products):
                scores = lax.dot_general(
                    refs.q[0, 0, j],
                    keys[j],
                    (((1,), (1,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                if has_token_scales:
                    scores = scores * refs.scale_buffers[slot, 0, j : j + 1, place]
                factor = scale if kv_scales is None or has_token_scales else scale * refs.scales[0]
                if softcap is None:
                    scores = scores * (factor * LOG2E)
                else:
                    scores = (softcap * LOG2E) * jnp.tanh(scores * (factor / softcap))
                scores = jnp.where(is_seen, scores, MASKED_SCORE)
                # Of each query its maximum in all 128 lanes, and 128 parts of its sum: no move across lanes but for
                # the maximum of the scores.
                max_NL = refs.max[j]
                new_max_NL = jnp.maximum(max_NL, scores.max(axis=1, keepdims=True))
                probs = jnp.exp2(scores - _over_lanes(new_max_NL, num_columns))
                rescale_NL = jnp.exp2(max_NL - new_max_NL)
                parts = [probs[:, i : i + LANES] for i in range(0, num_columns, LANES)]
                refs.sum[j] = refs.sum[j] * rescale_NL + functools.reduce(jnp.add, parts)
                refs.max[j] = new_max_NL
                if has_token_scales:
                    # scales of other tokens may be NaN
                    row_first, row_end = sees(row, block_of_q)
                    value_scales = refs.scale_buffers[slot, 1, j : j + 1, place]
                    probs = probs * jnp.where((key >= row_first) & (key < row_end), value_scales, 0)
                weighted = lax.dot_general(
                    probs.astype(q.dtype),
                    values[j],
                    (((1,), (0,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                refs.acc[j] = refs.acc[j] * _over_lanes(rescale_NL, head_dim) + weighted

        is_last_of_row = block_of_q == num_blocks_q - 1
        next_row = jnp.where(is_last_of_row, jnp.minimum(row + 1, num_rows - 1), row)
        next_first, next_end = sees(next_row, jnp.where(is_last_of_row, 0, block_of_q + 1))
        next_end = jnp.where(is_last_of_row & (row == num_rows - 1), 0, next_end)
        is_first_of_row = block_of_q == 0
        _, previous_end = sees(
            jnp.where(is_first_of_row, jnp.maximum(row - 1, 0), row),
            jnp.where(is_first_of_row, num_blocks_q - 1, block_of_q - 1),
        )
        is_first = is_first_of_row & (row == 0)
        first, end = sees(row, block_of_q)

        def page_id(page):
            return refs.table[0, 0, page]

        def next_page_id(page):
            return jnp.where(is_last_of_row, refs.next_table[0, 0, page], page_id(page))

        @pl.when(is_first)
        def clear_buffers():
            # Values of keys that are masked meet probabilities of 0: what nobody fetched must be numbers. What an
            # earlier block left in a buffer is.
            buffers[:, 1] = jnp.zeros(buffers.shape[:1] + buffers.shape[2:], buffers.dtype)
            refs.slot[0] = 0

        @pl.when(end == 0)
        def put_zeros():
            refs.out[...] = jnp.zeros_like(refs.out)

        @pl.when(end > 0)
        def attend_row():
            first_block, end_block = lax.div(first, jnp.int32(block_kv)), pl.cdiv(end, block_kv)

            @pl.when(is_first | (previous_end == 0))
            def fetch_first_block():
                start(row, page_id, refs.slot[0], first_block, first, end)

            if sinks is None:
                refs.max[...] = jnp.full(refs.max.shape, LOWEST_MAX, jnp.float32)
                refs.sum[...] = jnp.zeros(refs.sum.shape, jnp.float32)
            else:
                refs.max[...] = jnp.broadcast_to(refs.sinks[...] * LOG2E, refs.max.shape)
                refs.sum[...] = jnp.full(refs.sum.shape, 1 / LANES, jnp.float32)
            refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)
            query = block_of_q * block_q + refs.query_of[...]  # [N, 1]
            last = jnp.where(query < lengths[row], starts[row] + query, -1)  # the last key that it sees

            def attend_block(block, slot):
                @pl.when(block + 1 < end_block)
                def fetch_next_block():
                    start(row, page_id, 1 - slot, block + 1, first, end)

                @pl.when((block + 1 == end_block) & (next_end > 0))
                def fetch_for_next_step():
                    next_block = lax.div(next_first, jnp.int32(block_kv))
                    start(next_row, next_page_id, 1 - slot, next_block, next_first, next_end)

                for_copies(row, lambda _: 0, slot, block, first, end, lambda copy: copy.wait())
                first_key = block * block_kv
                first_turn = lax.div(jnp.maximum(first - first_key, 0), jnp.int32(block_compute))
                end_turn = pl.cdiv(jnp.minimum(end - first_key, block_kv), block_compute)

                def attend_turn(turn, _):
                    attend(slot, first_key, pl.multiple_of(turn * block_compute, block_compute), last)
                    return 0

                lax.fori_loop(first_turn, end_turn, attend_turn, 0)
                return 1 - slot

            refs.slot[0] = lax.fori_loop(first_block, end_block, attend_block, refs.slot[0])
            for j in range(num_products):
                sums = refs.sum[j].sum(axis=1, keepdims=True)
                out = refs.acc[j] / jnp.where(sums > 0, sums, 1.0)  # a query that is none has seen nothing
                if kv_scales is not None and not has_token_scales:
                    out = out * refs.scales[1]
                refs.out[0, 0, j] = out.astype(q.dtype)

    def whole(array):
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    # the same bytes each: no copy
    if tuning.is_joint:
        block_shape: tuple[int, ...] = (block_kv * num_kv_heads,)
        pool = kv_pages.reshape(-1, 2, page_rows, head_dim)
    elif is_token_major:
        block_shape, pool = (block_kv, num_kv_heads), kv_pages
    else:
        block_shape, pool = (num_kv_heads, block_kv), jnp.swapaxes(kv_pages, 2, 3)
    table_block = (1, 1, page_table.shape[1])
    q_spec = pl.BlockSpec((1, 1, num_products, num_columns_q, head_dim), lambda row, block, *_: (row, block, 0, 0, 0))
    head_of, query_of = np.divmod(np.arange(num_columns_q, dtype=np.int32), block_q * num_groups)
    inputs = {
        "table": (
            page_table[:, None],
            pl.BlockSpec(table_block, lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM),
        ),
        "next_table": (
            page_table[:, None],
            pl.BlockSpec(
                table_block, lambda row, *_: (jnp.minimum(row + 1, num_rows - 1), 0, 0), memory_space=pltpu.SMEM
            ),
        ),
        "q": (q, q_spec),
        "pool": (pool, pl.BlockSpec(memory_space=pl.ANY)),
        "query_of": (query_of[:, None] // num_groups, None),
    }
    if tuning.is_joint:
        key_of, head_of_column = np.divmod(np.arange(num_columns, dtype=np.int32), num_kv_heads)
        inputs |= {
            "head_of": (head_of[:, None], None),
            "key_of": (key_of[None], None),
            "head_of_column": (head_of_column[None], None),
        }
    if kv_scales is not None and not has_token_scales:
        inputs["scales"] = kv_scales, pl.BlockSpec(memory_space=pltpu.SMEM)
    elif kv_scales is not None:
        if page_size % LANES:
            kv_scales = _scales_of_rows(kv_scales, page_table, block_kv)
        inputs["scales"] = kv_scales, pl.BlockSpec(memory_space=pl.ANY)
    if sinks is not None:
        per_query = jnp.broadcast_to(sinks[:, None], (num_kv_heads, block_q, num_groups))
        inputs["sinks"] = per_query.reshape(num_products, num_columns_q, 1), None
    scratch = {
        "buffers": pltpu.VMEM((2, 2, *block_shape, head_dim), kv_pages.dtype),
        "max": pltpu.VMEM((num_products, num_columns_q, LANES), jnp.float32),
        "sum": pltpu.VMEM((num_products, num_columns_q, LANES), jnp.float32),
        "acc": pltpu.VMEM((num_products, num_columns_q, head_dim), jnp.float32),
        "slot": pltpu.SMEM((1,), jnp.int32),
        "semaphores": pltpu.SemaphoreType.DMA((2,)),
    }
    if has_token_scales:
        scratch["scale_buffers"] = pltpu.VMEM((2, 2, num_kv_heads, block_kv), jnp.float32)
    names = ("starts", "lengths", *inputs, "out", *scratch)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_rows, num_blocks_q),
            in_specs=[whole(array) if spec is None else spec for array, spec in inputs.values()],
            out_specs=q_spec,
            scratch_shapes=list(scratch.values()),
        ),
        # steps fetch for the ones after them: in order, on one core
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        name="paged_attention",
    )(starts, lengths, *(array for array, _ in inputs.values()))


def _over_lanes(x_NL: jax.Array, num_columns: int) -> jax.Array:
    """What is the same in all lanes, [N, 128] -> [N, num_columns]."""
    return jnp.concatenate([x_NL] * -(-num_columns // LANES), axis=1)[:, :num_columns]


def _scales_of_rows(kv_scales: jax.Array, page_table: jax.Array, block_kv: int) -> jax.Array:
    """[R, 2, K, keys], for pages of less than 128 tokens, whose scales do not fill a tile's lanes: such a pool lies with
    the pages in the lanes."""
    scales_RP2KS = kv_scales.at[page_table].get(mode="clip")
    scales_R2KPS = jnp.transpose(scales_RP2KS, (0, 2, 3, 1, 4))
    scales = scales_R2KPS.reshape(*scales_R2KPS.shape[:3], -1)
    return jnp.pad(scales, ((0, 0), (0, 0), (0, 0), (0, -scales.shape[3] % block_kv)))


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
    """See `api.paged_attention`; for what `supports` takes. `tuning` None: `default_tuning`."""
    num_rows, num_queries, num_kv_heads, num_groups, head_dim = q.shape
    if tuning is None:
        tuning = default_tuning(q, kv_pages, kv_scales)
    num_blocks = -(-num_queries // tuning.block_q)
    q = jnp.pad(q, ((0, 0), (0, num_blocks * tuning.block_q - num_queries), (0, 0), (0, 0), (0, 0)))
    q_RBQKGH = q.reshape(num_rows, num_blocks, tuning.block_q, num_kv_heads, num_groups, head_dim)
    q_RBKQGH = jnp.swapaxes(q_RBQKGH, 2, 3)
    out = _attend(
        q_RBKQGH.reshape(num_rows, num_blocks, 1 if tuning.is_joint else num_kv_heads, -1, head_dim),
        kv_pages,
        page_table,
        starts,
        lengths,
        kv_scales,
        sinks,
        num_groups=num_groups,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        tuning=tuning,
    )
    out_RBQKGH = jnp.swapaxes(out.reshape(q_RBKQGH.shape), 2, 3)
    return out_RBQKGH.reshape(num_rows, -1, num_kv_heads, num_groups, head_dim)[:, :num_queries]
