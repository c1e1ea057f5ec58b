"""The Hopper decode kernel in interpret mode on CPU, against dense attention in float64."""

from __future__ import annotations

import dataclasses
import secrets

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_gpu_decode
from pallas_kernels.paged_attention.mosaic_gpu_decode import chunk_size, default_tuning, make_plan, max_chunks

CHUNKS = ((2048, 512), (65536, 1024), (1 << 30, 2048))

CASES = {
    "ragged, an unused row": dict(starts=[0, 300, 17, 0, 64], lengths=[1, 1, 1, 0, 1]),
    "window": dict(starts=[400, 5, 130], lengths=[1, 1, 1], sliding_window=70),
    "soft cap": dict(starts=[90], lengths=[1], softcap=2.0),
    "pages of a tile and two": dict(starts=[300, 65], lengths=[1, 1], page_size=128),
    "several queries": dict(starts=[70, 0, 260], lengths=[3, 1, 2], num_queries=3, num_groups=2),
    "several queries with a window": dict(starts=[70, 200], lengths=[2, 2], num_queries=2, sliding_window=66),
    "head_dim 64, 16 groups": dict(starts=[100, 3], lengths=[1, 1], head_dim=64, num_groups=16),
    "head_dim 256, one group": dict(starts=[100], lengths=[1], head_dim=256, num_groups=1, num_kv_heads=1),
    "seven groups, small pages": dict(starts=[129, 7], lengths=[1, 1], num_groups=7, page_size=8),
    "head_dim 80": dict(starts=[129, 7], lengths=[1, 1], head_dim=80),
    "head_dim 96, several queries": dict(starts=[129, 7], lengths=[2, 1], num_queries=2, head_dim=96, page_size=64),
    "sinks, three groups": dict(starts=[100, 0], lengths=[1, 0], num_groups=3, head_dim=64, has_sinks=True),
    "sinks, several queries, a window": dict(
        starts=[100, 3], lengths=[3, 2], num_queries=3, head_dim=64, sliding_window=66, has_sinks=True
    ),
    "e4m3, a scale a token": dict(
        starts=[150, 0, 64], lengths=[1, 0, 1], kv_dtype=ml_dtypes.float8_e4m3fn, per_token=True
    ),
    "e4m3, a scale a token, soft cap, sinks, pages of two tiles": dict(
        starts=[150, 65],
        lengths=[1, 1],
        head_dim=64,
        page_size=128,
        softcap=2.0,
        has_sinks=True,
        kv_dtype=ml_dtypes.float8_e4m3fn,
        per_token=True,
    ),
    "e4m3, soft cap, small pages, head_dim 64": dict(
        starts=[129, 7], lengths=[1, 1], head_dim=64, page_size=8, softcap=2.0, kv_dtype=ml_dtypes.float8_e4m3fn
    ),
    "int8, head_dim 256": dict(starts=[100], lengths=[1], head_dim=256, num_groups=2, kv_dtype=np.int8),
    "int8, a scale a token, several queries, a window, pages of half a tile": dict(
        starts=[70, 200],
        lengths=[2, 1],
        num_queries=2,
        sliding_window=66,
        page_size=32,
        kv_dtype=np.int8,
        per_token=True,
    ),
}


def quantised(arrays, kv_dtype, per_token: bool, magnitudes: np.ndarray | float = 1.0):
    """The case in quantised pages: (pages, scales, each row's keys and values as the pages say them, in float64).

    magnitudes: [pages, 2, page_size, K], what scales by token are multiplied by."""
    _, kv_pages, page_table, starts, lengths = arrays
    largest = 127 if kv_dtype == np.int8 else 448
    values = kv_pages.astype(np.float32)  # NaN in pages that no row has
    if per_token:
        scales = np.abs(values).max(-1) / largest
    else:
        scales = np.nanmax(np.abs(values), axis=(0, 2, 3, 4), keepdims=True)[..., 0] / largest
    values = values / scales[..., None]
    if kv_dtype == np.int8:
        values = np.where(np.isnan(values), 77, np.rint(values))
    pages = values.astype(kv_dtype)
    scales = (scales * magnitudes).astype(np.float32)
    true_pages = pages.astype(np.float64) * scales[..., None]
    dense = []
    for row, num_keys in enumerate(starts + lengths):
        keys = true_pages[page_table[row]]  # [P, 2, page_size, K, H]
        dense.append(np.moveaxis(keys, 1, 2).reshape(-1, 2, *keys.shape[3:])[:num_keys])
        if per_token and lengths[row]:  # what nobody wrote is 0 in a pool that serves
            page_size = kv_pages.shape[2]
            scales[page_table[row, num_keys // page_size], :, num_keys % page_size :] = 0
    scales = np.ascontiguousarray(np.moveaxis(scales, 2, 3)) if per_token else scales.reshape(2)
    return pages, scales, dense


def with_sinks(expected, q, k, sinks, start: int, options) -> np.ndarray:
    """Attention without sinks -> with them: the sums of exponentials differ by the sink's."""
    for i in range(len(q)):
        first = 0 if options["sliding_window"] is None else max(0, start + i - options["sliding_window"] + 1)
        scores = np.einsum("kgh,skh->kgs", q[i], k[first : start + i + 1]) * options["scale"]
        if options["softcap"] is not None:
            scores = options["softcap"] * np.tanh(scores / options["softcap"])
        sums = np.exp(scores).sum(-1)
        expected[i] *= (sums / (sums + np.exp(sinks)))[..., None]
    return expected


def interpreted(arrays, *, detect_races: bool = False, **options) -> np.ndarray:
    q, kv_pages = arrays[:2]
    tuning = default_tuning(q.shape[0], q.shape[2], q.shape[3], q.shape[4], kv_pages.dtype)
    # few blocks, so that each walks several items
    tuning = dataclasses.replace(tuning, num_blocks=3, is_interpretable=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
        return np.asarray(mosaic_gpu_decode.paged_attention(*arrays, tuning=tuning, **options))


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_dense_attention_over_the_pages(name: str, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    case = dict(num_queries=1, num_kv_heads=2, num_groups=4, head_dim=128, page_size=16) | CASES[name]
    options = dict(scale=0.2, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
    kv_dtype, per_token = case.pop("kv_dtype", None), case.pop("per_token", False)
    has_sinks = case.pop("has_sinks", False)
    rng = np.random.default_rng(seed)
    (q, kv_pages, *rows), dense = make_case(rng, **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    kv_scales = None
    if kv_dtype is not None:
        kv_pages, kv_scales, dense = quantised((q, kv_pages, *rows), kv_dtype, per_token)
    sinks = rng.normal(2, 2, q.shape[2:4]).astype(np.float32) if has_sinks else None
    assert mosaic_gpu_decode.supports(q, kv_pages, kv_scales, sinks)
    out = interpreted((q, kv_pages, *rows, kv_scales, sinks), **options)
    for row, (start, length) in enumerate(zip(case["starts"], case["lengths"], strict=True)):
        q_QKGH = q[row].astype(np.float64)
        expected = dense_attention(q_QKGH, *np.moveaxis(dense[row], 1, 0), start, length, **options)
        if has_sinks:
            with_sinks(expected[:length], q_QKGH[:length], dense[row][:, 0], sinks, start, options)
        # probabilities and the result are rounded to 8 bits: two relative errors of 2**-9 of values up to about 3
        np.testing.assert_allclose(out[row].astype(np.float64), expected, atol=3 * 2 * 2**-9)
        assert not out[row, length:].any()


@pytest.mark.parametrize("exponent", [-60, 60])
def test_scales_by_token_of_any_magnitude_lose_nothing(exponent: int, make_case, dense_attention) -> None:
    # values of one head from 2**(exponent - 15) to 2**exponent: float16 would hold few of the probabilities times these
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    case = dict(starts=[200], lengths=[1], num_queries=1, num_kv_heads=1, num_groups=4, head_dim=64, page_size=16)
    arrays, _ = make_case(rng, **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    magnitudes = np.ones(arrays[1].shape[:-1])
    magnitudes[:, 1] = 2.0 ** rng.integers(exponent - 15, exponent + 1, magnitudes[:, 1].shape)
    pages, scales, dense = quantised(arrays, ml_dtypes.float8_e4m3fn, True, magnitudes)
    options = dict(scale=0.2, sliding_window=None, softcap=None)
    out = interpreted((arrays[0], pages, *arrays[2:], scales, None), **options)
    expected = dense_attention(arrays[0][0].astype(np.float64), *np.moveaxis(dense[0], 1, 0), 200, 1, **options)
    error = np.linalg.norm(out[0].astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < 4e-3  # 2**-9 relative of the result's rounding, 2**-12 of the probabilities'


def test_error_does_not_grow_with_length(make_case, dense_attention) -> None:
    # equal scores: each of 2,000 probabilities is 2**-11 of the sum, and all errors of one kind would add up
    rng = np.random.default_rng(0)
    case = dict(starts=[1999], lengths=[1], num_queries=1, num_kv_heads=1, num_groups=1, head_dim=64, page_size=64)
    arrays, _ = make_case(rng, **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    q, kv_pages = arrays[:2]
    kv_pages[:, 1] = np.abs(kv_pages[:, 1])
    pages, scales, dense = quantised(arrays, ml_dtypes.float8_e4m3fn, False)
    options = dict(scale=1e-3, sliding_window=None, softcap=None)
    out = interpreted((q, pages, *arrays[2:], scales, None), **options)
    expected = dense_attention(q[0].astype(np.float64), *np.moveaxis(dense[0], 1, 0), 1999, 1, **options)
    assert np.linalg.norm(out[0].astype(np.float64) - expected) / np.linalg.norm(expected) < 2**-8.5


def test_queries_beyond_float16_are_not_infinite(make_case) -> None:
    arrays, _ = make_case(
        np.random.default_rng(0),
        starts=[5],
        lengths=[1],
        num_queries=1,
        num_kv_heads=1,
        num_groups=1,
        head_dim=64,
        page_size=16,
        dtype=ml_dtypes.bfloat16,
        finite_tails=True,
    )
    pages, scales, _ = quantised(arrays, ml_dtypes.float8_e4m3fn, False)
    arrays[0][:] = 1e30
    assert np.isfinite(interpreted((arrays[0], pages, *arrays[2:], scales, None), scale=1e-6).astype(np.float32)).all()


@pytest.mark.parametrize("kv_dtype", [None, ml_dtypes.float8_e4m3fn])
def test_no_race_and_the_same_bits_alone_and_among_others(kv_dtype, make_case, capfd) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    (q, kv_pages, *rows), _ = make_case(
        rng,
        starts=[330, 40, 100],
        lengths=[1, 1, 1],
        num_queries=1,
        num_kv_heads=2,
        num_groups=4,
        head_dim=64,
        page_size=16,
        dtype=ml_dtypes.bfloat16,
        finite_tails=True,
    )
    kv_scales = None
    if kv_dtype is not None:
        kv_pages, kv_scales, _ = quantised((q, kv_pages, *rows), kv_dtype, per_token=True)
    sinks = rng.normal(2, 2, q.shape[2:4]).astype(np.float32)
    together = interpreted((q, kv_pages, *rows, kv_scales, sinks), scale=0.2, detect_races=True)
    assert "RACE" not in capfd.readouterr().out  # the detector prints, and raises nothing
    for row in range(3):
        only = np.zeros(3, np.int32)
        only[row] = 1
        alone = interpreted((q, kv_pages, *rows[:2], only, kv_scales, sinks), scale=0.2)
        assert alone[row].tobytes() == together[row].tobytes()
        assert not np.delete(alone, row, axis=0).any()


def test_takes_what_it_says() -> None:
    def supports(dtype, head_dim: int, page_size: int = 16, scales_shape: tuple[int, ...] | None = None) -> bool:
        q = jax.ShapeDtypeStruct((4, 1, 2, 4, head_dim), jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)
        kv_pages = jax.ShapeDtypeStruct((9, 2, page_size, 2, head_dim), dtype)
        scales = None if scales_shape is None else jax.ShapeDtypeStruct(scales_shape, jnp.float32)
        return mosaic_gpu_decode.supports(q, kv_pages, scales)

    assert all(supports(jnp.bfloat16, head_dim) for head_dim in (64, 80, 96, 128, 256))
    assert not supports(jnp.float32, 128)
    assert not supports(jnp.bfloat16, 72)
    assert supports(jnp.int8, 128, 8, (2,))
    assert not supports(jnp.int8, 128, 8, (9, 2, 2, 8))
    assert supports(jnp.float8_e4m3fn, 128, 16, (9, 2, 2, 16))
    assert not supports(jnp.float8_e4m3fn, 80, 16, (2,))


@pytest.mark.parametrize("sliding_window", [None, 1, 100, 3000])
def test_plan_covers_every_key_once(sliding_window: int | None) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    max_length = 40000
    starts = rng.integers(0, max_length - 4, 12).astype(np.int32)
    starts[:3] = 0, 255, 2047
    lengths = rng.integers(0, 4, 12).astype(np.int32)
    plan = jax.device_get(make_plan(jnp.asarray(starts), jnp.asarray(lengths), max_length, sliding_window, CHUNKS))
    items = plan.items[: plan.num_items[0]]
    assert plan.num_items[0] == plan.num_chunks.sum() <= len(plan.items)
    for row in range(12):
        mine = items[plan.first_item[row] : plan.first_item[row] + plan.num_chunks[row]]
        assert (mine[:, 0] == row).all()
        if lengths[row] == 0:
            assert len(mine) == 0
            continue
        end = starts[row] + lengths[row]
        first = 0 if sliding_window is None else max(0, starts[row] - sliding_window + 1)
        assert mine[0, 1] <= first < mine[0, 1] + 64 and mine[-1, 2] == end
        assert (mine[1:, 1] == mine[:-1, 2]).all() and (mine[:, 1] % 64 == 0).all()
    sizes = np.asarray(chunk_size(jnp.asarray(starts + lengths), CHUNKS))[items[:, 0]]
    assert (sizes[1:] <= sizes[:-1]).all()


def test_most_chunks_of_a_row_bound_every_length() -> None:
    lengths = np.arange(1, 300_000, 7, dtype=np.int32)
    chunks = np.asarray(-(-lengths // chunk_size(jnp.asarray(lengths), CHUNKS)))
    for max_length in (1, 100, 2048, 2049, 16384, 70000, 290_000):
        assert chunks[lengths <= max_length].max(initial=1) <= max_chunks(max_length, CHUNKS)
