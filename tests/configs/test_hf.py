"""config.json of both layouts -> ModelConfig: what is read, which defaults hold, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from configs.checks import ConfigError
from configs.hf import model_config_from_hf

ARCH = Path(__file__).parent.parent / "data" / "arch"
SUPPORTED = [
    "gemma2",
    "gemma3",
    "llama_bias",
    "llama_dynamic",
    "llama_linear",
    "llama_llama3",
    "llama_plain",
    "llama_yarn",
    "mistral_sliding",
    "phi3_longrope",
    "phi3_longrope_partial",
    "phi3_sliding",
    "qwen2_plain",
    "qwen2_sliding",
    "qwen3_tied",
]


def read(variant: str) -> dict[str, Any]:
    return json.loads((ARCH / variant / "config.json").read_text())


def old_layout(config: dict[str, Any]) -> dict[str, Any]:
    """The same model in the layout that most files on hubs have."""
    config = copy.deepcopy(config)
    config["torch_dtype"] = config.pop("dtype")
    layer_types = config.pop("layer_types", None)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if layer_types and config["architectures"] == ["Gemma3ForCausalLM"]:
        config["sliding_window_pattern"] = 1 + layer_types.index("full_attention")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "original_max_position_embeddings" in config:  # Phi-3 has it at top level only
        rope.pop("original_max_position_embeddings", None)
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    return config


@pytest.mark.parametrize("variant", SUPPORTED)
def test_old_layout_means_the_same_as_the_new_one(variant: str) -> None:
    new, old = read(variant), old_layout(read(variant))
    assert "rope_parameters" not in old and "layer_types" not in old
    assert model_config_from_hf(old) == model_config_from_hf(new)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in ARCH.glob("*/config.json")))
def test_every_other_architecture_is_refused_by_name(folder: str) -> None:
    config = read(folder)
    if folder in SUPPORTED:
        assert model_config_from_hf(config).architecture == config["architectures"][0]
    else:
        with pytest.raises(ConfigError, match=config["architectures"][0]):
            model_config_from_hf(config)


def test_fields_land_where_they_belong() -> None:
    config = model_config_from_hf(read("qwen2_sliding"))
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (48, 4, 6, 2)
    assert config.qkv_bias and not config.attention_out_bias and not config.mlp_bias and not config.qk_norm
    assert config.layer_types == ("full_attention",) * 2 + ("sliding_attention",) * 2
    assert config.sliding_window == 20 and config.attention_scale == pytest.approx(8**-0.5)
    config = model_config_from_hf(read("llama_bias"))
    assert config.qkv_bias and config.attention_out_bias and config.mlp_bias
    config = model_config_from_hf(read("qwen3_tied"))
    assert config.qk_norm and config.tie_word_embeddings and config.head_dim == 20
    config = model_config_from_hf(read("gemma2"))
    assert config.norm_weight_offset == 1.0 and config.post_norms and config.activation == "gelu_tanh"
    assert config.embedding_scale == pytest.approx(math.sqrt(48)) and config.attention_scale == pytest.approx(24**-0.5)
    assert (config.attn_logit_softcap, config.final_logit_softcap) == (5.0, 8.0)
    config = model_config_from_hf(read("gemma3"))
    assert config.rope.rope_type == "linear" and config.rope.theta == 1e6
    assert config.rope_sliding is not None and config.rope_sliding.theta == 1e4
    config = model_config_from_hf(read("phi3_longrope_partial"))
    assert config.rope.rotary_dim == 12 and config.rope.factor == 4.0 and len(config.rope.long_factor) == 6


# Defaults of the configuration classes of transformers 5.24
@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", dict(vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048)),
        ("LlamaForCausalLM", dict(num_kv_heads=32, head_dim=128, sliding_window=None, eos_token_ids=(2,))),
        ("MistralForCausalLM", dict(num_kv_heads=8, sliding_window=4096, max_position_embeddings=131072)),
        ("Qwen2ForCausalLM", dict(vocab_size=151936, sliding_window=None, qkv_bias=True, eos_token_ids=())),
        ("Qwen3ForCausalLM", dict(head_dim=128, qkv_bias=False, qk_norm=True)),
        ("Phi3ForCausalLM", dict(hidden_size=3072, rms_norm_eps=1e-5, pad_token_id=32000, sliding_window=None)),
        ("Gemma2ForCausalLM", dict(head_dim=256, attn_logit_softcap=50.0, final_logit_softcap=30.0, num_layers=26)),
        ("Gemma2ForCausalLM", dict(tie_word_embeddings=True, bos_token_id=2, attention_scale=1 / 16)),
        ("Gemma3ForCausalLM", dict(vocab_size=262208, attn_logit_softcap=None, max_position_embeddings=131072)),
    ],
)
def test_absent_field_takes_the_default_of_the_architecture(architecture: str, expected: dict[str, Any]) -> None:
    config = model_config_from_hf({"architectures": [architecture]})
    assert {name: getattr(config, name) for name in expected} == expected


def test_absent_layer_types_follow_the_pattern_of_the_architecture() -> None:
    layers = {"num_hidden_layers": 7}
    gemma2 = model_config_from_hf({"architectures": ["Gemma2ForCausalLM"], **layers})
    assert [t == "full_attention" for t in gemma2.layer_types] == [False, True, False, True, False, True, False]
    gemma3 = model_config_from_hf({"architectures": ["Gemma3ForCausalLM"], **layers})
    assert [t == "full_attention" for t in gemma3.layer_types] == [False] * 5 + [True, False]
    assert gemma3.rope.theta == 1e6 and gemma3.rope_sliding is not None and gemma3.rope_sliding.theta == 1e4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 5, "sliding_window": 8, **layers}
    assert set(model_config_from_hf(qwen).layer_types) == {"full_attention"}
    windowed = model_config_from_hf(qwen | {"use_sliding_window": True})
    assert windowed.layer_types == ("full_attention",) * 5 + ("sliding_attention",) * 2
    mistral = model_config_from_hf({"architectures": ["MistralForCausalLM"], "sliding_window": None, **layers})
    assert set(mistral.layer_types) == {"full_attention"}


def test_model_type_stands_in_for_a_missing_class_name() -> None:
    assert model_config_from_hf({"model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match="'model_type' = 'mamba'"):
        model_config_from_hf({"model_type": "mamba"})


def test_text_model_of_gemma3_with_vision_is_read() -> None:
    text = read("gemma3")
    del text["architectures"], text["eos_token_id"]
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "vision_config": {"hidden_size": 1152},
        "text_config": text,
    }
    config = model_config_from_hf(outer)
    assert config.eos_token_ids == (1, 106)
    assert config.hidden_size == 48 and config.architecture == "Gemma3ForCausalLM"
    with pytest.raises(ConfigError, match="quantization_config"):
        model_config_from_hf(outer | {"quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(ConfigError, match="'text_config' = None is missing"):
        model_config_from_hf({"architectures": ["Gemma3ForConditionalGeneration"]})


@pytest.mark.parametrize(("given", "expected"), [(None, ()), (7, (7,)), ([7, 9], (7, 9)), ([], ())])
def test_eos_is_one_id_or_several(given: Any, expected: tuple[int, ...]) -> None:
    assert model_config_from_hf(read("llama_plain") | {"eos_token_id": given}).eos_token_ids == expected


def test_minus_one_as_padding_means_none() -> None:
    assert model_config_from_hf(read("llama_plain") | {"pad_token_id": -1}).pad_token_id is None


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 100),
        ({"type": "linear", "factor": 4.0}, 100),
        ({"type": "dynamic", "factor": 4.0}, 400),  # the base grows past 100, up to a factor of 4
        ({"type": "yarn", "factor": 4.0}, 400),  # 100 is then the length before stretching
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25}, 100),
    ],
)
def test_usable_length_counts_a_stretch_that_the_file_leaves_out(scaling: dict | None, length: int) -> None:
    config = old_layout(read("llama_plain")) | {"max_position_embeddings": 100, "rope_scaling": scaling}
    model = model_config_from_hf(config)
    assert model.max_position_embeddings == length
    assert model.rope.max_position_embeddings == 100


def test_factor_follows_from_the_two_lengths_where_it_is_absent() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    model = model_config_from_hf(old_layout(read("llama_plain")) | {"rope_scaling": scaling})
    assert model.rope.factor == 4.0  # 512 / 128


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama_plain", {"architectures": []}, r"'architectures' = \[\] must be a list of one"),
        ("llama_plain", {"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ("llama_plain", {"model_type": "mistral"}, "'model_type' = 'mistral' contradicts"),
        ("llama_plain", {"hidden_act": "relu"}, "'hidden_act' = 'relu' is not supported"),
        ("gemma2", {"hidden_act": "silu"}, "'hidden_act' = 'silu' contradicts"),
        ("llama_plain", {"quantization_config": {"quant_method": "gptq"}}, "'quantization_config' = .*gptq"),
        ("llama_plain", {"hidden_size": "64"}, "'hidden_size' = '64' must be an integer"),
        ("llama_plain", {"hidden_size": True}, "'hidden_size' = True must be an integer"),
        ("llama_plain", {"hidden_size": 63, "head_dim": None}, "'hidden_size' = 63 does not divide"),
        ("llama_plain", {"num_hidden_layers": 10**9}, "'num_hidden_layers' = 1000000000 must be in"),
        ("llama_plain", {"num_hidden_layers": 0}, "'num_hidden_layers' = 0 must be in"),
        ("llama_plain", {"num_key_value_heads": 3}, "num_kv_heads=3 does not divide"),
        ("llama_plain", {"rms_norm_eps": 0}, "'rms_norm_eps' = 0 must be"),
        ("llama_plain", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' = nan must be"),
        ("llama_plain", {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' = 'yes' must be true or false"),
        ("llama_plain", {"eos_token_id": "</s>"}, "'eos_token_id' = '</s>'"),
        ("llama_plain", {"eos_token_id": [1, -2]}, "'eos_token_id' = .* not -2"),
        ("llama_plain", {"bos_token_id": [1, 2]}, "'bos_token_id' = .* one token id"),
        ("llama_plain", {"sliding_window": 16}, "'sliding_window' = 16 is not supported"),
        ("llama_plain", {"use_qk_norm": True}, "'use_qk_norm' = True is not supported"),
        ("llama_plain", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' = 50.0"),
        ("llama_plain", {"num_local_experts": 8}, "'num_local_experts' = 8 is not supported"),
        ("llama_plain", {"rope_interleaved": True}, "'rope_interleaved' = True is not supported"),
        ("mistral_sliding", {"attention_bias": True}, "'attention_bias' = True is not supported"),
        ("mistral_sliding", {"layer_types": ["full_attention"] * 2}, "'layer_types' = .* contradicts sliding_window"),
        ("gemma3", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' = True"),
        ("gemma2", {"layer_types": ["full_attention"]}, "'layer_types' = .* num_hidden_layers=4"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "'layer_types' = .* not 'chunked_attention'"),
        ("qwen2_sliding", {"use_sliding_window": False}, "'layer_types' = .* no sliding window is in effect"),
        ("gemma2", {"sliding_window": 0}, "'sliding_window' = 0 must be in"),
    ],
)
def test_what_cannot_be_served_is_refused_with_field_and_value(variant: str, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(read(variant) | changes)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope"}, "'rope_scaling.rope_type' = 'mrope' is not supported"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "'rope_scaling.type' = 'linear' contradicts"),
        ({"type": "linear"}, "'rope_scaling.factor' = None is required"),
        ({"type": "linear", "factor": "4"}, "'rope_scaling.factor' = '4' must be a finite number"),
        ({"type": "linear", "factor": -1.0}, "'rope_scaling.factor' = -1.0 must be a finite number above 0"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 8}, "'rope_scaling.beta_fast' = 8 is not supported with"),
        ({"rope_type": "llama3", "factor": 8.0}, "'rope_scaling.low_freq_factor' = None is required"),
        ({"rope_type": "default", "mrope_section": [2, 2]}, "'rope_scaling.mrope_section'"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": "x"}, "'rope_scaling.long_factor' = 'x'"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "'rope_scaling.truncate' = 1 must be true or false"),
        ({"rope_theta": 5.0}, "'rope_scaling.rope_theta' = 5.0 contradicts rope_theta=10000.0"),
        ({"partial_rotary_factor": 0.5}, "'rope_scaling.partial_rotary_factor' = 0.5 is not supported"),
        ({"full_attention": {}}, "'rope_scaling.full_attention' = {} is not supported"),
        ([], "'rope_scaling' = .* must be an object"),
        ("linear", "'rope_scaling' = 'linear' must be an object"),
    ],
)
def test_rope_that_is_not_understood_is_refused_with_field_and_value(rope: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(old_layout(read("llama_plain")) | {"rope_scaling": rope})


def test_both_rope_layouts_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts rope_parameters"):
        model_config_from_hf(read("llama_linear") | {"rope_scaling": {"type": "linear", "factor": 2.0}})


def test_flat_rope_of_gemma3_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'rope_parameters\.rope_theta' = 5\.0"):
        model_config_from_hf(read("gemma3") | {"rope_parameters": {"rope_theta": 5.0}})


@pytest.mark.parametrize("value", [None, [], "config", 3])
def test_something_else_than_an_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must hold an object"):
        model_config_from_hf(value)


HOSTILE_VALUES = (None, True, -1, 0, 10**400, 1.5, float("inf"), float("nan"), "", "x", [], [[]], [None], {}, {"a": 1})


@pytest.mark.parametrize("variant", ["gemma3", "phi3_longrope_partial", "qwen2_sliding", "llama_yarn"])
@pytest.mark.parametrize("layout", [lambda config: config, old_layout])
def test_hostile_value_of_any_field_is_read_or_refused_and_nothing_else(variant: str, layout: Any) -> None:
    config = layout(read(variant))
    for name, old in config.items():
        for value in HOSTILE_VALUES:
            changes: list[Any] = [value]
            if isinstance(old, dict):
                changes += [old | {inner: value} for inner in old]
            for change in changes:
                try:
                    model_config_from_hf(config | {name: change})
                except ConfigError as error:
                    assert len(str(error)) < 1000, error
