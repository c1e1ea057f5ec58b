"""Opening and reading files that nobody vouches for: regular files only, nothing outside the model's folder,
every offset checked against the file's size.

Reads are `pread` into memory of the caller's size, not memory maps: a file that shrinks while it is mapped kills
the process with SIGBUS, a short read is an error like any other; and pages of a map count as resident memory.
"""

from __future__ import annotations

import json
import os
import stat
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from checkpoints.errors import CheckpointError, shown


class ReadOnlyFile:
    """A regular file opened for reading at given offsets. The descriptor closes with the object.

    Raises CheckpointError if there is no such file, it is not a regular file, or it may not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO would wait for its writer
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise CheckpointError(f"{path}: cannot be opened: {_reason(error)}") from error
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
        self.size = status.st_size  # bytes

    def read(self, offset: int, num_bytes: int) -> np.ndarray:
        """Bytes [offset, offset + num_bytes) as a new uint8 array. Raises CheckpointError past the end."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.size:
            self.fail(f"bytes {offset} to {offset + num_bytes} are wanted, the file has {self.size}")
        data = np.empty(num_bytes, np.uint8)
        view = memoryview(data)
        done = 0
        while done < num_bytes:
            try:
                count = os.preadv(self._descriptor, [view[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {_reason(error)}") from error
            if count == 0:
                self.fail(f"has no byte {offset + done}; it had {self.size} bytes when it was opened")
            done += count
        return data

    def fail(self, reason: str) -> NoReturn:
        """Raise CheckpointError about this file."""
        raise CheckpointError(f"{self.path}: {reason}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def open_in_folder(folder: Path, name: str) -> ReadOnlyFile:
    """Open the file `name` of `folder`. Raises CheckpointError unless `name` is a plain file name and leads, by any
    symbolic links, to a regular file inside the folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {shown(name)} is not a plain file name")
    path = folder / name
    try:
        home, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a cycle of links
        raise CheckpointError(f"{path}: cannot be opened: {_reason(error)}") from error
    if not target.is_relative_to(home):
        raise CheckpointError(f"{path}: is a link that leads outside the model's folder; copy the file there instead")
    file = ReadOnlyFile(target)
    file.path = path  # the name the user knows
    return file


def exists_in_folder(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of that name, a broken link included."""
    return os.path.lexists(folder / name)


def read_json_object(file: ReadOnlyFile, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object that a whole file holds. Raises CheckpointError as `parse_json_object`, or if too long."""
    if file.size > max_bytes:
        file.fail(f"has {file.size} bytes, more than the {max_bytes} that are accepted")
    return parse_json_object(file.read(0, file.size).tobytes(), str(file.path))


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Strict JSON: UTF-8, one object, no key twice in any object, no NaN or infinity. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(f"{where}: {shown(key)} appears twice")
                seen.add(key)
        return result

    def constant(name: str) -> NoReturn:
        raise CheckpointError(f"{where}: {name} is not JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{where}: is nested too deep") from error
    except ValueError as error:  # also UnicodeDecodeError, and integers of thousands of digits
        raise CheckpointError(f"{where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds {shown(value)}, not a JSON object")
    return value
