"""The REST route of shared devices."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.status.shares import SharingStatus
from springtide.service.api import openapi
from springtide.service.api.routes import encoded
from springtide.service.submission.shares import ShareDesk


def share_routes(desk: ShareDesk) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.get(
        "/sharing",
        summary="Who shares which device, what is granted to each, and what enforces it",
        responses=openapi.answers(openapi.reference(SharingStatus), "Shared devices at this instant."),
    )
    async def get_sharing() -> Response:
        return encoded(await run_in_threadpool(desk.report))

    return router
