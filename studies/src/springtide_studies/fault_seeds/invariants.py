"""Invariants of state and machines: after every event (safety) and after the last fault (liveness)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from springtide.control.controller import Controller
from springtide.control.records import JobRecord, PlatformState
from springtide.control.upkeep import STAYS_S
from springtide.core.actions import EndJob, PreemptJob, ResizeJob, SetShare, StartReplica
from springtide.core.decision import JobView, Plan, Policy, Schedule, Snapshot
from springtide.core.events import (
    CheckpointCommitted,
    Event,
    GroupBroken,
    JobResized,
    JobsArchived,
    JobSubmitted,
    ProgressReported,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    ServicesArchived,
)
from springtide.core.ports import Step
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.workload import Checkpoint, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.simulator.fluid.claims import ClaimChecks
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide.simulator.shared_devices import overfull
from springtide_studies.fault_seeds.machine import Machine

# Sums of many floats, in another order than the control plane adds them up.
_ACCOUNT_TOLERANCE_S = 1e-6
# What a job reports by itself after the loss of one of its workers; anything else is a reason to decide otherwise.
_AFTER_A_LOSS = (
    CheckpointCommitted,
    GroupBroken,
    JobResized,
    ProgressReported,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)


def complain(name: str, detail: str) -> None:
    """Raise an InvariantViolation."""
    raise InvariantViolation(name, detail)


def check_return(controller: Controller, steps: Iterable[Step]) -> None:
    """A control plane that comes back an hour after the steps: what has ended leaves the state in its first turn.

    It decides on the rest without an error. `controller` is a new one.
    """
    now_s = 0.0
    for step in steps:
        controller.restore(step)
        now_s = step.now_s
    controller.wake()
    state = controller.state
    jobs = tuple([job_id for job_id in state.jobs if job_id not in state.jobs.live])
    services = tuple([service_id for service_id in state.services if service_id not in state.services.live])
    controller.step(now_s + STAYS_S, (JobsArchived(job_ids=jobs), ServicesArchived(service_ids=services)))
    if any(map(state.is_known, (*jobs, *services))):
        complain("ended-leave", f"{jobs} and {services} are still known")


class ClaimsChecked:
    """A policy whose plans are held to what their reasons claim about time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._checks = ClaimChecks(lambda name, detail, now_s: complain(name, f"at {now_s:.3f} s: {detail}"))

    def make_derived(self) -> DecisionCache:
        """An empty cache for the policy."""
        return DecisionCache(self._policy)

    def decide(self, snapshot: Snapshot, derived: DecisionCache | None = None) -> Plan:
        """The policy's plan. Raises InvariantViolation if it claims what is not so."""
        plan = (derived or self.make_derived()).decide(snapshot)
        self._checks.check(snapshot, plan)
        for view in snapshot.jobs:
            _check_size(view, snapshot, plan)
        return plan


class Invariants:
    """Watches one run. It keeps its own records from the journal and compares them with what the controller says."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.num_ends: Counter[WorkloadId] = Counter()
        self.promised: dict[WorkloadId, Checkpoint] = {}
        self.journaled_events: set[int] = set()
        self._alive_events: list[tuple[Event, ...]] = []
        self.allowed_actions: set[int] = set()
        self._last_step: Step | None = None
        self._oldest: dict[WorkloadId, int] = {}
        self._newest: dict[WorkloadId, int] = {}
        self._terminal: dict[WorkloadId, JobRecord] = {}
        self._since_s: dict[ReplicaId, float] = {}
        self._used_s: defaultdict[WorkloadId, float] = defaultdict(float)
        self._owner: dict[ReplicaId, WorkloadId] = {}
        self._num_devices: dict[ReplicaId, int] = {}
        self._jobs: dict[WorkloadId, JobRecord] = {}
        self._replay: tuple[object, ...] | None = None
        self._survivors_of: WorkloadId | None = None
        self._at_rest: set[WorkloadId] = set()
        self._revisit_at_s: float | None = None
        self.num_share_changes = self.most_sharers = 0

    # --- at the moment at which a step becomes durable ---------------------------------------------------------------

    def note_journaled(self, step: Step, controller: Controller) -> None:
        """A step is in the journal: record it, and check what the step itself promises."""
        self._alive_events.append(step.events)
        self.journaled_events.update(map(id, step.events))
        self.allowed_actions = set(map(id, step.actions))
        self._last_step = step
        for event in step.events:
            self._book_event(event)
        for action in step.actions:
            match action:
                case EndJob():
                    self.num_ends[action.job_id] += 1
                    if self.num_ends[action.job_id] > 1:
                        complain("one-end", f"{action.job_id} is ended for the second time")
                case ResizeJob():
                    self._raise_generation(action.job_id, action.generation, must_rise=True)
                    if action.forced:
                        self._oldest[action.job_id] = action.generation
                case SetShare():
                    self.num_share_changes += 1
                case StartReplica() if isinstance(action.workload, TrainingJob):
                    self._book_start(action)
        self._check_survivors(step, controller.state, controller.future)
        self._book_devices(step.now_s, controller)
        self._replay = _whole(controller)

    def _book_event(self, event: Event) -> None:
        match event:
            case JobResized():
                if event.generation == self._newest.get(event.job_id):
                    self._oldest[event.job_id] = event.generation
            case CheckpointCommitted():
                if event.generation < self._oldest.get(event.job_id, 0):
                    return
                known = self.promised.get(event.job_id)
                if (known is None or event.step >= known.step) and not self.num_ends[event.job_id]:
                    self.promised[event.job_id] = Checkpoint(
                        generation=event.generation, step=event.step, path=event.path
                    )

    def _book_start(self, action: StartReplica) -> None:
        job_id = action.workload_id
        if action.generation <= self._newest.get(job_id, 0):
            return
        self._raise_generation(job_id, action.generation, must_rise=True)
        self._oldest[job_id] = action.generation
        promised = self.promised.get(job_id)
        restored = action.restore.step if action.restore is not None else 0
        if promised is not None and restored < promised.step:
            complain("checkpoint-kept", f"{job_id} restores step {restored}, step {promised.step} was acknowledged")

    def _check_survivors(self, step: Step, state: PlatformState, future: Mapping[WorkloadId, Schedule]) -> None:
        """A job at rest that loses a worker trains on with the others, until anything else happens or the policy had
        planned to decide anew. Only for a promised job that is to start at once are they stopped, and best effort on
        parts for any stronger claim on whole devices that waits: what was asked in vain is asked again by time."""
        jobs = {_job_of(event) for event in step.events}
        is_due = self._revisit_at_s is not None and step.now_s >= self._revisit_at_s
        self._revisit_at_s = step.revisit_at_s
        if is_due or state.drains or jobs - {self._survivors_of}:
            self._survivors_of = None
        job_id = next(iter(jobs), None) if len(jobs) == 1 else None
        if job_id is not None and not is_due and not state.drains:
            record = state.jobs.get(job_id)
            is_loss = any(isinstance(event, ReplicaLost) for event in step.events)
            if job_id in self._at_rest and record is not None and is_loss and record.restarts.grows_at_s > step.now_s:
                self._survivors_of = job_id
        self._at_rest = {record.workload_id for record in state.jobs.live.values() if _is_at_rest(record)}
        if self._survivors_of is None:
            return
        record = state.jobs[self._survivors_of]
        if record.restarts.grows_at_s <= step.now_s:
            self._survivors_of = None
        elif any(isinstance(a, PreemptJob) and a.job_id == self._survivors_of for a in step.actions):
            others = [other for other in state.jobs.live.values() if other is not record]
            if not any(
                _starts_as_promised(other, future, step.now_s) or _is_stronger(other, record) for other in others
            ):
                complain("survivors-go-on", f"{self._survivors_of} lost a worker, and the others are stopped as well")
            self._survivors_of = None
        elif any(isinstance(a, StartReplica) and a.workload_id != self._survivors_of for a in step.actions):
            # What waited has taken the device that came free.
            self._survivors_of = None

    def _raise_generation(self, job_id: WorkloadId, generation: int, *, must_rise: bool) -> None:
        newest = self._newest.get(job_id, 0)
        if generation < newest:
            complain("generation-rises", f"{job_id}: generation {generation} after {newest}")
        self._newest[job_id] = generation

    def _book_devices(self, now_s: float, controller: Controller) -> None:
        held: set[ReplicaId] = set()
        for record in controller.state.records():
            for replica in record.replicas:
                held.add(replica.replica_id)
                if replica.replica_id not in self._since_s:
                    self._since_s[replica.replica_id] = now_s
                    self._owner[replica.replica_id] = record.workload_id
                    self._num_devices[replica.replica_id] = len(replica.device_ids)
        if len(held) == len(self._since_s):
            return
        for replica_id in [known for known in self._since_s if known not in held]:
            used_s = (now_s - self._since_s.pop(replica_id)) * self._num_devices.pop(replica_id)
            self._used_s[self._owner[replica_id]] += used_s

    # --- around effects ----------------------------------------------------------------------------------------------

    def check_acknowledged(self, event: Event) -> None:
        """What senders are told is durable is in the journal."""
        if id(event) not in self.journaled_events:
            complain("durable-first", f"{type(event).__name__} is acknowledged before it is in the journal")

    def check_started(self, action: object) -> None:
        """No effect begins that is not in the journal."""
        if id(action) not in self.allowed_actions:
            complain("durable-first", f"{type(action).__name__} begins before it is in the journal")

    def check_replayed(self, controller: Controller) -> None:
        """A recovered controller knows exactly what the one before it had made durable."""
        if self._replay is None:
            return
        names = ("jobs", "services", "nodes", "drains", "tide")
        for name, before, after in zip(names, self._replay, _whole(controller), strict=True):
            if before != after:
                complain("replay-equals", f"{name} differ after recovery: before {before}, after {after}")

    # --- after every turn of the loop --------------------------------------------------------------------------------

    def check(self, controller: Controller, acknowledged: list[Event]) -> None:
        """Every safety invariant over the present state."""
        state = controller.state
        self._check_devices(state)
        known: dict[ReplicaId, Share | None] = {}
        for record in state.records():
            known.update((replica.replica_id, replica.share) for replica in record.replicas)
        for process in self.machine.alive.values():
            if process.is_fenced:
                continue
            if process.replica_id not in known:
                complain(
                    "device-freed-late", f"{process.replica_id} lives on {process.device_id}, which counts as free"
                )
            if known[process.replica_id] != process.share:
                detail = f"{process.replica_id} holds {process.share} and is to hold {known[process.replica_id]}"
                complain("share-kept", detail)
        for job_id, job in state.jobs.items():
            if self._jobs.get(job_id) is not job:
                self._check_job(job)
                self._jobs[job_id] = job
        for run in self.machine.runs.values():
            if not run.store.manifests.keys() <= run.store.blobs:
                complain("checkpoint-whole", f"{run.job.job_id} shows a checkpoint whose tensors are not there")
        for event in acknowledged:
            if isinstance(event, JobSubmitted) and event.job.job_id not in state.jobs:
                complain("submit-kept", f"{event.job.job_id} was acknowledged and is not known")

    def _check_devices(self, state: PlatformState) -> None:
        """A replica that holds a whole device is alone on it; parts of one keep the bounds of their sums."""
        try:
            state.holders()
        except AssertionError as error:
            complain("device-once", str(error))
        held: dict[DeviceId, list[Share | None]] = {}
        for record in state.live_records():
            for replica in record.replicas:
                each = (record.job if isinstance(record, JobRecord) else record.service).devices_each
                nodes = {device_id.rpartition("/")[0] for device_id in replica.device_ids}
                if len(replica.device_ids) != each or len(nodes) != 1:
                    complain("whole-workers", f"{replica.replica_id} holds {replica.device_ids}, each needs {each}")
                for device_id in replica.device_ids:
                    held.setdefault(device_id, []).append(replica.share)
        for device_id, shares in held.items():
            self.most_sharers = max(self.most_sharers, len(shares))
            wrong = overfull(shares, state.topology().memory_of.get(device_id, 0))
            if wrong:
                complain("device-once", f"{device_id}: {wrong}")

    def _check_job(self, job: JobRecord) -> None:
        ended = self._terminal.get(job.workload_id)
        if ended is not None:
            same = (
                ended.lifecycle.state,
                ended.lifecycle.reason.text,
                ended.lifecycle.ended_at_s,
                ended.progress.step,
                ended.saved.checkpoint,
                ended.lifecycle.outcome,
            )
            if same != (
                job.lifecycle.state,
                job.lifecycle.reason.text,
                job.lifecycle.ended_at_s,
                job.progress.step,
                job.saved.checkpoint,
                job.lifecycle.outcome,
            ):
                complain("end-is-final", f"{job.workload_id} changed after its end")
        if job.lifecycle.state.is_terminal:
            self._terminal[job.workload_id] = job
            if self.num_ends[job.workload_id] != 1:
                complain(
                    "one-end", f"{job.workload_id} is {job.lifecycle.state}, the journal ends it {self.num_ends} times"
                )
        living = {replica.replica_id for replica in job.replicas}
        if not living.issuperset(job.group.members):
            complain("members-live", f"{job.workload_id} has members that are gone: {job.group.members}")
        run = self.machine.runs.get(job.workload_id)
        if job.saved.checkpoint is not None and (run is None or job.saved.checkpoint.path not in run.store.manifests):
            complain(
                "checkpoint-whole",
                f"{job.workload_id} knows checkpoint {job.saved.checkpoint.path}, which is not there",
            )

    # --- when the faults are over ------------------------------------------------------------------------------------

    def check_end(self, controller: Controller, now_s: float, num_open: int) -> None:
        """Every feasible job has ended, nothing is left over, the accounts are right, the policy wants no change."""
        state = controller.state
        waiting = [
            f"{job.workload_id} {job.lifecycle.state} ({job.lifecycle.reason.text})"
            for job in state.jobs.values()
            if not job.lifecycle.state.is_terminal
        ]
        if waiting or num_open:
            complain("all-end", f"{num_open} requests open, still there at {now_s:.0f} s: {'; '.join(waiting)}")
        orphans = [process.replica_id for process in self.machine.alive.values()]
        if orphans or not controller.is_idle:
            complain("no-orphans", f"still running at {now_s:.0f} s: {orphans}, held {state.holders()}")
        step = controller.step(now_s, ())
        if step.actions:
            complain("fixed-point", f"with nothing left to do the controller wants {step.actions}")
        for job in state.jobs.values():
            self._check_ended(job)
        for record in state.records():
            used_s = self._used_s[record.workload_id]
            if abs(used_s - record.finished_service_s) > _ACCOUNT_TOLERANCE_S * max(1.0, used_s):
                complain(
                    "accounting",
                    f"{record.workload_id} held {used_s} device-seconds, {record.finished_service_s} booked",
                )

    def _check_ended(self, job: JobRecord) -> None:
        run = self.machine.runs.get(job.workload_id)
        if job.lifecycle.state is JobState.SUCCEEDED:
            assert run is not None
            steps = np.concatenate([np.arange(first, end) for _, first, end in run.store.commits])
            num_seen = run.store.seen_at.get(run.store.num_steps)
            if (
                not np.array_equal(np.sort(steps), np.arange(run.store.num_steps))
                or num_seen != run.model.total_samples
            ):
                complain("samples-once", f"{job.workload_id} succeeded with {run.store.commits}")
            if run.model.poison:
                complain("right-end", f"{job.workload_id} cannot succeed ({run.model.poison})")
        if job.lifecycle.state is JobState.FAILED:
            is_poison = run is not None and run.model.poison != ""
            if not is_poison and len(job.restarts.crashes_at_s) <= job.job.max_restarts:
                complain("right-end", f"{job.workload_id} FAILED without cause: {job.lifecycle.reason.text}")


def _check_size(view: JobView, snapshot: Snapshot, plan: Plan) -> None:
    """A running job that cannot be resized keeps all of its devices or stops: it would hold the others, too."""
    held, given = snapshot.allocations.get(view.job.job_id), plan.allocations.get(view.job.job_id)
    if view.job.elastic or view.state is not JobState.RUNNING or held is None or given is None:
        return
    if given.num_devices < held.num_devices and snapshot.cluster.device_set.issuperset(held.device_ids):
        complain("size-kept", f"{view.job.job_id} holds {held.device_ids} and is planned on {given.device_ids}")


def _is_at_rest(record: JobRecord) -> bool:
    """Whether the job trains and nothing that was decided about it is still to come."""
    return (
        record.lifecycle.state is JobState.RUNNING
        and record.lifecycle.outcome is None
        and not record.bounds.is_paused
        and record.group.is_confirmed
        and not record.group.is_broken
        and {replica.replica_id for replica in record.replicas} == set(record.group.members)
    )


def _starts_as_promised(record: JobRecord, future: Mapping[WorkloadId, Schedule], now_s: float) -> bool:
    """Whether this is a job whose deadline is promised and that is to have more devices now than it holds."""
    runs = future.get(record.workload_id, ()) if record.promise.admitted_at_s is not None else ()
    return any(
        run.start_s <= now_s < run.end_s and run.num_devices > len(record.replicas) * record.job.devices_each
        for run in runs
    )


def _is_stronger(other: JobRecord, record: JobRecord) -> bool:
    """Whether this job waits for whole devices with a stronger claim than the other has on its parts of some."""
    is_best_effort = record.job.share is not None and not record.job.goal.is_hard
    return is_best_effort and other.job.share is None and other.job.goal.is_hard and not other.replicas


def _job_of(event: Event) -> WorkloadId | None:
    """The job that this is news of; None if it can be a reason to decide otherwise about others."""
    if not isinstance(event, _AFTER_A_LOSS):
        return None
    return event.workload_id if isinstance(event, ReplicaLost | ReplicaReady | ReplicaStopped) else event.job_id


def _whole(controller: Controller) -> tuple[object, ...]:
    """The state that a replay has to restore."""
    state = controller.state
    return (dict(state.jobs), dict(state.services), dict(state.nodes), dict(state.drains), state.tide)
