"""The REST route of pools: labels, loans, reclaims and the tide with its forecast."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.status.pools import PoolsReport
from springtide.core.tide import MAX_DAYS
from springtide.service.api import openapi
from springtide.service.history.pool_reports import PoolReports


def pool_routes(reports: PoolReports) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.get(
        "/pools",
        summary="Pools: who is labelled for what, loans and reclaims, the tide and its forecast",
        responses=openapi.answers(openapi.reference(PoolsReport), "Pools at this instant.", 422),
    )
    async def get_pools(past_days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 1) -> Response:
        report = await run_in_threadpool(reports.report, past_days)
        return Response(
            msgspec.json.encode(report), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    return router
