"""Frames to and from a worker process: what goes over its pipes, with a deadline."""

from __future__ import annotations

import json
import select
import time
from typing import IO, Any


def write_all(pipe: IO[bytes], data: bytes) -> None:
    """All of `data` to an unbuffered pipe. Raises BrokenPipeError."""
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def read_answer(pipe: IO[bytes], deadline_s: float) -> dict[str, Any]:
    """The next frame: four bytes of length, then JSON. Raises TimeoutError past `deadline_s` (of time.monotonic), and
    EOFError where the worker has closed the pipe."""
    size = int.from_bytes(_read(pipe, 4, deadline_s), "big")
    answer: dict[str, Any] = json.loads(_read(pipe, size, deadline_s))
    return answer


def _read(pipe: IO[bytes], size: int, deadline_s: float) -> bytes:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = pipe.read(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
