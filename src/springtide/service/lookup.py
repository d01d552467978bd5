"""Find a workload by its id, or by its name where that is unique."""

from __future__ import annotations

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.errors import Conflict, NotFound
from springtide.core.workload import WorkloadId
from springtide.service.ports import ViewLike


def find_job(view: ViewLike, id_or_name: str) -> JobRecord:
    """Return the job of that id or name. Raises NotFound, or Conflict if the name is ambiguous.

    If several jobs have the name and exactly one of them is unfinished, that one is returned.
    """
    record = view.jobs.get(WorkloadId(id_or_name))
    if record is not None:
        return record
    namesakes = [record for record in view.jobs.values() if record.job.name == id_or_name]
    if not namesakes:
        raise NotFound(f"there is no job {id_or_name!r:.80}; `springtide ps` lists every job")
    unfinished = [record for record in namesakes if not record.lifecycle.state.is_terminal]
    for candidates in (namesakes, unfinished):
        if len(candidates) == 1:
            return candidates[0]
    ids = ", ".join(record.workload_id for record in namesakes[-5:])
    raise Conflict(f"{len(namesakes)} jobs are named {id_or_name!r}; use an id, the newest are {ids}")


def find_service(view: ViewLike, name: str) -> ServiceRecord:
    """Return the service of that name. Raises NotFound (also for a removed one)."""
    record = view.services.get(WorkloadId(name))
    if record is None or record.is_removed:
        raise NotFound(f"there is no service {name!r:.80}; `springtide ps` lists every service")
    return record


def find_workload(view: ViewLike, id_or_name: str) -> JobRecord | ServiceRecord:
    """Return the service of that name, else the job of that id or name. Removed services are found too."""
    service = view.services.get(WorkloadId(id_or_name))
    if service is not None:
        return service
    try:
        return find_job(view, id_or_name)
    except NotFound:
        raise NotFound(
            f"there is no job or service {id_or_name!r:.80}; `springtide ps` lists every job and service"
        ) from None
