"""Rotary position embedding (Su et al. 2021, RoFormer): tables of cos and sin, and the rotation.

Dims i and i + rotary_dim / 2 of a head turn together by position * frequency[i]; dims past `rotary_dim` stay.
The ways of stretching the context change the frequencies, and yarn and longrope also scale cos and sin.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import RopeConfig


def _base_frequencies(rope: RopeConfig) -> np.ndarray:
    """theta ** (-2 i / rotary_dim), radians a token, float64 [rotary_dim / 2]."""
    return rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)


def _llama3_frequencies(rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    frequencies = _base_frequencies(rope)
    original_len = rope.original_max_position_embeddings
    assert original_len is not None
    wavelengths = 2 * math.pi / frequencies
    kept = (original_len / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_frequencies(rope: RopeConfig) -> np.ndarray:
    """Peng et al. 2023 (YaRN), section 3.2: dims that turn often are kept, slow ones stretched, a ramp between."""
    original_len = rope.original_max_position_embeddings
    assert original_len is not None

    def dim_with_rotations(num_rotations: float) -> float:
        """The (real-valued) pair that turns this often over the original length."""
        return rope.rotary_dim * math.log(original_len / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_with_rotations(rope.beta_fast), dim_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp is then a step; avoids 0 / 0
    stretched = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    frequencies = _base_frequencies(rope)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope" and rope.factor > 1:  # Ding et al. 2024 (LongRoPE), as Phi-3 uses it
        assert rope.original_max_position_embeddings is not None
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    if rope.rope_type == "yarn" and rope.factor > 1:
        log_factor = 0.1 * math.log(rope.factor)
        if rope.mscale and rope.mscale_all_dim:  # DeepSeek-V2
            return (rope.mscale * log_factor + 1) / (rope.mscale_all_dim * log_factor + 1)
        return log_factor + 1
    return 1.0


def _frequencies(rope: RopeConfig, seq_lens: jax.Array) -> jax.Array:
    """Radians a token, float32 [T or 1, rotary_dim / 2]. Only dynamic and longrope look at seq_lens [T]."""
    if rope.rope_type == "longrope":
        base = _base_frequencies(rope)
        short = np.asarray(base / np.asarray(rope.short_factor), np.float32)
        long = np.asarray(base / np.asarray(rope.long_factor), np.float32)
        assert rope.original_max_position_embeddings is not None
        return jnp.where(seq_lens[:, None] > rope.original_max_position_embeddings, long, short)
    if rope.rope_type == "dynamic":
        # theta grows with the length (NTK-aware scaling): theta * stretch ** (d / (d - 2)), d = rotary_dim
        excess = jnp.maximum(seq_lens - rope.max_position_embeddings, 0).astype(jnp.float32)
        stretch = 1 + rope.factor / rope.max_position_embeddings * excess
        exponents = np.asarray(-np.arange(0, rope.rotary_dim, 2) / (rope.rotary_dim - 2), np.float32)
        return jnp.asarray(_base_frequencies(rope), jnp.float32) * stretch[:, None] ** exponents
    if rope.rope_type == "linear":
        frequencies = _base_frequencies(rope) / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3_frequencies(rope)
    elif rope.rope_type == "yarn":
        frequencies = _yarn_frequencies(rope)
    else:
        assert rope.rope_type == "default", rope.rope_type
        frequencies = _base_frequencies(rope)
    return jnp.asarray(frequencies, jnp.float32)[None, :]


def rope_tables(rope: RopeConfig, positions: jax.Array, rope_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [T, rotary_dim / 2], for tokens at positions [T].

    Dynamic and longrope take the frequencies of a sequence of max(rope_lens, positions + 1) tokens.
    """
    frequencies = _frequencies(rope, jnp.maximum(rope_lens, positions + 1))
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    scale = attention_factor(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the heads of x [T, ..., H] by the tables' angles; float32 inside, x's dtype out."""
    half = cos.shape[-1]
    over_heads = (slice(None), *(None,) * (x.ndim - 2), slice(None))
    cos, sin = cos[over_heads], sin[over_heads]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + [x[..., 2 * half :]], axis=-1)
