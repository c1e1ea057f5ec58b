"""Executes schedules: owns the device state (weights, page pool, slot table) and the compiled programs.

Every program is compiled at start from shapes (`warm_up`); afterwards only compiled executables are called, so
nothing compiles while serving.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from configs.checks import ConfigError
from configs.engine import EngineConfig, mixed_decode_sizes
from configs.model import ModelConfig
from layers import decoder
from serving.execution import executables, memory, programs, slot_table
from serving.execution.page_swap import PageSwap, staging_bytes
from serving.execution.program_plan import (
    COPY_PAGES_BATCH,
    MOVE_SLOTS_BATCH,
    SET_MASKS_BATCH,
    SWAP_PAGES_BATCH,
    ZERO_PAGES_BATCH,
    AbstractState,
    compile_programs,
    like,
    plan_programs,
)
from serving.execution.programs import InputLayout
from serving.request import Request
from serving.scheduling.schedule import NULL_PAGE, Schedule
from serving.scheduling.step_time import StepWork
from serving.scheduling.swap import SwapConfig, SwapRates
from sharding.placement import padded_vocab_size


@dataclass(frozen=True)
class ProgramReport:
    """One program: the seconds it took to compile or load, its temporaries in bytes a device, whether it was loaded."""

    name: str
    compile_s: float
    temp_bytes: int
    is_loaded: bool


@dataclass(frozen=True)
class PromptScores:
    """Log-probs of `num_tokens` prompt tokens of a request from position `position` on; arrays still on the device."""

    request: Request
    position: int
    num_tokens: int
    arrays: tuple[jax.Array, jax.Array, jax.Array]  # chosen [Q], top ids [Q, M], top log-probs [Q, M]


@dataclass
class PendingStep:
    """A dispatched step whose results have not been read."""

    schedule: Schedule
    output: programs.StepOutput
    with_logprobs: bool
    scores: list[PromptScores] = field(default_factory=list)
    dispatch_time_s: float = 0.0  # of the engine's clock
    work: StepWork | None = None  # where the engine learns step times

    def read(self) -> StepResult:
        """Wait for the step and copy what was asked for to the host."""
        logprobs = None
        if self.with_logprobs:
            o = self.output
            logprobs = (np.asarray(o.logprobs), np.asarray(o.top_ids), np.asarray(o.top_logprobs))
        return StepResult(self.schedule, np.asarray(self.output.tokens), logprobs, self.scores)


@dataclass(frozen=True)
class StepResult:
    """tokens [K, R] int32 (-1 none, -2 not usable) of the first R slots; logprobs: chosen [K, R], top ids and log-probs
    [K, R, M]."""

    schedule: Schedule
    tokens: np.ndarray
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    scores: list[PromptScores]


class CompileGuard:
    """Counts backend compilations made by threads inside `serving()`; after warm-up there must be none."""

    _local = threading.local()
    _count = 0
    _registered = False

    @classmethod
    def register(cls) -> None:
        if not cls._registered:
            jax.monitoring.register_event_duration_secs_listener(cls._on_event)
            cls._registered = True

    @classmethod
    def _on_event(cls, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and getattr(cls._local, "serving", False):
            cls._count += 1

    @classmethod
    def count(cls) -> int:
        return cls._count

    def __enter__(self) -> None:
        self._local.serving = True

    def __exit__(self, *_: object) -> None:
        self._local.serving = False


class ModelRunner:
    """Device state and programs of one engine. Not thread-safe: one thread dispatches.

    Raises ConfigError where the model, the mesh and the memory do not go together.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        mesh: jax.sharding.Mesh,
        params: dict[str, jax.Array],
        *,
        max_model_len: int,
        device_bytes: int,
        cache_dir: Path | None = None,
    ):
        self.model, self.config, self.mesh, self.params = model, config, mesh, params
        self.max_model_len = max_model_len
        self._cache_dir = cache_dir
        self._is_cpu = mesh.devices.flat[0].platform == "cpu"
        shards = mesh.shape["tensor"]
        self.max_pages = -(-max_model_len // config.page_size)
        self._padded_vocab = padded_vocab_size(model, shards)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        kv_dtype, kv_scales = config.kv_format
        page_nbytes = memory.page_bytes(model, config, jnp.dtype(kv_dtype).itemsize, shards)
        make_table = functools.partial(
            slot_table.make_slot_table, config.max_num_seqs, self.max_pages, self._padded_vocab
        )
        self._table_bytes = sum(
            int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make_table))
        )
        self._weight_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
        self._device_bytes = device_bytes
        workspace = memory.estimate_workspace_bytes(model, config, self._padded_vocab, shards)
        self._staging_bytes = staging_bytes(page_nbytes) if config.swap_bytes else 0
        self.num_pages = memory.choose_num_pages(
            config,
            page_nbytes=page_nbytes,
            free_bytes=int(device_bytes * config.memory_fraction)
            - self._weight_bytes
            - self._table_bytes
            - workspace
            - self._staging_bytes,
            max_model_len=max_model_len,
            is_cpu=self._is_cpu,
        )
        with jax.set_mesh(mesh):
            self._kv_cache = decoder.make_kv_cache(
                model,
                num_pages=self.num_pages,
                page_size=config.page_size,
                dtype=jnp.dtype(kv_dtype),
                scales=kv_scales,
                tensor_shards=shards,
                mesh=mesh,
            )
            self._kv_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(self._kv_cache))
            self._table = jax.jit(make_table, out_shardings=self._replicated)()
        self._page_swap: PageSwap | None = None
        if config.swap_bytes:
            self._page_swap = PageSwap(self._kv_cache, mesh, self._program)
            memory.check_swap_bytes(
                config, batch_nbytes=self._page_swap.batch_nbytes, platform=mesh.devices.flat[0].platform
            )
        self.swap_rates: SwapRates | None = None  # measured at start, where they decide
        self._decode_layout = InputLayout(config.max_num_seqs, 0, config.query_block)
        self._compiled: dict[str, Any] = {}
        self.num_calls: Counter[str] = Counter()  # of each program, by name
        self.reports: list[ProgramReport] = []
        CompileGuard.register()
        self._guard = CompileGuard()

    # Start-up

    def warm_up(self, progress: Callable[[str, int, int, float], None] | None = None) -> None:
        """Load or compile every program. `progress(name, number done, number in all, seconds)` is called after each."""
        state = AbstractState(like(self.params), like(self._kv_cache), like(self._table))
        plan = plan_programs(self.model, self.config, self.mesh, state)
        loaded, cached = {}, None  # cached: where to keep what is compiled now
        if self.config.executables_dir is not None:
            values = executables.environment(self.model, self.config, state)
            loaded = executables.load_executables(Path(self.config.executables_dir), values, plan, self.mesh)
        elif self._cache_dir is not None and not self._is_cpu:
            values = executables.environment(self.model, self.config, state)
            cached = executables.cache_folder(self._cache_dir, values)
            if cached.exists():
                loaded = executables.load_executables(cached, values, plan, self.mesh)
        for name, program in loaded.items():
            self._add_program(name, program.compiled, ProgramReport(name, program.load_s, program.temp_bytes, True))
            if progress is not None:
                progress(f"{name}, loaded,", len(self.reports), len(plan), program.load_s)
        missing = {name: program for name, program in plan.items() if name not in loaded}
        for name, compiled, seconds in compile_programs(missing, self.mesh):
            self._add_program(name, compiled, ProgramReport(name, seconds, executables.temp_bytes(compiled), False))
            if progress is not None:
                progress(name, len(self.reports), len(plan), seconds)
        if missing and cached is not None:
            executables.add_to_cache(cached, values, plan, self._compiled, self.mesh)
        if self.ledger.slack < 0:
            raise ConfigError(
                f"EngineConfig.memory_fraction={self.config.memory_fraction}: the device is too small:\n{self.ledger}"
            )
        if not self._is_cpu:  # where a first call sets up nothing
            self.run_empty_steps()
        if self._page_swap is not None:
            self.swap_rates = self._measure_swap(self._page_swap)

    def _measure_swap(self, page_swap: PageSwap) -> SwapRates:
        """Rates of copies and of prefill; that of prompts in the largest program, without the attention of theirs."""
        with jax.set_mesh(self.mesh):
            self._kv_cache, out_bytes_per_s, in_bytes_per_s = page_swap.measure(self._kv_cache)
        num_tokens = self.config.prefill_token_buckets[-1]
        duration_s = 0.0
        for _ in range(2):  # what a first call sets up is not timed
            started_s = time.perf_counter()
            self._prefill(Schedule(step_id=0, prefill_bucket=num_tokens))
            jax.block_until_ready(self._table)
            duration_s = time.perf_counter() - started_s
        self.num_calls.clear()
        return SwapRates(
            out_bytes_per_s=out_bytes_per_s,
            in_bytes_per_s=in_bytes_per_s,
            prefill_tokens_per_s=num_tokens / duration_s,
        )

    def swap_config(self) -> SwapConfig | None:
        """What the scheduler must know of the host memory for preempted sequences; None: there is none."""
        if self._page_swap is None:
            return None
        return SwapConfig(
            host_bytes=self.config.swap_bytes,
            page_bytes=self._page_swap.page_nbytes,
            batch_pages=SWAP_PAGES_BATCH,
            rates=self.swap_rates if self.config.preemption == "auto" else None,
        )

    def run_empty_steps(self) -> None:
        """Run each step program once with no sequence in it, so that no request pays for what a first call sets up."""
        config = self.config
        for num_rows in config.decode_sizes:
            for num_steps in sorted({1, config.max_decode_steps}):
                self._dispatch(Schedule(step_id=0, num_decode_slots=num_rows, num_decode_steps=num_steps))
        for num_tokens in config.prefill_token_buckets:
            for num_rows in (0, *mixed_decode_sizes(config.decode_sizes, num_tokens)):
                self._prefill(Schedule(step_id=0, num_decode_slots=num_rows, prefill_bucket=num_tokens))
        jax.block_until_ready(self._table)
        self.num_calls.clear()

    def _add_program(self, name: str, compiled: jax.stages.Compiled, report: ProgramReport) -> None:
        self._compiled[name] = compiled
        self.reports.append(report)

    @property
    def ledger(self) -> memory.MemoryLedger:
        """Where the device's memory goes; the workspace is that of the compiled programs."""
        return memory.MemoryLedger(
            device=self._device_bytes,
            weights=self._weight_bytes,
            slot_table=self._table_bytes,
            workspace=max((report.temp_bytes for report in self.reports), default=0),
            kv_pool=self._kv_bytes,
            kv_dtype=self.config.kv_format[0],
            kv_scales=self.config.kv_format[1],
            num_pages=self.num_pages,
            page_size=self.config.page_size,
            max_model_len=self.max_model_len,
            swap_staging=self._staging_bytes,
            host=self.config.swap_bytes,
        )

    def program_text(self, name: str) -> str:
        """The optimised program of that name, as XLA prints it."""
        return self._compiled[name].as_text()

    def _program(self, name: str) -> Any:
        self.num_calls[name] += 1
        return self._compiled[name]

    def slot_table(self) -> slot_table.SlotTable:
        """A copy of the slot table on the host, as numpy arrays: for looking at, not for serving."""
        return jax.tree.map(np.asarray, self._table)

    # One step

    def dispatch(self, schedule: Schedule, masks: Sequence[tuple[int, np.ndarray]] = ()) -> PendingStep:
        """Send a step to the device and return at once; results are read later, one step behind.

        masks: (slot, [W] int32), the tokens that a slot may sample, a bit each, lowest first; those beyond W words are
        none. They stay until the slot's next mask or request.
        """
        with self._guard:
            return self._dispatch(schedule, masks)

    def _dispatch(self, schedule: Schedule, masks: Sequence[tuple[int, np.ndarray]] = ()) -> PendingStep:
        if self._page_swap is not None:
            for out in schedule.swap_outs:
                self._page_swap.swap_out(self._kv_cache, out)
        for first in range(0, len(schedule.zero_pages), ZERO_PAGES_BATCH):
            batch = np.full(ZERO_PAGES_BATCH, NULL_PAGE, np.int32)
            pages = schedule.zero_pages[first : first + ZERO_PAGES_BATCH]
            batch[: len(pages)] = pages
            self._kv_cache = self._program("zero pages")(self._kv_cache, batch)
        for first in range(0, len(schedule.page_copies), COPY_PAGES_BATCH):
            copies = np.full((3, COPY_PAGES_BATCH), NULL_PAGE, np.int32)
            for place, copy in enumerate(schedule.page_copies[first : first + COPY_PAGES_BATCH]):
                copies[:, place] = copy.source, copy.target, copy.num_tokens
            self._kv_cache = self._program("copy pages")(self._kv_cache, copies)
        if self._page_swap is not None:
            for swap_in in schedule.swap_ins:
                self._kv_cache = self._page_swap.swap_in(self._kv_cache, swap_in)
        for first in range(0, len(schedule.moves), MOVE_SLOTS_BATCH):
            moves = np.full((2, MOVE_SLOTS_BATCH), self.config.max_num_seqs, np.int32)
            for place, move in enumerate(schedule.moves[first : first + MOVE_SLOTS_BATCH]):
                moves[:, place] = move.source, move.target
            self._table = self._program("move slots")(self._table, moves)
        for reset in schedule.resets:
            packed = slot_table.pack_reset(reset, self.max_pages)
            self._table = self._program("reset slot")(self._table, packed)
            if slot_table.uses_vocab(reset.request.params):
                rows = slot_table.vocab_rows(reset.request, self._padded_vocab)
                self._table = self._program("set vocabulary rows")(self._table, np.int32(reset.slot), *rows)
        for first in range(0, len(masks), SET_MASKS_BATCH):
            slots = np.full(SET_MASKS_BATCH, self.config.max_num_seqs, np.int32)
            words = np.zeros((SET_MASKS_BATCH, -(-self._padded_vocab // 32)), np.int32)
            for place, (slot, mask) in enumerate(masks[first : first + SET_MASKS_BATCH]):
                slots[place], words[place, : mask.size] = slot, mask
            self._table = self._program("set masks")(self._table, slots, words)
        scores: list[PromptScores] = []
        if schedule.prefill:
            output, hidden, starts = self._prefill(schedule)
            for place, chunk in enumerate(schedule.prefill):
                if chunk.request.params.prompt_logprobs is not None:
                    scores += self._score(chunk.request, chunk.start, len(chunk.token_ids), hidden, starts[place])
        else:
            packed, _ = self._decode_layout.pack(schedule)
            compiled = self._program(f"decode({schedule.num_decode_slots}, {schedule.num_decode_steps})")
            self._kv_cache, self._table, out = compiled(self.params, self._kv_cache, self._table, packed)
            output = self._sample(out) if schedule.num_decode_steps == 1 else out
        requests = [request for _, request in schedule.decode]
        requests += [chunk.request for chunk in schedule.prefill if chunk.samples]
        pending = PendingStep(schedule, output, any(r.params.logprobs is not None for r in requests), scores)
        output.tokens.copy_to_host_async()
        return pending

    def _prefill(self, schedule: Schedule) -> tuple[programs.StepOutput, jax.Array, dict[int, int]]:
        """Run a prefill or mixed program: what it sampled, hidden [T, D], and the tokens that the chunks start at."""
        num_tokens, num_rows = schedule.prefill_bucket, schedule.num_decode_slots
        name = f"mixed({num_tokens}, {num_rows})" if num_rows else f"prefill({num_tokens})"
        packed, starts = InputLayout(self.config.max_num_seqs, num_tokens, self.config.query_block).pack(schedule)
        self._kv_cache, self._table, sample_inputs, hidden = self._program(name)(
            self.params, self._kv_cache, self._table, packed
        )
        return self._sample(sample_inputs), hidden, starts

    def _sample(self, sample_inputs: programs.SampleInputs) -> programs.StepOutput:
        compiled = self._program(f"sample({sample_inputs.hidden.shape[0]})")
        self._table, output = compiled(self.params, self._table, sample_inputs)
        return output

    def _score(
        self, request: Request, start: int, num_tokens: int, hidden: jax.Array, first_index: int
    ) -> list[PromptScores]:
        """Log-probs of the prompt tokens that follow positions [start, start + num_tokens)."""
        prompt, block = request.prompt_token_ids, self.config.query_block
        scores = []
        for offset in range(0, num_tokens, block):
            following = prompt[start + offset + 1 : start + min(offset + block, num_tokens) + 1]
            if not following:
                continue
            targets = np.zeros(block, np.int32)
            targets[: len(following)] = following
            arrays = self._program(f"score({hidden.shape[0]})")(
                self.params, hidden, np.int32(first_index + offset), targets
            )
            scores.append(PromptScores(request, start + offset + 1, len(following), arrays))
        return scores
