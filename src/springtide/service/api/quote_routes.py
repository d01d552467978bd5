"""The routes that ask what would be: quotes, and the live state for those who play it forward elsewhere."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.status.quote import Quote
from springtide.service.api import openapi
from springtide.service.api.routes import JOB_EXAMPLE, encoded, read_body
from springtide.service.contract import PlatformLike
from springtide.service.export import live_state
from springtide.service.quotes.quote import QuoteDesk
from springtide.service.submission.schemas import JobIn


def quote_routes(platform: PlatformLike, desk: QuoteDesk) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.post(
        "/quote",
        summary="Whether a job would be accepted, when it would finish, for how much, and what else would do",
        openapi_extra=openapi.takes(JobIn, JOB_EXAMPLE),
        responses=openapi.answers(openapi.reference(Quote), "Nothing was changed.", 400, 413, 415, 422, 503),
    )
    async def ask_quote(request: Request) -> Response:
        body = await read_body(request, JobIn)
        return encoded(await run_in_threadpool(desk.quote, body))

    @router.get(
        "/export",
        summary="What the policy is shown now, for playing it forward",
        responses=openapi.answers({"type": "object"}, "A LiveState of src/springtide/core/status/export.py."),
    )
    async def export() -> Response:
        return encoded(await run_in_threadpool(live_state, platform))

    return router
