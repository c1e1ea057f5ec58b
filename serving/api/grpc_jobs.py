"""Batch jobs over gRPC: the same store and runner as HTTP's files and batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from google.rpc import code_pb2

from serving.api.grpc_calls import Call, Method
from serving.api.grpc_errors import GrpcError
from serving.api.grpc_messages import request_body
from serving.api.service import Service
from serving.jobs.jobs import Jobs
from serving.jobs.store import Job, Upload, page
from serving.proto.v1 import serving_pb2 as pb
from serving.request import RequestError

DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # jobs of one list, as OpenAI has it


class GrpcJobs:
    """Methods about jobs; where the server keeps none, each says so."""

    def __init__(self, service: Service, jobs: Jobs | None):
        self._service, self._maybe_jobs = service, jobs

    def methods(self) -> dict[str, Method]:
        return {
            "CreateJob": self._create,
            "GetJob": self._get,
            "ListJobs": self._list,
            "CancelJob": self._cancel,
            "StreamJobResults": self._results,
        }

    @property
    def _jobs(self) -> Jobs:
        if self._maybe_jobs is None:
            raise GrpcError(code_pb2.UNIMPLEMENTED, "this server keeps no batch jobs: it has no batch_dir")
        return self._maybe_jobs

    async def _create(self, requests: AsyncIterator[bytes], call: Call) -> pb.Job:
        jobs = self._jobs
        first: dict[str, Any] | None = None
        with contextlib.ExitStack() as stack:
            upload: Upload | None = None
            async for data in requests:
                request = await call.read(data, _checked)
                if first is None:
                    first = {field.name: value for field, value in request.ListFields() if field.name != "jsonl"}
                elif any(field.name != "jsonl" for field, _ in request.ListFields()):
                    raise RequestError("request", "has more than jsonl after the first message")
                if request.jsonl:
                    if "input_file_id" in first:
                        raise RequestError("jsonl", "and input_file_id cannot go together")
                    if upload is None:
                        upload = stack.enter_context(jobs.store.upload())
                    await asyncio.to_thread(upload.write, request.jsonl)
            if first is None:
                raise RequestError("request", "is missing")
            settings: dict[str, Any] = {
                "endpoint": first.get("endpoint"),
                "completion_window": first.get("completion_window"),
                "metadata": dict(first.get("metadata", {})),
            }
            jobs.check_settings(**settings)
            if upload is not None:
                first["input_file_id"] = (await asyncio.to_thread(jobs.keep, upload, "batch.jsonl")).id
        if "input_file_id" not in first:
            raise RequestError("input_file_id", "is missing, and jsonl too: give one of them")
        return _message(jobs.create(input_file_id=first["input_file_id"], **settings))

    async def _get(self, data: bytes, call: Call) -> pb.Job:
        return _message(self._jobs.store.job(await call.read(data, _job_id)))

    async def _list(self, data: bytes, call: Call) -> pb.ListJobsResponse:
        body = await call.read(data, request_body)
        limit = body.get("limit", DEFAULT_LIMIT)
        if not 1 <= limit <= MAX_LIMIT:
            raise RequestError("limit", f"must be in [1, {MAX_LIMIT}], got {limit}")
        jobs, has_more = page(self._jobs.store.jobs(), body.get("after"), limit)
        return pb.ListJobsResponse(jobs=[_message(job) for job in jobs], has_more=has_more)

    async def _cancel(self, data: bytes, call: Call) -> pb.Job:
        return _message(self._jobs.cancel(await call.read(data, _job_id)))

    async def _results(self, data: bytes, call: Call) -> None:
        body = await call.read(data, request_body)
        skips = {name: body.get(name, 0) for name in ("skip_output", "skip_errors")}
        for name, value in skips.items():
            if value < 0:
                raise RequestError(name, f"must be 0 or more, got {value}")
        async with contextlib.aclosing(self._jobs.results(body.get("id", ""), **skips)) as results:
            async for is_error, line, custom_id in results:
                await call.send(pb.JobResult(custom_id=custom_id, is_error=is_error, line=line.decode()))


def _checked(request: pb.CreateJobRequest) -> pb.CreateJobRequest:
    request_body(request)
    return request


def _job_id(request: pb.JobRequest) -> str:
    request_body(request)
    return request.id


def _message(job: Job) -> pb.Job:
    return pb.Job(**{name: value for name, value in job.as_json().items() if value is not None})
