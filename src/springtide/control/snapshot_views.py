"""The part of a Snapshot that is derived from the records, updated only for the records that have changed."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.control.parts import bounds_in_devices, job_in_devices, learnt_in_devices
from springtide.control.records import JobRecord, PlatformState, ReplicaState, ServiceRecord
from springtide.core.decision import Allocation, FunctionAllocation, JobView, PoolAllocation, ServiceView
from springtide.core.workload import WorkloadId


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
    # While an older revision of a service answers: what is ready of the newest one, then of older ones, then the rest.
    # Policies that shrink a workload take from the end.
    newest = record.service.revision if isinstance(record, ServiceRecord) and record.old_revision is not None else None
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

    While an older revision answers, the load seems to need one replica more, and one more is allowed: the newest
    revision loads beside it where a device can be had.
    """
    states = [replica.state for replica in record.replicas]
    view = ServiceView(
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
    if record.old_revision is None:
        return view
    num_needed = max(1, view.needed_replicas)
    return replace(
        view,
        max_replicas=view.max_replicas + 1,
        queued=max(view.queued, num_needed * record.service.target_in_flight + 1 - view.in_flight),
        wanted_replicas=None if view.wanted_replicas is None else num_needed + 1,
    )


def _idle_s(record: ServiceRecord, now_s: float) -> float:
    """Seconds without a request: as the gateway last reported, and the time since that report."""
    if record.in_flight or record.queued:
        return 0.0
    since_s = record.deployed_at_s if record.load_at_s is None else record.load_at_s
    return record.idle_s + now_s - since_s
