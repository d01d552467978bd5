"""What promises of the policy `springtide` may count on over time: devices that are announced."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from springtide.core.decision import EMPTY, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.blocks import same
from springtide.scheduling.policies.springtide.memory import State
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.capacity import Steps, at, changed, compared, constant, falls_of, trimmed

# What may happen at any moment is taken to happen right after a decision.
SOON_S = 1e-3
# Stands for the holder of devices that no workload may get.
NOBODY = WorkloadId("")


class Guests(NamedTuple):
    """Workloads that may stay on nodes being emptied. No other workload gets their devices, which go with their
    holders.

    `leaving` are all such devices. `promised` says for jobs in the reservation table how many of them each holds, and
    until when by its schedule; `others` are the jobs outside of it that stay, with what they hold in all.
    """

    leaving: frozenset[DeviceId] = frozenset()
    promised: Mapping[str, tuple[int, float]] = EMPTY
    others: Mapping[WorkloadId, int] = EMPTY

    def without_promised(self) -> Guests:
        """The same, where the jobs in the reservation table go elsewhere now."""
        return self._replace(promised=EMPTY)

    def shown(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot for placing: a workload that has to leave such devices lacks them; none may get them."""
        held: dict[WorkloadId, PoolAllocation] = {}
        left: list[DeviceId] = []
        for who, given in snapshot.allocations.items():
            kept = tuple([device for device in given.device_ids if device not in self.leaving])
            if len(kept) == given.num_devices or who in self.promised or who in self.others:
                held[who] = given
                continue
            left += [device for device in given.device_ids if device in self.leaving]
            if kept:
                held[who] = replace(given, device_ids=kept)
        if left:
            held[NOBODY] = PoolAllocation(device_ids=tuple(left))
        return replace(snapshot, allocations=held)


def guests_of(state: State, snapshot: Snapshot) -> Guests:
    """The jobs in the reservation table that are where it was decided, on devices of nodes that are being emptied."""
    leaving = frozenset(
        [
            device.device_id
            for node in snapshot.cluster.nodes
            if node.node_id in snapshot.drains
            for device in node.devices
        ]
    )
    if not leaving:
        return Guests()
    promised: dict[str, tuple[int, float]] = {}
    now_s = snapshot.now_s
    for key, entry in state.book.entries.items():
        given = snapshot.allocations.get(WorkloadId(key))
        if given is None or leaving.isdisjoint(given.device_ids):
            continue
        run = next((run for run in entry.was if run.start_s <= now_s < run.end_s), None)
        if run is None or run.num_devices != given.num_devices:
            continue
        if same(state.devices.get(WorkloadId(key)), given.device_ids):
            promised[key] = len(leaving.intersection(given.device_ids)), run.end_s
    return Guests(leaving, promised)


def counted_on(snapshot: Snapshot, reserve_fraction: float, num_serving: int, guests: Guests) -> Steps:
    """How many devices promises may use from each moment on: those told, until the next such moment no more than
    there are, less the reserve and `num_serving` devices of services.

    Until more are told to come, devices of nodes that are being emptied count only while their holders have them.
    """
    steps = _told(snapshot, len(snapshot.cluster.device_ids()))
    if guests.leaving:
        steps = _while_guests_stay(steps, snapshot, guests)
    return changed(steps, lambda count: max(0, count - int(count * reserve_fraction) - num_serving))


def _while_guests_stay(told: Steps, snapshot: Snapshot, guests: Guests) -> Steps:
    num_lasting = len(snapshot.cluster.device_ids()) - len(guests.leaving)
    rise_s = next((later[0] for before, later in pairwise(told) if later[1] > before[1]), math.inf)
    ends = sorted({until_s for _, until_s in guests.promised.values()})
    steps: list[tuple[float, int]] = []
    for from_s in sorted({from_s for from_s, _ in told} | {end_s for end_s in ends if end_s < rise_s}):
        moment_s = max(from_s, snapshot.now_s)
        count = at(told, moment_s)
        if moment_s < rise_s:
            count = min(count, num_lasting + sum(n for n, until_s in guests.promised.values() if until_s > moment_s))
        steps.append((from_s, count))
    return trimmed(steps, snapshot.now_s)


def _told(snapshot: Snapshot, num_there: int) -> Steps:
    if not snapshot.capacity:
        return constant(num_there)
    steps = trimmed([(step.from_s, step.num_devices) for step in snapshot.capacity], snapshot.now_s)
    return ((0.0, min(num_there, steps[0][1])), *steps[1:])


def falls_told(snapshot: Snapshot) -> tuple[float, ...]:
    """When devices go away, once for every node's worth of them. Those that are there and not counted on may go at any
    moment: at once, so that a job that is promised something now has time for it."""
    if not snapshot.capacity:
        return ()
    now_s, num_there = snapshot.now_s, len(snapshot.cluster.device_ids())
    unit = max((len(node.devices) for node in snapshot.cluster.nodes), default=1)
    steps = _told(snapshot, num_there)
    num_uncounted = -(-max(0, num_there - steps[0][1]) // unit)
    return (*[now_s + SOON_S] * num_uncounted, *falls_of(steps, now_s + SOON_S, unit))


def is_roomier(before: Steps, after: Steps, now_s: float) -> bool:
    """Whether there are more devices at any moment to come."""
    return before != after and any(to_be > there for _, _, there, to_be in compared(before, after, now_s))


def matters(state: State, snapshot: Snapshot, reserve_fraction: float, jobs: Container[WorkloadId]) -> bool:
    """Whether the capacity that is told now is a reason to decide anew: what is promised does not fit any more, or
    there is more of it and a job waits for that."""
    num_serving = 0
    if snapshot.services:
        num_serving = sum(count for who, count in state.held.items() if who not in jobs)
    steps = counted_on(snapshot, reserve_fraction, num_serving, guests_of(state, snapshot))
    told = trimmed(state.told, snapshot.now_s)
    if steps == told:
        return False
    if state.waiting and is_roomier(state.told, steps, snapshot.now_s):
        return True
    # Where promises count on more than was announced, every change of capacity is a reason to decide anew.
    return told != trimmed(state.book.steps, snapshot.now_s) or not state.book.has_room(steps, snapshot.now_s)


def note_taken(state: State, rows: Mapping[WorkloadId, PromiseRow], now_s: float) -> None:
    """Jobs whose workers all run although not all of their devices are shown any more: those are being taken.

    What they have done is not lost, but they hold nothing that they could go on with for free.
    """
    for key, entry in state.book.entries.items():
        row = rows.get(WorkloadId(key))
        if row is None or not entry.held or WorkloadId(key) in state.devices:
            continue
        if row.view.num_replicas >= entry.held and row.view.restarts.runnable_at_s <= now_s:
            entry.held, entry.residual_s = 0, 0.0
