"""Whole programs of an engine, compiled from shapes through the plan that the model runner uses, for cards that are not
there: pages and slot table in place, no second copy of pages or weights, the collectives that the design allows."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

import jax
import pytest

from configs.engine import EngineConfig, MeshConfig
from configs.model import ModelConfig
from serving.execution.memory import estimate_workspace_bytes
from serving.execution.program_plan import COPY_PAGES_BATCH, AbstractState, Program, abstract_state, plan_programs
from sharding.placement import padded_vocab_size
from sharding.topology import target_mesh

CONTEXT = 8192
# A serving configuration of an H200: 128 slots; 16 GB of weights, 84 GB of pages, of its 141
CONFIG = EngineConfig(
    max_num_seqs=128, num_pages=40_000, prefill_token_buckets=(2048,), max_model_len=CONTEXT, max_decode_steps=8
)
SLOTS = CONFIG.max_num_seqs


@dataclasses.dataclass(frozen=True)
class Compiled:
    state: AbstractState
    program: Program
    executable: jax.stages.Compiled

    @property
    def text(self) -> str:
        text = self.executable.as_text()
        assert text is not None
        return text

    def num_all_reduces(self) -> int:
        return len(re.findall(r" all-reduce(?:-start)?\(", self.text))


def compile_for(target: str, model: ModelConfig, config: EngineConfig, name: str, tensor: int = 1) -> Compiled:
    mesh = target_mesh(target, MeshConfig(tensor=tensor))
    assert config.num_pages is not None
    state = abstract_state(model, config, mesh, num_pages=config.num_pages, max_model_len=CONTEXT)
    program = plan_programs(model, config, mesh, state)[name]
    with jax.set_mesh(mesh):
        return Compiled(state, program, program.lower().compile())


def shard_bytes(tree: object) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def ordered(sizes: Iterable[str | int]) -> tuple[int, ...]:
    """The sizes of an array in rising order, without ones: the same however it is transposed."""
    return tuple(sorted(size for size in map(int, sizes) if size > 1))


def forms(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shape, and the two-dimensional ones that it can be seen as; none of an array with one axis."""
    if len(shape) > 1:
        yield ordered(shape)
        for axis in range(1, len(shape)):
            yield ordered((math.prod(shape[:axis]), math.prod(shape[axis:])))


def check_memory(compiled: Compiled, model: ModelConfig, config: EngineConfig, *, writes_pages: bool) -> None:
    state, shards = compiled.state, compiled.state.kv_cache[0].pages.sharding.mesh.shape["tensor"]
    analysis = compiled.executable.memory_analysis()
    assert analysis is not None
    print(f"temp {analysis.temp_size_in_bytes / 1e6:.1f} MB, alias {analysis.alias_size_in_bytes / 1e6:.1f} MB")
    donated = shard_bytes(state.table) + (shard_bytes(state.kv_cache) if writes_pages else 0)
    assert donated <= analysis.alias_size_in_bytes < 1.001 * donated  # results are padded to some bytes
    # no second pool, not even of one layer, and no more than the engine sets aside when it sizes the pool
    assert analysis.temp_size_in_bytes < shard_bytes(state.kv_cache[0])
    workspace = estimate_workspace_bytes(model, config, padded_vocab_size(model, shards), shards)
    assert analysis.temp_size_in_bytes < workspace
    # no weight widened to float32, as it is stored or as the matrix that products take
    shapes = {form for weight in state.params.values() for form in forms(weight.sharding.shard_shape(weight.shape))}
    found = {text for text in re.findall(r"f32\[([\d,]+)\]", compiled.text) if ordered(text.split(",")) in shapes}
    assert not found


def num_attention_kernels(compiled: Compiled) -> int:
    """GPU kernels in the program that read a layer's page pool."""
    num_elements = math.prod(compiled.state.kv_cache[0].pages.shape)

    def reads_pool(call: str) -> bool:
        return any(math.prod(map(int, sizes.split(","))) == num_elements for sizes in re.findall(r"\[([\d,]+)\]", call))

    return sum(reads_pool(line) for line in compiled.text.splitlines() if 'custom_call_target="mosaic_gpu' in line)


@pytest.mark.parametrize(
    ("name", "kernels_a_layer"),
    [
        pytest.param(f"decode({SLOTS}, 1)", 1, marks=pytest.mark.gate),
        (f"decode({SLOTS}, 8)", 1),
        (f"sample({SLOTS})", 0),
        ("prefill(2048)", 1),
        (f"mixed(2048, {SLOTS})", 2),
    ],
)
def test_8b_program_for_an_h200(name: str, kernels_a_layer: int, llama_8b: ModelConfig) -> None:
    compiled = compile_for("h200", llama_8b, CONFIG, name)
    check_memory(compiled, llama_8b, CONFIG, writes_pages=not name.startswith("sample"))
    assert compiled.num_all_reduces() == 0
    assert num_attention_kernels(compiled) == kernels_a_layer * llama_8b.num_layers


def test_pages_are_copied_in_place_on_an_h200(llama_8b: ModelConfig) -> None:
    compiled = compile_for("h200", llama_8b, CONFIG, "copy pages")
    analysis = compiled.executable.memory_analysis()
    pool = shard_bytes(compiled.state.kv_cache)
    assert pool <= analysis.alias_size_in_bytes < 1.001 * pool
    page = shard_bytes(compiled.state.kv_cache[0]) // compiled.state.kv_cache[0].pages.shape[0]
    print(
        f"temp {analysis.temp_size_in_bytes / 1e6:.1f} MB, a page of all layers {page * llama_8b.num_layers / 1e6:.1f} MB"
    )
    assert analysis.temp_size_in_bytes <= 2 * COPY_PAGES_BATCH * page * llama_8b.num_layers


@pytest.mark.gate
def test_kernels_of_a_decode_size_below_the_slots_take_no_slices_as_operands(llama_8b: ModelConfig) -> None:
    """XLA makes such a slice and its kernel one fusion, which it keeps out of command buffers: the host then launches
    each layer's kernels one by one."""
    model = dataclasses.replace(llama_8b, num_layers=2, layer_types=llama_8b.layer_types[:2])
    config = dataclasses.replace(CONFIG, max_num_seqs=2 * SLOTS, decode_slot_buckets=(SLOTS, 2 * SLOTS))
    compiled = compile_for("h200", model, config, f"decode({SLOTS}, 8)")
    assert num_attention_kernels(compiled) == model.num_layers
    assert "dynamic_slice_fusion" not in compiled.text


@pytest.mark.parametrize("target", ["h200", "v5e", "v6e", "7x"])
def test_decode_step_over_four_devices_has_two_all_reduces_a_layer_and_one(target: str, llama_8b: ModelConfig) -> None:
    # Two of the layers, which are all alike, and a pool that a v5e's 16 GB hold.
    model = dataclasses.replace(llama_8b, num_layers=2, layer_types=llama_8b.layer_types[:2])
    config = dataclasses.replace(CONFIG, num_pages=8_000)
    compiled = compile_for(target, model, config, f"decode({SLOTS}, 1)", tensor=4)
    check_memory(compiled, model, config, writes_pages=True)
    # attention and MLP of each layer, and the embedding, whose vocabulary is split
    assert compiled.num_all_reduces() == 2 * model.num_layers + 1
    others = re.findall(r" (all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", compiled.text)
    assert not others


@pytest.mark.parametrize("target", ["v5e", "v6e", "7x"])
@pytest.mark.parametrize(
    ("name", "kernels_a_layer"), [(f"decode({SLOTS}, 1)", 1), ("prefill(2048)", 1), (f"mixed(2048, {SLOTS})", 2)]
)
def test_8b_program_over_four_tpus(name: str, kernels_a_layer: int, target: str, llama_8b: ModelConfig) -> None:
    model = dataclasses.replace(llama_8b, num_layers=2, layer_types=llama_8b.layer_types[:2])
    config = dataclasses.replace(CONFIG, num_pages=8_000)
    compiled = compile_for(target, model, config, name, tensor=4)
    check_memory(compiled, model, config, writes_pages=True)
    assert compiled.num_all_reduces() == 2 * model.num_layers + 1
    assert compiled.text.count('custom_call_target="tpu_custom_call"') == kernels_a_layer * model.num_layers
