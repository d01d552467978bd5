"""Making room in one piece: running jobs are moved out of an aligned block so that another job's workers lie in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from springtide.core.workload import WorkloadId
from springtide.policies.topology import Layout, addresses, block_at, lowest


class Packing:
    """Who is where, as bitmaps of addresses, and the moves that were made from there.

    Only jobs in `movable` are moved, and only those that take less than the block they make room for, so that the
    search ends. Whoever is moved goes to an idle block of its own size, or makes smaller ones move on.
    """

    def __init__(self, layout: Layout, places: Mapping[WorkloadId, int], movable: Collection[WorkloadId]) -> None:
        self.layout = layout
        self.places = dict(places)
        self.movable = movable
        self.moved: set[WorkloadId] = set()
        taken = 0
        for bits in places.values():
            taken |= bits
        self.idle = layout.present & ~taken

    def gather(self, who: WorkloadId) -> bool:
        """Give `who` as many devices as it has now, in one aligned block. If that cannot be, nothing is changed."""
        before = dict(self.places), self.idle, set(self.moved)
        count = self.places[who].bit_count()
        self._release(who)
        if self._place(who, count):
            return True
        self.places, self.idle, self.moved = before
        return False

    def _release(self, who: WorkloadId) -> None:
        self.idle |= self.places.pop(who)

    def _place(self, who: WorkloadId, count: int) -> bool:
        """Find the aligned block that the fewest devices in use have to leave, and empty it."""
        level = (count - 1).bit_length()
        if level >= self.layout.num_levels:
            return False
        best: tuple[int, int, int] | None = None
        size = 1 << level
        for start in range(0, self.layout.size, size):
            block = block_at(start, level)
            if (block & self.layout.present).bit_count() < count:
                continue
            used = block & ~self.idle & self.layout.present
            # An idle block inside a larger one that is idle too is worth more than one that is left over.
            rank = (
                used.bit_count(),
                (block_at(start >> level + 1 << level + 1, level + 1) & self.idle).bit_count(),
                start,
            )
            if (best is None or rank < best) and self._can_empty(block, level):
                best = rank
        if best is None:
            return False
        start = best[2]
        block = block_at(start, level)
        leaving = self._inside(block)
        for other in leaving:
            self._release(other)
        chosen = 0
        for address in addresses(block & self.layout.present)[:count]:
            chosen |= 1 << address
        self.places[who] = chosen
        self.idle &= ~chosen
        self.moved.add(who)
        order = sorted(leaving, key=lambda other: (-leaving[other].bit_count(), other))
        return all(self._place(other, leaving[other].bit_count()) for other in order)

    def _inside(self, block: int) -> dict[WorkloadId, int]:
        return {who: bits for who, bits in self.places.items() if bits & block}

    def _can_empty(self, block: int, level: int) -> bool:
        """Whether all who are in the block may be moved, and are smaller than it or do not lie in one block anyway."""
        if block & ~self.idle & self.layout.present == 0:
            return True
        return all(
            who in self.movable
            and (
                ((bits.bit_count() - 1).bit_length() < level and not bits & ~block)
                or (who not in self.moved and not _is_block(bits))
            )
            for who, bits in self.places.items()
            if bits & block
        )


def _is_block(bits: int) -> bool:
    """Whether these devices fill an aligned block, or the beginning of one."""
    level = (bits.bit_count() - 1).bit_length()
    start = lowest(bits) >> level << level
    return not bits & ~block_at(start, level)
