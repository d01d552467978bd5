"""What the next request to a service without a replica would wait for: the policy is asked, and nothing is changed."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.control.records import JobRecord, ServiceState, WorkloadRecord
from springtide.control.snapshot_views import view_service
from springtide.core.quantities import format_duration
from springtide.service.ports import PlatformLike


def next_request_waits(record: WorkloadRecord, platform: PlatformLike) -> str:
    """Why a request at this instant would wait, and until when; empty for a job, and where a replica is there or would
    start at once.

    What the policy takes from others for the replica, by its own rules, counts as had.
    """
    if isinstance(record, JobRecord):
        return ""
    if record.state is not ServiceState.IDLE or record.replicas or record.queued or record.max_replicas < 1:
        return ""
    snapshot = platform.snapshot()
    view = view_service(record, snapshot.now_s)
    wanted = None if view.wanted_replicas is None else max(1, view.wanted_replicas)
    asked = replace(view, queued=1, idle_s=0.0, wanted_replicas=wanted)
    others = tuple(each for each in snapshot.services if each.service.service_id != record.workload_id)
    plan = platform.make_policy().decide(replace(snapshot, services=(*others, asked)))
    why = plan.no_room.get(record.workload_id) or plan.reasons.get(record.workload_id, "")
    if record.workload_id in plan.allocations or not why:
        return ""
    told = f"if a request came now: {why}"
    claim = plan.claims.get(record.workload_id)
    if claim is not None and claim.at_s is not None:
        told += f"; it can have one in {format_duration(max(1.0, claim.at_s - snapshot.now_s))} if nothing else changes"
    return told
