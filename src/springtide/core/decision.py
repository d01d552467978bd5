"""The contract of deciding: Snapshot in, Plan out. Both are immutable; a policy is a pure function between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from springtide.core.functions import FunctionPlan
from springtide.core.job_parts import DeadlinePromise, GroupChanges, JobBounds, JobProgress, JobRestarts, LearntSpeed
from springtide.core.resources import DeviceId, NodeId, Pool, Topology
from springtide.core.shares import Share
from springtide.core.tide import Tide
from springtide.core.workload import Checkpoint, InferenceService, JobState, TrainingJob, WorkloadId, replicas_for

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class PoolAllocation(msgspec.Struct, frozen=True, kw_only=True, tag_field="allocation", tag=True):
    """Devices of the pool: one training worker or one serving replica on each, in rank order.

    `global_batch_size` is what a job's steps are made of (None: as it is); it changes only within a job's `batch`.
    `share` is what it holds of each of the devices (None: the whole); others may hold the rest.
    """

    device_ids: tuple[DeviceId, ...]
    global_batch_size: int | None = None
    share: Share | None = None

    @property
    def num_devices(self) -> int:
        """How many devices, hence how many workers or replicas."""
        return len(self.device_ids)


class FunctionAllocation(PoolAllocation, frozen=True, kw_only=True, tag=True):
    """A place at a function service, and the functions that the job runs as there."""

    plan: FunctionPlan


Allocation = PoolAllocation | FunctionAllocation


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished job as a policy sees it. The view of an unchanged job is the same object, and so is each part.

    `bounds` are those in force (the owner may have changed them since submission). `total_steps`, `equivalent_steps`
    and `total_equivalent_steps` are those of `progress`, completed by what was declared at submission; the latter two
    count in steps of the initial batch size, whatever the batch is now (`global_batch_size`). `restarts.runnable_at_s`
    lies in the future while the job waits out a back-off after a crash. Once `promise` has a finish, the deadline is a
    promise. `spent_usd` is what a job on functions has cost so far.
    """

    job: TrainingJob
    state: JobState
    submitted_at_s: float
    bounds: JobBounds
    progress: JobProgress = JobProgress()
    promise: DeadlinePromise = DeadlinePromise()
    learnt: LearntSpeed = LearntSpeed()
    restarts: JobRestarts = JobRestarts()
    changes: GroupChanges = GroupChanges()
    started_at_s: float | None = None
    checkpoint: Checkpoint | None = None
    total_steps: int | None = None
    equivalent_steps: float = 0.0
    total_equivalent_steps: float | None = None
    global_batch_size: int = 0
    service_offset_s: float = 0.0
    num_replicas: int = 0
    spent_usd: float = 0.0

    def attained_service_s(self, now_s: float) -> float:
        """Device-seconds held up to `now_s`."""
        return self.service_offset_s + self.num_replicas * now_s


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """A service as a policy sees it: its bounds in force, what runs and what the gateway saw last.

    `wanted_replicas` is the co-scaler's advice, where the service has a capacity to go by.
    """

    service: InferenceService
    min_replicas: int
    max_replicas: int
    num_ready: int = 0
    num_starting: int = 0
    arrivals_per_s: float = 0.0
    in_flight: int = 0
    queued: int = 0
    idle_s: float = 0.0
    latency_p99_s: float | None = None
    wanted_replicas: int | None = None

    @property
    def needed_replicas(self) -> int:
        """What it has to have: its guaranteed minimum, and as many as its load asks for within its maximum."""
        if self.wanted_replicas is not None:
            return max(self.min_replicas, min(self.max_replicas, self.wanted_replicas))
        demand = self.in_flight + self.queued
        return replicas_for(self.service, demand, self.min_replicas, self.max_replicas)


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds without progress at every start, resize or move of a job.

    `change_s` always; on a set of devices that no job has used before also `fresh_s` and `fresh_per_doubling_s` for
    every doubling from one device on.
    """

    change_s: float = 0.0
    fresh_s: float = 0.0
    fresh_per_doubling_s: float = 0.0

    def cost_s(self, num_devices: int, *, is_fresh: bool = True) -> float:
        """What a change to `num_devices` (at least 1) costs."""
        if not is_fresh:
            return self.change_s
        return self.change_s + self.fresh_s + self.fresh_per_doubling_s * math.log2(num_devices)


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time for which a policy plans to give a job `num_devices`, its overhead included."""

    start_s: float
    end_s: float
    num_devices: int


Schedule = tuple[PlannedRun, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A node on its way into another pool, since `since_s`; workloads there have to go since `reclaim_since_s`."""

    pool: Pool
    since_s: float
    reclaim_since_s: float | None = None
    reason: str = ""
    cost_s: float = 0.0


class Relabel(msgspec.Struct, frozen=True, kw_only=True):
    """A node is to be labelled for `pool` once it holds nothing that the pool does not admit.

    Nothing of that kind starts there meanwhile. A workload that is there stays for as long as its allocation says so,
    and is reclaimed otherwise. `cost_s` is what that costs training, in device-seconds.
    """

    pool: Pool
    reason: str = ""
    cost_s: float = 0.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """From `from_s` on `num_devices` devices can be counted on, until the next such moment."""

    from_s: float
    num_devices: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a policy may know, at one instant.

    `jobs` holds the unfinished jobs that want to run (not the paused ones), in arrival order. `allocations` is what
    is held now, devices in rank order; a device that is being given back is still held. `memory` is what this policy
    returned last time. `overheads` is what changing a job costs on this platform. `drains` are the nodes on their way
    into another pool, `tide` how many devices services needed in the past. `capacity` (moments ascending) says how
    much of the cluster can be counted on in the time to come; where it is empty, all of it for good.
    """

    now_s: float
    cluster: Topology
    jobs: tuple[JobView, ...] = ()
    services: tuple[ServiceView, ...] = ()
    allocations: Mapping[WorkloadId, Allocation] = EMPTY
    memory: Any = None
    overheads: Overheads = Overheads()
    drains: Mapping[NodeId, Drain] = {}
    tide: Tide = Tide()
    capacity: tuple[Capacity, ...] = ()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is turned away, and changes that would be accepted."""

    reason: str
    alternatives: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state the policy wants, never a list of changes: a workload that is not named holds nothing.

    `reasons` gives one dominant reason for each workload whose allocation differs from what it asked or held.
    `plan_reasons` says of jobs on functions why they run as the functions of their allocation: the part of their reason
    that does not name these.
    `admitted` names jobs whose deadline is promised from now on, with the finish that is planned for each (absolute
    seconds). `future` is the allocation planned over the time to come, for display: it is not journaled.
    `memory` comes back in the next Snapshot; it is journaled, so it must be made of plain values.
    `capacity` is what its promises may count on over the time to come (empty: all there is, or the policy
    promises nothing), for display too.
    `revisit_at_s` None means: only when something happens. `pools` names the nodes that are to change their label; a
    node that is not named keeps the one it has, and a drain of it is called off.
    """

    allocations: Mapping[WorkloadId, Allocation] = EMPTY
    admitted: Mapping[WorkloadId, float] = EMPTY
    rejected: Mapping[WorkloadId, Refusal] = EMPTY
    future: Mapping[WorkloadId, Schedule] = EMPTY
    reasons: Mapping[WorkloadId, str] = EMPTY
    plan_reasons: Mapping[WorkloadId, str] = EMPTY
    revisit_at_s: float | None = None
    memory: Any = None
    pools: Mapping[NodeId, Relabel] = EMPTY
    capacity: tuple[Capacity, ...] = ()


class Policy(Protocol):
    """Decides which workload holds how much. Pure: no clock, no randomness, no state but its frozen parameters."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the whole wanted state for this snapshot."""
        ...
