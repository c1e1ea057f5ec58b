"""Paged attention against dense attention in float64 numpy, and the promises that the rest of the engine builds on."""

from __future__ import annotations

import functools
import secrets

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention as reference

CASES = {
    "decode, ragged, an unused row": dict(starts=[0, 300, 17, 0, 129], lengths=[1, 1, 1, 0, 1], num_queries=1),
    "prefill, ragged, chunks that go on": dict(starts=[0, 120, 40], lengths=[16, 9, 1], num_queries=16),
    "window": dict(starts=[0, 200, 33, 0], lengths=[8, 8, 3, 0], num_queries=8, sliding_window=21),
    "window of one token": dict(starts=[5, 0], lengths=[4, 2], num_queries=4, sliding_window=1),
    "softcap and window": dict(starts=[3, 140], lengths=[8, 5], num_queries=8, sliding_window=130, softcap=2.0),
    "pages of one token": dict(starts=[130, 2], lengths=[3, 3], num_queries=3, page_size=1),
    "pages larger than a block": dict(starts=[150, 0], lengths=[4, 0], num_queries=4, page_size=256),
    "one query head a KV head": dict(starts=[12, 131], lengths=[2, 2], num_queries=2, num_groups=1),
    "one KV head, odd sizes": dict(
        starts=[12, 131], lengths=[2, 2], num_queries=2, num_kv_heads=1, num_groups=7, head_dim=10
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_dense_attention_over_the_pages(name: str, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    case = dict(num_kv_heads=2, num_groups=3, head_dim=16, page_size=8, dtype=np.float32) | CASES[name]
    options = dict(scale=0.3, sliding_window=case.pop("sliding_window", None), softcap=case.pop("softcap", None))
    arrays, dense = make_case(np.random.default_rng(seed), **case)
    out = np.asarray(jax.jit(functools.partial(paged_attention, **options))(*arrays))
    for row, (start, length) in enumerate(zip(case["starts"], case["lengths"], strict=True)):
        expected = dense_attention(
            arrays[0][row].astype(np.float64), *np.moveaxis(dense[row], 1, 0), start, length, **options
        )
        # outputs of order 1 from at most 300 float32 terms
        np.testing.assert_allclose(out[row], expected, atol=5e-6)
        assert not out[row, length:].any()  # exact zeros, not NaN


def test_bfloat16_attention_rounds_only_its_ends(make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    starts, lengths = [140, 3], [4, 2]
    arrays, dense = make_case(
        np.random.default_rng(seed),
        starts=starts,
        lengths=lengths,
        num_queries=4,
        num_kv_heads=2,
        num_groups=2,
        head_dim=32,
        page_size=16,
        dtype=ml_dtypes.bfloat16,
    )
    options = dict(scale=0.2, sliding_window=None, softcap=None)
    out = jax.jit(functools.partial(paged_attention, **options))(*arrays)
    assert out.dtype == jnp.bfloat16
    for row in range(2):
        expected = dense_attention(
            arrays[0][row].astype(np.float64), *np.moveaxis(dense[row], 1, 0), starts[row], lengths[row], **options
        )
        # probabilities and result are rounded to 8 bits: two relative errors of 2**-9 of values up to about 3
        np.testing.assert_allclose(np.asarray(out[row], np.float64), expected, atol=3 * 2 * 2**-9)


@pytest.mark.parametrize("block_kv", [1, 40, 1024])
def test_block_size_does_not_change_the_result(block_kv: int, make_case, dense_attention) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    starts, lengths = [0, 90], [5, 8]
    arrays, dense = make_case(
        np.random.default_rng(seed),
        starts=starts,
        lengths=lengths,
        num_queries=8,
        num_kv_heads=2,
        num_groups=2,
        head_dim=8,
        page_size=8,
        dtype=np.float32,
    )
    options = dict(scale=0.3, sliding_window=50, softcap=None)
    out = np.asarray(jax.jit(functools.partial(reference, block_kv=block_kv, **options))(*arrays))
    for row in range(2):
        expected = dense_attention(
            arrays[0][row].astype(np.float64), *np.moveaxis(dense[row], 1, 0), starts[row], lengths[row], **options
        )
        np.testing.assert_allclose(out[row], expected, atol=5e-6)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_row_has_the_same_bits_whatever_the_other_rows_are(sliding_window: int | None, make_case) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    attend = jax.jit(functools.partial(paged_attention, scale=0.3, sliding_window=sliding_window))
    starts, lengths = [137, 0, 700], [4, 2, 3]
    (q, kv_pages, page_table, starts, lengths), _ = make_case(
        rng,
        starts=starts,
        lengths=lengths,
        num_queries=4,
        num_kv_heads=2,
        num_groups=2,
        head_dim=16,
        page_size=8,
        dtype=np.float32,
    )
    alone = np.asarray(attend(q, kv_pages, page_table, starts, lengths * np.array([1, 0, 0], np.int32)))[0]
    beside_long_rows = np.asarray(attend(q, kv_pages, page_table, starts, lengths))[0]
    assert alone.tobytes() == beside_long_rows.tobytes()
    shuffled = np.array([0, 2, 1])
    other = q[shuffled] * np.float32(3)
    other[0] = q[0]
    beside_others = np.asarray(attend(other, kv_pages, page_table[shuffled], starts[shuffled], lengths[shuffled]))[0]
    assert alone.tobytes() == beside_others.tobytes()


def test_attention_reads_a_block_at_a_time_and_copies_no_pool() -> None:
    shapes = [((4, 1, 2, 2, 64), np.float32), ((4096, 2, 16, 2, 64), np.float32), ((4, 512), np.int32)]
    shapes += [((4,), np.int32)] * 2
    abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    memory = jax.jit(functools.partial(paged_attention, scale=1.0)).lower(*abstract).compile().memory_analysis()
    block_bytes = 4 * 128 * 2 * 2 * 64 * 4  # 4 rows of 128 keys and values
    assert memory.temp_size_in_bytes < 4 * block_bytes  # the pool is 64 MiB, four rows of it 16 MiB


def test_unknown_implementation_is_refused_by_name(make_case) -> None:
    arrays, _ = make_case(
        np.random.default_rng(0),
        starts=[0],
        lengths=[1],
        num_queries=1,
        num_kv_heads=1,
        num_groups=1,
        head_dim=8,
        page_size=4,
        dtype=np.float32,
    )
    with pytest.raises(ValueError, match="'cuda_magic'"):
        paged_attention(*arrays, scale=1.0, implementation="cuda_magic")
    with pytest.raises(ValueError, match="lengths must be int32"):
        paged_attention(*arrays[:4], arrays[4].astype(np.int16), scale=1.0)
    with pytest.raises(ValueError, match="must have 1 rows"):
        paged_attention(*arrays[:4], np.zeros(2, np.int32), scale=1.0)
    with pytest.raises(ValueError, match="differ in KV heads or head_dim"):
        paged_attention(arrays[0][..., :4], *arrays[1:], scale=1.0)
