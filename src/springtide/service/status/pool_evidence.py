"""How pools affect a workload: the reclaim that took its devices, loans, and when devices come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.decision import EMPTY, Schedule
from springtide.core.quantities import format_duration
from springtide.core.resources import Pool, admits
from springtide.core.status.pools import AffectedJob, Handover, NodeStatus, PoolsReport
from springtide.core.workload import JobState
from springtide.service.ports import ViewLike

MAX_NODES_NAMED = 3


def job_pool_evidence(
    record: JobRecord, report: PoolsReport, planned: Schedule, now_s: float, graces_s: Mapping[str, float] = EMPTY
) -> list[str]:
    """Which reclaim took a job's devices and when it may have them back; for a waiting job, what training has."""
    if not report.pools or record.lifecycle.state.is_terminal:
        return []
    sentences: list[str] = []
    last = last_reclaim_of(record.workload_id, report.handovers)
    if last is not None:
        handover, job = last
        sentences.append(_taken(handover, job, now_s))
        if record.world_size < job.num_workers_before:
            sentences.append(_due_back(record, handover, report, planned, now_s))
    if record.lifecycle.state is JobState.PENDING:
        sentences.append(_for_training(report))
        sentences += _under_way(report.handovers, now_s, graces_s)
    return sentences


def service_pool_evidence(
    record: ServiceRecord, report: PoolsReport, now_s: float, graces_s: Mapping[str, float] = EMPTY
) -> list[str]:
    """What a service is guaranteed, whose nodes its replicas are on, and which reclaims are under way for services."""
    if not report.pools or not record.is_served:
        return []
    sentences: list[str] = []
    num_ready = sum(replica.state == "READY" for replica in record.replicas)
    if record.min_replicas:
        short = record.min_replicas - num_ready
        state = (
            "kept" if short <= 0 else f"{short} short, {sum(r.state == 'STARTING' for r in record.replicas)} starting"
        )
        sentences.append(f"guaranteed at least {_count(record.min_replicas, 'replica')}: {state}")
    if record.replicas:
        sentences.append(_origins(record, report))
    sentences += _under_way(report.handovers, now_s, graces_s)
    return sentences


def last_reclaim_of(workload_id: str, handovers: Sequence[Handover]) -> tuple[Handover, AffectedJob] | None:
    """The newest reclaim that stopped, shrank or moved the job, and how; None if none is remembered."""
    for handover in reversed(handovers):
        for job in handover.affected:
            if job.workload_id == workload_id:
                return handover, job
    return None


def _taken(handover: Handover, job: AffectedJob, now_s: float) -> str:
    ago = format_duration(max(0.0, now_s - (handover.reclaim_at_s or handover.demanded_at_s)))
    did = f"took it from {job.num_workers_before} to {_count(job.num_workers_after, 'worker')}"
    if job.effect == "stopped":
        did = "stopped it after a checkpoint"
    elif job.effect == "moved":
        did = "moved it to other devices"
    elif job.effect == "forced":
        did += " by force, its grace was over"
    reason = f": {handover.reason}" if handover.reason else ""
    cost = f" (estimated at {handover.cost_s:.0f} device-seconds)" if handover.cost_s else ""
    return f"the reclaim of {handover.node_id} {ago} ago {did}{reason}{cost}"


def _due_back(record: JobRecord, handover: Handover, report: PoolsReport, planned: Schedule, now_s: float) -> str:
    more = next((run for run in planned if run.num_devices > record.world_size and run.end_s > now_s), None)
    if more is not None:
        when = "at once" if more.start_s <= now_s else f"in {format_duration(more.start_s - now_s)}"
        return f"it is planned to have {_count(more.num_devices, 'worker')} again {when}"
    if not report.tide.forecast:
        return "when services can spare devices again is not known: less than a day of their need was seen"
    num_open = sum(node.num_devices for node in report.nodes if _next_pool(node) != "training")
    num_enough = num_open - handover.num_devices
    calm = next((band for band in report.tide.forecast if band.upper <= num_enough), None)
    spared = _count(handover.num_devices, "device")
    if calm is None:
        ahead_s = report.tide.forecast[-1].at_s - now_s
        return f"by the forecast services cannot spare {spared} within the next {format_duration(ahead_s)}"
    if calm.at_s <= now_s:
        return f"by the forecast services can spare {spared} now"
    return f"by the forecast services can spare {spared} in {format_duration(calm.at_s - now_s)}"


def _for_training(report: PoolsReport) -> str:
    """How many devices jobs may use, how many of them are on loan, and how many are kept for services."""
    mine = [node for node in report.nodes if admits(_next_pool(node), is_job=True)]
    others = [node for node in report.nodes if not admits(_next_pool(node), is_job=True)]
    num_devices = sum(node.num_devices for node in mine)
    num_free = num_devices - sum(node.num_training + node.num_serving for node in mine)
    sentence = f"{num_free} of {_count(num_devices, 'device')} for training free"
    num_loaned = sum(node.is_loaned for node in mine)
    if num_loaned:
        sentence += f", {_count(num_loaned, 'server')} of them on loan from inference"
    if others:
        num_kept = sum(node.num_devices for node in others)
        sentence += f"; {_count(num_kept, 'device')} {'is' if num_kept == 1 else 'are'} kept for services"
        sentence += _need(report)
    return sentence


def _need(report: PoolsReport) -> str:
    """Why devices are kept for services: what they need now, and what they are forecast to need."""
    tide = report.tide
    if tide.level is None:
        return ""
    if not tide.forecast:
        return f", which need {tide.level} now"
    highest = max(tide.forecast, key=lambda band: band.upper)
    if highest.upper <= tide.level:
        return f", which need {tide.level} now and no more soon"
    when = format_duration(max(0.0, highest.at_s - report.now_s))
    return f", which need {tide.level} now and by the forecast up to {math.ceil(highest.upper)} in {when}"


def graces_by_node(view: ViewLike) -> dict[str, float]:
    """The longest grace among the jobs on each node that has any, in seconds."""
    longest: dict[str, float] = {}
    for record in view.jobs.values():
        for replica in record.replicas:
            node_id = replica.device_id.rpartition("/")[0]
            longest[node_id] = max(longest.get(node_id, 0.0), record.job.grace_s)
    return longest


def _under_way(handovers: Sequence[Handover], now_s: float, graces_s: Mapping[str, float]) -> list[str]:
    sentences = []
    for handover in handovers:
        if handover.state != "draining":
            continue
        since = format_duration(max(0.0, now_s - handover.demanded_at_s))
        what = "is being reclaimed for services" if handover.kind == "reclaim" else "is being loaned to training"
        if handover.kind == "reclaim" and handover.reclaim_at_s is None:
            what = "goes to services as soon as the jobs there have ended"
        reason = f": {handover.reason}" if handover.reason else ""
        grace_s = graces_s.get(handover.node_id)
        if handover.reclaim_at_s is not None and grace_s is not None:
            left_s = max(0.0, handover.reclaim_at_s + grace_s - now_s)
            reason += f"; workloads there have {format_duration(left_s)} left to leave"
        sentences.append(f"{handover.node_id} {what}, since {since}{reason}")
    return sentences


def _origins(record: ServiceRecord, report: PoolsReport) -> str:
    """The owners of the nodes on which the replicas are, as text."""
    by_id = {node.node_id: node for node in report.nodes}
    counts: dict[str, int] = {}
    for replica in record.replicas:
        node_id = replica.device_id.rpartition("/")[0]
        counts[node_id] = counts.get(node_id, 0) + 1
    parts = []
    for node_id, count in list(counts.items())[:MAX_NODES_NAMED]:
        node = by_id.get(node_id)
        owner = "" if node is None or not node.is_loaned else f", borrowed from {node.owner}"
        parts.append(f"{count} on {node_id}{owner}")
    rest = len(counts) - len(parts)
    return "replicas: " + "; ".join(parts) + (f"; and on {rest} more nodes" if rest > 0 else "")


def _next_pool(node: NodeStatus) -> Pool:
    """The pool that a node is labelled for, or will be after its drain."""
    return node.drain.pool if node.drain is not None else node.pool


def _count(number: int, singular: str) -> str:
    return f"{number} {singular if number == 1 else singular + 's'}"
