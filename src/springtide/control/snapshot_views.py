"""The part of a Snapshot that is derived from the records, updated only for the records that have changed."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.control.parts import bounds_in_devices, job_in_devices, learnt_in_devices
from springtide.control.records import JobRecord, PlatformState, ReplicaState, ServiceRecord
from springtide.control.releases.steps import num_new
from springtide.core.decision import Allocation, FunctionAllocation, JobView, PoolAllocation, ServiceView
from springtide.core.workload import WorkloadId
from springtide.scheduling.replicas import wanted_replicas


class SnapshotViews:
    """The views of all jobs that want to run and the allocations of all workloads that hold devices, by arrival.

    The caller calls `update` for every workload whose record has changed; all other views stay the same objects.
    """

    def __init__(self) -> None:
        self._views: dict[WorkloadId, JobView] = {}
        self._held: dict[WorkloadId, Allocation] = {}
        self._jobs: tuple[JobView, ...] | None = ()
        # The copy of `_held` that snapshots share; None: out of date.
        self._allocations: dict[WorkloadId, Allocation] | None = None
        self._needs_order = False

    def update(self, state: PlatformState, workload_id: WorkloadId) -> None:
        """Derive the view and the allocation of one workload from its record again."""
        job = state.jobs.get(workload_id)
        record = job if job is not None else state.services[workload_id]
        self._allocations = None
        if not record.replicas:
            self._held.pop(workload_id, None)
        else:
            self._needs_order = self._needs_order or workload_id not in self._held
            self._held[workload_id] = _allocation(record)
        if job is not None:
            self._update_job(state, job)

    def _update_job(self, state: PlatformState, record: JobRecord) -> None:
        job_id, lifecycle = record.job.job_id, record.lifecycle
        wants_to_run = lifecycle.outcome is None and not record.bounds.is_paused and not lifecycle.state.is_terminal
        # On its way to functions it wants neither its machines nor, yet, functions.
        if not wants_to_run or (record.move is not None and record.is_moving):
            if self._views.pop(job_id, None) is not None:
                self._jobs = None
            return
        if job_id not in self._views and self._views:
            # A job that was paused or had ended comes back to its place by arrival.
            self._needs_order = self._needs_order or state.place_of(job_id) < state.place_of(
                next(reversed(self._views))
            )
        self._views[job_id] = view_job(record, self._views.get(job_id))
        self._jobs = None

    def jobs(self, state: PlatformState) -> tuple[JobView, ...]:
        """The unfinished jobs that want to run."""
        self._restore_order(state)
        if self._jobs is None:
            self._jobs = tuple(self._views.values())
        return self._jobs

    def allocations(self, state: PlatformState) -> dict[WorkloadId, Allocation]:
        """What each workload holds, ordered by rank."""
        self._restore_order(state)
        if self._allocations is None:
            self._allocations = dict(self._held)
        return self._allocations

    def _restore_order(self, state: PlatformState) -> None:
        if self._needs_order:
            self._needs_order, self._allocations = False, None
            self._held = dict(sorted(self._held.items(), key=lambda item: state.place_of(item[0])))
            self._views = dict(sorted(self._views.items(), key=lambda item: state.place_of(item[0])))


def view_job(record: JobRecord, before: JobView | None = None) -> JobView:
    """A job as policies see it: in devices. Parts of the view `before` that are unchanged stay the same objects."""
    progress, job = record.progress, record.job
    bounds, learnt = record.bounds, record.learnt
    if job.devices_each > 1:
        bounds, learnt = bounds_in_devices(bounds, job.devices_each), learnt_in_devices(learnt, job.devices_each)
        job = job_in_devices(job)
        if before is not None:
            job = before.job if before.job == job else job
            bounds = before.bounds if before.bounds == bounds else bounds
            learnt = before.learnt if before.learnt == learnt else learnt
    total_steps = progress.total_steps if progress.total_steps is not None else job.total_steps
    total_equivalent_steps = progress.total_equivalent_steps
    if total_equivalent_steps is None:
        # With a variable batch, the steps that workers report have another size than the declared ones.
        length = total_steps if job.batch is None else job.total_steps
        total_equivalent_steps = None if length is None else float(length)
    return JobView(
        job=job,
        state=record.lifecycle.state,
        submitted_at_s=record.lifecycle.submitted_at_s,
        started_at_s=record.lifecycle.started_at_s,
        bounds=bounds,
        progress=progress,
        promise=record.promise,
        learnt=learnt,
        restarts=record.restarts,
        changes=record.changes,
        checkpoint=record.saved.checkpoint,
        total_steps=total_steps,
        equivalent_steps=progress.equivalent_steps if progress.equivalent_steps is not None else float(progress.step),
        total_equivalent_steps=total_equivalent_steps,
        global_batch_size=record.batch_size,
        service_offset_s=record.spent.finished_service_s
        - sum([each.started_at_s * (1 + len(each.more_devices)) for each in record.replicas]),
        num_replicas=len(record.replicas) + sum([len(each.more_devices) for each in record.replicas]),
        spent_usd=record.spent.bill.total_usd,
    )


def _allocation(record: JobRecord | ServiceRecord) -> Allocation:
    order = record.group.members if isinstance(record, JobRecord) else ()
    rank_of = {replica_id: rank for rank, replica_id in enumerate(order)}
    # While a service has two revisions: what is ready of the present one, then of others, then the rest. Policies that
    # shrink a workload take from the end.
    is_mixed = isinstance(record, ServiceRecord) and (record.old_revision is not None or record.release is not None)
    newest = record.service.revision if isinstance(record, ServiceRecord) and is_mixed else None
    # Members of the group by rank, then replicas that warm up, then replicas that are stopping.
    ranked = sorted(
        record.replicas,
        key=lambda r: (
            r.state is ReplicaState.STOPPING,
            newest is not None and r.state is not ReplicaState.READY,
            newest is not None and r.revision != newest,
            rank_of.get(r.replica_id, len(rank_of)),
        ),
    )
    device_ids = tuple([device_id for each in ranked for device_id in (each.device_id, *each.more_devices)])
    # All replicas of a workload hold the same share. While it changes, that of a replica that stays is used.
    share = ranked[0].share
    if not isinstance(record, JobRecord):
        return PoolAllocation(device_ids=device_ids, share=share)
    if record.runs_as.plan is not None:
        return FunctionAllocation(device_ids=device_ids, global_batch_size=record.batch_size, plan=record.runs_as.plan)
    return PoolAllocation(device_ids=device_ids, global_batch_size=record.batch_size, share=share)


def view_service(record: ServiceRecord, now_s: float) -> ServiceView:
    """A service as policies see it at `now_s`, on which its idle time depends.

    While one revision replaces another, the load seems to need replicas of the new one beside those of the old one,
    and so many more are allowed: it loads beside that where devices can be had.
    """
    states = [replica.state for replica in record.replicas]
    view = replace(
        _present_view(record, now_s),
        num_ready=states.count(ReplicaState.READY),
        num_starting=states.count(ReplicaState.STARTING),
    )
    if record.release is not None:
        num_needed = present_replicas(record, now_s)
        num_more = num_new(record, num_needed)
    elif record.old_revision is not None:
        num_needed, num_more = max(1, view.needed_replicas), 1
    else:
        return view
    num_wanted = num_needed + num_more
    demand = (num_wanted - 1) * record.service.target_in_flight + 1
    return replace(
        view,
        max_replicas=view.max_replicas + num_more,
        queued=max(view.queued, demand - view.in_flight),
        wanted_replicas=None if view.wanted_replicas is None else num_wanted,
    )


def present_replicas(record: ServiceRecord, now_s: float) -> int:
    """How many replicas of its present revision the service's load asks for."""
    return wanted_replicas(_present_view(record, now_s))


def _present_view(record: ServiceRecord, now_s: float) -> ServiceView:
    """The service with the replicas of its present revision and of those that it replaces."""
    new = None if record.release is None else record.release.revision
    states = [replica.state for replica in record.replicas if replica.revision != new]
    return ServiceView(
        service=record.service,
        min_replicas=record.min_replicas,
        max_replicas=record.max_replicas,
        num_ready=states.count(ReplicaState.READY),
        num_starting=states.count(ReplicaState.STARTING),
        arrivals_per_s=record.arrivals_per_s,
        in_flight=record.in_flight,
        queued=record.queued,
        idle_s=_idle_s(record, now_s),
        latency_p99_s=record.latency_p99_s,
        wanted_replicas=record.wanted_replicas,
        refusals=record.refusals,
    )


def _idle_s(record: ServiceRecord, now_s: float) -> float:
    """Seconds without a request: as the gateway last reported, and the time since that report."""
    if record.in_flight or record.queued:
        return 0.0
    since_s = record.deployed_at_s if record.load_at_s is None else record.load_at_s
    return record.idle_s + now_s - since_s
