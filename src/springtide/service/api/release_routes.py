"""The REST route that brings back an earlier revision of a service."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.status.platform import ServiceStatus
from springtide.service.api import openapi
from springtide.service.api.routes import ApiContext, encoded, read_body
from springtide.service.submission.schemas import RollbackIn


def release_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(prefix="/v1/services", tags=["services"])

    @router.post(
        "/{name}/rollback",
        summary="Release an earlier revision of a service again",
        openapi_extra=openapi.takes(RollbackIn, {"revision": None}),
        responses=openapi.answers(
            openapi.reference(ServiceStatus), "It is taken in.", 400, 404, 409, 413, 415, 422, 503
        ),
    )
    async def roll_back(request: Request, name: openapi.NamePath) -> Response:
        body = await read_body(request, RollbackIn)
        record = await run_in_threadpool(context.submissions.roll_back, name, body)
        return encoded(context.service(record, request))

    return router
