"""The REST routes for quotes, the export of the live state, pools, shared devices and the cluster."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.errors import NotFound
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.pools import PoolsReport
from springtide.core.status.quote import Quote
from springtide.core.status.shares import SharingStatus
from springtide.core.tide import MAX_DAYS
from springtide.service.api import openapi
from springtide.service.api.routes import JOB_EXAMPLE, encoded, take_in
from springtide.service.export import live_state
from springtide.service.history.pool_reports import PoolReports
from springtide.service.ports import PlatformLike
from springtide.service.quotes.quote import LiveQuotes
from springtide.service.status.sharing import SharingReports
from springtide.service.submission.schemas import QuoteIn


def quote_routes(platform: PlatformLike, quotes: LiveQuotes) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.post(
        "/quote",
        summary="Whether a job would be accepted, when it would finish, for how much, and what else would do",
        openapi_extra=openapi.takes(QuoteIn, JOB_EXAMPLE),
        responses=openapi.answers(openapi.reference(Quote), "Nothing was changed.", 400, 409, 413, 415, 422, 503),
    )
    async def ask_quote(request: Request) -> Response:
        return encoded(await take_in(request, QuoteIn, quotes.quote, platform.quarantine))

    @router.get(
        "/export",
        summary="What the policy is shown now, for playing it forward",
        responses=openapi.answers({"type": "object"}, "A LiveState of src/springtide/core/status/export.py."),
    )
    async def export() -> Response:
        return encoded(await run_in_threadpool(live_state, platform))

    return router


def share_routes(reports: SharingReports) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.get(
        "/sharing",
        summary="Which workloads share which device, what is granted to each, and what enforces it",
        responses=openapi.answers(openapi.reference(SharingStatus), "Shared devices at this instant."),
    )
    async def get_sharing() -> Response:
        return encoded(await run_in_threadpool(reports.report))

    return router


def cluster_routes(platform: PlatformLike) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.get(
        "/cluster",
        summary="How the platform stands with its Kubernetes cluster, and the pods of all replicas",
        responses=openapi.answers(openapi.reference(ClusterStatus), "The cluster at this instant.", 404),
    )
    async def get_cluster() -> Response:
        found = await run_in_threadpool(platform.cluster)
        if found is None:
            raise NotFound("this platform stands on one machine, not on a cluster; `springtide devices` shows it")
        return encoded(found)

    return router


def pool_routes(reports: PoolReports) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.get(
        "/pools",
        summary="Pools: the label of each node, loans and reclaims, the tide and its forecast",
        responses=openapi.answers(openapi.reference(PoolsReport), "Pools at this instant.", 422),
    )
    async def get_pools(past_days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 1) -> Response:
        report = await run_in_threadpool(reports.report, past_days)
        return Response(
            msgspec.json.encode(report), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    return router
