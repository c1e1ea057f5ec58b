"""The `headrace` command: parse, build, run. A user's mistake ends in one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from absl import logging

from checkpoints.errors import CheckpointError
from configs.checks import ConfigError
from configs.load import changed_settings, config_text
from configs.run import Configs
from serving import bench
from serving.cli.batch import run_batch
from serving.cli.compile import run_compile
from serving.cli.generate import run_generate
from serving.cli.parser import UsageError, build_parser, configs_from, rewrite_gin_sugar
from serving.cli.serve import run_serve
from serving.display import ProgressReporter
from serving.request import RequestError
from serving.text.base import TokenizerError

USER_ERRORS = (UsageError, ConfigError, RequestError, CheckpointError, TokenizerError, OSError)
USER_ERROR_STATUS = 2


def main(argv: Sequence[str] | None = None, *, llm_factory: Any = None) -> int:
    """Run one command and return its exit status: 0 done, 1 some requests failed, 2 refused, 130 interrupted.

    `argv` None takes the process's own arguments and sets up its logging. `llm_factory` stands in for
    `serving.llm.LLM`, which is otherwise imported when an engine is needed.
    """
    if argv is None:
        logging.use_absl_handler()
        argv = sys.argv[1:]
    try:
        args = build_parser().parse_args(rewrite_gin_sugar(argv))
        return _run(args, llm_factory)
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        return 1
    except USER_ERRORS as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(f"headrace: error: {_one_line(error)}", file=sys.stderr)
        return USER_ERROR_STATUS


def _run(args: argparse.Namespace, llm_factory: Any) -> int:
    if args.command == "convert":
        return _convert(args)
    configs = configs_from(args)
    if args.print_config:
        print(config_text(configs))
        return 0
    if args.command == "compile":
        return run_compile(args, configs)
    if args.command == "batch":
        return run_batch(args, configs)
    if args.command == "serve":
        return run_serve(args, configs)
    source = configs.run.model_source
    make_llm = functools.partial(_make_llm, source, configs, llm_factory)
    if args.command == "bench":
        bench.run(make_llm, args, source)
        return 0
    return run_generate(args, make_llm)


def _convert(args: argparse.Namespace) -> int:
    from checkpoints.convert import convert

    progress = ProgressReporter(True)
    convert(args.source, args.destination, args.dtype, lambda done, total: progress("load", done, total, "bytes"))
    progress.note(f"{args.source} is written to {args.destination}")
    return 0


def _make_llm(source: str, configs: Configs, llm_factory: Any) -> Any:
    """An engine that is ready; says on stderr which settings it has that are not the defaults."""
    if llm_factory is None:
        from serving.llm import LLM  # imports JAX, which takes seconds: a refusal should not wait for it

        llm_factory = LLM
    llm = llm_factory(
        source, engine_config=configs.engine, mesh_config=configs.mesh, scheduling_config=configs.scheduling
    )
    print(f"settings beside the defaults: {', '.join(changed_settings(configs))}", file=sys.stderr)
    return llm


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
