"""Reads safetensors: an 8-byte length, a JSON header, then the data (huggingface.co/docs/safetensors).

The header is parsed and checked here, and in full, before anything of the data is read: names once, known dtypes,
shapes that agree with their byte ranges, ranges that tile the data without gap or overlap.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, shown
from checkpoints.files import ReadOnlyFile, exists_in_folder, open_in_folder, parse_json_object, read_json_object

logger = logging.getLogger(__name__)

FORMAT_MAX_HEADER_BYTES = 100_000_000
# Parsed JSON takes up to 25 times its text in memory, so a header is held to what models have: the largest
# dense ones need 0.2 MB.
MAX_HEADER_BYTES = 2 << 20
MAX_INDEX_BYTES = 2 << 20
MAX_RANK = 8
MAX_DIMENSION = 2**63 - 1

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Names and item sizes of the format. Sub-byte dtypes (F4, F6_*) need scales that no dense model file has.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOAT_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor's place in a file; a `SourceTensor`."""

    name: str
    file: ReadOnlyFile
    dtype_name: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def where(self) -> str:
        return f"{self.file.path}: tensor {shown(self.name)}"

    @property
    def _num_cols(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def stored_row_bytes(self) -> int:
        return self._num_cols * ITEM_BYTES[self.dtype_name]

    def read_rows(self, start: int, stop: int, col_start: int, col_stop: int) -> np.ndarray:
        row_bytes = self.stored_row_bytes
        data = self.file.read(self.offset + start * row_bytes, (stop - start) * row_bytes)
        rows = data.view(FLOAT_DTYPES[self.dtype_name]).reshape(stop - start, self._num_cols)
        return rows[:, col_start:col_stop]


def read_header(file: ReadOnlyFile) -> dict[str, SafetensorsTensor]:
    """The tensors of one file by name. Raises CheckpointError naming file, tensor or field, value and limit."""
    if file.size < 8:
        file.fail(f"has {file.size} bytes; a safetensors file begins with an 8-byte header length")
    header_bytes = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if header_bytes > FORMAT_MAX_HEADER_BYTES:
        file.fail(f"header length {header_bytes} is above the format's limit of {FORMAT_MAX_HEADER_BYTES} bytes")
    if 8 + header_bytes > file.size:
        file.fail(f"header length {header_bytes} plus 8 is more than the file's {file.size} bytes")
    if header_bytes > MAX_HEADER_BYTES:
        file.fail(f"header length {header_bytes} is above the {MAX_HEADER_BYTES} bytes accepted here")
    if header_bytes < 2:
        file.fail(f"header length {header_bytes} is less than the 2 bytes of an empty header")
    text = file.read(8, header_bytes).tobytes()
    if text[:1] != b"{":
        file.fail(f"header begins with {shown(text[:1])}, not with '{{'")
    header = parse_json_object(text, f"{file.path}: header")
    _check_metadata(file, header.pop("__metadata__", {}))

    data_start = 8 + header_bytes
    data_bytes = file.size - data_start
    tensors: dict[str, SafetensorsTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        begin, end, tensor = _parse_entry(file, name, entry, data_start, data_bytes)
        ranges.append((begin, end, name))
        tensors[name] = tensor
    _check_tiling(file, ranges, data_bytes)
    return tensors


def _check_metadata(file: ReadOnlyFile, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        file.fail(f"header field '__metadata__' must map strings to strings, found {shown(metadata)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DIMENSION


def _parse_entry(
    file: ReadOnlyFile, name: str, entry: Any, data_start: int, data_bytes: int
) -> tuple[int, int, SafetensorsTensor]:
    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{file.path}: tensor {shown(name)}: {reason}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse(f"must have exactly dtype, shape and data_offsets, found {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refuse(f"dtype {shown(dtype)} is not one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        raise refuse(f"shape must be at most {MAX_RANK} integers in [0, 2^63), found {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise refuse(f"data_offsets must be two integers in [0, 2^63), found {shown(offsets)}")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise refuse(f"data_offsets {shown(offsets)} break 0 <= begin <= end <= {data_bytes}, the bytes of data")
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if num_bytes != end - begin:
        raise refuse(f"shape {shown(shape)} of {dtype} takes {num_bytes} bytes, data_offsets give {end - begin}")
    return begin, end, SafetensorsTensor(name, file, dtype, tuple(shape), data_start + begin)


def _check_tiling(file: ReadOnlyFile, ranges: list[tuple[int, int, str]], data_bytes: int) -> None:
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            file.fail(f"tensor {shown(name)}: begins at data byte {begin} and {fault}, which ends at {position}")
        position = end
    if position != data_bytes:
        file.fail(f"the tensors end at data byte {position}, the data at {data_bytes}")


def read_folder(folder: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of a model folder: by its index if it has one, else of `model.safetensors`.

    The index decides which files are read. A safetensors file that it does not name is left alone with a notice.
    Raises CheckpointError for a missing or foreign file, a tensor that is not where the index says, or that a
    second file holds too.
    """
    if exists_in_folder(folder, INDEX_FILE):
        tensors, used_files = _read_by_index(folder)
    elif exists_in_folder(folder, SINGLE_FILE):
        tensors, used_files = read_header(open_in_folder(folder, SINGLE_FILE)), {SINGLE_FILE}
    else:
        raise CheckpointError(f"{folder}: has neither {INDEX_FILE} nor {SINGLE_FILE}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in used_files:
            logger.warning("%s: is not part of the model and is ignored", path)
    return tensors


def _read_by_index(folder: Path) -> tuple[dict[str, SafetensorsTensor], set[str]]:
    index_file = open_in_folder(folder, INDEX_FILE)
    weight_map = read_json_object(index_file, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        index_file.fail(f"field 'weight_map' must map tensor names to file names, found {shown(weight_map)}")
    tensors: dict[str, SafetensorsTensor] = {}
    first_tensor = {file_name: name for name, file_name in reversed(weight_map.items())}
    for file_name in sorted(first_tensor):
        try:
            if not file_name.endswith(".safetensors"):
                raise CheckpointError(f"{folder}: {shown(file_name)} is not the name of a .safetensors file")
            shard = read_header(open_in_folder(folder, file_name))
        except CheckpointError as error:
            where = f"named by {INDEX_FILE} for tensor {shown(first_tensor[file_name])}"
            raise CheckpointError(f"{error} ({where})") from error
        for name, tensor in shard.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.where}: appears twice, also in {tensors[name].file.path.name}")
            if name not in weight_map:
                raise CheckpointError(f"{tensor.where}: is not in {INDEX_FILE}")
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / file_name}: tensor {shown(name)}: is missing, though the index puts it there"
            )
        if tensors[name].file.path.name != file_name:
            raise CheckpointError(f"{tensors[name].where}: {INDEX_FILE} puts it in {shown(file_name)}")
    return tensors, set(weight_map.values())
