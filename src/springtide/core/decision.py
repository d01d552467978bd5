"""The contract of policies: Snapshot in, Plan out. Both are immutable; a policy is a pure function between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from springtide.core.functions import FunctionPlan
from springtide.core.job_parts import (
    DeadlinePromise,
    GroupChanges,
    JobBounds,
    JobProgress,
    JobRestarts,
    LearntSpeed,
    NodeRefusal,
)
from springtide.core.resources import DeviceId, NodeId, Pool, Topology
from springtide.core.shares import Share
from springtide.core.tide import Tide
from springtide.core.workload import Checkpoint, InferenceService, JobState, TrainingJob, WorkloadId, replicas_for

EMPTY: Mapping[Any, Any] = MappingProxyType({})
T = TypeVar("T")


class Same(Generic[T]):
    """A part of a snapshot as a key of a cache: equal to itself alone, since no part of a snapshot is ever changed."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


class PoolAllocation(msgspec.Struct, frozen=True, kw_only=True, tag_field="allocation", tag=True):
    """Devices of machines: one training worker or one serving replica on each, in rank order. Where each worker or
    replica holds several (`devices_each`), so many in a row are those of one.

    `global_batch_size` is the number of samples of a job's step (None: unchanged); it must lie within the job's
    `batch`. `share` is what the workload holds of each device (None: the whole); others may hold the rest.
    """

    device_ids: tuple[DeviceId, ...]
    global_batch_size: int | None = None
    share: Share | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.device_ids)


class FunctionAllocation(PoolAllocation, frozen=True, kw_only=True, tag=True):
    """A place at a function service, and the functions that the job runs as there."""

    plan: FunctionPlan


Allocation = PoolAllocation | FunctionAllocation


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished job as a policy sees it. The view of an unchanged job is the same object, and so is each part.

    Every number of workers in it, those of `job` too, is one of devices: a multiple of `job.devices_each`.

    `bounds` are those in force (the owner may have changed them since submission). `total_steps`, `equivalent_steps`
    and `total_equivalent_steps` are those of `progress`, or as declared at submission where workers have not reported
    any; the latter two count in steps of the initial batch size, whatever the batch is now (`global_batch_size`).
    `restarts.starts_at_s` lies in the future while the job waits out a back-off after a crash. Once `promise` has a
    finish, the deadline is promised. `spent_usd` is the cost so far of a job on functions.
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
    """A service as a policy sees it: its bounds in force, its replicas, and the load that the gateway last reported.

    It counts replicas, each of which holds its share of `service.devices_each` devices of one node.
    `wanted_replicas` is the co-scaler's advice; None if the service has no profiled capacity. `refusals` are the nodes
    that turned replicas away.
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
    refusals: tuple[NodeRefusal, ...] = ()

    @property
    def needed_replicas(self) -> int:
        """The replicas that its load needs, between its guaranteed minimum and its maximum."""
        if self.wanted_replicas is not None:
            return max(self.min_replicas, min(self.max_replicas, self.wanted_replicas))
        demand = self.in_flight + self.queued
        return replicas_for(self.service, demand, self.min_replicas, self.max_replicas)


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds without progress at every start, resize or move of a job.

    Every change costs `change_s`; on a set of devices that no job has used before it also costs `fresh_s`, plus
    `fresh_per_doubling_s` times the binary logarithm of their number.
    """

    change_s: float = 0.0
    fresh_s: float = 0.0
    fresh_per_doubling_s: float = 0.0

    def cost_s(self, num_devices: int, *, is_fresh: bool = True) -> float:
        """Seconds without progress at a change to `num_devices` (at least 1)."""
        if not is_fresh:
            return self.change_s
        return self.change_s + self.fresh_s + self.fresh_per_doubling_s * math.log2(num_devices)


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """An interval in which a policy plans to give a job `num_devices`; it includes the overhead of the change."""

    start_s: float
    end_s: float
    num_devices: int


Schedule = tuple[PlannedRun, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A node that moves to `pool` since `since_s`; its workloads have to leave since `reclaim_since_s`, if set."""

    pool: Pool
    since_s: float
    reclaim_since_s: float | None = None
    reason: str = ""
    cost_s: float = 0.0


class Relabel(msgspec.Struct, frozen=True, kw_only=True):
    """Label a node for `pool` once no workload that the pool does not admit is on it.

    Meanwhile no such workload starts there. One that is there stays as long as the plan allocates it devices of the
    node, and is reclaimed otherwise. `cost_s` is what that costs training, in device-seconds.
    """

    pool: Pool
    reason: str = ""
    cost_s: float = 0.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that promises may count on from `from_s` until the `from_s` of the next entry."""

    from_s: float
    num_devices: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a policy may know, at one instant.

    `jobs` holds the unfinished jobs that want to run (not the paused ones), in arrival order. `allocations` is what
    is held now, devices in rank order; devices of stopping replicas are still held. `memory` is what this policy
    returned last time. `overheads` is what changing a job costs on this platform. `drains` are the nodes that move to
    another pool, `tide` is how many devices services needed in the past. `capacity` (ascending) says how many devices
    promises may count on over time; if it is empty, all of them at all times. `num_parts_waiting` jobs that are not
    among `jobs` wait for a part of a device: a node that is loaned to training would have room for them.
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
    num_parts_waiting: int = 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is rejected, and changes with which it would be accepted."""

    reason: str
    alternatives: tuple[str, ...] = ()


class TimeClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What a reason says about time, as a code and a moment (absolute seconds; None: not known).

    `kept_in_time`: the job is planned to end at `at_s`, by its deadline. `waits_for`: the workload holds nothing, and
    if nothing else changes it can have a device at `at_s`. `given_up`: the deadline was promised and cannot be kept any
    more; the job is planned to end at `at_s`. `is_certain`: by what the policy knows of its speed, more devices would
    not change that.
    """

    code: Literal["kept_in_time", "waits_for", "given_up"]
    at_s: float | None = None
    is_certain: bool = False


class PromiseCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What the deadline of a job whose speed was not known waits for, to be promised.

    It is promised once its speed is measured, if a step on `num_workers` takes `step_s` or less (0.0: so many devices
    are not free for long enough). `measured_s` is set where it was measured and is slower than that.
    """

    step_s: float
    num_workers: int
    measured_s: float | None = None

    def text(self) -> str:
        """The sentence for people."""
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        if self.step_s <= 0.0:
            return f"its deadline is pursued and not promised: no room for {workers} is free for long enough before it"
        needed = f"{_three_digits(self.step_s, math.floor)} s"
        if self.measured_s is None:
            return f"its deadline is promised once its speed is measured, if a step takes <= {needed} on {workers}"
        measured = f"{_three_digits(self.measured_s, math.ceil)} s"
        return f"its deadline is pursued and not promised: a step takes {measured} on {workers}, more than {needed}"


def _three_digits(value: float, rounded: Callable[[float], int]) -> str:
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{rounded(value / unit) * unit:.3g}"


class DeviceTrade(msgspec.Struct, frozen=True, kw_only=True):
    """Why the number of a workload's devices changes by `num_devices` (negative: it loses them).

    `to` are those that gain devices while it loses some, `num_to` of them together: the ones that have a claim to them,
    else all others.
    `here_s` is what a device-second is worth to this workload, in seconds that all jobs together save by it, `there_s`
    what it is worth to those in `to`; None where a claim decided and not a price.
    """

    num_devices: int
    to: tuple[WorkloadId, ...] = ()
    num_to: int = 0
    here_s: float | None = None
    there_s: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole wanted state, never a list of changes: a workload that is not named holds nothing.

    `reasons` gives one dominant reason for each workload whose allocation differs from what it requested or held.
    `price_s` is what a device-second is worth now, by the last device that was given to a job: so many seconds all jobs
    together save by it (0.0: no job gains by another one; None: the policy has no prices), `prices_s` the same
    by model where devices are of several. `trades` are the changes that were decided just now, for display.
    `claims` says what some of these reasons claim about time, and `conditions` when deadlines of jobs that were never
    measured will be promised, also for display: they are not journaled.
    `plan_reasons` says why jobs on functions run as the functions of their allocation, without naming these.
    `admitted` names jobs whose deadline is promised from now on, with the planned finish of each (absolute seconds).
    `future` holds planned schedules, for display only: they are not journaled.
    `memory` comes back in the next Snapshot; it is journaled, so it must consist of plain values.
    `capacity` is what promises may count on over time (empty: all devices, or the policy promises nothing), also for
    display. `no_room` says why workloads wait that request more than nodes have beside their devices.
    `revisit_at_s` is when to decide again even without an event (None: never). `pools` names the nodes that are to
    change their label; a node that is not named keeps its label, and a drain of it is cancelled.
    """

    allocations: Mapping[WorkloadId, Allocation] = EMPTY
    admitted: Mapping[WorkloadId, float] = EMPTY
    rejected: Mapping[WorkloadId, Refusal] = EMPTY
    future: Mapping[WorkloadId, Schedule] = EMPTY
    reasons: Mapping[WorkloadId, str] = EMPTY
    claims: Mapping[WorkloadId, TimeClaim] = EMPTY
    conditions: Mapping[WorkloadId, PromiseCondition] = EMPTY
    price_s: float | None = None
    prices_s: Mapping[str, float] = EMPTY
    trades: Mapping[WorkloadId, DeviceTrade] = EMPTY
    plan_reasons: Mapping[WorkloadId, str] = EMPTY
    revisit_at_s: float | None = None
    memory: Any = None
    pools: Mapping[NodeId, Relabel] = EMPTY
    capacity: tuple[Capacity, ...] = ()
    no_room: Mapping[WorkloadId, str] = EMPTY


class Policy(Protocol):
    """Decides which workload holds how much. Pure: no clock, no randomness, no state but its frozen parameters."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the whole wanted state for this snapshot."""
        ...
