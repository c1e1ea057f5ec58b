"""Paged attention of many queries a row on Hopper (sm_90a), in Pallas Mosaic GPU: chunked prefill.

The schedule is that of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): in a block, two consumer warpgroups of
64 query rows each share one stream of keys and values that a producer warpgroup copies page by page with TMA. A
consumer starts the scores of one step of keys and the weighted values of the step before together, and computes its
softmax while the tensor cores work on the latter and on what the other consumer started.

A work item is a tile of queries of one row of the batch, times one KV head, times a tile of its query heads. As many
blocks as the card has SMs deal the items out among themselves, longest first and in snake order, and the producer
runs ahead into the next item. What an item computes depends on its row alone, so a row's bits do not depend on the
other rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.reference import LOWEST_MAX

LOG2_E = math.log2(math.e)
NUM_CONSUMERS = 2
ROWS_PER_CONSUMER = 64  # of a wgmma
# setmaxnreg: 2 x 128 threads x 232 + 128 x 40 is what the launch gives, 3 x 128 x 168
CONSUMER_REGISTERS = 232
PRODUCER_REGISTERS = 40

WGMMA = plgpu.Layout.WGMMA
WGMMA_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes that change the speed; only `block_kv` changes bits.

    Attributes:
      block_kv: keys a step, a multiple of 64, and of the page size or a divisor of it.
      num_stages: steps of keys and values in shared memory.
      num_blocks: persistent blocks, one an SM.
      is_query_room_reused: whether the output leaves through the queries' shared memory. This saves room and delays
        the copy of the next item's queries.
      is_interpretable: whether probabilities reach the second product through shared memory, and its result is added
        in registers. Slower; interpret mode supports nothing else.
    """

    block_kv: int
    num_stages: int
    num_blocks: int = 132
    is_query_room_reused: bool = False
    is_interpretable: bool = False


def default_tuning(head_dim: int) -> Tuning:
    """Tiles that fit the 227 KiB of shared memory and the registers of a Hopper SM."""
    if head_dim == 256:
        return Tuning(block_kv=64, num_stages=2, is_query_room_reused=True)
    return Tuning(block_kv=128, num_stages=2 if head_dim == 128 else 4)


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
    """Whether this kernel takes these shapes and dtypes."""
    head_dim, page_size = q.shape[4], kv_pages.shape[2]
    return (
        q.dtype == kv_pages.dtype == jnp.bfloat16
        and kv_scales is None
        and sinks is None
        and head_dim in (64, 128, 256)
        and page_size % 8 == 0
        and (64 % page_size == 0 or page_size in (64, 128))
    )


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "softcap", "tuning"))
def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    kv_scales: None = None,
    sinks: None = None,
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
    tuning = tuning or default_tuning(head_dim)
    query_tile = _query_tile(num_queries, num_groups)
    num_padding = -num_queries % query_tile.num_queries
    if num_padding:
        q = jnp.pad(q, ((0, 0), (0, num_padding), (0, 0), (0, 0), (0, 0)))
    row_order = _longest_first(starts, lengths)
    kernel = _make_kernel(
        q_shape=q.shape,
        page_size=page_size,
        max_pages=page_table.shape[1],
        query_tile=query_tile,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        tuning=tuning,
    )
    out = kernel(row_order, starts, lengths, page_table, q, kv_pages)
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
    query_tile: _QueryTile,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    tuning: Tuning,
):
    num_rows, num_queries, num_kv_heads, num_groups, head_dim = q_shape
    block_kv, num_stages = tuning.block_kv, tuning.num_stages
    copy_keys = min(page_size, block_kv)
    num_copies = block_kv // copy_keys  # of a step
    num_query_tiles = num_queries // query_tile.num_queries
    num_group_tiles = -(-num_groups // query_tile.num_groups)
    num_items = num_rows * num_query_tiles * num_kv_heads * num_group_tiles
    num_blocks = min(tuning.num_blocks, num_items)
    num_rounds = -(-num_items // num_blocks)
    consumer_queries, consumer_groups = query_tile.consumer_queries, query_tile.consumer_groups

    def item_of_round(i, block):
        """Round i's item of this block: odd rounds go backwards, so that who had the longest gets the shortest."""
        return num_blocks * i + jnp.where(lax.rem(i, 2) == 1, num_blocks - 1 - block, block)

    def num_rounds_of(block):
        return jnp.where(item_of_round(num_rounds - 1, block) >= num_items, num_rounds - 1, num_rounds)

    class Item:
        """What one item is, and the steps of keys that it sees: num_steps of them from first_step on."""

        def __init__(self, i, block, row_order, starts, lengths):
            rest = item_of_round(jnp.int32(i), block)
            rest, group_tile = lax.div(rest, num_group_tiles), lax.rem(rest, num_group_tiles)
            rest, self.kv_head = lax.div(rest, num_kv_heads), lax.rem(rest, num_kv_heads)
            row_rank, tile = lax.div(rest, num_query_tiles), lax.rem(rest, num_query_tiles)
            self.row = row_order[row_rank]
            self.first_query = (num_query_tiles - 1 - tile) * query_tile.num_queries
            self.first_group = group_tile * query_tile.num_groups
            start, self.length = starts[self.row], lengths[self.row]
            self.first_position = start + self.first_query
            last_position = jnp.minimum(self.first_position + query_tile.num_queries, start + self.length) - 1
            first_key = 0 if sliding_window is None else jnp.maximum(self.first_position - (sliding_window - 1), 0)
            self.first_page = lax.div(first_key, page_size) if sliding_window is not None else 0
            self.last_page = jnp.minimum(lax.div(last_position, page_size), max_pages - 1)
            self.first_step = lax.div(first_key, block_kv) if sliding_window is not None else 0
            num_steps = lax.div(last_position, block_kv) + 1 - self.first_step
            self.num_steps = jnp.where(self.first_query < self.length, num_steps, 0)

    def produce(block, refs, scratch):
        row_order, starts, lengths, page_table, q, kv_pages, _ = refs
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        rings = ((0, scratch.k, scratch.k_full, scratch.k_free), (1, scratch.v, scratch.v_full, scratch.v_free))

        def produce_item(i, num_done_steps):
            item = Item(i, block, row_order, starts, lengths)

            def copy_queries():
                @pl.when(i > 0)
                def _wait():
                    plgpu.barrier_wait(scratch.q_free)

                for consumer, j in itertools.product(range(NUM_CONSUMERS), range(consumer_groups)):
                    first_query = item.first_query + query_tile.first_query(consumer)
                    # a tile of heads may go past the last one: those rows are computed and not stored
                    group = jnp.minimum(item.first_group + query_tile.first_group(consumer) + j, num_groups - 1)
                    plgpu.copy_gmem_to_smem(
                        q.at[item.row, pl.ds(first_query, consumer_queries), item.kv_head, group],
                        scratch.q.at[consumer, pl.ds(j * consumer_queries, consumer_queries)],
                        scratch.q_full,
                    )

            def page_ids(step):
                # Clamped: a step's other pages may hold anything, NaN too, and 0 * NaN is NaN.
                first_key = (item.first_step + step) * block_kv
                pages = (lax.div(first_key, page_size) + j for j in range(num_copies))
                return tuple(page_table[item.row, jnp.clip(p, item.first_page, item.last_page)] for p in pages)

            def produce_step(step, carry):
                num_done, ids = carry
                slot = lax.rem(num_done, num_stages)
                place = lax.rem((item.first_step + step) * block_kv, page_size) if page_size > block_kv else 0
                next_ids = page_ids(jnp.minimum(step + 1, item.num_steps - 1))  # their latency hides behind the wait
                for part, ring, full, free in rings:

                    @pl.when(num_done >= num_stages)
                    def _wait(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    for j, page_id in enumerate(ids):
                        plgpu.copy_gmem_to_smem(
                            kv_pages.at[page_id, part, pl.ds(place, copy_keys), item.kv_head],
                            ring.at[slot, pl.ds(j * copy_keys, copy_keys)],
                            full.at[slot],
                        )
                    if part == 0:  # after the first keys, whose room is free sooner than that of the queries
                        pl.when(step == 0)(copy_queries)
                return num_done + 1, next_ids

            pl.when(item.num_steps == 0)(copy_queries)
            return lax.fori_loop(0, item.num_steps, produce_step, (num_done_steps, page_ids(0)))[0]

        num_items_here = num_rounds_of(block)
        num_done_steps = lax.fori_loop(0, num_items_here, produce_item, jnp.int32(0))
        # No barrier may be left with a phase that nobody waited for.
        for slot in range(num_stages):

            @pl.when(num_done_steps > slot)
            def _wait_for_step(slot=slot):
                plgpu.barrier_wait(scratch.k_free.at[slot])
                plgpu.barrier_wait(scratch.v_free.at[slot])

        @pl.when(num_items_here > 0)
        def _wait_for_item():
            plgpu.barrier_wait(scratch.q_free)

    def consume(consumer, block, refs, scratch):
        row_order, starts, lengths, _, _, _, out = refs
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        q_smem, out_smem = scratch.q.at[consumer], scratch.out.at[consumer]
        scores_shape, out_shape = (ROWS_PER_CONSUMER, block_kv), (ROWS_PER_CONSUMER, head_dim)

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
            distance = query_of_row(scores_shape) - plgpu.broadcasted_iota(jnp.int32, scores_shape, 1, layout=WGMMA)
            offset = first_key - first_position  # query position - key = distance - offset
            is_seen = distance >= offset
            if sliding_window is not None:
                is_seen &= distance < offset + sliding_window
            return jnp.where(is_seen, scores, -jnp.inf)

        def consume_item(i, num_done_steps):
            item = Item(i, block, row_order, starts, lengths)
            first_query = item.first_query + query_tile.first_query(consumer)
            first_position = item.first_position + query_tile.first_query(consumer)
            last_position = first_position + (consumer_queries - 1)

            def slot_of(step):
                return lax.rem(num_done_steps + step, num_stages)

            def probs_of(scores, step, row_max, row_sum):
                """[64, block_kv] scores of a step -> probabilities, factor of earlier results, new maximum and sum."""
                first_key = (item.first_step + step) * block_kv
                log2_scale = scale * LOG2_E
                if softcap is not None:
                    # tanh(x) = 1 - 2 / (e^(2x) + 1); the hardware's own tanh is right to 2^-11 only
                    power = jnp.exp2(scores * (2 * scale / softcap * LOG2_E))
                    scores = 1.0 - 2.0 / (power + 1.0)
                    log2_scale = softcap * LOG2_E
                is_edge = first_key + (block_kv - 1) > first_position
                if sliding_window is not None:
                    is_edge |= first_key <= last_position - sliding_window
                scores = lax.cond(is_edge, lambda s: mask_scores(s, first_position, first_key), lambda s: s, scores)
                new_max = jnp.maximum(row_max, scores.max(axis=1) * log2_scale)
                rescale = jnp.exp2(row_max - new_max)
                probs = jnp.exp2(scores * log2_scale - lax.broadcast_in_dim(new_max, scores_shape, [0]))
                row_sum = row_sum * rescale + probs.sum(axis=1)
                return probs, rescale, new_max, row_sum

            def free_queries():
                plgpu.barrier_arrive(scratch.q_free)

            def free_keys(step):
                """The step's keys, and after the last step's also the queries."""
                plgpu.barrier_arrive(scratch.k_free.at[slot_of(step)])
                if not tuning.is_query_room_reused:
                    pl.when(step == item.num_steps - 1)(free_queries)

            def operand(probs):
                if not tuning.is_interpretable:
                    return probs
                scratch.probs.at[consumer][...] = probs
                plgpu.commit_smem()
                return scratch.probs.at[consumer]

            def wait_keys(step):
                @pl.when(step < item.num_steps)
                def _wait():
                    plgpu.barrier_wait(scratch.k_full.at[slot_of(step)])

            def first_scores(scores_ref):
                plgpu.barrier_wait(scratch.k_full.at[slot_of(0)])
                take_turn()
                plgpu.wgmma(scores_ref, q_smem, scratch.k.at[slot_of(0)].T)
                pass_turn()
                return scores_ref[...]

            def consume_step(step, carry):
                """The scores of a step, and meanwhile the values of the step before."""
                acc, row_max, row_sum, probs = carry

                def products(scores_ref, out_ref):
                    if not tuning.is_interpretable:
                        out_ref[...] = acc
                    probs_before = operand(probs)
                    plgpu.barrier_wait(scratch.v_full.at[slot_of(step - 1)])
                    take_turn()
                    plgpu.wgmma(scores_ref, q_smem, scratch.k.at[slot_of(step)].T)
                    plgpu.wgmma(out_ref, probs_before, scratch.v.at[slot_of(step - 1)])
                    pass_turn()
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    free_keys(step)
                    state = probs_of(scores, step, row_max, row_sum)
                    # This and the branch in wait_keys keep LLVM and ptxas from making all of it wait for the values.
                    new_probs, rescale, new_max, new_sum = lax.optimization_barrier(state)
                    wait_keys(step + 1)
                    out = out_ref[...]
                    plgpu.barrier_arrive(scratch.v_free.at[slot_of(step - 1)])
                    if tuning.is_interpretable:
                        out += acc
                    # Only now: a product's operands must not be written while another one is under way.
                    return out * over_columns(rescale), new_max, new_sum, new_probs.astype(jnp.bfloat16)

                return pl.run_scoped(products, plgpu.ACC(scores_shape), plgpu.ACC(out_shape))

            def attend():
                scores = pl.run_scoped(first_scores, plgpu.ACC(scores_shape))
                free_keys(0)
                probs, _, row_max, row_sum = probs_of(
                    scores,
                    0,
                    fill((ROWS_PER_CONSUMER,), LOWEST_MAX, WGMMA_ROW),
                    fill((ROWS_PER_CONSUMER,), 0, WGMMA_ROW),
                )
                wait_keys(1)
                carry = (fill(out_shape, 0, WGMMA), row_max, row_sum, probs.astype(jnp.bfloat16))
                acc, _, row_sum, probs = lax.fori_loop(1, item.num_steps, consume_step, carry)
                last_slot = slot_of(item.num_steps - 1)

                def last_values(out_ref):
                    if not tuning.is_interpretable:
                        out_ref[...] = acc
                    last_probs = operand(probs)
                    plgpu.barrier_wait(scratch.v_full.at[last_slot])
                    plgpu.wgmma(out_ref, last_probs, scratch.v.at[last_slot])
                    return out_ref[...] + acc if tuning.is_interpretable else out_ref[...]

                acc = pl.run_scoped(last_values, plgpu.ACC(out_shape))
                plgpu.barrier_arrive(scratch.v_free.at[last_slot])
                return acc * over_columns(1.0 / row_sum)

            plgpu.barrier_wait(scratch.q_full)
            acc = lax.cond(item.num_steps > 0, attend, lambda: fill(out_shape, 0, WGMMA))
            if not tuning.is_query_room_reused:
                pl.when(item.num_steps == 0)(free_queries)
            # Queries past the end have seen keys that are none.
            is_real = query_of_row(out_shape) < item.length - first_query
            acc = jnp.where(is_real, acc, 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left
            out_smem[...] = acc.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for j in range(consumer_groups):
                group = item.first_group + query_tile.first_group(consumer) + j

                @pl.when(group < num_groups)
                def _store(j=j, group=group):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[pl.ds(j * consumer_queries, consumer_queries)],
                        out.at[item.row, pl.ds(first_query, consumer_queries), item.kv_head, group],
                    )

            if tuning.is_query_room_reused:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                free_queries()
            return num_done_steps + item.num_steps

        @pl.when(consumer == 1)
        def _first_turn():
            pass_turn()

        lax.fori_loop(0, num_rounds_of(block), consume_item, jnp.int32(0))

        @pl.when(consumer == 0)
        def _last_turn():
            take_turn()

        plgpu.wait_smem_to_gmem(0)

    def body(*args):
        refs, scratch = args[:7], _Scratch(*args[7:])
        if tuning.is_query_room_reused:
            scratch = dataclasses.replace(scratch, out=scratch.q)
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _consumer():
            consume(warpgroup, block, refs, scratch)

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _producer():
            produce(block, refs, scratch)

    def smem(*shape):
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    queries = smem(NUM_CONSUMERS, ROWS_PER_CONSUMER, head_dim)
    ring = smem(num_stages, block_kv, head_dim)
    full = plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_stages)
    scratch_types = _Scratch(
        q=queries,
        out=None if tuning.is_query_room_reused else queries,
        k=ring,
        v=ring,
        probs=smem(NUM_CONSUMERS, ROWS_PER_CONSUMER, block_kv) if tuning.is_interpretable else None,
        q_full=plgpu.Barrier(num_arrivals=NUM_CONSUMERS * consumer_groups),
        q_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        k_full=full,
        v_full=full,
        k_free=free,
        v_free=free,
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
        # Every shared write is followed by commit_smem and every reuse is behind a barrier of ours.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not tuning.is_interpretable),
        kernel_name="paged_prefill",
    )


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of a block; first their types, then the references."""

    q: object
    out: object
    k: object
    v: object
    probs: object
    q_full: object
    q_free: object
    k_full: object
    v_full: object
    k_free: object
    v_free: object
    turn: object
