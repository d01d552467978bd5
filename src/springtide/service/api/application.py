"""The control API as one FastAPI application: routes, authentication, metrics and the OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from springtide import __version__
from springtide.core.status.admission import AdmissionStatus
from springtide.service.api import data_routes, openapi, routes
from springtide.service.api.api_keys import ApiKeys, key_routes
from springtide.service.api.artifact_routes import artifact_routes
from springtide.service.api.auth import AccessControl, NoteRefused
from springtide.service.api.content_routes import content_routes
from springtide.service.api.limits import RequestLimits
from springtide.service.api.live_updates import LiveStreams
from springtide.service.api.move_routes import move_routes
from springtide.service.api.release_routes import release_routes
from springtide.service.api.service_callers import ServiceCallers
from springtide.service.api.sessions import BrowserSessions, login_routes
from springtide.service.api.state_routes import cluster_routes, pool_routes, quote_routes, share_routes
from springtide.service.history.history import HistoryIndex
from springtide.service.history.pool_reports import PoolReports
from springtide.service.history.series import SeriesIndex
from springtide.service.metrics.platform import PlatformCollector
from springtide.service.ports import PlatformLike, Submissions
from springtide.service.quotes.moves import JobMoves
from springtide.service.quotes.quote import LiveQuotes
from springtide.service.status.search_reports import SearchReports
from springtide.service.status.sharing import SharingReports
from springtide.service.submission.function_menus import service_of
from springtide.service.submission.problems import add_problem_handlers
from springtide.service.submission.submission import SubmissionService
from springtide.storage.stores.open import open_store


def build_api(
    platform: PlatformLike,
    *,
    token: str,
    extra_routes: Sequence[BaseRoute] = (),
    registry: CollectorRegistry,
    history: HistoryIndex | None = None,
    function_paths: Callable[[], dict[str, Any]] = dict,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    first_answer_s: Callable[[str], float | None] = lambda name: None,
    admission_of: Callable[[str], AdmissionStatus | None] = lambda name: None,
    token_place: str = "",
    submissions: Submissions | None = None,
    sessions: BrowserSessions | None = None,
    note_refused: NoteRefused = lambda scope, name, status, seconds: None,
) -> FastAPI:
    """Return the application. Call it before the platform starts: it subscribes to the journal's steps.

    `extra_routes` (of the gateway and the dashboard) are behind the same authentication. The platform's metrics are
    added to `registry`, which /metrics serves. `function_paths` returns the OpenAPI paths of the deployed services. If
    `history` is given, the caller must add the steps to it. `first_answer_s` returns for a service's name how many
    seconds its first answer took after its last start from zero replicas, `admission_of` which requests its gateway
    refuses. `token_place` tells users where to find the token; if it is given, the platform may be called from other
    machines and under any host name. `submissions` replaces the direct submission to the platform. `sessions` are
    those of browsers; by default they end with the process. `note_refused` hears of requests without a right.
    """
    if history is None:
        history = HistoryIndex()
        index = history
        platform.subscribe(lambda seq, step, view: index.add(seq, step))
        platform.keep("history", index)
    pools = PoolReports(platform, history)
    PlatformCollector(platform, history, pools).register(registry)
    app = FastAPI(
        title="Springtide", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    quotes = LiveQuotes(platform)
    series = SeriesIndex()
    platform.subscribe(series.add)
    platform.keep("series", series)
    searches = SearchReports(lambda: service_of(platform.view()))
    shares = SharingReports(platform, first_answer_s, admission_of)
    streams = LiveStreams(platform, searches, shares)
    desk = submissions or SubmissionService(platform, quotes.quote)
    context = routes.ApiContext(platform, history, series, desk, streams, quotes, pools, searches, shares)
    for group in (routes.platform_routes, routes.job_routes, routes.service_routes, routes.workload_routes):
        app.include_router(group(context))
    app.include_router(quote_routes(platform, quotes))
    app.include_router(release_routes(context))
    app.include_router(move_routes(context, JobMoves(platform, quotes)))
    app.include_router(pool_routes(pools))
    app.include_router(share_routes(shares))
    app.include_router(cluster_routes(platform))
    app.include_router(artifact_routes(platform))
    app.include_router(content_routes(platform.source_store.contents))
    app.include_router(data_routes.data_routes(data_routes.DatasetCatalog(platform)))
    sessions = sessions or BrowserSessions()
    app.include_router(login_routes(sessions))
    keys = ApiKeys(lambda: open_store(platform.data_store_url()))
    app.include_router(key_routes(keys))
    _add_health_routes(app, platform, registry)
    _add_description_routes(app, platform, function_paths)
    app.router.routes[:0] = extra_routes  # Routes are tried in turn: those of services come first.
    add_problem_handlers(app)
    # The middleware added last sees a request first.
    app.add_middleware(RequestLimits)
    access: dict[str, Any] = {"is_open_to_network": True, "token_place": token_place} if token_place else {}
    access |= {"token": token, "sessions": sessions, "keys": keys, "note_refused": note_refused}
    app.add_middleware(AccessControl, callers=ServiceCallers(token, lambda: platform.view().services), **access)
    return app


def _add_health_routes(app: FastAPI, platform: PlatformLike, registry: CollectorRegistry) -> None:
    """Add the routes for health and metrics."""

    @app.get(
        "/healthz",
        tags=["platform"],
        summary="Whether the platform answers; needs no token",
        openapi_extra={"security": []},
        responses={
            200: {
                "description": "It does.",
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {"status": {"const": "ok"}, "version": {"type": "string"}},
                            "required": ["status", "version"],
                        }
                    }
                },
            }
        },
    )
    async def healthz() -> Response:
        return Response(msgspec.json.encode({"status": "ok", "version": __version__}), media_type="application/json")

    @app.get(
        "/readyz",
        tags=["platform"],
        summary="Whether decisions are being made; needs no token",
        openapi_extra={"security": []},
        responses=openapi.READINESS,
    )
    async def readyz(wanted: Annotated[Literal["requests"] | None, Query(alias="for")] = None) -> Response:
        # Served only once the journal has been read and the loop runs; before that, `Standby` answers here. With
        # `?for=requests` it is ready without decisions, too: services answer and jobs train on meanwhile.
        trouble = platform.trouble
        answer = {"status": "leading"} | ({"no_decisions": trouble} if trouble else {})
        is_ready = not trouble or wanted is not None
        return Response(msgspec.json.encode(answer), 200 if is_ready else 503, media_type="application/json")

    @app.get(
        "/metrics",
        tags=["platform"],
        summary="Figures for Prometheus; needs no token",
        response_class=Response,
        openapi_extra={"security": []},
        responses={200: {"description": "Figures.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(await run_in_threadpool(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)


def _add_description_routes(app: FastAPI, platform: PlatformLike, function_paths: Callable[[], dict[str, Any]]) -> None:
    """Add the routes of the OpenAPI description."""

    def described() -> dict[str, Any]:
        # The description of the control API is made once; the deployed functions change, and what the platform has.
        view = platform.view()
        control = openapi.tailored(
            openapi.describe(app), has_pods=platform.cluster() is not None, has_functions=service_of(view) is not None
        )
        return {**control, "paths": {**control["paths"], **function_paths()}}

    @app.get(
        "/openapi.json",
        tags=["platform"],
        summary="This description",
        responses=openapi.answers({"type": "object"}, "An OpenAPI document."),
    )
    async def description() -> Response:
        return Response(msgspec.json.encode(described()), media_type="application/json")

    @app.get(
        "/docs",
        tags=["pages"],
        summary="This description as a page",
        response_class=Response,
        responses=openapi.answers({"type": "string"}, "A page.", media_type="text/html"),
    )
    async def docs() -> Response:
        return HTMLResponse(openapi.render_page(described()))
