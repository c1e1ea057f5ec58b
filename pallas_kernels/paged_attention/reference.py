"""Paged attention in plain jnp: the definition of right, and the path that runs on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# A masked score lies so far below the lowest running maximum that its probability is exactly 0, also in a block
# where a row sees nothing; both are finite, since inf - inf is NaN.
MASKED_SCORE = -1e38
LOWEST_MAX = -1e30


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
    block_kv: int = 128,
) -> jax.Array:
    """See `api.paged_attention`. `block_kv` is about how many keys are read at a time (at least one page).

    Online softmax over blocks of keys (Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention) in float32.
    Blocks start at multiples of `block_kv` whatever the row, and a block that a row does not see multiplies its
    state by exactly 1 and adds exactly 0: so a row's result has the same bits whatever the other rows are and
    however many blocks they need.
    """
    num_rows, num_queries, num_kv_heads, num_groups, head_dim = q.shape
    page_size = kv_pages.shape[2]
    pages_per_block = max(1, block_kv // page_size)
    block_kv = pages_per_block * page_size
    num_padding = -page_table.shape[1] % pages_per_block
    page_table = jnp.pad(page_table, ((0, 0), (0, num_padding)))  # page 0, the null page; masked by position
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    # A query sees the keys in (last - sliding_window, last]; one that is none sees no key.
    query_RQ = jnp.arange(num_queries, dtype=jnp.int32)[None, :]
    last_RQ = jnp.where(query_RQ < lengths[:, None], starts[:, None] + query_RQ, -1)
    # [first_R, end_R): the keys that some query of the row sees
    end_R = jnp.where(lengths > 0, starts + lengths, 0)
    if sliding_window is None:
        first_R = jnp.zeros_like(starts)
        first_block = jnp.int32(0)
    else:
        first_R = jnp.maximum(starts - (sliding_window - 1), 0)
        first_block = jnp.min(jnp.where(lengths > 0, first_R, jnp.iinfo(jnp.int32).max)) // block_kv
    end_block = -(-jnp.max(end_R) // block_kv)

    q_RKQGH = jnp.transpose(q, (0, 2, 1, 3, 4))

    def scales_of(page_ids: jax.Array) -> tuple[jax.Array | float, jax.Array | float]:
        """Of a block's keys and values, against [R, K, Q, G, S]."""
        if kv_scales is None:
            return 1.0, 1.0
        if kv_scales.ndim == 1:
            return kv_scales[0], kv_scales[1]
        both_RP2KS = kv_scales.at[page_ids].get(mode="clip")
        both = jnp.transpose(both_RP2KS, (2, 0, 3, 1, 4)).reshape(2, num_rows, num_kv_heads, 1, 1, block_kv)
        return both[0], both[1]

    def attend_block(block: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]):
        max_RKQG, sum_RKQG, out_RKQGH = state
        page_ids = lax.dynamic_slice_in_dim(page_table, block * pages_per_block, pages_per_block, axis=1)
        # gathered one by one: XLA's CPU backend would make a copy of each after a common gather
        # quantised values are exact in q's dtype
        k_RSKH, v_RSKH = (
            kv_pages.at[page_ids, part]
            .get(mode="clip")
            .astype(q.dtype)
            .reshape(num_rows, block_kv, num_kv_heads, head_dim)
            for part in (0, 1)
        )
        k_scales, v_scales = scales_of(page_ids)

        key_S = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        is_seen_RQS = key_S <= last_RQ[:, :, None]
        if sliding_window is not None:
            is_seen_RQS &= key_S > last_RQ[:, :, None] - sliding_window
        # Pool values that nobody wrote may be NaN, and 0 * NaN is NaN: V is masked as well as the scores.
        is_key_RS = (key_S >= first_R[:, None]) & (key_S < end_R[:, None])
        v_RSKH = jnp.where(is_key_RS[:, :, None, None], v_RSKH, 0)
        if kv_scales is not None:
            v_scales = jnp.where(is_key_RS[:, None, None, None, :], v_scales, 0)

        scores = scale * jnp.einsum(
            "rkqgh,rskh->rkqgs", q_RKQGH, k_RSKH, precision=precision, preferred_element_type=jnp.float32
        )
        scores = scores * k_scales
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_seen_RQS[:, None, :, None, :], scores, MASKED_SCORE)
        new_max_RKQG = jnp.maximum(max_RKQG, scores.max(axis=-1))
        probs = jnp.exp(scores - new_max_RKQG[..., None])
        rescale_RKQG = jnp.exp(max_RKQG - new_max_RKQG)
        weighted = jnp.einsum(
            "rkqgs,rskh->rkqgh",
            (probs * v_scales).astype(v_RSKH.dtype),  # both sides of the product in the KV dtype, the sum in float32
            v_RSKH,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return (
            new_max_RKQG,
            sum_RKQG * rescale_RKQG + probs.sum(axis=-1),
            out_RKQGH * rescale_RKQG[..., None] + weighted,
        )

    heads = (num_rows, num_kv_heads, num_queries, num_groups)
    if sinks is None:
        max_RKQG, sum_RKQG = jnp.full(heads, LOWEST_MAX, jnp.float32), jnp.zeros(heads, jnp.float32)
    else:
        max_RKQG = jnp.broadcast_to(sinks[:, None, :], heads)
        sum_RKQG = jnp.ones(heads, jnp.float32)
    state = (
        max_RKQG,
        sum_RKQG,
        jnp.zeros((*heads, head_dim), jnp.float32),
    )
    _, sum_RKQG, out_RKQGH = lax.fori_loop(first_block, end_block, attend_block, state)
    # A query that is none has seen no key: its sum is 0 and its output must be 0.
    out_RKQGH = out_RKQGH / jnp.where(sum_RKQG > 0, sum_RKQG, 1.0)[..., None]
    return jnp.transpose(out_RKQGH, (0, 2, 1, 3, 4)).astype(q.dtype)
