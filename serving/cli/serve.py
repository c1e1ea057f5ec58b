"""`headrace serve`: load the engine while health checks are answered, serve, drain, end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import ipaddress
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from configs.engine import EngineConfig
from configs.load import changed_settings, config_text
from configs.run import Configs
from configs.server import ServerConfig
from serving.cli.parser import UsageError, version
from serving.display import ProgressReporter

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from serving.api.service import Service
    from serving.async_engine import AsyncEngine
    from serving.jobs.jobs import Jobs
    from serving.operations.operations import Operations

    type Built = tuple[AsyncEngine, Operations]

# Threads that want the interpreter get it after so long. Python's own 5 ms are half a decode step, and the event loop and
# the engine's thread would each wait that long for the other many times a request.
SWITCH_INTERVAL_S = 0.0005
PACKAGES = ("starlette", "uvicorn", "uvloop", "python_multipart", "prometheus_client", "llguidance")
GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "grpc_status")
OTEL_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class Door(Protocol):
    """A way in for clients, on a port that it has taken already."""

    address: str  # for the line that says where to connect

    async def serve(self) -> None:
        """Answer until `stop`."""

    def stop(self) -> None:
        """Take no more connections; `serve` returns once what is going on has ended or given up."""

    def close(self) -> None:
        """Give the port back without having served."""


def run_serve(args: argparse.Namespace, configs: Configs) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError, CheckpointError and UsageError."""
    if args.dry_run:
        print(dry_run_text(configs))
        return 0
    source = configs.run.model_source
    _check_packages("serve", [*PACKAGES, *(GRPC_PACKAGES if configs.server.grpc_port is not None else ())])
    if configs.operations.otlp_endpoint is not None:
        _check_packages("otel", OTEL_PACKAGES)
    import uvloop

    from serving.api.service import Service
    from serving.operations.json_log import use_json_logs, use_text_logs

    if configs.operations.json_logs:
        use_json_logs()
    else:
        use_text_logs()

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    service = Service(configs.server, source)
    _warn_of_open_doors(configs.server)
    doors: list[Door] = []
    try:
        for door in make_doors(service, configs):
            doors.append(door)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(service, doors, lambda: _build(configs, service)))
    finally:
        for door in doors:
            door.close()


def _check_packages(extra: str, names: Sequence[str]) -> None:
    """Raises UsageError, before anything slow, for packages that are not installed."""
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise UsageError(f"serve needs {', '.join(missing)}: pip install 'headrace[{extra}]'")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def make_doors(service: Service, configs: Configs) -> Iterator[Door]:
    """Every door of the config, its port taken. Raises ConfigError."""
    from serving.api.http_server import HttpServer, build_admin_app, build_app

    server = configs.server
    jobs: Jobs | None = None
    routes: list[BaseRoute] = []
    if server.batch_dir is not None:
        from serving.api.http_jobs import job_routes
        from serving.jobs.jobs import Jobs
        from serving.jobs.store import Store

        jobs = Jobs(service, Store(server))
        yield jobs
        routes = job_routes(service, jobs)
    app = build_app(service, version=version(), more_routes=routes)
    yield HttpServer(app, server, host=server.host, port=server.port)
    if server.grpc_port is not None:
        from serving.api.grpc_server import GrpcServer

        yield GrpcServer(service, host=server.host, port=server.grpc_port, version=version(), jobs=jobs)
    if server.admin_port is not None:
        admin = build_admin_app(service, version=version(), config_text=config_text(configs))
        yield HttpServer(admin, server, host=server.admin_host, port=server.admin_port)


async def _serve(service: Service, doors: Sequence[Door], build: Callable[[], Built]) -> int:
    """Run the doors; build the engine beside them; drain at the first signal, and end at the second.

    A third one ends the process as it is, where a device does not answer.
    """
    stop, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if force.is_set():
            os._exit(1)
        (force if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    serving = [asyncio.ensure_future(door.serve()) for door in doors]
    stopping = asyncio.ensure_future(stop.wait())
    forcing = asyncio.ensure_future(force.wait())
    started_s = time.monotonic()
    building = _in_daemon_thread(build)
    engine: AsyncEngine | None = None
    operations: Operations | None = None
    try:
        events: list[asyncio.Future[Any]] = [building, stopping, *serving]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            _check_doors(serving)
            _end_process()  # a thread that loads or compiles cannot be stopped
        engine, operations = building.result()
        gc.collect()
        gc.freeze()  # what is here now stays: a full collection would look through all of it, and hold up every thread
        service.attach(engine, operations)
        addresses = ", ".join(door.address for door in doors)
        print(
            f"headrace: {service.model_name} is ready after {time.monotonic() - started_s:.1f} s: {addresses}",
            flush=True,
        )
        await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
        _check_doors(serving)
        service.drain()
        print("headrace: draining", file=sys.stderr, flush=True)
        idle = asyncio.ensure_future(service.wait_idle())
        await asyncio.wait([idle, forcing], timeout=service.config.drain_grace_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        return 0
    finally:
        if engine is not None:
            await asyncio.to_thread(engine.close)  # gives up what still runs
        if operations is not None:
            await asyncio.to_thread(operations.close)
        for door in doors:
            door.stop()
        await asyncio.gather(*serving, return_exceptions=True)
        stopping.cancel()
        forcing.cancel()
        service.close()


def _check_doors(serving: Sequence[asyncio.Future[None]]) -> None:
    for task in serving:
        if task.done():
            task.result()
            raise RuntimeError("a server has ended by itself")


def _in_daemon_thread(build: Callable[[], Built]) -> asyncio.Future[Built]:
    """The result of `build`, run in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Built] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = functools.partial(future.set_result, build())
        except BaseException as error:
            settle = functools.partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="headrace-build", daemon=True).start()
    return future


def _end_process() -> None:
    print("headrace: stopped before the model was ready", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _build(configs: Configs, service: Service) -> Built:
    from serving.async_engine import AsyncEngine  # imports JAX, which takes seconds
    from serving.engine import build_engine
    from serving.operations.operations import Operations
    from serving.text.template_renderer import RenderLimits

    progress = ProgressReporter(True)
    engine = build_engine(
        configs.run.model_source,
        resolved_engine_config(configs.engine, configs.server),
        configs.mesh,
        scheduling=configs.scheduling,
        progress=progress,
        render_limits=RenderLimits(max_cpu_s=configs.server.chat_template_s),
    )
    progress.note(f"memory of one device:\n{engine.runner.ledger}")
    progress.note(f"settings beside the defaults: {', '.join(changed_settings(configs))}")
    if engine.tokenizer is not None:
        engine.load_structured()
    operations = Operations(
        engine, configs.operations, model_name=service.model_name, is_ready=lambda: service.is_ready
    )
    return AsyncEngine(engine), operations


def resolved_engine_config(config: EngineConfig, server: ServerConfig) -> EngineConfig:
    """The engine's config, with what it leaves to the server."""
    if config.prefix_cache_scope is not None or not config.enable_prefix_caching:
        return config
    return dataclasses.replace(config, prefix_cache_scope="tenant" if server.has_tenants else "shared")


def dry_run_text(configs: Configs) -> str:
    """What `configs` and the model's files say without weights: sizes, and the settings in force.

    Raises ConfigError or CheckpointError where the engine could not be built from them.
    """
    import jax.numpy as jnp

    from checkpoints.source import open_source
    from layers.params import param_specs
    from serving.execution.memory import page_bytes
    from serving.execution.program_plan import context_length
    from serving.text.tokenizer import load_tokenizer
    from sharding.placement import check_split

    config, shards = configs.engine, configs.mesh.tensor
    source = open_source(configs.run.model_source)
    model = source.model_config
    check_split(model, shards)
    tokenizer = load_tokenizer(source.tokenizer_files())
    specs = param_specs(model, jnp.dtype(config.dtype), shards)
    num_bytes = sum(spec.nbytes for spec in specs.values())
    page = page_bytes(model, config, jnp.dtype(config.kv_format[0]).itemsize, shards)
    lines = [
        config_text(configs),
        f"# context {context_length(model, config)} tokens; tokenizer: {'none' if tokenizer is None else 'found'}",
        f"# weights {num_bytes / 2**20:,.1f} MiB over {configs.mesh.num_devices} device(s)",
        f"# KV {page / config.page_size:,.1f} bytes a token on each device",
    ]
    return "\n".join(lines)


def _warn_of_open_doors(config: ServerConfig) -> None:
    if config.api_keys:
        return
    try:
        is_local = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_local = config.host == "localhost"
    if not is_local:
        print(f"headrace: warning: no api_key is set: whoever reaches {config.host} may use the model", file=sys.stderr)
