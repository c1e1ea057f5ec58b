"""The decoder as a module: its parameters, and what a program of it promises. Right results: test_architectures."""

from __future__ import annotations

import secrets
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.checks import ConfigError
from configs.engine import MeshConfig
from configs.model import ModelConfig, RopeConfig
from layers import decoder
from layers.norm import rms_norm
from layers.step_inputs import AttentionRows, StepInputs
from sharding.mesh import make_mesh
from sharding.placement import padded_vocab_size

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    activation="silu",
    tie_word_embeddings=False,
    attention_scale=8**-0.5,
    rope=RopeConfig(rotary_dim=8, max_position_embeddings=128),
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=9,
)
WITH_EVERYTHING = replace(CONFIG, qkv_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True, post_norms=True)
NUM_PAGES, PAGE_SIZE = 64, 4


@pytest.mark.parametrize("config", [CONFIG, WITH_EVERYTHING, replace(CONFIG, tie_word_embeddings=True)])
@pytest.mark.parametrize("tensor_shards", [1, 4])
def test_modules_hold_exactly_the_parameters_of_the_specs_and_no_memory(config, tensor_shards: int) -> None:
    model = decoder.Decoder(config, dtype=jnp.bfloat16, tensor_shards=tensor_shards)
    held = {
        "/".join(map(str, path)): param.get_value() for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    specs = decoder.param_specs(config, jnp.bfloat16, tensor_shards)
    assert held == {path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in specs.items()}


def test_shapes_are_those_that_the_loader_fills() -> None:
    specs = decoder.param_specs(WITH_EVERYTHING, jnp.bfloat16, 4)  # 4 shards, 2 KV heads: each stored twice, G = 1
    first_layer = {
        path.removeprefix("layers/0/"): spec.shape for path, spec in specs.items() if not path.startswith("layers/1/")
    }
    assert first_layer == {
        "attn_norm/weight": (32,),
        "qkv/kernel": (4, 3, 8, 32),
        "qkv/bias": (4, 3, 8),
        "q_norm/weight": (8,),
        "k_norm/weight": (8,),
        "o/kernel": (32, 4, 1, 8),
        "o/bias": (32,),
        "post_attn_norm/weight": (32,),
        "mlp_norm/weight": (32,),
        "gate_up/kernel": (2, 48, 32),
        "gate_up/bias": (2, 48),
        "down/kernel": (32, 48),
        "down/bias": (32,),
        "post_mlp_norm/weight": (32,),
        "embed/weight": (64, 32),
        "final_norm/weight": (32,),
        "lm_head/weight": (64, 32),
    }
    paths = list(specs)
    assert paths[0] == "embed/weight" and paths[-2:] == ["final_norm/weight", "lm_head/weight"]
    assert {spec.dtype for path, spec in specs.items() if "norm" in path} == {jnp.float32}
    assert {spec.dtype for path, spec in specs.items() if "norm" not in path} == {jnp.bfloat16}


def test_model_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_heads=4"):
        decoder.Decoder(CONFIG, dtype=jnp.float32, tensor_shards=3)


def test_random_parameters_follow_seed_and_spec_and_not_the_mesh() -> None:
    config = replace(CONFIG, hidden_size=128, intermediate_size=256, vocab_size=509)
    specs = decoder.param_specs(config, jnp.float32, 1)
    params = decoder.init_params(specs, 3, make_mesh(MeshConfig()))
    assert params.keys() == specs.keys()
    assert not params["embed/weight"][509:].any() and params["embed/weight"][508].any()
    assert (params["final_norm/weight"] == 1).all()
    for path in ("layers/0/gate_up/kernel", "layers/1/gate_up/kernel", "embed/weight"):
        values = np.asarray(params[path])[: specs[path].num_rows]
        # of 65,000 uniform draws, the std's own relative error is about 0.25 %, the mean's std / 256
        assert values.std() == pytest.approx(specs[path].init_scale, rel=0.02)
        assert abs(values.mean()) < 0.02 * values.std()
    first, second = (np.asarray(params[f"layers/{i}/gate_up/kernel"]).ravel() for i in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02
    again = decoder.init_params(specs, 3, make_mesh(MeshConfig()))
    other = decoder.init_params(specs, 4, make_mesh(MeshConfig()))
    assert all((again[path] == params[path]).all() for path in specs)
    assert not any((other[path] == params[path]).all() for path in specs if "norm" not in path)
    if len(jax.devices()) >= 2:
        specs = decoder.param_specs(config, jnp.float32, 2)
        split = decoder.init_params(specs, 3, make_mesh(MeshConfig(tensor=2)))
        np.testing.assert_array_equal(split["layers/0/gate_up/kernel"], params["layers/0/gate_up/kernel"])


class Program:
    """A jitted forward pass and logits of CONFIG with random parameters."""

    def __init__(self, seed: int, dtype=jnp.float32, config: ModelConfig = CONFIG):
        self.config = config
        self.dtype = dtype
        self.mesh = make_mesh(MeshConfig())
        self.params = decoder.init_params(decoder.param_specs(config, dtype, 1), seed, self.mesh)
        self.clear_pages()
        bind = decoder.bind(config, dtype, 1)

        def step(params, kv_cache, inputs):
            model = bind(params)
            kv_cache, hidden = decoder.forward(model, kv_cache, inputs)
            return kv_cache, hidden, decoder.logits(model, hidden)

        self.step = jax.jit(step, donate_argnums=1)

    def clear_pages(self) -> None:
        self.kv_cache = decoder.make_kv_cache(
            self.config,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            dtype=self.dtype,
            tensor_shards=1,
            mesh=self.mesh,
        )

    def __call__(self, inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
        self.kv_cache, hidden, logits = self.step(self.params, self.kv_cache, inputs)
        return np.asarray(hidden), np.asarray(logits)


@pytest.fixture(scope="module")
def shared_program() -> Program:
    return Program(seed=1)


@pytest.fixture
def program(shared_program: Program) -> Program:
    """Compiled once for the module; its pages are empty at the start of each test."""
    shared_program.clear_pages()
    return shared_program


def make_inputs(rng: np.random.Generator, starts, lengths, num_queries: int) -> StepInputs:
    num_rows = len(starts)
    starts = np.asarray(starts, np.int32)
    rows = AttentionRows(
        page_table=(1 + np.arange(num_rows * 8).reshape(num_rows, 8)).astype(np.int32),
        starts=starts,
        lengths=np.asarray(lengths, np.int32),
        rope_lens=np.zeros_like(starts),
        num_queries=num_queries,
    )
    token_ids = rng.integers(0, CONFIG.vocab_size, num_rows * num_queries, dtype=np.int32)
    return StepInputs(token_ids=token_ids, rows=(rows,))


def test_row_has_the_same_bits_whatever_the_other_rows_are(program: Program) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    results = []
    for case, other_lengths in enumerate(([8, 8], [0, 0], [3, 8])):
        program.clear_pages()
        rng = np.random.default_rng(seed)
        own = rng.integers(0, CONFIG.vocab_size, (2, 8))
        for step, start in enumerate((0, 8)):
            inputs = make_inputs(np.random.default_rng(seed + case), [start] * 3, [8 - step, *other_lengths], 8)
            inputs.token_ids[:8] = own[step]
            hidden, logits = program(inputs)
        results.append((hidden[:7].tobytes(), logits[:7].tobytes()))
    assert len(set(results)) == 1


def test_padding_tokens_give_finite_hidden_states_and_padded_vocabulary_is_never_chosen(program: Program) -> None:
    hidden, logits = program(make_inputs(np.random.default_rng(0), [0, 20, 0], [4, 2, 0], 8))
    assert np.isfinite(hidden).all()
    assert logits.dtype == np.float32 and logits.shape == (24, padded_vocab_size(CONFIG, 1))
    assert np.isfinite(logits[:, : CONFIG.vocab_size]).all()
    assert np.isneginf(logits[:, CONFIG.vocab_size :]).all()


def test_padding_tokens_write_nowhere(program: Program) -> None:
    program(make_inputs(np.random.default_rng(0), [0, 2, 0], [3, 1, 0], 8))
    for pages, _ in program.kv_cache:
        tokens = np.asarray(pages).transpose(0, 2, 1, 3, 4).reshape(NUM_PAGES * PAGE_SIZE, -1)
        written = set(np.flatnonzero(tokens.any(axis=1)))
        # row 0 has pages from 1, row 1 from 9: positions 0 to 2 and position 2
        assert written == {4, 5, 6, 9 * PAGE_SIZE + 2}


def test_layers_of_a_kind_are_lowered_once() -> None:
    layer_types = ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention")
    program = Program(seed=0, config=replace(CONFIG, num_layers=4, layer_types=layer_types))
    lowered = program.step.lower(program.params, program.kv_cache, make_inputs(np.random.default_rng(0), [0], [4], 4))
    assert lowered.as_text().count("func.func private @_run_block") == 2  # sliding and full, for four layers


def test_pages_are_written_in_place_and_weights_are_not_copied() -> None:
    config = replace(CONFIG, num_layers=1, layer_types=("full_attention",), hidden_size=256, intermediate_size=512)
    program = Program(seed=0, config=config)
    inputs = make_inputs(np.random.default_rng(0), [0], [1], 1)
    compiled = program.step.lower(program.params, program.kv_cache, inputs).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(pages.nbytes for pages, _ in program.kv_cache)
    assert memory.temp_size_in_bytes < program.params["layers/0/gate_up/kernel"].nbytes / 2
    compiled(program.params, program.kv_cache, inputs)
    assert all(pages.is_deleted() for pages, _ in program.kv_cache)


def test_bfloat16_model_stays_near_the_float32_model(program: Program) -> None:
    rounded = Program(seed=1, dtype=jnp.bfloat16)
    inputs = make_inputs(np.random.default_rng(0), [0, 0, 0], [8, 8, 8], 8)
    (_, expected), (hidden, logits) = program(inputs), rounded(inputs)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == np.float32
    expected, logits = expected[:, : CONFIG.vocab_size], logits[:, : CONFIG.vocab_size]
    # Some ten roundings of 2**-9 on the way to a hidden state are about 1 % of the logits' spread; of 1,464 logits
    # the worst is some ten times the mean.
    error = np.abs(logits - expected)
    assert error.mean() < 0.02 * np.std(expected) and error.max() < 0.2 * np.std(expected)


def test_wrong_parameters_are_an_internal_error() -> None:
    program = Program(seed=0)
    del program.params["final_norm/weight"]
    with pytest.raises(AssertionError, match="final_norm/weight"):
        program(make_inputs(np.random.default_rng(0), [0], [1], 1))


def test_rms_norm_is_computed_in_float32() -> None:
    rng = np.random.default_rng()
    x, weight = rng.standard_normal((3, 64)).astype(jnp.bfloat16), rng.standard_normal(64).astype(np.float32)
    out = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * weight
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8)  # the one rounding, of the result
