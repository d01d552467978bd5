"""Where every device of a cluster sits in the tree of blocks, as an address; and bitmaps of addresses."""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.decision import PoolAllocation, Same
from springtide.core.resources import Device, DeviceId, Node, Topology
from springtide.core.workload import WorkloadId

# So many answers for the devices of a workload are kept. On 8,192 devices there are some 1,500 workloads, and several
# layouts: with and without devices that are shared.
_MOST_KEPT = 16384


class Layout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where every device of a cluster sits in the tree: its address.

    A block of level k is 2**k consecutive addresses from a multiple of 2**k on. Each node is one block: its devices in
    index order, its two halves (sockets) side by side. Nodes lie in order of width, then of joining, so that 2, 4, 8...
    neighbours are blocks too (the nodes of a switch). Widths that are no power of two are padded with addresses without
    a device. `runs` are the stretches of nodes of one width: level of a node, first address, end. `present` is the
    bitmap of all devices, `aligned[k]` that of all starts of blocks of level k, `most_on_nodes[n - 1]` what the n
    fullest nodes have, `largest_block` the largest power of two that is a block with a device at every address.
    """

    size: int
    present: int
    address_of: Mapping[DeviceId, int]
    device_at: tuple[DeviceId | None, ...]
    node_starts: tuple[int, ...]
    node_levels: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    aligned: tuple[int, ...]
    most_on_nodes: tuple[int, ...]
    largest_block: int

    @property
    def num_levels(self) -> int:
        """How many sizes of blocks there are, one device and the whole included."""
        return len(self.aligned)

    def node_at(self, address: int) -> int:
        """The number of the node in whose block the address lies."""
        return bisect_left(self.node_starts, address + 1) - 1

    def node_block(self, node: int) -> int:
        """The bitmap of all addresses of a node."""
        return block_at(self.node_starts[node], self.node_levels[node])

    def nodes_needed(self, num_devices: int) -> int:
        """The fewest nodes that hold `num_devices` of an empty cluster."""
        return bisect_left(self.most_on_nodes, num_devices) + 1

    def nodes_of(self, devices: int) -> list[int]:
        """The nodes on which a bitmap of devices lies, in order of address."""
        nodes: list[int] = []
        while devices:
            node = self.node_at(lowest(devices))
            nodes.append(node)
            devices &= ~self.node_block(node)
        return nodes

    def bitmap(self, device_ids: Iterable[DeviceId]) -> int:
        """The bitmap of some devices; those that are not alive are left out."""
        if isinstance(device_ids, tuple):
            return _bitmap(self, device_ids)
        found = map(self.address_of.get, device_ids)
        return self.bitmap_at([address for address in found if address is not None])

    def bitmap_at(self, chosen: Sequence[int]) -> int:
        """The bitmap of some addresses."""
        if len(chosen) <= 16:
            # From the lowest one on, since the devices of a workload mostly lie close together.
            first, bits = min(chosen, default=0), 0
            for address in chosen:
                bits |= 1 << address - first
            return bits << first
        digits = bytearray(b"0") * self.size
        for address in chosen:
            digits[~address] = 49
        return int(digits, 2)

    def devices_of(self, bits: int) -> tuple[DeviceId, ...]:
        """The devices in a bitmap, in order of address."""
        found = [self.device_at[address] for address in addresses(bits & self.present)]
        return tuple([device for device in found if device is not None])


@functools.lru_cache(maxsize=_MOST_KEPT)
def _bitmap(layout: Layout, device_ids: tuple[DeviceId, ...]) -> int:
    # Workloads keep their devices, and are asked for them many times in each decision.
    address_of = layout.address_of
    return layout.bitmap_at([address_of[device] for device in device_ids if device in address_of])


def layout_of(cluster: Topology) -> Layout:
    """The layout of a cluster; the same object again while the nodes are the same."""
    return _layout(SameNodes(cluster.nodes))


def topology_of(nodes: tuple[Node, ...]) -> Topology:
    """The cluster of these nodes; the same object again while they are the same, since policies keep what they derive
    from it."""
    return _topology(SameNodes(nodes))


@functools.lru_cache(maxsize=16384)
def shape_of(node: Node) -> str:
    """How many devices of a node are visible, and which ones if there are gaps; for fingerprints of a cluster.

    If other workloads hold parts of a node, an equal number of visible devices may be different ones.
    """
    indices = [device.index for device in node.devices]
    return str(len(indices)) if indices == list(range(len(indices))) else f"of {','.join(map(str, indices))}"


class HeldDevices(NamedTuple):
    """The devices that workloads hold, as bitmaps without dead devices: of each, and of all together."""

    of: Mapping[WorkloadId, int]
    all: int


def held_devices(layout: Layout, allocations: Mapping[WorkloadId, PoolAllocation]) -> HeldDevices:
    """The devices of these allocations (not changed any more); the same object again for the same mapping."""
    return _held_devices(layout, Same(allocations))


@functools.lru_cache(maxsize=4)
def _held_devices(layout: Layout, key: Same[Mapping[WorkloadId, PoolAllocation]]) -> HeldDevices:
    of = {workload_id: _bitmap(layout, held.device_ids) for workload_id, held in key.value.items()}
    return HeldDevices(of, functools.reduce(operator.or_, of.values(), 0))


@functools.lru_cache(maxsize=_MOST_KEPT)
def is_scattered(layout: Layout, devices: Sequence[DeviceId]) -> bool:
    """Whether devices (a tuple, all alive) lie on more nodes than an empty cluster would need for so many.

    Cached: it is called with the same tuples again and again while workloads keep their devices.
    """
    found = [layout.address_of[device] for device in devices]
    low, high = min(found), max(found)
    node = layout.node_at(low)
    if high < layout.node_starts[node] + (1 << layout.node_levels[node]):
        return False
    return len({layout.node_at(address) for address in found}) > layout.nodes_needed(len(found))


class SameNodes:
    """The nodes of a cluster as a key that is cheap to look up: equal by content, compared by identity first."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes

    def __hash__(self) -> int:
        ends = (self.nodes[0].node_id, self.nodes[-1].node_id) if self.nodes else ()
        return hash((len(self.nodes), ends))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameNodes) and (self.nodes is other.nodes or self.nodes == other.nodes)


def _largest_block(blocks: int, aligned: Sequence[int]) -> int:
    size = 0
    for level in range(len(aligned)):
        if not blocks:
            break
        size = 1 << level
        blocks &= blocks >> size & aligned[min(level + 1, len(aligned) - 1)]
    return size


@functools.lru_cache(maxsize=16)
def _topology(key: SameNodes) -> Topology:
    return Topology(nodes=key.nodes)


@functools.lru_cache(maxsize=8)
def _layout(key: SameNodes) -> Layout:
    slots = [_slots(node.devices) for node in key.nodes if node.devices]
    slots.sort(key=len, reverse=True)
    starts: list[int] = []
    line: list[DeviceId | None] = []
    runs: list[tuple[int, int, int]] = []
    for node in slots:
        start, level = len(line), level_for(len(node))
        starts.append(start)
        line += node
        if runs and runs[-1][0] == level:
            start = runs.pop()[1]
        runs.append((level, start, len(line)))
    size = max(8, _power_at_least(len(line)))
    line += [None] * (size - len(line))
    most, sums = 0, []
    for capacity in sorted((sum(device is not None for device in node) for node in slots), reverse=True):
        most += capacity
        sums.append(most)
    whole = (1 << size) - 1
    aligned = tuple(whole // ((1 << (1 << level)) - 1) for level in range(size.bit_length()))
    present = sum(1 << address for address, device in enumerate(line) if device is not None)
    return Layout(
        size=size,
        present=present,
        address_of={device: address for address, device in enumerate(line) if device is not None},
        device_at=tuple(line),
        node_starts=tuple(starts),
        node_levels=tuple(level_for(len(node)) for node in slots),
        runs=tuple(runs),
        aligned=aligned,
        most_on_nodes=tuple(sums),
        largest_block=_largest_block(present, aligned),
    )


def _slots(devices: Sequence[Device]) -> list[DeviceId | None]:
    """The devices of a node, filled up to a power of two: halves if their number is even, else the largest block first.

    Six devices are two sockets of three; five are a block of four and one more.
    """
    count = len(devices)
    if count & (count - 1) == 0:
        return [device.device_id for device in devices]
    first = count // 2 if count % 2 == 0 else 1 << (count.bit_length() - 1)
    left, right = _slots(devices[:first]), _slots(devices[first:])
    return left + right + [None] * (len(left) - len(right))


# More addresses than these are faster found all at once.
_MANY = 64


def block_at(start: int, level: int) -> int:
    """The bitmap of the 2**level addresses from `start` on."""
    return ((1 << (1 << level)) - 1) << start


def lowest(bits: int) -> int:
    """The lowest address in a bitmap that is not empty."""
    return (bits & -bits).bit_length() - 1


def addresses(bits: int) -> list[int]:
    """All addresses in a bitmap, ascending."""
    if bits.bit_count() > _MANY:
        found: list[int] = address_array(bits, -(-bits.bit_length() // 8) * 8).tolist()
        return found
    # In words of 64 bits: picking bits from an integer of a thousand bytes would copy it each time.
    chosen: list[int] = []
    offset = 0
    while bits:
        skipped = lowest(bits)
        bits >>= skipped
        offset += skipped
        word = bits & 0xFFFFFFFFFFFFFFFF
        bits >>= 64
        while word:
            low = word & -word
            chosen.append(offset + low.bit_length() - 1)
            word ^= low
        offset += 64
    return chosen


def address_array(bits: int, size: int) -> NDArray[np.int64]:
    """All addresses in a bitmap of `size` (a multiple of 8) addresses, ascending."""
    octets = np.frombuffer(bits.to_bytes(size // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


def level_for(count: int) -> int:
    """The level of the smallest block with at least `count` (at least 1) addresses."""
    return (count - 1).bit_length()


def enclosing_level(bits: int) -> int:
    """The level of the smallest block that has all addresses of a bitmap that is not empty."""
    return (lowest(bits) ^ (bits.bit_length() - 1)).bit_length()


def _power_at_least(count: int) -> int:
    return 1 << level_for(max(1, count))
