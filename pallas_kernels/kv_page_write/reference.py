"""The page write, and the way from the QKV product to it, in plain jnp: the definition of right, and what XLA fuses.
The write is an XLA scatter, which is in place on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_page_write import xla_tpu

LEAST_SCALE = 1e-12  # of a token's head of zeros


def write_kv(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, kv_indices: jax.Array, kv_scales: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Put the keys and values of T tokens into the pool. In place where `kv_pages` and `kv_scales` are donated.

    Args:
      kv_pages: [num_pages, 2, page_size, K, H].
      k: [T, K, H], rotated keys; cast to the pool's dtype, or quantised where that is float8_e4m3fn or int8.
      v: [T, K, H].
      kv_indices: [T] int32, page_id * page_size + offset of each token. Those within the pool differ;
        padding tokens have one past the pool and are dropped.
      kv_scales: float32 for quantised pools, as `paged_attention` takes them. [2]: values are divided by them, and those
        outside the dtype's range become its largest. [num_pages, 2, K, page_size]: each token and head gets its own,
        its largest magnitude over the dtype's largest value.

    Returns:
      (kv_pages, kv_scales) with the tokens written.

    Raises ValueError on shapes that do not fit, and on scales without a quantised pool or the reverse.
    """
    _, _, page_size, num_kv_heads, head_dim = kv_pages.shape
    expected = (kv_indices.shape[0], num_kv_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k {k.shape} and v {v.shape} must be {expected} for kv_pages {kv_pages.shape}")
    check_scales(kv_pages, kv_scales)
    pages, offsets = kv_indices // page_size, kv_indices % page_size
    new_T2KH = jnp.stack([k, v], axis=1)
    if kv_scales is not None:
        new_T2KH = new_T2KH.astype(jnp.float32)
        largest = largest_of(kv_pages.dtype)
        if kv_scales.ndim == 1:
            scales = kv_scales[:, None]
        else:
            scales = jnp.maximum(jnp.abs(new_T2KH).max(-1) / largest, LEAST_SCALE)  # [T, 2, K]
            kv_scales = kv_scales.at[pages, :, :, offsets].set(scales, mode="drop", unique_indices=True)
        new_T2KH = jnp.clip(new_T2KH / scales[..., None], -largest, largest)
        if kv_pages.dtype == jnp.int8:
            new_T2KH = jnp.round(new_T2KH)

    def set_tokens(kv_pages, new_T2KH, pages, offsets):
        return kv_pages.at[pages, :, offsets].set(new_T2KH, mode="drop", unique_indices=True)

    arrays = (kv_pages, new_T2KH.astype(kv_pages.dtype), pages, offsets)
    return lax.platform_dependent(*arrays, tpu=xla_tpu.set_tokens, default=set_tokens), kv_scales


def check_scales(kv_pages: jax.Array, kv_scales: jax.Array | None) -> None:
    """Raise ValueError unless the pool is quantised and the scales fit it, or neither is."""
    num_pages, _, page_size, num_kv_heads, _ = kv_pages.shape
    if kv_pages.dtype.itemsize == 1:
        shapes = ((2,), (num_pages, 2, num_kv_heads, page_size))
        if kv_scales is None or kv_scales.shape not in shapes:
            found = None if kv_scales is None else kv_scales.shape
            raise ValueError(f"kv_scales must have one of the shapes {shapes} for {kv_pages.dtype} pages: {found}")
    elif kv_scales is not None:
        raise ValueError(f"kv_scales belong to quantised pages; kv_pages are {kv_pages.dtype}")


def largest_of(dtype: jnp.dtype) -> float:
    """The largest value of a quantised pool's dtype."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis (Zhang and Sennrich 2019): float32 inside, x's dtype out."""
    x32 = x.astype(jnp.float32)  # the mean of squares of bfloat16 values needs more than their 8 bits
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    return (x32 * lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the heads of x [T, ..., H] by the angles of cos and sin, float32 [T, rotary_dim / 2].

    Rotary position embedding (Su et al. 2021, RoFormer): dims i and i + rotary_dim / 2 turn together, dims past
    rotary_dim stay. float32 inside, x's dtype out.
    """
    half = cos.shape[-1]
    over_heads = (slice(None), *(None,) * (x.ndim - 2), slice(None))
    cos, sin = cos[over_heads], sin[over_heads]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + [x[..., 2 * half :]], axis=-1)


def rotate_and_write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    kv_indices: jax.Array,
    kv_scales: jax.Array | None = None,
    q_weight: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    *,
    eps: float,
    num_columns: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `api.rotate_and_write_kv`."""
    turning, v = qkv[:, :, :-1], qkv[:, :, -1]
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(turning[:, :, :-1], q_weight, eps), rms_norm(turning[:, :, -1:], k_weight, eps)
        turning = jnp.concatenate([q, k], axis=2)
    turned = rotate(turning, cos, sin)
    q, k = turned[:, :, :-1], turned[:, :, -1]
    kv_pages, kv_scales = write_kv(kv_pages, k, v, kv_indices, kv_scales)
    num_padding = num_columns - q.shape[2]
    if num_padding:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, num_padding), (0, 0)))
    return q, kv_pages, kv_scales
