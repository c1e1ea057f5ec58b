"""From the QKV product to queries and written pages: the kernel, interpreted, against float64 and against `write_kv`."""

from __future__ import annotations

import functools
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_page_write import reference, rotate_and_write_kv, triton_gpu, write_kv

RUN = {
    "reference": reference.rotate_and_write_kv,
    "triton_gpu": functools.partial(triton_gpu.rotate_and_write_kv, interpret=True),
}
NUM_PAGES, PAGE_SIZE, EPS = 6, 4, 1e-6


def make_case(*, num_kv_heads=2, num_groups=4, head_dim=16, rotary_dim=16, has_norms=False):
    """Random arrays for five tokens, the last of them padding."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((5, num_kv_heads, num_groups + 2, head_dim)).astype(np.float32)
    angles = rng.uniform(0, 6, (5, rotary_dim // 2))
    pages = rng.standard_normal((NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, head_dim)).astype(np.float32)
    places = rng.permutation(NUM_PAGES * PAGE_SIZE)[:4]
    indices = np.append(places, NUM_PAGES * PAGE_SIZE).astype(np.int32)
    weights = tuple(rng.standard_normal((2, head_dim)).astype(np.float32)) if has_norms else (None, None)
    return qkv, np.float32(np.cos(angles)), np.float32(np.sin(angles)), pages, indices, weights


def exact_heads(qkv, cos, sin, weights):
    """In float64: [T, K, G + 2, H] with norms and rotation."""
    heads = np.float64(qkv)
    turning, half = heads[:, :, :-1], cos.shape[1]
    if weights[0] is not None:
        turning = turning / np.sqrt((turning**2).mean(-1, keepdims=True) + EPS)
        turning = np.concatenate([turning[:, :, :-1] * weights[0], turning[:, :, -1:] * weights[1]], 2)
    first, second = turning[..., :half], turning[..., half : 2 * half]
    cos, sin = np.float64(cos)[:, None, None], np.float64(sin)[:, None, None]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, turning[..., 2 * half :]], -1)
    return np.concatenate([turned, heads[:, :, -1:]], 2)


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize(
    ("case", "num_columns"),
    [
        (dict(), 8),
        (dict(num_groups=7, head_dim=12, rotary_dim=8), 8),
        (dict(num_groups=1, num_kv_heads=1, has_norms=True), 1),
        (dict(num_groups=3, head_dim=20, rotary_dim=4, has_norms=True), 8),
    ],
)
def test_queries_and_pages_are_those_of_float64_and_nothing_else_changes(implementation, case, num_columns) -> None:
    qkv, cos, sin, pages, indices, weights = make_case(**case)
    q, new_pages, _ = RUN[implementation](
        *map(jnp.asarray, (qkv, cos, sin, pages, indices)),
        None,
        *weights,
        eps=EPS,
        num_columns=num_columns,
    )
    heads = exact_heads(qkv, cos, sin, weights)
    num_groups = qkv.shape[2] - 2
    expected = pages.astype(np.float64)
    for token, index in enumerate(indices[:4]):  # the fifth is padding and writes nowhere
        expected[index // PAGE_SIZE, :, index % PAGE_SIZE] = np.moveaxis(heads[token, :, num_groups:], 1, 0)
    # float32 rounds a few times at values up to about 10
    np.testing.assert_allclose(q[:, :, :num_groups], heads[:, :, :num_groups], rtol=1e-5, atol=1e-5)
    assert not np.asarray(q[:, :, num_groups:]).any()
    np.testing.assert_allclose(new_pages, expected, rtol=1e-5, atol=1e-5)
    untouched = np.ones((NUM_PAGES, PAGE_SIZE), bool)
    untouched[indices[:4] // PAGE_SIZE, indices[:4] % PAGE_SIZE] = False
    np.testing.assert_array_equal(
        np.swapaxes(np.asarray(new_pages), 1, 2)[untouched], np.swapaxes(pages, 1, 2)[untouched]
    )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("per_head", [False, True])
def test_quantised_pages_and_scales_have_the_bits_of_write_kv(dtype, per_head) -> None:
    qkv, cos, sin, pages, indices, _ = make_case()
    cos, sin = np.ones_like(cos), np.zeros_like(sin)  # no rotation, so that both quantise the very same numbers
    qkv[0, 0, -1] = 0  # a head of zeros has the least scale
    qkv[1] = np.arange(qkv[1].size).reshape(qkv[1].shape) / 64 * 0.5  # ties for int8
    pool = jnp.asarray(pages).astype(dtype)
    shape = (NUM_PAGES, 2, pages.shape[3], PAGE_SIZE)
    scales = jnp.ones(shape) if per_head else jnp.array([1 / 64, 1 / 128])
    _, new_pages, new_scales = RUN["triton_gpu"](qkv, cos, sin, pool, indices, scales, eps=EPS, num_columns=8)
    expected_pages, expected_scales = write_kv(pool, qkv[:, :, -2], qkv[:, :, -1], indices, scales)
    np.testing.assert_array_equal(np.asarray(new_pages).view(np.uint8), np.asarray(expected_pages).view(np.uint8))
    np.testing.assert_array_equal(new_scales, expected_scales)


def test_result_rounds_where_the_reference_rounds() -> None:
    qkv, cos, sin, pages, indices, weights = make_case(has_norms=True)
    qkv, pool = jnp.asarray(qkv, jnp.bfloat16), jnp.asarray(pages, jnp.bfloat16)
    options = dict(eps=EPS, num_columns=4)
    (q, written, _), (q_reference, written_reference, _) = (
        run(qkv, cos, sin, pool, indices, None, *weights, **options) for run in RUN.values()
    )
    # XLA may keep more bits between fused operations than bfloat16 has: one rounding of 2**-8 each way
    np.testing.assert_allclose(np.float32(q), np.float32(q_reference), rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(np.float32(written), np.float32(written_reference), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(qkv=jnp.zeros((1, 5, 2, 6, 16))), "qkv"),
        (dict(qkv=jnp.zeros((5, 2, 6, 16), jnp.float16)), "float16"),
        (dict(cos=jnp.zeros((5, 9))), "cos"),
        (dict(kv_indices=jnp.zeros(4, jnp.int32)), "kv_indices"),
        (dict(kv_scales=jnp.ones(2)), "kv_scales"),
        (dict(q_weight=jnp.ones(16)), "k_weight"),
        (dict(num_columns=3), "num_columns"),
        (dict(implementation="cuda"), "cuda"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message) -> None:
    qkv, cos, sin, pages, indices, _ = make_case()
    arguments = dict(qkv=qkv, cos=cos, sin=sin, kv_pages=jnp.asarray(pages), kv_indices=indices)
    with pytest.raises(ValueError, match=message):
        rotate_and_write_kv(**(arguments | change))


def test_without_a_kernel_for_the_platform_the_reference_runs() -> None:
    qkv, cos, sin, pages, indices, _ = make_case()
    out = jax.jit(rotate_and_write_kv)(qkv, cos, sin, pages, indices)
    expected = jax.jit(functools.partial(rotate_and_write_kv, implementation="reference"))(
        qkv, cos, sin, pages, indices
    )
    for found, wanted in zip(out[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(found, wanted)
