"""The REST route of the cluster that a platform stands on."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.errors import NotFound
from springtide.core.status.pods import ClusterStatus
from springtide.service.api import openapi
from springtide.service.api.routes import encoded
from springtide.service.contract import PlatformLike


def cluster_routes(platform: PlatformLike) -> APIRouter:
    """Return the route."""
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
