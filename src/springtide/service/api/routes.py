"""The REST routes of the platform, jobs, services and workloads, one function for each group.

Request bodies are the models of service/submission/schemas.py, answers the structs of core/status/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Header, Query, Request
from msgspec.structs import replace
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from springtide.control.journal.ended import kept_of
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.status.platform import (
    Explanation,
    HistoryEntry,
    JobStatus,
    PlatformStatus,
    ProgressSeries,
    ServiceStatus,
    Timeline,
)
from springtide.core.workload import JobState, WorkloadId
from springtide.service.api import openapi
from springtide.service.api.live_updates import LiveStreams
from springtide.service.history.history import HistoryIndex, entries_of
from springtide.service.history.pool_reports import PoolReports
from springtide.service.history.series import SeriesIndex, planned_of, points_of
from springtide.service.logs import reading as logs
from springtide.service.lookup import find_job, find_service, find_workload, job_of_id, newest_jobs
from springtide.service.ports import PlatformLike, Submissions
from springtide.service.quotes.quote import LiveQuotes
from springtide.service.status.cluster_evidence import (
    PodsByWorkload,
    cluster_evidence,
    pods_by_workload,
    with_condition,
    with_pods,
)
from springtide.service.status.explain import explain
from springtide.service.status.next_request import next_request_waits
from springtide.service.status.outlook import outlook_of
from springtide.service.status.search_reports import SearchReports
from springtide.service.status.sharing import SharingReports
from springtide.service.status.status import job_status, listed_jobs, listed_services, platform_status, service_status
from springtide.service.submission.option_models import JobChangeIn
from springtide.service.submission.problems import UnsupportedMediaType
from springtide.service.submission.quarantine import Quarantine, request_key
from springtide.service.submission.schemas import (
    JobIn,
    NothingIn,
    ResumeIn,
    ScaleIn,
    ServiceIn,
    ShutdownIn,
    parse_body,
)
from springtide.service.submission.submission import MAX_KEY_CHARS

BodyT = TypeVar("BodyT", bound=BaseModel)
ResultT = TypeVar("ResultT")
IdempotencyKey = Annotated[
    str | None, Header(json_schema_extra={"pattern": "^[ -~]+$", "minLength": 1, "maxLength": MAX_KEY_CHARS})
]
JOB_EXAMPLE = {
    "name": "digits",
    "source": {"filename": "digits.py", "text": "def fit(ctx):\n    ...\n", "object_name": "fit", "kind": "function"},
    "options": {"deadline_s": 600, "global_batch_size": 512, "num_epochs": 10, "max_workers": 4},
}
_SERVICE_EXAMPLE = {
    "source": {"filename": "serve.py", "text": "class Digits:\n    ...\n", "object_name": "Digits", "kind": "class"},
    "options": {"slo_s": 0.2, "min_replicas": 0, "max_replicas": 4},
}
_JOB = openapi.reference(JobStatus)
# The list of all jobs has so many of those that have left the platform's state.
_MOST_OLDER = 1_000
_SERVICE = openapi.reference(ServiceStatus)
_TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the routes need to answer, and the statuses that several of them return."""

    platform: PlatformLike
    history: HistoryIndex
    series: SeriesIndex
    submissions: Submissions
    streams: LiveStreams
    quotes: LiveQuotes
    pools: PoolReports
    searches: SearchReports
    shares: SharingReports

    def jobs(self, name: str = "") -> list[JobStatus]:
        """The jobs, or those of one name, in order of arrival; of those that ended long ago the newest."""
        pods, view = pods_by_workload(self.platform.cluster()), self.platform.view()
        records = list(newest_jobs(view, name, _MOST_OLDER))[::-1] if name else listed_jobs(view, _MOST_OLDER)
        return [self.job(record, pods=pods) for record in records]

    def entries(self, record: JobRecord | ServiceRecord) -> tuple[HistoryEntry, ...]:
        """The lines of a workload's history."""
        found = self.history.entries(record.workload_id)
        kept = kept_of(self.platform.view().ended, record.workload_id) if not found else {}
        return entries_of(kept["history"]) if "history" in kept else found

    def job_series(self, job_id: WorkloadId) -> ProgressSeries:
        """The points of a job's training."""
        found = self.series.series(job_id, self.platform.now_s())
        kept = kept_of(self.platform.view().ended, job_id) if not found.points else {}
        return replace(found, points=points_of(kept["series"])) if "series" in kept else found

    def services(self, request: Request) -> list[ServiceStatus]:
        pods = pods_by_workload(self.platform.cluster())
        return [self.service(record, request, pods=pods) for record in listed_services(self.platform.view())]

    def job(self, record: JobRecord, *, with_map: bool = False, pods: PodsByWorkload | None = None) -> JobStatus:
        """The job's status at this instant, with `with_map` also its search's prediction for every configuration.

        `pods` are the pods of all workloads, if the caller has grouped them already.
        """
        view, now_s = self.platform.view(), self.platform.now_s()
        search = self.searches.status(record, now_s, with_map=with_map)
        status = job_status(
            record,
            now_s,
            planned=view.future.get(record.workload_id, ()),
            condition=view.conditions.get(record.workload_id),
            usd_per_device_hour=self.platform.usd_per_device_hour,
            live=self.platform.function_status(record.workload_id),
            search=search,
            enforced=self.shares.enforced(record.job.share),
        )
        return with_pods(status, pods_by_workload(self.platform.cluster()) if pods is None else pods)

    def status(self, request: Request) -> PlatformStatus:
        platform = self.platform
        offset_s, price = platform.wall_clock_offset_s, platform.usd_per_device_hour
        drains = platform.snapshot().drains
        status = platform_status(
            platform.view(),
            platform.now_s(),
            offset_s,
            base_url(request),
            price,
            drains,
            platform.function_status,
            self.searches.status,
            self.shares,
        )
        return with_condition(status, platform)

    def why(self, id_or_name: str) -> Explanation:
        """Why the workload of that id or name is in its state, and what is expected of it."""
        view = self.platform.view()
        record = find_workload(view, id_or_name)
        outlook = outlook_of(record, self.platform) if isinstance(record, JobRecord) else None
        if (
            isinstance(record, JobRecord)
            and record.lifecycle.state is JobState.REJECTED
            and not record.lifecycle.alternatives
        ):
            # The policy named no alternatives; a quote finds what it would accept now.
            record = replace(record, lifecycle=replace(record.lifecycle, alternatives=self.quotes.offers(record)))
        entries = self.entries(record)
        live, now_s = self.platform.function_status(record.workload_id), self.platform.now_s()
        search = self.searches.status(record, now_s) if isinstance(record, JobRecord) else None
        sharing, admission = self.platform.sharing(), self.shares.admission(record)
        pools, waits = self.pools.report(), next_request_waits(record, self.platform)
        found = explain(record, view, entries, now_s, outlook, pools, live, search, sharing, admission, waits)
        cluster = self.platform.cluster()
        if cluster is None or (isinstance(record, JobRecord) and record.lifecycle.state.is_terminal):
            return found
        return replace(found, evidence=(*found.evidence, *cluster_evidence(record.workload_id, cluster)))

    def service(self, record: ServiceRecord, request: Request, *, pods: PodsByWorkload | None = None) -> ServiceStatus:
        status = service_status(
            record,
            self.platform.now_s(),
            base_url(request),
            enforced=self.shares.enforced(record.service.share),
            first_answer_s=self.shares.first_answer_s(record.service.name),
            admission=self.shares.admission(record),
            next_request=next_request_waits(record, self.platform) if pods is None else "",
        )
        return with_pods(status, pods_by_workload(self.platform.cluster()) if pods is None else pods)


def job_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    platform, submissions = context.platform, context.submissions

    @router.get("", summary="Every job", responses=openapi.answers(openapi.list_of(JobStatus), "In order of arrival."))
    async def list_jobs(name: Annotated[str, Query(max_length=200)] = "") -> Response:
        return encoded(await run_in_threadpool(context.jobs, name))

    @router.post(
        "",
        summary="Submit a training job",
        status_code=201,
        openapi_extra=openapi.takes(JobIn, JOB_EXAMPLE),
        responses={
            **openapi.answers(_JOB, "The job is taken in.", 400, 409, 413, 415, 422, 429, 503, status=201),
            200: {"description": "This key was used before.", "content": {"application/json": {"schema": _JOB}}},
        },
    )
    async def submit_job(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        def submit(body: JobIn) -> tuple[JobRecord, bool]:
            return submissions.submit_job(body, idempotency_key)

        record, is_new = await take_in(request, JobIn, submit, platform.quarantine)
        return encoded(context.job(record), 201 if is_new else 200)

    @router.get(
        "/{id}/series",
        summary="How its training went: progress, batch, goodput and noise over time",
        responses=openapi.answers(openapi.reference(ProgressSeries), "The points, oldest first.", 404, 409),
    )
    async def get_series(id: str) -> Response:
        job_id = find_job(platform.view(), id).workload_id
        return encoded(await run_in_threadpool(context.job_series, job_id))

    @router.get("/{id}", summary="One job, by id or unique name", responses=openapi.answers(_JOB, "The job.", 404, 409))
    async def get_job(id: str) -> Response:
        record = find_job(platform.view(), id)
        return encoded(await run_in_threadpool(context.job, record, with_map=True))

    _add_changes(router, context)
    return router


def _add_changes(router: APIRouter, context: ApiContext) -> None:
    """Add the routes that change a submitted job."""
    submissions = context.submissions
    changed = openapi.answers(_JOB, "The job as it is now.", 400, 404, 409, 413, 415, 422, 503)

    @router.patch(
        "/{id}",
        summary="Change a job's deadline, budget or retries while it runs",
        openapi_extra=openapi.takes(JobChangeIn, {"deadline_s": 3600, "budget_usd": 5.0}),
        responses=changed,
    )
    async def change_job(request: Request, id: str) -> Response:
        changes = await read_body(request, JobChangeIn)
        return encoded(context.job(await run_in_threadpool(submissions.change_job, id, changes)))

    @router.post("/{id}/cancel", summary="End a job", responses=changed)
    async def cancel_job(request: Request, id: str) -> Response:
        await read_nothing(request)
        return encoded(context.job(await run_in_threadpool(submissions.cancel_job, id)))

    @router.post("/{id}/pause", summary="Checkpoint a job and give its devices back", responses=changed)
    async def pause_job(request: Request, id: str) -> Response:
        await read_nothing(request)
        return encoded(context.job(await run_in_threadpool(submissions.pause_job, id)))

    @router.post(
        "/{id}/resume",
        summary="Let a paused job go on, with another budget if one is named",
        openapi_extra=openapi.takes(ResumeIn, {"budget_usd": 5.0}),
        responses=changed,
    )
    async def resume_job(request: Request, id: str) -> Response:
        body = await read_body(request, ResumeIn) if await request.body() else ResumeIn()
        return encoded(context.job(await run_in_threadpool(submissions.resume_job, id, body.budget_usd)))


def service_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(prefix="/v1/services", tags=["services"])
    platform, submissions = context.platform, context.submissions

    @router.get(
        "", summary="Every service", responses=openapi.answers(openapi.list_of(ServiceStatus), "In order of arrival.")
    )
    async def list_services(request: Request) -> Response:
        return encoded(await run_in_threadpool(context.services, request))

    @router.get("/{name}", summary="One service", responses=openapi.answers(_SERVICE, "The service.", 404))
    async def get_service(request: Request, name: openapi.NamePath) -> Response:
        return encoded(context.service(find_service(platform.view(), name), request))

    @router.put(
        "/{name}",
        summary="Deploy a service, or a new revision of it",
        openapi_extra=openapi.takes(ServiceIn, _SERVICE_EXAMPLE),
        responses=openapi.answers(_SERVICE, "The service is taken in.", 400, 409, 413, 415, 422, 429, 503),
    )
    async def deploy_service(request: Request, name: openapi.NamePath) -> Response:
        def deploy(body: ServiceIn) -> ServiceRecord:
            return submissions.deploy_service(name, body)

        return encoded(context.service(await take_in(request, ServiceIn, deploy, platform.quarantine), request))

    @router.delete(
        "/{name}",
        summary="Drain a service and take it away",
        responses=openapi.answers(_SERVICE, "It drains.", 400, 404, 413, 415, 422, 503),
    )
    async def remove_service(request: Request, name: openapi.NamePath) -> Response:
        await read_nothing(request)
        return encoded(context.service(await run_in_threadpool(submissions.remove_service, name), request))

    return router


def workload_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(prefix="/v1/workloads", tags=["workloads"])
    platform = context.platform

    @router.post(
        "/{id}/scale",
        summary="Set new bounds on workers or replicas",
        openapi_extra=openapi.takes(ScaleIn, {"minimum": 1, "maximum": 4}),
        responses=openapi.answers(
            {"oneOf": [_JOB, _SERVICE]}, "The job or service as it is now.", 400, 404, 409, 413, 415, 422, 503
        ),
    )
    async def scale_workload(request: Request, id: str) -> Response:
        body = await read_body(request, ScaleIn)
        record = await run_in_threadpool(context.submissions.scale, id, body)
        if isinstance(record, JobRecord):
            return encoded(context.job(record))
        return encoded(context.service(record, request))

    @router.get(
        "/{id}/why",
        summary="Why it is where it is, and what could be done",
        responses=openapi.answers(openapi.reference(Explanation), "The one dominant reason.", 404, 409),
    )
    async def why(id: str) -> Response:
        return encoded(await run_in_threadpool(context.why, id))

    @router.get(
        "/{id}/history",
        summary="Its story from the journal, oldest line first",
        responses=openapi.answers(openapi.list_of(HistoryEntry), "The newest lines.", 404, 409),
    )
    async def get_history(id: str) -> Response:
        return encoded(list(await run_in_threadpool(context.entries, find_workload(platform.view(), id))))

    @router.get(
        "/{id}/logs",
        summary="What its replicas wrote, each line with `[replica] ` before it",
        response_class=Response,
        responses=openapi.answers(_TEXT, "Lines of text.", 404, 409, 422, 503, media_type="text/plain"),
    )
    async def get_logs(
        id: str,
        replica: Annotated[str, Query(max_length=96, json_schema_extra={"pattern": logs.REPLICA_PATTERN})] = "",
        tail: Annotated[int, Query(ge=0, le=logs.MAX_TAIL)] = 200,
        follow: bool = False,
    ) -> Response:
        workload_id = find_workload(platform.view(), id).workload_id
        folder = platform.workload_dir(workload_id) / "logs"
        await run_in_threadpool(platform.source_store.fetch_logs, workload_id)
        media_type = "text/plain; charset=utf-8"
        if not follow:
            lines, _ = await run_in_threadpool(logs.read_tail, folder, tail, replica)
            return Response(logs.as_text(lines), media_type=media_type)
        await run_in_threadpool(logs.list_logs, folder, replica)
        context.streams.check_capacity()
        chunks = logs.follow(folder, tail, replica, lambda: is_over(platform, workload_id))
        return StreamingResponse(
            context.streams.counted(chunks), media_type=media_type, headers={"Cache-Control": "no-store"}
        )

    return router


def platform_routes(context: ApiContext) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["platform"])
    platform = context.platform

    @router.get(
        "/status",
        summary="Everything at one instant",
        responses=openapi.answers(openapi.reference(PlatformStatus), "Devices, jobs and services."),
    )
    async def get_status(request: Request) -> Response:
        return encoded(await run_in_threadpool(context.status, request))

    @router.get(
        "/timeline",
        summary="Which workload held which device when, and what happened",
        responses=openapi.answers(openapi.reference(Timeline), "Intervals and marks.", 422),
    )
    async def get_timeline(since_s: Annotated[float, Query(ge=0, le=1e12, allow_inf_nan=False)] = 0.0) -> Response:
        timeline = await run_in_threadpool(context.history.timeline, platform.now_s(), since_s)
        return encoded(replace(timeline, planned=planned_of(platform.view(), timeline.now_s)))

    @router.get(
        "/stream",
        summary="The status as server-sent events, at most four a second",
        response_class=Response,
        responses=openapi.answers(
            openapi.event_of(PlatformStatus, "status"),
            "Events named `status` whose data is a PlatformStatus.",
            422,
            503,
            media_type="text/event-stream",
        ),
    )
    async def stream(
        request: Request,
        after_seq: Annotated[int, Query(ge=-1, le=2**62)] = -1,
        last_event_id: Annotated[str, Header()] = "",
    ) -> Response:
        context.streams.check_capacity()
        if last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 18:
            after_seq = max(after_seq, int(last_event_id))
        return StreamingResponse(
            context.streams.counted(context.streams.stream(after_seq, base_url(request))),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @router.post(
        "/shutdown",
        summary="End the platform",
        status_code=202,
        openapi_extra=openapi.takes(ShutdownIn, {"stop_workers": True}),
        responses=openapi.answers(
            {"type": "object", "properties": {"stopping": {"type": "boolean"}}, "required": ["stopping"]},
            "It ends now.",
            400,
            413,
            415,
            422,
            status=202,
        ),
    )
    async def shutdown(request: Request) -> Response:
        body = await read_body(request, ShutdownIn)
        await run_in_threadpool(lambda: platform.request_shutdown(stop_workers=body.stop_workers))
        return encoded({"stopping": True}, 202)

    return router


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """Read a JSON body and check it against `model`. Raises InvalidRequest."""
    # Checking a large body takes time: a thread does it, so that the event loop can answer other requests.
    return await run_in_threadpool(parse_body, await read_json(request), model)


async def take_in(
    request: Request, model: type[BodyT], work: Callable[[BodyT], ResultT], quarantine: Quarantine
) -> ResultT:
    """Read a body with a source, check it, and do `work` with it, noted as being taken in. Raises InvalidRequest."""
    body = await read_json(request)

    def taken_in() -> ResultT:
        with quarantine.taking_in(request_key(body)):
            return work(parse_body(body, model))

    return await run_in_threadpool(taken_in)


async def read_json(request: Request) -> bytes:
    """The body of a request that declares JSON. Raises UnsupportedMediaType."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(
            f"the body is declared as {media_type or 'nothing'!r:.80}; send JSON with Content-Type: application/json"
        )
    return await request.body()


async def read_nothing(request: Request) -> None:
    """Read the body of a request that takes none. Raises InvalidRequest if it holds anything but `{}`."""
    if await request.body():
        await read_body(request, NothingIn)


def encoded(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response that must not be cached."""
    return Response(
        msgspec.json.encode(value), status, media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def base_url(request: Request) -> str:
    """The address at which the client reached the platform; AccessControl has checked the host."""
    return f"http://{request.headers['host']}"


def is_over(platform: PlatformLike, workload_id: WorkloadId) -> bool:
    """Whether nothing of the workload runs now or can run again."""
    view = platform.view()
    job, service = job_of_id(view, workload_id), view.services.get(workload_id)
    if job is not None:
        return job.lifecycle.state.is_terminal and not job.replicas
    return service is None or (service.is_removed and not service.replicas)
