"""Bytes and FLOPs of the benchmark's work, against sums taken one query at a time and a model counted by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest

from serving.bench.figures import Ceilings, ModelCost, keys_seen, percentiles, significant

LLAMA_8B = ModelCost(
    weight_bytes=15_010_914_304,  # Llama-3.1-8B, bfloat16 with 65 float32 norms of 4,096, without the input embedding
    kv_token_bytes=2 * 8 * 128 * 2,
    windows=(None,) * 32,
    layer_params=6_979_321_856,  # 32 x (4096 x 6144 + 4096 x 4096 + 3 x 4096 x 14336)
    head_params=128_256 * 4096,
    num_heads=32,
    head_dim=128,
)
CEILINGS = Ceilings(
    device_kind="a card",
    platform="gpu",
    read_bytes=2**31,
    read_bytes_per_s=4.3e12,
    matmul_size=8192,
    matmul_dtype="bfloat16",
    matmul_flops_per_s=790e12,
)


def test_keys_seen_is_the_sum_over_queries():
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(300):
        first, num_queries = int(rng.integers(1, 40)), int(rng.integers(0, 40))
        window = None if rng.random() < 0.3 else int(rng.integers(1, 60))
        expected = sum(min(first + i, window or 10**9) for i in range(num_queries))
        assert keys_seen(first, num_queries, window) == expected, (first, num_queries, window)


@pytest.mark.parametrize(
    ("batch", "context", "floor_ms"),
    # computed independently: (bytes of the checkpoint's tensors + KV at the mean context) over 4.3 TB/s
    [(1, 1024, 3.52), (8, 1024, 3.76), (32, 1024, 4.55), (128, 1024, 7.74), (256, 1024, 11.98), (128, 4096, 19.72)],
)
def test_decode_bytes_give_the_published_floors(batch, context, floor_ms):
    num_bytes, _ = LLAMA_8B.decode_step(batch, context, 128)
    assert num_bytes / 4.3e12 * 1e3 == pytest.approx(floor_ms, rel=0.005)
    mean_keys = context + 64.5  # step i of 1 to 128 sees context + i
    assert num_bytes == pytest.approx(LLAMA_8B.weight_bytes + batch * mean_keys * 131_072)


def test_decode_flops_are_two_a_parameter_and_four_a_pair_and_channel():
    _, flops = LLAMA_8B.decode_step(4, 1000, 1)
    params = LLAMA_8B.layer_params + LLAMA_8B.head_params
    assert flops == 4 * (2 * params + 4 * 128 * 32 * 32 * 1001)


def test_prefill_flops_count_the_output_product_once_a_prompt():
    num_bytes, flops = LLAMA_8B.generate([(4096, 1)] * 2, num_passes=4)
    pairs = 4096 * 4097 // 2 * 32
    assert flops == 2 * (2 * 4096 * LLAMA_8B.layer_params + 2 * LLAMA_8B.head_params + 4 * 128 * 32 * pairs)
    assert num_bytes == 4 * LLAMA_8B.weight_bytes


def test_generated_tokens_read_the_keys_before_them():
    num_bytes, flops = LLAMA_8B.generate([(10, 3)], num_passes=3)
    assert num_bytes == 3 * LLAMA_8B.weight_bytes + (11 + 12) * 131_072
    one_by_one = [LLAMA_8B.decode_step(1, 10, 1)[1], LLAMA_8B.decode_step(1, 11, 1)[1]]
    assert flops == LLAMA_8B.generate([(10, 1)], num_passes=1)[1] + sum(one_by_one)


def test_rates_are_shares_of_the_ceilings_of_all_devices():
    rates = CEILINGS.rates(2.0, num_bytes=4.3e12, flops=790e12 * 2, num_devices=2)
    assert rates["tb_per_s"] == 2.15 and rates["mbu"] == 0.5
    assert rates["tflop_per_s"] == 790.0 and rates["mfu"] == 0.5


def test_small_figures_keep_their_digits():
    assert significant(1.23456e-7) == 1.235e-7
    assert percentiles("ms", [1.0, 2.0, 3.0]) == {"ms_p50": 2.0, "ms_p99": 2.98}
