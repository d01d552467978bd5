"""How many workloads of one owner may be unfinished at a time, so that none fills the platform."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.containers import ContainerSettings
from springtide.core.errors import InvalidRequest
from springtide.service.ports import ViewLike


class TooManyUnfinished(InvalidRequest):
    """The owner has as many unfinished workloads as one may have."""

    status = 429
    code = "too_many_unfinished"


def check_unfinished(
    view: ViewLike,
    container: ContainerSettings | None,
    most: int,
    coming: Sequence[ContainerSettings | None] = (),
) -> None:
    """Raise TooManyUnfinished if one workload more would be too many for its owner; `most` 0: any number.

    All holders of the platform's token are one owner, and on a cluster each namespace is one. `coming` are the settings
    of the workloads that are being taken in.
    """
    if not most or len(view.jobs) + len(view.services) + len(coming) < most:
        return
    jobs = [r.job.container for r in view.jobs.values() if not r.is_over and r.lifecycle.outcome is None]
    services = [r.service.container for r in view.services.values() if not r.is_removed]
    namespace = _namespace(container)
    unfinished = sum(_namespace(other) == namespace for other in (*jobs, *services, *coming))
    if unfinished >= most:
        where = f" of namespace {namespace}" if namespace else ""
        raise TooManyUnfinished(
            f"{unfinished} jobs and services{where} are unfinished, and at most {most} may be (max_unfinished); wait "
            "until some have ended, or cancel some"
        )


def _namespace(container: ContainerSettings | None) -> str:
    return "" if container is None else container.namespace
