"""Placement: chooses the devices for each workload's number of devices, compact and with as few moves as possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from springtide.core.decision import EMPTY, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.layout import (
    Layout,
    addresses,
    block_at,
    held_devices,
    is_scattered,
    layout_of,
    level_for,
    lowest,
)
from springtide.scheduling.placement.relocation import Claims, SearchBudget
from springtide.scheduling.placement.topology import Census, fewest_suffice, fits_compactly

Devices = Sequence[DeviceId]
Finder = Callable[[Census], int]
Rejects = Callable[[WorkloadId, int], bool]


def place(
    counts: Mapping[WorkloadId, int],
    snapshot: Snapshot,
    *,
    movable: Collection[WorkloadId] = frozenset(),
    wanted: Mapping[WorkloadId, Devices] = EMPTY,
    budget: SearchBudget | None = None,
) -> dict[WorkloadId, PoolAllocation]:
    """Give every workload its count of devices in rank order, those it holds first. The counts must fit.

    A job that keeps its size keeps its devices. A job that shrinks keeps an aligned block, a job that grows takes the
    buddy of its own, and a job that starts is placed best fit (ElasticFlow §4.3). A growing job goes elsewhere only if
    it would be on more nodes than it needs and a compact place is idle.

    Jobs in `movable` may be moved, as few devices as possible, to make a compact place for another job, and to a
    compact place of their own once there is one. `wanted` are the devices decided before; they are kept while their
    count is right, they are alive, and no job that keeps its devices holds any of them, so that a plan that is half
    carried out does not change. Devices that no workload holds come before those still to be given back. `budget` is
    what the decision has left for making room; without one it is that of a whole decision.
    """
    placed = try_place(counts, snapshot, movable=movable, wanted=wanted, budget=budget)
    assert placed is not None
    return placed


def try_place(
    counts: Mapping[WorkloadId, int],
    snapshot: Snapshot,
    *,
    movable: Collection[WorkloadId],
    wanted: Mapping[WorkloadId, Devices],
    budget: SearchBudget | None = None,
    rejects: Rejects | None = None,
) -> dict[WorkloadId, PoolAllocation] | None:
    """As `place`; or None once it is certain that a workload which is not in `movable` gets devices (a bitmap) that the
    caller `rejects`, and that what is left to do would use up nothing of the `budget`."""
    layout = layout_of(snapshot.cluster)
    held_bits = held_devices(layout, snapshot.allocations).of
    chosen = _as_decided(counts, snapshot, layout, wanted, held_bits)
    if chosen is None or any(
        workload_id in movable and is_scattered(layout, tuple(at)) for workload_id, at in chosen.items()
    ):
        chosen = _Placement(counts, snapshot, layout, movable, wanted, held_bits, budget).run(rejects)
    if chosen is None:
        return None
    batch_of = {view.job.job_id: view.job.global_batch_size for view in snapshot.jobs}
    placed: dict[WorkloadId, PoolAllocation] = {}
    for workload_id, devices in chosen.items():
        held, batch = snapshot.allocations.get(workload_id), batch_of.get(workload_id)
        if held is not None and held.device_ids == devices and held.global_batch_size == batch:
            placed[workload_id] = held
        else:
            placed[workload_id] = PoolAllocation(device_ids=tuple(devices), global_batch_size=batch)
    return placed


def held_counts(snapshot: Snapshot) -> Mapping[WorkloadId, int]:
    """How many devices each workload holds now."""
    if not snapshot.allocations:
        return EMPTY
    return {workload_id: held.num_devices for workload_id, held in snapshot.allocations.items()}


def _as_decided(
    counts: Mapping[WorkloadId, int],
    snapshot: Snapshot,
    layout: Layout,
    wanted: Mapping[WorkloadId, Devices],
    held_bits: Mapping[WorkloadId, int],
) -> dict[WorkloadId, Devices] | None:
    """The devices decided before or held, if every workload has its count with them; None if one needs a place."""
    allocations = snapshot.allocations
    chosen: dict[WorkloadId, Devices] = {}
    total, bits = 0, 0
    for workload_id, count in counts.items():
        if count <= 0:
            continue
        devices = wanted.get(workload_id, ())
        if len(devices) != count:
            held = allocations.get(workload_id)
            if held is None or len(held.device_ids) != count:
                return None
            devices = held.device_ids
            bits |= held_bits[workload_id]
        else:
            bits |= layout.bitmap(devices)
        chosen[workload_id] = devices
        total += count
    return chosen if bits.bit_count() == total else None


def _unmoved_devices(
    counts: Mapping[WorkloadId, int],
    snapshot: Snapshot,
    layout: Layout,
    wanted: Mapping[WorkloadId, Devices],
    held_bits: Mapping[WorkloadId, int],
) -> dict[WorkloadId, Devices]:
    """The devices of all workloads that need no new place: those decided before, unless another workload keeps them, or
    exactly those held.

    A workload that holds no more than its count keeps all of them. One that holds more first gives up the devices that
    were decided for others.
    """
    bitmap = layout.bitmap
    held: dict[WorkloadId, Devices] = {
        workload_id: allocation.device_ids
        for workload_id, allocation in snapshot.allocations.items()
        if workload_id in counts
    }
    if any(held_bits[who].bit_count() < len(devices) for who, devices in held.items()):
        # Some are dead.
        alive = layout.address_of
        held = {who: tuple([device for device in devices if device in alive]) for who, devices in held.items()}
    # Those without a dead device, or one twice.
    decided = {
        workload_id: devices
        for workload_id, devices in wanted.items()
        if len(devices) == counts.get(workload_id) == bitmap(devices).bit_count()
    }
    while True:
        promised = taken = num_promised = 0
        for devices in decided.values():
            promised |= bitmap(devices)
            num_promised += len(devices)
        for workload_id, devices in held.items():
            if workload_id not in decided:
                bits, count = held_bits[workload_id], counts[workload_id]
                if len(devices) <= count or (bits & ~promised).bit_count() < count:
                    taken |= bits
        if promised.bit_count() == num_promised and not taken & promised:
            break
        kept: dict[WorkloadId, Devices] = {}
        for workload_id, devices in decided.items():
            if not taken & (bits := bitmap(devices)):
                kept[workload_id] = devices
                taken |= bits
        decided = kept
    unmoved = {workload_id: devices for workload_id, devices in held.items() if len(devices) == counts[workload_id]}
    unmoved.update(decided)
    return unmoved


def _largest_hole(census: Census, released: int) -> int:
    """The level of the largest idle block to which released devices belong; -1 without any."""
    level = -1
    while level + 1 < census.layout.num_levels:
        blocks = census.full(level + 1)
        if not any(blocks >> (address >> level + 1 << level + 1) & 1 for address in addresses(released)):
            break
        level += 1
    return level


class _Placement:
    """One call of `place` in which a job needs a place: bitmaps of addresses, claimed step by step."""

    def __init__(
        self,
        counts: Mapping[WorkloadId, int],
        snapshot: Snapshot,
        layout: Layout,
        movable: Collection[WorkloadId],
        wanted: Mapping[WorkloadId, Devices],
        held_bits: Mapping[WorkloadId, int],
        budget: SearchBudget | None,
    ) -> None:
        self.layout = layout
        self.budget = budget or SearchBudget()
        self.snapshot = snapshot
        self.counts = {workload_id: count for workload_id, count in counts.items() if count > 0}
        self.unmoved = _unmoved_devices(self.counts, snapshot, layout, wanted, held_bits)
        rigid = {view.job.job_id for view in snapshot.jobs if not view.job.elastic}
        self.services = {view.service.service_id for view in snapshot.services}
        # A job that is moving must have arrived before it may be moved again.
        self.movable = frozenset(
            workload_id
            for workload_id in movable
            if workload_id in self.counts
            and workload_id not in rigid
            and workload_id not in self.services
            and not self._is_moving(workload_id)
        )
        self.claims = Claims(layout, self.counts, snapshot.allocations, self.unmoved, self.movable, self.budget)

    def _is_moving(self, workload_id: WorkloadId) -> bool:
        unmoved, held = self.unmoved.get(workload_id), self.snapshot.allocations.get(workload_id)
        if unmoved is None or (held is not None and unmoved is held.device_ids):
            return False
        return held is None or set(unmoved) != set(held.device_ids)

    def run(self, rejects: Rejects | None = None) -> dict[WorkloadId, Devices] | None:
        """Place all workloads: those that stay, shrink, or grow in place, then the others from large to small. None as
        in `try_place`."""
        claims = self.claims
        growing: list[WorkloadId] = []
        for workload_id in [workload_id for workload_id in self.counts if workload_id not in self.unmoved]:
            held = claims.held(workload_id)
            if held.bit_count() > self.counts[workload_id]:
                continue
            growing.append(workload_id)
            claims.take(workload_id, held)
        shrinking = [
            workload_id
            for workload_id in self.counts
            if workload_id not in self.unmoved and workload_id not in claims.changed
        ]
        for workload_id in shrinking:
            self._shrink(workload_id)
        # The sort is stable: equals keep the order of `counts`. Replicas come last, into the holes that jobs leave.
        growing.sort(key=lambda workload_id: (workload_id in self.services, -self.counts[workload_id]))
        self._take_buddies(growing)
        self._gather(shrinking)
        self._take_buddies(growing)
        # What has its place and is not looked at yet: none of these gets another one.
        unseen = list(self.counts.keys() - self.movable - set(growing))
        for workload_id in growing:
            if rejects is not None and (not self.movable or self.budget.clearings <= 0):
                if any(rejects(other, claims.of(other)) for other in unseen):
                    return None
                unseen.clear()
            if claims.of(workload_id).bit_count() != self.counts[workload_id]:
                self._place_growing(workload_id, growing)
            # Else already placed: it had to make room for another, or its buddy block became idle.
            if workload_id not in self.movable:
                unseen.append(workload_id)
        unmoved = self.unmoved
        return {
            workload_id: self._in_order(workload_id) if workload_id in claims.changed else unmoved[workload_id]
            for workload_id in self.counts
        }

    def _place_growing(self, workload_id: WorkloadId, growing: Sequence[WorkloadId]) -> None:
        """Place one of the workloads that start or grow."""
        idle = self.claims.idle
        if workload_id in self.services:
            self._fill_holes(workload_id)
        elif self.claims.held(workload_id):
            self._grow(workload_id)
        else:
            self._start(workload_id)
        if self.claims.idle & ~idle:
            self._take_buddies(growing)

    def _in_order(self, workload_id: WorkloadId) -> Devices:
        """The claimed devices: first those that the workload holds, in rank order, then new ones by address."""
        claimed = self.claims.of(workload_id)
        address_of = self.layout.address_of
        allocation = self.snapshot.allocations.get(workload_id)
        held: Devices = allocation.device_ids if allocation is not None else ()
        kept = [device for device in held if device in address_of and claimed >> address_of[device] & 1]
        return (*kept, *self.layout.devices_of(claimed & ~self.claims.held(workload_id)))

    # --- shrinking --------------------------------------------------------------------------------------------------

    def _shrink(self, workload_id: WorkloadId) -> None:
        """Keep the aligned block that leaves the largest hole; among equals the one with the lowest rank."""
        held, count = self.claims.held(workload_id), self.counts[workload_id]
        # `_unmoved_devices` leaves it enough devices besides those decided for others.
        inside = held & self.claims.idle
        if workload_id in self.services:
            # The first replicas are ready, the last ones start or are on their way out.
            keep = 0
            for device in self.snapshot.allocations[workload_id].device_ids:
                bit = 1 << self.layout.address_of.get(device, self.layout.size)
                if keep.bit_count() < count:
                    keep |= bit & inside
            self.claims.take(workload_id, keep)
            return
        keep = 0
        if count & (count - 1) == 0:
            keep = self._best_part(workload_id, inside, count)
        self.claims.take(workload_id, keep or Census(self.layout, inside).compact(count))

    def _best_part(self, workload_id: WorkloadId, inside: int, count: int) -> int:
        level = level_for(count)
        parts = Census(self.layout, inside).full(level)
        ranked: list[int] = []
        for device in self.snapshot.allocations[workload_id].device_ids:
            address = self.layout.address_of.get(device)
            if address is not None:
                start = address >> level << level
                if parts >> start & 1 and start not in ranked:
                    ranked.append(start)
        if not ranked:
            return 0
        held = self.claims.held(workload_id)
        idle = self.claims.idle & ~held

        def hole(start: int) -> int:
            released = held & ~block_at(start, level)
            return _largest_hole(Census(self.layout, idle | released), released)

        best = ranked[0] if len(ranked) == 1 else max(ranked, key=hole)
        return block_at(best, level)

    # --- growing ----------------------------------------------------------------------------------------------------

    def _take_buddies(self, growing: Sequence[WorkloadId]) -> None:
        """Let each growing job take the aligned block around its own devices, if the rest of that block is idle."""
        for workload_id in growing:
            held, count = self.claims.held(workload_id), self.counts[workload_id]
            if not held or count & (count - 1) or workload_id in self.services or self.claims.of(workload_id) != held:
                continue
            level = level_for(count)
            block = block_at(lowest(held) >> level << level, level)
            if not held & ~block and not block & ~(held | self.claims.idle):
                self.claims.take(workload_id, block)

    def _grow(self, workload_id: WorkloadId) -> None:
        """Grow in place, move to an idle compact place, or have one made: the first of these that is compact enough."""
        held, count = self.claims.held(workload_id), self.counts[workload_id]
        missing = count - held.bit_count()
        may_move = workload_id in self.movable
        # A movable job keeps to aligned blocks even if it would be on as few nodes without one: otherwise other jobs
        # would find no blocks, and jobs would not return to sets of devices that were used before.
        wants_block = may_move and count & (count - 1) == 0 and count <= self.layout.largest_block
        stay = 0 if wants_block else self._with_more(held, missing)
        if wants_block or len(self.layout.nodes_of(stay)) > self.layout.nodes_needed(count):
            elsewhere = self._elsewhere(workload_id, wants_block)
            if elsewhere:
                self.claims.take(workload_id, elsewhere)
                return
            if may_move and self.claims.make_room(workload_id):
                return
        self.claims.take(workload_id, stay or self._with_more(held, missing))

    def _with_more(self, held: int, missing: int) -> int:
        """These devices, and as many more near them."""
        return held | self._prefer_free(lambda census: census.extend(held, missing), held)

    def _elsewhere(self, workload_id: WorkloadId, wants_block: bool) -> int:
        """A compact place for all devices of the job; 0 if there is none. It keeps as many of its own as possible, and
        the place is free now if possible.

        For a movable job, also a place that others give back, unless these wait for the job in turn.
        """
        free = self.claims.free_now
        place = self._compact_among(free, workload_id, wants_block)
        if not place and workload_id in self.movable:
            soon = self.claims.idle & ~self.claims.out_of_reach(workload_id)
            place = self._compact_among(soon, workload_id, wants_block) if soon != free else 0
        # With nodes of several sizes, an aligned block may span several small nodes where one wide node would do.
        is_compact = len(self.layout.nodes_of(place)) <= self.layout.nodes_needed(self.counts[workload_id])
        return place if is_compact else 0

    def _compact_among(self, idle: int, workload_id: WorkloadId, wants_block: bool) -> int:
        claims, count = self.claims, self.counts[workload_id]
        # Some devices that a shrinking job holds may have been decided for another job.
        held = claims.held(workload_id) & (claims.idle | claims.of(workload_id))
        if count & (count - 1) == 0 and count <= self.layout.largest_block:
            level = level_for(count)
            full = Census(self.layout, idle | held).full(level)
            around = {start for start in self._starts(held, level) if full >> start & 1}
            if around:
                best = min(around, key=lambda start: (-(held & block_at(start, level)).bit_count(), start))
                return block_at(best, level)
        census = self.claims.census(idle)
        if wants_block:
            return census.aligned_block(count)
        return census.compact(count) if fewest_suffice(census, count) else 0

    def _starts(self, bits: int, level: int) -> list[int]:
        starts: list[int] = []
        while bits:
            start = lowest(bits) >> level << level
            starts.append(start)
            bits &= ~block_at(start, level)
        return starts

    # --- starting and coming together ---------------------------------------------------------------------------------

    def _start(self, workload_id: WorkloadId) -> None:
        count = self.counts[workload_id]
        idle = self.claims.census(self.claims.idle)
        assert idle.num_idle >= count, "the counts do not fit into the cluster"
        if self.movable and not fits_compactly(idle, count) and self.claims.make_room(workload_id):
            return
        self.claims.take(workload_id, self._prefer_free(lambda census: census.compact(count), 0))

    def _gather(self, shrunk: Sequence[WorkloadId]) -> None:
        """Move scattered movable jobs to compact places: all of them if there is a place for each, else one.

        This comes before jobs grow or start, so that these find the devices that are left.
        """
        if not self.movable:
            return
        at = {**self.unmoved, **{workload_id: self._in_order(workload_id) for workload_id in shrunk}}
        scattered = [
            workload_id
            for workload_id, devices in at.items()
            if workload_id in self.movable and is_scattered(self.layout, tuple(devices))
        ]
        scattered.sort(key=lambda workload_id: -self.counts[workload_id])
        left = []
        for workload_id in scattered:
            count = self.counts[workload_id]
            place = self._elsewhere(workload_id, count & (count - 1) == 0 and count <= self.layout.largest_block)
            if place:
                self.claims.take(workload_id, place)
            else:
                left.append(workload_id)
        for workload_id in left:
            is_as_before = workload_id in shrunk or workload_id not in self.claims.changed
            if is_as_before and self.claims.make_room(workload_id):
                return

    def _fill_holes(self, workload_id: WorkloadId) -> None:
        """Take single devices from the smallest holes: the replicas of a service do not communicate."""
        for _ in range(self.counts[workload_id] - self.claims.held(workload_id).bit_count()):
            hole = self._prefer_free(lambda census: census.best_block(0), 0)
            self.claims.take(workload_id, self.claims.of(workload_id) | hole)

    def _prefer_free(self, find: Finder, own: int) -> int:
        """A place of devices that no workload holds now, unless one that others give back is more compact."""
        soon = find(self.claims.census(self.claims.idle))
        assert soon, "the counts do not fit into the cluster"
        if soon & self.claims.held_now == 0:
            return soon
        now = find(self.claims.census(self.claims.free_now))
        return now if now and self._spread(now | own) <= self._spread(soon | own) else soon

    def _spread(self, devices: int) -> tuple[int, bool]:
        """How scattered a set of devices is: its number of nodes, and whether it is no aligned block."""
        count = devices.bit_count()
        level = level_for(count)
        start = lowest(devices) >> level << level
        return len(self.layout.nodes_of(devices)), devices != block_at(start, level)
