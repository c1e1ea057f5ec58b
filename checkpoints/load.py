"""Foreign tensors -> sharded parameters, one parameter and one range of rows at a time.

A host reads each byte that its devices need once, also where the devices' parts share rows, casts it, and writes it
into one buffer for each different part. Beyond the finished arrays it holds one parameter and a few ranges of rows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.param_names import Naming, ParamRows, is_norm, param_rows, param_shapes
from checkpoints.tensors import SourceTensor
from configs.model import ModelConfig
from sharding.param_spec import ParamSpec

type Progress = Callable[[int, int], None]  # done_bytes, total_bytes of the finished arrays

CHUNK_BYTES = 2 << 20  # of rows read, converted and written in one go
MAX_THREADS = 8  # conversion of quantised rows is what takes the time


def load_tensors(
    tensors: Mapping[str, SourceTensor],
    config: ModelConfig,
    naming: Naming,
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, jax.sharding.Sharding],
    tensor_shards: int,
    progress: Progress | None,
) -> dict[str, jax.Array]:
    """Fill the parameters of `specs` from `tensors`, which `check_tensors` has checked.

    Raises CheckpointError if a file has changed since it was opened.
    """
    check_specs(specs, config, tensor_shards)
    total_bytes = sum(spec.nbytes for spec in specs.values())
    done_bytes = 0
    params: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for path, spec in specs.items():
            rows = param_rows(path, spec.shape, config, naming)
            offset = config.norm_weight_offset if naming.adds_norm_offset and is_norm(path) else 0.0
            params[path] = _load_param(rows, tensors, spec, shardings[path], offset, pool)
            done_bytes += spec.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    return params


def check_specs(specs: Mapping[str, ParamSpec], config: ModelConfig, tensor_shards: int) -> None:
    """The parameters that the layers ask for are those that the loader knows how to fill."""
    shapes = {path: spec.shape for path, spec in specs.items()}
    assert shapes == param_shapes(config, tensor_shards), sorted(
        shapes.items() ^ param_shapes(config, tensor_shards).items()
    )


def _load_param(
    rows: ParamRows,
    tensors: Mapping[str, SourceTensor],
    spec: ParamSpec,
    sharding: jax.sharding.Sharding,
    offset: float,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    num_row_axes = rows.num_row_axes
    row_ids = np.arange(len(rows.foreign_row)).reshape(spec.shape[:num_row_axes])
    col_ids = np.arange(int(np.prod(spec.shape[num_row_axes:]))).reshape(spec.shape[num_row_axes:])

    # one buffer for each different part that a device of this host holds; parts that share rows are read together
    index_of_device = {
        device: index or () for device, index in sharding.addressable_devices_indices_map(spec.shape).items()
    }
    parts = {_key(index, spec.shape): index for index in index_of_device.values()}
    buffers: dict[Key, np.ndarray] = {}
    by_rows: dict[Key, list[tuple[np.ndarray, np.ndarray]]] = {}  # rows -> column ids and buffer of each part
    for key, index in parts.items():
        columns = col_ids[index[num_row_axes:]].ravel()
        buffers[key] = np.zeros((row_ids[index[:num_row_axes]].size, columns.size), jnp.dtype(spec.dtype))
        by_rows.setdefault(key[:num_row_axes], []).append((columns, buffers[key]))
    jobs = []
    for row_key, targets in by_rows.items():
        ids = row_ids[tuple(slice(start, stop) for start, stop in row_key)].ravel()
        for start, stop in _chunks(rows, ids, tensors, col_ids.size):
            jobs.append(pool.submit(_fill, rows, tensors, ids[start:stop], start, targets, offset))
    for job in jobs:
        job.result()

    arrays = [
        jax.device_put(_shard(buffers[_key(index, spec.shape)], index, spec.shape), device)
        for device, index in index_of_device.items()
    ]
    array = jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)
    return array.block_until_ready()  # so that the buffers are free before the next parameter


type Key = tuple[tuple[int, int], ...]  # start and stop along each axis


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> Key:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _shard(buffer: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
    return buffer.reshape([stop - start for start, stop in _key(index, shape)])


def _chunks(
    rows: ParamRows, ids: np.ndarray, tensors: Mapping[str, SourceTensor], num_cols: int
) -> list[tuple[int, int]]:
    """Ranges of `ids` whose rows come from one tensor each and take about CHUNK_BYTES; rows of zeros are left out."""
    tensor_ids = rows.tensor_of_row[ids]
    edges = [0, *(np.flatnonzero(np.diff(tensor_ids)) + 1).tolist(), len(ids)]
    chunks = []
    for start, stop in itertools.pairwise(edges):
        if tensor_ids[start] < 0:
            continue
        stored_row_bytes = tensors[rows.tensors[tensor_ids[start]]].stored_row_bytes
        step = max(1, CHUNK_BYTES // max(stored_row_bytes, 4 * num_cols))
        chunks += [(at, min(at + step, stop)) for at in range(start, stop, step)]
    return chunks


def _fill(
    rows: ParamRows,
    tensors: Mapping[str, SourceTensor],
    ids: np.ndarray,
    at: int,
    targets: list[tuple[np.ndarray, np.ndarray]],
    offset: float,
) -> None:
    """Write rows `ids` of the parameter, all of one tensor, to rows [at, at + len(ids)) of the targets' buffers."""
    tensor = tensors[rows.tensors[rows.tensor_of_row[ids[0]]]]
    first_col = min(int(columns[0]) for columns, _ in targets)
    last_col = max(int(columns[-1]) for columns, _ in targets) + 1
    values = _read_rows(tensor, rows.foreign_row[ids], first_col, last_col)
    if offset:
        values = values.astype(np.float32) + np.float32(offset)  # Gemma multiplies by 1 + w
    with np.errstate(all="ignore"):  # a value too large for the dtype becomes infinite, as in every other engine
        for columns, buffer in targets:
            buffer[at : at + len(ids)] = values[:, _as_slice(columns - first_col)]


def _as_slice(ids: np.ndarray) -> slice | np.ndarray:
    """Rising ids without gaps as a slice, which numpy copies faster."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == len(ids) else ids


def _read_rows(tensor: SourceTensor, row_ids: np.ndarray, first_col: int, last_col: int) -> np.ndarray:
    """Rows of a tensor in any order. Reads the range that they span, in halves where it is mostly unwanted rows."""
    low, high = int(row_ids.min()), int(row_ids.max()) + 1
    if high - low > 2 * len(row_ids):
        middle = len(row_ids) // 2
        halves = [_read_rows(tensor, half, first_col, last_col) for half in (row_ids[:middle], row_ids[middle:])]
        return np.concatenate(halves)
    values = tensor.read_rows(low, high, first_col, last_col)
    return values[_rows_slice(row_ids - low)]


def _rows_slice(ids: np.ndarray) -> slice | np.ndarray:
    return _as_slice(ids) if bool((np.diff(ids) == 1).all()) else ids


def tables_differ(tensor: SourceTensor, other: SourceTensor) -> bool:
    """Whether two tensors of one shape hold different values anywhere. Reads them range by range."""
    num_rows, num_cols = tensor.shape
    step = max(1, CHUNK_BYTES // max(tensor.stored_row_bytes, other.stored_row_bytes, 4 * num_cols))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        mine, others = (t.read_rows(start, stop, 0, num_cols).astype(np.float32) for t in (tensor, other))
        if not np.array_equal(mine, others, equal_nan=True):
            return True
    return False
