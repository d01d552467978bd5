"""Which jobs wait for which when jobs of the policy `springtide` change places: circles, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.memory import State

Placed = dict[WorkloadId, PoolAllocation]


def detours(snapshot: Snapshot, placed: Placed) -> set[WorkloadId]:
    """The running jobs that have to let go of their devices before they go to their new ones, or two would wait for
    each other: those whose new devices are held by another job that moves, too."""
    waits = {who: others for who, others in _waits(snapshot, placed).items() if who in snapshot.allocations}
    return _circles(waits)


def delays(state: State, snapshot: Snapshot, placed: Placed) -> Mapping[WorkloadId, float]:
    """For how many seconds the new devices of a job are still held by others: a job that moves keeps its own until
    its workers on the new ones are warm, and so does one that is moving already."""
    held = snapshot.allocations
    decided = state.devices
    warming = {
        device: who
        for who, given in held.items()
        if (mine := decided.get(who)) is not given.device_ids and mine and len(given.device_ids) > len(mine)
        if who in placed
        for device in given.device_ids
    }
    waits = _waits(snapshot, placed)
    if not waits and not warming:
        return {}
    circles = _circles({who: others for who, others in waits.items() if who in held})
    found: dict[WorkloadId, float] = {}
    later = state.book.costs.later

    def delay_s(who: WorkloadId) -> float:
        if who not in found:
            # A job that lets go first keeps no other waiting.
            found[who] = 0.0
            movers = [other for other in waits.get(who, ()) if other not in circles]
            under_way = {warming[device] for device in placed[who].device_ids if device in warming} - {who}
            found[who] = max(
                *(later[placed[other].num_devices] + delay_s(other) for other in movers),
                *(later[placed[other].num_devices] for other in under_way),
                0.0,
                0.0,
            )
        return found[who]

    return {who: delay_s(who) for who, given in placed.items() if held.get(who) is not given}


def _waits(snapshot: Snapshot, placed: Placed) -> dict[WorkloadId, set[WorkloadId]]:
    """For each job that is to get devices held by others: those of the others that move to other devices themselves."""
    held = snapshot.allocations
    # A job that only gives devices up does so at once.
    movers = [
        who
        for who, given in placed.items()
        if (before := held.get(who)) is not None
        and before is not given
        and before.device_ids != given.device_ids
        and not set(given.device_ids) <= set(before.device_ids)
    ]
    if not movers:
        return {}
    holder = {device: who for who in movers for device in held[who].device_ids}
    waits: dict[WorkloadId, set[WorkloadId]] = {}
    for who, given in placed.items():
        if held.get(who) is given:
            continue
        others = {holder[device] for device in given.device_ids if device in holder} - {who}
        if others:
            waits[who] = others
    return waits


def _circles(waits: Mapping[WorkloadId, set[WorkloadId]]) -> set[WorkloadId]:
    """The jobs to take out so that no job waits for itself, directly or through others."""
    found: set[WorkloadId] = set()
    while True:
        # Remove every job that waits for no waiting job, until only circles are left.
        waits = {
            who: left for who, others in waits.items() if (left := {o for o in others if o in waits and o not in found})
        }
        if not waits:
            return found
        if not any(not (others & waits.keys()) for others in waits.values()):
            first = min(waits)
            found.add(first)
            waits.pop(first)
