"""What a decoder-only model is, as data: sizes, attention pattern, rope, biases and norms.

`ModelConfig` is what every other package reads. It is made from a Hugging Face `config.json`
(`configs/hf.py`) or from GGUF metadata brought into that form; no module reads those files twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from configs.checks import check_bool, check_choice, check_float, check_int, fail

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
LayerType = Literal["full_attention", "sliding_attention"]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, RoFormer) and the ways of stretching it.

    `max_position_embeddings` is the model's, `original_max_position_embeddings` the length before stretching.
    Fields that a type does not use keep their defaults. Raises ConfigError.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    rotary_dim: int  # dims of each head that turn; head_dim unless partial
    max_position_embeddings: int
    original_max_position_embeddings: int | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None means the type's formula
    mscale: float | None = None  # yarn, DeepSeek
    mscale_all_dim: float | None = None  # yarn, DeepSeek
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, rotary_dim / 2 values
    long_factor: tuple[float, ...] = ()  # longrope

    def __post_init__(self) -> None:
        check_choice(self, "rope_type", ROPE_TYPES)
        check_float(self, "theta", above=0.0)
        check_int(self, "rotary_dim", minimum=2)
        check_int(self, "max_position_embeddings", minimum=1)
        check_int(self, "original_max_position_embeddings", minimum=1, optional=True)
        check_float(self, "factor", above=0.0)
        for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_float(self, field, above=0.0)
        for field in ("attention_factor", "mscale", "mscale_all_dim"):
            check_float(self, field, above=0.0, optional=True)
        check_bool(self, "truncate")
        if self.rotary_dim % 2:
            fail(self, "rotary_dim", "must be even: dims turn in pairs")
        if self.rope_type in ("llama3", "yarn", "longrope") and self.original_max_position_embeddings is None:
            fail(self, "original_max_position_embeddings", f"is required by rope type {self.rope_type}")
        if self.rope_type == "dynamic" and self.rotary_dim == 2:
            fail(self, "rotary_dim", "is too small for rope type dynamic, whose base grows by a power of d / (d - 2)")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            fail(self, "low_freq_factor", f"must be below high_freq_factor={self.high_freq_factor}")
        if self.rope_type == "yarn" and self.theta <= 1.0:
            fail(self, "theta", "must be above 1 for rope type yarn, which divides by its logarithm")
        if self.rope_type == "longrope":
            if self.original_max_position_embeddings == 1:
                fail(self, "original_max_position_embeddings", "must be above 1: longrope divides by its logarithm")
            for field in ("short_factor", "long_factor"):
                factors = getattr(self, field)
                if len(factors) != self.rotary_dim // 2:
                    fail(self, field, f"must hold rotary_dim / 2 = {self.rotary_dim // 2} values")
                if not all(0 < factor < math.inf for factor in factors):
                    fail(self, field, "must hold finite values above 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer with grouped-query attention. Raises ConfigError."""

    architecture: str  # as in config.json "architectures", e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Literal["silu", "gelu_tanh", "gelu"]
    tie_word_embeddings: bool
    attention_scale: float  # scores are q . k times this
    rope: RopeConfig  # full-attention layers (all layers where rope_sliding is None)
    rope_sliding: RopeConfig | None = None  # sliding layers, where they have a base of their own (Gemma 3)
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None  # a query sees itself and the sliding_window - 1 tokens before it
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over head_dim of q and k, before rope
    post_norms: bool = False  # Gemma: a norm after attention and after the MLP, before the residual sum
    norm_weight_offset: float = 0.0  # checkpoints of Gemma store w and multiply by 1 + w; the loader adds this
    embedding_scale: float | None = None  # hidden = embedding * this
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_int(self, field, minimum=1)
        check_float(self, "rms_norm_eps", above=0.0)
        check_choice(self, "activation", ACTIVATIONS)
        check_float(self, "attention_scale", above=0.0)
        check_int(self, "sliding_window", minimum=1, optional=True)
        for field in ("embedding_scale", "attn_logit_softcap", "final_logit_softcap"):
            check_float(self, field, above=0.0, optional=True)
        for field in ("tie_word_embeddings", "qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm", "post_norms"):
            check_bool(self, field)
        for rope_field in ("rope", "rope_sliding"):
            rope = getattr(self, rope_field)
            if rope is not None and rope.rotary_dim > self.head_dim:
                fail(self, rope_field, f"turns more than the head_dim={self.head_dim} dims of a head")
        if self.num_heads % self.num_kv_heads:
            fail(self, "num_kv_heads", f"does not divide num_heads={self.num_heads}")
        if len(self.layer_types) != self.num_layers or any(t not in LAYER_TYPES for t in self.layer_types):
            fail(self, "layer_types", f"must name one of {', '.join(LAYER_TYPES)} for each of {self.num_layers} layers")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            fail(self, "sliding_window", "is required: layer_types has sliding_attention")
