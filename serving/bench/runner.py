"""Runs the cases of a figure on an LLM and prints one JSON object a case.

Times are of `LLM.generate`, as a user sees them. A decode figure is (time of `steps` + 1 tokens - time of 1 token) /
`steps`: queueing and prefill cancel out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from configs.checks import ConfigError
from serving.bench import cases, device_trace
from serving.bench.cases import Case, Prompt
from serving.bench.ceilings import measure_ceilings
from serving.bench.figures import Ceilings, model_cost, percentiles
from serving.engine import Engine
from serving.execution.step_clock import StepTimes
from serving.request import RequestOutput, SamplingParams

type Figure = Literal["decode", "prefill"]

TRACED_DISPATCHES = 4  # at least so many
TRACED_STEPS: dict[Figure, int] = {"decode": 16, "prefill": 1}  # and so many steps; a dispatch may hold several


@dataclass(frozen=True)
class _Counts:
    """What an engine has counted up to some moment."""

    times: StepTimes
    programs: Counter[str]
    decode_steps: int
    prefill_dispatches: int  # with or without decode in the same pass
    preemptions: int
    compiles: int

    @staticmethod
    def of(engine: Engine) -> _Counts:
        counters, stats = engine.counters, engine.scheduler.stats
        return _Counts(
            engine.clock.times(),
            Counter(engine.runner.num_calls),
            stats.num_decode_steps,
            counters.num_prefill_dispatches + counters.num_mixed_dispatches,
            stats.num_preemptions,
            engine.num_compiles_while_serving,
        )

    def dispatches(self, figure: Figure) -> int:
        if figure == "prefill":
            return self.prefill_dispatches
        return sum(calls for name, calls in self.programs.items() if name.startswith("decode("))

    def steps(self, figure: Figure) -> int:
        return self.prefill_dispatches if figure == "prefill" else self.decode_steps

    def __sub__(self, other: _Counts) -> _Counts:
        return _Counts(
            self.times - other.times,
            self.programs - other.programs,
            self.decode_steps - other.decode_steps,
            self.prefill_dispatches - other.prefill_dispatches,
            self.preemptions - other.preemptions,
            self.compiles - other.compiles,
        )


@dataclass(frozen=True)
class Run:
    """One call of `generate`: its wall time, its outputs, and what the engine counted meanwhile."""

    seconds: float
    outputs: Sequence[RequestOutput]
    counts: _Counts

    def first_token_ms(self) -> list[float]:
        """Of each request, from its arrival."""
        return [1e3 * (o.metrics["first_token_time_s"] - o.metrics["arrival_time_s"]) for o in self.outputs]

    def request_ms(self) -> list[float]:
        """Of each request, from its arrival to its last token."""
        return [1e3 * (o.metrics["finish_time_s"] - o.metrics["arrival_time_s"]) for o in self.outputs]

    def output_token_ms(self) -> list[float]:
        """Of each request of two tokens or more, the mean time of a token after the first."""
        return [
            1e3 * (o.metrics["finish_time_s"] - o.metrics["first_token_time_s"]) / (len(o.outputs[0].token_ids) - 1)
            for o in self.outputs
            if len(o.outputs[0].token_ids) > 1
        ]


class Bench:
    """Runs cases on an LLM and prints one JSON object a figure, after one with the device's ceilings.

    Raises ConfigError where the engine cannot run a case, before anything is measured.
    """

    def __init__(self, llm: Any, name: str, repeats: int = 1, profile_dir: Path | None = None):
        self.llm, self.name, self.repeats, self.profile_dir = llm, name, repeats, profile_dir
        self.engine: Engine = llm.engine
        self.vocab_size = self.engine.model_config.vocab_size
        self.num_devices = self.engine.runner.mesh.size
        self.cost = model_cost(self.engine)
        self._ceilings: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        """Measured and printed once."""
        if self._ceilings is None:
            runner = self.engine.runner
            self._ceilings = measure_ceilings(
                runner.mesh.devices.flat[0], self.engine.config.dtype, max(runner.ledger.slack, 0)
            )
            self.emit(figure="ceilings", devices=self.num_devices, jax=jax.__version__, **self._ceilings.figures())
        return self._ceilings

    # Parts of every figure

    def emit(self, **figures: Any) -> None:
        print(json.dumps({"engine": "headrace", "name": self.name, **figures}), flush=True)

    def run(self, prompts: Sequence[Prompt], num_output: int | Sequence[int]) -> Run:
        """Generate `num_output` tokens for each prompt, greedily and whatever they are."""
        params = self._params(len(prompts), num_output)
        before = _Counts.of(self.engine)
        started_s = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        return Run(seconds, outputs, _Counts.of(self.engine) - before)

    def prompts(self, rng: np.random.Generator, count: int, length: int) -> list[Prompt]:
        return cases.prompts_of(rng, [length] * count, self.vocab_size)

    def _params(self, count: int, num_output: int | Sequence[int]) -> list[SamplingParams]:
        lengths = [num_output] * count if isinstance(num_output, int) else num_output
        return [SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True) for n in lengths]

    def _warm_up(self, rng: np.random.Generator) -> None:
        """The other engines' warm-up from `rng`, then, from another, one that calls every program of a batch once:
        the first call of a program has costs of its own, such as building its command buffers."""
        room, config = self.engine.max_model_len, self.engine.config
        count, length = cases.WARM_UP
        num_output = min(cases.WARM_UP_OUTPUT, room // 2)
        self.run(self.prompts(rng, count, min(length, room - num_output)), num_output)
        num_output = min(2 * config.max_decode_steps + 2, room // 2)
        length = min(config.prefill_token_buckets[-1], room - num_output)
        self.run(self.prompts(np.random.default_rng(cases.WARM_UP_SEED), 2, length), num_output)

    def _check_cases(self, chosen: Sequence[Case], num_output: int) -> None:
        """A case that does not run at once would give figures of something else."""
        config, room = self.engine.config, self.engine.max_model_len
        num_pages = self.engine.runner.num_pages - 1
        for batch, context in chosen:
            if batch > config.max_num_seqs:
                raise ConfigError(f"--batch={batch} is above EngineConfig.max_num_seqs={config.max_num_seqs}")
            if context + num_output > room:
                raise ConfigError(
                    f"--context={context}: with {num_output} output tokens it exceeds the context of {room}"
                )
            num_needed = batch * -(-(context + num_output - 1) // config.page_size)
            if num_needed > num_pages:
                raise ConfigError(
                    f"--batch={batch} --context={context} fills {num_needed} pages; the pool has {num_pages}"
                )

    def _common(self, counts: _Counts) -> dict[str, Any]:
        """What every figure says of the engine meanwhile."""
        idle_min, idle_max = counts.times.idle_fractions()
        return {
            "device_idle_fraction_min": round(idle_min, 4),
            "device_idle_fraction_max": round(idle_max, 4),
            "preemptions": counts.preemptions,
            "compiles": counts.compiles,
            "kv_pool_pages": self.engine.runner.num_pages,
            "page_size": self.engine.config.page_size,
            "kv_dtype": self.engine.config.kv_format[0],
            "kv_token_bytes": round(self.engine.runner.ledger.kv_token_bytes, 2),  # of one device, scales included
            "programs": dict(sorted(counts.programs.items())),
        }

    # Figures

    def decode(self, chosen: Sequence[Case], num_steps: int) -> None:
        """Milliseconds of a decode step for (batch, context)."""
        self._check_cases(chosen, num_steps + 1)
        ceilings = self.ceilings
        rng = np.random.default_rng(cases.DECODE_SEED)
        self._warm_up(rng)
        for batch, context in chosen:
            step_ms, first_ms, host_ms, wholes = [], [], [], []
            for _ in range(self.repeats):
                first = self.run(self.prompts(rng, batch, context), 1)
                whole = self.run(self.prompts(rng, batch, context), num_steps + 1)
                step_ms.append((whole.seconds - first.seconds) / num_steps * 1e3)
                host_ms.append((whole.counts.times.host - first.counts.times.host) / num_steps * 1e3)
                first_ms.append(first.seconds * 1e3)
                wholes.append(whole)
            median_ms = statistics.median(step_ms)
            num_bytes, flops = self.cost.decode_step(batch, context, num_steps)
            self.emit(
                figure="decode",
                batch=batch,
                context=context,
                steps=num_steps,
                step_ms=round(median_ms, 3),
                all_step_ms=[round(x, 3) for x in step_ms],
                output_tokens_per_s=round(batch / median_ms * 1e3, 1),
                first_token_ms=round(statistics.median(first_ms), 2),
                floor_ms=round(num_bytes / ceilings.read_bytes_per_s * 1e3, 3),
                **ceilings.rates(median_ms / 1e3, num_bytes, flops, self.num_devices),
                host_ms=round(statistics.median(host_ms), 3),
                kv_pages_filled=batch * -(-(context + num_steps) // self.engine.config.page_size),
                **self._common(wholes[-1].counts),
            )
            if self.profile_dir is not None:
                self._trace("decode", batch, context, self.prompts(rng, batch, context))

    def prefill(self, chosen: Sequence[Case]) -> None:
        """Prompt tokens a second for (prompts, length), each prompt to its first token."""
        self._check_cases([(1, length) for _, length in chosen], 1)
        ceilings = self.ceilings
        rng = np.random.default_rng(cases.PREFILL_SEED)
        self._warm_up(rng)
        for count, length in chosen:
            runs = [self.run(self.prompts(rng, count, length), 1) for _ in range(self.repeats)]
            run = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
            seconds = statistics.median(run.seconds for run in runs)
            num_bytes, flops = self.cost.generate([(length, 1)] * count, run.counts.prefill_dispatches)
            self.emit(
                figure="prefill",
                batch=count,
                context=length,
                prompt_tokens_per_s=round(count * length / seconds),
                ms=round(seconds * 1e3, 2),
                all_ms=[round(run.seconds * 1e3, 2) for run in runs],
                **percentiles("first_token_ms", run.first_token_ms()),
                floor_ms=round(flops / self.num_devices / ceilings.matmul_flops_per_s * 1e3, 3),
                **ceilings.rates(seconds, num_bytes, flops, self.num_devices),
                host_ms=round(statistics.median(run.counts.times.host for run in runs) * 1e3, 3),
                steps=run.counts.prefill_dispatches,
                **self._common(run.counts),
            )
            if self.profile_dir is not None:
                self._trace("prefill", count, length, self.prompts(rng, count, length))

    def mixed(self, count: int) -> None:
        """A batch of requests of ShareGPT-like lengths, all queued at once; a repeat has the same lengths."""
        rng = np.random.default_rng(cases.MIXED_SEED)
        num_input, num_output = cases.mixed_lengths(rng, count)
        room = self.engine.max_model_len
        if int((num_input + num_output).max()) > room:
            raise ConfigError(
                f"--max_model_len: the mixed case needs {int((num_input + num_output).max())} tokens, has {room}"
            )
        ceilings = self.ceilings
        self._warm_up(np.random.default_rng(cases.WARM_UP_SEED))
        runs = [
            self.run(cases.prompts_of(rng, num_input.tolist(), self.vocab_size), num_output.tolist())
            for _ in range(self.repeats)
        ]
        run = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        seconds, counts = run.seconds, run.counts
        num_dispatches = counts.dispatches("prefill") + counts.dispatches("decode")
        # A mixed pass decodes and prefills: it is among the decode steps as well.
        num_mixed = sum(calls for name, calls in counts.programs.items() if name.startswith("mixed("))
        num_passes = counts.prefill_dispatches + counts.decode_steps - num_mixed
        lengths = list(zip(num_input.tolist(), num_output.tolist(), strict=True))
        num_bytes, flops = self.cost.generate(lengths, num_passes)
        self.emit(
            figure="mixed",
            requests=count,
            input_tokens=int(num_input.sum()),
            output_tokens=int(num_output.sum()),
            ms=round(seconds * 1e3, 1),
            all_ms=[round(run.seconds * 1e3, 1) for run in runs],
            output_tokens_per_s=round(num_output.sum() / seconds, 1),
            total_tokens_per_s=round((num_input.sum() + num_output.sum()) / seconds, 1),
            **percentiles("first_token_ms", run.first_token_ms()),
            **percentiles("output_token_ms", run.output_token_ms()),
            **percentiles("request_ms", run.request_ms()),
            **ceilings.rates(seconds, num_bytes, flops, self.num_devices),
            forward_passes=num_passes,
            dispatches=num_dispatches,
            host_ms=round(counts.times.host * 1e3 / num_dispatches, 3),
            **self._common(counts),
        )

    # Traces

    def _trace(self, figure: Figure, batch: int, context: int, prompts: Sequence[Prompt]) -> None:
        """Run a case once more and profile a few of its steps, decode steps from where all have their first token."""
        assert self.profile_dir is not None
        folder = self.profile_dir / f"{figure}-b{batch}-c{context}"
        engine = self.engine
        with tempfile.TemporaryDirectory() as unused:  # the first steps under a profiler load what it needs
            if figure == "decode":
                request_ids = self._add(prompts, engine.max_model_len - context)
                is_over = False
                while not is_over and any(engine.output(i).metrics["first_token_time_s"] is None for i in request_ids):
                    is_over = any(delta.request_finished for delta in engine.step())
                if is_over:
                    self._discard(request_ids)
                    raise ConfigError(
                        f"--profile_dir: a sequence of --context={context} reached the context of "
                        f"{engine.max_model_len} before all {batch} had their first token"
                    )
            else:
                request_ids = self._add(prompts[:1], 1)
            self._profile(Path(unused), figure, num_dispatches=1, num_steps=1)
            if figure == "prefill":
                self._discard(request_ids)
                request_ids = self._add(prompts, 1)
            traced = self._profile(folder, figure, TRACED_DISPATCHES, TRACED_STEPS[figure])
        self._discard(request_ids)
        self.emit(
            figure="trace",
            of=figure,
            batch=batch,
            context=context,
            folder=str(folder),
            programs=dict(sorted(traced.programs.items())),
            **device_trace.summarize(device_trace.read_planes(folder), traced.steps(figure)),
        )

    def _add(self, prompts: Sequence[Prompt], num_output: int) -> list[str]:
        params = self._params(len(prompts), num_output)
        return [self.engine.add(prompt["prompt_token_ids"], p) for prompt, p in zip(prompts, params, strict=True)]

    def _discard(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.discard(request_id)
        while self.engine.has_work():
            self.engine.step()

    def _profile(self, folder: Path, figure: Figure, num_dispatches: int, num_steps: int) -> _Counts:
        """Profile so many steps, or those up to the first request's end in decode; returns what they counted.

        Nothing is outstanding on the device when the profile starts and when it ends: it shows whole steps.
        """
        engine = self.engine
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a callback at every call of the interpreter would slow the host down
        options.host_tracer_level = 2 if self.ceilings.platform == "cpu" else 1  # 2: XLA's operations on CPU
        engine.wait()
        before = traced = _Counts.of(engine)
        is_over = False
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            while engine.has_work() and not is_over:
                has_end = any([delta.request_finished for delta in engine.step()])
                traced = _Counts.of(engine) - before
                is_enough = traced.dispatches(figure) >= num_dispatches and traced.steps(figure) >= num_steps
                is_over = is_enough or (has_end and figure == "decode")
            engine.wait()
        finally:
            jax.profiler.stop_trace()
        return traced
