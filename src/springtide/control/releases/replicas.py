"""Which replicas of a service start and stop, and of which revision: the part of `reconcile` for services."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.control.edits import END_GRACE_S, HUNG, stop_of
from springtide.control.records import ReplicaState, ServiceRecord
from springtide.control.releases.steps import is_left, num_new
from springtide.control.snapshot_views import present_replicas
from springtide.core.actions import Action, StartReplica
from springtide.core.decision import PoolAllocation
from springtide.core.resources import DeviceId
from springtide.core.workload import InferenceService, ReplicaId


def service_actions(
    record: ServiceRecord, wanted: PoolAllocation, free: Sequence[DeviceId], why: str, now_s: float
) -> list[Action]:
    """The next step of a service towards the devices that the plan gives it, on `free` of which a replica may start."""
    service, release = record.service, record.release
    actions: list[Action] = []
    kept = set(wanted.device_ids)
    # What starts beside the present revision and its predecessors is counted apart.
    new = [] if release is None else [r for r in record.replicas if r.revision == release.revision]
    num_present = len(kept) - sum(r.device_id in kept for r in new)
    num_current = sum(r.is_ready and r.revision == service.revision and r.device_id in kept for r in record.replicas)
    # One device of the plan is for the next replica of the present revision, all others for those that answer.
    num_old = num_present - 1 - num_current
    for replica in record.replicas:
        is_outdated = replica.revision != service.revision and replica not in new
        if replica.state is ReplicaState.STOPPING:
            continue
        if replica.is_hung:
            actions.append(stop_of(record, replica, END_GRACE_S, HUNG))
        elif is_left(record, replica):
            actions.append(stop_of(record, replica, service.grace_s, f"revision {replica.revision} was given up"))
        elif is_outdated and replica.is_ready and replica.device_id in kept and num_old > 0:
            num_old -= 1
        elif replica.device_id not in kept or is_outdated:
            reason = _replaced(num_current) if is_outdated and kept else (why or "the service needs fewer replicas")
            actions.append(stop_of(record, replica, service.grace_s, reason))
    if record.is_removed:
        return actions
    if release is not None and release.terms.stop_first and not actions:
        actions += _make_room(record, free, kept)
    started = _revisions_to_start(record, len(free), len(kept), now_s)
    for number, (device_id, version) in enumerate(zip(free, started, strict=False), start=record.next_replica):
        actions.append(
            StartReplica(
                workload=version,
                replica_id=ReplicaId(f"{service.service_id}.{number}"),
                device_id=device_id,
                generation=version.revision,
                share=wanted.share,
                cause="plan",
                reason=_started(record, version) or why or "the service needs a replica",
            )
        )
    return actions


def _revisions_to_start(record: ServiceRecord, num_free: int, num_planned: int, now_s: float) -> list[InferenceService]:
    """Of which revision each replica is that may start now, on so many free devices of those that are planned."""
    service, release = record.service, record.release
    may_start = now_s >= record.starts_at_s
    if release is None:
        return [service] * num_free if may_start else []
    living = [r for r in record.replicas if r.state is not ReplicaState.STOPPING]
    num_new_living = sum(r.revision == release.revision for r in living)
    num_needed = min(present_replicas(record, now_s), num_planned - int(release.terms.stop_first))
    num_more = max(0, num_new(record, num_needed) - num_new_living) if now_s >= release.starts_at_s else 0
    # The present revision comes first: it answers.
    num_present = min(num_free, max(0, num_needed - (len(living) - num_new_living)))
    num_more = min(num_more, num_free - num_present)
    return [service] * (num_present if may_start else 0) + [release.service] * num_more


def _make_room(record: ServiceRecord, free: Sequence[DeviceId], kept: set[DeviceId]) -> list[Action]:
    """Stop one replica of the present revision where the plan has no further device for the one that is released."""
    release = record.release
    assert release is not None
    is_there = any(r.revision == release.revision or r.state is ReplicaState.STOPPING for r in record.replicas)
    held = [r for r in record.replicas if r.device_id in kept]
    if free or is_there or not held or len(held) < len(kept):
        return []
    reason = f"its owner lets it stop first: there is no further device on which revision {release.revision} could load"
    return [stop_of(record, held[-1], record.service.grace_s, reason)]


def _started(record: ServiceRecord, version: InferenceService) -> str:
    """Why a replica starts while revisions change, which policies see as load; empty where they do not change."""
    if version is not record.service:
        return f"revision {version.revision} starts beside revision {record.service.revision}"
    if any(replica.revision != version.revision for replica in record.replicas) and record.release is None:
        return f"revision {version.revision} replaces an older one"
    return ""


def _replaced(num_current: int) -> str:
    """Why a replica of an older revision stops."""
    if num_current:
        return "a newer revision replaces it"
    return "a newer revision replaces it, and there is no further device on which that could load meanwhile"
