"""Which programs an engine has, from shapes alone: nothing here needs weights, pages or the device itself.

The model runner compiles this list at start for the devices that it has; `headrace compile` and the ahead-of-time
tests compile the same list for devices that they do not have.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.checks import ConfigError
from configs.engine import EngineConfig, mixed_decode_sizes
from configs.model import ModelConfig
from layers import decoder
from layers.kv_cache import (
    AbstractKVCache,
    abstract_kv_cache,
    copy_pages,
    gather_pages,
    scatter_pages,
    stacked_pages,
    zero_pages,
)
from layers.params import param_specs
from serving.execution import programs, slot_table
from serving.execution.programs import InputLayout
from sharding.placement import named_sharding, padded_vocab_size

ZERO_PAGES_BATCH = 16  # pages zeroed in one call
COPY_PAGES_BATCH = 16  # pages copied in one call
MOVE_SLOTS_BATCH = 16  # slots moved in one call
SET_MASKS_BATCH = 16  # masks set in one call
SWAP_PAGES_BATCH = 16  # pages copied to or from the host in one call


@dataclass(frozen=True)
class Program:
    """A jitted function and the abstract arguments it is compiled for."""

    function: Any  # what jax.jit returned
    args: tuple[Any, ...]

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower. To be called under `jax.set_mesh`."""
        return self.function.lower(*self.args)


@dataclass(frozen=True)
class AbstractState:
    """What lives on the devices, as jax.ShapeDtypeStruct with shardings: weights, page pool, slot table."""

    params: Mapping[str, jax.ShapeDtypeStruct]
    kv_cache: AbstractKVCache
    table: slot_table.SlotTable


def context_length(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens, prompt and output, that a sequence may have. Raises ConfigError where the model cannot do what config says."""
    limit = model.max_position_embeddings
    if config.max_logprobs > model.vocab_size:
        raise ConfigError(
            f"EngineConfig.max_logprobs={config.max_logprobs} is above the vocabulary of {model.vocab_size}"
        )
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"EngineConfig.max_model_len={config.max_model_len} is above the model's {limit} positions")
    return config.max_model_len or limit


def like(tree: Any) -> Any:
    """The arrays of a tree as shapes, dtypes and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def abstract_state(
    model: ModelConfig, config: EngineConfig, mesh: Mesh, *, num_pages: int, max_model_len: int
) -> AbstractState:
    """The state of an engine that has `num_pages` pages, on a mesh whose devices need not be present."""
    shards = mesh.shape["tensor"]
    specs = param_specs(model, jnp.dtype(config.dtype), shards)
    kv_dtype, kv_scales = config.kv_format
    make_table = functools.partial(
        slot_table.make_slot_table,
        config.max_num_seqs,
        -(-max_model_len // config.page_size),
        padded_vocab_size(model, shards),
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    return AbstractState(
        params={path: spec.abstract(named_sharding(mesh, spec)) for path, spec in specs.items()},
        kv_cache=abstract_kv_cache(
            model,
            num_pages=num_pages,
            page_size=config.page_size,
            dtype=jnp.dtype(kv_dtype),
            scales=kv_scales,
            tensor_shards=shards,
            mesh=mesh,
        ),
        table=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), jax.eval_shape(make_table)
        ),
    )


def plan_programs(model: ModelConfig, config: EngineConfig, mesh: Mesh, state: AbstractState) -> dict[str, Program]:
    """Name -> program: the whole list, nothing else is ever compiled."""
    shards = mesh.shape["tensor"]
    replicated = NamedSharding(mesh, PartitionSpec())
    bind = decoder.bind(model, jnp.dtype(config.dtype), shards)
    num_slots, num_top, dtype = config.max_num_seqs, config.max_logprobs, jnp.dtype(config.dtype)
    params, cache, table = state.params, state.kv_cache, state.table

    def abstract(*shape: int, dtype: Any = jnp.int32) -> Any:  # stands where an array will
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    def step(fn: Any, *static: Any, layout: InputLayout) -> Program:
        jitted = jax.jit(functools.partial(fn, bind, layout, *static), donate_argnames=("kv_cache", "table"))
        return Program(jitted, (params, cache, table, abstract(layout.size)))

    decode_layout = InputLayout(num_slots, 0, config.query_block)
    plan = {}
    for num_rows in config.decode_sizes:
        plan[f"decode({num_rows}, 1)"] = step(programs.decode, num_rows, layout=decode_layout)
        if config.max_decode_steps > 1:
            plan[f"decode({num_rows}, {config.max_decode_steps})"] = step(
                programs.decode_many, num_rows, config.max_decode_steps, num_top, layout=decode_layout
            )
        plan[f"sample({num_rows})"] = Program(
            jax.jit(functools.partial(programs.sample_step, bind, num_top), donate_argnames="table"),
            (
                params,
                table,
                programs.SampleInputs(
                    abstract(num_rows, model.hidden_size, dtype=dtype),
                    abstract(num_rows),
                    abstract(num_rows, dtype=jnp.bool_),
                ),
            ),
        )
    for num_tokens in config.prefill_token_buckets:
        layout = InputLayout(num_slots, num_tokens, config.query_block)
        plan[f"prefill({num_tokens})"] = step(programs.prefill, 0, layout=layout)
        for num_rows in mixed_decode_sizes(config.decode_sizes, num_tokens):
            plan[f"mixed({num_tokens}, {num_rows})"] = step(programs.prefill, num_rows, layout=layout)
        plan[f"score({num_tokens})"] = Program(
            jax.jit(functools.partial(programs.score, bind, num_top)),
            (params, abstract(num_tokens, model.hidden_size, dtype=dtype), abstract(), abstract(config.query_block)),
        )
    max_pages, vocab = table.page_table.shape[1], table.sampling.bias.shape[1]
    plan["reset slot"] = Program(
        jax.jit(slot_table.reset_slot, donate_argnames="table"),
        (table, abstract(slot_table.pack_reset_size(max_pages))),
    )
    plan["move slots"] = Program(
        jax.jit(slot_table.move_slots, donate_argnames="table"), (table, abstract(2, MOVE_SLOTS_BATCH))
    )
    plan["set vocabulary rows"] = Program(
        jax.jit(slot_table.set_vocab_rows, donate_argnames="table"),
        (
            table,
            abstract(),
            abstract(vocab, dtype=jnp.float32),
            abstract(vocab),
            abstract(vocab, dtype=jnp.bool_),
        ),
    )
    plan["set masks"] = Program(
        jax.jit(slot_table.set_masks, donate_argnames="table"),
        (table, abstract(SET_MASKS_BATCH), abstract(SET_MASKS_BATCH, table.sampling.masks.shape[1])),
    )
    plan["zero pages"] = Program(jax.jit(zero_pages, donate_argnames="kv_cache"), (cache, abstract(ZERO_PAGES_BATCH)))
    plan["copy pages"] = Program(
        jax.jit(copy_pages, donate_argnames="kv_cache"), (cache, abstract(3, COPY_PAGES_BATCH))
    )
    if config.swap_bytes:
        page_ids = abstract(SWAP_PAGES_BATCH)
        plan["swap out"] = Program(jax.jit(gather_pages), (cache, page_ids))
        plan["swap in"] = Program(
            jax.jit(scatter_pages, donate_argnames="kv_cache"),
            (cache, stacked_pages(cache, SWAP_PAGES_BATCH), page_ids),
        )
    return plan


# XLA's own set of what a command buffer (a CUDA graph) may hold, and WHILE: K decode steps, and the sampler's
# branches that hold loops, are then launched at once. Without it the host waits for the device at every turn: an 8B
# step on an H200 takes 5.1 ms instead of 4.4.
COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"


# Products by cuBLASLt, each by the algorithm that its heuristics name first. Timing candidates on the card chose others,
# no faster in the step, doubled the time to start and gave other bits at each start; compiled without a card, Triton's
# untimed tiles are many times slower.
PRODUCTS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


def compiler_options(mesh: Mesh) -> dict[str, str | bool | int]:
    """What XLA is told beyond its defaults, for the mesh's devices."""
    if mesh.devices.flat[0].platform == "gpu":
        return {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS, **PRODUCTS}
    return {}


def compile_programs(plan: Mapping[str, Program], mesh: Mesh) -> Iterator[tuple[str, jax.stages.Compiled, float]]:
    """Compile a plan: (name, compiled program, seconds it took), in order.

    Lowering holds the interpreter; compiling does not, so it runs in other threads meanwhile.
    """

    def compile_one(lowered: jax.stages.Lowered, started_s: float) -> tuple[jax.stages.Compiled, float]:
        compiled = lowered.compile(compiler_options=compiler_options(mesh))
        return compiled, time.monotonic() - started_s

    with ThreadPoolExecutor(max_workers=min(16, max(2, os.cpu_count() or 2))) as pool:
        futures = {}
        for name, program in plan.items():
            started_s = time.monotonic()
            with jax.set_mesh(mesh):
                futures[name] = pool.submit(compile_one, program.lower(), started_s)
        for name, future in futures.items():
            yield name, *future.result()
