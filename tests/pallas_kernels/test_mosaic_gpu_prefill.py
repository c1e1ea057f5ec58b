"""The Hopper prefill kernel in interpret mode on CPU, against dense attention in float64."""

from __future__ import annotations

import dataclasses
import secrets

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_gpu_prefill
from pallas_kernels.paged_attention.mosaic_gpu_prefill import Tuning, _longest_first, default_tuning

CASES = {
    "ragged, an unused row, starts amid a page": dict(starts=[0, 150, 0], lengths=[64, 33, 0], num_groups=2),
    "two tiles of queries a row": dict(starts=[70, 0], lengths=[70, 5], num_queries=128, num_groups=2),
    "window of one token": dict(starts=[5], lengths=[20], num_queries=32, sliding_window=1),
    "soft cap and window": dict(starts=[140], lengths=[24], num_queries=24, sliding_window=130, softcap=2.0),
    "one group": dict(starts=[100], lengths=[120], num_queries=128, num_groups=1),
    "seven groups, few queries": dict(starts=[129, 7], lengths=[5, 3], num_queries=5, num_groups=7),
    "head_dim 256, pages of two steps": dict(starts=[100], lengths=[64], head_dim=256, page_size=128, num_groups=2),
    "head_dim 80, pages of 8, sinks": dict(
        starts=[75], lengths=[64], head_dim=80, page_size=8, num_groups=2, has_sinks=True
    ),
    "head_dim 96, pages of 128, sinks, tiles past the last head, a window": dict(
        starts=[129, 7],
        lengths=[5, 3],
        num_queries=5,
        num_groups=7,
        num_kv_heads=2,
        head_dim=96,
        page_size=128,
        sliding_window=100,
        has_sinks=True,
    ),
    "e4m3": dict(starts=[0, 150, 0], lengths=[64, 33, 0], num_groups=2, kv_dtype=ml_dtypes.float8_e4m3fn),
    "e4m3, a scale a token, pages of 8, soft cap": dict(
        starts=[140],
        lengths=[24],
        num_queries=24,
        page_size=8,
        softcap=2.0,
        kv_dtype=ml_dtypes.float8_e4m3fn,
        has_scale_a_token=True,
    ),
    "int8, head_dim 64, pages of 64, sinks": dict(
        starts=[60, 200], lengths=[64, 10], head_dim=64, page_size=64, num_groups=2, kv_dtype=np.int8, has_sinks=True
    ),
    "int8, a scale a token, head_dim 256, pages of two steps, two KV heads, a window": dict(
        starts=[100],
        lengths=[40],
        num_kv_heads=2,
        num_groups=2,
        head_dim=256,
        page_size=128,
        sliding_window=60,
        kv_dtype=np.int8,
        has_scale_a_token=True,
    ),
}


def quantised(arrays, kv_dtype, has_scale_a_token: bool):
    """The case with quantised pages and scales, and each row's keys and values as the pages say them, in float64."""
    q, kv_pages, page_table, starts, lengths = arrays
    largest = 127 if kv_dtype == np.int8 else 448
    magnitudes = np.abs(kv_pages.astype(np.float32)).max(-1)  # [pages, 2, page_size, K]; NaN where no row has the page
    if has_scale_a_token:
        scales = magnitudes / largest
        divisors = scales[..., None]
        scales = np.ascontiguousarray(np.moveaxis(scales, 2, 3))
    else:
        scales = np.nanmax(magnitudes, axis=(0, 2, 3)) / largest
        divisors = scales[None, :, None, None, None]
    values = kv_pages.astype(np.float32) / divisors
    if kv_dtype == np.int8:
        values = np.where(np.isnan(values), 77, np.rint(values))
    pages = values.astype(kv_dtype)
    true_pages = pages.astype(np.float64) * divisors
    dense = []
    for row, num_keys in enumerate(starts + lengths):
        keys = true_pages[page_table[row]]  # [P, 2, page_size, K, H]
        dense.append(np.moveaxis(keys, 1, 2).reshape(-1, 2, *keys.shape[3:])[:num_keys])
    return (q, pages, page_table, starts, lengths, scales), dense


def with_sinks(expected, q, k, sinks, start: int, options) -> np.ndarray:
    """Attention without sinks -> with them: both sums of exponentials differ by the sink's."""
    for i in range(len(q)):
        first = 0 if options["sliding_window"] is None else max(0, start + i - options["sliding_window"] + 1)
        scores = np.einsum("kgh,skh->kgs", q[i], k[first : start + i + 1]) * options["scale"]
        if options["softcap"] is not None:
            scores = options["softcap"] * np.tanh(scores / options["softcap"])
        num = np.exp(scores).sum(-1)
        expected[i] *= (num / (num + np.exp(sinks)))[..., None]
    return expected


def interpreted(arrays, *, detect_races: bool = False, tuning: Tuning | None = None, **options) -> np.ndarray:
    tuning = tuning or default_tuning(arrays[0].shape[-1], is_quantised=len(arrays) > 5)
    # few blocks, so that each walks several items
    tuning = dataclasses.replace(tuning, is_interpretable=True, num_blocks=2)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
        return np.asarray(mosaic_gpu_prefill.paged_attention(*arrays, tuning=tuning, **options))


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_dense_attention_over_the_pages(name: str, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    case = dict(num_queries=64, num_kv_heads=1, num_groups=4, head_dim=128, page_size=16) | CASES[name]
    options = dict(scale=0.2, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
    kv_dtype, has_scale_a_token = case.pop("kv_dtype", None), case.pop("has_scale_a_token", False)
    has_sinks = case.pop("has_sinks", False)
    rng = np.random.default_rng(seed)
    arrays, dense = make_case(rng, **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    if kv_dtype is not None:
        arrays, dense = quantised(arrays, kv_dtype, has_scale_a_token)
    sinks = rng.normal(2, 2, arrays[0].shape[2:4]).astype(np.float32) if has_sinks else None
    kv_scales = arrays[5] if kv_dtype is not None else None
    assert mosaic_gpu_prefill.supports(jnp.asarray(arrays[0]), jnp.asarray(arrays[1]), kv_scales, sinks)
    out = interpreted(arrays, sinks=sinks, **options)
    for row, (start, length) in enumerate(zip(case["starts"], case["lengths"], strict=True)):
        expected = dense_attention(
            arrays[0][row].astype(np.float64), *np.moveaxis(dense[row], 1, 0), start, length, **options
        )
        if has_sinks:
            q = arrays[0][row, :length].astype(np.float64)
            expected = with_sinks(expected, q, dense[row][:, 0], sinks, start, options)
        if not length:
            assert not out[row].any()  # exact zeros, not NaN
            continue
        error = out[row].astype(np.float64) - expected
        print(f"row {row}: relative error {np.linalg.norm(error) / np.linalg.norm(expected):.2e}")
        # Probabilities and the result are rounded to 8 bits, and values that have a scale a token: relative errors of at
        # most 2**-9 each of values up to about 3, at random a third of that.
        np.testing.assert_allclose(error, 0, atol=3 * (3 if has_scale_a_token else 2) * 2**-9)
        assert np.linalg.norm(error) <= 4e-3 * np.linalg.norm(expected)
        assert not out[row, length:].any()  # exact zeros, not NaN


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "tuning"),
    [
        (64, None, dict(num_key_stages=2, num_value_stages=2, num_query_stages=2)),
        (128, ml_dtypes.float8_e4m3fn, dict(num_key_stages=1, num_value_stages=2, num_query_stages=1)),
    ],
)
def test_no_race_and_the_same_bits_alone_and_among_others(head_dim, kv_dtype, tuning, make_case, capfd) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    arrays, _ = make_case(
        np.random.default_rng(seed),
        starts=[200, 0, 0, 40],
        lengths=[50, 0, 0, 128],
        num_queries=128,  # of which the first row leaves a tile unused
        num_kv_heads=1,
        num_groups=2,
        head_dim=head_dim,
        page_size=64,
        dtype=ml_dtypes.bfloat16,
        finite_tails=True,
    )
    if kv_dtype is not None:
        arrays, _ = quantised(arrays, kv_dtype, has_scale_a_token=True)
    tuning = dataclasses.replace(default_tuning(head_dim), out_columns=64, **tuning)
    together = interpreted(arrays, scale=0.2, tuning=tuning, detect_races=True)
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err  # races are printed, not raised
    lengths_alone = arrays[4] * np.array([0, 0, 0, 1], np.int32)
    alone = interpreted((*arrays[:4], lengths_alone, *arrays[5:]), scale=0.2, tuning=tuning)
    assert alone[3].tobytes() == together[3].tobytes()
    assert not alone[:3].any()


def test_rows_with_most_keys_come_first() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    starts, lengths = rng.integers(0, 10, 40).astype(np.int32), rng.integers(0, 3, 40).astype(np.int32)
    num_keys = np.where(lengths > 0, starts + lengths, 0)
    order = np.asarray(jax.jit(_longest_first)(starts, lengths))
    np.testing.assert_array_equal(order, np.argsort(-num_keys, kind="stable"))
