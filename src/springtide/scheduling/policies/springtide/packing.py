"""Empties an aligned block by moving running jobs out of it, so that all workers of another job fit into it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Container, Mapping

import numpy as np
import numpy.typing as npt

from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.layout import level_for
from springtide.scheduling.placement.relocation import SearchBudget
from springtide.scheduling.placement.topology import Census, Layout, addresses, block_at, lowest

# On thousands of devices chains of moves get hundreds long, and nearly all of those end without room.
_MAX_MOVES = 64


class Packing:
    """Which devices each job is on, as bitmaps of addresses, and which jobs were moved.

    Only jobs in `movable` are moved, and only those that are smaller than the block that is emptied, so that the search
    ends. A moved job goes to an idle block of its size, or to one that smaller jobs are moved out of in turn.
    """

    def __init__(
        self,
        layout: Layout,
        places: Mapping[WorkloadId, int],
        movable: Collection[WorkloadId],
        budget: SearchBudget | None = None,
    ) -> None:
        self._budget = budget or SearchBudget()
        self.layout = layout
        self.places = dict(places)
        self.movable = movable
        self.moved: set[WorkloadId] = set()
        taken = 0
        for bits in places.values():
            taken |= bits
        self.idle = layout.present & ~taken
        # By address; None where no job is. Blocks may reach beyond the last address.
        self._owner: list[WorkloadId | None] = [None] * layout.size
        # The devices of jobs by the level from which on blocks can be emptied of them; the last ones are not moved.
        self._leaves_from = [0] * (layout.num_levels + 2)
        self._num_present: dict[int, npt.NDArray[np.int64]] = {}
        for workload_id, bits in self.places.items():
            self._set_owner(bits, workload_id)
            self._leaves_from[self._least_level(workload_id, bits)] |= bits

    def gather(self, workload_id: WorkloadId) -> bool:
        """Give the workload as many devices as it has now in one aligned block.

        If there is none, or more than `_MAX_MOVES` jobs or than the decision may move would be placed anew for it,
        change nothing.
        """
        if self._budget.moves <= 0:
            return False
        before = dict(self.places), self.idle, set(self.moved), list(self._owner), list(self._leaves_from)
        homeless = [(workload_id, self.places[workload_id].bit_count())]
        self._release(workload_id)
        for _ in range(min(_MAX_MOVES, self._budget.moves)):
            self._budget.moves -= 1
            evicted = self._place(*homeless.pop())
            if evicted is None:
                break
            homeless += reversed(evicted)
            if not homeless:
                return True
        self.places, self.idle, self.moved, self._owner, self._leaves_from = before
        return False

    def gather_on_nodes(self, workload_id: WorkloadId, loose: Container[WorkloadId]) -> bool:
        """Give the workload as many devices as it has now on the fewest nodes, if these are fewer than now.

        Movable jobs that have one device, or that are in `loose`, get devices that it leaves for those that it takes.
        """
        if self._budget.moves <= 0:
            return False
        layout, bits = self.layout, self.places[workload_id]
        count = bits.bit_count()
        others = {
            other: self.places[other]
            for other in self.movable
            if other != workload_id and other in self.places and (other in loose or self.places[other].bit_count() == 1)
        }
        usable = Census(layout, functools.reduce(operator.or_, others.values(), bits | self.idle))
        fewest = usable.fewest_nodes(count)
        if fewest >= len(layout.nodes_of(bits)):
            return False
        num_open = Census(layout, bits | self.idle).idle_of_nodes()
        order = np.lexsort((-num_open, -usable.idle_of_nodes()))
        nodes = functools.reduce(operator.or_, [layout.node_block(int(node)) for node in order[:fewest]])
        chosen = bits & nodes
        chosen |= _first(self.idle & nodes, count - chosen.bit_count())
        leaving: dict[WorkloadId, int] = {}
        for other in sorted(others, key=lambda other: (others[other].bit_count(), other)):
            taken = _first(others[other] & nodes, count - chosen.bit_count())
            if taken:
                leaving[other] = taken
                chosen |= taken
        if len(leaving) >= min(_MAX_MOVES, self._budget.moves):
            return False
        self._budget.moves -= len(leaving) + 1
        for other in (workload_id, *leaving):
            self._release(other)
        self._put(workload_id, chosen)
        # What they keep is idle only until it is given back to them.
        staying = sum(others[other] & ~taken for other, taken in leaving.items())
        for other, taken in leaving.items():
            kept = others[other] & ~taken
            room = Census(layout, self.idle & ~staying)
            more = room.extend(kept, taken.bit_count()) if kept else room.compact(taken.bit_count())
            self._put(other, kept | more)
        return True

    def _release(self, workload_id: WorkloadId) -> None:
        bits = self.places.pop(workload_id)
        self.idle |= bits
        self._leaves_from[self._least_level(workload_id, bits)] &= ~bits
        self._set_owner(bits, None)

    def _set_owner(self, bits: int, owner: WorkloadId | None) -> None:
        start, count = lowest(bits) if bits else 0, bits.bit_count()
        if bits.bit_length() == start + count:
            self._owner[start : start + count] = [owner] * count
            return
        for address in addresses(bits):
            self._owner[address] = owner

    def _place(self, workload_id: WorkloadId, count: int) -> list[tuple[WorkloadId, int]] | None:
        """Give it the aligned block that the fewest devices in use have to leave, if there is one.

        Return the jobs that it takes them from, in the order in which they are placed, with their numbers of devices.
        """
        level = (count - 1).bit_length()
        if level >= self.layout.num_levels:
            return None
        present = self._num_present.get(level)
        if present is None:
            present = self._num_present[level] = self._counts(self.layout.present, level)
        idle, staying = self._counts(self.idle, level), 0
        for bits in self._leaves_from[level + 1 :]:
            staying |= bits
        used = present - idle
        # Among equals, the block with the fewest idle devices around it: large idle blocks are worth keeping.
        around = np.repeat(idle[::2] + idle[1::2], 2) if len(idle) > 1 else idle
        fitting = np.flatnonzero((present >= count) & (self._counts(staying, level) == 0))
        if not len(fitting):
            return None
        start = int(fitting[np.argmin((used * (self.layout.size + 1) + around)[fitting])]) << level
        block = block_at(start, level)
        evicted = {other: self.places[other] for other in self._inside(start, level)}
        for other in evicted:
            self._release(other)
        chosen = 0
        for address in addresses(block & self.layout.present)[:count]:
            chosen |= 1 << address
        self._put(workload_id, chosen)
        order = sorted(evicted, key=lambda other: (-evicted[other].bit_count(), other))
        return [(other, evicted[other].bit_count()) for other in order]

    def _put(self, workload_id: WorkloadId, bits: int) -> None:
        """Move a workload to these idle devices."""
        self.places[workload_id] = bits
        self.idle &= ~bits
        self._set_owner(bits, workload_id)
        self.moved.add(workload_id)
        self._leaves_from[self._least_level(workload_id, bits)] |= bits

    def _counts(self, bits: int, level: int) -> npt.NDArray[np.int64]:
        """How many of the addresses in each block of 2**`level` are in the bitmap."""
        return np.asarray(Census(self.layout, bits).counts(level), dtype=np.int64)

    def _inside(self, start: int, level: int) -> list[WorkloadId]:
        """The jobs in the block, each once, by address."""
        found = dict.fromkeys(self._owner[start : start + (1 << level)])
        return [job_id for job_id in found if job_id is not None]

    def _least_level(self, workload_id: WorkloadId, bits: int) -> int:
        """The level from which on a block can be emptied of a job with these devices: it is smaller and has all of
        them, or they are not in one block anyway."""
        if workload_id not in self.movable:
            return self.layout.num_levels + 1
        if not bits:
            return 0
        first, last, level = lowest(bits), bits.bit_length() - 1, level_for(bits.bit_count())
        # Whether the devices fill an aligned block, or the beginning of one.
        is_block = first >> level == last >> level
        return max(level + 1, (first ^ last).bit_length()) if is_block or workload_id in self.moved else 0


def _first(bits: int, count: int) -> int:
    """The lowest `count` of these devices, or all if they are fewer."""
    return sum(1 << address for address in addresses(bits)[: max(0, count)])
