"""How many devices the promises of the policy `springtide` may use over time, also while nodes are drained."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from springtide.core.decision import EMPTY, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.memory import State, same_devices
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.profile import Steps, compare, constant, devices_at, falls_of, mapped, trimmed

# Devices that may go away at any moment are assumed to go so long after a decision.
SOON_S = 1e-3
# The holder, in the snapshot for placement, of devices that no workload may get.
NO_WORKLOAD = WorkloadId("")


class StayingJobs(NamedTuple):
    """The jobs that may stay on draining nodes. When one of them ends, no other workload gets its devices there.

    `draining` are all devices of these nodes. `promised` maps jobs of the reservation table to how many of these
    devices they hold, and until when by their schedules. `others` maps jobs outside the table to how many devices they
    hold, on these nodes or not. `survivors` are the jobs, on other nodes, that go on after a loss where they are
    although nothing is planned for them now.
    """

    draining: frozenset[DeviceId] = frozenset()
    promised: Mapping[str, tuple[int, float]] = EMPTY
    others: Mapping[WorkloadId, int] = EMPTY
    survivors: frozenset[WorkloadId] = frozenset()

    def without_promised(self) -> StayingJobs:
        """The same, with no job of the reservation table staying."""
        return self._replace(promised=EMPTY)

    def for_placement(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in which devices are chosen: draining devices of workloads that have to leave them, and those of
        the survivors, belong to NO_WORKLOAD."""
        held: dict[WorkloadId, PoolAllocation] = {}
        left: list[DeviceId] = []
        for workload_id, allocation in snapshot.allocations.items():
            if workload_id in self.survivors:
                left += allocation.device_ids
                continue
            kept = tuple([device for device in allocation.device_ids if device not in self.draining])
            if len(kept) == allocation.num_devices or workload_id in self.promised or workload_id in self.others:
                held[workload_id] = allocation
                continue
            left += [device for device in allocation.device_ids if device in self.draining]
            if kept:
                held[workload_id] = replace(allocation, device_ids=kept)
        if left:
            held[NO_WORKLOAD] = PoolAllocation(device_ids=tuple(left))
        return replace(snapshot, allocations=held)


def find_staying_jobs(state: State, snapshot: Snapshot) -> StayingJobs:
    """The jobs of the reservation table that hold the devices decided for them, some of these on draining nodes."""
    draining = frozenset(
        [
            device.device_id
            for node in snapshot.cluster.nodes
            if node.node_id in snapshot.drains
            for device in node.devices
        ]
    )
    if not draining:
        return StayingJobs()
    promised: dict[str, tuple[int, float]] = {}
    now_s = snapshot.now_s
    for key, entry in state.reservations.entries.items():
        allocation = snapshot.allocations.get(WorkloadId(key))
        if allocation is None or draining.isdisjoint(allocation.device_ids):
            continue
        run = next((run for run in entry.committed if run.start_s <= now_s < run.end_s), None)
        if run is None or run.num_devices != allocation.num_devices:
            continue
        if same_devices(state.devices.get(WorkloadId(key)), allocation.device_ids):
            promised[key] = len(draining.intersection(allocation.device_ids)), run.end_s
    return StayingJobs(draining, promised)


def promisable_capacity(snapshot: Snapshot, reserve_fraction: float, num_serving: int, staying: StayingJobs) -> Steps:
    """How many devices promises may use from each moment on: the announced ones, at present no more than there are,
    less the reserve and `num_serving` devices of services.

    Up to the first announced rise, devices of draining nodes count only while a job stays on them.
    """
    steps = _announced(snapshot, len(snapshot.cluster.device_ids()))
    if staying.draining:
        steps = _while_jobs_stay(steps, snapshot, staying)
    return mapped(steps, lambda count: max(0, count - int(count * reserve_fraction) - num_serving))


def _while_jobs_stay(announced: Steps, snapshot: Snapshot, staying: StayingJobs) -> Steps:
    num_lasting = len(snapshot.cluster.device_ids()) - len(staying.draining)
    rise_s = next((later[0] for before, later in pairwise(announced) if later[1] > before[1]), math.inf)
    ends = sorted({until_s for _, until_s in staying.promised.values()})
    steps: list[tuple[float, int]] = []
    for from_s in sorted({from_s for from_s, _ in announced} | {end_s for end_s in ends if end_s < rise_s}):
        moment_s = max(from_s, snapshot.now_s)
        count = devices_at(announced, moment_s)
        if moment_s < rise_s:
            count = min(count, num_lasting + sum(n for n, until_s in staying.promised.values() if until_s > moment_s))
        steps.append((from_s, count))
    return trimmed(steps, snapshot.now_s)


def _announced(snapshot: Snapshot, num_present: int) -> Steps:
    if not snapshot.capacity:
        return constant(num_present)
    steps = trimmed([(step.from_s, step.num_devices) for step in snapshot.capacity], snapshot.now_s)
    return ((0.0, min(num_present, steps[0][1])), *steps[1:])


def announced_falls(snapshot: Snapshot) -> tuple[float, ...]:
    """When devices go away, once for every node's worth of them. Present devices that were not announced may go at any
    moment; they count as going at once, so that every promise made now has time for that change."""
    if not snapshot.capacity:
        return ()
    now_s, num_present = snapshot.now_s, len(snapshot.cluster.device_ids())
    unit = max((len(node.devices) for node in snapshot.cluster.nodes), default=1)
    steps = _announced(snapshot, num_present)
    num_uncounted = -(-max(0, num_present - steps[0][1]) // unit)
    return (*[now_s + SOON_S] * num_uncounted, *falls_of(steps, now_s + SOON_S, unit))


def has_more_devices(before: Steps, after: Steps, now_s: float) -> bool:
    """Whether `after` has more devices than `before` at any moment from `now_s` on."""
    return before != after and any(later > earlier for _, _, earlier, later in compare(before, after, now_s))


def capacity_matters(state: State, snapshot: Snapshot, reserve_fraction: float, jobs: Container[WorkloadId]) -> bool:
    """Whether the announced capacity is a reason to decide anew: promises no longer fit into it, or it has grown while
    a job waits for devices."""
    num_serving = 0
    if snapshot.services:
        num_serving = sum(
            count for who, count in state.held.items() if who not in jobs and WorkloadId(who) not in state.lent
        )
    steps = promisable_capacity(snapshot, reserve_fraction, num_serving, find_staying_jobs(state, snapshot))
    known = trimmed(state.promisable, snapshot.now_s)
    if steps == known:
        return False
    if state.waiting and has_more_devices(state.promisable, steps, snapshot.now_s):
        return True
    # Where promises use more than they may, every change of capacity is a reason to decide anew.
    reservations = state.reservations
    return known != trimmed(reservations.steps, snapshot.now_s) or not reservations.has_room(steps, snapshot.now_s)


def forget_taken_devices(state: State, rows: Mapping[WorkloadId, PromiseRow], now_s: float) -> None:
    """Count jobs whose devices are being taken as holding none. Such a job has no devices in the decided plan any more,
    but all of its workers still run.

    It loses no progress, but going on will cost it a change.
    """
    for key, entry in state.reservations.entries.items():
        row = rows.get(WorkloadId(key))
        if row is None or not entry.held or WorkloadId(key) in state.devices:
            continue
        if row.view.num_replicas >= entry.held and row.view.restarts.starts_at_s <= now_s:
            entry.held, entry.residual_s = 0, 0.0
