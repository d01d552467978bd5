"""Which workload is to hold which devices in a plan under construction, so that no two jobs wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from springtide.core.decision import PoolAllocation
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.layout import Layout, block_at, held_devices, level_for
from springtide.scheduling.placement.topology import Census, fewest_suffice, fits_compactly

# How many blocks are looked at when others have to make room: those with the fewest devices in the way.
MAX_CANDIDATES = 8
# How many places are cleared, at most, to find room for one workload. A search that succeeds clears one for each job
# that moves, which is far fewer; a search that fails would try every order without this bound.
MAX_CLEARINGS = 256
# And for all workloads in one decision: where devices lie in pieces, many searches fail, each of them again and again.
MAX_CLEARINGS_OF_ALL = 512
# How many jobs are placed anew, at most, in one decision to empty blocks.
MAX_MOVES_OF_ALL = 256


class SearchBudget(msgspec.Struct):
    """How much of the search for room is left in one decision: places to clear, and jobs to place anew."""

    clearings: int = MAX_CLEARINGS_OF_ALL
    moves: int = MAX_MOVES_OF_ALL


class Claims:
    """The devices that each workload is to hold, as bitmaps of addresses; what no workload claims is idle.

    `unmoved` maps workloads that need no new place to their devices; those in `movable` may still have to make room.
    """

    def __init__(
        self,
        layout: Layout,
        counts: Mapping[WorkloadId, int],
        allocations: Mapping[WorkloadId, PoolAllocation],
        unmoved: Mapping[WorkloadId, Sequence[DeviceId]],
        movable: frozenset[WorkloadId],
        budget: SearchBudget | None = None,
    ) -> None:
        self._budget = budget or SearchBudget()
        self.layout = layout
        self._counts = counts
        self._allocations = allocations
        self._unmoved = unmoved
        self._movable = movable
        self._of: dict[WorkloadId, int] = {}
        self._held, self.held_now = held_devices(layout, allocations)
        self._kept: dict[WorkloadId, int] = {}
        taken = 0
        for workload_id, devices in unmoved.items():
            held = allocations.get(workload_id)
            is_held = held is not None and held.device_ids is devices
            bits = self._kept[workload_id] = self._held[workload_id] if is_held else layout.bitmap(devices)
            taken |= bits
        self.idle = layout.present & ~taken
        # The movable workload that claims each device; of a device that none claims now, one that did before.
        self._owner: dict[DeviceId, WorkloadId] | None = None
        # The moving workloads: the devices that each still waits for, and those that it then gives back.
        self._movers: dict[WorkloadId, tuple[int, int]] | None = None
        # Each claim that was changed, with what the workload claimed before, and its move.
        self._undo: list[tuple[WorkloadId, int, tuple[int, int] | None]] = []
        # What is out of reach of a workload, as long as no claim changes.
        self._beyond: dict[WorkloadId, int] = {}
        self._known: list[Census] = []
        self._by_count: dict[int, int] = {}
        self._clearings_left = 0

    def census(self, devices: int) -> Census:
        """What is idle of `devices`: of all that are idle, or free now, the same object again until one is claimed."""
        for known in self._known:
            if known.idle == devices:
                return known
        self._known = [Census(self.layout, devices), *self._known[:1]]
        return self._known[0]

    @property
    def free_now(self) -> int:
        """The devices that no workload claims and none holds."""
        return self.idle & ~self.held_now

    @property
    def changed(self) -> Mapping[WorkloadId, int]:
        """The claims that were made since."""
        return self._of

    def held(self, workload_id: WorkloadId) -> int:
        """The devices that a workload holds now, without dead ones."""
        return self._held.get(workload_id, 0)

    def of(self, workload_id: WorkloadId) -> int:
        """The devices that a workload claims."""
        bits = self._of.get(workload_id)
        return self._kept.get(workload_id, 0) if bits is None else bits

    def take(self, workload_id: WorkloadId, bits: int) -> None:
        """Claim `bits` and nothing else for a workload; they must be idle or its own."""
        before = self.of(workload_id)
        assert not bits & ~(self.idle | before), f"{workload_id} is to take what others have"
        self._undo.append((workload_id, before, None if self._movers is None else self._movers.get(workload_id)))
        self._set(workload_id, before, bits)
        if self._movers is not None:
            self._note_move(workload_id)

    def _set(self, workload_id: WorkloadId, before: int, bits: int) -> None:
        self._beyond.clear()
        self._of[workload_id] = bits
        self.idle = self.idle & ~bits | before & ~bits
        if self._owner is not None and workload_id in self._movable:
            self._enter(workload_id, before, bits)

    def _roll_back(self, mark: int) -> None:
        while len(self._undo) > mark:
            workload_id, before, move = self._undo.pop()
            self._set(workload_id, self._of[workload_id], before)
            if self._movers is not None:
                self._keep_move(workload_id, move)

    # --- waiting for others -----------------------------------------------------------------------------------------

    def _note_move(self, workload_id: WorkloadId) -> None:
        """Record whether a workload gives up devices for others, which it does only once it has these."""
        held, claimed = self.held(workload_id), self.of(workload_id)
        takes, gives = claimed & ~held, held & ~claimed
        self._keep_move(workload_id, (takes, gives) if takes and gives else None)

    def _keep_move(self, workload_id: WorkloadId, move: tuple[int, int] | None) -> None:
        assert self._movers is not None
        if move is not None:
            self._movers[workload_id] = move
        else:
            self._movers.pop(workload_id, None)

    def out_of_reach(self, workload_id: WorkloadId) -> int:
        """The devices for which a moving workload must not wait: their holders wait for it, directly or indirectly.

        New replicas start before the old ones stop, so two jobs that wait for each other's devices wait for ever.
        """
        known = self._beyond.get(workload_id)
        if known is not None:
            return known
        region = held = self.held(workload_id)
        # Its own move adds nothing: what it gives back it holds. One that holds nothing is waited for by no other.
        others = list(self._moves().values()) if held else []
        while others:
            # Whatever is reached is reached in any order.
            rest: list[tuple[int, int]] = []
            before = region
            for move in others:
                if move[0] & region:
                    region |= move[1]
                else:
                    rest.append(move)
            if region == before:
                break
            others = rest
        beyond = self._beyond[workload_id] = region & ~held
        return beyond

    def _moves(self) -> dict[WorkloadId, tuple[int, int]]:
        if self._movers is None:
            self._movers = {}
            for other in (*self._unmoved, *self._of):
                if self._may_move(other):
                    self._note_move(other)
        return self._movers

    def _may_move(self, workload_id: WorkloadId) -> bool:
        if workload_id in self._of:
            return True
        held = self._allocations.get(workload_id)
        return held is not None and held.device_ids != tuple(self._unmoved[workload_id])

    # --- making room ------------------------------------------------------------------------------------------------

    def make_room(self, workload_id: WorkloadId) -> bool:
        """Claim a compact place for a workload by moving smaller jobs aside, as few of their devices as possible.

        With powers of two that all may move this succeeds whenever enough devices are idle: jobs that lie in a block
        with idle devices are smaller than the block, and what is idle elsewhere can be collected for them in turn.
        Returns whether it was possible; if not, or if the budget of the decision is spent, nothing has changed.
        """
        if self._budget.clearings <= 0:
            return False
        if self._owner is None:
            self._owner = {}
            for other, count in self._counts.items():
                if other in self._movable:
                    kept, bits = other not in self._of, self.of(other)
                    devices = self._unmoved.get(other, ()) if kept else self.layout.devices_of(bits)
                    self._owner.update(dict.fromkeys(devices, other))
                    self._by_count[count] = self._by_count.get(count, 0) | bits
        # From here on what is undone takes back the moves, too.
        self._moves()
        self._clearings_left = min(MAX_CLEARINGS, self._budget.clearings)
        return self._collect(workload_id, 0)

    def _enter(self, workload_id: WorkloadId, before: int, bits: int) -> None:
        """Record the new owner of each device, for jobs that may be moved."""
        assert self._owner is not None
        self._owner.update(dict.fromkeys(self.layout.devices_of(bits & ~before), workload_id))
        count = self._counts[workload_id]
        self._by_count[count] = self._by_count.get(count, 0) & ~before | bits

    def _collect(self, workload_id: WorkloadId, avoid: int) -> bool:
        """Make room outside of `avoid`, where the fewest devices have to move."""
        for place, evicted in self._candidates(workload_id, avoid):
            if self._clearings_left <= 0:
                return False
            self._clearings_left -= 1
            self._budget.clearings -= 1
            mark = len(self._undo)
            if self._clear(workload_id, place, evicted, avoid):
                return True
            self._roll_back(mark)
        return False

    def _candidates(self, workload_id: WorkloadId, avoid: int) -> Iterator[tuple[int, list[WorkloadId]]]:
        """Places that smaller jobs can clear, and the jobs that have to go: first where the fewest devices move.

        Aligned blocks; as a second choice larger blocks within a node, or any nodes for what is larger than a node.
        """
        layout, count = self.layout, self._counts[workload_id]
        own = self.of(workload_id)
        usable = (self.idle | own) & ~avoid & ~self.out_of_reach(workload_id)
        small = 0
        for size, bits in self._by_count.items():
            if size < count:
                small |= bits
        small &= ~(own | avoid)
        room, free = Census(layout, usable | small), Census(layout, usable)
        level = level_for(count)
        yield from self._cheapest_first(_with_room(room, free, level, count), usable, small, count)
        for wider in range(level + 1, layout.node_levels[0] + 1):
            yield from self._cheapest_first(_with_room(room, free, wider, count), usable, small, count)
        if layout.nodes_needed(count) > 1:
            yield from self._cheapest_first(_nodes_with_room(room, free, count), usable, small, count)

    def _cheapest_first(
        self, places: Sequence[int], usable: int, small: int, count: int
    ) -> Iterator[tuple[int, list[WorkloadId]]]:
        found = [self._candidate(place, usable, small, count) for place in places]
        for _, place, evicted in sorted(found, key=lambda candidate: candidate[0]):
            yield place, evicted

    def _candidate(self, place: int, usable: int, small: int, count: int) -> tuple[int, int, list[WorkloadId]]:
        evicted = self._in_the_way(place & small, count - (place & usable).bit_count())
        cost = sum((self.held(other) & self.of(other)).bit_count() for other in evicted)
        return cost, place, evicted

    def _in_the_way(self, occupied: int, missing: int) -> list[WorkloadId]:
        """Jobs that free at least `missing` of the occupied devices if they go, larger ones first."""
        assert self._owner is not None
        frees: dict[WorkloadId, int] = {}
        for device in self.layout.devices_of(occupied):
            other = self._owner[device]
            frees[other] = frees.get(other, 0) + 1
        evicted: list[WorkloadId] = []
        while missing > 0 and frees:
            # The largest that is not too large, so that no more move than must; else the smallest of those too large.
            fitting = [other for other, freed in frees.items() if freed <= missing]
            enough = sum(frees[other] for other in fitting) >= missing
            chosen = (
                max(fitting, key=frees.__getitem__)
                if enough
                else min((other for other in frees if frees[other] > missing), key=frees.__getitem__)
            )
            missing -= frees.pop(chosen)
            evicted.append(chosen)
        return sorted(evicted, key=lambda other: -self._counts[other])

    def _clear(self, workload_id: WorkloadId, block: int, evicted: Sequence[WorkloadId], avoid: int) -> bool:
        """Evict the jobs in the block, take it, and find another place for each of them."""
        for other in evicted:
            self.take(other, 0)
        usable = (self.idle | self.of(workload_id)) & ~avoid & ~self.out_of_reach(workload_id)
        inside = Census(self.layout, block & usable)
        # Choosing the devices takes longer than counting them.
        count = self._counts[workload_id]
        is_enough = inside.num_idle >= count and fewest_suffice(inside, count)
        place = inside.compact(count) if is_enough else 0
        if not place or len(self.layout.nodes_of(place)) > self.layout.nodes_needed(count):
            return False
        self.take(workload_id, place)
        return all(self._relocate(other, avoid | place) for other in evicted)

    def _relocate(self, workload_id: WorkloadId, avoid: int) -> bool:
        """Find an idle place as compact as possible, free now if possible; else make room; else take one on no more
        nodes than now."""
        layout, count, held = self.layout, self._counts[workload_id], self.held(workload_id)
        allowed = self.idle & ~avoid & ~self.out_of_reach(workload_id)
        room = Census(layout, allowed)
        for census in (Census(layout, allowed & ~self.held_now), room):
            if fits_compactly(census, count):
                self.take(workload_id, census.compact(count))
                return True
        if self._collect(workload_id, avoid):
            return True
        most = max(layout.nodes_needed(count), len(layout.nodes_of(held)))
        if held.bit_count() == count and not held & ~allowed:
            self.take(workload_id, held)
        elif 0 < room.fewest_nodes(count) <= most:
            self.take(workload_id, room.compact(count))
        else:
            return False
        return True


def _with_room(room: Census, free: Census, level: int, count: int) -> list[int]:
    """The blocks of a level that could have `count` devices, those with the most idle ones first."""
    if level >= room.layout.num_levels:
        return []
    indices = np.flatnonzero(room.counts(level) >= count)
    if not len(indices):
        return []
    # Of 16 bits, numbers are sorted in linear time.
    num_taken = (1 << level) - free.counts(level)[indices]
    chosen = indices[num_taken.astype(np.int16 if level < 15 else np.int64).argsort(kind="stable")[:MAX_CANDIDATES]]
    return [block_at(index << level, level) for index in chosen.tolist()]


def _nodes_with_room(room: Census, free: Census, count: int) -> list[int]:
    """The fewest nodes that could have `count` devices: those with the most room, the most idle first."""
    layout = room.layout
    most, idle = room.idle_of_nodes(), free.idle_of_nodes()
    chosen = np.lexsort((-idle, -most))[: layout.nodes_needed(count)]
    if most[chosen].sum() < count:
        return []
    return [sum(layout.node_block(node) for node in chosen.tolist())]
