"""From numbers of devices to devices: compact places, moves that jobs can afford, and their cost in the schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from springtide.core.decision import EMPTY, PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.placing import place, try_place
from springtide.scheduling.placement.relocation import SearchBudget
from springtide.scheduling.placement.topology import Blocks, Census, Layout, layout_of
from springtide.scheduling.policies.springtide.capacity import NO_WORKLOAD, StayingJobs
from springtide.scheduling.policies.springtide.memory import (
    Devices,
    State,
    restore_speed,
    same_devices,
)
from springtide.scheduling.policies.springtide.moves import Placed, waited_for
from springtide.scheduling.policies.springtide.packing import Packing
from springtide.scheduling.policies.springtide.schedules import (
    accept_places,
    apply_slowdown,
    drop_newcomer,
    fits,
    keep_at_lower_speed,
    keep_until_next_change,
    nodes_factor,
    placed_factor,
    price_changes,
    scattered_jobs,
    shrink_another,
    start_later,
)
from springtide.solvers.reservations.fit import work_done
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# Rounds of replanning for jobs whose devices are too scattered; after that many, scattered devices are accepted.
MAX_ROUNDS = 12
# How often one job is replanned in these rounds.
MAX_ADJUSTMENTS = 3


def assign_devices(
    state: State,
    staying: StayingJobs,
    snapshot: Snapshot,
    spare: Mapping[WorkloadId, int],
    services: Mapping[WorkloadId, int],
    effort: int,
) -> Placed:
    """Choose the devices of every workload, and change the schedules in the reservation table to what this costs.

    `spare` counts the devices of jobs outside the reservation table. The jobs in `staying` keep their devices. A job
    that would be scattered over more nodes than it needs is replanned: it keeps its devices, gets fewer, or starts
    later. A job that is moved pays for the move in its schedule. No promise in the table is broken by this.
    """
    reservations = state.reservations
    layout = layout_of(snapshot.cluster)
    if staying.draining or staying.survivors:
        snapshot = staying.for_placement(snapshot)
        if NO_WORKLOAD in snapshot.allocations:
            services = {**services, NO_WORKLOAD: snapshot.allocations[NO_WORKLOAD].num_devices}
    held = snapshot.allocations
    reservations.effort = max(reservations.effort, effort)
    # Jobs that keep their devices: those that cannot change their workers while they run, survivors of a loss, those
    # that may stay.
    fixed: set[WorkloadId] = {view.job.job_id for view in snapshot.jobs if not view.job.elastic} | state.pinned.keys()
    fixed &= held.keys()
    fixed |= {WorkloadId(key) for key in (*staying.promised, *staying.others)}
    num_adjustments: dict[str, int] = {}
    budget = SearchBudget()
    compact = _find_compact_places(state, layout, snapshot, {**services, **_counts(reservations), **spare}, fixed)
    for number in range(MAX_ROUNDS + 1):
        spare = _within(spare, reservations, state.num_surplus)
        counts = {**services, **_counts(reservations), **spare}
        wanted = compact if number == 0 else EMPTY
        placed = _choose_places(state, layout, snapshot, counts, spare, fixed, wanted, budget)
        if number == MAX_ROUNDS:
            accept_places(state, layout, snapshot, placed, spare)
            break
        broken = price_changes(state, layout, snapshot, placed, spare)
        scattered = scattered_jobs(state, layout, placed)
        if not broken and not scattered:
            break
        is_planned_anew = False
        for key in dict.fromkeys([*broken, *scattered]):
            num_adjustments[key] = num_adjustments.get(key, 0) + 1
            is_replanned = num_adjustments[key] <= MAX_ADJUSTMENTS and _adjust_schedule(
                state, key, layout, placed, fixed, is_scattered=key in scattered
            )
            if is_replanned or key not in reservations.entries:
                continue
            if key in scattered:
                is_planned_anew |= apply_slowdown(state, key, layout, placed)
            elif key in state.newcomers:
                if num_adjustments[key] > 1:
                    reservations.drop(key)
            else:
                _settle_others(state, snapshot, placed, fixed, key)
        if (
            not (broken or is_planned_anew)
            and {**services, **_counts(reservations), **spare} == counts
            and not fixed.intersection(scattered)
        ):
            break
    _expect_places(state, layout, placed, {*services, *fixed})
    placed.pop(NO_WORKLOAD, None)
    return placed


def _expect_places(state: State, layout: Layout, placed: Placed, settled: Iterable[WorkloadId]) -> None:
    """Plan jobs that start later at the speed of the devices that they can have beside services and jobs that do not
    move. Newcomers that would miss their deadline there are dropped; nothing has been promised to them yet."""
    reservations = state.reservations
    later = [
        key
        for key, entry in reservations.entries.items()
        if entry.is_promised and not entry.is_late and key not in state.slowed and WorkloadId(key) not in placed
    ]
    if not later:
        return
    taken = 0
    for workload_id in settled:
        if workload_id in placed:
            taken |= layout.bitmap(placed[workload_id].device_ids)
    census = Census(layout, layout.present & ~taken)
    for key in later:
        entry = reservations.entries[key]
        count = entry.runs[0].num_devices if entry.runs else 0
        if not 0 < count <= census.num_idle:
            continue
        factor = nodes_factor(layout, census.fewest_nodes(count), count)
        if factor == 1.0 or keep_at_lower_speed(state, entry, factor):
            continue
        if key not in state.newcomers:
            restore_speed(state, entry)
        elif not reservations.plan_anew(entry):
            drop_newcomer(state, key)


def _choose_places(
    state: State,
    layout: Layout,
    snapshot: Snapshot,
    counts: Mapping[WorkloadId, int],
    spare: Mapping[WorkloadId, int],
    fixed: set[WorkloadId],
    compact: Mapping[WorkloadId, Devices],
    budget: SearchBudget,
) -> Placed:
    """Places for these counts: as decided before where that still fits, in `compact` places where there are some, and
    packed anew if a job would be scattered. The jobs in `fixed` do not move."""
    held = snapshot.allocations
    wanted = {
        workload_id: devices
        for workload_id, devices in state.devices.items()
        if workload_id in counts and (workload_id not in held or held[workload_id].device_ids != devices)
    }
    wanted.update(compact)
    wanted.update({who: devices for who, devices in state.pinned.items() if len(devices) == counts.get(who)})
    movable = {workload_id for workload_id in spare if workload_id in held} - fixed

    def is_scattered(workload_id: WorkloadId, bits: int) -> bool:
        return (
            workload_id in state.reservations.entries
            and bits != layout.bitmap(state.devices.get(workload_id, ()))
            and nodes_factor(layout, len(layout.nodes_of(bits)), bits.bit_count()) < state.slowed.get(workload_id, 1.0)
        )

    found = try_place(counts, snapshot, movable=movable, wanted=wanted, budget=budget, rejects=is_scattered)
    if found is not None and not scattered_jobs(state, layout, found):
        return found
    movable |= {WorkloadId(key) for key in movable_jobs(state)} - fixed
    placed = place(counts, snapshot, movable=movable, wanted=wanted, budget=budget)
    return _pack(state, layout, snapshot, placed, movable, spare, fixed, budget)


def _within(
    spare: Mapping[WorkloadId, int], reservations: ReservationTable, num_surplus: int
) -> Mapping[WorkloadId, int]:
    """The jobs outside the table that still fit after replanning; those at the end of `spare` are left out first."""
    room = reservations.profile.at(reservations.now_s) + num_surplus
    if sum(spare.values()) <= room:
        return spare
    fitting: dict[WorkloadId, int] = {}
    for workload_id, count in spare.items():
        if count <= room:
            fitting[workload_id] = count
            room -= count
    return fitting


def _pack(
    state: State,
    layout: Layout,
    snapshot: Snapshot,
    placed: Placed,
    movable: set[WorkloadId],
    spare: Mapping[WorkloadId, int],
    fixed: set[WorkloadId],
    budget: SearchBudget,
) -> Placed:
    """Move other jobs out of aligned blocks for the jobs that would be scattered over more nodes than they need."""
    scattered = [who for key in scattered_jobs(state, layout, placed) if (who := WorkloadId(key)) not in fixed]
    if not scattered:
        return placed
    # A job that starts or changes its size now does not pay more for other devices.
    free = {
        workload_id
        for workload_id, allocation in placed.items()
        if (workload_id in state.reservations.entries or workload_id in spare)
        and workload_id not in fixed
        and not same_devices(state.devices.get(workload_id), allocation.device_ids)
    }
    packing = Packing(
        layout,
        {workload_id: layout.bitmap(allocation.device_ids) for workload_id, allocation in placed.items()},
        movable | free,
        budget,
    )
    scattered.sort(key=lambda workload_id: (-placed[workload_id].num_devices, workload_id))
    # Where no block can be cleared for all of it, since services and parts do not move, on fewer nodes at least.
    is_crowded = bool(snapshot.services) or len({len(node.devices) for node in snapshot.cluster.nodes}) > 1
    for workload_id in scattered:
        if not packing.gather(workload_id) and is_crowded:
            packing.gather_on_nodes(workload_id, spare)
    result = dict(placed)
    for workload_id in packing.moved:
        bits = packing.places[workload_id]
        allocation = snapshot.allocations.get(workload_id)
        held = allocation.device_ids if allocation is not None else ()
        if allocation is not None and layout.bitmap(held) == bits:
            result[workload_id] = allocation
            continue
        kept = [device for device in held if device in layout.address_of and bits >> layout.address_of[device] & 1]
        devices = (*kept, *(device for device in layout.devices_of(bits) if device not in kept))
        result[workload_id] = PoolAllocation(
            device_ids=devices, global_batch_size=placed[workload_id].global_batch_size
        )
    return result


def _find_compact_places(
    state: State, layout: Layout, snapshot: Snapshot, counts: Mapping[WorkloadId, int], fixed: set[WorkloadId]
) -> dict[WorkloadId, Devices]:
    """Idle compact places for scattered jobs that can afford to move."""
    found: dict[WorkloadId, Devices] = {}
    idle: Blocks | None = None
    for key in movable_jobs(state) if state.slowed else ():
        workload_id = WorkloadId(key)
        if key not in state.slowed or workload_id in fixed:
            continue
        allocation = snapshot.allocations.get(workload_id)
        if (
            allocation is None
            or allocation.num_devices != counts.get(workload_id)
            or not same_devices(state.devices.get(workload_id), allocation.device_ids)
        ):
            continue
        if idle is None:
            taken = 0
            for held in snapshot.allocations.values():
                taken |= layout.bitmap(held.device_ids)
            idle = Blocks(layout, layout.present & ~taken)
        if idle.fits(allocation.num_devices):
            chosen = idle.take(allocation.num_devices)
            found[workload_id] = tuple(
                [device for number in chosen if (device := layout.device_at[number]) is not None]
            )
    return found


def _counts(reservations: ReservationTable) -> dict[WorkloadId, int]:
    now_s = reservations.now_s
    counts = {WorkloadId(key): entry.size_at(now_s) for key, entry in reservations.entries.items()}
    return {workload_id: count for workload_id, count in counts.items() if count}


def movable_jobs(state: State) -> list[str]:
    """The running jobs that can pay for a move now, from their reserve or from the time left to their deadline."""
    able: list[str] = []
    reservations = state.reservations
    now_s = reservations.now_s
    for key, entry in reservations.entries.items():
        n = entry.size_at(now_s)
        if not n or n != entry.held:
            continue
        cost_s = reservations.costs.later[n] * (2.0 if key in state.lone else 1.0)
        last = entry.runs[-1]
        spare_work = work_done(entry.runs, entry.rates, last.end_s) - _scheduled_work(entry)
        spare_s = spare_work / entry.rates[last.num_devices]
        if entry.is_late or spare_s >= cost_s or last.end_s - spare_s + cost_s <= entry.deadline_s:
            able.append(key)
    return able


def _scheduled_work(entry: Entry) -> float:
    return entry.work if entry.runs is entry.committed else entry.left


def _adjust_schedule(
    state: State, key: str, layout: Layout, placed: Placed, fixed: set[WorkloadId], *, is_scattered: bool
) -> bool:
    """Replan a job that cannot be placed as planned, by the first of several ways that works; returns whether anything
    was changed."""
    reservations = state.reservations
    entry = reservations.entries.get(key)
    if entry is None:
        return True
    now_s = reservations.now_s
    current = entry.size_at(now_s)
    if current == entry.held and entry.held:
        # It was to be moved, but cannot pay for that or would be scattered: it keeps its devices.
        is_new = WorkloadId(key) not in fixed
        fixed.add(WorkloadId(key))
        return is_new
    if _go_on_as_committed(reservations, entry):
        return True
    if entry.held and keep_until_next_change(reservations, entry):
        return True
    taken = 0
    for workload_id, allocation in placed.items():
        if workload_id != key:
            taken |= layout.bitmap(allocation.device_ids)
    idle = Blocks(layout, layout.present & ~taken)
    sizes = entry.sizes
    placeable = [n for n in sizes if n <= entry.held or (n != current and idle.fits(n))]
    if placeable:
        entry.sizes = placeable
        is_planned = reservations.plan_anew(entry)
        entry.sizes = sizes
        if is_planned:
            return True
    if shrink_another(reservations, entry, current):
        return True
    if is_scattered and not entry.held and not entry.is_late:
        # No place for it is known to come: it starts now, if it is in time where it can be.
        if keep_at_lower_speed(state, entry, placed_factor(layout, placed[WorkloadId(key)].device_ids)):
            return True
        restore_speed(state, entry)
    return start_later(reservations, entry)


def _settle_others(state: State, snapshot: Snapshot, placed: Placed, fixed: set[WorkloadId], key: str) -> None:
    """Let other jobs of the table stay where they are, since a promised job would be late if it waited until they have
    moved: those that only jobs on its devices wait for, or where there are none, all."""
    job_id, entries = WorkloadId(key), state.reservations.entries
    if not entries[key].is_promised or entries[key].is_late:
        return
    mine = set(placed[job_id].device_ids)
    waited = {who for who in waited_for(state, snapshot, placed, key) if who in entries} - fixed
    indirect = {who for who in waited if mine.isdisjoint(snapshot.allocations[who].device_ids)}
    settled = indirect or {WorkloadId(who) for who in entries if who in snapshot.allocations}
    fixed |= settled - {job_id}


def _go_on_as_committed(reservations: ReservationTable, entry: Entry) -> bool:
    """Let the job have the schedule of the last decision again, if by that it keeps its devices or starts later."""
    now_s, committed = reservations.now_s, entry.committed
    if not committed:
        return False
    if entry.held:
        remaining = next((run for run in committed if run.end_s > now_s), None)
        is_possible = remaining is not None and remaining.num_devices == entry.held
    else:
        is_possible = committed[0].start_s > now_s
    if not (is_possible and fits(reservations, entry, committed)):
        return False
    reservations.change_runs(entry, committed)
    return True
