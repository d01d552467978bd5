"""Finding a workload by what people call it: its id, or its name where that is clear."""

from __future__ import annotations

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.errors import Conflict, NotFound
from springtide.core.workload import WorkloadId
from springtide.service.ports import ViewLike


def find_job(view: ViewLike, called: str) -> JobRecord:
    """Return the job of that id or unique name. Raises NotFound, or Conflict if several bear the name.

    Among several jobs of one name the only unfinished one is meant.
    """
    record = view.jobs.get(WorkloadId(called))
    if record is not None:
        return record
    namesakes = [record for record in view.jobs.values() if record.job.name == called]
    if not namesakes:
        raise NotFound(f"there is no job {called!r:.80}; `springtide ps` lists every job")
    unfinished = [record for record in namesakes if not record.lifecycle.state.is_terminal]
    for candidates in (namesakes, unfinished):
        if len(candidates) == 1:
            return candidates[0]
    ids = ", ".join(record.workload_id for record in namesakes[-5:])
    raise Conflict(f"{len(namesakes)} jobs are named {called!r}; use an id, the newest are {ids}")


def find_service(view: ViewLike, name: str) -> ServiceRecord:
    """Return the service of that name. Raises NotFound (also for a removed one)."""
    record = view.services.get(WorkloadId(name))
    if record is None or record.is_removed:
        raise NotFound(f"there is no service {name!r:.80}; `springtide ps` lists every service")
    return record


def find_workload(view: ViewLike, called: str) -> JobRecord | ServiceRecord:
    """Return the service of that name, else the job of that id or name. Removed services are found too."""
    service = view.services.get(WorkloadId(called))
    if service is not None:
        return service
    try:
        return find_job(view, called)
    except NotFound:
        raise NotFound(
            f"there is no job or service {called!r:.80}; `springtide ps` lists every job and service"
        ) from None
