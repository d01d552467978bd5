"""From records to the status that users see, the structs of core.status. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import asdict, replace

from springtide import __version__
from springtide.control.records import JobRecord, Lifecycle, ReplicaRecord, ReplicaState, SavedState, ServiceRecord
from springtide.core.decision import EMPTY, Drain, PromiseCondition, Schedule
from springtide.core.job_parts import EXACT_COST
from springtide.core.reasons import exact_sentence
from springtide.core.resources import DeviceId, NodeId
from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.platform import (
    DeviceHolder,
    DeviceStatus,
    JobStatus,
    PlatformStatus,
    ReplicaStatus,
    ServiceStatus,
)
from springtide.core.status.search import SearchStatus
from springtide.core.workload import InferenceService, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.service.ports import ViewLike
from springtide.service.status.adaptation import adaptation_of, num_samples_left, progress_of
from springtide.service.status.environment_evidence import environment_fields, making_reason
from springtide.service.status.pools import node_statuses, pool_statuses
from springtide.service.status.revisions import revision_statuses
from springtide.service.status.search_reports import stream_status
from springtide.service.status.sharing import SharingReports

# For this long after its end the platform's status still shows the functions of a job.
_JUST_ENDED_S = 300.0
# Of the jobs that have left the platform's state, so many are in its status.
NUM_OLDER_SHOWN = 50


def job_status(
    record: JobRecord,
    now_s: float,
    *,
    planned: Schedule = (),
    usd_per_device_hour: float = 0.0,
    live: FunctionRunStatus | None = None,
    search: SearchStatus | None = None,
    enforced: str = "",
    condition: PromiseCondition | None = None,
) -> JobStatus:
    """Return what users are told about one job at this instant.

    `planned` is what the policy intends for it, `live` what its coordinator on functions reports, `search` what is
    known of the search for its workers and memory, `enforced` what enforces shares, `condition` what its deadline waits
    for, to be promised.
    """
    has_passed = record.job.goal.deadline_s is not None and record.job.goal.deadline_s < now_s
    return JobStatus(
        **_asked_fields(record.job),
        **_lifecycle_fields(record.lifecycle, told_reason(record)),
        **_group_fields(record),
        **_outlook_fields(record, planned, now_s),
        promised_if=None if has_passed or record.lifecycle.state.is_terminal else condition,
        **_progress_fields(record),
        **_speed_fields(record),
        **_change_fields(record),
        **_saved_fields(record.saved),
        **_spent_fields(record, live, now_s, usd_per_device_hour),
        search=search,
        stream=stream_status(record, live),
        enforced=enforced,
    )


def _asked_fields(job: TrainingJob) -> dict[str, Any]:
    """What its owner asked for."""
    return {
        "job_id": job.job_id,
        "name": job.name,
        "kind": "script" if job.entrypoint.kind == "script" else "function",
        "library": job.entrypoint.library,
        "num_epochs": job.num_epochs,
        "deadline_at_s": job.goal.deadline_s,
        "budget_usd": job.goal.budget_usd,
        "is_fastest": job.goal.is_fastest,
        "share": job.share,
        "devices_each": job.devices_each,
        "on": "" if job.menu is None else job.menu.service,
        "place_reason": job.place_reason,
        "batch_schedule": job.batch_schedule,
        "study": job.study,
        **environment_fields(job),
        "folder": "" if job.entrypoint.folder is None else job.entrypoint.folder.origin,
        "directory": working_directory(job),
    }


def working_directory(job: TrainingJob) -> str:
    """Where a job works in its copy of a folder, on this machine; empty without one, or where each worker has its own.

    So it is of pods and of functions.
    """
    folder, file = job.entrypoint.folder, PurePosixPath(job.entrypoint.source_path)
    if folder is None or not file.is_absolute() or job.is_on_functions:
        return ""
    return str(file.parents[folder.path.count("/")] / folder.directory)


def told_reason(record: JobRecord) -> str:
    """Why it is in its state: what its start waits for, or what the controller says, with why its size is fixed."""
    if making := making_reason(record):
        return making
    reason, fixed, limit = record.lifecycle.reason.text, record.bounds.fixed_reason, record.bounds.limit_reason
    if record.lifecycle.state.is_terminal:
        return reason
    limit = limit and f"at most {record.bounds.max_workers} of its workers for now: {limit}"
    return "; ".join(filter(None, (reason, fixed and f"it runs with one worker: {fixed}", limit)))


def _lifecycle_fields(lifecycle: Lifecycle, reason: str) -> dict[str, Any]:
    """Where it stands, since when and why."""
    change = lifecycle.reason.change
    return {
        "state": lifecycle.state.value,
        "reason": reason,
        "resize_reason": change.why if change is not None and change.code == "resize" else "",
        "submitted_at_s": lifecycle.submitted_at_s,
        "started_at_s": lifecycle.started_at_s,
        "ended_at_s": lifecycle.ended_at_s,
        "alternatives": lifecycle.alternatives,
    }


def _group_fields(record: JobRecord) -> dict[str, Any]:
    """Its workers, and within what bounds there may be others."""
    return {
        "min_workers": record.bounds.min_workers,
        "max_workers": record.bounds.max_workers,
        "num_workers": record.world_size,
        "global_batch_size": record.batch_size,
        "generation": record.group.generation,
        "replicas": _replicas(record.replicas, {name: rank for rank, name in enumerate(record.group.members)}),
    }


def _outlook_fields(record: JobRecord, planned: Schedule, now_s: float) -> dict[str, Any]:
    """What is promised, planned and predicted of its end."""
    eta_s, (starts_s, ends_s) = predict_eta_s(record), planned_moments(record, planned)
    is_over, given_up_at_s = record.lifecycle.state.is_terminal, record.lifecycle.given_up_at_s
    return {
        "eta_s": eta_s,
        "slack_s": _slack_s(record, eta_s, now_s),
        "is_promised": record.promise.admitted_at_s is not None and not is_over,
        "given_up_at_s": None if is_over else given_up_at_s,
        "planned_start_at_s": starts_s,
        "planned_finish_at_s": ends_s,
    }


def _progress_fields(record: JobRecord) -> dict[str, Any]:
    """How far it has come; in steps of the initial batch, too, where the batch may change."""
    progress, bounds = record.progress, record.job.batch
    done, total = progress_of(record)
    fields = {
        "step": progress.step,
        "total_steps": progress.total_steps,
        "progress_fraction": min(1.0, done / total) if total else None,
        "epoch": progress.epoch,
        "loss": None if progress.is_diverged else progress.loss,
        "is_diverged": progress.is_diverged,
        "stalled_since_s": progress.stalled_since_s if record.lifecycle.state is JobState.RUNNING else None,
        "metrics": dict(progress.metrics),
        "exact_passes": _exact_passes(record),
    }
    if bounds is None:
        return fields
    return fields | {
        "initial_batch_size": record.job.global_batch_size,
        "batch_bounds": (bounds.min_size, bounds.max_size),
        "progress": done,
        "total_progress": total,
    }


def _exact_passes(record: JobRecord) -> str:
    """How many passes a step of an exact job takes and why, and what that costs, as far as its workers have told."""
    if not record.job.exact:
        return ""
    progress = record.progress
    return exact_sentence(progress.exact_obstacle, record.job.num_virtual_shards, progress.metrics.get(EXACT_COST))


def _speed_fields(record: JobRecord) -> dict[str, Any]:
    """How fast its group is, and what a batch of this size is worth."""
    samples_per_s = record.learnt.samples_per_s if record.group.members else None
    known = adaptation_of(record.job, record.learnt.noise, record.batch_size, samples_per_s)
    return {"samples_per_s": samples_per_s, **asdict(known)}


def _change_fields(record: JobRecord) -> dict[str, Any]:
    """How often its group has changed, and what that took."""
    changes = record.changes
    return {
        "num_resizes": changes.num_resizes,
        "num_restarts": record.restarts.num_restarts,
        "num_preemptions": changes.num_preemptions,
        "last_pause_s": changes.last_pause_s,
        "resize_pause_s": dict(changes.pauses_s),
    }


def _saved_fields(saved: SavedState) -> dict[str, Any]:
    """What outlives its workers."""
    return {
        "checkpoint_step": saved.checkpoint.step if saved.checkpoint else None,
        "artifact_path": saved.artifact_path,
    }


def _spent_fields(
    record: JobRecord, live: FunctionRunStatus | None, now_s: float, usd_per_device_hour: float
) -> dict[str, Any]:
    """What it has taken so far; on functions by their bill."""
    functions, device_seconds = function_run(record, live), record.attained_service_s(now_s)
    machines_usd = device_seconds / 3600.0 * usd_per_device_hour
    return {
        "device_seconds": device_seconds,
        "cost_usd": machines_usd if functions is None else functions.bill.total_usd,
        "functions": functions,
    }


def function_run(record: JobRecord, live: FunctionRunStatus | None) -> FunctionRunStatus | None:
    """What a job on functions runs as and has cost: as its coordinator says, else as the journal knows it."""
    menu = record.job.menu
    if menu is None:
        return None
    if live is not None:
        # The journal's bill may be of an earlier moment, and survives a coordinator that has just come back.
        bill = live.bill if live.bill.total_usd >= record.spent.bill.total_usd else record.spent.bill
        return replace(live, bill=bill, budget_usd=record.job.goal.budget_usd)
    plan = record.runs_as.plan or menu.options[menu.recommended].plan
    option = next((option for option in menu.options if option.plan == plan), None)
    return FunctionRunStatus(
        service=menu.service,
        plan=plan,
        predicted_step_s=None if option is None else option.step_s,
        saved_step=0 if record.saved.checkpoint is None else record.saved.checkpoint.step,
        num_invocations=record.spent.usage.num_invocations,
        usage=record.spent.usage,
        bill=record.spent.bill,
        budget_usd=record.job.goal.budget_usd,
    )


def planned_moments(record: JobRecord, planned: Schedule) -> tuple[float | None, float | None]:
    """The planned start and end, None where there is none. A plan without a known length and speed is a guess."""
    is_known = (record.progress.total_steps or record.job.total_steps) and (
        record.learnt.throughput_samples_per_s or record.job.profile_steps_per_s
    )
    runs = [run for run in planned if run.num_devices] if is_known and not record.lifecycle.state.is_terminal else []
    starts_s = runs[0].start_s if runs and record.lifecycle.started_at_s is None else None
    return starts_s, runs[-1].end_s if runs else None


def predict_eta_s(record: JobRecord) -> float | None:
    """Return the time left at the present speed; None while the length or the speed is unknown, and of a stalled job.

    Right after a resize the speed is what was measured earlier with as many workers.
    """
    num_left = num_samples_left(record)
    is_stalled = record.progress.stalled_since_s is not None
    if record.lifecycle.state is not JobState.RUNNING or num_left is None or is_stalled:
        return None
    speed = record.learnt.samples_per_s or record.learnt.throughput_samples_per_s.get(record.world_size)
    if not speed:
        return None
    return num_left / speed


def service_status(
    record: ServiceRecord,
    now_s: float,
    base_url: str = "",
    *,
    enforced: str = "",
    first_answer_s: float | None = None,
    admission: AdmissionStatus | None = None,
    next_request: str = "",
) -> ServiceStatus:
    """Return what users are told about one service. `base_url` is the platform's own, without a final slash.

    `enforced` is what enforces its share of a device, `first_answer_s` the last part of its last start from nothing,
    `admission` what its gateway says of requests, `next_request` what the next one would wait for.
    """
    return ServiceStatus(
        **_deployed_fields(record.service, base_url),
        **_load_fields(record),
        **_replica_fields(record, first_answer_s),
        state=record.state.value,
        reason=making_reason(record) or record.reason,
        rolled_back=record.rolled_back,
        old_revision=record.old_revision,
        releasing=None if record.release is None else record.release.revision,
        revisions=revision_statuses(record),
        deployed_at_s=record.deployed_at_s,
        device_seconds=record.attained_service_s(now_s),
        enforced=enforced,
        admission=admission,
        next_request=next_request,
    )


def _deployed_fields(service: InferenceService, base_url: str) -> dict[str, Any]:
    """What its owner asked for, and where it answers."""
    return {
        "service_id": service.service_id,
        "name": service.name,
        "url": f"{base_url}/f/{service.name}",
        "revision": service.revision,
        "slo_s": service.slo_s,
        "share": service.share,
        "devices_each": service.devices_each,
        "capacity_per_s": service.capacity_per_s,
        **environment_fields(service),
        "folder": "" if service.entrypoint.folder is None else service.entrypoint.folder.origin,
    }


def _load_fields(record: ServiceRecord) -> dict[str, Any]:
    """What is asked of it, as its gateway last reported."""
    return {
        "arrivals_per_s": record.arrivals_per_s,
        "in_flight": record.in_flight,
        "queued": record.queued,
        "latency_p50_s": record.latency_p50_s,
        "latency_p99_s": record.latency_p99_s,
    }


def _replica_fields(record: ServiceRecord, first_answer_s: float | None) -> dict[str, Any]:
    """Its replicas, how many there may be and should be, and what the newest start was made of."""
    states = [replica.state for replica in record.replicas]
    # The last phase of a start is not shown without the others.
    answered = {} if first_answer_s is None or not record.start_phases_s else {"first_answer": first_answer_s}
    return {
        "min_replicas": record.min_replicas,
        "max_replicas": record.max_replicas,
        "wanted_replicas": record.wanted_replicas,
        "num_ready": states.count(ReplicaState.READY),
        "num_starting": states.count(ReplicaState.STARTING),
        "replicas": _replicas(record.replicas, {}),
        "cold_start_s": {**record.start_phases_s, **answered},
    }


def device_statuses(view: ViewLike) -> tuple[DeviceStatus, ...]:
    """Return every device of every living node, and the workloads that hold it."""
    holders: dict[DeviceId, list[tuple[JobRecord | ServiceRecord, ReplicaRecord]]] = {}
    records: list[JobRecord | ServiceRecord] = [*view.jobs.values(), *view.services.values()]
    for record in records:
        for replica in record.replicas:
            for device_id in replica.device_ids:
                holders.setdefault(device_id, []).append((record, replica))
    statuses = []
    for node in view.nodes:
        for device in node.devices:
            held = holders.get(device.device_id, [])
            holder = held[0] if held else None
            statuses.append(
                DeviceStatus(
                    device_id=device.device_id,
                    node_id=device.node_id,
                    kind=device.kind,
                    accelerator=device.accelerator,
                    workload_id=holder[0].workload_id if holder else None,
                    workload_name=name_of(holder[0]) if holder else None,
                    replica_id=holder[1].replica_id if holder else None,
                    holders=tuple(
                        DeviceHolder(
                            workload_id=record.workload_id,
                            workload_name=name_of(record),
                            replica_id=replica.replica_id,
                            share=replica.share,
                        )
                        for record, replica in held
                        if replica.share is not None
                    ),
                )
            )
    return tuple(statuses)


def platform_status(
    view: ViewLike,
    now_s: float,
    wall_clock_offset_s: float,
    base_url: str = "",
    usd_per_device_hour: float = 0.0,
    drains: Mapping[NodeId, Drain] = EMPTY,
    live_of: Callable[[WorkloadId], FunctionRunStatus | None] = lambda workload_id: None,
    search_of: Callable[[JobRecord, float], SearchStatus | None] = lambda record, now_s: None,
    shares: SharingReports | None = None,
) -> PlatformStatus:
    """Return the whole platform at this instant. Removed services are left out once nothing of them runs.

    `live_of` returns what a job's coordinator on functions reports, `search_of` the status of a job's search, and
    `shares` says what enforces shares.
    """
    nodes = node_statuses(view, drains)
    return PlatformStatus(
        version=__version__,
        policy=view.policy,
        seq=view.seq,
        now_s=now_s,
        wall_clock_offset_s=wall_clock_offset_s,
        devices=device_statuses(view),
        jobs=tuple(
            job_status(
                record,
                now_s,
                planned=view.future.get(record.workload_id, ()),
                condition=view.conditions.get(record.workload_id),
                usd_per_device_hour=usd_per_device_hour,
                # Long-ended jobs show their functions only where one job is asked for.
                live=live_of(record.workload_id) if record.replicas or _has_just_ended(record, now_s) else None,
                search=None if _has_long_ended(record, now_s) else search_of(record, now_s),
                enforced="" if shares is None else shares.enforced(record.job.share),
            )
            for record in listed_jobs(view, NUM_OLDER_SHOWN)
        ),
        num_older=max(0, view.ended.count() - NUM_OLDER_SHOWN),
        services=tuple(
            service_status(
                record,
                now_s,
                base_url,
                enforced="" if shares is None else shares.enforced(record.service.share),
                first_answer_s=None if shares is None else shares.first_answer_s(record.service.name),
                admission=None if shares is None else shares.admission(record),
            )
            for record in listed_services(view)
        ),
        pools=pool_statuses(nodes),
        nodes=nodes,
    )


def _has_just_ended(record: JobRecord, now_s: float) -> bool:
    has_ended = record.job.is_on_functions and record.lifecycle.ended_at_s is not None
    return has_ended and now_s - (record.lifecycle.ended_at_s or 0.0) < _JUST_ENDED_S


def _has_long_ended(record: JobRecord, now_s: float) -> bool:
    return record.lifecycle.state.is_terminal and not _has_just_ended(record, now_s)


def listed_jobs(view: ViewLike, num_older: int) -> list[JobRecord]:
    """Return the jobs of the state and, before them, so many of those that ended longer ago."""
    older = [record for record in view.ended.newest(num_older) if record.workload_id not in view.jobs]
    return [*reversed(older), *view.jobs.values()]


def listed_services(view: ViewLike) -> list[ServiceRecord]:
    """Return the services that are deployed, or removed and still draining."""
    return [record for record in view.services.values() if record.replicas or not record.is_removed]


def name_of(record: JobRecord | ServiceRecord) -> str:
    return record.job.name if isinstance(record, JobRecord) else record.service.name


def _slack_s(record: JobRecord, eta_s: float | None, now_s: float) -> float | None:
    """What is left of the deadline at the (predicted) end; None where there is no deadline or no prediction."""
    deadline_s = record.job.goal.deadline_s
    if deadline_s is None:
        return None
    if record.lifecycle.state is JobState.SUCCEEDED and record.lifecycle.ended_at_s is not None:
        return deadline_s - record.lifecycle.ended_at_s
    return None if eta_s is None else deadline_s - now_s - eta_s


def _replicas(replicas: tuple[ReplicaRecord, ...], ranks: Mapping[ReplicaId, int]) -> tuple[ReplicaStatus, ...]:
    return tuple(
        ReplicaStatus(
            replica_id=replica.replica_id,
            device_id=replica.device_id,
            more_devices=replica.more_devices,
            state=replica.state.value,
            rank=ranks.get(replica.replica_id),
            started_at_s=replica.started_at_s,
            share=replica.share,
            phases_s=dict(replica.phases_s),
            device_seen=replica.device_seen,
        )
        for replica in replicas
    )
