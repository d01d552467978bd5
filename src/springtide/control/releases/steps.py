"""How a revision gets the requests of its service, and how one is given up. Each step is an event of the journal.

A release does not change `ServiceRecord.service`, so that whatever becomes of it the present revision goes on serving
by its own bounds. The new one starts beside it; once a replica of it is ready it takes over, or first gets a part of
the requests and is judged by its answers.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from springtide.control.records import ReplicaRecord, ReplicaState, ServiceRecord
from springtide.control.releases.parts import Release, Revision
from springtide.core.events import RevisionJudged, ServiceDeployed
from springtide.core.quantities import format_duration
from springtide.core.workload import InferenceService

# So many crashes at its start, and a revision is given up for the one that answers.
MAX_RELEASE_CRASHES = 3
# So many of the revisions that a service had are kept.
MAX_PAST = 10


def last_revision(record: ServiceRecord) -> int:
    """The highest number that a revision of the service has had."""
    release = 0 if record.release is None else record.release.revision
    refused = 0 if record.refused is None else record.refused.revision
    past = max([each.service.revision for each in record.past], default=0)
    return max(record.service.revision, release, refused, past)


def newest_of(record: ServiceRecord) -> InferenceService:
    """The revision that was asked for last and not given up: the one that is being released, else the present one."""
    return record.service if record.release is None else record.release.service


def version_of(record: ServiceRecord, revision: int) -> InferenceService:
    """The revision of that number, as far as the record has it; else the present one."""
    release = () if record.release is None else (record.release.service,)
    known = (record.service, *release, *(each.service for each in reversed(record.past)))
    return next((service for service in known if service.revision == revision), record.service)


def is_left(record: ServiceRecord, replica: ReplicaRecord) -> bool:
    """Whether the replica is of a revision that was given up, so that it gets no request any more."""
    last = next((each for each in reversed(record.past) if each.service.revision == replica.revision), None)
    if last is None or replica.revision == record.service.revision:
        return False
    return last.state != "retired" and (record.release is None or record.release.revision != replica.revision)


def num_new(record: ServiceRecord, num_needed: int) -> int:
    """How many replicas of the revision that is being released are wanted beside `num_needed` of the present one."""
    if record.release is None:
        return 0
    return max(1, math.ceil(record.release.terms.canary * num_needed))


def can_release(record: ServiceRecord, service: InferenceService) -> bool:
    """Whether `service` can start beside the present revision, which has been ready.

    Both are planned as replicas of one kind: on so many devices each, whole ones or shares.
    """
    old = record.service
    is_proven = record.proven is not None and record.proven.revision == old.revision
    is_alike = old.devices_each == service.devices_each and (old.share is None) == (service.share is None)
    return is_proven and is_alike


def with_release(record: ServiceRecord, event: ServiceDeployed, now_s: float) -> ServiceRecord:
    """The service when a revision of it is to be released; one that was under way is cancelled."""
    revision = event.service.revision if event.is_rollback else last_revision(record) + 1
    if record.release is not None:
        record = given_up(record, f"revision {revision} was deployed before it was ready", now_s, state="cancelled")
    past = tuple(each for each in record.past if each.service.revision != revision)
    release = Release(service=replace(event.service, revision=revision), began_at_s=now_s, terms=event.terms)
    return replace(record, release=release, past=past, refused=None, rolled_back="")


def given_up(
    record: ServiceRecord, reason: str, now_s: float, *, state: str = "failed", revision: Release | None = None
) -> ServiceRecord:
    """The service without the revision that was being released; the present one goes on."""
    release = revision or record.release
    assert release is not None
    left = Revision(
        service=release.service,
        state="failed" if state == "failed" else "cancelled",
        reason=reason,
        began_at_s=release.began_at_s,
        ended_at_s=now_s,
    )
    record = replace(record, release=None, past=(*record.past, left)[-MAX_PAST:])
    if state != "failed":
        return record
    told = f"revision {release.revision} was rolled back: {reason}"
    return replace(record, refused=release.service, rolled_back=told)


def taken_over(record: ServiceRecord, now_s: float) -> ServiceRecord:
    """The service when the revision that was being released gets its requests; its bounds are in force from now on."""
    release, old = record.release, record.service
    assert release is not None
    left = Revision(
        service=old,
        state="retired",
        reason=f"revision {release.revision} replaced it",
        began_at_s=record.deployed_at_s,
        ended_at_s=now_s,
    )
    return replace(
        record,
        service=release.service,
        proven=release.service,
        release=None,
        past=(*record.past, left)[-MAX_PAST:],
        deployed_at_s=release.began_at_s,
        min_replicas=release.service.min_replicas,
        max_replicas=release.service.max_replicas,
        crashes_at_s=(),
        starts_at_s=0.0,
        num_hangs=0,
        crash_reason="",
        wanted_replicas=None if release.service.capacity_per_s is None else record.wanted_replicas,
        rolled_back="",
    )


def with_ready_replica(record: ServiceRecord, revision: int, now_s: float) -> ServiceRecord:
    """The service when a replica of that revision is ready: a new one takes over, or begins its time as a canary."""
    release = record.release
    if release is None or release.revision != revision:
        return record
    release = replace(release, ready_at_s=now_s if release.ready_at_s is None else release.ready_at_s)
    record = replace(record, release=release)
    return record if release.terms.canary else taken_over(record, now_s)


def with_lost_start(
    record: ServiceRecord, lost: ReplicaRecord, reason: str, now_s: float, wait_s: float
) -> ServiceRecord:
    """The service after a fault of a replica of the revision that is being released."""
    release = record.release
    assert release is not None
    count = release.num_crashes + 1
    if lost.is_hung:
        return given_up(record, reason, now_s)
    if count >= MAX_RELEASE_CRASHES:
        return given_up(record, f"crashed {count} times: {reason}", now_s)
    release = replace(release, num_crashes=count, crash_reason=reason, starts_at_s=now_s + wait_s)
    return replace(record, release=release)


def judged(record: ServiceRecord, event: RevisionJudged, now_s: float) -> ServiceRecord | None:
    """The service after a verdict on the revision that is being released; None if that is another one by now."""
    release = record.release
    if release is None or release.revision != event.revision or record.is_removed:
        return None
    if not event.is_good:
        return given_up(record, event.reason, now_s)
    return None if release.ready_at_s is None else taken_over(record, now_s)


def release_text(record: ServiceRecord) -> str:
    """What becomes of the revision that is being released, for people; empty if there is none."""
    release = record.release
    if release is None:
        return ""
    new, old = f"revision {release.revision}", f"revision {record.service.revision}"
    if any(r.revision == release.revision and r.is_ready for r in record.replicas):
        watched = " and ".join(rule.text for rule in release.terms.watch)
        held = f", held to {watched}" if watched else ""
        until = f" for at most {format_duration(release.terms.watch_for_s)}" if release.terms.watch_for_s else ""
        return f"{new} gets {release.terms.canary:.0%} of the requests{held}{until}"
    starting = [r for r in record.replicas if r.revision == release.revision and r.state is ReplicaState.STARTING]
    if starting:
        held_up = next((f": {r.held_up_by}" for r in starting if r.held_up_by), "")
        return f"{old} answers until {new} is ready{held_up}"
    if release.num_crashes:
        again = f"crashed {release.num_crashes} of {MAX_RELEASE_CRASHES} times and starts again: {release.crash_reason}"
        return f"{old} answers until {new} is ready, which {again}"
    return f"{old} answers until {new} is ready, which waits for a device"
