"""One model split over 1, 2, 4 and 8 devices: same logits, two all-reduces a layer, pages written in place."""

from __future__ import annotations

import contextlib
import re
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import MeshConfig
from configs.model import ModelConfig, RopeConfig
from layers import decoder
from layers.step_inputs import AttentionRows, StepInputs
from sharding.mesh import make_mesh
from sharding.placement import named_sharding, stored_kv_heads

PAGE_SIZE, NUM_PAGES = 8, 512
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=301,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    activation="silu",
    tie_word_embeddings=False,
    attention_scale=0.25,
    rope=RopeConfig(rotary_dim=16, max_position_embeddings=256),
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=11,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    post_norms=True,
    embedding_scale=7.0,
    attn_logit_softcap=20.0,
    final_logit_softcap=15.0,
)
needs_eight_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


def split_params(params: dict[str, np.ndarray], num_shards: int) -> dict[str, np.ndarray]:
    """Whole parameters (as for one shard) -> as stored for num_shards: KV heads repeated, vocabulary padded."""
    specs = decoder.param_specs(CONFIG, jnp.float32, num_shards)
    K = stored_kv_heads(CONFIG, num_shards)
    G, H = CONFIG.num_heads // K, CONFIG.head_dim
    split = {}
    for path, value in params.items():
        if "/qkv/" in path:
            heads = value[:, :-2].reshape(K, G, *value.shape[2:])
            key_and_value = np.repeat(value[:, -2:], K // value.shape[0], axis=0)
            value = np.concatenate([heads, key_and_value], axis=1)
        elif path.endswith("/o/kernel"):
            value = value.reshape(-1, K, G, H)
        elif path in ("embed/weight", "lm_head/weight"):
            rows = value[: CONFIG.vocab_size]
            value = np.pad(rows, ((0, specs[path].shape[0] - CONFIG.vocab_size), (0, 0)))
        assert value.shape == specs[path].shape, path
        split[path] = value
    return split


def make_inputs(rng: np.random.Generator) -> list[StepInputs]:
    """A prefill of one sequence in two rows and of another one, then decode rows and a chunk together."""
    page_table = (1 + rng.permutation(NUM_PAGES - 1)[:48].reshape(2, 24)).astype(np.int32)

    def rows(table_rows, starts, lengths, num_queries):
        array = np.asarray(starts, np.int32)
        return AttentionRows(
            page_table=page_table[table_rows],
            starts=array,
            lengths=np.asarray(lengths, np.int32),
            rope_lens=array,
            num_queries=num_queries,
        )

    steps = [
        (rows([0, 0, 1], [0, 16, 0], [16, 10, 7], 16), rows([0, 1], [0, 0], [0, 0], 1)),
        (rows([1, 1, 0], [7, 23, 0], [16, 3, 0], 16), rows([0, 1], [26, 0], [1, 0], 1)),
    ]
    return [
        StepInputs(token_ids=rng.integers(0, 301, sum(r.num_tokens for r in step), dtype=np.int32), rows=step)
        for step in steps
    ]


def run(params: dict[str, np.ndarray], num_shards: int, steps: list[StepInputs], *, has_context_mesh: bool = False):
    """(logits of every step, compiled program, bytes of one layer's pages on one device)."""
    mesh = make_mesh(MeshConfig(tensor=num_shards))
    specs = decoder.param_specs(CONFIG, jnp.float32, num_shards)
    placed = {
        path: jax.device_put(value, named_sharding(mesh, specs[path]))
        for path, value in split_params(params, num_shards).items()
    }
    kv_cache = decoder.make_kv_cache(
        CONFIG, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32, tensor_shards=num_shards, mesh=mesh
    )
    bind = decoder.bind(CONFIG, jnp.float32, num_shards)

    def step(params, kv_cache, inputs):
        model = bind(params)
        kv_cache, hidden = decoder.forward(model, kv_cache, inputs)
        return kv_cache, decoder.logits(model, hidden)

    # placement is in the arrays' types: a mesh in the context must make no difference
    with jax.set_mesh(mesh) if has_context_mesh else contextlib.nullcontext():
        compiled = jax.jit(step, donate_argnums=1).lower(placed, kv_cache, steps[0]).compile()
    outs = []
    for inputs in steps:
        old = kv_cache
        kv_cache, logits = compiled(placed, kv_cache, inputs)
        assert all(pages.is_deleted() for pages, _ in old)
        assert logits.sharding.is_fully_replicated
        outs.append(np.asarray(logits))
    shard = kv_cache[0].pages.addressable_shards[0].data
    assert shard.shape[3] == stored_kv_heads(CONFIG, num_shards) // num_shards
    return outs, compiled, shard.nbytes


@pytest.fixture(scope="module")
def case():
    """Random parameters, inputs and the logits on one device."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    specs = decoder.param_specs(CONFIG, jnp.float32, 1)
    params = decoder.init_params(specs, seed, make_mesh(MeshConfig()))
    rng = np.random.default_rng(seed)
    whole = {path: np.asarray(value) * rng.uniform(0.5, 1.5, value.shape[-1:]) for path, value in params.items()}
    whole = {path: value.astype(np.float32) for path, value in whole.items()}
    steps = make_inputs(rng)
    return whole, steps, run(whole, 1, steps)[0]


@needs_eight_devices
@pytest.mark.parametrize("num_shards", [2, 4, 8])  # 4 and 8 store each KV head two and four times
def test_split_model_gives_the_logits_of_one_device(case, num_shards: int, capfd: pytest.CaptureFixture[str]) -> None:
    params, steps, expected = case
    outs, compiled, layer_pages_bytes = run(params, num_shards, steps, has_context_mesh=num_shards == 4)
    for inputs, out, one_device in zip(steps, outs, expected, strict=True):
        is_token = np.concatenate([(np.arange(r.num_queries) < r.lengths[:, None]).ravel() for r in inputs.rows])
        assert np.isneginf(out[:, CONFIG.vocab_size :]).all()
        # logits of order 1; float32 sums of some hundred terms in another order
        np.testing.assert_allclose(out[is_token, :301], one_device[is_token, :301], atol=2e-5)

    hlo = compiled.as_text()

    def count(operation: str) -> int:
        return len(re.findall(rf"= \S+ {operation}(?:-start)?\(", hlo))

    assert count("all-reduce") == 2 * CONFIG.num_layers + 1  # the other one is the embedding's
    assert count("all-gather") == 1  # logits
    assert count("all-to-all") == count("collective-permute") == count("reduce-scatter") == 0
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= CONFIG.num_layers * layer_pages_bytes
    assert memory.temp_size_in_bytes < layer_pages_bytes
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
