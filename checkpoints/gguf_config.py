"""GGUF metadata -> the `config.json` of the same model, so that `configs.hf` is the one place that reads configs.

What the file does not say follows from the architecture, as in llama.cpp's src/llama-model.cpp: Gemma's layer
pattern, local rope base, soft caps and score scale; a missing output table means tied embeddings. A field of the
architecture that is not known here is refused: it may change what the model computes.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from checkpoints.errors import shown
from checkpoints.gguf_reader import GgufFile

HF_CLASSES = {  # general.architecture -> config.json's "architectures" and "model_type"
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}

COMMON_FIELDS = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
IGNORED_FIELDS = frozenset({"rope.scaling.finetuned"})  # says how the model was trained
NEUTRAL_FIELDS = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # with any other value: refused
GEMMA_FIELDS = frozenset(
    {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope.freq_base_swa",
    }
)
FIELDS = {arch: COMMON_FIELDS | (GEMMA_FIELDS if arch.startswith("gemma") else frozenset()) for arch in HF_CLASSES}

# Layers of one period of the sliding pattern, the last of which sees everything
SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6}
# The 27B models divide scores by sqrt(hidden_size / num_heads), not by sqrt(head_dim); llama.cpp tells them by
# their number of layers
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
GEMMA2_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # where the file has none


class _Fields:
    """Typed access to the fields `{architecture}.*`. Every refusal names the file, the field and the value."""

    def __init__(self, gguf: GgufFile, arch: str) -> None:
        self.gguf = gguf
        self.arch = arch

    def refuse(self, name: str, reason: str) -> NoReturn:
        self.gguf.file.fail(f"field '{self.arch}.{name}': {reason}")

    def get(self, name: str) -> Any:
        return self.gguf.metadata.get(f"{self.arch}.{name}")

    def require(self, name: str, value: Any) -> Any:
        if value is None:
            self.refuse(name, "is missing")
        return value

    def integer(self, name: str) -> int | None:
        """A positive integer; a list of one value for each layer counts where all are equal."""
        value = self.get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is not None and (type(value) is not int or value < 1):
            self.refuse(name, f"must be one positive integer, found {shown(value)}")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            self.refuse(name, f"must be a finite number, found {shown(value)}")
        return value


def architecture(gguf: GgufFile) -> str:
    """general.architecture. Raises CheckpointError if it is not supported, or the file is a part of a set."""
    arch = gguf.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in HF_CLASSES:
        gguf.file.fail(f"field 'general.architecture': {shown(arch)} is not supported; {', '.join(HF_CLASSES)} are")
    parts = gguf.metadata.get("split.count", 0)
    if parts not in (0, 1):
        gguf.file.fail(f"field 'split.count': {shown(parts)}; a model in several GGUF files is not supported")
    return arch


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """The file's model in the layout of config.json. Raises CheckpointError naming the field."""
    arch = architecture(gguf)
    fields = _Fields(gguf, arch)
    _refuse_unknown(fields)

    def size(name: str) -> int:
        return fields.require(name, fields.integer(name))

    hidden_size, num_heads, num_layers = size("embedding_length"), size("attention.head_count"), size("block_count")
    if num_layers > len(gguf.tensors):
        fields.refuse("block_count", f"{num_layers} layers cannot be in {len(gguf.tensors)} tensors")
    head_dim = fields.integer("attention.key_length") or hidden_size // num_heads
    value_dim = fields.integer("attention.value_length") or hidden_size // num_heads
    if value_dim != head_dim:
        fields.refuse("attention.value_length", f"{value_dim} differs from the key heads' {head_dim}")
    rotary_dim = fields.integer("rope.dimension_count") or head_dim
    if rotary_dim != head_dim:
        fields.refuse("rope.dimension_count", f"{rotary_dim} differs from the head size {head_dim}: not supported")

    class_name, model_type = HF_CLASSES[arch]
    token_ids = special_token_ids(gguf)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(fields),
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": fields.require(
            "attention.layer_norm_rms_epsilon", fields.number("attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": _rope_theta(fields),
        "rope_scaling": _rope_scaling(fields, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": token_ids["bos_token_id"],
        "eos_token_id": token_ids["eos_token_id"],
        "pad_token_id": token_ids["pad_token_id"],
    }
    if arch.startswith("gemma"):
        config |= _gemma_fields(fields, config)
    else:
        config["hidden_act"] = "silu"
    if arch == "llama":  # one flag of config.json stands for four, and for three, biases
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    return config


def _refuse_unknown(fields: _Fields) -> None:
    prefix = f"{fields.arch}."
    for key, value in fields.gguf.metadata.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name in NEUTRAL_FIELDS:
            if value != NEUTRAL_FIELDS[name]:
                fields.refuse(name, f"{shown(value)} is not supported; {NEUTRAL_FIELDS[name]} is")
        elif name not in FIELDS[fields.arch] and name not in IGNORED_FIELDS:
            fields.gguf.file.fail(f"field {shown(key)}: is not known for this architecture (value {shown(value)})")


def _vocab_size(fields: _Fields) -> int:
    """Rows of the embedding table, which the file's other counts of the vocabulary must match."""
    table = fields.gguf.tensors.get("token_embd.weight")
    if table is None:
        fields.gguf.file.fail("tensor 'token_embd.weight': is missing")
    num_rows = table.shape[0]
    stated = fields.integer("vocab_size")
    if stated not in (None, num_rows):
        fields.refuse("vocab_size", f"{stated} is not the {num_rows} rows of token_embd.weight")
    tokens = fields.gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != num_rows:
        fields.gguf.file.fail(
            f"field 'tokenizer.ggml.tokens': {len(tokens)} tokens are not the {num_rows} rows of token_embd.weight"
        )
    return num_rows


def _rope_theta(fields: _Fields) -> float:
    theta = fields.number("rope.freq_base")
    return 10000.0 if theta is None else theta


def _rope_scaling(fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type")
    factors = _rope_factors(fields, head_dim)
    if kind in (None, "none"):
        for name in ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            value = fields.get(f"rope.scaling.{name}")
            if value is not None and not (factors and name in ("factor", "original_context_length")):
                fields.refuse(f"rope.scaling.{name}", f"{shown(value)} without a rope.scaling.type")
        return factors
    if factors is not None:
        fields.gguf.file.fail(f"tensor 'rope_freqs.weight': together with rope scaling {shown(kind)} is not supported")
    if kind not in ("linear", "yarn"):
        fields.refuse("rope.scaling.type", f"{shown(kind)} is not supported; none, linear and yarn are")
    factor = fields.require("rope.scaling.factor", fields.number("rope.scaling.factor"))
    if factor <= 0:
        fields.refuse("rope.scaling.factor", f"must be above 0, found {factor}")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    attn_factor = fields.number("rope.scaling.attn_factor")
    if kind == "linear":
        if attn_factor not in (None, 1.0):
            fields.refuse("rope.scaling.attn_factor", f"{attn_factor} with linear scaling is not supported")
        return scaling
    original = fields.integer("rope.scaling.original_context_length")
    scaling["original_max_position_embeddings"] = fields.require("rope.scaling.original_context_length", original)
    for name, key in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        value = fields.number(f"rope.scaling.{name}")
        if value is not None:
            scaling[key] = value
    if attn_factor is not None:  # llama.cpp's multiplies the formula's, config.json's replaces it
        scaling["attention_factor"] = attn_factor * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return scaling


def _rope_factors(fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    """The tensor rope_freqs.weight, by which Llama 3.1 and later have each frequency divided.

    The file does not say from which parameters of rope type llama3 the factors come. longrope with the same factors
    at every length is the same rotation, to the bit.
    """
    tensor = fields.gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        fields.gguf.file.fail(f"{tensor.where}: shape {list(tensor.shape)} is not [{head_dim // 2}], half a head")
    factors = tensor.read_rows(0, head_dim // 2, 0, 1).astype(np.float32).ravel().tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        fields.gguf.file.fail(f"{tensor.where}: must hold finite numbers above 0, found {shown(factors)}")
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": fields.integer("context_length"),
    }


def _gemma_fields(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    arch, num_layers = fields.arch, config["num_hidden_layers"]
    is_27b = num_layers == LAYERS_OF_27B[arch]
    window = fields.require("attention.sliding_window", fields.integer("attention.sliding_window"))
    result: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        ),
        "sliding_window": window,
        "layer_types": _layer_types(fields, num_layers),
    }
    local_theta = fields.number("rope.freq_base_swa")
    for name in GEMMA2_SOFTCAPS:
        value = fields.number(name)
        if value is None and arch == "gemma2":
            value = GEMMA2_SOFTCAPS[name]
        if value is not None:
            result[name] = value
    if arch == "gemma3":
        result["rope_local_base_freq"] = 10000.0 if local_theta is None else local_theta
    elif local_theta is not None:
        fields.refuse("rope.freq_base_swa", f"{local_theta}: Gemma 2 has one rope base")
    return result


def _layer_types(fields: _Fields, num_layers: int) -> list[str]:
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(type(is_sliding) is bool for is_sliding in pattern):
            fields.refuse(
                "attention.sliding_window_pattern",
                f"must be {num_layers} booleans or one integer, found {shown(pattern)}",
            )
        is_sliding = pattern
    else:
        period = fields.integer("attention.sliding_window_pattern") or SLIDING_PATTERN[fields.arch]
        is_sliding = [i % period < period - 1 for i in range(num_layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]


def special_token_ids(gguf: GgufFile) -> dict[str, Any]:
    """bos, eos and pad as generation_config.json has them; eos is a list where the file also has an end-of-turn."""
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "padding", "eot"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = gguf.metadata.get(key)
        if value is not None and (type(value) is not int or value < 0):
            gguf.file.fail(f"field '{key}': must be a token id, found {shown(value)}")
        ids[name] = value
    ends = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    eos = list(dict.fromkeys(ends))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": ids["padding"],
    }
