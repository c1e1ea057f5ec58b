"""Continuous against static batching on the same requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.bench import cases
from serving.bench.figures import percentiles
from serving.bench.runner import Bench, Run


def compare_batching(bench: Bench, lengths: Sequence[tuple[int, int]]) -> None:
    """Run requests of (input, output) tokens, all queued at once, in static and in continuous batches.

    A slot step is one slot for one decode step. `held`: from a request's first decode step until its slot is
    free for another, which in a static batch is the end of its longest member. `dispatched`: what the
    fixed-shape program ran, slots without work at the end of the list included.
    """
    engine = bench.engine
    rng = np.random.default_rng(cases.BATCHING_SEED)
    room, num_slots = engine.max_model_len, engine.config.max_num_seqs
    lengths = [(min(i, room - 1), min(o, room - min(i, room - 1))) for i, o in lengths]
    prompts = cases.prompts_of(rng, [i for i, _ in lengths], bench.vocab_size)
    outputs = [o for _, o in lengths]
    batches = [outputs[i : i + num_slots] for i in range(0, len(outputs), num_slots)]
    held = {"static": sum(len(b) * (max(b) - 1) for b in batches), "continuous": sum(o - 1 for o in outputs)}
    runs: dict[str, tuple[Run, int]] = {}
    bench.run(prompts[:1], outputs[:1])
    for mode in ("static", "continuous"):
        engine.restart_scheduler(static_batching=mode == "static")
        run = bench.run(prompts, outputs)
        stats = engine.stats()
        runs[mode] = run, int(stats["num_decode_slot_steps"])
        bench.emit(
            figure="batching",
            mode=mode,
            requests=len(prompts),
            slots=num_slots,
            input_tokens=sum(i for i, _ in lengths),
            output_tokens=sum(outputs),
            held_slot_steps=held[mode],
            dispatched_slot_steps=stats["num_decode_slot_steps"],
            page_waste_fraction=stats["page_waste_fraction"],
            max_unused_tokens_per_sequence=stats["max_unused_tokens_per_sequence"],
            preemptions=stats["num_preemptions"],
            s=round(run.seconds, 2),
            output_tokens_per_s=round(sum(outputs) / run.seconds, 1),
            **percentiles("first_token_ms", run.first_token_ms()),
            **percentiles("request_ms", run.request_ms()),
            compiles=run.counts.compiles,
        )
    engine.restart_scheduler(static_batching=False)
    (static, static_steps), (continuous, continuous_steps) = runs["static"], runs["continuous"]
    bench.emit(
        figure="batching",
        mode="static / continuous",
        held_slot_steps_ratio=round(held["static"] / held["continuous"], 2),
        dispatched_slot_steps_ratio=round(static_steps / continuous_steps, 2),
        s_ratio=round(static.seconds / continuous.seconds, 2),
    )
