"""Reads GGUF v2 and v3 (github.com/ggml-org/ggml/blob/master/docs/gguf.md): header, metadata, tensor places, data.

The parser is our own and bounded: every count, length and offset is an unbounded Python integer and is held
against the file's size, and against limits that keep a small file from filling memory, before anything is read.
The gguf library only turns quantised blocks into numbers.
"""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, shown
from checkpoints.files import ReadOnlyFile

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 65535  # of a key; the specification's
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
# A Python object takes up to 10 times what its entry takes in the file; these keep that under 150 MB. The largest
# vocabularies hold 1.3 M array elements and 8 MB of text.
MAX_METADATA_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ELEMENTS = 1 << 21  # in all arrays together
MAX_STRING_BYTES = 16 << 20  # in all strings together; decoded they may take four times that

MIN_METADATA_ENTRY_BYTES = 13  # name length, type, one byte of value
MIN_TENSOR_ENTRY_BYTES = 24  # name length, dimension count, type, offset

DEQUANTIZE_VALUES = 1 << 18  # in one call of the gguf library: its temporaries then stay in the cache

# Value types of the metadata: number -> struct code
SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL_TYPE, FLOAT32_TYPE, STRING_TYPE, ARRAY_TYPE = 7, 6, 8, 9


@dataclass(frozen=True)
class GgmlType:
    """A tensor type: values come in blocks of `block_size`, `block_bytes` each, along the rows."""

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None  # None: quantised, see gguf.quants


GGML_TYPES = {
    0: GgmlType("F32", 1, 4, np.dtype("<f4")),
    1: GgmlType("F16", 1, 2, np.dtype("<f2")),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in a file; a `SourceTensor`."""

    name: str
    file: ReadOnlyFile
    type_id: int
    shape: tuple[int, ...]  # outermost first: the reverse of the file's order
    offset: int  # of its first byte in the file

    @property
    def where(self) -> str:
        return f"{self.file.path}: tensor {shown(self.name)}"

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type_id].name

    @property
    def _num_cols(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def stored_row_bytes(self) -> int:
        kind = GGML_TYPES[self.type_id]
        return self._num_cols // kind.block_size * kind.block_bytes

    def read_rows(self, start: int, stop: int, col_start: int, col_stop: int) -> np.ndarray:
        kind, row_bytes = GGML_TYPES[self.type_id], self.stored_row_bytes
        data = self.file.read(self.offset + start * row_bytes, (stop - start) * row_bytes)
        if kind.dtype is not None:
            return data.view(kind.dtype).reshape(stop - start, self._num_cols)[:, col_start:col_stop]
        # only the blocks that hold the wanted columns
        first_block, last_block = col_start // kind.block_size, -(-col_stop // kind.block_size)
        blocks = data.reshape(stop - start, -1, kind.block_bytes)[:, first_block:last_block]
        values = _dequantize(blocks.reshape(-1, kind.block_bytes), kind).reshape(stop - start, -1)
        return values[:, col_start - first_block * kind.block_size : col_stop - first_block * kind.block_size]


def _dequantize(blocks: np.ndarray, kind: GgmlType) -> np.ndarray:
    """[blocks, block_bytes] uint8 -> [blocks, block_size] float32."""
    from gguf import GGMLQuantizationType, quants

    values = np.empty((len(blocks), kind.block_size), np.float32)
    step = DEQUANTIZE_VALUES // kind.block_size
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step].reshape(1, -1)
        with np.errstate(all="ignore"):  # a damaged scale may be infinite; that is data, not an error of ours
            dequantized = quants.dequantize(piece, GGMLQuantizationType[kind.name])
        values[start : start + step] = dequantized.reshape(-1, kind.block_size)
    return values


@dataclass(frozen=True)
class GgufFile:
    """A parsed file. Arrays in `metadata` are lists; nothing of the tensors' data has been read."""

    file: ReadOnlyFile
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads the header from front to back through a window, and keeps count of what the limits bound."""

    WINDOW_BYTES = 1 << 20

    def __init__(self, file: ReadOnlyFile) -> None:
        self.file = file
        self.position = 0
        self.field = "header"  # what is being read, for messages
        self.array_elements = 0
        self.string_bytes = 0
        self._window = b""
        self._window_start = 0

    def fail(self, reason: str) -> NoReturn:
        self.file.fail(f"{self.field}: {reason}")

    @property
    def bytes_left(self) -> int:
        return self.file.size - self.position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.bytes_left:
            self.fail(f"needs {num_bytes} bytes at byte {self.position}, the file has {self.file.size}")
        start = self.position - self._window_start
        if start + num_bytes > len(self._window):
            length = min(max(num_bytes, self.WINDOW_BYTES), self.bytes_left)
            self._window = self.file.read(self.position, length).tobytes()
            self._window_start, start = self.position, 0
        self.position += num_bytes
        return self._window[start : start + num_bytes]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        length = self.uint64()
        if length > self.bytes_left:
            self.fail(f"string length {length} is more than the {self.bytes_left} bytes left in the file")
        self.string_bytes += length
        if self.string_bytes > MAX_STRING_BYTES:
            self.fail(f"string length {length} brings all strings above {MAX_STRING_BYTES} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: {self.field}: string is not UTF-8: {error}") from error

    def name(self, kind: str) -> str:
        name = self.string()
        if not name or len(name) > MAX_NAME_BYTES:
            self.fail(f"{kind} of {len(name)} characters; 1 to {MAX_NAME_BYTES} are allowed")
        return name

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == STRING_TYPE:
            return self.string()
        if type_id == ARRAY_TYPE:
            return self._array(depth)
        code = SCALAR_CODES.get(type_id)
        if code is None:
            self.fail(f"value type {type_id} is not known")
        return self._numbers(type_id, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth >= MAX_ARRAY_DEPTH:
            self.fail(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        type_id, count = self.uint32(), self.uint64()
        if type_id in SCALAR_CODES:
            item_bytes = struct.calcsize(f"<{SCALAR_CODES[type_id]}")
        elif type_id in (STRING_TYPE, ARRAY_TYPE):
            item_bytes = 8 if type_id == STRING_TYPE else 12
        else:
            self.fail(f"array element type {type_id} is not known")
        if count * item_bytes > self.bytes_left:
            self.fail(
                f"array of {count} elements needs {count * item_bytes} bytes or more, "
                f"{self.bytes_left} are left in the file"
            )
        self.array_elements += count
        if self.array_elements > MAX_ARRAY_ELEMENTS:
            self.fail(f"array of {count} elements brings all arrays above {MAX_ARRAY_ELEMENTS} elements")
        if type_id in SCALAR_CODES:
            return self._numbers(type_id, count)
        return [self.value(type_id, depth + 1) for _ in range(count)]

    def _numbers(self, type_id: int, count: int) -> list[Any]:
        code = SCALAR_CODES[type_id]
        data = self.take(count * struct.calcsize(f"<{code}"))
        if type_id == BOOL_TYPE:
            if any(byte > 1 for byte in set(data)):
                self.fail(f"a boolean is {max(data)}, not 0 or 1")
            return [byte == 1 for byte in data]
        values = list(struct.unpack(f"<{count}{code}", data))
        if type_id == FLOAT32_TYPE and count == 1:
            # the shortest decimal that gives this float32: 1e-05, as its writer had it, not 9.99999974e-06
            values[0] = float(str(np.float32(values[0])))
        return values


def read_gguf(path: Path) -> GgufFile:
    """Parse and check a GGUF file. Raises CheckpointError naming the file, the tensor or field, value and limit."""
    file = ReadOnlyFile(path)
    cursor = _Cursor(file)
    magic = cursor.take(4)
    if magic != MAGIC:
        file.fail(f"begins with {shown(magic)}, not with {shown(MAGIC)}")
    version = cursor.uint32()
    if version not in VERSIONS:
        file.fail(f"version {version} is not supported; {' and '.join(map(str, VERSIONS))} are (little-endian)")
    tensor_count, metadata_count = cursor.uint64(), cursor.uint64()
    for count, entry_bytes, limit, what in (
        (tensor_count, MIN_TENSOR_ENTRY_BYTES, MAX_TENSORS, "tensor count"),
        (metadata_count, MIN_METADATA_ENTRY_BYTES, MAX_METADATA_ENTRIES, "metadata count"),
    ):
        if count * entry_bytes > cursor.bytes_left:
            file.fail(f"{what} {count} cannot fit the {cursor.bytes_left} bytes left in the file")
        if count > limit:
            file.fail(f"{what} {count} is above the {limit} accepted here")

    metadata: dict[str, Any] = {}
    for index in range(metadata_count):
        cursor.field = f"metadata entry {index}"
        key = cursor.name("name")
        cursor.field = f"field {shown(key)}"
        if key in metadata:
            cursor.fail("appears twice")
        metadata[key] = cursor.value(cursor.uint32())

    places = _read_places(cursor, tensor_count)
    data_start = _round_up(cursor.position, _alignment(file, metadata))
    return GgufFile(file, metadata, _place_tensors(file, places, data_start, _alignment(file, metadata)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _alignment(file: ReadOnlyFile, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
        file.fail(f"field 'general.alignment': {shown(alignment)} is not a multiple of 8 in [8, {MAX_ALIGNMENT}]")
    return alignment


def _read_places(cursor: _Cursor, tensor_count: int) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Name -> type, shape (outermost first) and offset from the data's start, as the file has them."""
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for index in range(tensor_count):
        cursor.field = f"tensor entry {index}"
        name = cursor.name("name")
        cursor.field = f"tensor {shown(name)}"
        if name in places:
            cursor.fail("appears twice")
        num_dimensions = cursor.uint32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        dimensions = [cursor.uint64() for _ in range(num_dimensions)]
        if 0 in dimensions:
            cursor.fail(f"has a dimension of 0 in {dimensions}")
        places[name] = (cursor.uint32(), tuple(reversed(dimensions)), cursor.uint64())
    return places


def _place_tensors(
    file: ReadOnlyFile, places: dict[str, tuple[int, tuple[int, ...], int]], data_start: int, alignment: int
) -> dict[str, GgufTensor]:
    """Check that the tensors follow each other, each at the next aligned byte, and end within the file."""
    tensors: dict[str, GgufTensor] = {}
    position = 0
    for name, (type_id, shape, offset) in places.items():

        def refuse(reason: str, name: str = name) -> NoReturn:
            file.fail(f"tensor {shown(name)}: {reason}")

        kind = GGML_TYPES.get(type_id)
        if kind is None:
            supported = ", ".join(f"{number} {kind.name}" for number, kind in GGML_TYPES.items())
            refuse(f"type {_type_name(type_id)} is not supported; supported are {supported}")
        if shape[-1] % kind.block_size:
            refuse(f"rows of {shape[-1]} values are not whole {kind.name} blocks of {kind.block_size}")
        if len(shape) == 1 and kind.dtype is None:
            refuse(f"a vector of type {kind.name}; F32, F16 and BF16 are allowed")
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        if data_start + offset + num_bytes > file.size:
            refuse(
                f"offset {offset} plus {num_bytes} bytes of shape {shown(shape)} pass the end: "
                f"the data has {max(0, file.size - data_start)} bytes"
            )
        if offset != position:
            refuse(
                f"offset {offset} is not {position}, the next byte aligned to {alignment} after the tensor before it"
            )
        position = _round_up(offset + num_bytes, alignment)
        tensors[name] = GgufTensor(name, file, type_id, shape, data_start + offset)
    if data_start + position < file.size:
        logger.warning("%s: %d bytes after the last tensor are ignored", file.path, file.size - data_start - position)
    return tensors


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return f"{type_id} ({GGMLQuantizationType(type_id).name})"
    except ValueError:
        return str(type_id)
