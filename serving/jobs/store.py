"""Files and batch jobs in a folder of the server's own: their data, and their states as JSON.

Names of files on disk are ids that the store has made; a client's id is looked up and never becomes a path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.checks import ConfigError
from configs.server import ServerConfig
from serving.api.errors import NotFoundError, OverloadedError
from serving.jobs.appending import replace_file
from serving.jobs.lines import LineProblem
from serving.request import RequestError, shown

logger = logging.getLogger(__name__)

MAX_FILES = 100_000
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str  # batch, or batch_output

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "object": "file", "status": "processed"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch. Times are Unix seconds; `output_id` and `error_id` are those of its files, whether there are any yet."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    output_id: str
    error_id: str
    created_at: int
    expires_at: int
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False  # as files that clients may read
    has_errors: bool = False
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    problems: tuple[LineProblem, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def with_status(self, status: str, now_s: float, **changes: Any) -> Job:
        changes |= {"status": status, f"{status}_at": int(now_s)}
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        names = ("id", "endpoint", "input_file_id", "completion_window", "status", "created_at", "expires_at")
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        problems = [dataclasses.asdict(problem) for problem in self.problems]
        return {
            **{name: getattr(self, name) for name in names},
            **{f"{name}_at": getattr(self, f"{name}_at") for name in times},
            "object": "batch",
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "errors": {"object": "list", "data": problems} if problems else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": dict(self.metadata) or None,
        }


class Store:
    """Raises ConfigError where the folder cannot be used, or another server uses it."""

    def __init__(self, config: ServerConfig):
        assert config.batch_dir is not None
        self._config = config
        folder = Path(config.batch_dir)
        self._files_folder, self._jobs_folder = folder / "files", folder / "batches"
        self._lock = threading.Lock()  # uploads run in threads
        try:
            for each in (self._files_folder, self._jobs_folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._owner)
            raise ConfigError(f"ServerConfig.batch_dir={config.batch_dir!r} is in use by another server") from None
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"ServerConfig.batch_dir={config.batch_dir!r} cannot be used: {reason}") from None
        self._files: dict[str, StoredFile]
        self._jobs: dict[str, Job]
        self._files, num_bad_files = _read_all(self._files_folder, _file_of)
        self._jobs, num_bad_jobs = _read_all(self._jobs_folder, _job_of)
        if num_bad_files + num_bad_jobs == 0:  # or the data may be theirs
            self._remove_leftovers()

    def close(self) -> None:
        os.close(self._owner)

    def _remove_leftovers(self) -> None:
        """What a crash has left of uploads and of states."""
        known = {*self._files}
        for job in self._jobs.values():
            known |= {job.output_id, job.error_id}
        for path in (*self._files_folder.iterdir(), *self._jobs_folder.iterdir()):
            if path.suffix == ".part" or (path.suffix == ".data" and path.stem not in known):
                path.unlink()

    # Files

    @contextlib.contextmanager
    def upload(self) -> Iterator[Upload]:
        """A new file to write and finish; without `Upload.finish` nothing of it stays."""
        upload = Upload(self, f"file-{uuid.uuid4().hex}", self._config.max_file_bytes)
        try:
            yield upload
        finally:
            upload.close()

    def check_room(self, num_bytes: int) -> None:
        """Raises OverloadedError where a file of so many bytes would be too much."""
        with self._lock:
            held, num_files = sum(file.bytes for file in self._files.values()), len(self._files)
        limit = self._config.max_store_bytes
        if held + num_bytes > limit or num_files >= MAX_FILES:
            raise OverloadedError(
                f"{num_files} files with {held} bytes are held; the limits are {MAX_FILES} and {limit}: delete some",
                retry_after_s=self._config.retry_after_s,
            )

    def publish(self, file_id: str, *, filename: str, purpose: str, now_s: float) -> StoredFile:
        """Make the data of an id a file that clients may read."""
        stored = StoredFile(
            id=file_id,
            bytes=self.data_path(file_id).stat().st_size,
            created_at=int(now_s),
            filename=filename,
            purpose=purpose,
        )
        replace_file(self._files_folder / f"{file_id}.json", json.dumps(dataclasses.asdict(stored)).encode())
        with self._lock:
            self._files[file_id] = stored
        return stored

    def file(self, file_id: str) -> StoredFile:
        """Raises NotFoundError."""
        try:
            return self._files[file_id]
        except KeyError:
            raise NotFoundError("file_id", f"there is no file {shown(file_id)}") from None

    def files(self) -> list[StoredFile]:
        """All of them, the newest first."""
        with self._lock:
            return sorted(self._files.values(), key=lambda file: (file.created_at, file.id), reverse=True)

    def data_path(self, file_id: str) -> Path:
        """Where the data of an id of this store's is."""
        return self._files_folder / f"{file_id}.data"

    def delete_file(self, file_id: str) -> None:
        """Raises NotFoundError, and RequestError while a job reads it."""
        stored = self.file(file_id)
        for job in self._jobs.values():
            if job.input_file_id == file_id and not job.has_ended:
                raise RequestError("file_id", f"{shown(file_id)} is the input of {job.id}, which has not ended")
        with self._lock:
            self._files.pop(stored.id, None)
        (self._files_folder / f"{stored.id}.json").unlink(missing_ok=True)
        self.data_path(stored.id).unlink(missing_ok=True)

    # Jobs

    def job(self, job_id: str) -> Job:
        """Raises NotFoundError."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise NotFoundError("batch_id", f"there is no batch {shown(job_id)}") from None

    def jobs(self) -> list[Job]:
        """All of them, the newest first."""
        return sorted(self._jobs.values(), key=lambda job: (job.created_at, job.id), reverse=True)

    def save_job(self, job: Job) -> None:
        """Keep a job's state, on disk too."""
        replace_file(self._jobs_folder / f"{job.id}.json", json.dumps(dataclasses.asdict(job)).encode())
        self._jobs[job.id] = job

    def count(self, job_id: str, *, completed: int, failed: int) -> None:
        """Keep a running job's counts in memory: its lines are their record on disk."""
        self._jobs[job_id] = dataclasses.replace(self._jobs[job_id], completed=completed, failed=failed)


class Upload:
    """A file that is being written, in pieces; each call may block on the disk."""

    def __init__(self, store: Store, file_id: str, max_bytes: int):
        self._store, self._id, self._max_bytes = store, file_id, max_bytes
        self._num_bytes = 0
        self._part = store.data_path(file_id).with_suffix(".part")
        self._file = os.fdopen(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def write(self, piece: bytes) -> None:
        """Raises RequestError and OverloadedError for what is over the limits."""
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise RequestError("file", f"has more than {self._max_bytes} bytes")
        self._store.check_room(self._num_bytes)
        self._file.write(piece)

    def finish(self, *, filename: str, purpose: str, now_s: float) -> StoredFile:
        self._store.check_room(self._num_bytes)
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._part, self._store.data_path(self._id))
        return self._store.publish(self._id, filename=filename, purpose=purpose, now_s=now_s)

    def close(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def page[Item: (Job, StoredFile)](items: list[Item], after: str | None, limit: int) -> tuple[list[Item], bool]:
    """The items behind the one of id `after`, at most `limit`, and whether there are more. Raises RequestError."""
    start = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise RequestError("after", "is the id of nothing here")
        start = ids.index(after) + 1
    return items[start : start + limit], len(items) > start + limit


def _read_all(folder: Path, build: Callable[[dict[str, Any]], Any]) -> tuple[dict[str, Any], int]:
    """What is in the JSON files of a folder, by id, and how many of them cannot be read."""
    items: dict[str, Any] = {}
    num_bad = 0
    for path in folder.glob("*.json"):
        try:
            item = build(json.loads(path.read_bytes()))
            if item.id != path.stem:
                raise ValueError(f"is named {item.id}")
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.error("%s cannot be read and is left alone: %s", path, error)
            num_bad += 1
            continue
        items[item.id] = item
    return items, num_bad


def _file_of(value: dict[str, Any]) -> StoredFile:
    return StoredFile(**value)


def _job_of(value: dict[str, Any]) -> Job:
    return Job(**{**value, "problems": tuple(LineProblem(**problem) for problem in value["problems"])})
