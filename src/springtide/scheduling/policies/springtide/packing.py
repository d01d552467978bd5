"""Making room in one piece: running jobs are moved out of an aligned block so that another job's workers lie in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.topology import Layout, addresses, block_at, lowest


class Packing:
    """Which job is where, as bitmaps of addresses, and the moves that were made from there.

    Only jobs in `movable` are moved, and only those that take less than the block they make room for, so that the
    search ends. A job that is moved goes to an idle block of its own size, or makes smaller ones move on.
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
        self._owner = {address: who for who, bits in self.places.items() for address in addresses(bits)}

    def gather(self, who: WorkloadId) -> bool:
        """Give `who` as many devices as it has now, in one aligned block. If that cannot be, nothing is changed."""
        before = dict(self.places), self.idle, set(self.moved), dict(self._owner)
        count = self.places[who].bit_count()
        self._release(who)
        if self._place(who, count):
            return True
        self.places, self.idle, self.moved, self._owner = before
        return False

    def _release(self, who: WorkloadId) -> None:
        bits = self.places.pop(who)
        self.idle |= bits
        for address in addresses(bits):
            del self._owner[address]

    def _place(self, who: WorkloadId, count: int) -> bool:
        """Find the aligned block that the fewest devices in use have to leave, and empty it."""
        level = (count - 1).bit_length()
        if level >= self.layout.num_levels:
            return False
        present, idle = self._counts(self.layout.present, level), self._counts(self.idle, level)
        used = present - idle
        # An idle block inside a larger one that is idle too is worth more than one that is left over.
        around = np.repeat(self._counts(self.idle, level + 1), 2)[: len(used)]
        fitting = np.flatnonzero(present >= count)
        ranked = fitting[np.lexsort((fitting, around[fitting], used[fitting]))].tolist()
        start = next((at << level for at in ranked if not used[at] or self._can_empty(at << level, level)), None)
        if start is None:
            return False
        block = block_at(start, level)
        leaving = {who: self.places[who] for who in self._inside(start, level)}
        for other in leaving:
            self._release(other)
        chosen = 0
        for address in addresses(block & self.layout.present)[:count]:
            chosen |= 1 << address
        self.places[who] = chosen
        self.idle &= ~chosen
        self._owner.update(dict.fromkeys(addresses(chosen), who))
        self.moved.add(who)
        order = sorted(leaving, key=lambda other: (-leaving[other].bit_count(), other))
        return all(self._place(other, leaving[other].bit_count()) for other in order)

    def _counts(self, bits: int, level: int) -> npt.NDArray[np.int64]:
        """How many of the addresses in each block of 2**`level` are in the bitmap."""
        size = max(self.layout.size, 1 << level)
        octets = np.frombuffer(bits.to_bytes(-(-size // 8), "little"), dtype=np.uint8)
        flags = np.unpackbits(octets, bitorder="little")[:size]
        counts: npt.NDArray[np.int64] = flags.reshape(-1, 1 << level).sum(axis=1, dtype=np.int64)
        return counts

    def _inside(self, start: int, level: int) -> list[WorkloadId]:
        """The jobs in the block, each once, by address."""
        owner = self._owner
        found = (owner.get(address) for address in range(start, start + (1 << level)))
        return list(dict.fromkeys(who for who in found if who is not None))

    def _can_empty(self, start: int, level: int) -> bool:
        """Whether all jobs in the block may be moved, and are smaller than it or do not lie in one block anyway."""
        inside = self._inside(start, level)
        if not all(who in self.movable for who in inside):
            return False
        block = block_at(start, level)
        return all(
            ((bits.bit_count() - 1).bit_length() < level and not bits & ~block)
            or (who not in self.moved and not _is_block(bits))
            for who, bits in ((who, self.places[who]) for who in inside)
        )


def _is_block(bits: int) -> bool:
    """Whether these devices fill an aligned block, or the beginning of one."""
    level = (bits.bit_count() - 1).bit_length()
    start = lowest(bits) >> level << level
    return not bits & ~block_at(start, level)
