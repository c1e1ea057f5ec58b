"""Foreign tensors become the right parameters, on any number of shards."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.errors import CheckpointError
from checkpoints.source import open_source
from configs.checks import ConfigError
from configs.model import ModelConfig

DENSE = """gemma2 gemma3 llama_bias llama_dynamic llama_linear llama_llama3 llama_plain llama_yarn mistral_sliding
phi3_longrope phi3_longrope_partial phi3_sliding qwen2_plain qwen2_sliding qwen3_tied""".split()  # noqa: SIM905
ARCH = Path(__file__).parents[1] / "data" / "arch"


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def plain_params(tensors: dict[str, np.ndarray], config: ModelConfig, shards: int) -> dict[str, np.ndarray]:
    """The parameters as the loader should make them, head by head, from Hugging Face's tensors. Float32."""
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    N, H, F = config.num_heads, config.head_dim, config.intermediate_size
    K = max(config.num_kv_heads, shards)
    G, copies = N // K, K // config.num_kv_heads
    is_gemma = config.architecture.startswith("Gemma")
    offset = np.float32(1 if is_gemma else 0)
    rows = -(-config.vocab_size // (8 * shards)) * 8 * shards

    def table(name: str) -> np.ndarray:
        padded = np.zeros((rows, config.hidden_size), np.float32)
        padded[: config.vocab_size] = tensors[name]
        return padded

    params = {
        "embed/weight": table("model.embed_tokens.weight"),
        "final_norm/weight": tensors["model.norm.weight"] + offset,
    }
    if not config.tie_word_embeddings:
        params["lm_head/weight"] = table("lm_head.weight")
    for i in range(config.num_layers):
        layer = {
            name.split(".", 3)[3]: value for name, value in tensors.items() if name.startswith(f"model.layers.{i}.")
        }

        def attention(kind: str, layer: dict[str, np.ndarray] = layer) -> list[np.ndarray]:
            if f"self_attn.qkv_proj.{kind}" in layer:
                kv = config.num_kv_heads * H
                return np.split(layer[f"self_attn.qkv_proj.{kind}"], [N * H, N * H + kv])
            return [layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv"]

        def qkv(kind: str) -> np.ndarray:
            q, k, v = attention(kind)
            groups = []
            for j in range(K):
                heads = [q[n * H : (n + 1) * H] for n in range(j * G, (j + 1) * G)]
                kv_head = slice(j // copies * H, (j // copies + 1) * H)
                groups.append(np.stack([*heads, k[kv_head], v[kv_head]]))
            return np.stack(groups)

        out = {"attn_norm/weight": layer["input_layernorm.weight"] + offset, "qkv/kernel": qkv("weight")}
        if config.qkv_bias:
            out["qkv/bias"] = qkv("bias")
        if config.qk_norm:
            out["q_norm/weight"] = layer["self_attn.q_norm.weight"] + offset
            out["k_norm/weight"] = layer["self_attn.k_norm.weight"] + offset
        out["o/kernel"] = layer["self_attn.o_proj.weight"].reshape(-1, K, G, H)
        if config.attention_out_bias:
            out["o/bias"] = layer["self_attn.o_proj.bias"]
        mlp_norm = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
        out["mlp_norm/weight"] = layer[f"{mlp_norm}.weight"] + offset
        if is_gemma:
            out["post_attn_norm/weight"] = layer["post_attention_layernorm.weight"] + offset
            out["post_mlp_norm/weight"] = layer["post_feedforward_layernorm.weight"] + offset
        for kind, target in (("weight", "kernel"), ("bias", "bias")):
            if kind == "bias" and not config.mlp_bias:
                continue
            if f"mlp.gate_up_proj.{kind}" in layer:
                fused = layer[f"mlp.gate_up_proj.{kind}"]
                out[f"gate_up/{target}"] = np.stack([fused[:F], fused[F:]])
            else:
                out[f"gate_up/{target}"] = np.stack([layer[f"mlp.{x}_proj.{kind}"] for x in ("gate", "up")])
            out[f"down/{target}"] = layer[f"mlp.down_proj.{kind}"]
        params |= {f"layers/{i}/{name}": value for name, value in out.items()}
    return params


def assert_equal(params: dict, expected: dict[str, np.ndarray], dtype: str = "float32") -> None:
    assert params.keys() == expected.keys()
    for path, array in params.items():
        wanted = "float32" if "norm/" in path else dtype
        assert array.dtype == wanted, path
        np.testing.assert_array_equal(np.asarray(array), expected[path].astype(array.dtype), err_msg=path)


def possible_shards(config: ModelConfig) -> list[int]:
    return [
        shards
        for shards in (1, 2, 4, 8)
        if config.num_heads % shards == 0
        and config.intermediate_size % shards == 0
        and (config.num_kv_heads % shards == 0 or shards % config.num_kv_heads == 0)
    ]


@pytest.mark.parametrize("variant", DENSE)
def test_every_dense_architecture_loads_with_the_right_values_on_any_number_of_shards(variant, load):
    source = open_source(str(ARCH / variant))
    tensors = read_tensors(ARCH / variant)
    for shards in possible_shards(source.model_config):
        params = load(source, shards)
        assert_equal(params, plain_params(tensors, source.model_config, shards))
        num_parts = {len({str(shard.index) for shard in array.addressable_shards}) for array in params.values()}
        assert num_parts == {1, shards}, "some parameters are whole on each device, the others split over all"


def test_a_cast_to_bfloat16_rounds_to_nearest_even_and_leaves_norms_alone(load):
    source = open_source(str(ARCH / "llama_plain"))
    expected = plain_params(read_tensors(ARCH / "llama_plain"), source.model_config, 2)
    assert_equal(load(source, 2, dtype="bfloat16"), expected, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_every_float_dtype_of_safetensors_loads_exactly(dtype, tools, rng, load, tmp_path):
    config = tools.llama
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    tensors = {name: value.astype(numpy_dtype) for name, value in tools.llama_tensors(config, rng).items()}
    write_safetensors(tmp_path, config, tensors)
    source = open_source(str(tmp_path))
    assert_equal(load(source), plain_params(tensors, source.model_config, 1))


FORMAT_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int8": "I8",
}  # fmt: skip


def write_safetensors(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    """By hand: the library writes no float8 from numpy."""
    header, data = {}, b""
    for name, value in tensors.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": FORMAT_NAMES[value.dtype.name], "shape": value.shape, "data_offsets": offsets}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))


def test_integer_weights_are_refused_by_name(tools, rng, tmp_path):
    tensors = tools.llama_tensors(tools.llama, rng)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((64, 32), np.int8)
    write_safetensors(tmp_path, tools.llama, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight': dtype I8 is not"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_vocabulary_of_301_and_two_kv_heads_load_on_more_shards(kind, shards, tools, rng, load, tmp_path):
    config, tensors = tools.llama, tools.llama_tensors(tools.llama, rng)
    if kind == "gguf":
        source = open_source(str(tools.write_gguf(tmp_path / "m.gguf", config, tensors)))
    else:
        source = open_source(str(tools.write_folder(tmp_path / "m", config, tensors, num_shards=3)))
    params = load(source, shards)
    expected = plain_params(tensors, source.model_config, shards)
    assert_equal(params, expected)
    assert params["embed/weight"].shape[0] % (8 * shards) == 0
    assert not np.asarray(params["embed/weight"])[301:].any()


def test_a_model_that_does_not_split_is_refused(load):
    with pytest.raises(ConfigError, match="num_heads=7"):
        load(ARCH / "llama_bias", 2)


# --- tied and untied output tables (the four states of two sources)


def test_tied_without_output_table_loads(tools, rng, load, tmp_path):
    config = tools.llama | {"tie_word_embeddings": True}
    source = open_source(str(tools.write_folder(tmp_path, config, tools.llama_tensors(config, rng))))
    assert "lm_head/weight" not in load(source)


@pytest.mark.parametrize("differs", [False, True])
def test_tied_with_output_table_uses_the_embedding_and_warns_if_they_differ(
    differs, tools, rng, load, tmp_path, caplog
):
    config = tools.llama | {"tie_word_embeddings": True}
    tensors = tools.llama_tensors(config, rng)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][300, 31] += 1.0 if differs else 0.0
    source = open_source(str(tools.write_folder(tmp_path, config, tensors)))
    with caplog.at_level(logging.WARNING):
        params = load(source)
    assert "lm_head/weight" not in params
    np.testing.assert_array_equal(np.asarray(params["embed/weight"])[:301], tensors["model.embed_tokens.weight"])
    assert [("lm_head" in record.message) for record in caplog.records] == ([True] if differs else [])


def test_untied_without_output_table_is_refused(tools, rng, tmp_path):
    tensors = tools.llama_tensors(tools.llama, rng)
    del tensors["lm_head.weight"]
    folder = tools.write_folder(tmp_path, tools.llama, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight': is missing; tie_word_embeddings is false"):
        open_source(str(folder))


def test_a_gguf_without_output_table_is_tied_and_with_one_is_not(tools, rng, load, tmp_path):
    untied = tools.llama_tensors(tools.llama, rng)
    tied = {name: value for name, value in untied.items() if name != "lm_head.weight"}
    for name, tensors in (("untied", untied), ("tied", tied)):
        source = open_source(str(tools.write_gguf(tmp_path / f"{name}.gguf", tools.llama, tensors)))
        assert source.model_config.tie_word_embeddings is (name == "tied")
        assert_equal(load(source), plain_params(tensors, source.model_config, 1))


# --- names


def test_known_extras_are_left_out_and_unknown_ones_refused(tools, rng, load, tmp_path):
    tensors = tools.llama_tensors(tools.llama, rng)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    source = open_source(str(tools.write_folder(tmp_path / "known", tools.llama, tensors | extra)))
    assert_equal(load(source), plain_params(tensors, source.model_config, 1))
    extra = {"model.layers.0.self_attn.q_proj.weight_scale": np.ones(1, np.float32)}
    folder = tools.write_folder(tmp_path / "unknown", tools.llama, tensors | extra)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight_scale': is not a tensor"):
        open_source(str(folder))


def test_a_bias_that_the_config_denies_is_refused(tools, rng, tmp_path):
    tensors = tools.llama_tensors(tools.llama | {"attention_bias": True}, rng)
    folder = tools.write_folder(tmp_path, tools.llama, tensors)
    with pytest.raises(CheckpointError, match=r"_proj\.bias': is not a tensor of LlamaForCausalLM \(and 7 more"):
        open_source(str(folder))


def test_a_transposed_matrix_is_refused(tools, rng, tmp_path):
    tensors = tools.llama_tensors(tools.llama, rng)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    folder = tools.write_folder(tmp_path, tools.llama, tensors)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight': shape \[64, 32\] is not \[32, 64\]"):
        open_source(str(folder))


def test_the_text_model_of_a_gemma_3_with_vision_loads(load, tmp_path, tools):
    config = json.loads((ARCH / "gemma3" / "config.json").read_text())
    tensors = read_tensors(ARCH / "gemma3")
    inner = {name: value for name, value in config.items() if name != "architectures"}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    renamed["vision_tower.vision_model.head.weight"] = np.ones((3, 3), np.float32)
    source = open_source(str(tools.write_folder(tmp_path, outer, renamed)))
    assert_equal(load(source, 2), plain_params(tensors, source.model_config, 2))


# --- files that come and go


def test_a_stray_shard_is_ignored_with_a_notice(tools, rng, load, tmp_path, caplog):
    tensors = tools.llama_tensors(tools.llama, rng)
    folder = tools.write_folder(tmp_path, tools.llama, tensors, num_shards=2)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"anything")
    source = open_source(str(folder))
    assert [
        record.message for record in caplog.records if "model-00003" in record.message and "ignored" in record.message
    ]
    assert_equal(load(source), plain_params(tensors, source.model_config, 1))


def test_a_deleted_shard_is_refused(tools, rng, tmp_path):
    folder = tools.write_folder(tmp_path, tools.llama, tools.llama_tensors(tools.llama, rng), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: cannot be opened: No such file"):
        open_source(str(folder))


def test_a_stale_index_is_refused(tools, rng, tmp_path):
    folder = tools.write_folder(tmp_path, tools.llama, tools.llama_tensors(tools.llama, rng), num_shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': is not in model\.safetensors\.index\.json"):
        open_source(str(folder))


@pytest.mark.parametrize(
    "name", ["../m.safetensors", "/m.safetensors", "a/m.safetensors", "..", "", "a\\m.safetensors", "\0"]
)
def test_index_names_are_plain_file_names(name, tools, rng, tmp_path):
    folder = tools.write_folder(tmp_path / "m", tools.llama, tools.llama_tensors(tools.llama, rng), num_shards=2)
    (tmp_path / "m.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = {
        tensor: name if file == "model-00001-of-00002.safetensors" else file
        for tensor, file in index["weight_map"].items()
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="is not"):
        open_source(str(folder))


@pytest.mark.parametrize("kind", ["outside", "cycle", "fifo", "folder"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_only_regular_files_inside_the_folder_are_opened(kind, name, tools, rng, tmp_path):
    folder = tools.write_folder(tmp_path / "m", tools.llama, tools.llama_tensors(tools.llama, rng))
    (folder / "generation_config.json").write_text("{}")
    (folder / name).rename(tmp_path / name)
    if kind == "outside":
        (folder / name).symlink_to(tmp_path / name)
    elif kind == "cycle":
        (folder / name).symlink_to("other")
        (folder / "other").symlink_to(name)
    elif kind == "fifo":
        import os

        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        open_source(str(folder))


def test_a_link_inside_the_folder_is_followed(tools, rng, tmp_path):
    folder = tools.write_folder(tmp_path, tools.llama, tools.llama_tensors(tools.llama, rng))
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    open_source(str(folder))


def test_a_file_that_shrinks_after_opening_is_an_error_not_a_signal(tools, rng, load, tmp_path):
    folder = tools.write_folder(tmp_path, tools.llama, tools.llama_tensors(tools.llama, rng))
    source = open_source(str(folder))
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has no byte \d+; it had \d+ bytes"):
        load(source)


def test_progress_counts_every_byte_of_the_parameters_once(load):
    calls = []
    params = load(ARCH / "qwen3_tied", progress=lambda done, total: calls.append((done, total)))
    total = sum(array.nbytes for array in params.values())
    assert calls[-1] == (total, total) and len(calls) == len(params)
    assert calls == sorted(calls)


def test_sources_that_are_nothing_are_refused(tmp_path):
    for src in ("", "no/such/folder", str(tmp_path / "x.safetensors"), "dummy:", "dummy:nowhere", "package:"):
        with pytest.raises(CheckpointError):
            open_source(src)
    with pytest.raises(CheckpointError, match=r"x\.gguf: cannot be opened: No such file"):
        open_source(str(tmp_path / "x.gguf"))
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be opened"):
        open_source(str(tmp_path))


def test_more_layers_than_any_model_has_are_refused_before_memory_is_taken(tools, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tools.llama | {"num_hidden_layers": 10**12}))
    with pytest.raises(ConfigError, match=r"config\.json: field 'num_hidden_layers' = 1000000000000 must be in"):
        open_source(f"dummy:{tmp_path}")


# --- random weights


def test_dummy_weights_do_not_depend_on_the_number_of_shards(tools, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tools.llama | {"attention_bias": True}))
    source = open_source(f"dummy:{tmp_path}")
    whole = {path: np.asarray(array) for path, array in load(source).items()}
    assert 0.9 < whole["layers/0/down/kernel"].std() * 64**0.5 < 1.1  # 64 inputs, 2048 values
    assert not np.array_equal(whole["layers/0/down/kernel"], whole["layers/1/down/kernel"])
    for shards in (2, 8):
        params = load(source, shards)
        copies = max(1, shards // 2)
        np.testing.assert_array_equal(np.asarray(params["embed/weight"])[:301], whole["embed/weight"][:301])
        np.testing.assert_array_equal(params["layers/1/down/kernel"], whole["layers/1/down/kernel"])
        for kind in ("kernel", "bias"):
            qkv, base = np.asarray(params[f"layers/0/qkv/{kind}"]), whole[f"layers/0/qkv/{kind}"]
            np.testing.assert_array_equal(qkv[:, -2:], np.repeat(base[:, -2:], copies, axis=0))
            np.testing.assert_array_equal(qkv[:, :-2].reshape(8, -1), base[:, :-2].reshape(8, -1))
        np.testing.assert_array_equal(
            np.asarray(params["layers/0/o/kernel"]).reshape(32, 64), whole["layers/0/o/kernel"].reshape(32, 64)
        )
