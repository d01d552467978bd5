"""The cluster as a tree of aligned blocks: devices, halves of nodes, nodes, groups of nodes; best fit and buddies.

Devices are bits of one integer (a bitmap), so that a question to the whole cluster is a handful of integer operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springtide.scheduling.placement.layout import Layout as Layout
from springtide.scheduling.placement.layout import address_array, enclosing_level
from springtide.scheduling.placement.layout import addresses as addresses
from springtide.scheduling.placement.layout import block_at as block_at
from springtide.scheduling.placement.layout import layout_of as layout_of
from springtide.scheduling.placement.layout import level_for as level_for
from springtide.scheduling.placement.layout import lowest as lowest

Ints = NDArray[np.int64]

Counts = NDArray[np.uint8] | Ints

# For blocks of 1, 2 and 4 bits: how many bits of a byte are in each, as the bytes of one number. Shapes [256].
_BITS_IN_BYTE: tuple[NDArray[Any], ...] = tuple(
    np.array(
        [[(value >> shift & (1 << width) - 1).bit_count() for shift in range(0, 8, width)] for value in range(256)],
        dtype=np.uint8,
    )
    .view(of_all)
    .reshape(-1)
    for width, of_all in ((1, np.uint64), (2, np.uint32), (4, np.uint16))
)


class Census:
    """What is idle in a layout: for each level the blocks that are idle throughout and the idle devices per block.

    Immutable; counts lazily, so that a question costs only the levels it looks at.
    """

    __slots__ = ("_counts", "_full", "_of_nodes", "_on_wide", "idle", "layout")

    def __init__(self, layout: Layout, idle: int) -> None:
        self.layout = layout
        self.idle = idle
        self._full = [idle]
        self._counts: dict[int, Counts] = {}
        self._of_nodes: Ints | None = None
        self._on_wide: dict[int, Census] = {}

    @property
    def num_idle(self) -> int:
        """How many devices are idle."""
        return self.idle.bit_count()

    def full(self, level: int) -> int:
        """The first addresses of all blocks of the level that are idle throughout."""
        while len(self._full) <= level:
            below = len(self._full) - 1
            blocks = self._full[below]
            self._full.append(blocks & blocks >> (1 << below) & self.layout.aligned[below + 1])
        return self._full[level]

    def counts(self, level: int) -> Counts:
        """How many devices are idle in each block of the level, in order of address."""
        found = self._counts.get(level)
        if found is None:
            found = self._counts[level] = self._counted(level)
        return found

    def _counted(self, level: int) -> Counts:
        if level > 3:
            below = self.counts(level - 1)
            return np.asarray(below[::2] + below[1::2], dtype=np.int64)
        octets = np.frombuffer(self.idle.to_bytes(self.layout.size // 8, "little"), dtype=np.uint8)
        if level == 3:
            whole_bytes: Ints = np.bitwise_count(octets).astype(np.int64)
            return whole_bytes
        return _BITS_IN_BYTE[level][octets].view(np.uint8)

    def largest_level(self) -> int:
        """The level of the largest block that is idle throughout; -1 if nothing is idle."""
        level = -1
        while level + 1 < self.layout.num_levels and self.full(level + 1):
            level += 1
        return level

    def best_block(self, level: int) -> int:
        """A block of the level that is idle throughout, as a bitmap; 0 if there is none.

        Best fit (ElasticFlow §4.3) among buddies: cut from the smallest idle block that is large enough, and among
        equals from where the surrounding subtrees have the fewest idle devices, nearest subtree first.
        """
        for upper in range(level, self.layout.num_levels):
            blocks = self.full(upper)
            if not blocks:
                return 0
            if upper + 1 < self.layout.num_levels:
                parents = self.full(upper + 1)
                blocks &= ~(parents | parents << (1 << upper))
            if blocks:
                return block_at(self._tightest(address_array(blocks, self.layout.size), upper + 1), level)
        return 0

    def _tightest(self, starts: Ints, level: int) -> int:
        """The start whose surroundings have the fewest idle devices: at this level, then at each one above."""
        while len(starts) > 1 and level < self.layout.num_levels:
            around = self.counts(level)[starts >> level]
            starts = starts[around == around.min()]
            level += 1
        return int(starts[0])

    def compact(self, count: int) -> int:
        """Any `count` idle devices as close together as possible, as a bitmap; 0 if fewer are idle.

        A power of two is an aligned block if one is idle (within a node before across nodes). Else: the fewest nodes;
        among those the smallest subtree with enough idle devices; among those best fit.
        """
        if count <= 0 or self.num_idle < count:
            return 0
        if count & (count - 1) == 0:
            block = self.aligned_block(count)
            if block:
                return block
        fewest = self.fewest_nodes(count)
        if fewest == 1:
            return self._in_one_node(count)
        return self._across_nodes(count, fewest)

    def aligned_block(self, count: int) -> int:
        """An idle aligned block of `count` (a power of two) devices on as few nodes as can be; 0 if there is none."""
        level = level_for(count)
        if level >= self.layout.num_levels:
            return 0
        wide = max((end for node_level, _, end in self.layout.runs if node_level >= level), default=0)
        if 0 < wide < self.layout.runs[-1][2]:
            # Nodes of several widths: look first where a block of this size does not reach beyond a node.
            part = self._on_wide.get(wide)
            if part is None:
                part = self._on_wide[wide] = Census(self.layout, self.idle & ((1 << wide) - 1))
            block = part.best_block(level)
            if block:
                return block
        return self.best_block(level)

    def idle_of_nodes(self) -> Ints:
        """How many devices are idle on each node; not to be changed. Shape [nodes]."""
        if self._of_nodes is None:
            parts = [self._counts_between(level, start, end) for level, start, end in self.layout.runs]
            self._of_nodes = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        return self._of_nodes

    def _counts_between(self, level: int, start: int, end: int) -> Counts:
        """How many devices are idle in each block of the level between these addresses, multiples of its size."""
        if level >= 3 or level in self._counts:
            return self.counts(level)[start >> level : end >> level]
        # Few nodes are so narrow: the rest need not be counted.
        part = self.idle >> start & (1 << end - start) - 1
        octets = np.frombuffer(part.to_bytes((end - start + 7) // 8, "little"), dtype=np.uint8)
        return _BITS_IN_BYTE[level][octets].view(np.uint8)[: end - start >> level]

    def fewest_nodes(self, count: int) -> int:
        """The fewest nodes with `count` idle devices together; 0 if not so many are idle."""
        return _num_needed(self.idle_of_nodes(), count)

    def _in_one_node(self, count: int) -> int:
        """The smallest subtree within a node that has enough idle devices, best fit; then the devices in it."""
        layout = self.layout
        for level in range(level_for(count), layout.node_levels[0] + 1):
            wide = max(end for node_level, _, end in layout.runs if node_level >= level)
            counts = self.counts(level)[: wide >> level]
            enough = counts[counts >= count]
            if len(enough):
                tight = np.flatnonzero(counts == enough.min()) << level
                return self._pick(self._tightest(tight, level + 1), level, count)
        raise AssertionError("one node was said to suffice")

    def _pick(self, start: int, level: int, count: int) -> int:
        """`count` idle devices of a subtree neither half of which has as many: the fuller half whole, then the rest."""
        inside = self.idle & block_at(start, level)
        if inside.bit_count() == count:
            return inside
        left = inside & block_at(start, level - 1)
        fuller, other = left, inside & ~left
        if other.bit_count() > fuller.bit_count():
            fuller, other = other, fuller
        return fuller | Census(self.layout, other).compact(count - fuller.bit_count())

    def _across_nodes(self, count: int, fewest: int) -> int:
        """`count` devices on `fewest` nodes of the smallest subtree that allows it: whole nodes, then the best fit."""
        layout = self.layout
        idle = self.idle_of_nodes()
        for level in range(level_for(count), layout.num_levels):
            counts = self.counts(level)
            roomy = np.flatnonzero(counts >= count)
            for index in roomy[np.argsort(counts[roomy], kind="stable")].tolist():
                first = bisect_left(layout.node_starts, index << level)
                last = bisect_left(layout.node_starts, (index + 1) << level)
                if _num_needed(idle[first:last], count) == fewest:
                    return self._fill_nodes(range(first, last), idle, count)
        raise AssertionError("the cluster as a whole was said to suffice")

    def _fill_nodes(self, nodes: range, idle: Ints, count: int) -> int:
        chosen = 0
        left = idle[nodes.start : nodes.stop].copy()
        while count:
            able = np.flatnonzero(left >= count)
            if len(able):
                tight = nodes[int(able[np.argmin(left[able])])]
                return chosen | Census(self.layout, self.idle & self.layout.node_block(tight)).compact(count)
            fullest = int(np.argmax(left))
            assert left[fullest] > 0, "these nodes were said to suffice"
            chosen |= self.idle & self.layout.node_block(nodes[fullest])
            count -= int(left[fullest])
            left[fullest] = 0
        return chosen

    def extend(self, own: int, count: int) -> int:
        """`count` idle devices next to the devices `own` (not idle, not empty), as a bitmap; 0 if fewer are idle.

        First what lies in the smallest subtree around `own` with enough room; the nodes it is on first if that way it
        spreads over fewer nodes.
        """
        if self.num_idle < count:
            return 0
        near = self._extend_subtree(own, count)
        nodes, num_near = self.layout.nodes_of(own), len(self.layout.nodes_of(own | near))
        if num_near <= len(nodes):
            return near
        home = self.idle & sum(self.layout.node_block(node) for node in nodes)
        missing = count - home.bit_count()
        if missing > 0 and num_near <= len(nodes) + self.fewest_nodes(missing):
            # What is missing is on at least so many other nodes.
            return near
        at_home = Census(self.layout, home).compact(count) if missing <= 0 else home
        if missing > 0:
            at_home |= Census(self.layout, self.idle & ~home).compact(missing)
        return at_home if len(self.layout.nodes_of(own | at_home)) < num_near else near

    def _extend_subtree(self, own: int, count: int) -> int:
        level = enclosing_level(own)
        start = lowest(own) >> level << level
        inside = self.idle & block_at(start, level)
        if inside.bit_count() >= count:
            return Census(self.layout, inside).compact(count)
        while True:
            level += 1
            start = start >> level << level
            wider = self.idle & block_at(start, level)
            if wider.bit_count() >= count:
                rest = Census(self.layout, wider & ~inside).compact(count - inside.bit_count())
                return inside | rest
            inside = wider


class Blocks:
    """The idle devices of a cluster, to take from and give back to: what a policy asks while it is still deciding.

    `layout` says where devices sit (see `layout_of`), `idle` is a bitmap of addresses, by default all devices. Devices
    are addresses: `layout.address_of[device_id]` there, `layout.device_at[address]` back. Not thread-safe.
    """

    __slots__ = ("_census",)

    def __init__(self, layout: Layout, idle: int | None = None) -> None:
        self._census = Census(layout, layout.present if idle is None else idle & layout.present)

    @property
    def layout(self) -> Layout:
        """Where the devices sit."""
        return self._census.layout

    @property
    def idle(self) -> int:
        """The idle devices as a bitmap."""
        return self._census.idle

    @property
    def num_idle(self) -> int:
        """How many devices are idle."""
        return self._census.num_idle

    def copy(self) -> Blocks:
        """The same idle devices, to be changed apart. Costs nothing."""
        twin = Blocks.__new__(Blocks)
        twin._census = self._census
        return twin

    def largest_block(self) -> int:
        """How many devices the largest idle aligned block has; 0 if nothing is idle."""
        level = self._census.largest_level()
        return 0 if level < 0 else 1 << level

    def fits(self, count: int) -> bool:
        """Whether `count` devices are idle compactly: an aligned block for a power of two, else the fewest nodes."""
        return fits_compactly(self._census, count)

    def take(self, count: int, *, beside: Iterable[int] = ()) -> tuple[int, ...]:
        """Mark `count` devices busy and return their addresses, ascending: best fit, or next to the devices `beside`.

        Raises ValueError if fewer are idle.
        """
        own = sum(1 << address for address in beside)
        chosen = self._census.extend(own, count) if own else self._census.compact(count)
        if chosen.bit_count() != count:
            raise ValueError(f"{count} devices wanted, {self.num_idle} idle")
        self._census = Census(self.layout, self.idle & ~chosen)
        return tuple(addresses(chosen))

    def give(self, given: Iterable[int]) -> None:
        """Mark devices idle."""
        self._census = Census(self.layout, self.idle | sum(1 << address for address in given))


def fits_compactly(census: Census, count: int) -> bool:
    """Whether `count` devices are idle as close as an empty cluster could have them: a block for a power of two."""
    if count > census.num_idle:
        return False
    if count & (count - 1) == 0 and count <= census.layout.largest_block:
        return census.full(level_for(count)) != 0
    return fewest_suffice(census, count)


def fewest_suffice(census: Census, count: int) -> bool:
    """Whether `count` devices are idle on no more nodes than an empty cluster would need."""
    return 0 < census.fewest_nodes(count) <= census.layout.nodes_needed(count)


def _num_needed(idle: Ints, count: int) -> int:
    """How many of the nodes, fullest first, it takes to have `count` (at least 1) idle devices; 0 if all are not
    enough."""
    number, nodes_with = 0, np.bincount(idle)
    for size in range(len(nodes_with) - 1, 0, -1):
        num_nodes = int(nodes_with[size])
        if num_nodes * size >= count:
            return number - (-count // size)
        number, count = number + num_nodes, count - num_nodes * size
    return 0
