"""Renders chat templates in worker processes, so that a template can fail its own request and nothing else."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.text import render_worker
from serving.worker_frames import read_answer, write_all


class RenderError(Exception):
    """A template that gave no text. `is_refusal`: it called raise_exception, so the messages are at fault."""

    def __init__(self, message: str, *, is_refusal: bool = False):
        super().__init__(message)
        self.is_refusal = is_refusal


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    max_cpu_s: float = 1.0  # of one rendering
    max_wall_s: float = 60.0  # of one rendering, for a worker that gets no CPU
    max_memory_bytes: int = 512 * 2**20  # address space of a worker
    max_output_chars: int = 8 * 2**20
    max_workers: int = 2  # renderings at once


class TemplateRenderer:
    """Worker processes for one set of templates; started when first needed. Safe to use from several threads.

    While one worker is busy with a template that does not end (at most `max_cpu_s`), others go on.
    """

    def __init__(self, templates: Mapping[str, str], limits: RenderLimits):
        self._templates = dict(templates)
        self._limits = limits
        self._slots = threading.BoundedSemaphore(limits.max_workers)
        self._starting = threading.Lock()  # of the first worker
        self._idle: list[_Worker] = []  # list methods are atomic
        self._constants: dict[str, list[str]] | None = None
        weakref.finalize(self, _stop_all, self._idle)

    def constants(self, name: str) -> list[str]:
        """Strings that the expressions of a template hold: what it may look for in messages. Raises RenderError."""
        with self._starting:
            if self._constants is None:
                with self._slots:
                    self._idle.append(self._start())
            assert self._constants is not None  # _start sets it
            return self._constants[name]

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The text of template `name`. Raises RenderError; ValueError or TypeError if `variables` are not JSON."""
        frame = render_worker.encode_frame({"name": name, "variables": variables})
        with self._slots:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = self._start()
            try:
                answer = worker.ask(frame)
            except BaseException:
                worker.stop()
                raise
            self._idle.append(worker)
        if "error" in answer:
            raise RenderError(answer["message"], is_refusal=answer["error"] == "raised")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """Ends the idle workers; the renderer can go on being used."""
        _stop_all(self._idle)

    def _start(self) -> _Worker:
        worker = _Worker(self._limits)
        try:
            answer = worker.ask(render_worker.encode_frame({"templates": self._templates}))
        except BaseException:
            worker.stop()
            raise
        if "error" in answer:
            worker.stop()
            raise RenderError(answer["message"])
        self._constants = answer["constants"]
        return worker


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


class _Worker:
    def __init__(self, limits: RenderLimits):
        self._limits = limits
        settings = {
            "package_folders": _package_folders("jinja2", "markupsafe"),
            "max_memory_bytes": limits.max_memory_bytes,
            "max_output_chars": limits.max_output_chars,
            "max_cpu_s": limits.max_cpu_s,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", render_worker.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt typed at the terminal is for the parent
            bufsize=0,
        )

    def ask(self, frame: bytes) -> dict[str, Any]:
        """The answer to one frame. Raises RenderError if the worker ends or is silent; it is of no use then."""
        deadline_s = time.monotonic() + self._limits.max_wall_s
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told below
            write_all(stdin, frame)
        try:
            return read_answer(stdout, deadline_s)
        except TimeoutError:
            raise RenderError(f"rendering took more than {self._limits.max_wall_s:g} s") from None
        except EOFError:
            raise RenderError(self._cause_of_end()) from None

    def _cause_of_end(self) -> str:
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the renderer closed its output"
        if status == -signal.SIGPROF:
            return f"rendering took more than {self._limits.max_cpu_s:g} s of CPU time"
        return f"the renderer ended with status {status}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _package_folders(*names: str) -> list[str]:
    folders = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"the package {name} is needed for chat templates", name=name)
        folders.append(str(Path(spec.origin).parent.parent))
    return folders
