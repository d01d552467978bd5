"""What a deploy does to a service where nothing is released beside it."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.control.edits import differs_in_share
from springtide.control.records import ServiceRecord, ServiceState
from springtide.control.releases.parts import Revision
from springtide.control.releases.steps import MAX_PAST, given_up, last_revision, newest_of
from springtide.core.events import ServiceDeployed
from springtide.core.workload import InferenceService


def unchanged(old: ServiceRecord, service: InferenceService, now_s: float) -> ServiceRecord | None:
    """The record of a service that is deployed as it is, also if only the time to start in differs; None otherwise.

    What is released meanwhile is cancelled if the present revision is deployed again.
    """
    newest = newest_of(old)
    if newest == replace(service, revision=newest.revision):
        return old
    if newest == replace(service, revision=newest.revision, start_timeout_s=newest.start_timeout_s):
        # Nothing that a running replica depends on has changed.
        newest = replace(newest, start_timeout_s=service.start_timeout_s)
        if old.release is None:
            return replace(old, service=newest)
        return replace(old, release=replace(old.release, service=newest))
    if old.release is not None and old.service == replace(service, revision=old.service.revision):
        reason = f"revision {old.service.revision} was deployed again before it was ready"
        return given_up(old, reason, now_s, state="cancelled")
    return None


def replaced_at_once(old: ServiceRecord | None, event: ServiceDeployed, now_s: float) -> ServiceRecord:
    """The service of a first deploy, or one whose replicas are replaced although the new ones may never be ready.

    That is so where the present revision was never ready, where it has failed, or where the two are not planned alike.
    """
    service = event.service
    fresh = ServiceRecord(
        service=service,
        state=ServiceState.IDLE,
        reason="no replica: no request has come yet",
        deployed_at_s=now_s,
        min_replicas=service.min_replicas,
        max_replicas=service.max_replicas,
        next_replica=event.first_replica,
    )
    if old is None:
        return fresh
    if old.release is not None:
        old = given_up(old, "another revision was deployed before it was ready", now_s, state="cancelled")
    revision = service.revision if event.is_rollback else last_revision(old) + 1
    replicas, past = old.replicas, old.past
    if differs_in_share(old.service, service) and old.state is not ServiceState.FAILED:
        # Only the share differs, so the replicas keep running and get the new share in place.
        replicas = tuple(replace(r, revision=revision) for r in replicas if r.revision == old.service.revision)
        replicas += tuple(r for r in old.replicas if r.revision != old.service.revision)
    if not old.is_removed:
        has_failed, was_ready = old.state is ServiceState.FAILED, old.proven == old.service
        left = Revision(
            service=old.service,
            state="failed" if has_failed else "retired" if was_ready else "cancelled",
            reason=old.reason if has_failed else f"revision {revision} replaced it",
            began_at_s=old.deployed_at_s,
            ended_at_s=now_s,
        )
        past = tuple(each for each in (*past, left) if each.service.revision != revision)[-MAX_PAST:]
    return replace(
        fresh,
        replicas=replicas,
        next_replica=old.next_replica,
        finished_service_s=old.finished_service_s,
        proven=old.proven,
        start_phases_s=old.start_phases_s,
        service=replace(service, revision=revision),
        past=() if old.is_removed else past,
    )
