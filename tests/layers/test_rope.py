"""Rope tables against the formulas of the papers, written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from configs.checks import ConfigError
from configs.model import RopeConfig
from layers.rope import attention_factor, rope_tables, rotate

POSITIONS = np.array([0, 1, 2, 17, 63, 64, 65, 200, 999], np.int32)
HALF = 8
PAIR = np.arange(HALF)
BASE = 10000.0 ** (-2 * PAIR / (2 * HALF))


def rope(**fields) -> RopeConfig:
    return RopeConfig(**({"rotary_dim": 2 * HALF, "max_position_embeddings": 256} | fields))


def check_tables(config: RopeConfig, frequencies: np.ndarray, scale: float = 1.0, rope_lens: int = 0) -> None:
    """`frequencies` is [HALF], or [T, HALF] where they depend on the token."""
    cos, sin = rope_tables(config, POSITIONS, np.full(POSITIONS.shape, rope_lens, np.int32))
    angles = POSITIONS[:, None] * frequencies
    # angles up to 1000 radians in float32 are right to 1000 * 2**-23
    np.testing.assert_allclose(cos, scale * np.cos(angles), atol=2.5e-4)
    np.testing.assert_allclose(sin, scale * np.sin(angles), atol=2.5e-4)


def test_default_frequencies_are_powers_of_the_base() -> None:
    check_tables(rope(), BASE)
    check_tables(rope(theta=500.0), 500.0 ** (-PAIR / HALF))


def test_linear_divides_positions() -> None:
    check_tables(rope(rope_type="linear", factor=4.0), BASE / 4)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    config = rope(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
    expected = []
    for frequency in BASE:
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            expected.append(frequency)
        elif wavelength > 64 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert len({round(e / b, 3) for e, b in zip(expected, BASE, strict=True)}) >= 3  # all three bands occur
    check_tables(config, np.array(expected))


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_by_the_number_of_turns_and_scales_cos_and_sin(truncate: bool) -> None:
    config = rope(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=8.0,
        beta_slow=0.5,
        truncate=truncate,
    )
    low, high = (2 * HALF * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (8.0, 0.5))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((PAIR - max(low, 0)) / (min(high, 2 * HALF - 1) - max(low, 0)), 0, 1)
    check_tables(config, BASE * (1 - ramp) + BASE / 4 * ramp, scale=0.1 * math.log(4) + 1)


def test_yarn_scale_is_as_given_or_the_ratio_of_two_mscales() -> None:
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert attention_factor(rope(**yarn, attention_factor=1.7)) == 1.7
    ratio = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * 1.2 * math.log(4) + 1)
    assert attention_factor(rope(**yarn, mscale=0.7, mscale_all_dim=1.2)) == pytest.approx(ratio)
    assert attention_factor(rope(**(yarn | {"factor": 1.0}))) == 1.0


@pytest.mark.parametrize("rope_len", [0, 100, 150])
def test_dynamic_base_grows_with_the_length_past_the_limit(rope_len: int) -> None:
    config = rope(rope_type="dynamic", factor=4.0, max_position_embeddings=96)
    d = 2 * HALF
    length = np.maximum(np.maximum(POSITIONS + 1, rope_len), 96)[:, None]
    base = 10000.0 * (4.0 * length / 96 - 3.0) ** (d / (d - 2))
    check_tables(config, base ** (-2 * PAIR / d), rope_lens=rope_len)


def test_dynamic_is_plain_up_to_the_limit_to_the_bit() -> None:
    config = rope(rope_type="dynamic", factor=4.0, max_position_embeddings=1000)
    lens = np.full(POSITIONS.shape, 1000, np.int32)
    for table, plain in zip(rope_tables(config, POSITIONS, lens), rope_tables(rope(), POSITIONS, lens), strict=True):
        np.testing.assert_array_equal(table, plain)


@pytest.mark.parametrize("rope_len", [0, 64, 65])
def test_longrope_takes_the_long_factors_past_the_original_length(rope_len: int) -> None:
    short, long = tuple(1.0 + PAIR / 10), tuple(2.0 + PAIR)
    config = rope(
        rope_type="longrope", factor=4.0, original_max_position_embeddings=64, short_factor=short, long_factor=long
    )
    is_long = np.maximum(POSITIONS + 1, rope_len)[:, None] > 64
    frequencies = BASE / np.where(is_long, long, short)
    check_tables(config, frequencies, scale=math.sqrt(1 + math.log(4) / math.log(64)), rope_lens=rope_len)


def test_rotation_turns_pairs_and_leaves_the_rest() -> None:
    rng = np.random.default_rng()
    x = rng.standard_normal((len(POSITIONS), 3, 2 * HALF + 4)).astype(np.float32)
    cos, sin = rope_tables(rope(), POSITIONS, POSITIONS)
    turned = np.asarray(rotate(x, cos, sin))
    as_complex = x[..., :HALF] + 1j * x[..., HALF : 2 * HALF]
    expected = as_complex * np.exp(1j * POSITIONS[:, None, None] * BASE)
    np.testing.assert_allclose(turned[..., :HALF], expected.real, atol=1e-3)  # angles as in check_tables
    np.testing.assert_allclose(turned[..., HALF : 2 * HALF], expected.imag, atol=1e-3)
    np.testing.assert_array_equal(turned[..., 2 * HALF :], x[..., 2 * HALF :])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(rotary_dim=7), "rotary_dim"),
        (dict(rope_type="dynamic", rotary_dim=2), "rotary_dim"),
        (dict(rope_type="yarn"), "original_max_position_embeddings"),
        (dict(rope_type="yarn", original_max_position_embeddings=8, theta=1.0), "theta"),
        (dict(rope_type="llama3", original_max_position_embeddings=8, low_freq_factor=4.0), "low_freq_factor"),
        (dict(rope_type="longrope", original_max_position_embeddings=8, short_factor=(1.0,)), "short_factor"),
        (
            dict(
                rope_type="longrope",
                original_max_position_embeddings=8,
                short_factor=(1.0,) * HALF,
                long_factor=(0.0,) * HALF,
            ),
            "long_factor",
        ),
        (dict(attention_factor=-1.0), "attention_factor"),
        (dict(rope_type="spiral"), "rope_type"),
    ],
)
def test_impossible_rope_is_refused_by_field(fields: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"RopeConfig\.{name}"):
        rope(**fields)
