"""The TPU kernel in interpret mode on CPU, against dense attention in float64."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_page_write import write_kv
from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.paged_attention.mosaic_tpu import Tuning, default_tuning, supports

# probabilities and the result are rounded to 8 bits: two relative errors of 2**-8 of values up to about 3
BF16_ATOL = 3 * 2 * 2**-8
JOINT = Tuning(block_q=1, block_kv=256, block_compute=128, is_joint=True)
BY_HEAD = Tuning(block_q=2, block_kv=256, block_compute=128, is_joint=False)

# Several blocks of keys, and turns in them, in the long rows; an unused row between used ones and at the end.
CASES = {
    "joint: decode, ragged, unused rows": dict(starts=[0, 600, 0, 17, 255, 0], lengths=[1, 1, 0, 1, 1, 0]),
    "joint: soft cap, window, sinks, pages of 128": dict(
        starts=[400, 5, 513], lengths=[1, 1, 1], page_size=128, softcap=2.0, sliding_window=140, sinks=True
    ),
    "joint: several queries, 7 groups": dict(
        starts=[270, 0], lengths=[3, 1], num_queries=3, num_groups=7, tuning=dataclasses.replace(JOINT, block_q=3)
    ),
    "by head: blocks of queries, some unused": dict(
        starts=[300, 0, 2], lengths=[5, 0, 3], num_queries=5, tuning=BY_HEAD, num_groups=3
    ),
    "by head: soft cap, window, sinks": dict(
        starts=[300, 7], lengths=[4, 2], num_queries=4, softcap=2.0, sliding_window=66, sinks=True, tuning=BY_HEAD
    ),
    "by head: 3 heads, which lie head by head": dict(
        starts=[140, 0], lengths=[2, 1], num_queries=2, num_kv_heads=3, num_groups=2, tuning=BY_HEAD
    ),
    "head_dim 64": dict(starts=[150], lengths=[2], num_queries=2, head_dim=64, tuning=BY_HEAD),
    "head_dim 80, one group": dict(starts=[150], lengths=[1], head_dim=80, num_groups=1),
    "head_dim 256, one head, default blocks": dict(
        starts=[200, 3], lengths=[2, 2], num_queries=2, head_dim=256, num_kv_heads=1, tuning=None
    ),
    "float32, default blocks": dict(starts=[200, 31], lengths=[1, 1], dtype=np.float32, tuning=None),
}

QUANTISED_CASES = {
    "fp8, joint, scales a tensor": (jnp.float8_e4m3fn, "tensor", dict(num_kv_heads=4)),
    "int8, 2 heads that lie head by head, scales a tensor": (
        jnp.int8,
        "tensor",
        dict(num_kv_heads=2, num_queries=2, tuning=BY_HEAD),
    ),
    "int8, scales a token, pages of 128": (jnp.int8, "token", dict(page_size=128, num_queries=2, tuning=BY_HEAD)),
    "fp8, scales a token, pages of 16": (jnp.float8_e4m3fn, "token", dict(num_queries=2, num_kv_heads=4, tuning=None)),
}


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    yield
    pltpu.reset_tpu_interpret_mode_state()


def interpreted(arrays, *, detect_races: bool = False, **options) -> np.ndarray:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=detect_races)):
        return np.asarray(mosaic_tpu.paged_attention(*arrays, **options))


def with_sink(dense_attention, q, k, v, start, length, sinks, **options) -> np.ndarray:
    """A sink is a key of its own whose value is 0: with s of the scores' log-sum-exp, a sigmoid of s - sink."""
    out = dense_attention(q, k, v, start, length, **options)
    if sinks is None:
        return out
    scale, window, softcap = options["scale"], options["sliding_window"], options["softcap"]
    for i in range(length):
        first = 0 if window is None else max(0, start + i - window + 1)
        scores = np.einsum("kgh,skh->kgs", q[i], k[first : start + i + 1]) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        out[i] /= (1 + np.exp(sinks - np.log(np.exp(scores).sum(-1))))[..., None]
    return out


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_dense_attention_over_the_pages(name: str, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    case = (
        dict(num_queries=1, num_kv_heads=2, num_groups=4, head_dim=128, page_size=16, dtype=ml_dtypes.bfloat16)
        | dict(tuning=JOINT, sinks=False, softcap=None, sliding_window=None)
        | CASES[name]
    )
    options = dict(scale=0.2, sliding_window=case.pop("sliding_window"), softcap=case.pop("softcap"))
    tuning, has_sinks = case.pop("tuning"), case.pop("sinks")
    arrays, dense = make_case(rng, **case, finite_tails=True)
    sinks = rng.standard_normal((case["num_kv_heads"], case["num_groups"])).astype(np.float32) if has_sinks else None
    out = interpreted((*arrays, None, sinks), tuning=tuning, **options)
    for row, (start, length) in enumerate(zip(case["starts"], case["lengths"], strict=True)):
        kv = np.moveaxis(dense[row], 1, 0)
        expected = with_sink(dense_attention, arrays[0][row].astype(np.float64), *kv, start, length, sinks, **options)
        # float32: outputs of order 1 from at most 300 terms
        atol = 5e-6 if case["dtype"] == np.float32 else BF16_ATOL
        np.testing.assert_allclose(out[row].astype(np.float64), expected, atol=atol)
        assert not out[row, length:].any()  # exact zeros, not NaN


@pytest.mark.parametrize("name", QUANTISED_CASES)
def test_quantised_pages_are_their_values_times_their_scales(name: str, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    kv_dtype, kind, changed = QUANTISED_CASES[name]
    case = dict(num_queries=1, num_kv_heads=2, num_groups=2, head_dim=128, page_size=16, tuning=JOINT) | changed
    tuning = case.pop("tuning")
    starts, lengths = [300, 0, 13], [1, 0, 1]
    arrays, dense = make_case(rng, starts=starts, lengths=lengths, **case, dtype=ml_dtypes.bfloat16, finite_tails=True)
    q, page_table = arrays[0], arrays[2]
    num_pages, _, page_size, num_kv_heads, head_dim = arrays[1].shape
    poison = 127 if kv_dtype == jnp.int8 else np.nan
    pool = jnp.full(arrays[1].shape, poison, kv_dtype)
    if kind == "tensor":
        scales = jnp.asarray([0.03, 0.02], jnp.float32)
    else:
        scales = jnp.full((num_pages, 2, num_kv_heads, page_size), np.nan, jnp.float32)
    for row, kv in enumerate(dense):
        # every place of the row's pages is written, those past its end too
        num_places = -(-len(kv) // page_size) * page_size
        places = np.arange(num_places)
        kv_indices = page_table[row, places // page_size] * page_size + places % page_size
        padded = np.zeros((num_places, *kv.shape[1:]), np.float32)
        padded[: len(kv)] = kv
        pool, scales = write_kv(pool, padded[:, 0], padded[:, 1], jnp.asarray(kv_indices, jnp.int32), scales)
    assert supports(q, pool, scales)
    options = dict(scale=0.2, sliding_window=None, softcap=None)
    out = interpreted((q, pool, *arrays[2:], scales), tuning=tuning, **options)
    values, scales = np.asarray(pool, np.float64), np.asarray(scales, np.float64)
    if kind == "tensor":
        values *= scales[:, None, None, None]
    else:
        values *= np.moveaxis(scales, 3, 2)[..., None]
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        kv = np.moveaxis(values[page_table[row]], 1, 0).reshape(2, -1, num_kv_heads, head_dim)
        expected = dense_attention(q[row].astype(np.float64), *kv[:, : start + length], start, length, **options)
        np.testing.assert_allclose(out[row].astype(np.float64), expected, atol=BF16_ATOL)
        assert not out[row, length:].any()


@pytest.mark.parametrize("tuning", [JOINT, dataclasses.replace(BY_HEAD, block_q=1)])
def test_no_race_and_the_same_bits_alone_and_among_others(tuning: Tuning, make_case, capfd) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    arrays, _ = make_case(
        np.random.default_rng(seed),
        starts=[330, 40, 519],
        lengths=[1, 1, 1],
        num_queries=1,
        num_kv_heads=2,
        num_groups=4,
        head_dim=128,
        page_size=16,
        dtype=ml_dtypes.bfloat16,
        finite_tails=True,
    )
    together = interpreted(arrays, scale=0.2, tuning=tuning, detect_races=True)
    assert "RACE" not in capfd.readouterr().out  # the detector prints, and raises nothing
    for row in range(3):
        only = np.zeros(3, np.int32)
        only[row] = 1
        alone = interpreted((*arrays[:4], only), scale=0.2, tuning=tuning, detect_races=True)
        assert alone[row].tobytes() == together[row].tobytes()
        assert not np.delete(alone, row, axis=0).any()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize(("num_queries", "num_groups"), [(1, 4), (1, 8), (4, 7), (32, 4), (2048, 8), (512, 1)])
@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (256, 128)])
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.int8])
def test_default_blocks_fit_their_pages_and_memory(
    num_kv_heads, num_queries, num_groups, head_dim, page_size, kv_dtype
) -> None:
    q = jax.ShapeDtypeStruct((4, num_queries, num_kv_heads, num_groups, head_dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((9, 2, page_size, num_kv_heads, head_dim), kv_dtype)
    tuning = default_tuning(q, pages)
    assert Tuning(**json.loads(json.dumps(dataclasses.asdict(tuning)))) == tuning
    assert tuning.block_kv % tuning.block_compute == tuning.block_compute % 128 == tuning.block_kv % page_size == 0
    assert not tuning.is_joint or tuning.block_q == num_queries
    rows = num_kv_heads * tuning.block_q * num_groups
    buffer_bytes = 2 * 2 * tuning.block_kv * num_kv_heads * head_dim * pages.dtype.itemsize
    query_bytes = rows * (head_dim * (2 * 2 + 2 * 2 + 4) + 2 * 128 * 4)  # q and result twice, sums, maxima, totals
    assert buffer_bytes + query_bytes < 20 * 2**20


def test_shapes_that_would_copy_the_pool_are_refused() -> None:
    def taken(head_dim: int, page_size: int, dtype=jnp.bfloat16) -> bool:
        q = jax.ShapeDtypeStruct((4, 1, 2, 4, head_dim), dtype)
        return supports(q, jax.ShapeDtypeStruct((9, 2, page_size, 2, head_dim), dtype))

    assert all(taken(head_dim, page_size) for head_dim in (128, 256) for page_size in (16, 32, 64, 128, 256))
    assert taken(128, 16, jnp.float32)
    assert not any(taken(head_dim, 16) for head_dim in (64, 80, 96))
    assert not any(taken(128, page_size) for page_size in (8, 48)) and not taken(128, 16, jnp.float16)
