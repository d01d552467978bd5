"""The REST routes that move a job from machines to functions, and say what that would mean."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.status.platform import JobStatus
from springtide.core.status.quote import Quote
from springtide.service.api import openapi
from springtide.service.api.routes import ApiContext, encoded, read_body
from springtide.service.quotes.moves import JobMoves
from springtide.service.submission.schemas import MoveIn

_EXAMPLE = {"to": "functions"}


def move_routes(context: ApiContext, moves: JobMoves) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

    @router.post(
        "/{id}/move",
        summary="Have a job on machines go on on functions, from a checkpoint",
        openapi_extra=openapi.takes(MoveIn, _EXAMPLE),
        responses=openapi.answers(
            openapi.reference(JobStatus), "The job as it is now.", 400, 404, 409, 413, 415, 422, 503
        ),
    )
    async def move_job(request: Request, id: str) -> Response:
        body = await read_body(request, MoveIn)
        return encoded(context.job(await run_in_threadpool(moves.move, id, body.layer_profile)))

    @router.post(
        "/{id}/move/quote",
        summary="When the rest of a job on machines would be done on functions, and for how much",
        openapi_extra=openapi.takes(MoveIn, _EXAMPLE),
        responses=openapi.answers(openapi.reference(Quote), "Nothing was changed.", 400, 404, 409, 413, 415, 422, 503),
    )
    async def quote_move(request: Request, id: str) -> Response:
        body = await read_body(request, MoveIn)
        return encoded(await run_in_threadpool(moves.quote, id, body.layer_profile))

    return router
