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
    "two KV heads, a window": dict(starts=[200], lengths=[40], num_groups=2, num_kv_heads=2, sliding_window=60),
    "window of one token": dict(starts=[5], lengths=[20], num_queries=32, sliding_window=1),
    "soft cap and window": dict(starts=[140], lengths=[24], num_queries=24, sliding_window=130, softcap=2.0),
    "one group": dict(starts=[100], lengths=[120], num_queries=128, num_groups=1),
    "seven groups, few queries": dict(starts=[129, 7], lengths=[5, 3], num_queries=5, num_groups=7),
    "head_dim 64, pages of 64": dict(starts=[60, 200], lengths=[64, 10], head_dim=64, page_size=64, num_groups=2),
    "head_dim 256, pages of two steps": dict(starts=[100], lengths=[64], head_dim=256, page_size=128, num_groups=2),
}


def interpreted(arrays, *, detect_races: bool = False, tuning: Tuning | None = None, **options) -> np.ndarray:
    tuning = tuning or default_tuning(arrays[0].shape[-1])
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
    arrays, dense = make_case(np.random.default_rng(seed), **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    assert mosaic_gpu_prefill.supports(*map(jnp.asarray, arrays[:2]))
    out = interpreted(arrays, **options)
    for row, (start, length) in enumerate(zip(case["starts"], case["lengths"], strict=True)):
        expected = dense_attention(
            arrays[0][row].astype(np.float64), *np.moveaxis(dense[row], 1, 0), start, length, **options
        )
        # probabilities and the result are rounded to 8 bits: two relative errors of 2**-9 of values up to about 3
        np.testing.assert_allclose(out[row].astype(np.float64), expected, atol=3 * 2 * 2**-9)
        assert not out[row, length:].any()  # exact zeros, not NaN


@pytest.mark.parametrize("is_query_room_reused", [False, True])
def test_no_race_and_the_same_bits_alone_and_among_others(is_query_room_reused: bool, make_case, capfd) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    arrays, _ = make_case(
        np.random.default_rng(seed),
        starts=[200, 0, 0, 40],
        lengths=[50, 0, 0, 128],
        num_queries=128,  # of which the first row leaves a tile unused
        num_kv_heads=1,
        num_groups=2,
        head_dim=64,
        page_size=64,
        dtype=ml_dtypes.bfloat16,
        finite_tails=True,
    )
    tuning = dataclasses.replace(default_tuning(64), num_stages=2, is_query_room_reused=is_query_room_reused)
    together = interpreted(arrays, scale=0.2, tuning=tuning, detect_races=True)
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err  # races are printed, not raised
    alone = interpreted((*arrays[:4], arrays[4] * np.array([0, 0, 0, 1], np.int32)), scale=0.2, tuning=tuning)
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
