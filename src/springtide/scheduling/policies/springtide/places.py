"""From schedules to devices: compact places, moves for jobs that can afford one, and what each place costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.placing import place
from springtide.scheduling.placement.topology import Blocks, Layout, layout_of
from springtide.scheduling.policies.springtide.blocks import is_used, same
from springtide.scheduling.policies.springtide.capacity import NOBODY, Guests
from springtide.scheduling.policies.springtide.memory import PAD_S, Devices, State
from springtide.scheduling.policies.springtide.moves import Placed, delays
from springtide.scheduling.policies.springtide.packing import Packing
from springtide.solvers.reservations.fit import Costs, PlannedStretch, Runs, work_done
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# So often a plan is changed because its jobs cannot lie close together; then they lie as they can.
MAX_ROUNDS = 12
MAX_RELENTS = 3
# On 2**3 times as many nodes as it needs a job is 2.17 times slower (ElasticFlow, Figure 2(b)).
SCATTERED_SLOWDOWN = 2.17
SCATTERED_DOUBLINGS = 3


def settle(
    state: State,
    guests: Guests,
    snapshot: Snapshot,
    spare: Mapping[WorkloadId, int],
    services: Mapping[WorkloadId, int],
    effort: int,
) -> Placed:
    """Place each job, and change the schedules to what their places cost.

    `guests` stay where they are. `spare` counts the devices of jobs outside the reservation table. A job whose group
    would lie on more nodes than it needs gets other devices in time: it keeps what it has, becomes smaller, or waits. A
    job that is moved pays for it in its schedule. The reservation table is changed accordingly; every promise in it
    still holds.
    """
    book = state.book
    layout = layout_of(snapshot.cluster)
    if guests.leaving:
        snapshot = guests.shown(snapshot)
        if NOBODY in snapshot.allocations:
            services = {**services, NOBODY: snapshot.allocations[NOBODY].num_devices}
    held = snapshot.allocations
    book.effort = max(book.effort, effort)
    # A job that cannot change its workers while it runs stays where it is.
    fixed: set[WorkloadId] = {view.job.job_id for view in snapshot.jobs if not view.job.elastic} & held.keys()
    fixed |= {WorkloadId(key) for key in (*guests.promised, *guests.others)}
    relented: dict[str, int] = {}
    gathered = _gather(state, layout, snapshot, {**services, **_counts(book), **spare}, fixed)
    for number in range(MAX_ROUNDS + 1):
        spare = _within(spare, book, state.num_surplus)
        counts = {**services, **_counts(book), **spare}
        movable = {who for who in spare if who in held} - fixed
        wanted = {
            who: devices
            for who, devices in state.devices.items()
            if who in counts and (who not in held or held[who].device_ids != devices)
        }
        if number == 0:
            wanted.update(gathered)
        wanted.update({who: devices for who, devices in state.pinned.items() if len(devices) == counts.get(who)})
        placed = place(counts, snapshot, movable=movable, wanted=wanted)
        if _scattered(state, layout, placed):
            movable |= {WorkloadId(key) for key in _can_move(book)} - fixed
            placed = place(counts, snapshot, movable=movable, wanted=wanted)
            placed = _pack(state, layout, snapshot, placed, movable, spare)
        if number == MAX_ROUNDS:
            _accept(state, layout, snapshot, placed)
            break
        troubled = _price(state, layout, snapshot, placed)
        scattered = _scattered(state, layout, placed)
        if not troubled and not scattered:
            break
        for key in dict.fromkeys([*troubled, *scattered]):
            relented[key] = relented.get(key, 0) + 1
            is_better = relented[key] <= MAX_RELENTS and _relent(state, key, layout, placed, fixed)
            if is_better or key not in book.entries:
                continue
            if key in state.newcomers and (key in scattered or relented[key] > 1):
                book.drop(key)
            elif key in scattered:
                _slow_down(state, key, layout, placed)
        if not troubled and {**services, **_counts(book), **spare} == counts and not fixed.intersection(scattered):
            break
    placed.pop(NOBODY, None)
    return placed


def _within(spare: Mapping[WorkloadId, int], book: ReservationTable, num_surplus: int) -> Mapping[WorkloadId, int]:
    """The jobs outside the table that still fit, the last ones dropped first: a promise may have been replanned."""
    room = book.profile.at(book.now_s) + num_surplus
    if sum(spare.values()) <= room:
        return spare
    fitting: dict[WorkloadId, int] = {}
    for who, count in spare.items():
        if count <= room:
            fitting[who] = count
            room -= count
    return fitting


def _pack(
    state: State,
    layout: Layout,
    snapshot: Snapshot,
    placed: Placed,
    movable: set[WorkloadId],
    spare: Mapping[WorkloadId, int],
) -> Placed:
    """Where groups would lie on more nodes than they need, let others move out of a block for them."""
    scattered = [WorkloadId(key) for key in _scattered(state, layout, placed)]
    if not scattered:
        return placed
    # A job that starts or changes its size now may as well do so elsewhere.
    free = {
        who
        for who, given in placed.items()
        if (who in state.book.entries or who in spare) and not same(state.devices.get(who), given.device_ids)
    }
    packing = Packing(layout, {who: layout.bitmap(given.device_ids) for who, given in placed.items()}, movable | free)
    scattered.sort(key=lambda who: (-placed[who].num_devices, who))
    for who in scattered:
        packing.gather(who)
    result = dict(placed)
    for who in packing.moved:
        bits = packing.places[who]
        given = snapshot.allocations.get(who)
        held = given.device_ids if given is not None else ()
        if given is not None and layout.bitmap(held) == bits:
            result[who] = given
            continue
        kept = [device for device in held if device in layout.address_of and bits >> layout.address_of[device] & 1]
        devices = (*kept, *(device for device in layout.devices_of(bits) if device not in kept))
        result[who] = PoolAllocation(device_ids=devices, global_batch_size=placed[who].global_batch_size)
    return result


def _accept(state: State, layout: Layout, snapshot: Snapshot, placed: Placed) -> None:
    """Make the schedules true to their places without changing sizes. A newcomer that would not make it there is out
    again, before anything was promised to it."""
    book, now_s = state.book, state.book.now_s
    waits_s = delays(state, snapshot, placed)
    for key, entry in list(book.entries.items()):
        given = placed.get(WorkloadId(key))
        if given is None or same(state.devices.get(WorkloadId(key)), given.device_ids):
            continue
        _speed_up(state, entry)
        factor = _placed_factor(layout, given.device_ids)
        if factor < 1.0:
            state.slowed[key] = factor
            entry.rates = tuple([rate * factor for rate in entry.rates])
        going_on = [run for run in entry.runs if run.end_s > now_s]
        cost_s = _cost_s(state, layout, given) + waits_s.get(WorkloadId(key), 0.0)
        runs = retime(going_on, entry.left, entry.rates, now_s, cost_s, book.costs)
        if fits(book, entry, runs):
            book.change_runs(entry, runs)
        elif key in state.newcomers:
            book.drop(key)
            del placed[WorkloadId(key)]


def _gather(
    state: State, layout: Layout, snapshot: Snapshot, counts: Mapping[WorkloadId, int], fixed: set[WorkloadId]
) -> dict[WorkloadId, Devices]:
    """Compact places for jobs that lie scattered, if there are some and the jobs can afford to move."""
    found: dict[WorkloadId, Devices] = {}
    idle: Blocks | None = None
    for key in _can_move(state.book) if state.slowed else ():
        who = WorkloadId(key)
        if key not in state.slowed or who in fixed:
            continue
        given = snapshot.allocations.get(who)
        if given is None or given.num_devices != counts.get(who) or not same(state.devices.get(who), given.device_ids):
            continue
        if idle is None:
            taken = 0
            for held in snapshot.allocations.values():
                taken |= layout.bitmap(held.device_ids)
            idle = Blocks(layout, layout.present & ~taken)
        if idle.fits(given.num_devices):
            chosen = idle.take(given.num_devices)
            found[who] = tuple([device for at in chosen if (device := layout.device_at[at]) is not None])
    return found


def _speed_up(state: State, entry: Entry) -> None:
    """A job that gets another place is as fast as its profile says again."""
    factor = state.slowed.pop(entry.key, 1.0)
    if factor != 1.0:
        entry.rates = tuple([rate / factor for rate in entry.rates])


def _slow_down(state: State, key: str, layout: Layout, placed: Placed) -> bool:
    """A group that lies on more nodes than it needs is slower: its schedule says so. Returns whether sizes change."""
    book = state.book
    entry = book.entries[key]
    given = placed[WorkloadId(key)]
    _speed_up(state, entry)
    factor = _placed_factor(layout, given.device_ids)
    state.slowed[key] = factor
    entry.rates = tuple([rate * factor for rate in entry.rates])
    going_on = [run for run in entry.runs if run.end_s > book.now_s]
    first = going_on[0]
    overhead_s = first.overhead_s if first.start_s >= book.now_s else entry.residual_s
    runs = retime(going_on, entry.left, entry.rates, book.now_s, overhead_s, book.costs)
    if fits(book, entry, runs):
        book.change_runs(entry, runs)
        return False
    if not book.plan_anew(entry):
        # It ends late, but where it is: giving its devices away now would only make it worse.
        entry.is_late = True
        if fits(book, entry, runs):
            book.change_runs(entry, runs)
        else:
            book.plan_anew(entry)
    return True


def _placed_factor(layout: Layout, devices: Devices) -> float:
    """The part of its compact speed at which a group on these devices runs."""
    nodes, fewest = len(layout.nodes_of(layout.bitmap(devices))), layout.nodes_needed(len(devices))
    return float(SCATTERED_SLOWDOWN ** (-math.log2(nodes / fewest) / SCATTERED_DOUBLINGS))


def retime(
    runs: Sequence[PlannedStretch], left: float, rates: Sequence[float], now_s: float, overhead_s: float, costs: Costs
) -> Runs:
    """The same sizes at the same moments from `now_s` on, the first one with another overhead: it ends when its work
    is done, earlier or later than before. What was kept in reserve pays for it first; what is kept for the falls to
    come stays."""
    result: list[PlannedStretch] = []
    last = len(runs) - 1
    bare = costs.without_reserve()
    for index, (start_s, end_s, n, planned_s) in enumerate(runs):
        begin_s = max(start_s, now_s)
        cost_s = overhead_s if index == 0 else planned_s
        done_s = begin_s + cost_s + left / rates[n]
        if done_s <= end_s or index == last:
            least_s = bare.end_s(n, begin_s, done_s)
            result.append(PlannedStretch(begin_s, max(least_s, min(end_s, costs.end_s(n, begin_s, done_s))), n, cost_s))
            break
        left -= max(0.0, end_s - begin_s - cost_s) * rates[n]
        result.append(PlannedStretch(begin_s, end_s, n, min(cost_s, end_s - begin_s)))
    return tuple(result)


def fits(book: ReservationTable, entry: Entry, runs: Runs) -> bool:
    """Whether the entry can have these runs instead of its own; the reservation table is left as it was."""
    if not entry.is_late and runs[-1].end_s > entry.deadline_s:
        return False
    before = entry.runs
    book.change_runs(entry, ())
    is_free = all(
        book.profile.least(run.start_s, run.end_s) >= run.num_devices for run in runs if run.end_s > book.now_s
    )
    book.change_runs(entry, before)
    return is_free


def _counts(book: ReservationTable) -> dict[WorkloadId, int]:
    now_s = book.now_s
    counts = {WorkloadId(key): entry.size_at(now_s) for key, entry in book.entries.items()}
    return {who: count for who, count in counts.items() if count}


def _can_move(book: ReservationTable) -> list[str]:
    """The running jobs that could be moved now: out of what they have in reserve, or if others make way."""
    able: list[str] = []
    now_s = book.now_s
    for key, entry in book.entries.items():
        n = entry.size_at(now_s)
        if not n or n != entry.held:
            continue
        cost_s = book.costs.later[n]
        last = entry.runs[-1]
        spare_s = (work_done(entry.runs, entry.rates, last.end_s) - _work(entry)) / entry.rates[last.num_devices]
        if entry.is_late or spare_s >= cost_s or last.end_s + cost_s <= entry.deadline_s:
            able.append(key)
    return able


def _work(entry: Entry) -> float:
    return entry.work if entry.runs is entry.was else entry.left


def _cost_s(state: State, layout: Layout, given: PoolAllocation) -> float:
    """What a change to these devices costs: less where some job was before."""
    is_cheap = is_used(state, layout, given.device_ids)
    return state.change_s + PAD_S if is_cheap else state.book.costs.later[given.num_devices]


def _price(state: State, layout: Layout, snapshot: Snapshot, placed: Placed) -> list[str]:
    """Price the schedules for their places: a used block costs less, a move costs, and so does waiting for the
    job that is still there. Returns the jobs whose schedules do not hold then."""
    book, now_s = state.book, state.book.now_s
    waits_s = delays(state, snapshot, placed)
    broken: list[str] = []
    for key, entry in list(book.entries.items()):
        who = WorkloadId(key)
        given = placed.get(who)
        if given is None:
            continue
        is_same = same(state.devices.get(who), given.device_ids)
        first = entry.runs[0]
        if is_same and first.num_devices == entry.held:
            continue
        if key in state.slowed and _placed_factor(layout, given.device_ids) == 1.0:
            _speed_up(state, entry)
        n = given.num_devices
        cost_s = _cost_s(state, layout, given) + waits_s.get(who, 0.0)
        if first.start_s >= now_s and first.overhead_s == cost_s:
            continue
        going_on = [run for run in entry.runs if run.end_s > now_s]
        runs = retime(going_on, entry.left, entry.rates, now_s, cost_s, book.costs)
        if not fits(book, entry, runs):
            runs = retime(going_on, entry.left, entry.rates, now_s, cost_s, book.costs.without_falls())
        if fits(book, entry, runs):
            book.change_runs(entry, runs)
            continue
        residual_s, entry.residual_s = entry.residual_s, cost_s
        if n != entry.held or not book.plan_anew(entry):
            entry.residual_s = residual_s
        broken.append(key)
    return broken


def _scattered(state: State, layout: Layout, placed: Placed) -> list[str]:
    """The jobs whose devices change and would lie on more nodes than so many need."""
    found: list[str] = []
    for key in state.book.entries:
        given = placed.get(WorkloadId(key))
        if given is None or same(state.devices.get(WorkloadId(key)), given.device_ids):
            continue
        if _placed_factor(layout, given.device_ids) < state.slowed.get(key, 1.0):
            found.append(key)
    return found


def _relent(state: State, key: str, layout: Layout, placed: Placed, fixed: set[WorkloadId]) -> bool:
    """Replan a job that cannot be placed as planned; returns whether anything was changed."""
    book = state.book
    entry = book.entries.get(key)
    if entry is None:
        return True
    now_s = book.now_s
    current = entry.size_at(now_s)
    if current == entry.held and entry.held:
        # It was to be moved and cannot afford it, or only to where it would be scattered: it stays.
        is_news = WorkloadId(key) not in fixed
        fixed.add(WorkloadId(key))
        return is_news
    if entry.was and entry.held and now_s < entry.was[-1].end_s:
        going_on = next(run for run in entry.was if run.end_s > now_s)
        if going_on.num_devices == entry.held and fits(book, entry, entry.was):
            book.change_runs(entry, entry.was)
            return True
    if entry.was and not entry.held and entry.was[0].start_s > now_s and fits(book, entry, entry.was):
        book.change_runs(entry, entry.was)
        return True
    if entry.held and _hold_on(book, entry):
        return True
    taken = 0
    for who, given in placed.items():
        if who != key:
            taken |= layout.bitmap(given.device_ids)
    idle = Blocks(layout, layout.present & ~taken)
    sizes = entry.sizes
    placeable = [n for n in sizes if n <= entry.held or (n != current and idle.fits(n))]
    if placeable:
        entry.sizes = placeable
        is_planned = book.plan_anew(entry)
        entry.sizes = sizes
        if is_planned:
            return True
    if _make_way(book, entry, current):
        return True
    return _later(book, entry)


def _hold_on(book: ReservationTable, entry: Entry) -> bool:
    """Keep what is held until one of the next moments at which something changes, and go on from there."""
    now_s, left, held, ready_s, residual_s = book.now_s, entry.left, entry.held, entry.ready_s, entry.residual_s
    if held not in entry.sizes:
        return False
    before = entry.runs
    book.change_runs(entry, ())
    found: Runs = ()
    for until_s in book.profile.times[1:5]:
        first = PlannedStretch(now_s, until_s, held, min(residual_s, until_s - now_s))
        done = max(0.0, until_s - now_s - residual_s) * entry.rates[held]
        if done >= left or until_s - now_s < 1.0:
            continue
        if book.profile.least(now_s, until_s) < held:
            break
        entry.left, entry.ready_s, entry.held, entry.residual_s = left - done, until_s, 0, 0.0
        rest = book.fit_one(entry)
        entry.left, entry.ready_s, entry.held, entry.residual_s = left, ready_s, held, residual_s
        if rest:
            found = (first, *rest)
            break
    book.change_runs(entry, found or before)
    return bool(found)


def _make_way(book: ReservationTable, entry: Entry, count: int) -> bool:
    """Halve a job that frees a block of `count` devices by it and still makes its deadline; returns whether one did."""
    now_s = book.now_s
    able: list[tuple[bool, int, str, Entry, Runs]] = []
    for key, other in book.entries.items():
        size = other.size_at(now_s)
        half = max((n for n in other.sizes if n <= size - count and n & (n - 1) == 0), default=0)
        if other is entry or other.is_fixed or not half or size & (size - 1):
            continue
        overhead_s = other.residual_s if half == other.held else book.costs.later[half]
        done_s = now_s + overhead_s + other.left / other.rates[half]
        run = PlannedStretch(now_s, book.costs.without_reserve().end_s(half, now_s, done_s), half, overhead_s)
        able.append((half != other.held, size, key, other, (run,)))
    for _, _, _, other, runs in sorted(able, key=lambda item: item[:3]):
        if fits(book, other, runs):
            book.change_runs(other, runs)
            return True
    return False


def _later(book: ReservationTable, entry: Entry) -> bool:
    """Let the job begin, or go on, at one of the next moments at which something changes; others make way then."""
    ready_s = entry.ready_s
    for moment_s in [at_s for at_s in book.profile.times[1:4] if at_s > book.now_s]:
        entry.ready_s = moment_s
        is_planned = book.plan_anew(entry)
        entry.ready_s = ready_s
        if is_planned:
            return True
    return False
