"""Find a workload by its id, or by its name where that is unique."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.errors import Conflict, NotFound
from springtide.core.quantities import format_duration
from springtide.core.workload import WorkloadId
from springtide.service.ports import ViewLike

_MAX_NAMESAKES = 50


def find_job(view: ViewLike, id_or_name: str) -> JobRecord:
    """Return the job of that id or name. Raises NotFound, or Conflict if the name is ambiguous.

    If several jobs have the name and exactly one of them is unfinished, that one is returned.
    """
    record = job_of_id(view, WorkloadId(id_or_name))
    if record is not None:
        return record
    namesakes = [*view.ended.named(id_or_name, _MAX_NAMESAKES)[::-1], *_named(view, id_or_name)]
    if not namesakes:
        ended_at_s = view.ended.dropped_at_s(WorkloadId(id_or_name))
        if ended_at_s is not None:
            raise NotFound(
                f"the job {id_or_name!r:.80} was dropped by retention: it ended "
                f"{format_duration(view.now_s - ended_at_s)} ago, and `springtide up --keep-ended` says how long ended "
                "jobs are kept"
            )
        raise NotFound(f"there is no job {id_or_name!r:.80}; `springtide ps` lists every job")
    unfinished = [record for record in namesakes if not record.lifecycle.state.is_terminal]
    for candidates in (namesakes, unfinished):
        if len(candidates) == 1:
            return candidates[0]
    ids = ", ".join(record.workload_id for record in namesakes[-5:])
    raise Conflict(f"{len(namesakes)} jobs are named {id_or_name!r}; use an id, the newest are {ids}")


def job_of_id(view: ViewLike, job_id: WorkloadId) -> JobRecord | None:
    """The job of that id, also one that ended long ago."""
    record = view.jobs.get(job_id)
    if record is None and (ended := view.ended.get(job_id)) is not None:
        return ended.record
    return record


def service_of_id(view: ViewLike, service_id: WorkloadId) -> ServiceRecord | None:
    """The service of that id, also one that was removed long ago."""
    record = view.services.get(service_id)
    if record is None and (ended := view.ended.service(service_id)) is not None:
        return ended.record
    return record


def newest_jobs(view: ViewLike, name: str, limit: int) -> Iterator[JobRecord]:
    """The jobs of that name, the newest first; of those that ended long ago at most `limit`."""
    yield from reversed(_named(view, name))
    yield from view.ended.named(name, limit)


def runs_of_code(view: ViewLike, code: str, name: str, limit: int) -> Iterator[JobRecord]:
    """The jobs that ran that code (TrainingJob.code) and those of that name, the newest first.

    Of those that ended long ago at most `limit` of each.
    """
    end = f"-{code}"
    here = [each for each in view.jobs.values() if each.job.name == name or each.job.family.endswith(end)]
    yield from reversed(here)
    ended = {each.workload_id: each for each in (*view.ended.of_code(code, limit), *view.ended.named(name, limit))}
    yield from sorted(ended.values(), key=lambda each: each.lifecycle.ended_at_s or 0.0, reverse=True)


def _named(view: ViewLike, name: str) -> list[JobRecord]:
    return [record for record in view.jobs.values() if record.job.name == name]


def find_service(view: ViewLike, name: str) -> ServiceRecord:
    """Return the service of that name. Raises NotFound (also for a removed one)."""
    record = view.services.get(WorkloadId(name))
    if record is None or record.is_removed:
        raise NotFound(f"there is no service {name!r:.80}; `springtide ps` lists every service")
    return record


def find_workload(view: ViewLike, id_or_name: str) -> JobRecord | ServiceRecord:
    """Return the service of that name, else the job of that id or name, else the removed service of that name.

    A service that was removed not long ago comes before a job.
    """
    service = view.services.get(WorkloadId(id_or_name))
    if service is not None:
        return service
    try:
        return find_job(view, id_or_name)
    except NotFound:
        if (service := service_of_id(view, WorkloadId(id_or_name))) is not None:
            return service
        if view.ended.dropped_at_s(WorkloadId(id_or_name)) is not None:
            raise
        raise NotFound(
            f"there is no job or service {id_or_name!r:.80}; `springtide ps` lists every job and service"
        ) from None
