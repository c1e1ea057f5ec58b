"""Compiles what requests ask for into grammars, within limits, and keeps the ones used last."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.request import NotNowError, RequestError, StructuredOutput
from serving.structured.constraint import Constraint, Grammar, library_call
from serving.structured.grammar_worker import make_matcher
from serving.structured.schema_check import check_grammar, check_pattern, check_schema
from serving.structured.schema_rewrite import rewrite
from serving.structured.vocabulary import ModelTokenTable, make_library_tokenizer
from serving.text.render_worker import encode_frame
from serving.text.tokenizer import Tokenizer
from serving.worker_frames import read_answer, write_all

_RUN_WORKER = """\
import json, sys
sys.path += json.loads(sys.argv[1])["package_folders"]
from serving.structured.grammar_worker import main
main()
"""


@dataclass(frozen=True, kw_only=True)
class CompileLimits:
    max_cpu_s: float = 2.0  # to compile one grammar
    max_wall_s: float = 30.0  # for a worker that gets no CPU, and for one to be free
    max_memory_bytes: int = 128 * 2**20  # that compiling one may add
    max_workers: int = 2  # grammars tried at once
    max_cached: int = 64  # grammars, and refusals
    max_cached_bytes: int = 256 * 2**20  # that they took when they were compiled


class GrammarCompiler:
    """Grammars for one model's vocabulary. Safe to use from several threads but for `find_masks`, the engine's own.

    llguidance and the workers are loaded with the first grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: CompileLimits | None = None,
    ):
        self.limits = limits or CompileLimits()
        self._source = (tokenizer, vocab_size, tuple(eos_token_ids))
        self._lock = threading.Lock()  # of what follows
        self._cache: OrderedDict[StructuredOutput, Grammar | str] = OrderedDict()  # the last used last; str: refused
        self._cached_bytes = 0
        self._loading = threading.Lock()
        self._vocabulary: ModelTokenTable | None = None
        self._library_tokenizer: Any = None
        self._workers: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # free ones; None: to be started
        for _ in range(self.limits.max_workers):
            self._workers.put(None)
        self._executor: Any = None
        weakref.finalize(self, _stop_all, self._workers)

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def num_cached_bytes(self) -> int:
        return self._cached_bytes

    def compile(self, structured: StructuredOutput) -> Grammar:
        """The grammar of a structured output. Raises RequestError, of which NotNowError where no worker was free or one
        ended. May take seconds: not for an event loop."""
        with self._lock:
            known = self._cache.get(structured)
            if known is not None:
                self._cache.move_to_end(structured)
        if known is None:
            _check(structured)
            known = self._compile(structured)
            self._keep(structured, known)
        if isinstance(known, str):
            raise RequestError(f"structured.{structured.kind}", known)
        return known

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew when it is next asked for: what all its users share is worn out."""
        with self._lock:
            if self._cache.get(grammar.structured) is grammar:
                self._drop(grammar.structured)

    def find_masks(self, constraints: Sequence[Constraint]) -> None:
        """Find what each constraint allows next, on several threads where there are several. Never raises for a
        grammar: `Constraint.error` tells."""
        constraints = [constraint for constraint in constraints if constraint.error is None]
        if len(constraints) < 2:
            for constraint in constraints:
                constraint.find_mask()
            return
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(min(8, os.cpu_count() or 1))
        masks = np.zeros((len(constraints), constraints[0].mask.size), np.int32)
        jobs = [(constraint.matcher, i) for i, constraint in enumerate(constraints)]
        error = library_call(
            self._executor.unsafe_compute_mask_ptr, jobs, masks.ctypes.data, masks.strides[0], len(constraints)
        )
        for constraint, mask in zip(constraints, masks, strict=True):
            if isinstance(error, str):  # somebody's: each by itself
                constraint.find_mask()
            else:
                constraint.take_mask(mask)

    def close(self) -> None:
        """End the free workers; the compiler can go on being used."""
        for _ in range(_stop_all(self._workers)):
            self._workers.put(None)

    def _keep(self, structured: StructuredOutput, known: Grammar | str) -> None:
        with self._lock:
            if structured in self._cache:
                self._drop(structured)
            self._cache[structured] = known
            self._cached_bytes += _num_bytes(structured, known)
            while len(self._cache) > self.limits.max_cached or (
                self._cached_bytes > self.limits.max_cached_bytes and len(self._cache) > 1
            ):
                self._drop(next(iter(self._cache)))

    def _drop(self, structured: StructuredOutput) -> None:
        self._cached_bytes -= _num_bytes(structured, self._cache.pop(structured))

    def load(self) -> None:
        """Load what the first grammar would, which holds the interpreter for up to a second with a large vocabulary.

        Raises RequestError where llguidance is not installed.
        """
        self._load()

    def _load(self) -> tuple[ModelTokenTable, Any]:
        with self._loading:
            if self._vocabulary is None:
                if importlib.util.find_spec("llguidance") is None:
                    raise RequestError("structured", "needs the package llguidance: install headrace[structured]")
                table = ModelTokenTable(*self._source)
                self._library_tokenizer = make_library_tokenizer(table)
                self._vocabulary = table
            return self._vocabulary, self._library_tokenizer

    def _compile(self, structured: StructuredOutput) -> Grammar | str:
        """A grammar, or why it is refused. Raises NotNowError, and RequestError without llguidance."""
        vocabulary, tokenizer = self._load()
        answer = self._try(structured, vocabulary)
        if "error" in answer:
            return str(answer["error"])
        # It was compiled within the limits once, so it will be again.
        matcher = make_matcher(tokenizer, answer["grammar"])
        mask = np.zeros(vocabulary.mask_size, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        grammar = Grammar(structured, vocabulary, matcher, mask, answer["num_bytes"])
        return str(matcher.get_error()) if matcher.is_error() else grammar

    def _try(self, structured: StructuredOutput, vocabulary: ModelTokenTable) -> dict[str, Any]:
        try:
            worker = self._workers.get(timeout=self.limits.max_wall_s)
        except queue.Empty:
            raise NotNowError("structured", "cannot be compiled now: others are being compiled") from None
        try:
            if worker is None:
                worker = _Worker(self.limits)
                worker.ask(vocabulary.for_worker())
            return worker.ask({"kind": structured.kind, "value": rewrite(structured.kind, structured.value)})
        except _WorkerError as error:
            raise NotNowError("structured", str(error)) from error
        except BaseException:
            if worker is not None:
                worker.stop()
            raise
        finally:
            self._workers.put(worker if worker is not None and worker.is_usable else None)


def _num_bytes(structured: StructuredOutput, known: Grammar | str) -> int:
    return len(structured.value) + (len(known) if isinstance(known, str) else known.num_bytes)


def _check(structured: StructuredOutput) -> None:
    field = f"structured.{structured.kind}"
    if structured.kind == "json_schema":
        check_schema(field, json.loads(structured.value))
    elif structured.kind == "regex":
        check_pattern(field, structured.value)
    elif structured.kind == "grammar":
        check_grammar(field, structured.value)


class _WorkerError(Exception):
    """A worker that ended or is silent."""


def _stop_all(workers: queue.LifoQueue[_Worker | None]) -> int:
    """Empty the queue; how many there were."""
    count = 0
    while True:
        try:
            worker = workers.get_nowait()
        except queue.Empty:
            return count
        count += 1
        if worker is not None:
            worker.stop()


class _Worker:
    def __init__(self, limits: CompileLimits):
        self._max_wall_s = limits.max_wall_s
        self.is_usable = True
        spec = importlib.util.find_spec("llguidance")
        assert spec is not None and spec.origin is not None
        settings = {
            "package_folders": [str(Path(spec.origin).parents[1]), str(Path(__file__).parents[2])],
            "max_memory_bytes": limits.max_memory_bytes,
            "max_cpu_s": limits.max_cpu_s,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUN_WORKER, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt typed at the terminal is for the parent
            bufsize=0,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one frame. Raises _WorkerError if the worker ends or is silent; it is stopped then."""
        deadline_s = time.monotonic() + self._max_wall_s
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            write_all(stdin, encode_frame(request))
            return read_answer(stdout, deadline_s)
        except TimeoutError:
            problem = f"compiling took more than {self._max_wall_s:g} s"
        except EOFError:
            problem = "the process that compiles has ended"
        except BrokenPipeError as error:
            problem = str(error)
        self.stop()
        raise _WorkerError(f"cannot be compiled now: {problem}")

    def stop(self) -> None:
        self.is_usable = False
        with self._process as process, contextlib.suppress(ProcessLookupError):  # closes its pipes and waits for it
            os.killpg(process.pid, signal.SIGKILL)  # the fork that compiles as well
