"""Head norms, rotation, page write and padding of queries as one kernel, a block a token and KV head, in Pallas Triton.

XLA makes two kernels of it, one for the queries and a scatter. Triton, which jax means to leave one day, since XLA runs
such a kernel as its own: in a command buffer, without a call to a handler. A head is read as the dims of the first half of
the rotation, of its second half and past both, each padded to a power of two, as Triton wants.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kv_page_write.reference import LEAST_SCALE, largest_of

NUM_WARPS = 4


def _nearest_even(x: jax.Array) -> jax.Array:
    """jnp.round, which Pallas Triton does not lower."""
    below = jnp.floor(x)
    rest, is_odd = x - below, below - 2 * jnp.floor(below / 2)
    return jnp.where((rest > 0.5) | ((rest == 0.5) & (is_odd == 1)), below + 1, below)


@functools.partial(jax.jit, static_argnames=("eps", "num_columns", "interpret"))
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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `api.rotate_and_write_kv`."""
    num_tokens, num_kv_heads, num_heads, head_dim = qkv.shape
    dtype = qkv.dtype
    num_groups, half = num_heads - 2, cos.shape[1]
    num_pages, _, page_size, _, _ = kv_pages.shape
    spans = [(0, half), (half, half)] + [(2 * half, head_dim - 2 * half)] * (head_dim > 2 * half)
    scales_each = kv_scales is not None and kv_scales.ndim == 4  # a scale for each token and head, written here
    optional = dict(kv_scales=kv_scales, q_weight=q_weight, k_weight=k_weight)
    inputs = dict(qkv=qkv, cos=cos, sin=sin, kv_pages=kv_pages, kv_indices=kv_indices) | {
        name: array for name, array in optional.items() if array is not None
    }

    def body(*refs):
        ins = dict(zip(inputs, refs, strict=False))
        q_out, pages_out, *scales_out = refs[len(inputs) :]
        token, kv_head = pl.program_id(0), pl.program_id(1)
        # of each span: its dims, and which of them are none
        dims = [begin + jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32) for begin, size in spans]
        is_dim = [x < begin + size for x, (begin, size) in zip(dims, spans, strict=True)]

        def load_heads(head):
            """These heads [N] of the product, as [N, dims] of each span; zeros past its last."""
            is_head = head < num_heads
            tiles = []
            for d, is_d in zip(dims, is_dim, strict=True):
                place = ins["qkv"].at[token, kv_head, head[:, None], d[None, :]]
                tiles.append(plt.load(place, mask=is_head[:, None] & is_d[None, :], other=0.0))
            return tiles

        def vector(name, d, is_d, *leading):
            return plt.load(ins[name].at[(*leading, d)], mask=is_d, other=0.0)[None, :]

        angles, is_angle = dims[0], is_dim[0]
        cos, sin = (vector(name, angles, is_angle, token) for name in ("cos", "sin"))

        def turn(tiles, weight):
            """Norm by the weight of that name, where there is one, and rotation, both rounded."""
            tiles = [x.astype(jnp.float32) for x in tiles]
            if weight in ins:
                mean_square = functools.reduce(jnp.add, [jnp.sum(x * x, axis=1) for x in tiles]) / head_dim
                factor = lax.rsqrt(mean_square + eps)[:, None]
                weights = [vector(weight, d, is_d) for d, is_d in zip(dims, is_dim, strict=True)]
                tiles = [
                    (x * factor * w).astype(dtype).astype(jnp.float32) for x, w in zip(tiles, weights, strict=True)
                ]
            first, second, *rest = tiles
            tiles = [first * cos - second * sin, second * cos + first * sin, *rest]
            return [x.astype(dtype) for x in tiles]

        column = jnp.arange(pl.next_power_of_2(num_columns), dtype=jnp.int32)
        is_query = (column < num_groups)[:, None]
        queries = turn(load_heads(column), "q_weight")
        for x, d, is_d in zip(queries, dims, is_dim, strict=True):
            place = q_out.at[token, kv_head, column[:, None], d[None, :]]
            plt.store(
                place, jnp.where(is_query, x, jnp.zeros_like(x)), mask=(column < num_columns)[:, None] & is_d[None, :]
            )

        part = jnp.arange(2, dtype=jnp.int32)  # 0 the key, 1 the value
        is_value = (part == 1)[:, None]
        read = load_heads(num_groups + part)
        kv = [jnp.where(is_value, v, k) for v, k in zip(read, turn(read, "k_weight"), strict=True)]
        index = plt.load(ins["kv_indices"].at[token])
        is_written = jnp.full((2,), index < num_pages * page_size)
        page, offset = lax.div(index, jnp.int32(page_size)), lax.rem(index, jnp.int32(page_size))
        if kv_scales is not None:
            largest = largest_of(kv_pages.dtype)
            kv = [x.astype(jnp.float32) for x in kv]
            if scales_each:
                magnitude = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for x in kv])
                scale = jnp.maximum(magnitude / largest, LEAST_SCALE)
                plt.store(scales_out[0].at[page, part, kv_head, offset], scale, mask=is_written)
            else:
                scale = plt.load(ins["kv_scales"].at[part])
            kv = [jnp.minimum(jnp.maximum(x / scale[:, None], -largest), largest) for x in kv]
            if kv_pages.dtype == jnp.int8:
                kv = [_nearest_even(x) for x in kv]
        for x, d, is_d in zip(kv, dims, is_dim, strict=True):
            place = pages_out.at[page, part[:, None], offset, kv_head, d[None, :]]
            plt.store(place, x.astype(kv_pages.dtype), mask=is_written[:, None] & is_d[None, :])

    names = list(inputs)
    q_type = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, num_columns, head_dim), dtype)
    written = ["kv_pages"] + ["kv_scales"] * scales_each
    q, kv_pages, *new_scales = pl.pallas_call(
        body,
        out_shape=(q_type, *(jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in written)),
        grid=(num_tokens, num_kv_heads),
        input_output_aliases={names.index(name): 1 + i for i, name in enumerate(written)},
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        name="rotate_and_write_kv",
        interpret=interpret,
    )(*inputs.values())
    return q, kv_pages, new_scales[0] if scales_each else kv_scales
