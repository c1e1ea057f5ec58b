"""Files to which whole lines are added, by one process at a time, and which a crash cannot spoil."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

# How each line begins (`serving.jobs.lines`): by it a torn last line is told from a file of somebody else's.
LINE_START = b'{"id": "batch_req_'


class LineFile:
    """Lines of answers, as `serving.jobs.lines` writes them, each with a `custom_id`.

    What a crash has left of a last line is cut off at opening. Raises OSError, which says so where another process has
    the file open or where it holds anything else than such lines; then it stays as it is.
    """

    def __init__(self, path: Path):
        self.path = path
        self.custom_ids: list[str] = []  # of the lines that were there at opening
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(f"{path}: another process writes to it") from None
            self._drop_torn_end()
        except BaseException:
            os.close(self._fd)
            raise

    def _drop_torn_end(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                record = read_answer_line(line)
                if record is None:
                    torn = line.rstrip(b"\0")  # a crash of the machine may leave zeros
                    is_ours = torn.startswith(LINE_START) or LINE_START.startswith(torn)
                    if line.endswith(b"\n") or not is_ours:
                        raise OSError(f"{self.path}: line {number} is no answer of a batch")
                    os.ftruncate(self._fd, end)
                    return
                self.custom_ids.append(record["custom_id"])
                end += len(line)

    def add(self, line: bytes) -> None:
        """Add a line, given without its end, in one piece."""
        data = line + b"\n"
        written = os.write(self._fd, data)
        if written < len(data):  # the disk is full: what is there of it is cut off again
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written", str(self.path))

    def close(self) -> None:
        """Wait until the disk has it all."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


def read_answer_line(line: bytes) -> dict[str, Any] | None:
    """The object in a line with its end; None for what is no whole line of an answer."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("custom_id"), str) or "response" not in record:
        return None
    return record


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that is there whole or, after a crash, as it was."""
    part = path.with_name(path.name + ".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
