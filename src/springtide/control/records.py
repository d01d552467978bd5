"""The Controller's state: one immutable record for each job, service and replica."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from springtide.control.releases.parts import Release, Revision
from springtide.core.decision import Drain
from springtide.core.functions import Bill, FunctionPlan, Usage
from springtide.core.job_parts import (
    DeadlinePromise,
    GroupChanges,
    JobBounds,
    JobMove,
    JobOutcome,
    JobProgress,
    JobRestarts,
    LearntSpeed,
    NodeRefusal,
)
from springtide.core.reasons import GroupChange
from springtide.core.resources import DeviceId, Node, NodeId, Pool, Topology
from springtide.core.shares import Load, Share, load_of
from springtide.core.tide import Tide
from springtide.core.workload import (
    Checkpoint,
    InferenceService,
    JobState,
    ReplicaId,
    TrainingJob,
    WorkloadId,
)


class ReplicaState(enum.StrEnum):
    """The state of a replica. STOPPING replicas still hold their device."""

    STARTING = "STARTING"
    READY = "READY"
    STOPPING = "STOPPING"


class ServiceState(enum.StrEnum):
    """The state of a service."""

    IDLE = "IDLE"
    STARTING = "STARTING"
    READY = "READY"
    FAILED = "FAILED"
    REMOVED = "REMOVED"


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker process. It holds `device_id`, or its `share` of it, until it is known to be gone, and as long
    `more_devices` of the same node.

    `has_trained` says that a ResizeJob has named it; such a worker exits once it is out of the group. `phases_s` is how
    long each phase of its start took, in seconds. `is_hung` says that it was not ready in time and is to be ended.
    `device_seen` is the name of the device that it found there, if its container's platform has chosen that.
    `held_up_by` is what its start waits for on the platform where it is to run; `began_at_s` is when such a wait ended,
    or when it became one that only a person can end (`is_stuck`). `why` is the policy's reason for the change of the
    group for which it was started.
    """

    replica_id: ReplicaId
    device_id: DeviceId
    state: ReplicaState
    started_at_s: float
    generation: int = 0
    revision: int = 0
    address: str = ""
    restore: Checkpoint | None = None
    has_trained: bool = False
    share: Share | None = None
    phases_s: Mapping[str, float] = {}
    is_hung: bool = False
    device_seen: str = ""
    held_up_by: str = ""
    is_stuck: bool = False
    began_at_s: float | None = None
    more_devices: tuple[DeviceId, ...] = ()
    why: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether it is warm and was not asked to stop."""
        return self.state is ReplicaState.READY

    @property
    def device_ids(self) -> tuple[DeviceId, ...]:
        """Every device that it holds."""
        return (self.device_id, *self.more_devices)

    def held_s(self, now_s: float) -> float:
        """Device-seconds that it has held up to `now_s`."""
        return (now_s - self.started_at_s) * len(self.device_ids)

    def charged(self, service_s: float, now_s: float) -> float:
        """`service_s` device-seconds and those of this replica, which is gone at `now_s`."""
        for _ in self.device_ids:
            service_s = service_s + now_s - self.started_at_s
        return service_s


class StateReason(msgspec.Struct, frozen=True):
    """Why a job is in its state: `text` for people, and the change of its group that the text describes, if any."""

    text: str
    change: GroupChange | None = None


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """Where the job stands between its submission and its end.

    `outcome` is the terminal state that the job is about to enter with EndJob; `alternatives` are changes with which a
    refused job would have been accepted. `given_up_at_s` is since when its promised deadline is missed by the
    policy's plan (a claim `given_up`); None where it is not, or nothing was promised.
    """

    state: JobState
    reason: StateReason
    submitted_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    outcome: JobState | None = None
    outcome_reason: str = ""
    alternatives: tuple[str, ...] = ()
    given_up_at_s: float | None = None


class GroupMembership(msgspec.Struct, frozen=True, kw_only=True):
    """The group of workers that trains, and the one before it while a change is under way.

    `generation` is the highest ever issued; `members` (rank order) is the group it names and `previous_members` the
    group it replaces; `state_holders` are the living replicas known to hold the model's state; `is_confirmed` says that
    the members have switched. `oldest_generation` is the lowest whose messages still count.
    """

    generation: int = 0
    oldest_generation: int = 0
    members: tuple[ReplicaId, ...] = ()
    previous_members: tuple[ReplicaId, ...] = ()
    state_holders: tuple[ReplicaId, ...] = ()
    is_confirmed: bool = True
    is_broken: bool = False

    def without(self, gone: Container[ReplicaId]) -> GroupMembership:
        """The group when these replicas have left it."""
        return replace(
            self,
            members=tuple(m for m in self.members if m not in gone),
            previous_members=tuple(m for m in self.previous_members if m not in gone),
            state_holders=tuple(m for m in self.state_holders if m not in gone),
        )

    def dissolved(self) -> GroupMembership:
        """No group: no worker trains, and no change is under way."""
        return replace(self, members=(), previous_members=(), state_holders=(), is_confirmed=True, is_broken=False)


class RunShape(msgspec.Struct, frozen=True, kw_only=True):
    """How the job runs now: the samples of a step (0: as submitted) and, on functions, the plan."""

    global_batch_size: int = 0
    plan: FunctionPlan | None = None


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives the job's workers."""

    checkpoint: Checkpoint | None = None
    artifact_path: str = ""


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What the job has used: device-seconds of replicas that are gone; on functions, usage and bill so far."""

    finished_service_s: float = 0.0
    usage: Usage = Usage()
    bill: Bill = Bill()


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one job. `next_replica` is the number of the replica that is started next.

    `move` is its last move to functions, None if there was none.
    """

    job: TrainingJob
    bounds: JobBounds
    lifecycle: Lifecycle
    replicas: tuple[ReplicaRecord, ...] = ()
    next_replica: int = 0
    group: GroupMembership = GroupMembership()
    runs_as: RunShape = RunShape()
    promise: DeadlinePromise = DeadlinePromise()
    progress: JobProgress = JobProgress()
    learnt: LearntSpeed = LearntSpeed()
    saved: SavedState = SavedState()
    restarts: JobRestarts = JobRestarts()
    changes: GroupChanges = GroupChanges()
    spent: Spending = Spending()
    move: JobMove | None = None

    @property
    def is_moving(self) -> bool:
        """Whether it leaves its machines for functions: it moves once no worker is left."""
        return self.move is not None and self.move.state == "asked"

    @property
    def batch_size(self) -> int:
        """Samples of one step of the present group."""
        return self.runs_as.global_batch_size or self.job.global_batch_size

    @property
    def workload_id(self) -> WorkloadId:
        """The job's id."""
        return self.job.job_id

    @property
    def state(self) -> JobState:
        """The job's state. This and the next three properties exist so that both kinds of record read alike."""
        return self.lifecycle.state

    @property
    def reason(self) -> str:
        """Why the job is in its state, for people."""
        return self.lifecycle.reason.text

    @property
    def back_offs_at_s(self) -> tuple[float, ...]:
        """When the back-offs for new workers end."""
        return self.restarts.starts_at_s, self.restarts.grows_at_s

    @property
    def finished_service_s(self) -> float:
        """Device-seconds of replicas that are gone."""
        return self.spent.finished_service_s

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.lifecycle.state.is_terminal

    @property
    def world_size(self) -> int:
        """Number of workers in the current group."""
        return len(self.group.members)

    def attained_service_s(self, now_s: float) -> float:
        """Device-seconds held so far, living replicas included."""
        return self.spent.finished_service_s + sum(replica.held_s(now_s) for replica in self.replicas)


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one service.

    It was removed at `removed_at_s`, None if that is not known or it is not removed.
    `wanted_replicas` is the co-scaler's advice, `start_phases_s` how long each phase of the last replica's start took.
    `refusals` are the nodes that turned replicas away since the last one that started.
    No replica is added before `starts_at_s`. `proven` is the newest version of which a replica was ready; a later one
    that never gets ready is `refused` for it, and `rolled_back` says why. Since a replica became ready, `num_hangs`
    replicas were not ready in time, and the last one crashed for `crash_reason`. `service` is the revision that gets
    the requests, `release` a newer one that does not get all of them yet, and `past` are the last ones that do not any
    more, the newest last.
    """

    service: InferenceService
    state: ServiceState
    reason: str
    deployed_at_s: float
    min_replicas: int
    max_replicas: int
    is_removed: bool = False
    removed_at_s: float | None = None
    replicas: tuple[ReplicaRecord, ...] = ()
    next_replica: int = 0
    crashes_at_s: tuple[float, ...] = ()
    starts_at_s: float = 0.0
    arrivals_per_s: float = 0.0
    in_flight: int = 0
    queued: int = 0
    idle_s: float = 0.0
    load_at_s: float | None = None
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    finished_service_s: float = 0.0
    wanted_replicas: int | None = None
    start_phases_s: Mapping[str, float] = {}
    refusals: tuple[NodeRefusal, ...] = ()
    num_hangs: int = 0
    crash_reason: str = ""
    proven: InferenceService | None = None
    refused: InferenceService | None = None
    rolled_back: str = ""
    release: Release | None = None
    past: tuple[Revision, ...] = ()

    @property
    def back_offs_at_s(self) -> tuple[float, ...]:
        """When the back-offs for new replicas end."""
        return (self.starts_at_s,) if self.release is None else (self.starts_at_s, self.release.starts_at_s)

    @property
    def workload_id(self) -> WorkloadId:
        """The service's id."""
        return self.service.service_id

    @property
    def is_served(self) -> bool:
        """Whether it wants replicas."""
        return not self.is_removed and self.state is not ServiceState.FAILED

    @property
    def old_revision(self) -> int | None:
        """The revision whose replicas those of the present one replace, one after another; None if there are none."""
        if not self.is_served:
            return None
        others = (self.service.revision, None if self.release is None else self.release.revision)
        return max([r.revision for r in self.replicas if r.is_ready and r.revision not in others], default=None)

    @property
    def is_over(self) -> bool:
        """Whether the service was removed."""
        return self.is_removed

    def attained_service_s(self, now_s: float) -> float:
        """Device-seconds held so far, living replicas included."""
        return self.finished_service_s + sum(replica.held_s(now_s) for replica in self.replicas)


WorkloadRecord = JobRecord | ServiceRecord
Record = TypeVar("Record", bound=JobRecord | ServiceRecord)


class RecordTable(dict[WorkloadId, Record]):
    """Records by id, in order of arrival, with indexes that follow every change of a record.

    `live` are the records that have not ended or still hold a device, `held` the devices they hold, wholly or in part,
    `shares` the shares of devices that are held in part, `changed` the records that changed since the controller last
    cleared it, and `place` numbers all records by arrival. Thanks to the indexes the cost of a turn does not grow with
    the number of jobs that have ended or do not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[WorkloadId, Record] = {}
        self.held: set[DeviceId] = set()
        self.shares: dict[DeviceId, dict[WorkloadId, Share]] = {}
        self.changed: dict[WorkloadId, None] = {}
        self.place: dict[WorkloadId, int] = {}
        self._next_place = 0

    def __setitem__(self, workload_id: WorkloadId, record: Record) -> None:
        """Add a record or replace it."""
        before = self.get(workload_id)
        super().__setitem__(workload_id, record)
        self.changed[workload_id] = None
        if before is None:
            self.place[workload_id], self._next_place = self._next_place, self._next_place + 1
        if before is None or before.replicas is not record.replicas:
            self._hold(record, before)
        if record.is_over and not record.replicas:
            self.live.pop(workload_id, None)
        else:
            self.live[workload_id] = record

    def __delitem__(self, workload_id: WorkloadId) -> None:
        """Remove a record that is over and holds no device."""
        assert workload_id not in self.live, f"{workload_id} is not over"
        super().__delitem__(workload_id)
        del self.place[workload_id]
        self.changed.pop(workload_id, None)

    def _hold(self, record: Record, before: Record | None) -> None:
        """Update `held` and `shares` from what `before` held to what `record` holds."""
        old = _held_by(before) if before is not None else {}
        new = _held_by(record)
        num_held = len(record.replicas) + sum([len(replica.more_devices) for replica in record.replicas])
        assert len(new) == num_held, f"{record.workload_id} holds a device of {sorted(new)} twice"
        for device_id, share in old.items():
            if device_id in new and new[device_id] == share:
                continue
            if share is not None:
                del self.shares[device_id][record.workload_id]
                if self.shares[device_id]:
                    continue
                del self.shares[device_id]
            self.held.discard(device_id)
        for device_id, share in new.items():
            if device_id in old and old[device_id] == share:
                continue
            is_taken = device_id in self.held and (share is None or device_id not in self.shares)
            assert not is_taken, f"{device_id} is held twice"
            self.held.add(device_id)
            if share is not None:
                self.shares.setdefault(device_id, {})[record.workload_id] = share


def _held_by(record: WorkloadRecord) -> dict[DeviceId, Share | None]:
    """The devices that its replicas hold, each with the share of it."""
    return {device_id: each.share for each in record.replicas for device_id in (each.device_id, *each.more_devices)}


class Nodes(dict[NodeId, Node]):
    """The nodes that are alive, in the order in which they joined."""

    def __init__(self) -> None:
        super().__init__()
        self._topology = Topology()

    def topology(self) -> Topology:
        """The topology of all nodes: the same object until a node joins, changes or is lost."""
        nodes, known = tuple(self.values()), self._topology.nodes
        if len(nodes) != len(known) or any(now is not before for now, before in zip(nodes, known, strict=True)):
            self._topology = Topology(nodes=nodes)
        return self._topology


class PlatformState(msgspec.Struct, kw_only=True):
    """The platform's whole state. Only control.transitions and control.effects change it. Tables keep arrival order.

    `labels` are those that the platform gave to nodes; they outlive the loss of a node. `labels` and `drains` are
    replaced, never modified, so that a caller may keep a reference. `change_times_s` holds, for the last changes of
    jobs that started workers, the seconds from the order to the first step, `outcomes` how the last jobs came out
    against what was expected of them. Before `watched_from_s` the control plane could not see what workloads did.
    """

    jobs: RecordTable[JobRecord] = msgspec.field(default_factory=RecordTable)
    services: RecordTable[ServiceRecord] = msgspec.field(default_factory=RecordTable)
    nodes: Nodes = msgspec.field(default_factory=Nodes)
    labels: Mapping[NodeId, Pool] = msgspec.field(default_factory=dict)
    drains: Mapping[NodeId, Drain] = msgspec.field(default_factory=dict)
    tide: Tide = Tide()
    memory: Any = None
    revisit_at_s: float | None = None
    is_stopping: bool = False
    num_stale_events: int = 0
    change_times_s: tuple[float, ...] = ()
    watched_from_s: float = 0.0
    outcomes: tuple[JobOutcome, ...] = ()

    def topology(self) -> Topology:
        """All nodes that are alive."""
        return self.nodes.topology()

    def records(self) -> Iterator[WorkloadRecord]:
        """Every job, then every service."""
        yield from self.jobs.values()
        yield from self.services.values()

    def live_records(self) -> Iterator[WorkloadRecord]:
        """Every job and every service that has not ended or still holds a device."""
        yield from self.jobs.live.values()
        yield from self.services.live.values()

    def is_known(self, workload_id: WorkloadId) -> bool:
        """Whether there is a record of the workload."""
        return workload_id in self.jobs or workload_id in self.services

    def place_of(self, workload_id: WorkloadId) -> tuple[bool, int]:
        """The workload's place in the order of arrival: every job, then every service."""
        place = self.jobs.place.get(workload_id)
        return (False, place) if place is not None else (True, self.services.place[workload_id])

    def is_held(self, device_id: DeviceId) -> bool:
        """Whether a replica holds the device or a part of it."""
        return device_id in self.jobs.held or device_id in self.services.held

    def load(self, device_id: DeviceId) -> Load:
        """How much of the device is held."""
        held: list[Share | None] = []
        for table in (self.jobs, self.services):
            if device_id in table.shares:
                held += table.shares[device_id].values()
            elif device_id in table.held:
                held.append(None)
        return load_of(held)

    def holders(self) -> dict[DeviceId, tuple[ReplicaId, ...]]:
        """The replicas on each held device. Asserts that a replica that holds a whole device is alone on it."""
        held: dict[DeviceId, list[ReplicaRecord]] = {}
        for record in self.live_records():
            for replica in record.replicas:
                for device_id in replica.device_ids:
                    held.setdefault(device_id, []).append(replica)
        for device_id, replicas in held.items():
            is_shared = all(replica.share is not None for replica in replicas)
            assert len(replicas) == 1 or is_shared, f"{device_id} is held twice"
        return {device_id: tuple([r.replica_id for r in replicas]) for device_id, replicas in held.items()}
