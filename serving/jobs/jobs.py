"""Jobs: creates batch jobs, works through them one after the other, and resumes them after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from serving.api.errors import OverloadedError, UnavailableError
from serving.api.service import Service
from serving.jobs.appending import LineFile, read_answer_line
from serving.jobs.lines import (
    BATCH_CONTEXT,
    URLS,
    BatchLine,
    LineProblem,
    answer_request,
    check_lines,
    input_lines,
    output_line,
    read_line,
    unanswered_line,
)
from serving.jobs.store import Job, Store, StoredFile, Upload
from serving.request import RequestError, shown

logger = logging.getLogger(__name__)

WINDOW, WINDOW_S = "24h", 86400
MAX_METADATA = 16  # pairs, of 64 and 512 characters, as OpenAI has it
MAX_OPEN_JOBS = 1000
MAX_PROBLEMS = 100  # told of one file
MAX_STARTING = 16  # lines between their turn and their first token: an interactive request waits for no more of them
POLL_S = 0.01
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_RETRY_S = 5.0  # until a job is tried again that the disk had no room for


class BatchTurns:
    """Lets lines of batch jobs in while no request waits, so that the queue's bounds are left to other requests.

    What has been let in goes by its priority, the last unless the line has its own (`lines.BATCH_CONTEXT`).
    """

    def __init__(self, service: Service):
        self._service = service
        self._num_starting = 0
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn; admits the line. Yields what is to be called at its first token."""
        is_starting = False

        def started() -> None:
            nonlocal is_starting
            self._num_starting -= is_starting
            is_starting = False

        with contextlib.ExitStack() as stack:
            async with self._turn:
                while True:
                    while self._num_starting >= MAX_STARTING or self._must_wait():
                        await asyncio.sleep(POLL_S)
                    try:
                        stack.enter_context(self._service.admission())
                        break
                    except (OverloadedError, UnavailableError):
                        await asyncio.sleep(self._service.config.retry_after_s)
                is_starting = True
                self._num_starting += 1
            stack.callback(started)
            yield started

    def _must_wait(self) -> bool:
        try:
            return self._service.num_waiting > 0
        except UnavailableError:  # the model loads, or has died
            return True


class Jobs:
    """Batch jobs of a Store, run on a Service. Belongs to one event loop, that of `serve`."""

    def __init__(self, service: Service, store: Store, *, now_s: Callable[[], float] = time.time):
        self.store = store
        self._service = service
        self._now_s = now_s
        self._turns = BatchTurns(service)
        self._changed = asyncio.Event()  # set and replaced whenever a job or its results have changed
        self._work: dict[str, asyncio.Task[None]] = {}  # of the job that runs
        self._stopping = asyncio.Event()
        self.address = f"batch jobs in {service.config.batch_dir}"

    # What clients ask for

    def create(
        self,
        *,
        input_file_id: str,
        endpoint: str | None,
        completion_window: str | None,
        metadata: Mapping[str, str] | None = None,
    ) -> Job:
        """A new job, which is validated and run in its turn. Raises RequestError and OverloadedError."""
        self.check_settings(endpoint=endpoint, completion_window=completion_window, metadata=metadata)
        if self.store.file(input_file_id).purpose != "batch":
            raise RequestError("input_file_id", f"{shown(input_file_id)} has another purpose than batch")
        assert endpoint is not None and completion_window is not None
        now = int(self._now_s())
        job = Job(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            status="validating",
            output_id=f"file-{uuid.uuid4().hex}",
            error_id=f"file-{uuid.uuid4().hex}",
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=dict(metadata or {}),
        )
        self._save(job)
        return job

    def check_settings(
        self, *, endpoint: object, completion_window: object, metadata: Mapping[str, str] | None
    ) -> None:
        """All of a new job but its file. Raises RequestError and OverloadedError."""
        if endpoint not in URLS:
            raise RequestError("endpoint", f"must be one of {', '.join(URLS)}; got {shown(endpoint)}")
        if completion_window != WINDOW:
            raise RequestError("completion_window", f"must be {WINDOW}, got {shown(completion_window)}")
        _check_metadata({} if metadata is None else metadata)
        if sum(not job.has_ended for job in self.store.jobs()) >= MAX_OPEN_JOBS:
            raise OverloadedError(
                f"{MAX_OPEN_JOBS} batches have not ended; no more are accepted",
                retry_after_s=self._service.config.retry_after_s,
            )

    def keep(self, upload: Upload, filename: str) -> StoredFile:
        """Finish the upload of a file for a batch."""
        return upload.finish(filename=filename, purpose="batch", now_s=self._now_s())

    def cancel(self, job_id: str) -> Job:
        """Stop a job; its results so far stay. One that has ended stays as it is."""
        job = self.store.job(job_id)
        if job.has_ended or job.status in ("cancelling", "finalizing"):
            return job
        self._save(job.with_status("cancelling", self._now_s()))
        if job_id in self._work:
            self._work[job_id].cancel()
        return self.store.job(job_id)

    async def results(
        self, job_id: str, *, skip_output: int = 0, skip_errors: int = 0
    ) -> AsyncGenerator[tuple[bool, bytes, str], None]:
        """(is of the error file, line, custom_id) of every result so far and to come, those of each file in order.

        So many of each file are left out. Raises NotFoundError.
        """
        offsets, skips = {False: 0, True: 0}, {False: skip_output, True: skip_errors}
        while True:
            changed = self._changed
            job = self.store.job(job_id)
            for is_error in (False, True):
                path = self.store.data_path(job.error_id if is_error else job.output_id)
                while (found := await asyncio.to_thread(_next_lines, path, offsets[is_error]))[0]:
                    lines, offsets[is_error] = found
                    for line, custom_id in lines:
                        if skips[is_error] > 0:
                            skips[is_error] -= 1
                        else:
                            yield is_error, line, custom_id
            if job.has_ended:
                return
            await changed.wait()

    # The door

    async def serve(self) -> None:
        """Work through the jobs until `stop`."""
        worker = asyncio.ensure_future(self._run_jobs())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((worker, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        if not worker.cancelled():
            worker.result()

    def stop(self) -> None:
        """Leave off; what has no result yet runs after the next start."""
        self._stopping.set()

    def close(self) -> None:
        self.store.close()

    # Work

    def _save(self, job: Job) -> None:
        self.store.save_job(job)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run_jobs(self) -> None:
        while True:
            changed = self._changed
            # New files are looked at first: their owners want to know, and wait behind no long job.
            open_jobs = [job for job in reversed(self.store.jobs()) if not job.has_ended]
            open_jobs.sort(key=lambda job: job.status != "validating")
            if not open_jobs:
                await changed.wait()
                continue
            job = open_jobs[0]
            try:
                await self._advance(job)
            except Exception as error:  # costs this job alone
                logger.error("batch %s cannot go on", job.id, exc_info=error)
                if isinstance(error, OSError) and error.errno in FULL:
                    await asyncio.sleep(FULL_RETRY_S)
                    continue
                problem = LineProblem(code="storage_failed", message="its files cannot be used", param=None, line=None)
                try:
                    self._save(self.store.job(job.id).with_status("failed", self._now_s(), problems=(problem,)))
                except OSError:
                    await asyncio.sleep(FULL_RETRY_S)

    async def _advance(self, job: Job) -> None:
        """Bring a job one state further."""
        if job.status == "validating":
            await self._validate(job)
            return
        if job.status == "in_progress":
            self._work[job.id] = asyncio.ensure_future(self._run(job))
            try:
                await asyncio.wait((self._work[job.id],))
            finally:
                work = self._work.pop(job.id)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled():
                work.result()
        await self._finalize(self.store.job(job.id))

    async def _validate(self, job: Job) -> None:
        path = self.store.data_path(job.input_file_id)

        def check() -> tuple[int, list[LineProblem]]:
            with path.open("rb") as file:
                return check_lines(file, self._service.config, job.endpoint, MAX_PROBLEMS)

        total, problems = await asyncio.to_thread(check)
        job = self.store.job(job.id)
        if job.status != "validating":  # cancelled meanwhile
            await self._finalize(job)
        elif problems:
            self._save(job.with_status("failed", self._now_s(), problems=tuple(problems)))
        else:
            self._save(job.with_status("in_progress", self._now_s(), total=total))

    async def _run(self, job: Job) -> None:
        """Answer every line that has no answer yet, until the job expires; cancelled where the job is."""
        async with contextlib.AsyncExitStack() as stack:
            files = []
            for file_id in (job.output_id, job.error_id):
                files.append(await _open_lines(self.store.data_path(file_id)))
                stack.push_async_callback(asyncio.to_thread, files[-1].close)
            await _Run(self, job, *files).run()

    async def _finalize(self, job: Job) -> None:
        if job.status == "in_progress":
            job = job.with_status("finalizing", self._now_s())
            self._save(job)
        changes = {}
        for name, file_id, kind in (("has_output", job.output_id, "output"), ("has_errors", job.error_id, "error")):
            path = self.store.data_path(file_id)
            changes[name] = path.exists() and path.stat().st_size > 0
            if changes[name]:
                self.store.publish(
                    file_id, filename=f"{job.id}_{kind}.jsonl", purpose="batch_output", now_s=self._now_s()
                )
        if job.status == "cancelling":
            status = "cancelled"
        else:
            status = "completed" if job.expired_at is None else "expired"
        self._save(job.with_status(status, self._now_s(), **changes))


class _Run:
    """A job that runs: its lines, in order, a bounded number at once."""

    def __init__(self, jobs: Jobs, job: Job, output: LineFile, errors: LineFile):
        self._jobs, self._job, self._output, self._errors = jobs, job, output, errors
        self._service = jobs._service
        self._num_completed, self._num_failed = len(output.custom_ids), len(errors.custom_ids)

    async def run(self) -> None:
        done = {*self._output.custom_ids, *self._errors.custom_ids}
        config = self._service.config
        room = asyncio.Semaphore(config.max_batch_in_flight)
        self._count()
        with self._jobs.store.data_path(self._job.input_file_id).open("rb") as file:
            lines = input_lines(file, config)
            remaining = self._job.expires_at - self._jobs._now_s()
            try:
                async with asyncio.timeout(remaining), asyncio.TaskGroup() as group:
                    while (line := await asyncio.to_thread(_next_line, lines, done, config)) is not None:
                        await room.acquire()
                        group.create_task(self._answer(line, room))
            except TimeoutError:
                await self._expire()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _answer(self, line: BatchLine, room: asyncio.Semaphore) -> None:
        try:
            while True:
                try:
                    async with self._jobs._turns.turn() as started:
                        answer = await answer_request(
                            self._service, line.url, line.body, started, context=BATCH_CONTEXT, may_be_overloaded=True
                        )
                    break
                except OverloadedError as error:  # by rate limits, which a job has the time to wait for
                    await asyncio.sleep(error.retry_after_s)
                except UnavailableError:  # the engine stops: another one may answer
                    await asyncio.sleep(self._service.config.retry_after_s)
            self._add(line.custom_id, output_line(line.custom_id, answer), is_error=answer.is_error)
        finally:
            room.release()

    async def _expire(self) -> None:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._jobs.store.data_path(self._job.input_file_id).open("rb"))
            lines = input_lines(file, self._service.config)
            done = {
                record["custom_id"]
                for each in (self._output, self._errors)
                for record in _records(stack.enter_context(each.path.open("rb")))
            }
            while (line := await asyncio.to_thread(_next_line, lines, done, self._service.config)) is not None:
                message = "the completion window ended before this request was run"
                self._add(line.custom_id, unanswered_line(line.custom_id, "batch_expired", message), is_error=True)
                job = self._jobs.store.job(self._job.id)
                if job.expired_at is None:
                    self._jobs._save(dataclasses.replace(job, expired_at=int(self._jobs._now_s())))

    def _add(self, custom_id: str, line: bytes, *, is_error: bool) -> None:
        (self._errors if is_error else self._output).add(line)
        self._num_completed += not is_error
        self._num_failed += is_error
        self._count()
        self._jobs._tell()

    def _count(self) -> None:
        self._jobs.store.count(self._job.id, completed=self._num_completed, failed=self._num_failed)


async def _open_lines(path: Path) -> LineFile:
    """A LineFile, opened beside the event loop; closed again where nobody waits for it any more."""
    opening = asyncio.ensure_future(asyncio.to_thread(LineFile, path))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            (await opening).close()
        raise


def _next_line(lines: Iterator[tuple[int, bytes]], done: set[str], config: Any) -> BatchLine | None:
    """The next line without an answer; None at the end."""
    for _, data in lines:
        line = read_line(data, config)
        if line.custom_id not in done:
            return line
    return None


def _records(file: Any) -> Iterator[dict[str, Any]]:
    return (record for record in map(read_answer_line, file) if record is not None)


def _next_lines(path: Path, offset: int, max_bytes: int = 2**20) -> tuple[list[tuple[bytes, str]], int]:
    """Whole lines from `offset` on, about `max_bytes` of them, and where they end."""
    lines: list[tuple[bytes, str]] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return lines, offset
    with file:
        file.seek(offset)
        while max_bytes > 0 and (line := file.readline()).endswith(b"\n"):
            record = read_answer_line(line)
            assert record is not None, path
            lines.append((line[:-1], record["custom_id"]))
            offset += len(line)
            max_bytes -= len(line)
    return lines, offset


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if not isinstance(metadata, Mapping):
        raise RequestError("metadata", f"must be an object, got {shown(metadata)}")
    if len(metadata) > MAX_METADATA:
        raise RequestError("metadata", f"has {len(metadata)} entries; at most {MAX_METADATA} are accepted")
    for key, value in metadata.items():
        if not isinstance(key, str) or not 0 < len(key) <= 64 or not re.fullmatch(r"[^\ud800-\udfff]+", key):
            raise RequestError("metadata", f"has the key {shown(key)}; keys have 1 to 64 characters")
        if not isinstance(value, str) or len(value) > 512:
            raise RequestError("metadata", f"{shown(value)} must be a string of at most 512 characters")
