"""`headrace compile`: the executables of an engine, made on a machine that need not have its devices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from configs.checks import ConfigError
from configs.run import Configs
from serving.display import ProgressReporter


def run_compile(args: argparse.Namespace, configs: Configs) -> int:
    """Compile every program of the engine that `configs` describes for `args.target` and write the folder `args.output`.

    Needs the model's config alone, no weights. Raises ConfigError, CheckpointError, and OSError where the folder exists.
    """
    config = configs.engine
    if config.num_pages is None and config.kv_cache_bytes is None:
        raise ConfigError(
            "EngineConfig.num_pages=None: how many pages fit is known on the device alone; "
            "give num_pages or kv_cache_bytes here, and the same to the engine"
        )
    import jax  # takes seconds: a refusal should not wait for it
    import jax.numpy as jnp

    from checkpoints.source import open_source
    from serving.execution import executables, memory
    from serving.execution.program_plan import abstract_state, context_length, plan_programs
    from sharding.placement import check_split
    from sharding.topology import target_mesh

    jax.config.update("jax_platforms", "cpu")  # targets are only described: a card that is here stays free
    output = Path(args.output)
    executables.check_new_folder(output)
    mesh = target_mesh(args.target, configs.mesh)
    model = open_source(configs.run.model_source).model_config
    check_split(model, configs.mesh.tensor)
    max_model_len = context_length(model, config)
    num_pages = memory.choose_num_pages(
        config,
        page_nbytes=memory.page_bytes(model, config, jnp.dtype(config.kv_format[0]).itemsize, configs.mesh.tensor),
        free_bytes=sys.maxsize,  # the engine checks it against the device
        max_model_len=max_model_len,
        is_cpu=False,
    )
    state = abstract_state(model, config, mesh, num_pages=num_pages, max_model_len=max_model_len)
    plan = plan_programs(model, config, mesh, state)
    progress = ProgressReporter(True)
    num_bytes = executables.write_executables(
        output,
        executables.environment(model, config, state),
        plan,
        mesh,
        lambda name, done, total, s: progress("compile", done, total, f"{name} {s:.1f} s"),
    )
    progress.note(
        f"{output}: {len(plan)} programs, {num_bytes / 1e6:.1f} MB, for {mesh.size} x {mesh.devices.flat[0].device_kind}; "
        f"num_pages={num_pages}"
    )
    return 0
