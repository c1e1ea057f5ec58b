"""The command line of `headrace`: commands, flags, and how flags become configs. Imports no JAX.

Flags of an engine command come from the dataclasses they fill; gin's flags stand beside them. absl supplies its own
process flags (`--verbosity`, `--flagfile`; all are listed by --helpfull).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from absl.flags import argparse_flags

from configs.engine import DTYPES, EngineConfig, MeshConfig
from configs.load import load_configs
from configs.operations import OperationsConfig
from configs.run import Configs, RunConfig
from configs.scheduling import SchedulingConfig
from configs.server import ServerConfig
from serving import bench
from serving.cli.flags import add_dataclass_flags, given_fields
from serving.request import SamplingParams

# Flags whose field name alone would mislead, or is taken by another dataclass.
FLAG_NAMES = {
    MeshConfig: {"data": "data_parallel_size", "tensor": "tensor_parallel_size", "expert": "expert_parallel_size"},
    EngineConfig: {"seed": "engine_seed"},
    ServerConfig: {"api_keys": "api_key", "api_key_tenants": "api_key_tenant"},
}


class UsageError(ValueError):
    """The command line itself is wrong."""


class _Parser(argparse_flags.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the namespace's `command` says which one was given."""
    # absl flags that some imported library defined give way to ours
    parser = _Parser(prog="headrace", description=_DESCRIPTION, allow_abbrev=False, conflict_handler="resolve")
    parser.add_argument("--version", action="version", version=f"headrace {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=summary, description=summary, allow_abbrev=False, conflict_handler="resolve", **options
        )
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    generate = command("generate", "complete prompts", epilog=_GENERATE_EPILOG)
    prompt = generate.add_mutually_exclusive_group(required=False)
    prompt.add_argument("--prompt", metavar="TEXT", help="one prompt, continued as it stands")
    prompt.add_argument("--prompts_file", type=Path, metavar="F.jsonl", help="a prompt a line; see below")
    generate.add_argument(
        "--output", type=Path, metavar="OUT.jsonl", help="an output a line; without it, to the screen"
    )
    generate.add_argument(
        "--json_schema", type=Path, metavar="F.json", help="every output is JSON that this schema accepts"
    )
    generate.add_argument("--print_stats", action="store_true", help="print the engine's counters at the end")
    add_engine_flags(generate)
    add_dataclass_flags(
        generate, SamplingParams, description="what is not given comes from the model's generation_config.json"
    )

    serve = command("serve", "answer clients over HTTP until SIGTERM", epilog=_SERVE_EPILOG)
    serve.add_argument("--dry_run", action="store_true", help="check configs and model files, say what is needed, stop")
    add_engine_flags(serve)
    add_dataclass_flags(serve, ServerConfig, names=FLAG_NAMES[ServerConfig])
    add_dataclass_flags(serve, OperationsConfig)

    batch = command("batch", "answer a file of requests, in OpenAI's batch form", epilog=_BATCH_EPILOG)
    batch.add_argument("input", type=Path, metavar="IN.jsonl", help="a request a line")
    batch.add_argument(
        "output", type=Path, metavar="OUT.jsonl", help="an answer a line; requests that have one are not run again"
    )
    batch.add_argument("--server", metavar="HOST:PORT", help="gRPC of a running server; without it, --model is loaded")
    batch.add_argument(
        "--api_key", metavar="TEXT", help="the server's key; HEADRACE_API_KEY keeps it out of the list of processes"
    )
    batch.add_argument("--max_in_flight", type=int, default=256, metavar="INT", help="requests at once (default 256)")
    batch.add_argument("--served_model_name", metavar="TEXT", help="what lines call the model; without it, its source")
    add_engine_flags(batch)

    bench_command = command("bench", "measure decode, prefill, mixed work or batching; one JSON object a figure")
    bench.add_arguments(bench_command)
    add_engine_flags(bench_command)

    compile_command = command(
        "compile", "write an engine's compiled programs for a device that need not be here", epilog=_COMPILE_EPILOG
    )
    compile_command.add_argument(
        "--target", required=True, metavar="NAME", help="h200, v5e, v5p, v6e, 7x, or cpu: this machine"
    )
    compile_command.add_argument(
        "--output", required=True, metavar="FOLDER", help="a folder that does not exist yet; for --executables_dir"
    )
    add_engine_flags(compile_command)

    convert = command("convert", "write a checkpoint in this engine's own form")
    convert.add_argument("source", metavar="SRC", help="a model source, as for --model")
    convert.add_argument("destination", metavar="DST", help="a folder that does not exist yet")
    convert.add_argument("--dtype", choices=DTYPES, help="of the matrices; without it, every value stays exact")
    return parser


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that builds an engine."""
    group = parser.add_argument_group("configuration", "files, then bindings, then flags; the later wins")
    group.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="gin file; may be repeated")
    group.add_argument(
        "--gin_bindings",
        "--gin_param",
        action="append",
        default=[],
        metavar="CONFIG.FIELD=VALUE",
        help="one gin binding; may be repeated; also written --gin.CONFIG.FIELD=VALUE",
    )
    group.add_argument(
        "--gin_search_paths",
        action="append",
        default=[],
        metavar="FOLDER",
        help="where to look for gin files; may be repeated",
    )
    group.add_argument("--print_config", action="store_true", help="print every config value and stop")
    for cls in (RunConfig, EngineConfig, MeshConfig, SchedulingConfig):
        add_dataclass_flags(parser, cls, names=FLAG_NAMES.get(cls))


def configs_from(args: argparse.Namespace) -> Configs:
    """The configs of an engine command. Raises ConfigError."""
    classes = (RunConfig, EngineConfig, MeshConfig, SchedulingConfig, ServerConfig, OperationsConfig)
    overrides = {cls.__name__: given_fields(args, cls) for cls in classes}
    return load_configs(args.gin_file, args.gin_bindings, args.gin_search_paths, overrides)


def rewrite_gin_sugar(argv: Sequence[str]) -> list[str]:
    """`--gin.NAME=VALUE` as `--gin_bindings=NAME=VALUE`. Raises UsageError where the value is missing."""
    rewritten = []
    for argument in argv:
        if argument.startswith("--gin."):
            if "=" not in argument:
                raise UsageError(f"{argument} needs a value: --gin.CONFIG.FIELD=VALUE")
            argument = "--gin_bindings=" + argument.removeprefix("--gin.")
        rewritten.append(argument)
    return rewritten


_DESCRIPTION = "Serve open-weight language models on JAX."
_GENERATE_EPILOG = """Each line of --prompts_file is a JSON object with one of "prompt" (text), "prompt_token_ids" and
"messages" (a chat), and any SamplingParams field by name, which wins over the flag. Each line of --output has
prompt_token_ids, token_ids, text, finish_reason and logprobs, in the order of the prompts. A bad line is refused
before anything runs."""
_SERVE_EPILOG = """Needs the extra serve. Health checks are answered from the start, requests once one line says that
the model is ready. SIGTERM and SIGINT let running requests end for drain_grace_s; a second one ends them."""
_BATCH_EPILOG = """Lines of IN are {"custom_id", "method": "POST", "url", "body"}, those of OUT {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}, in any order. Interrupted, it goes on where it was when run
again. A bad line is refused before anything runs; a bad request is answered with its error."""
_COMPILE_EPILOG = """Needs the extra aot (h200) or aot-tpu. Weights are not read. An engine uses the executables where
its versions, XLA flags, model, configs and device are those they were compiled for, and says what differs where not."""
