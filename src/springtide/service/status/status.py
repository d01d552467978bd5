"""What is true, as users are told it: records into the structs of core.status. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from springtide import __version__
from springtide.control.records import JobRecord, ReplicaRecord, ServiceRecord
from springtide.core.decision import EMPTY, Drain, Schedule
from springtide.core.resources import DeviceId, NodeId
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
from springtide.core.workload import JobState, ReplicaId, WorkloadId
from springtide.service.ports import ViewLike
from springtide.service.status.adaptation import adaptation_of, num_samples_left, progress_of
from springtide.service.status.pools import node_statuses, pool_statuses
from springtide.service.status.search_reports import stream_status
from springtide.service.status.sharing import SharingReports

# So long the places of a job on functions are told with all others after its end.
_JUST_ENDED_S = 300.0


def job_status(
    record: JobRecord,
    now_s: float,
    *,
    planned: Schedule = (),
    usd_per_device_hour: float = 0.0,
    live: FunctionRunStatus | None = None,
    search: SearchStatus | None = None,
    enforced: str = "",
) -> JobStatus:
    """Return what users are told about one job at this instant.

    `planned` is what the policy has in mind for it, `live` what its coordinator on functions says, `search` what is
    known of the search for its workers and memory, `enforced` what holds people to shares.
    """
    job = record.job
    functions = function_run(record, live)
    done, total = progress_of(record)
    known = adaptation_of(
        job, record.learnt.noise, record.batch_size, record.learnt.samples_per_s if record.group.members else None
    )
    eta_s = predict_eta_s(record)
    starts_s, ends_s = planned_moments(record, planned)
    return JobStatus(
        job_id=record.workload_id,
        name=job.name,
        kind="script" if job.entrypoint.kind == "script" else "function",
        state=record.lifecycle.state.value,
        reason=record.lifecycle.reason.text,
        submitted_at_s=record.lifecycle.submitted_at_s,
        started_at_s=record.lifecycle.started_at_s,
        ended_at_s=record.lifecycle.ended_at_s,
        deadline_at_s=job.goal.deadline_s,
        budget_usd=job.goal.budget_usd,
        min_workers=record.bounds.min_workers,
        max_workers=record.bounds.max_workers,
        num_workers=record.world_size,
        global_batch_size=record.batch_size,
        generation=record.group.generation,
        step=record.progress.step,
        total_steps=record.progress.total_steps,
        progress_fraction=min(1.0, done / total) if total else None,
        epoch=record.progress.epoch,
        num_epochs=job.num_epochs,
        loss=record.progress.loss,
        metrics=dict(record.progress.metrics),
        samples_per_s=record.learnt.samples_per_s if record.group.members else None,
        eta_s=eta_s,
        slack_s=_slack_s(record, eta_s, now_s),
        **_changes(record),
        checkpoint_step=record.saved.checkpoint.step if record.saved.checkpoint else None,
        artifact_path=record.saved.artifact_path,
        device_seconds=record.attained_service_s(now_s),
        alternatives=record.lifecycle.alternatives,
        replicas=_replicas(record.replicas, {replica_id: rank for rank, replica_id in enumerate(record.group.members)}),
        is_promised=record.promise.admitted_at_s is not None and not record.lifecycle.state.is_terminal,
        planned_start_at_s=starts_s,
        planned_finish_at_s=ends_s,
        cost_usd=_machines_usd(record, now_s, usd_per_device_hour) if functions is None else functions.bill.total_usd,
        **(_batch(record) if job.batch is not None else {}),
        noise_scale=known.noise_scale,
        efficiency_fraction=known.efficiency_fraction,
        goodput_samples_per_s=known.goodput_samples_per_s,
        learning_rate_factor=known.learning_rate_factor,
        **_place(record, live, enforced),
        functions=functions,
        search=search,
    )


def _changes(record: JobRecord) -> dict[str, Any]:
    """How the job's group has changed, and why the last time."""
    changes, change = record.changes, record.lifecycle.reason.change
    return {
        "num_resizes": changes.num_resizes,
        "num_restarts": record.restarts.num_restarts,
        "num_preemptions": changes.num_preemptions,
        "last_pause_s": changes.last_pause_s,
        "resize_pause_s": dict(changes.pauses_s),
        "resize_reason": change.why if change is not None and change.code == "resize" else "",
    }


def _place(record: JobRecord, live: FunctionRunStatus | None, enforced: str) -> dict[str, Any]:
    """The fields of a job that only jobs on functions, or only jobs on shares, have."""
    job = record.job
    return {
        "share": job.share,
        "enforced": enforced,
        "on": "" if job.menu is None else job.menu.service,
        "stream": stream_status(record, live),
        "batch_schedule": job.batch_schedule,
        "study": job.study,
        "is_fastest": job.goal.is_fastest,
    }


def _machines_usd(record: JobRecord, now_s: float, usd_per_device_hour: float) -> float:
    return record.attained_service_s(now_s) / 3600.0 * usd_per_device_hour


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


def _batch(record: JobRecord) -> dict[str, Any]:
    done, total = progress_of(record)
    assert record.job.batch is not None
    return {
        "initial_batch_size": record.job.global_batch_size,
        "batch_bounds": (record.job.batch.min_size, record.job.batch.max_size),
        "progress": done,
        "total_progress": total,
    }


def planned_moments(record: JobRecord, planned: Schedule) -> tuple[float | None, float | None]:
    """When it starts and ends as planned. A plan for a job of which nothing is known is made on a guess."""
    is_known = (record.progress.total_steps or record.job.total_steps) and (
        record.learnt.throughput_samples_per_s or record.job.profile_steps_per_s
    )
    runs = [run for run in planned if run.num_devices] if is_known and not record.lifecycle.state.is_terminal else []
    starts_s = runs[0].start_s if runs and record.lifecycle.started_at_s is None else None
    return starts_s, runs[-1].end_s if runs else None


def predict_eta_s(record: JobRecord) -> float | None:
    """Return the time left at the present speed; None while the length or the speed at this world size is unknown.

    Right after a resize the speed is what was measured earlier with as many workers.
    """
    num_left = num_samples_left(record)
    if record.lifecycle.state is not JobState.RUNNING or num_left is None:
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
) -> ServiceStatus:
    """Return what users are told about one service. `base_url` is the platform's own, without a final slash.

    `enforced` is what holds it to its share of a device, `first_answer_s` the last part of its last start from nothing.
    """
    # The last phase of a start is not shown without the others.
    answered = {} if first_answer_s is None or not record.start_phases_s else {"first_answer": first_answer_s}
    states = [replica.state.value for replica in record.replicas]
    return ServiceStatus(
        service_id=record.workload_id,
        name=record.service.name,
        state=record.state.value,
        reason=record.reason,
        deployed_at_s=record.deployed_at_s,
        revision=record.service.revision,
        min_replicas=record.min_replicas,
        max_replicas=record.max_replicas,
        num_ready=states.count("READY"),
        num_starting=states.count("STARTING"),
        slo_s=record.service.slo_s,
        arrivals_per_s=record.arrivals_per_s,
        in_flight=record.in_flight,
        queued=record.queued,
        latency_p50_s=record.latency_p50_s,
        latency_p99_s=record.latency_p99_s,
        device_seconds=record.attained_service_s(now_s),
        url=f"{base_url}/f/{record.service.name}",
        replicas=_replicas(record.replicas, {}),
        share=record.service.share,
        enforced=enforced,
        capacity_per_s=record.service.capacity_per_s,
        wanted_replicas=record.wanted_replicas,
        cold_start_s={**record.start_phases_s, **answered},
    )


def device_statuses(view: ViewLike) -> tuple[DeviceStatus, ...]:
    """Return every device of every living node, and the workloads that hold it."""
    holders: dict[DeviceId, list[tuple[JobRecord | ServiceRecord, ReplicaRecord]]] = {}
    records: list[JobRecord | ServiceRecord] = [*view.jobs.values(), *view.services.values()]
    for record in records:
        for replica in record.replicas:
            holders.setdefault(replica.device_id, []).append((record, replica))
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

    `live_of` says what a job's coordinator on functions says, `search_of` what there is to say of a job's search,
    and `shares` what holds people to their shares.
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
                usd_per_device_hour=usd_per_device_hour,
                # Long-ended jobs show their functions only where one job is asked for.
                live=live_of(record.workload_id) if record.replicas or _has_just_ended(record, now_s) else None,
                search=None if _is_past(record, now_s) else search_of(record, now_s),
                enforced="" if shares is None else shares.enforced(record.job.share),
            )
            for record in view.jobs.values()
        ),
        services=tuple(
            service_status(
                record,
                now_s,
                base_url,
                enforced="" if shares is None else shares.enforced(record.service.share),
                first_answer_s=None if shares is None else shares.first_answer_s(record.service.name),
            )
            for record in listed_services(view)
        ),
        pools=pool_statuses(nodes),
        nodes=nodes,
    )


def _has_just_ended(record: JobRecord, now_s: float) -> bool:
    is_mine = record.job.is_on_functions and record.lifecycle.ended_at_s is not None
    return is_mine and now_s - (record.lifecycle.ended_at_s or 0.0) < _JUST_ENDED_S


def _is_past(record: JobRecord, now_s: float) -> bool:
    return record.lifecycle.state.is_terminal and not _has_just_ended(record, now_s)


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
            state=replica.state.value,
            rank=ranks.get(replica.replica_id),
            started_at_s=replica.started_at_s,
            share=replica.share,
            phases_s=dict(replica.phases_s),
        )
        for replica in replicas
    )
