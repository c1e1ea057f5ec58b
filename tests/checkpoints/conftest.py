"""Small models written by the safetensors and gguf libraries, and what to do with them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh numbers for each run; the seed is printed with a failure."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def load() -> Callable[..., dict[str, Any]]:
    """load(source or src, shards=1, dtype="float32") -> parameters on a mesh of that many CPU devices."""
    import jax.numpy as jnp

    from checkpoints.source import ModelSource, open_source
    from configs.engine import MeshConfig
    from layers.params import param_specs
    from sharding.mesh import make_mesh
    from sharding.placement import named_sharding

    def load(
        src: str | Path | ModelSource, shards: int = 1, dtype: str = "float32", progress: Any = None
    ) -> dict[str, Any]:
        source = src if isinstance(src, ModelSource) else open_source(str(src))
        mesh = make_mesh(MeshConfig(tensor=shards))
        specs = param_specs(source.model_config, jnp.dtype(dtype), shards)
        shardings = {path: named_sharding(mesh, spec) for path, spec in specs.items()}
        return source.load_params(specs, shardings, shards, progress)

    return load


NUM_QUERIES, PAGE_SIZE = 128, 16  # tokens of one call: one program serves all prompts


@functools.cache
def log_probs_program(config: Any, shards: int) -> Any:
    """A compiled function (params, token_ids [NUM_QUERIES], number of them) -> log-probs [NUM_QUERIES, V padded]."""
    import jax
    import jax.numpy as jnp

    from configs.engine import MeshConfig
    from layers import decoder
    from layers.step_inputs import AttentionRows, StepInputs
    from sharding.mesh import make_mesh

    num_pages = NUM_QUERIES // PAGE_SIZE
    bind = decoder.bind(config, jnp.float32, shards)
    kv_cache = decoder.make_kv_cache(
        config,
        num_pages=1 + num_pages,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        tensor_shards=shards,
        mesh=make_mesh(MeshConfig(tensor=shards)),
    )

    @jax.jit
    def run(params: Any, kv_cache: Any, inputs: StepInputs) -> jax.Array:
        model = bind(params)
        return jax.nn.log_softmax(decoder.logits(model, decoder.forward(model, kv_cache, inputs)[1]))

    def call(params: Any, token_ids: list[int]) -> np.ndarray:
        lengths = np.array([len(token_ids)], np.int32)
        rows = AttentionRows(
            page_table=np.arange(1, 1 + num_pages, dtype=np.int32)[None],
            starts=np.zeros(1, np.int32),
            lengths=lengths,
            rope_lens=lengths,
            num_queries=NUM_QUERIES,
        )
        padded = np.zeros(NUM_QUERIES, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(run(params, kv_cache, StepInputs(token_ids=padded, rows=(rows,))))[: len(token_ids)]

    return call


@pytest.fixture
def log_probs(load: Callable[..., dict[str, Any]]) -> Callable[..., list[np.ndarray]]:
    """log_probs(source or src, prompts, shards=1) -> for each prompt float32 [tokens, V padded]."""
    from checkpoints.source import ModelSource, open_source

    def log_probs(src: str | Path | ModelSource, prompts: list[list[int]], shards: int = 1) -> list[np.ndarray]:
        source = src if isinstance(src, ModelSource) else open_source(str(src))
        program = log_probs_program(source.model_config, shards)
        params = load(source, shards)
        return [program(params, prompt) for prompt in prompts]

    return log_probs


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 301,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": "float32",
}


def llama_tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tensors of a llama model by Hugging Face's names."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K, H = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    tensors = {"model.embed_tokens.weight": draw(V, D), "model.norm.weight": 1 + draw(D)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw(V, D)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": 1 + draw(D),
            "self_attn.q_proj.weight": draw(N * H, D),
            "self_attn.k_proj.weight": draw(K * H, D),
            "self_attn.v_proj.weight": draw(K * H, D),
            "self_attn.o_proj.weight": draw(D, N * H),
            "post_attention_layernorm.weight": 1 + draw(D),
            "mlp.gate_proj.weight": draw(F, D),
            "mlp.up_proj.weight": draw(F, D),
            "mlp.down_proj.weight": draw(D, F),
        }
        if config["attention_bias"]:
            layer |= {f"self_attn.{x}_proj.bias": draw(n * H) for x, n in (("q", N), ("k", K), ("v", K))}
            layer["self_attn.o_proj.bias"] = draw(D)
        tensors |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """A Hugging Face folder, written by the safetensors library."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute_for_interleaved_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of `llama` GGUFs, as llama.cpp's convert_hf_to_gguf.py makes it."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    matrix_type: str = "F32",
    extra_fields: dict[str, tuple[str, Any]] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """The same llama model as a GGUF file, written and quantised by the gguf library.

    `extra_fields`: name -> (method suffix of GGUFWriter, value), e.g. ("uint32", 4).
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for name, (kind, value) in (extra_fields or {}).items():
        getattr(writer, f"add_{kind}")(name, value)
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if name.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{GGUF_NAMES[part]}.{leaf}"
            if part == "self_attn.q_proj":
                value = permute_for_interleaved_rope(value, config["num_attention_heads"])
            if part == "self_attn.k_proj":
                value = permute_for_interleaved_rope(value, config["num_key_value_heads"])
        else:
            target = f"{GGUF_NAMES[stem]}.{leaf}"
        kind = gguf.GGMLQuantizationType[matrix_type if value.ndim > 1 else "F32"]
        writer.add_tensor(target, gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name, value in (extra_tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tools() -> SimpleNamespace:
    """The functions above, for test modules: they cannot import this file."""
    return SimpleNamespace(
        data=DATA,
        llama=dict(LLAMA),
        llama_tensors=llama_tensors,
        write_folder=write_folder,
        write_gguf=write_gguf,
    )
