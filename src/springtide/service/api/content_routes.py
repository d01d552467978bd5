"""The REST routes of contents: what the files of folders hold. Clients send them before a job that has the folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.decoding import decode_msgpack
from springtide.core.errors import CapacityError, InvalidRequest, StorageError
from springtide.service.api import openapi
from springtide.service.api.routes import encoded, read_body
from springtide.service.submission.problems import Malformed, TooLarge, UnsupportedMediaType
from springtide.service.submission.schemas import DigestsIn
from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.tree import MAX_FILE_BYTES
from springtide.storage.workloads.artifacts import checked_digest

MAX_UPLOADS = 8
_BINARY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_TAKEN = {"type": "object", "properties": {"taken": {"type": "integer"}}, "required": ["taken"]}
_MISSING = {
    "type": "object",
    "properties": {"missing": {"type": "array", "items": {"type": "string"}}},
    "required": ["missing"],
}


class _Uploads:
    """Counts the bodies that are being received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._lock:
            if self._num >= MAX_UPLOADS:
                raise CapacityError(f"{MAX_UPLOADS} bodies with contents are being sent already; send this one later")
            self._num += 1
        try:
            yield
        finally:
            with self._lock:
                self._num -= 1


def content_routes(contents: ContentDirectory) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["jobs"])
    uploads = _Uploads()

    @router.post(
        "/missing-contents",
        summary="Which of these contents the platform does not have",
        openapi_extra=openapi.takes(DigestsIn, {"sha256": ["0" * 64]}),
        responses=openapi.answers(_MISSING, "Those that are to be sent.", 400, 413, 415, 422, 503),
    )
    async def missing(request: Request) -> Response:
        asked = await read_body(request, DigestsIn)
        return encoded({"missing": await run_in_threadpool(contents.missing, asked.sha256)})

    @router.post(
        "/contents",
        summary="Send many small contents in one body: a msgpack map from the digest of each to its bytes",
        openapi_extra=_BINARY,
        responses=openapi.answers(_TAKEN, "All of them are kept.", 400, 409, 413, 415, 422, 503),
    )
    async def put_many(request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/octet-stream":
            raise UnsupportedMediaType(
                f"the body is declared as {media_type or 'nothing'!r:.80}; send it as application/octet-stream"
            )
        with uploads.one():
            taken = await run_in_threadpool(_keep_all, contents, await request.body())
        return encoded({"taken": taken})

    @router.put(
        "/contents/{sha256}",
        summary="Send one content",
        openapi_extra=_BINARY,
        responses=openapi.answers(_TAKEN, "It is kept.", 400, 409, 413, 422, 503),
    )
    async def put_one(request: Request, sha256: openapi.DigestPath) -> Response:
        _check_digest(sha256)
        num_bytes = 0
        with uploads.one(), contents.receiving(sha256) as file:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > MAX_FILE_BYTES:
                    raise TooLarge(f"a file of a folder has at most {MAX_FILE_BYTES:,} bytes; read it from a store")
                await run_in_threadpool(file.write, chunk)
        return encoded({"taken": 1})

    return router


def _keep_all(contents: ContentDirectory, body: bytes) -> int:
    try:
        found = decode_msgpack(body, dict[str, bytes])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(f"the body is no msgpack map from digests to bytes: {error}") from None
    for sha256 in found:
        _check_digest(sha256)
    for sha256, data in found.items():
        contents.put(sha256, data)
    return len(found)


def _check_digest(sha256: str) -> None:
    try:
        checked_digest(sha256)
    except StorageError as error:
        raise InvalidRequest(str(error)) from None
