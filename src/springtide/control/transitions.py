"""How each event changes the platform's state: one function per event. Nothing is decided here.

Live steps and the replay of the journal both use these functions, so they end in the same state. A stale event (of an
unknown workload, an older generation or a replica that is gone) changes nothing and is counted.
"""

from __future__ import annotations

from functools import singledispatch

from msgspec.structs import replace

from springtide.control.edits import (
    archive,
    charge_nothing,
    differs_in_share,
    edited,
    find,
    node_of,
    put,
    settled,
    with_hold,
    with_move,
    with_readiness,
    with_replica,
    with_service_state,
    without_replica,
)
from springtide.control.learnt import record_change_time, with_confirmation, with_measurement, with_report
from springtide.control.losses import (
    diverged,
    drop_replica,
    failed,
    is_expected_to_exit,
    is_outside_groups,
    lose_replica,
    stalled,
    start_timed_out,
)
from springtide.control.outcomes import record_outcome
from springtide.control.records import (
    JobRecord,
    Lifecycle,
    PlatformState,
    ReplicaState,
    ServiceRecord,
    ServiceState,
    StateReason,
)
from springtide.control.releases.deploys import replaced_at_once, unchanged
from springtide.control.releases.steps import can_release, judged, with_ready_replica, with_release
from springtide.core import events
from springtide.core.job_parts import JobBounds
from springtide.core.workload import Checkpoint, JobState, WorkloadId


@singledispatch
def apply_event(event: object, state: PlatformState, now_s: float) -> None:
    """Apply one event to `state`."""
    raise AssertionError(f"no transition for {type(event).__name__}")


# --- what users ask for ---------------------------------------------------------------------------------------------


@apply_event.register
def _(event: events.JobSubmitted, state: PlatformState, now_s: float) -> None:
    job = event.job
    if job.job_id in state.jobs:
        state.num_stale_events += 1
        return
    state.jobs[job.job_id] = JobRecord(
        job=job,
        lifecycle=Lifecycle(
            state=JobState.PENDING, reason=StateReason("waiting for the first decision"), submitted_at_s=now_s
        ),
        bounds=JobBounds(min_workers=job.min_workers, max_workers=job.max_workers),
    )


@apply_event.register
def _(event: events.ServiceDeployed, state: PlatformState, now_s: float) -> None:
    service = event.service
    old = state.services.get(service.service_id)
    is_live = old is not None and not old.is_removed and old.state is not ServiceState.FAILED
    if old is not None and is_live and not event.is_rollback:
        same = unchanged(old, service, now_s)
        if same is not None:
            state.num_stale_events += same is old
            state.services[service.service_id] = with_service_state(same)
            return
    refused = None if old is None or old.is_removed else old.refused
    if refused is not None and service.container and service == replace(refused, revision=service.revision):
        # A cluster's object still asks for the version that was rolled back.
        state.num_stale_events += 1
        return
    if old is not None and is_live and can_release(old, service) and not differs_in_share(old.service, service):
        state.services[service.service_id] = with_service_state(with_release(old, event, now_s))
        return
    state.services[service.service_id] = with_service_state(replaced_at_once(old, event, now_s))


@apply_event.register
def _(event: events.RevisionJudged, state: PlatformState, now_s: float) -> None:
    known = state.services.get(event.service_id)
    record = None if known is None else judged(known, event, now_s)
    if record is None:
        state.num_stale_events += 1
    else:
        state.services[event.service_id] = with_service_state(record)


@apply_event.register
def _(event: events.CancelRequested, state: PlatformState, now_s: float) -> None:
    job, service = state.jobs.get(event.workload_id), state.services.get(event.workload_id)
    if job is not None and job.lifecycle.outcome is None and not job.state.is_terminal:
        state.jobs[event.workload_id] = replace(
            job, lifecycle=replace(job.lifecycle, outcome=JobState.CANCELLED, outcome_reason="cancelled by its owner")
        )
    elif service is not None and not service.is_removed:
        removed = replace(service, is_removed=True, removed_at_s=now_s, release=None)
        state.services[event.workload_id] = with_service_state(removed)
    else:
        state.num_stale_events += 1


@apply_event.register
def _(event: events.PauseRequested, state: PlatformState, now_s: float) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or record.state.is_terminal:
        state.num_stale_events += 1
        return
    record = replace(record, bounds=replace(record.bounds, is_paused=True, pause_reason=event.reason))
    if event.reason:
        record = replace(record, lifecycle=replace(record.lifecycle, reason=StateReason(event.reason)))
    state.jobs[event.job_id] = settled(record)


@apply_event.register
def _(event: events.ResumeRequested, state: PlatformState, now_s: float) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or not record.bounds.is_paused:
        state.num_stale_events += 1
        return
    record = replace(record, bounds=replace(record.bounds, is_paused=False, pause_reason=""))
    if event.budget_usd is not None:
        goal = replace(record.job.goal, budget_usd=event.budget_usd)
        record = replace(record, job=replace(record.job, goal=goal))
    if record.state is JobState.PAUSED:
        reason = StateReason("resumed by its owner, waiting for devices")
        record = replace(record, lifecycle=replace(record.lifecycle, state=JobState.PENDING, reason=reason))
    state.jobs[event.job_id] = record


@apply_event.register
def _(event: events.JobEdited, state: PlatformState, now_s: float) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or record.state.is_terminal or record.lifecycle.outcome is not None:
        state.num_stale_events += 1
        return
    state.jobs[event.job_id] = edited(record, event, now_s)


@apply_event.register
def _(event: events.MoveRequested | events.MoveFailed, state: PlatformState, now_s: float) -> None:
    known = state.jobs.get(event.job_id)
    record = None if known is None else with_move(known, event)
    if record is None:
        state.num_stale_events += 1
    else:
        state.jobs[event.job_id] = settled(record)


@apply_event.register
def _(event: events.ScaleRequested, state: PlatformState, now_s: float) -> None:
    job, service = state.jobs.get(event.workload_id), state.services.get(event.workload_id)
    if job is not None and not job.job.elastic and job.replicas:
        # The number of its workers is fixed while it runs; the API refuses such a request and says what to do.
        state.num_stale_events += 1
    elif job is not None:
        most = min(event.maximum, job.job.num_virtual_shards) if job.job.elastic else event.maximum
        state.jobs[event.workload_id] = replace(
            job,
            bounds=replace(
                job.bounds,
                min_workers=min(event.minimum, most) if job.job.elastic else most,
                max_workers=most,
                limit_reason=event.reason if event.is_limit else "",
            ),
        )
    elif service is not None:
        state.services[event.workload_id] = replace(service, min_replicas=event.minimum, max_replicas=event.maximum)
    else:
        state.num_stale_events += 1


# --- machines and replicas ------------------------------------------------------------------------------------------


@apply_event.register
def _(event: events.NodeJoined, state: PlatformState, now_s: float) -> None:
    node, label = event.node, state.labels.get(event.node.node_id)
    if node.owner == "shared":
        # A shared node has no owner, so a label from before no longer applies.
        state.labels = {node_id: pool for node_id, pool in state.labels.items() if node_id != node.node_id}
    elif label is not None and label != node.pool:
        # The label that the platform gave the node stands: workloads may hold devices because of it.
        node = replace(node, pool=label, home=node.owner)
    state.nodes[node.node_id] = node


@apply_event.register
def _(event: events.PlatformStopping, state: PlatformState, now_s: float) -> None:
    state.is_stopping = True


@apply_event.register
def _(event: events.PlatformStarted, state: PlatformState, now_s: float) -> None:
    state.is_stopping = False


@apply_event.register
def _(event: events.ClockAnchored, state: PlatformState, now_s: float) -> None:
    charge_nothing(state, event.skipped_s, now_s)


@apply_event.register
def _(event: events.FenceFound, state: PlatformState, now_s: float) -> None:
    record = state.jobs.get(event.job_id)
    if record is not None and event.generation > record.group.generation:
        state.jobs[event.job_id] = replace(record, group=replace(record.group, generation=event.generation))


@apply_event.register
def _(event: events.DecisionsResumed, state: PlatformState, now_s: float) -> None:
    state.watched_from_s = now_s


@apply_event.register
def _(event: events.JobsArchived | events.ServicesArchived, state: PlatformState, now_s: float) -> None:
    archive(state, event)


@apply_event.register
def _(event: events.NodeLost, state: PlatformState, now_s: float) -> None:
    node = state.nodes.pop(event.node_id, None)
    if node is None:
        state.num_stale_events += 1
        return
    state.drains = {node_id: drain for node_id, drain in state.drains.items() if node_id != event.node_id}
    gone = {device.device_id for device in node.devices}
    for record in list(state.live_records()):
        for replica in record.replicas:
            if not gone.isdisjoint(replica.device_ids):
                if isinstance(record, ServiceRecord):
                    # A lost machine is not the service's fault: its replicas start elsewhere without a back-off.
                    drop_replica(state, record.workload_id, replica, now_s)
                else:
                    reason = f"node {event.node_id} was lost"
                    lose_replica(state, record.workload_id, replica.replica_id, reason, now_s)


@apply_event.register
def _(event: events.ReplicaReady, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, event.workload_id, event.replica_id)
    if record is None or replica is None or replica.state is not ReplicaState.STARTING:
        state.num_stale_events += 1
        return
    replica = with_readiness(replica, event, now_s)
    if isinstance(record, ServiceRecord):
        is_newest = replica.revision == record.service.revision
        record = replace(
            record,
            start_phases_s=event.phases_s or record.start_phases_s,
            num_hangs=0,
            crash_reason="",
            refusals=(),
            proven=record.service if is_newest else record.proven,
        )
        record = with_ready_replica(record, replica.revision, now_s)
    put(state, with_replica(record, replica))


@apply_event.register
def _(event: events.StartHeldUp, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, event.workload_id, event.replica_id)
    if record is None or replica is None or replica.state is not ReplicaState.STARTING or record.is_over:
        state.num_stale_events += 1
        return
    put(state, with_replica(record, with_hold(replica, event.reason, now_s, is_stuck=event.is_stuck)))


@apply_event.register
def _(event: events.StartTimedOut, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, event.workload_id, event.replica_id)
    if record is None or replica is None or replica.is_hung or record.is_over:
        state.num_stale_events += 1
        return
    put(state, start_timed_out(record, replica, event.timeout_s, now_s))


@apply_event.register
def _(event: events.ReplicaStopped, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, event.workload_id, event.replica_id)
    if record is None or replica is None:
        state.num_stale_events += 1
    elif replica.state is ReplicaState.STOPPING or is_expected_to_exit(record, replica):
        put(state, without_replica(record, replica, now_s))
    else:
        # It exited without a request to stop: for the rest of its group that is a loss.
        lose_replica(state, event.workload_id, event.replica_id, "a worker left without being asked", now_s)


@apply_event.register
def _(event: events.ReplicaLost, state: PlatformState, now_s: float) -> None:
    record, replica = find(state, event.workload_id, event.replica_id)
    if record is None or replica is None:
        state.num_stale_events += 1
        return
    if replica.state is ReplicaState.STOPPING and is_outside_groups(record, replica):
        put(state, without_replica(record, replica, now_s))
        return
    by = node_of(state, replica) if event.is_refused else None
    if isinstance(record, ServiceRecord) and not event.is_fault:
        drop_replica(state, event.workload_id, replica, now_s, event.reason, refused_by=by)
    else:
        reason = event.reason or "a worker was lost"
        lose_replica(state, event.workload_id, event.replica_id, reason, now_s, is_fault=event.is_fault, refused_by=by)


# --- what workers report --------------------------------------------------------------------------------------------


def _current(state: PlatformState, job_id: WorkloadId, generation: int) -> JobRecord | None:
    """The job's record if reports of this generation still count; else None, and the event is counted as stale."""
    record = state.jobs.get(job_id)
    if (
        record is None
        or record.state.is_terminal
        or not record.group.oldest_generation <= generation <= record.group.generation
    ):
        state.num_stale_events += 1
        return None
    return record


@apply_event.register
def _(event: events.ProgressReported, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is None or event.step < record.progress.step:
        return
    state.jobs[event.job_id] = diverged(with_report(record, event, state, now_s))


@apply_event.register
def _(event: events.JobStalled, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is not None and record.lifecycle.outcome is None:
        state.jobs[event.job_id] = settled(stalled(record, event, now_s))


@apply_event.register
def _(event: events.JobResized, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is None or event.generation != record.group.generation or record.group.is_confirmed:
        return
    record_change_time(record, state, now_s)
    state.jobs[event.job_id] = with_confirmation(record, event, now_s)


@apply_event.register
def _(event: events.GroupBroken, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    # During a switch the previous group still trains, and the switch needs its next step boundary. So a failure of the
    # previous group counts as well.
    if record is not None and (event.generation == record.group.generation or not record.group.is_confirmed):
        state.jobs[event.job_id] = replace(record, group=replace(record.group, is_broken=True))


@apply_event.register
def _(event: events.CheckpointCommitted, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is None:
        return
    known = record.saved.checkpoint
    if known is None or (event.step, event.generation) >= (known.step, known.generation):
        checkpoint = Checkpoint(
            generation=event.generation, step=event.step, path=event.path, num_bytes=event.num_bytes
        )
        progress = record.progress
        if record.state is not JobState.RUNNING:
            # A running job reports its steps with their time. That of this one is not known, and plans reckon from it.
            progress = replace(progress, step=max(progress.step, event.step))
        saved = replace(record.saved, checkpoint=checkpoint)
        state.jobs[event.job_id] = replace(record, saved=saved, progress=progress)


@apply_event.register
def _(event: events.JobFinished, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is not None and record.lifecycle.outcome is None:
        found = event.diverged_at_step or record.progress.diverged_at_step
        record = diverged(replace(record, progress=replace(record.progress, diverged_at_step=found)))
        reason = "the script ended" if record.job.has_own_batch else "the training function returned"
        total = record.progress.total_steps
        if total is not None and event.step < total and record.job.batch is None:
            reason += f" early, at step {event.step} of {total} ({100 * event.step // total} %)"
        else:
            record_outcome(record, state, now_s)
        if record.progress.is_diverged:
            reason += "; its last loss was not a finite number" + (f", the first at step {found}" if found else "")
        state.jobs[event.job_id] = replace(
            record,
            lifecycle=record.lifecycle
            if record.lifecycle.outcome is JobState.FAILED
            else replace(record.lifecycle, outcome=JobState.SUCCEEDED, outcome_reason=reason),
            progress=replace(record.progress, step=max(record.progress.step, event.step)),
            saved=replace(record.saved, artifact_path=event.artifact_path),
        )


@apply_event.register
def _(event: events.JobFailed, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is not None and record.lifecycle.outcome is None:
        state.jobs[event.job_id] = failed(record, event, now_s)


@apply_event.register
def _(event: events.UsageReported, state: PlatformState, now_s: float) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or event.bill.total_usd < record.spent.bill.total_usd:
        # A bill only grows, so a smaller one is an older report that arrived late.
        state.num_stale_events += 1
        return
    state.jobs[event.job_id] = replace(record, spent=replace(record.spent, usage=event.usage, bill=event.bill))


@apply_event.register
def _(event: events.FunctionsMeasured, state: PlatformState, now_s: float) -> None:
    record = _current(state, event.job_id, event.generation)
    if record is not None:
        state.jobs[event.job_id] = with_measurement(record, event)


@apply_event.register
def _(event: events.StreamObserved, state: PlatformState, now_s: float) -> None:
    record = state.jobs.get(event.job_id)
    known = None if record is None else record.progress.stream
    # A stream only grows, so a smaller count is an older report that arrived late.
    is_old = known is not None and event.stream.num_samples < known.num_samples
    if record is None or record.state.is_terminal or is_old:
        state.num_stale_events += 1
        return
    state.jobs[event.job_id] = replace(record, progress=replace(record.progress, stream=event.stream))


@apply_event.register
def _(event: events.LoadObserved, state: PlatformState, now_s: float) -> None:
    record = state.services.get(event.service_id)
    if record is None:
        state.num_stale_events += 1
        return
    state.services[event.service_id] = replace(
        record,
        arrivals_per_s=event.arrivals_per_s,
        in_flight=event.in_flight,
        queued=event.queued,
        idle_s=event.idle_s,
        load_at_s=now_s,
        latency_p50_s=event.latency_p50_s,
        latency_p99_s=event.latency_p99_s,
        wanted_replicas=event.wanted_replicas,
    )
