"""OpenAI's routes of files and batches, over Jobs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message

from serving.api.http_errors import HttpError, error_response
from serving.api.http_front_door import ClientGoneError, read_body
from serving.api.service import Service
from serving.api.strict_json import decode_object
from serving.jobs.jobs import Jobs
from serving.jobs.store import StoredFile, page
from serving.request import RequestError, shown

FORM_OVERHEAD_BYTES = 2**16  # of an upload around its file
MAX_FIELD_BYTES = 1024
MAX_FILENAME_CHARS = 255
PIECE_BYTES = 2**20
MAX_LIMITS = {"files": 10_000, "batches": 100}  # items of a list, as OpenAI has it; the default where none is asked for
DEFAULT_LIMITS = {"files": 10_000, "batches": 20}
BATCH_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


def job_routes(service: Service, jobs: Jobs) -> list[BaseRoute]:
    routes = HttpJobs(service, jobs)

    def route(path: str, method: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, functools.partial(_guarded, endpoint), methods=[method])

    return [
        route("/v1/files", "POST", routes.upload),
        route("/v1/files", "GET", routes.list_files),
        route("/v1/files/{file_id}", "GET", routes.get_file),
        route("/v1/files/{file_id}", "DELETE", routes.delete_file),
        route("/v1/files/{file_id}/content", "GET", routes.file_content),
        route("/v1/batches", "POST", routes.create_batch),
        route("/v1/batches", "GET", routes.list_batches),
        route("/v1/batches/{batch_id}", "GET", routes.get_batch),
        route("/v1/batches/{batch_id}/cancel", "POST", routes.cancel_batch),
    ]


async def _guarded(endpoint: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    try:
        return await endpoint(request)
    except ClientGoneError:
        raise
    except Exception as error:
        return error_response(error)


class HttpJobs:
    def __init__(self, service: Service, jobs: Jobs):
        self._config, self._jobs, self._store = service.config, jobs, jobs.store

    async def upload(self, request: Request) -> Response:
        """A multipart form with `file` and `purpose`."""
        async with self._form(request) as form:
            for name in form:
                if name not in ("file", "purpose"):
                    raise RequestError(name[:80], "is not a field of file uploads here")
            file, purpose = form.get("file"), form.get("purpose")
            if purpose != "batch":
                raise RequestError("purpose", f"must be batch, got {shown(purpose)}")
            if not isinstance(file, UploadFile):
                raise RequestError("file", "is missing")
            filename = file.filename or "file"
            if len(filename) > MAX_FILENAME_CHARS or not filename.isprintable():
                raise RequestError("file", f"must have a printable name of at most {MAX_FILENAME_CHARS} characters")
            with self._store.upload() as upload:
                while piece := await file.read(PIECE_BYTES):
                    await asyncio.to_thread(upload.write, piece)
                stored = await asyncio.to_thread(self._jobs.keep, upload, filename)
        return JSONResponse(stored.as_json())

    @contextlib.asynccontextmanager
    async def _form(self, request: Request) -> Any:
        limit = self._config.max_file_bytes + FORM_OVERHEAD_BYTES
        too_large = HttpError(413, f"the upload has more than {limit} bytes")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise RequestError("Content-Type", "must be multipart/form-data")
        num_bytes = 0
        receive = request.receive

        async def bounded_receive() -> Message:
            nonlocal num_bytes
            try:
                async with asyncio.timeout(self._config.body_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise HttpError(408, "the upload has stalled", headers={"Connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise too_large
            return message

        reading = Request(request.scope, bounded_receive)
        form: FormData | None = None
        try:
            form = await reading.form(max_files=1, max_fields=8, max_part_size=MAX_FIELD_BYTES)
            yield form
        except (MultiPartException, MultipartParseError, HTTPException) as error:
            reason = error.detail if isinstance(error, HTTPException) else error
            raise RequestError("body", f"is no multipart form: {reason}") from None
        finally:
            if form is not None:
                await form.close()

    async def list_files(self, request: Request) -> Response:
        files = self._store.files()
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            files = [file for file in files if file.purpose == purpose]
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order", f"must be asc or desc, got {shown(order)}")
        if order == "asc":
            files.reverse()
        found, has_more = page(files, request.query_params.get("after"), _limit(request, "files"))
        return _list([file.as_json() for file in found], has_more)

    async def get_file(self, request: Request) -> Response:
        return JSONResponse(self._file(request).as_json())

    async def delete_file(self, request: Request) -> Response:
        file = self._file(request)
        await asyncio.to_thread(self._store.delete_file, file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def file_content(self, request: Request) -> Response:
        path = self._store.data_path(self._file(request).id)
        return FileResponse(path, media_type="application/octet-stream")

    def _file(self, request: Request) -> StoredFile:
        return self._store.file(request.path_params["file_id"])

    async def create_batch(self, request: Request) -> Response:
        data = await read_body(request.scope, request.receive, self._config)
        body = decode_object(data, max_depth=self._config.max_json_depth)
        for name in body:
            if name not in BATCH_FIELDS:
                raise RequestError(name[:80], "is not a field of batches here")
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise RequestError("input_file_id", f"must be the id of a file, got {shown(file_id)}")
        job = self._jobs.create(
            input_file_id=file_id,
            endpoint=body.get("endpoint"),
            completion_window=body.get("completion_window"),
            metadata=body.get("metadata"),
        )
        return JSONResponse(job.as_json())

    async def list_batches(self, request: Request) -> Response:
        found, has_more = page(self._store.jobs(), request.query_params.get("after"), _limit(request, "batches"))
        return _list([job.as_json() for job in found], has_more)

    async def get_batch(self, request: Request) -> Response:
        return JSONResponse(self._store.job(request.path_params["batch_id"]).as_json())

    async def cancel_batch(self, request: Request) -> Response:
        return JSONResponse(self._jobs.cancel(request.path_params["batch_id"]).as_json())


def _limit(request: Request, kind: str) -> int:
    text = request.query_params.get("limit")
    if text is None:
        return DEFAULT_LIMITS[kind]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_LIMITS[kind]):
        raise RequestError("limit", f"must be in [1, {MAX_LIMITS[kind]}], got {shown(text)}")
    return int(text)


def _list(items: list[dict[str, Any]], has_more: bool) -> Response:
    ids = [item["id"] for item in items]
    return JSONResponse(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": has_more,
        }
    )
