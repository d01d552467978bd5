"""Which jobs wait for each other's devices when they move, and for how long; a cycle is broken by stopping a job. And
which jobs go on where they are although their schedules give them nothing now."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from graphlib import TopologicalSorter

from msgspec.structs import replace

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.policies.springtide.memory import State, same_devices
from springtide.scheduling.policies.springtide.rows import PromiseRow

Placed = dict[WorkloadId, PoolAllocation]


def survivors(snapshot: Snapshot, rows: Iterable[PromiseRow]) -> Placed:
    """The running jobs that lost a worker a moment ago, or that since then hold a number of devices for which there is
    no schedule: each with what it holds, where it may stay."""
    found: Placed = {}
    for row in rows:
        restarts = row.view.restarts
        held = snapshot.allocations.get(row.job_id) if restarts.losses_at_s else None
        if held is None or row.view.state is not JobState.RUNNING or restarts.starts_at_s > snapshot.now_s:
            continue
        nodes = {snapshot.cluster.node_of.get(device_id) for device_id in held.device_ids}
        # In the midst of a move it holds more devices than it may keep.
        may_stay = (
            None not in nodes and nodes.isdisjoint(snapshot.drains) and held.num_devices <= most_workers(row.view)
        )
        if may_stay and (restarts.grows_at_s > snapshot.now_s or held.num_devices not in row.sizes):
            found[row.job_id] = held
    return found


def not_taken(wanted: Placed, placed: Placed) -> Placed:
    """Those of the wanted allocations that are of no workload in `placed`, on devices that none of these has."""
    taken = {device_id for given in placed.values() for device_id in given.device_ids}
    return {who: given for who, given in wanted.items() if who not in placed and taken.isdisjoint(given.device_ids)}


def jobs_to_stop_first(
    snapshot: Snapshot, placed: Placed, hurried: Collection[WorkloadId] = frozenset()
) -> set[WorkloadId]:
    """The running jobs to stop before they get their new devices: those in `hurried` whose devices others get, and
    those that would wait for each other's devices in a cycle otherwise."""
    held = snapshot.allocations
    holder = {device: who for who in hurried if who in held for device in held[who].device_ids}
    stopped = {
        holder[device]
        for who, allocation in (placed.items() if holder else ())
        for device in allocation.device_ids
        if holder.get(device, who) != who
    }
    waits = {
        workload_id: others - stopped
        for workload_id, others in _waits_for(snapshot, placed).items()
        if workload_id in held and workload_id not in stopped
    }
    return stopped | _cycle_breakers(waits, snapshot)


def hurry(state: State, snapshot: Snapshot, placed: Placed, spare: Container[WorkloadId], workload_id: str) -> bool:
    """Stop the moving jobs of `spare` first that this workload waits for, directly or through others
    (`State.hurried`): it cannot wait until they are warm elsewhere. Returns whether there were any more of them."""
    found = waited_for(state, snapshot, placed, workload_id)
    more = {who for who in found if who in spare} - state.hurried
    state.hurried |= more
    return bool(more)


def waits_anew(state: State, snapshot: Snapshot, placed: Placed, workload_id: str) -> bool:
    """Whether one of the jobs that this workload waits for, directly or through others, begins to move now: to other
    devices than by the last plan."""
    return any(
        not same_devices(state.devices.get(who), placed[who].device_ids)
        for who in waited_for(state, snapshot, placed, workload_id)
    )


def waited_for(state: State, snapshot: Snapshot, placed: Placed, workload_id: str) -> set[WorkloadId]:
    """The moving jobs that hold devices this workload is to get, and those that these wait for."""
    waits, warming = _waits_for(snapshot, placed), _warming(state, snapshot, placed)
    found, left = set[WorkloadId](), [WorkloadId(workload_id)]
    while left:
        who = left.pop()
        others = {warming[device] for device in placed[who].device_ids if device in warming} | waits.get(who, set())
        left += sorted(others - found)
        found |= others
    return found


def delays(state: State, snapshot: Snapshot, placed: Placed) -> Mapping[WorkloadId, float]:
    """For how many seconds other jobs still hold the new devices of each job: a job that moves, or is moving already,
    keeps its devices until its workers on the new ones are warm."""
    held, warming = snapshot.allocations, _warming(state, snapshot, placed)
    waits, twice = _waits_for(snapshot, placed), _changing_twice(snapshot, placed)
    if not waits and not warming and not twice:
        return {}
    # A job that is stopped first delays no other job.
    stopped = jobs_to_stop_first(snapshot, placed, state.hurried)
    movers = {who: [other for other in others if other not in stopped] for who, others in waits.items()}
    later = state.reservations.costs.later
    found: dict[WorkloadId, float] = {}
    changed = [who for who, allocation in placed.items() if held.get(who) is not allocation]
    for workload_id in (*TopologicalSorter(movers).static_order(), *changed):
        if workload_id in found:
            continue
        moving = {warming[device] for device in placed[workload_id].device_ids if device in warming}
        moving -= stopped | {workload_id}
        found[workload_id] = max(
            *(later[placed[other].num_devices] + found[other] for other in movers.get(workload_id, ())),
            *(later[placed[other].num_devices] for other in moving),
            0.0,
            0.0,
        )
    return {who: found[who] + (later[twice[who]] if who in twice else 0.0) for who in changed}


def _warming(state: State, snapshot: Snapshot, placed: Placed) -> dict[DeviceId, WorkloadId]:
    """The devices that jobs hold which are moving already, or giving devices up: each with its job."""
    return {
        device: workload_id
        for workload_id, allocation in snapshot.allocations.items()
        if (own := state.devices.get(workload_id)) is not allocation.device_ids
        and own
        and len(allocation.device_ids) > len(own)
        if workload_id in placed
        for device in allocation.device_ids
    }


def _changing_twice(snapshot: Snapshot, placed: Placed) -> dict[WorkloadId, int]:
    """The running jobs that give devices up and get others which are still held: they shrink at once and grow when
    those are free, two changes. Each with the number of devices that it keeps meanwhile."""
    held: set[DeviceId] | None = None
    found: dict[WorkloadId, int] = {}
    for view in snapshot.jobs:
        before, after = snapshot.allocations.get(view.job.job_id), placed.get(view.job.job_id)
        if before is None or after is None or before is after or view.state is not JobState.RUNNING:
            continue
        mine, given = set(before.device_ids), set(after.device_ids)
        # It may hold devices that are left out here, since a workload with a part of them has a stronger claim.
        gives_up = bool(mine - given) or view.num_replicas > len(mine)
        if not (gives_up and mine & given and given - mine):
            continue
        if held is None:
            held = {device for other in snapshot.allocations.values() for device in other.device_ids}
        if (given - mine) & held:
            found[view.job.job_id] = len(mine & given)
    return found


def without_waits(
    placed: Placed, snapshot: Snapshot, services: Iterable[WorkloadId], spare: Iterable[WorkloadId]
) -> Placed:
    """The same counts, with no replica on a device that a job still trains on while it moves, as far as possible.

    The replica gets a device that is idle or given up at once, of which none was made or one by which a job of `spare`
    would start or grow; that job waits instead.
    """
    late: set[DeviceId] = set()
    for who, before in snapshot.allocations.items():
        after = placed.get(who)
        if after is not None and after is not before:
            mine = set(before.device_ids)
            if not mine.issuperset(after.device_ids):
                late.update(mine.difference(after.device_ids))
    waiting = [
        (who, device) for who in services if who in placed for device in placed[who].device_ids if device in late
    ]
    if not waiting:
        return placed
    held = {who: set(allocation.device_ids) for who, allocation in snapshot.allocations.items()}
    given = {who: set(allocation.device_ids) for who, allocation in placed.items()}
    used = set().union(*given.values())
    free: list[tuple[WorkloadId | None, DeviceId]] = [
        (None, device) for device in snapshot.cluster.device_ids() if device not in used and device not in late
    ]
    for who in reversed(list(spare)):
        mine = held.get(who, set())
        if who in placed and mine <= given[who]:
            free += [(who, device) for device in placed[who].device_ids if device not in mine and device not in late]
    result = dict(placed)
    for (service_id, device), (job_id, sooner) in zip(waiting, free, strict=False):
        for each, old, new in ((service_id, device, sooner), (job_id, sooner, device)):
            if each is not None:
                devices = tuple([new if at == old else at for at in result[each].device_ids])
                result[each] = replace(result[each], device_ids=devices)
    return result


def _waits_for(snapshot: Snapshot, placed: Placed) -> dict[WorkloadId, set[WorkloadId]]:
    """For each job that is to get devices of moving jobs: those jobs. They move to other devices themselves."""
    held = snapshot.allocations
    # A job that only gives devices up is not among them: it does so at once.
    movers = [
        workload_id
        for workload_id, allocation in placed.items()
        if (before := held.get(workload_id)) is not None
        and before is not allocation
        and before.device_ids != allocation.device_ids
        and not set(allocation.device_ids) <= set(before.device_ids)
    ]
    if not movers:
        return {}
    holder = {device: workload_id for workload_id in movers for device in held[workload_id].device_ids}
    waits: dict[WorkloadId, set[WorkloadId]] = {}
    for workload_id, allocation in placed.items():
        if held.get(workload_id) is allocation:
            continue
        others = {holder[device] for device in allocation.device_ids if device in holder} - {workload_id}
        if others:
            waits[workload_id] = others
    return waits


def _cycle_breakers(waits: Mapping[WorkloadId, set[WorkloadId]], snapshot: Snapshot) -> set[WorkloadId]:
    """The jobs to take out so that no job waits for itself, directly or through other jobs: as far as possible none
    that goes on after the loss of a worker."""
    survivors = {view.job.job_id for view in snapshot.jobs if view.restarts.grows_at_s > snapshot.now_s}
    found: set[WorkloadId] = set()
    while True:
        # Remove every job that waits for no waiting job, until only cycles are left.
        waits = {
            workload_id: left
            for workload_id, others in waits.items()
            if (left := {o for o in others if o in waits and o not in found})
        }
        if not waits:
            return found
        if not any(not (others & waits.keys()) for others in waits.values()):
            first = min(waits, key=lambda who: (who in survivors, who))
            found.add(first)
            waits.pop(first)
