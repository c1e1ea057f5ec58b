"""Our own format: a folder with an Orbax checkpoint of the parameters, and a manifest that makes it whole.

    DST/headrace_manifest   digest of the next line; then JSON: model config, parameters, size and digest of each file
    DST/params/...          Orbax, one Zarr array a parameter
    DST/config.json ...     config, generation config and tokenizer files, as the model came with them

The folder is written under another name and renamed when all of it is on disk, so it exists whole or not at all.
The manifest is written last and its digests are verified at every opening: a missing, cut, changed or added file is
found before anything is read. The digests guard against damage, not against a forger, who can write them anew;
so shapes and chunk layouts are held against the model's config before Orbax sees the folder.

Parameters are stored as one set of shards had them. Opening on another number of shards changes the padding of the
vocabulary (Orbax fills with zeros or cuts) and the copies of KV heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from checkpoints.errors import CheckpointError, shown
from checkpoints.files import ReadOnlyFile, parse_json_object
from checkpoints.kv_layout import regroup
from checkpoints.load import Progress, check_specs
from checkpoints.param_names import is_norm, param_shapes
from configs.model import ModelConfig, RopeConfig
from sharding.param_spec import ParamSpec

MANIFEST_FILE = "headrace_manifest"
PARAMS_FOLDER = "params"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_ARRAY_METADATA_BYTES = 1 << 16
TABLES = ("embed/weight", "lm_head/weight")  # their rows may be padded
DTYPES = ("float32", "bfloat16")
DIGEST_BYTES = 4 << 20  # read at a time
RESTORE_BYTES = 1 << 30  # of parameters in one call to Orbax: bounds the host's memory, and lets progress be seen


def save_params(
    path: Path | str,
    params: Mapping[str, jax.Array],
    model_config: ModelConfig,
    extra_files: Mapping[str, bytes | Path],
) -> None:
    """Write parameters, as `load_params` of any source gives them, and `extra_files` (name -> content or file).

    Raises CheckpointError if `path` exists, or the parameters are spread over several processes.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if jax.process_count() > 1:
        raise CheckpointError(f"{path}: saving from {jax.process_count()} processes is not supported")
    if os.path.lexists(path):
        raise CheckpointError(f"{path}: exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.unfinished-"))
    try:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
        with _without_merge_notice(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(temporary / PARAMS_FOLDER, args=ocp.args.PyTreeSave(dict(params)))
        for name, content in extra_files.items():
            assert ".." not in name and name.split("/")[0] not in ("", MANIFEST_FILE, PARAMS_FOLDER), name
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        _write_manifest(temporary, params, model_config)
        _sync(temporary)
        temporary.chmod(0o755)  # mkdtemp's folder is the owner's alone
        temporary.rename(path)
        _sync_entry(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def _without_merge_notice() -> Iterator[None]:
    """Orbax warns at each save without its OCDBT database that it found none to merge. That is as it should be."""

    def is_another(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in record.getMessage()

    absl_logger = logging.getLogger("absl")
    absl_logger.addFilter(is_another)
    try:
        yield
    finally:
        absl_logger.removeFilter(is_another)


def _write_manifest(folder: Path, params: Mapping[str, jax.Array], model_config: ModelConfig) -> None:
    content = {
        "format": FORMAT_VERSION,
        "model_config": dataclasses.asdict(model_config),
        "params": {path: {"shape": list(array.shape), "dtype": str(array.dtype)} for path, array in params.items()},
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "digest": _digest(ReadOnlyFile(folder / name))}
            for name in _files_in(folder)
        },
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    (folder / MANIFEST_FILE).write_bytes(_digest_of(text).encode() + b"\n" + text)


def _files_in(folder: Path) -> list[str]:
    """Paths of all files under the folder, relative to it. Symbolic links count as files."""
    files = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        files += [(Path(parent) / name).relative_to(folder).as_posix() for name in names + links]
    return sorted(files)


def _digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _digest(file: ReadOnlyFile) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, file.size, DIGEST_BYTES):
        digest.update(file.read(start, min(DIGEST_BYTES, file.size - start)))
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync_entry(Path(parent) / name)
        _sync_entry(Path(parent))


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass(frozen=True)
class OrbaxStore:
    """An opened and verified folder."""

    folder: Path
    model_config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def load_params(
        self,
        specs: Mapping[str, ParamSpec],
        shardings: Mapping[str, jax.sharding.Sharding],
        tensor_shards: int,
        progress: Progress | None,
    ) -> dict[str, jax.Array]:
        """Restore straight into the wanted shardings; only where KV heads are stored another number of times does
        a parameter pass through the host. Raises CheckpointError."""
        check_specs(specs, self.model_config, tensor_shards)
        total_bytes = sum(spec.nbytes for spec in specs.values())
        done_bytes = 0
        params: dict[str, jax.Array] = {}
        for batch in _batches(specs):
            params |= self._restore({path: specs[path] for path in batch}, shardings)
            done_bytes += sum(specs[path].nbytes for path in batch)
            if progress is not None:
                progress(done_bytes, total_bytes)
        return {path: params[path] for path in specs}

    def _restore(
        self, specs: Mapping[str, ParamSpec], shardings: Mapping[str, jax.sharding.Sharding]
    ) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        # a vocabulary padded otherwise has another shape, but the same axes; heads stored otherwise have other axes
        regrouped = {
            path for path, spec in specs.items() if _head_axes(path, spec.shape) != _head_axes(path, self.shapes[path])
        }
        restore_args = {
            path: ocp.RestoreArgs(restore_type=np.ndarray)
            if path in regrouped
            else ocp.ArrayRestoreArgs(
                sharding=shardings[path], global_shape=spec.shape, dtype=jnp.dtype(spec.dtype), strict=False
            )
            for path, spec in specs.items()
        }
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(
                    self.folder / PARAMS_FOLDER,
                    args=ocp.args.PyTreeRestore(
                        item=dict.fromkeys(specs, 0), restore_args=restore_args, partial_restore=True
                    ),
                )
        except Exception as error:  # Orbax and TensorStore have no error class of their own
            raise CheckpointError(f"{self.folder}: Orbax cannot restore it: {shown(str(error))}") from error
        for path in regrouped:
            spec = specs[path]
            kv_heads = _head_axes(path, spec.shape)[0]
            host = regroup(path, restored[path], self.model_config.num_kv_heads, kv_heads, np).astype(spec.dtype)
            restored[path] = jax.make_array_from_callback(spec.shape, shardings[path], host.__getitem__)
        return restored


def _head_axes(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the axes that depend on how often KV heads are stored, the KV heads first."""
    if "/qkv/" in path:
        return shape[:2]
    return shape[1:3] if path.endswith("/o/kernel") else ()


def _batches(specs: Mapping[str, ParamSpec]) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    num_bytes = 0
    for path, spec in specs.items():
        if num_bytes and num_bytes + spec.nbytes > RESTORE_BYTES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(path)
        num_bytes += spec.nbytes
    return batches


def open_store(folder: Path) -> OrbaxStore:
    """Read the manifest and verify every file. Raises CheckpointError naming file or field, value and limit."""
    manifest = _read_manifest(folder)
    file = ReadOnlyFile(folder / MANIFEST_FILE)

    def field(name: str, kind: type) -> Any:
        value = manifest.get(name)
        if not isinstance(value, kind):
            file.fail(f"field '{name}': must be a JSON {kind.__name__}, found {shown(value)}")
        return value

    if manifest.get("format") != FORMAT_VERSION:
        file.fail(f"field 'format': {shown(manifest.get('format'))} is not {FORMAT_VERSION}")
    _verify_files(folder, file, field("files", dict))
    config = _config_from_json(file, field("model_config", dict))
    shapes, dtypes = _check_params(file, field("params", dict), config)
    for path in shapes:
        _check_array_metadata(folder, path, shapes[path], dtypes[path])
    return OrbaxStore(folder, config, shapes, dtypes)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = ReadOnlyFile(folder / MANIFEST_FILE)
    if file.size > MAX_MANIFEST_BYTES:
        file.fail(f"has {file.size} bytes, more than the {MAX_MANIFEST_BYTES} that are accepted")
    digest, _, text = file.read(0, file.size).tobytes().partition(b"\n")
    if digest != _digest_of(text).encode():
        file.fail(f"digest {shown(digest)} is not that of its content, {_digest_of(text)}")
    return parse_json_object(text, str(file.path))


def _verify_files(folder: Path, manifest_file: ReadOnlyFile, files: dict[str, Any]) -> None:
    found = set(_files_in(folder)) - {MANIFEST_FILE}
    for name in sorted(found ^ files.keys()):
        manifest_file.fail(f"file {shown(name)} is {'not listed here' if name in found else 'missing from the folder'}")
    for name, entry in files.items():
        if (folder / name).is_symlink():
            manifest_file.fail(f"file {shown(name)} is a symbolic link")
        file = ReadOnlyFile(folder / name)
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "digest"}:
            manifest_file.fail(f"file {shown(name)}: must have bytes and digest, found {shown(entry)}")
        if file.size != entry["bytes"]:
            file.fail(f"has {file.size} bytes, the manifest says {shown(entry['bytes'])}")
        digest = _digest(file)
        if digest != entry["digest"]:
            file.fail(f"digest {digest} is not {shown(entry['digest'])}, as it was saved: the file is damaged")


def _config_from_json(file: ReadOnlyFile, fields: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of `dataclasses.asdict`; the config's own checks raise ConfigError."""

    def build(cls: Any, values: dict[str, Any]) -> Any:
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := values.keys() - names:
            file.fail(f"{cls.__name__} has no field {shown(min(unknown))}")
        try:
            return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
        except TypeError as error:  # a field is missing
            raise CheckpointError(f"{file.path}: {error}") from error

    ropes = {}
    for name in ("rope", "rope_sliding"):
        value = fields.get(name)
        if isinstance(value, dict):
            ropes[name] = build(RopeConfig, value)
        elif value is not None or name == "rope":
            file.fail(f"model_config.{name} must be a JSON object, found {shown(value)}")
    return build(ModelConfig, fields | ropes)


def _check_params(
    file: ReadOnlyFile, params: dict[str, Any], config: ModelConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and dtypes of the stored parameters: those of the config, for some number of shards."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, entry in params.items():
        if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype"}:
            file.fail(f"parameter {shown(path)}: must have shape and dtype, found {shown(entry)}")
        shape, dtype = entry["shape"], entry["dtype"]
        if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
            file.fail(f"parameter {shown(path)}: shape must be positive integers, found {shown(shape)}")
        if dtype not in DTYPES or (is_norm(path) and dtype != "float32"):
            file.fail(f"parameter {shown(path)}: dtype {shown(dtype)} is not supported")
        shapes[path] = tuple(shape)
    expected = param_shapes(config, 1)
    for path in sorted(expected.keys() ^ shapes.keys()):
        file.fail(f"parameter {shown(path)}: is {'missing' if path in expected else 'not one of the model'}")
    kv_heads = shapes["layers/0/qkv/kernel"][0]
    if kv_heads % config.num_kv_heads or config.num_heads % kv_heads:
        file.fail(f"parameter 'layers/0/qkv/kernel': {kv_heads} stored KV heads do not fit {config.num_kv_heads}")
    # any number of copies gives these shapes, but for the rows of the vocabulary
    expected |= {
        path: shape
        for path, shape in param_shapes(config, kv_heads if kv_heads > config.num_kv_heads else 1).items()
        if path not in TABLES
    }
    for path, shape in shapes.items():
        if path in TABLES:
            fits = shape[1:] == expected[path][1:] and shape[0] >= config.vocab_size
        else:
            fits = shape == expected[path]
        if not fits:
            file.fail(f"parameter {shown(path)}: shape {list(shape)} does not fit {list(expected[path])}")
    return shapes, {path: entry["dtype"] for path, entry in params.items()}


def _check_array_metadata(folder: Path, path: str, shape: tuple[int, ...], dtype: str) -> None:
    """Hold the Zarr metadata of one parameter, which TensorStore will follow, against the manifest."""
    file = ReadOnlyFile(folder / PARAMS_FOLDER / path / "zarr.json")
    if file.size > MAX_ARRAY_METADATA_BYTES:
        file.fail(f"has {file.size} bytes, more than the {MAX_ARRAY_METADATA_BYTES} that are accepted")
    metadata = parse_json_object(file.read(0, file.size).tobytes(), str(file.path))
    if metadata.get("shape") != list(shape):
        file.fail(f"field 'shape': {shown(metadata.get('shape'))} is not {list(shape)}")
    if metadata.get("data_type") != dtype:
        file.fail(f"field 'data_type': {shown(metadata.get('data_type'))} is not {dtype}")
    for chunk_shape in _chunk_shapes(metadata):
        is_list = isinstance(chunk_shape, list) and len(chunk_shape) == len(shape)
        if not is_list or not all(type(size) is int and size > 0 for size in chunk_shape):
            file.fail(f"field 'chunk_shape': {shown(chunk_shape)} is not {len(shape)} positive integers")
        if math.prod(chunk_shape) > math.prod(shape):
            file.fail(f"field 'chunk_shape': {shown(chunk_shape)} is larger than the array's shape {list(shape)}")


def _chunk_shapes(value: Any) -> list[Any]:
    """Every `chunk_shape` in the metadata, of the grid and of the codecs inside its chunks."""
    if isinstance(value, dict):
        own = [value["chunk_shape"]] if "chunk_shape" in value else []
        return own + [shape for item in value.values() for shape in _chunk_shapes(item)]
    if isinstance(value, list):
        return [shape for item in value for shape in _chunk_shapes(item)]
    return []
