"""Who is to hold which devices in a plan under construction; jobs move aside without waiting for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from springtide.core.decision import PoolAllocation
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.policies.topology import Census, Layout, addresses, block_at, level_for

# How many blocks are looked at when others have to make room: those with the fewest devices in the way.
MAX_CANDIDATES = 8
# How many places are cleared, at most, to find room for one workload, and in a whole plan. One that succeeds clears one
# place for each job that moves; without a bound, a search that is in vain would try every order.
MAX_CLEARINGS = 32
MAX_CLEARINGS_OF_PLAN = 256


class Claims:
    """The devices that each workload is to hold, as bitmaps of addresses; what nobody claims is idle.

    `settled` names the devices of those who were placed before: they stay unless a job of `movable` has to make room.
    """

    def __init__(
        self,
        layout: Layout,
        counts: Mapping[WorkloadId, int],
        allocations: Mapping[WorkloadId, PoolAllocation],
        settled: Mapping[WorkloadId, Sequence[DeviceId]],
        movable: frozenset[WorkloadId],
    ) -> None:
        self.layout = layout
        self._counts = counts
        self._allocations = allocations
        self._settled = settled
        self._movable = movable
        self._of: dict[WorkloadId, int] = {}
        self._held: dict[WorkloadId, int] = {}
        self.held_now = layout.bitmap(chain.from_iterable([held.device_ids for held in allocations.values()]))
        self.idle = layout.present & ~layout.bitmap(chain.from_iterable(settled.values()))
        self._owner: list[WorkloadId | None] | None = None
        self._movers: set[WorkloadId] | None = None
        self._undo: list[tuple[WorkloadId, int]] = []
        self._clearings_left = 0
        self._clearings_of_plan_left = MAX_CLEARINGS_OF_PLAN

    @property
    def free_now(self) -> int:
        """What nobody claims and nobody holds."""
        return self.idle & ~self.held_now

    @property
    def changed(self) -> Mapping[WorkloadId, int]:
        """The claims of all who are not as they were settled."""
        return self._of

    def held(self, workload_id: WorkloadId) -> int:
        """What a workload holds now, dead devices left out."""
        bits = self._held.get(workload_id)
        if bits is None:
            given = self._allocations.get(workload_id)
            bits = self._held[workload_id] = 0 if given is None else self.layout.bitmap(given.device_ids)
        return bits

    def of(self, workload_id: WorkloadId) -> int:
        """What a workload claims."""
        bits = self._of.get(workload_id)
        return self.layout.bitmap(self._settled.get(workload_id, ())) if bits is None else bits

    def take(self, workload_id: WorkloadId, bits: int) -> None:
        """Claim `bits` and nothing else for a workload; they must be idle or its own."""
        before = self.of(workload_id)
        assert not bits & ~(self.idle | before), f"{workload_id} is to take what others have"
        self._undo.append((workload_id, before))
        self._set(workload_id, before, bits)

    def _set(self, workload_id: WorkloadId, before: int, bits: int) -> None:
        self._of[workload_id] = bits
        self.idle = self.idle & ~bits | before & ~bits
        if self._owner is not None and workload_id in self._movable:
            for address in addresses(before & ~bits):
                self._owner[address] = None
            for address in addresses(bits & ~before):
                self._owner[address] = workload_id
        if self._movers is not None:
            (self._movers.add if self._moves(workload_id) else self._movers.discard)(workload_id)

    def _roll_back(self, mark: int) -> None:
        while len(self._undo) > mark:
            workload_id, before = self._undo.pop()
            self._set(workload_id, self.of(workload_id), before)

    # --- who waits for whom -----------------------------------------------------------------------------------------

    def _moves(self, workload_id: WorkloadId) -> bool:
        """Whether a workload gives up devices only once it has others."""
        held, claimed = self.held(workload_id), self.of(workload_id)
        return bool(held & ~claimed and claimed & ~held)

    def out_of_reach(self, workload_id: WorkloadId) -> int:
        """The devices for which a workload that moves must not wait: their holders wait for it, directly or not.

        New replicas start before the old ones go: two jobs that wait for each other's devices wait for ever.
        """
        if self._movers is None:
            self._movers = {other for other in (*self._settled, *self._of) if self._differs(other)}
        region = held = self.held(workload_id)
        waiting = sorted(self._movers - {workload_id})
        found = True
        while found:
            found = False
            for other in waiting:
                if (self.of(other) & ~self.held(other)) & region:
                    vacated = self.held(other) & ~self.of(other)
                    found |= bool(vacated & ~region)
                    region |= vacated
        return region & ~held

    def _differs(self, workload_id: WorkloadId) -> bool:
        if workload_id not in self._of:
            held = self._allocations.get(workload_id)
            if held is None or held.device_ids == tuple(self._settled[workload_id]):
                return False
        return self._moves(workload_id)

    # --- making room ------------------------------------------------------------------------------------------------

    def make_room(self, workload_id: WorkloadId) -> bool:
        """Claim a compact place for a workload by moving smaller jobs aside, as few of their devices as possible.

        With powers of two that all may move this succeeds whenever enough devices are idle: jobs that lie in a block
        with idle devices are smaller than the block, and what is idle elsewhere can be collected for them in turn.
        Returns whether it was possible; if not, nothing has changed.
        """
        if self._owner is None:
            self._owner = [None] * self.layout.size
            for other in self._counts:
                if other in self._movable:
                    for address in addresses(self.of(other)):
                        self._owner[address] = other
        self._clearings_left = granted = min(MAX_CLEARINGS, self._clearings_of_plan_left)
        is_done = self._collect(workload_id, 0)
        self._clearings_of_plan_left -= granted - self._clearings_left
        return is_done

    def _collect(self, workload_id: WorkloadId, avoid: int) -> bool:
        """Make room outside of `avoid`, where the fewest devices move that would have stayed."""
        for _, block, evicted in self._candidates(workload_id, avoid):
            if self._clearings_left <= 0:
                return False
            self._clearings_left -= 1
            mark = len(self._undo)
            if self._clear(workload_id, block, evicted, avoid):
                return True
            self._roll_back(mark)
        return False

    def _candidates(self, workload_id: WorkloadId, avoid: int) -> list[tuple[int, int, list[WorkloadId]]]:
        """Places that smaller jobs can clear: how many devices move that would have stayed, the place, who has to go.

        Aligned blocks; for what fits into a node also larger blocks of a node, for the rest also any nodes.
        """
        layout, count = self.layout, self._counts[workload_id]
        assert self._owner is not None
        usable = (self.idle | self.of(workload_id)) & ~avoid & ~self.out_of_reach(workload_id)
        small = layout.bitmap_at(
            [
                address
                for address, other in enumerate(self._owner)
                if other is not None and other != workload_id and self._counts[other] < count
            ]
        )
        room, free = Census(layout, usable | small & ~avoid), Census(layout, usable)
        found: list[tuple[int, int, list[WorkloadId]]] = []
        first = level_for(count)
        for level in range(first, max(first + 1, layout.node_levels[0] + 1)):
            if level >= layout.num_levels:
                break
            counts = free.counts(level)
            indices = [index for index, most in enumerate(room.counts(level)) if most >= count]
            indices.sort(key=lambda index: -counts[index])
            blocks = [block_at(index << level, level) for index in indices[:MAX_CANDIDATES]]
            found += [self._candidate(block, usable, small, count) for block in blocks]
        if layout.nodes_needed(count) > 1:
            nodes = layout.node_range()
            clear, now = room.idle_of_nodes(), free.idle_of_nodes()
            fullest = sorted(nodes, key=lambda node: (-clear[node], -now[node]))[: layout.nodes_needed(count)]
            if sum(clear[node] for node in fullest) >= count:
                place = sum(layout.node_block(node) for node in fullest)
                found.append(self._candidate(place, usable, small, count))
        # The sort is stable: among equals aligned blocks stay first.
        return sorted(found, key=lambda candidate: candidate[0])

    def _candidate(self, place: int, usable: int, small: int, count: int) -> tuple[int, int, list[WorkloadId]]:
        evicted = self._in_the_way(place & small, count - (place & usable).bit_count())
        cost = sum((self.held(other) & self.of(other)).bit_count() for other in evicted)
        return cost, place, evicted

    def _in_the_way(self, occupied: int, missing: int) -> list[WorkloadId]:
        """Jobs that free at least `missing` of the occupied devices if they go, larger ones first."""
        assert self._owner is not None
        frees: dict[WorkloadId, int] = {}
        for address in addresses(occupied):
            other = self._owner[address]
            assert other is not None
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
        """Send away who is in the way, take the place, and find another one for each of them."""
        for other in evicted:
            self.take(other, 0)
        usable = (self.idle | self.of(workload_id)) & ~avoid & ~self.out_of_reach(workload_id)
        place = Census(self.layout, block & usable).compact(self._counts[workload_id])
        if not place:
            return False
        self.take(workload_id, place)
        return all(self._relocate(other, avoid | place) for other in evicted)

    def _relocate(self, workload_id: WorkloadId, avoid: int) -> bool:
        """Find a place that is no wider spread than the present one, free now if it can be, else by making room."""
        layout, count, held = self.layout, self._counts[workload_id], self.held(workload_id)
        allowed = self.idle & ~avoid & ~self.out_of_reach(workload_id)
        wants_block = count & (count - 1) == 0 and count <= layout.largest_block
        if wants_block:
            free = Census(layout, allowed & ~self.held_now).aligned_block(count)
            block = free or Census(layout, allowed).aligned_block(count)
            if block:
                self.take(workload_id, block)
                return True
        place = Census(layout, allowed).compact(count)
        most_nodes = max(layout.nodes_needed(count), len(layout.nodes_of(held)))
        if place and len(layout.nodes_of(place)) <= most_nodes:
            self.take(workload_id, place)
            return True
        return self._collect(workload_id, avoid)
