"""The REST routes of artifacts: what a job left, and each file of it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from springtide.core.status.artifacts import ArtifactStatus
from springtide.service.api import openapi
from springtide.service.api.routes import encoded
from springtide.service.lookup import find_job
from springtide.service.ports import PlatformLike

_CHUNK_BYTES = 1 << 20


def artifact_routes(platform: PlatformLike) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{id}/artifacts", tags=["jobs"])

    @router.get(
        "",
        summary="What a job left: its weights, and the files that it wrote to SPRINGTIDE_OUT",
        responses=openapi.answers(openapi.list_of(ArtifactStatus), "The files by name.", 404, 409, 422, 503),
    )
    async def list_artifacts(id: str, digests: bool = False) -> Response:
        job_id = find_job(platform.view(), id).workload_id
        return encoded(await run_in_threadpool(platform.source_store.artifacts, job_id, with_digests=digests))

    @router.get(
        "/{name:path}",
        summary="One file of what a job left",
        response_class=Response,
        responses=openapi.answers(
            {"type": "string", "format": "binary"},
            "The file.",
            404,
            409,
            503,
            media_type="application/octet-stream",
        ),
    )
    async def get_artifact(id: str, name: str) -> Response:
        job_id = find_job(platform.view(), id).workload_id
        file, num_bytes = await run_in_threadpool(platform.source_store.open_artifact, job_id, name)
        headers = {"Content-Length": str(num_bytes), "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return StreamingResponse(_chunks(file, num_bytes), media_type="application/octet-stream", headers=headers)

    return router


def _chunks(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    """The first bytes of a file, as many as were announced: it may grow meanwhile."""
    with file:
        while num_bytes > 0:
            chunk = file.read(min(_CHUNK_BYTES, num_bytes))
            if not chunk:
                return
            num_bytes -= len(chunk)
            yield chunk
