"""Executables on disk: loaded at start where they are those of the very same programs.

`headrace compile` writes them without the device; an engine on an accelerator keeps what it compiled in its compilation
cache, since loading skips the lowering that JAX's own cache cannot. A folder holds `manifest.json` and one file a program, the compiler's own serialised form. No pickle: everything beside
those bytes (argument and result trees, shardings) is built anew from the engine's own programs, and the manifest is
JSON that only ever gets compared with what this engine would write. The executables themselves are machine code: a
folder is to be trusted like the program that loads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding

from checkpoints.errors import CheckpointError
from checkpoints.files import open_in_folder, read_json_object
from configs.engine import EngineConfig
from configs.model import ModelConfig
from serving.execution.program_plan import AbstractState, Program, compile_programs

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
FORMAT = 1
MAX_CACHED = 8  # engines whose executables a compilation cache keeps

# Fields of EngineConfig that change no program. Pages and context are compared as what they came to.
HOST_FIELDS = (
    "max_model_len",
    "num_pages",
    "memory_fraction",
    "kv_cache_bytes",
    "swap_bytes",
    "preemption",
    "enable_prefix_caching",
    "prefix_cache_scope",
    "prefix_cache_floor",
    "prefix_wait_tokens",
    "max_pinned_pages",
    "seed",
    "compilation_cache_dir",
    "executables_dir",
)
# Settings of JAX that change what is traced or lowered.
JAX_OPTIONS = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_high_dynamic_range_gumbel",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_pallas_enable_debug_checks",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    "jax_use_hlo_logistic_lowering",
)
# XLA flags that do not change the code of a program.
IGNORED_XLA_FLAGS = (
    "--xla_dump_",
    "--xla_force_host_platform_device_count",
)
CODE = (
    "configs/model.py",
    "layers",
    "pallas_kernels",
    "sharding",
    "serving/execution",
)  # that programs are traced from


class ExecutablesError(ValueError):
    """A folder of executables, or one of them, cannot be used; the message says why."""


@dataclass(frozen=True)
class _Entry:
    """What a manifest says of one program."""

    sha256: str
    temp_bytes: int
    inputs: list[str]  # in flat order
    outputs: list[str]
    kept_inputs: list[int]  # rising places among the inputs

    @classmethod
    def parse(cls, raw: Any) -> _Entry:
        """Raises ExecutablesError on anything that `write_executables` does not write."""
        try:
            entry = cls(**{field.name: raw[field.name] for field in dataclasses.fields(cls)})
            kept = entry.kept_inputs
            is_right = (
                all(isinstance(values, list) for values in (entry.inputs, entry.outputs, kept))
                and all(type(number) is int for number in (entry.temp_bytes, *kept))
                and entry.temp_bytes >= 0
                and kept == sorted(set(kept) & {*range(len(entry.inputs))})
            )
        except (KeyError, TypeError):
            is_right = False
        if not is_right:
            raise ExecutablesError(f"its entry in {MANIFEST_FILE} is malformed")
        return entry


@dataclass(frozen=True)
class LoadedProgram:
    """A program from disk: what compiling it would have given, the seconds it took, its temporaries in bytes."""

    compiled: jax.stages.Compiled
    load_s: float
    temp_bytes: int


def environment(model: ModelConfig, config: EngineConfig, state: AbstractState) -> dict[str, Any]:
    """What executables depend on, as JSON values by name; equal here and there, or they are not used."""
    mesh: Mesh = state.kv_cache[0].pages.sharding.mesh
    device = mesh.devices.flat[0]
    flags = os.environ.get("XLA_FLAGS", "").split()
    values: dict[str, Any] = {
        "format": FORMAT,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "plugin": _plugin_version(device.platform),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "mesh": dict(mesh.shape),
        "xla_flags": sorted(flag for flag in flags if not flag.startswith(IGNORED_XLA_FLAGS)),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", "").split(),
        "jax_options": {name: str(jax.config.values.get(name)) for name in JAX_OPTIONS},
        "code_sha256": _code_digest(),
        "model_sha256": _digest(json.dumps(dataclasses.asdict(model), sort_keys=True).encode()),
        "EngineConfig": {name: value for name, value in vars(config).items() if name not in HOST_FIELDS},
        "num_pages": state.kv_cache[0].pages.shape[0],
        "max_pages_per_sequence": state.table.page_table.shape[1],
    }
    if device.platform == "cpu":  # its code may use any instruction that the processor has
        values["processor_sha256"] = _digest(_processor().encode())
    return json.loads(json.dumps(values))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _processor() -> str:
    """The instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _plugin_version(backend: str) -> str | None:
    name = {"gpu": "jax-cuda13-plugin", "tpu": "libtpu"}.get(backend)
    try:
        return None if name is None else metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _code_digest() -> str:
    """Of every source and data file that programs are traced from."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for name in CODE:
        for path in sorted([root / name, *(root / name).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def file_name(program: str) -> str:
    """The file of a program: `decode(8, 1)` is in decode_8_1.xla."""
    return "_".join(re.findall(r"\w+", program)) + ".xla"


# Writing


def check_new_folder(folder: Path) -> None:
    """Raise FileExistsError where there is something of that name."""
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, "exists already", str(folder))


def write_executables(
    folder: Path,
    values: Mapping[str, Any],
    plan: Mapping[str, Program],
    mesh: Mesh,
    progress: Callable[[str, int, int, float], None] | None = None,
) -> int:
    """Compile a plan and write its executables and manifest to the new folder `folder`; returns their bytes.

    values: what `environment` gives. progress(name, number done, number in all, seconds) is called after each program.
    Raises OSError where the folder exists or cannot be made. It appears whole or not at all.
    """
    check_new_folder(folder)
    executables: dict[str, jax.stages.Compiled] = {}
    with _no_compilation_cache():
        for name, compiled, seconds in compile_programs(plan, mesh):
            executables[name] = compiled
            if progress is not None:
                progress(name, len(executables), len(plan), seconds)
    return _store(folder, values, plan, executables, mesh)


def _store(
    folder: Path,
    values: Mapping[str, Any],
    plan: Mapping[str, Program],
    executables: Mapping[str, jax.stages.Compiled],
    mesh: Mesh,
) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as draft_name:
        draft = Path(draft_name) / "executables"
        draft.mkdir()
        entries: dict[str, dict[str, Any]] = {}
        for name, compiled in executables.items():
            content = _serialised(compiled)
            (draft / file_name(name)).write_bytes(content)
            inputs, outputs = _signature(plan[name], _trace(plan[name], mesh))
            entries[name] = {
                "sha256": _digest(content),
                "num_bytes": len(content),
                "temp_bytes": temp_bytes(compiled),
                "inputs": inputs,
                "outputs": outputs,
                "kept_inputs": _kept_inputs(compiled),
            }
        manifest = {"environment": values, "programs": entries}
        (draft / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
        draft.rename(folder)
    return sum(entry["num_bytes"] for entry in entries.values())


def cache_folder(cache: Path, values: Mapping[str, Any]) -> Path:
    """Where a compilation cache keeps the executables of `values`, or would."""
    return cache / "executables" / _digest(json.dumps(values, sort_keys=True).encode())


def add_to_cache(
    folder: Path,
    values: Mapping[str, Any],
    plan: Mapping[str, Program],
    executables: Mapping[str, jax.stages.Compiled],
    mesh: Mesh,
) -> None:
    """Keep a whole plan's executables in `folder`, a `cache_folder`, in the place of what is there; of all such folders
    the MAX_CACHED used last stay. What cannot be written is logged."""
    try:
        shutil.rmtree(folder, ignore_errors=True)  # some program of it could not be loaded
        _store(folder, values, plan, executables, mesh)
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in others[:-MAX_CACHED]:
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        logger.warning("%s: executables are not kept: %s", folder, error)


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Programs are compiled, not read from JAX's cache: XLA's CPU backend cannot serialise whole what it has read."""
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or its first answer, whether a cache is used, would stand
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of a device that the program takes for its temporaries."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def _kept_inputs(compiled: jax.stages.Compiled) -> list[int]:
    """Places of the arguments that the executable takes: lowering drops those without use."""
    executable = compiled._executable
    assert isinstance(executable, pxla.MeshExecutable)
    return sorted(executable._kept_var_idx)


def _serialised(compiled: jax.stages.Compiled) -> bytes:
    executable: Any = compiled.runtime_executable()
    if isinstance(executable, xla_client.LoadedExecutable):  # of a device that is here
        return executable.client.serialize_executable(executable)
    return executable.serialize()


def _trace(program: Program, mesh: Mesh) -> jax.stages.Traced:
    with jax.set_mesh(mesh):
        return program.function.trace(*program.args)


def _signature(program: Program, traced: jax.stages.Traced) -> tuple[list[str], list[str]]:
    """Arguments and results in flat order as texts: dtype, shape and axes."""
    return (
        [_described(x) for x in jax.tree.leaves(program.args)],
        [_described(x) for x in traced.jaxpr.out_avals],
    )


def _described(array: Any) -> str:
    spec = [axis for axis in array.sharding.spec] + [None] * (array.ndim - len(array.sharding.spec))
    return f"{array.dtype}{list(array.shape)}" + (f" over {spec}" if any(spec) else "")


# Loading


def load_executables(
    folder: Path, values: Mapping[str, Any], plan: Mapping[str, Program], mesh: Mesh
) -> dict[str, LoadedProgram]:
    """The programs of `plan` that `folder` has for this very engine, by name; those that it has not are left out.

    values: what `environment` gives here. A folder or program that cannot be used is logged with the reason. Nothing is
    compiled.
    """
    loaded: dict[str, LoadedProgram] = {}
    try:
        entries = _matching_entries(folder, values)
        with contextlib.suppress(OSError):
            os.utime(folder)  # a cache keeps those used last
        with ThreadPoolExecutor(max_workers=2) as pool:  # reading and unpacking beside tracing, which holds Python
            futures = {name: pool.submit(_read, folder, name, entries, mesh) for name in plan}
            for name, program in plan.items():
                started_s = time.monotonic()
                try:
                    entry, executable = futures[name].result()
                    compiled = _bound(program, _trace(program, mesh), entry, executable, mesh)
                except ExecutablesError as error:
                    logger.warning("%s: program %s is compiled: %s", folder, name, error)
                    continue
                loaded[name] = LoadedProgram(compiled, time.monotonic() - started_s, entry.temp_bytes)
    except ExecutablesError as error:
        logger.warning("%s: no executable is used: %s", folder, error)
    logger.info("%s: loaded %d of %d programs", folder, len(loaded), len(plan))
    return loaded


def _matching_entries(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's programs by name. Raises ExecutablesError naming the first thing in which it differs."""
    try:
        manifest = read_json_object(open_in_folder(folder, MANIFEST_FILE), max_bytes=MAX_MANIFEST_BYTES)
    except CheckpointError as error:
        raise ExecutablesError(str(error)) from error
    there, entries = manifest.get("environment"), manifest.get("programs")
    if not isinstance(there, dict) or not isinstance(entries, dict):
        raise ExecutablesError(f"{MANIFEST_FILE} has no environment or no programs")
    for name in [*values, *there]:
        _check_equal(name, there.get(name), values.get(name))
    return entries


def _check_equal(name: str, there: Any, here: Any) -> None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*here, *there]:
            _check_equal(f"{name}.{key}", there.get(key), here.get(key))
    elif there != here:
        raise ExecutablesError(f"{name} is {str(there)[:80]} there and {str(here)[:80]} here")


def _read(folder: Path, name: str, entries: Mapping[str, Any], mesh: Mesh) -> tuple[_Entry, Any]:
    """What the manifest says of program `name`, and its executable, unpacked for the devices of `mesh`."""
    if name not in entries:
        raise ExecutablesError("it is not in the manifest")
    entry = _Entry.parse(entries[name])
    try:
        file = open_in_folder(folder, file_name(name))
        content = file.read(0, file.size).tobytes()
    except CheckpointError as error:
        raise ExecutablesError(str(error)) from error
    if _digest(content) != entry.sha256:
        raise ExecutablesError(f"{file_name(name)} is damaged: its sha256 is not the manifest's")
    devices = tuple(mesh.devices.flat)
    try:
        executable = devices[0].client.deserialize_executable(
            content, executable_devices=xla_client.DeviceList(devices)
        )
    except Exception as error:  # whatever the plugin raises
        raise ExecutablesError(f"{file_name(name)}: {error!r}") from error
    return entry, executable


def _bound(
    program: Program, traced: jax.stages.Traced, entry: _Entry, executable: Any, mesh: Mesh
) -> jax.stages.Compiled:
    """What `program.lower().compile()` would return, around an executable that is here already.

    jax offers this only through pickle (jax.experimental.serialize_executable). All that is pickled there is known
    here from tracing, but for the arguments that lowering dropped: their places are in the manifest.
    """
    inputs, outputs = _signature(program, traced)
    _check_equal("its arguments", entry.inputs, inputs)
    _check_equal("its results", entry.outputs, outputs)
    arguments, in_avals = jax.tree.leaves(program.args), traced.jaxpr.in_avals
    assert len(in_avals) == len(arguments), "the program closes over arrays"
    out_avals = traced.jaxpr.out_avals
    in_avals = [in_avals[i] for i in entry.kept_inputs]
    in_shardings = [arguments[i].sharding for i in entry.kept_inputs]
    out_shardings = [NamedSharding(mesh, aval.sharding.spec) for aval in out_avals]
    try:
        in_layouts, out_layouts = pxla._get_layouts_from_executable(
            executable, (None,) * len(in_avals), (None,) * len(out_avals), 0, in_avals, out_avals
        )
        mesh_executable = pxla.UnloadedMeshExecutable(
            xla_executable=executable,
            device_list=xla_client.DeviceList(tuple(mesh.devices.flat)),
            backend=mesh.devices.flat[0].client,
            input_avals=in_avals,
            input_shardings=in_shardings,
            output_avals=out_avals,
            output_shardings=out_shardings,
            committed=True,
            name=traced.fun_name,
            unordered_effects=[],
            ordered_effects=[],
            keepalive=[],
            host_callbacks=[],
            kept_var_idx=set(entry.kept_inputs),
            mut=None,
            xla_in_layouts=in_layouts,
            dispatch_in_layouts=pxla.get_dispatch_layouts(in_layouts, in_shardings, in_avals),
            xla_out_layouts=out_layouts,
            all_args_info=None,
            pgle_profiler=None,
        ).load()
    except Exception as error:  # numbers of arguments or layouts that do not fit
        raise ExecutablesError(f"it cannot be called: {error!r}") from error
    return jax.stages.Compiled(mesh_executable, [], traced.args_info, traced.out_tree, no_kwargs=True)
