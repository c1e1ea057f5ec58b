"""The Hopper decode kernel in interpret mode on CPU, against dense attention in float64."""

from __future__ import annotations

import secrets

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_gpu_decode
from pallas_kernels.paged_attention.mosaic_gpu_decode import Tuning, chunk_size, make_plan, max_chunks

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
}


def interpreted(arrays, *, detect_races: bool = False, **options) -> np.ndarray:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
        # few blocks, so that each walks several items
        out = mosaic_gpu_decode.paged_attention(*arrays, tuning=Tuning(num_blocks=3), **options)
        return np.asarray(out)


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_dense_attention_over_the_pages(name: str, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    case = dict(num_queries=1, num_kv_heads=2, num_groups=4, head_dim=128, page_size=16) | CASES[name]
    options = dict(scale=0.2, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
    arrays, dense = make_case(np.random.default_rng(seed), **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    assert mosaic_gpu_decode.supports(*map(jnp.asarray, arrays[:2]))
    out = interpreted(arrays, **options)
    for row, (start, length) in enumerate(zip(case["starts"], case["lengths"], strict=True)):
        expected = dense_attention(
            arrays[0][row].astype(np.float64), *np.moveaxis(dense[row], 1, 0), start, length, **options
        )
        # probabilities and the result are rounded to 8 bits: two relative errors of 2**-9 of values up to about 3
        np.testing.assert_allclose(out[row].astype(np.float64), expected, atol=3 * 2 * 2**-9)
        assert not out[row, length:].any()


def test_no_race_and_the_same_bits_alone_and_among_others(make_case, capfd) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    arrays, _ = make_case(
        np.random.default_rng(seed),
        starts=[330, 40, 519],
        lengths=[1, 1, 1],
        num_queries=1,
        num_kv_heads=2,
        num_groups=4,
        head_dim=64,
        page_size=16,
        dtype=ml_dtypes.bfloat16,
        finite_tails=True,
    )
    together = interpreted(arrays, scale=0.2, detect_races=True)
    assert "RACE" not in capfd.readouterr().out  # the detector prints, and raises nothing
    for row in range(3):
        only = np.zeros(3, np.int32)
        only[row] = 1
        alone = interpreted((*arrays[:4], only), scale=0.2)
        assert alone[row].tobytes() == together[row].tobytes()
        assert not np.delete(alone, row, axis=0).any()


@pytest.mark.parametrize("sliding_window", [None, 1, 100, 3000])
def test_plan_covers_every_key_once(sliding_window: int | None) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    max_length = 40000
    starts = rng.integers(0, max_length - 4, 12).astype(np.int32)
    starts[:3] = 0, 255, 2047
    lengths = rng.integers(0, 4, 12).astype(np.int32)
    plan = jax.device_get(make_plan(jnp.asarray(starts), jnp.asarray(lengths), max_length, sliding_window))
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
    assert list(plan.num_chunks[items[:, 0]]) == sorted(plan.num_chunks[items[:, 0]], reverse=True)


def test_most_chunks_of_a_row_bound_every_length() -> None:
    lengths = np.arange(1, 300_000, 7, dtype=np.int32)
    chunks = np.asarray(-(-lengths // chunk_size(jnp.asarray(lengths), Tuning.chunks)))
    for max_length in (1, 100, 2048, 2049, 16384, 70000, 290_000):
        assert chunks[lengths <= max_length].max(initial=1) <= max_chunks(max_length, Tuning.chunks)
