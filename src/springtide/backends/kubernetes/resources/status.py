"""The status of a workload's object, from what the platform knows. Pure: equal inputs give an equal status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from springtide.backends.kubernetes.pods.spec import label_value
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.backends.kubernetes.settings import WORKLOAD_LABEL
from springtide.control.quotes.budget import money
from springtide.core.decision import Schedule
from springtide.core.quantities import format_duration
from springtide.core.shares import Share
from springtide.core.status.platform import JobStatus, ReplicaStatus, ServiceStatus
from springtide.core.status.pods import PodStatus
from springtide.core.workload import JobState

Told = dict[str, Any]
MAX_PODS = 32
MAX_SCHEDULE = 16
MAX_REASON_CHARS = 1024
# A deadline nearer than this is shown by its time alone.
_SAME_DAY = timedelta(hours=20)
_RUNNING_REASONS = {
    JobState.PENDING: Reason.WAITING,
    JobState.STARTING: Reason.STARTING,
    JobState.RUNNING: Reason.TRAINING,
    JobState.PREEMPTING: Reason.PREEMPTING,
    JobState.PAUSED: Reason.PAUSED,
}
_END_REASONS = {
    JobState.SUCCEEDED: Reason.SUCCEEDED,
    JobState.FAILED: Reason.FAILED,
    JobState.CANCELLED: Reason.CANCELLED,
    JobState.REJECTED: Reason.REJECTED,
}


class Condition(NamedTuple):
    """One condition of an object, with its reason."""

    type: ConditionType
    is_true: bool
    reason: Reason
    message: str = ""


def stamp(unix_s: float) -> str:
    """A moment as objects have it: whole seconds, UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def selector_of(workload_id: str) -> str:
    """The label selector of a workload's pods."""
    return f"{WORKLOAD_LABEL}={label_value(workload_id)}"


def job_told(job: JobStatus, *, offset_s: float, planned: Schedule = (), pods: Iterable[PodStatus] = ()) -> Told:
    """A TrainingFunction's status, without its conditions. `offset_s` turns the platform's clock into Unix time."""
    state = JobState(job.state)
    told = {
        "workloadId": job.job_id,
        "state": job.state,
        "reason": job.reason[:MAX_REASON_CHARS],
        "replicas": sum(replica.state != "STOPPING" for replica in job.replicas),
        "selector": selector_of(job.job_id),
        "workers": f"{job.num_workers}/{_bounds(job.min_workers, job.max_workers)}",
        "progress": _progress(job),
        "step": job.step,
        "totalSteps": job.total_steps,
        "epoch": job.epoch,
        "loss": None if job.loss is None else f"{job.loss:.4g}",
        "eta": None if job.eta_s is None or state.is_terminal else _rounded(job.eta_s),
        "etaSeconds": None if job.eta_s is None or state.is_terminal else round(job.eta_s, 1),
        "deadline": _deadline(job, offset_s),
        "slack": None if job.slack_s is None else _rounded(job.slack_s),
        "slackSeconds": None if job.slack_s is None else round(job.slack_s, 1),
        "cost": None if job.cost_usd is None else money(job.cost_usd),
        "costUsd": None if job.cost_usd is None else round(job.cost_usd, 6),
        "samplesPerSecond": None if job.samples_per_s is None else round(job.samples_per_s, 1),
        "resizes": job.num_resizes,
        "restarts": job.num_restarts,
        "checkpointStep": job.checkpoint_step,
        "artifact": job.artifact_path or None,
        "submittedAt": stamp(job.submitted_at_s + offset_s),
        "startedAt": None if job.started_at_s is None else stamp(job.started_at_s + offset_s),
        "endedAt": None if job.ended_at_s is None else stamp(job.ended_at_s + offset_s),
        "alternatives": list(job.alternatives) or None,
        "pods": _pods(pods) or None,
        "plan": {
            **_plan(job.replicas, job.share, job.reason),
            "generation": job.generation,
            "globalBatch": job.global_batch_size,
            "expectedStart": None if job.planned_start_at_s is None else stamp(job.planned_start_at_s + offset_s),
            "expectedFinish": None if job.planned_finish_at_s is None else stamp(job.planned_finish_at_s + offset_s),
            "schedule": [
                {
                    "from": stamp(run.start_s + offset_s),
                    "until": stamp(run.end_s + offset_s),
                    "devices": run.num_devices,
                }
                for run in planned[:MAX_SCHEDULE]
            ]
            or None,
        },
    }
    return without_nothing(told)


def job_conditions(job: JobStatus, pods: Iterable[PodStatus] = ()) -> list[Condition]:
    """The conditions of a job that the platform accepted."""
    state = JobState(job.state)
    is_refused = state is JobState.REJECTED
    accepted = Condition(
        ConditionType.ACCEPTED,
        not is_refused,
        Reason.REJECTED if is_refused else Reason.SUBMITTED,
        _mended(job) if is_refused else f"it is {job.job_id} on the platform",
    )
    return [accepted, _promised(job), _running(job, list(pods)), _complete(job)]


def _promised(job: JobStatus) -> Condition:
    if job.deadline_at_s is None:
        return Condition(ConditionType.PROMISED, False, Reason.NO_DEADLINE, "it has no deadline")
    if job.is_promised:
        told = "its deadline is promised" + ("" if job.given_up_at_s is None else ", but its plan misses it now")
        return Condition(ConditionType.PROMISED, True, Reason.DEADLINE_PROMISED, told)
    state = JobState(job.state)
    if state.is_terminal:
        return Condition(ConditionType.PROMISED, False, Reason.ENDED, f"it has ended: {job.state}")
    why = job.promised_if.text() if job.promised_if is not None else job.reason or "its deadline is not promised"
    return Condition(ConditionType.PROMISED, False, Reason.NOT_PROMISED, why)


def _running(job: JobStatus, pods: list[PodStatus]) -> Condition:
    state = JobState(job.state)
    if state.is_terminal:
        return Condition(ConditionType.RUNNING, False, Reason.ENDED, f"it has ended: {job.state}")
    reason, message = _RUNNING_REASONS[state], job.reason
    if job.stalled_since_s is not None:
        reason = Reason.STALLED
    waiting = next((pod for pod in pods if pod.reason), None)
    if state is JobState.STARTING and waiting is not None:
        reason, message = Reason.PODS_WAITING, f"pod {waiting.pod}: {waiting.reason}"
    return Condition(ConditionType.RUNNING, state is JobState.RUNNING, reason, message)


def _complete(job: JobStatus) -> Condition:
    state = JobState(job.state)
    if not state.is_terminal:
        return Condition(ConditionType.COMPLETE, False, Reason.UNFINISHED, "")
    return Condition(ConditionType.COMPLETE, True, _END_REASONS[state], job.reason)


def _mended(job: JobStatus) -> str:
    offers = "; ".join(job.alternatives)
    return f"{job.reason}; it would be accepted with: {offers}" if offers else job.reason


def service_told(service: ServiceStatus, *, cost_usd: float, pods: Iterable[PodStatus] = ()) -> Told:
    """An InferenceFunction's status, without its conditions."""
    latency_s, objective_s = service.latency_p99_s, service.slo_s
    slack_s = None if latency_s is None or objective_s is None else objective_s - latency_s
    told = {
        "workloadId": service.service_id,
        "state": service.state,
        "reason": service.reason[:MAX_REASON_CHARS],
        "replicas": service.num_ready + service.num_starting,
        "readyReplicas": service.num_ready,
        "selector": selector_of(service.service_id),
        "workers": f"{service.num_ready}/{_bounds(service.min_replicas, service.max_replicas)}",
        "url": service.url,
        "revision": service.revision,
        "load": f"{service.arrivals_per_s:.3g}/s",
        "latency": None if latency_s is None else format_duration(latency_s),
        "objective": None if objective_s is None else format_duration(objective_s),
        "slack": None if slack_s is None else format_duration(slack_s),
        "cost": money(cost_usd),
        "costUsd": round(cost_usd, 6),
        "pods": _pods(pods) or None,
        "plan": {**_plan(service.replicas, service.share, service.reason), "wanted": service.wanted_replicas},
    }
    return without_nothing(told)


def service_conditions(service: ServiceStatus, pods: Iterable[PodStatus] = ()) -> list[Condition]:
    """The conditions of a service that the platform accepted."""
    accepted = Condition(ConditionType.ACCEPTED, True, Reason.SUBMITTED, f"it answers at {service.url}")
    waiting = next((pod for pod in pods if pod.reason), None)
    message = service.reason
    match service.state:
        case "READY":
            reason = Reason.REPLICAS_READY
            message = message or f"{service.num_ready} of {service.min_replicas}..{service.max_replicas} replicas"
        case "FAILED":
            reason = Reason.FAILED
        case "REMOVED":
            reason = Reason.REMOVED
        case "IDLE" if service.min_replicas == 0:
            reason, message = Reason.SLEEPING, message or "it sleeps until the first request"
        case "IDLE":
            reason = Reason.WAITING
        case _ if waiting is not None:
            reason, message = Reason.PODS_WAITING, f"pod {waiting.pod}: {waiting.reason}"
        case _:
            reason = Reason.STARTING
    return [accepted, Condition(ConditionType.READY, service.state == "READY", reason, message)]


def merged_conditions(
    before: Iterable[Mapping[str, Any]], conditions: Iterable[Condition], now_unix_s: float, generation: int
) -> list[Told]:
    """The conditions as objects have them: a transition's time changes only where the status of a condition does."""
    known = {str(old.get("type")): old for old in before}
    merged = []
    for condition in conditions:
        status = "True" if condition.is_true else "False"
        old = known.get(condition.type.value, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        told = {
            "type": condition.type.value,
            "status": status,
            "reason": condition.reason.value,
            "message": condition.message[:MAX_REASON_CHARS],
            "lastTransitionTime": since or stamp(now_unix_s),
            "observedGeneration": generation,
        }
        merged.append(without_nothing(told))
    return merged


def _bounds(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def _progress(job: JobStatus) -> str:
    if job.progress_fraction is None:
        return f"step {job.step}" if job.step else ""
    # Rounded down: what is not done is not told as done.
    return f"{int(job.progress_fraction * 100)}%"


def _rounded(seconds: float) -> str:
    """Time left, as coarse as is read: a status does not change for tenths of a second."""
    return format_duration(float(round(seconds)) if abs(seconds) >= 1 else seconds).replace(".0 s", " s")


def _deadline(job: JobStatus, offset_s: float) -> str | None:
    if job.deadline_at_s is None:
        return None
    moment = datetime.fromtimestamp(job.deadline_at_s + offset_s, UTC)
    is_near = timedelta(seconds=job.deadline_at_s - job.submitted_at_s) < _SAME_DAY
    return moment.strftime("%H:%M:%S UTC" if is_near else "%b %d %H:%M UTC")


def _plan(replicas: tuple[ReplicaStatus, ...], share: Share | None, reason: str) -> Told:
    held = [replica for replica in replicas if replica.state != "STOPPING"]
    held.sort(key=lambda replica: (replica.rank is None, replica.rank or 0, replica.replica_id))
    devices = [device_id for each in held for device_id in (each.device_id, *each.more_devices)]
    nodes = sorted({device.rpartition("/")[0] for device in devices})
    part = None if share is None else f"{share.request:g}..{share.limit:g}"
    return {
        "workers": len(held),
        "devices": devices,
        "nodes": nodes,
        "share": part,
        "reason": reason[:MAX_REASON_CHARS],
    }


def _pods(pods: Iterable[PodStatus]) -> list[Told]:
    return [
        without_nothing({"name": pod.pod, "phase": pod.phase, "reason": pod.reason})
        for pod in pods
        if pod.reason and pod.phase != "running"
    ][:MAX_PODS]


def without_nothing(told: Told) -> Told:
    """The same without what is not known. Empty texts go, too: in a JSON patch servers take them for null."""
    return {
        name: without_nothing(value) if isinstance(value, dict) else value
        for name, value in told.items()
        if value is not None and value != ""
    }
