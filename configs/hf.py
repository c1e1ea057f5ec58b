"""Hugging Face `config.json` -> ModelConfig. The only module that knows that file's fields.

Both layouts of rope are read: `rope_parameters` (transformers 5; for Gemma 3 one for each layer type) and
`rope_theta` beside `rope_scaling`. An absent field takes the default that the architecture's class has in
transformers 5.24. Whatever this project cannot compute as written is refused with the field and its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from configs.checks import ConfigError
from configs.model import ROPE_TYPES, LayerType, ModelConfig, RopeConfig, RopeType

MAX_SIZE = 2**31 - 1
MAX_NUM_LAYERS = 4096  # more is a broken file; bounds what is built from it

ACTIVATION_OF = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields of other architectures or options that would change the result: only these values can be served.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "attention_multiplier": (None,),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1.0),
    "rope_interleave": (None, False),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
}

# The fields of each rope type; those in the second tuple may be absent.
ROPE_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
}
ROPE_COMMON_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """What distinguishes one class of transformers. `defaults` are those of its configuration class."""

    model_type: str
    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None  # None: as attention_bias says
    has_attention_bias: bool = False  # attention_bias is a field, and gives the output projection a bias too
    has_mlp_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False  # norm weights are w of 1 + w, post norms, scaled embedding, own score scale
    has_softcaps: bool = False
    has_partial_rotary: bool = False
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_NO_SOFTCAPS = {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}
_NO_WINDOW = {"sliding_window": (None,)}
_NO_QK_NORM = {"use_qk_norm": (None, False), "qk_layernorm": (None, False)}
_NO_BIASES = {"attention_bias": (None, False), "mlp_bias": (None, False)}

_COMMON_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attention_bias": False,
}
_LLAMA_DEFAULTS = _COMMON_DEFAULTS | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = _COMMON_DEFAULTS | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_PHI3_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "sliding_window": None,
}
_GEMMA_DEFAULTS = _COMMON_DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}

ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture(
        model_type="llama",
        defaults=_LLAMA_DEFAULTS,
        has_attention_bias=True,
        has_mlp_bias=True,
        neutral=_NO_SOFTCAPS | _NO_WINDOW | _NO_QK_NORM,
    ),
    "MistralForCausalLM": _Architecture(
        model_type="mistral",
        defaults=_MISTRAL_DEFAULTS,
        qkv_bias=False,
        neutral=_NO_SOFTCAPS | _NO_QK_NORM | _NO_BIASES,
    ),
    "Qwen2ForCausalLM": _Architecture(
        model_type="qwen2", defaults=_QWEN_DEFAULTS, qkv_bias=True, neutral=_NO_SOFTCAPS | _NO_QK_NORM
    ),
    "Qwen3ForCausalLM": _Architecture(
        model_type="qwen3",
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        has_attention_bias=True,
        qk_norm=True,
        neutral=_NO_SOFTCAPS,
    ),
    "Phi3ForCausalLM": _Architecture(
        model_type="phi3",
        defaults=_PHI3_DEFAULTS,
        qkv_bias=False,
        has_partial_rotary=True,
        neutral=_NO_SOFTCAPS | _NO_QK_NORM | _NO_BIASES,
    ),
    "Gemma2ForCausalLM": _Architecture(
        model_type="gemma2", defaults=_GEMMA_DEFAULTS, has_attention_bias=True, is_gemma=True, has_softcaps=True
    ),
    "Gemma3ForCausalLM": _Architecture(
        model_type="gemma3_text",
        defaults=_GEMMA3_DEFAULTS,
        has_attention_bias=True,
        qk_norm=True,
        is_gemma=True,
        has_softcaps=True,
    ),
}
GEMMA3_WITH_VISION = "Gemma3ForConditionalGeneration"  # its text model is served


def _is_number(value: object) -> bool:
    """Whether `value` is a number above 0 that a float holds (JSON has integers of any size)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Fields:
    """Typed access to the fields of one JSON object, with defaults. Every refusal names the field and its value."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""):
        self.values = values
        self.defaults = defaults
        self.prefix = prefix

    def refuse(self, name: str, reason: str) -> ConfigError:
        return ConfigError(f"config.json: field '{self.prefix}{name}' = {_shown(self.get(name))} {reason}")

    def get(self, name: str) -> Any:
        return self.values.get(name, self.defaults.get(name))

    def integer(self, name: str, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, "must be an integer")
        if not minimum <= value <= maximum:
            raise self.refuse(name, f"must be in [{minimum}, {maximum}]")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        value = self.get(name)
        if not _is_number(value):
            raise self.refuse(name, "must be a finite number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.refuse(name, "must be true or false")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.refuse(name, "must be a list of numbers")
        for number in value:
            if not _is_number(number):
                raise self.refuse(name, f"must hold finite numbers above 0, not {_shown(number)}")
        return tuple(float(number) for number in value)

    def optional_object(self, name: str) -> Mapping[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, "must be an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids or null."""
        value = self.get(name)
        ids = (value,) if isinstance(value, int) else () if value is None else value
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise self.refuse(name, "must be a token id or a list of them")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= MAX_SIZE:
                raise self.refuse(name, f"must hold token ids, not {_shown(token_id)}")
        return tuple(ids)

    def optional_token_id(self, name: str) -> int | None:
        ids = self.token_ids(name)
        if len(ids) > 1:
            raise self.refuse(name, "must be one token id")
        return ids[0] if ids else None

    def refuse_unless(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        for name, allowed in neutral.items():
            if name in self.values and self.values[name] not in allowed:
                raise self.refuse(name, "is not supported")


def _architecture_name(config: Mapping[str, Any]) -> str:
    """The class name, from `architectures` or else from `model_type`. Raises ConfigError."""
    fields = _Fields(config, {})
    names = fields.get("architectures")
    of_model_type = {architecture.model_type: name for name, architecture in ARCHITECTURES.items()}
    of_model_type["gemma3"] = GEMMA3_WITH_VISION
    model_type = fields.get("model_type")
    if names is None:
        if not isinstance(model_type, str) or model_type not in of_model_type:
            raise fields.refuse("model_type", f"is not supported; {', '.join(of_model_type)} are")
        return of_model_type[model_type]
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != 1:
        raise fields.refuse("architectures", "must be a list of one class name")
    if names[0] not in (*ARCHITECTURES, GEMMA3_WITH_VISION):
        raise fields.refuse("architectures", f"is not supported; {', '.join(of_model_type.values())} are")
    if model_type is not None and of_model_type.get(str(model_type)) != names[0]:
        raise fields.refuse("model_type", f"contradicts architectures={names}")
    return str(names[0])


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model of a Gemma 3 with vision, with what the outer object says about the whole model."""
    fields = _Fields(config, {})
    text = fields.optional_object("text_config")
    if text is None:
        raise fields.refuse("text_config", "is missing")
    outer = {
        name: config[name]
        for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
        if config.get(name) is not None
    }
    return {**text, **outer}


def _rope(
    fields: _Fields,
    params: Mapping[str, Any],
    prefix: str,
    *,
    architecture: _Architecture,
    theta_field: str,
    head_dim: int,
) -> RopeConfig:
    """One rope from its object (`rope_parameters`, or `rope_scaling`) and the fields beside it. Raises ConfigError."""
    max_len = fields.integer("max_position_embeddings")
    rope = _Fields(params, {}, prefix)

    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("type") not in (None, rope_type):
        raise rope.refuse("type", f"contradicts rope_type={_shown(rope_type)}")
    if architecture.model_type == "phi3" and rope_type in ("su", "yarn"):
        rope_type = "longrope"  # as early Phi-3 files call it
    if rope_type not in ROPE_TYPES:
        raise rope.refuse("rope_type", f"is not supported: {_shown(rope_type)}; {', '.join(ROPE_TYPES)} are")
    required, optional = ROPE_FIELDS[rope_type]
    for name in required:
        if rope.get(name) is None:
            raise rope.refuse(name, f"is required by rope type {rope_type}")
    for name, value in params.items():
        if value is not None and name not in (*ROPE_COMMON_FIELDS, *required, *optional):
            raise rope.refuse(name, f"is not supported with rope type {rope_type}")

    def beside(name: str, outer_name: str) -> _Fields:
        """Where a value is that may stand inside the object or beside it; both must then be equal."""
        if rope.get(name) is None:
            return fields
        if fields.values.get(outer_name) not in (None, rope.get(name)):
            raise rope.refuse(name, f"contradicts {outer_name}={_shown(fields.get(outer_name))}")
        return rope

    theta_fields = beside("rope_theta", theta_field)
    theta = theta_fields.number("rope_theta" if theta_fields is rope else theta_field)

    partial_fields = beside("partial_rotary_factor", "partial_rotary_factor")
    partial = partial_fields.optional_number("partial_rotary_factor")
    partial = 1.0 if partial is None else partial
    if partial > 1.0 or (partial < 1.0 and not architecture.has_partial_rotary):
        raise partial_fields.refuse("partial_rotary_factor", "is not supported for this architecture")

    values: dict[str, Any] = {}
    original_len: int | None = None
    if "original_max_position_embeddings" in optional:
        # beside the object it takes precedence in transformers, which beside() makes irrelevant: both are equal
        holder = beside("original_max_position_embeddings", "original_max_position_embeddings")
        original_len = holder.optional_integer("original_max_position_embeddings") or max_len
        values["original_max_position_embeddings"] = original_len
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
        if rope.get(name) is not None:
            values[name] = rope.number(name)
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name):  # 0 means absent, as in transformers
            values[name] = rope.number(name)
    for name in ("short_factor", "long_factor"):
        if rope.get(name) is not None:
            values[name] = rope.numbers(name)
    if rope.get("truncate") is not None:
        values["truncate"] = rope.boolean("truncate")
    if original_len is not None and "factor" not in values:
        values["factor"] = max_len / original_len
    return RopeConfig(
        rope_type=cast(RopeType, rope_type),
        theta=theta,
        rotary_dim=int(head_dim * partial),
        max_position_embeddings=max_len,
        **values,
    )


def _rope_object(fields: _Fields) -> tuple[Mapping[str, Any], str]:
    """The object that describes rope, with its prefix: `rope_parameters` of the new layout or `rope_scaling`."""
    new, old = fields.optional_object("rope_parameters"), fields.optional_object("rope_scaling")
    if new and old:
        raise fields.refuse("rope_scaling", "contradicts rope_parameters: give one of them")
    return (new, "rope_parameters.") if new else (old or {}, "rope_scaling.")


def _ropes(fields: _Fields, architecture: _Architecture, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """(full layers, sliding layers where they have their own). Raises ConfigError."""
    params, prefix = _rope_object(fields)
    nested = {"full_attention", "sliding_attention"} & params.keys()

    def rope(params: Mapping[str, Any], prefix: str, theta_field: str) -> RopeConfig:
        return _rope(fields, params, prefix, architecture=architecture, theta_field=theta_field, head_dim=head_dim)

    if architecture.model_type != "gemma3_text":
        if nested:
            raise _Fields(params, {}, prefix).refuse(min(nested), "is not supported: this architecture has one rope")
        return rope(params, prefix, "rope_theta"), None
    if prefix == "rope_scaling.":  # the old layout stretches full layers only
        return rope(params, prefix, "rope_theta"), rope({}, prefix, "rope_local_base_freq")
    inner = _Fields(params, {}, prefix)
    for name in params:
        if name not in nested:
            raise inner.refuse(name, "is not supported: Gemma 3 has one object for each layer type")
    full, sliding = inner.optional_object("full_attention"), inner.optional_object("sliding_attention")
    return (
        rope(full or {}, f"{prefix}full_attention.", "rope_theta"),
        rope(sliding or {}, f"{prefix}sliding_attention.", "rope_local_base_freq"),
    )


def _layer_types(fields: _Fields, architecture: _Architecture) -> tuple[tuple[LayerType, ...], int | None]:
    """(type of each layer, sliding window or None). Raises ConfigError."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_NUM_LAYERS)
    window = fields.optional_integer("sliding_window")
    is_qwen = "use_sliding_window" in architecture.defaults
    if is_qwen and not fields.boolean("use_sliding_window"):
        window = None

    def has_window(layer: int) -> bool:
        if architecture.is_gemma:
            pattern = 2  # Gemma 2: every other layer, the first one sliding
            if "sliding_window_pattern" in architecture.defaults:
                pattern = fields.integer("sliding_window_pattern")
            return (layer + 1) % pattern != 0
        return window is not None and (not is_qwen or layer >= fields.integer("max_window_layers", minimum=0))

    derived: tuple[LayerType, ...] = tuple(
        "sliding_attention" if has_window(layer) else "full_attention" for layer in range(num_layers)
    )
    given = fields.get("layer_types")
    if given is None:
        return derived, window
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != num_layers:
        raise fields.refuse("layer_types", f"must be a list of num_hidden_layers={num_layers} names")
    for name in given:
        if name not in ("full_attention", "sliding_attention"):
            raise fields.refuse("layer_types", f"must hold full_attention and sliding_attention, not {_shown(name)}")
    layer_types: tuple[LayerType, ...] = tuple(given)
    if not (is_qwen or architecture.is_gemma) and layer_types != derived:
        raise fields.refuse("layer_types", f"contradicts sliding_window={window}, which holds for all layers")
    if "sliding_attention" in layer_types and window is None:
        raise fields.refuse("layer_types", "has sliding_attention, but no sliding window is in effect")
    return layer_types, window


def _usable_length(rope: RopeConfig) -> int:
    """Tokens that the model is good for. Dynamic and yarn ropes stretch `max_position_embeddings` by their factor
    where the file gives the length before stretching; the other types' files give the length after it."""
    length = rope.max_position_embeddings
    if rope.rope_type == "dynamic":
        return max(length, int(length * rope.factor))
    if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
        return max(length, int(rope.original_max_position_embeddings * rope.factor))
    return length


def _activation(fields: _Fields, architecture: _Architecture) -> Any:
    name = "hidden_activation" if architecture.is_gemma else "hidden_act"
    other = "hidden_act" if architecture.is_gemma else "hidden_activation"
    value = fields.get(name)
    if not isinstance(value, str) or value not in ACTIVATION_OF:
        raise fields.refuse(name, f"is not supported; {', '.join(ACTIVATION_OF)} are")
    activation = ACTIVATION_OF[value]
    stated_elsewhere = fields.values.get(other)
    if stated_elsewhere is not None and ACTIVATION_OF.get(str(stated_elsewhere)) != activation:
        raise fields.refuse(other, f"contradicts {name}={value!r}")
    return activation


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed `config.json`.

    Raises ConfigError with field and value for an architecture, rope type, activation, quantisation or option that
    is not supported, a value of a wrong type or out of range, and two fields that contradict each other.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json must hold an object, got {_shown(config)}")
    name = _architecture_name(config)
    if name == GEMMA3_WITH_VISION:
        config, name = _text_config(config), "Gemma3ForCausalLM"
    architecture = ARCHITECTURES[name]
    fields = _Fields(config, architecture.defaults)
    fields.refuse_unless(NEUTRAL_VALUES)
    fields.refuse_unless(architecture.neutral)

    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.refuse("hidden_size", f"does not divide by num_attention_heads={num_heads}, without head_dim")
        head_dim = hidden_size // num_heads
    layer_types, sliding_window = _layer_types(fields, architecture)
    rope, rope_sliding = _ropes(fields, architecture, head_dim)
    attention_bias = architecture.has_attention_bias and fields.boolean("attention_bias")
    return ModelConfig(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=len(layer_types),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_usable_length(rope),
        rms_norm_eps=fields.number("rms_norm_eps"),
        activation=_activation(fields, architecture),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        attention_scale=(fields.number("query_pre_attn_scalar") if architecture.is_gemma else head_dim) ** -0.5,
        rope=rope,
        rope_sliding=rope_sliding,
        layer_types=layer_types,
        sliding_window=sliding_window,
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        attention_out_bias=attention_bias,
        mlp_bias=architecture.has_mlp_bias and fields.boolean("mlp_bias"),
        qk_norm=architecture.qk_norm,
        post_norms=architecture.is_gemma,
        norm_weight_offset=1.0 if architecture.is_gemma else 0.0,
        embedding_scale=hidden_size**0.5 if architecture.is_gemma else None,
        attn_logit_softcap=fields.optional_number("attn_logit_softcapping") if architecture.has_softcaps else None,
        final_logit_softcap=fields.optional_number("final_logit_softcapping") if architecture.has_softcaps else None,
        bos_token_id=fields.optional_token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        # Llama 1 files hold -1 for none
        pad_token_id=None if fields.get("pad_token_id") == -1 else fields.optional_token_id("pad_token_id"),
    )
