"""The shares that workloads hold of every device: exact sums within bounds, all or nothing, and fast to scan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, Topology
from springtide.core.shares import MAX_LIMIT, Load, Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.layout import SameNodes
from springtide.scheduling.sharing.demand import TOLERANCE_UNITS, UNITS, ShareDemand, demand_of
from springtide.scheduling.sharing.outlook import STALE_FRACTION, FitOutlook, Remainders

# The memory of a device on which it is not counted.
UNCOUNTED_MB = 2**50

KeyT = TypeVar("KeyT")
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
Sums = NDArray[np.float64]


class LedgerBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The largest sums of requests and of limits on one device (Dilu's Omega and gamma)."""

    max_request: float = 1.0
    max_limit: float = MAX_LIMIT


class Part(msgspec.Struct, frozen=True):
    """What a workload holds of one device."""

    device_id: DeviceId
    share: Share


class Room(NamedTuple):
    """On which devices there is room, and whether on any."""

    on: Flags
    is_any: bool


class ShareLedger:
    """What is taken of each device of a cluster, in columns for fast scans over all devices.

    Shape (num_devices,), in the cluster's order: `free_request` and `free_limit` (units) and `free_memory_mb` are left
    within the bounds. `is_open`: a workload shares the device. `is_usable`: a newcomer may be put there; the device is
    one of `allowed` (None: all) and no workload holds it as a whole. `node_at` is the index of the device's node
    in the topology, `memory_kind` that of its memory in `memory_sizes_mb`.

    `grid` has the devices of each node in a row, padded with -1; `num_idle` counts the usable devices of each node that
    no workload holds.
    """

    def __init__(
        self, cluster: Topology, bounds: LedgerBounds | None = None, *, allowed: Collection[DeviceId] | None = None
    ) -> None:
        self.bounds = bounds if bounds is not None else LedgerBounds()
        self.max_request = round(self.bounds.max_request * UNITS)
        self.max_limit = round(self.bounds.max_limit * UNITS)
        columns = _columns_of(SameNodes(cluster.nodes))
        self.device_ids, self.at, self.nodes, self.grid, self.node_at = columns[:5]
        self.memory_mb, self.memory_sizes_mb, self.memory_kind = columns[5:]
        num = len(self.device_ids)
        self.free_request: Counts = np.full(num, self.max_request + TOLERANCE_UNITS, dtype=np.int64)
        self.free_limit: Counts = np.full(num, self.max_limit + TOLERANCE_UNITS, dtype=np.int64)
        self.free_memory_mb: Counts = self.memory_mb.copy()
        self.is_open: Flags = np.zeros(num, dtype=np.bool_)
        self.is_usable: Flags = np.ones(num, dtype=np.bool_)
        if allowed is not None:
            self.is_usable[:] = False
            self.is_usable[[self.at[device_id] for device_id in allowed]] = True
        self.num_idle: Counts = np.bincount(self.node_at[self.is_usable], minlength=len(self.nodes)).astype(np.int64)
        # Each workload's family and devices; the workloads on each device; the devices of each family, in order of
        # arrival.
        self._held: dict[WorkloadId, tuple[str, tuple[tuple[int, ShareDemand], ...]]] = {}
        self._on: defaultdict[int, dict[WorkloadId, str]] = defaultdict(dict)
        self._family_at: dict[str, dict[int, int]] = {}
        # How often each demand is held.
        self.mix: dict[ShareDemand, int] = {}
        self._num_changes = 0
        # Which devices have room for each demand, and the shared devices of nodes, until something changes.
        self._rooms: dict[tuple[ShareDemand, bool, bool], Room] = {}
        self._num_open: Counts | None = None
        self._outlook: FitOutlook | None = None
        self._outlook_at = 0

    def block(self, device_id: DeviceId) -> None:
        """Put no workload on this device: one holds it as a whole."""
        self._note_change()
        at = self.at[device_id]
        if self.is_usable[at]:
            self.is_usable[at] = False
            if not self.is_open[at]:
                self.num_idle[self.node_at[at]] -= 1

    def block_all(self, device_ids: Iterable[DeviceId]) -> None:
        """Put no workload on any of these devices; those that are not of the cluster are left out."""
        self._note_change()
        self.is_usable[[at for at in map(self.at.get, device_ids) if at is not None]] = False
        idle = self.node_at[self.is_usable & ~self.is_open]
        self.num_idle = np.bincount(idle, minlength=len(self.nodes)).astype(np.int64)

    def unblock(self, device_id: DeviceId) -> None:
        """Workloads may be put on this device again."""
        self._note_change()
        at = self.at[device_id]
        if not self.is_usable[at]:
            self.is_usable[at] = True
            if not self.is_open[at]:
                self.num_idle[self.node_at[at]] += 1

    def hold(self, workload_id: WorkloadId, family: str, parts: Sequence[Part], *, is_given: bool = False) -> None:
        """Put a workload on its devices, all of them or none.

        `is_given`: it is there already, so it is accepted even beyond the bounds; then no other workload fits there.
        Raises InvalidRequest if it does not fit, names a device twice or an unknown one, or is in the ledger already.
        """
        demands = tuple((self._index(part.device_id), demand_of(part.share)) for part in parts)
        if not parts or workload_id in self._held or len({at for at, _ in demands}) < len(demands):
            raise InvalidRequest(f"{workload_id} takes each of its devices once, and is to be let go before it moves")
        if not is_given:
            for at, demand in demands:
                if not self._has_room(at, demand):
                    raise InvalidRequest(
                        f"{self.device_ids[at]} has no room for {workload_id}: choose a device by what is left on it"
                    )
        self._held[workload_id] = (family, demands)
        at_family = self._family_at.setdefault(family, {})
        for at, demand in demands:
            self._add(at, demand, 1)
            self._on[at][workload_id] = family
            at_family[at] = at_family.get(at, 0) + 1
            self.mix[demand] = self.mix.get(demand, 0) + 1
            if not self.is_open[at]:
                self.is_open[at] = True
                self.num_idle[self.node_at[at]] -= int(self.is_usable[at])
        self._num_changes += 1
        self._note_change()

    def release(self, workload_id: WorkloadId) -> None:
        """Take a workload off all of its devices. Raises InvalidRequest if it holds nothing."""
        found = self._held.pop(workload_id, None)
        if found is None:
            raise InvalidRequest(f"{workload_id} holds no share of a device, so there is nothing to give back")
        family, demands = found
        at_family = self._family_at[family]
        for at, demand in demands:
            self._add(at, demand, -1)
            del self._on[at][workload_id]
            _count_down(at_family, at)
            _count_down(self.mix, demand)
            if not self._on[at]:
                self.is_open[at] = False
                self.num_idle[self.node_at[at]] += int(self.is_usable[at])
        if not at_family:
            del self._family_at[family]
        self._num_changes += 1
        self._note_change()

    def has_room(self, device_id: DeviceId, demand: ShareDemand) -> bool:
        """Whether this device is usable and has room for one more such demand."""
        return self._has_room(self._index(device_id), demand)

    def room_for(self, demand: ShareDemand) -> Flags:
        """Which usable devices have room for one more such demand: shape (num_devices,)."""
        return self.room_among(demand).on.copy()

    def room_among(self, demand: ShareDemand, *, may_open: bool = True, beside_shared: bool = False) -> Room:
        """Which usable devices have room for one more such demand; without `may_open` of those that are shared, with
        `beside_shared` of nodes on which some are shared. Shape (num_devices,); not to be changed."""
        key = (demand, may_open, beside_shared)
        known = self._rooms.get(key)
        if known is None:
            fits = self.free_request >= demand.request
            fits &= self.free_limit >= demand.limit
            fits &= self.free_memory_mb >= demand.memory_mb
            fits &= self.is_usable
            if not may_open:
                fits &= self.is_open
            if beside_shared:
                fits &= (self.num_open_on_nodes() > 0)[self.node_at]
            known = self._rooms[key] = Room(fits, bool(fits.any()))
        return known

    def has_room_without(self, device_id: DeviceId, leaver: ShareDemand, demand: ShareDemand) -> bool:
        """Whether a usable device has room for one more such demand once a sharer with the demand `leaver` has left."""
        at = self._index(device_id)
        return bool(
            self.is_usable[at]
            and self.free_request[at] + leaver.request >= demand.request
            and self.free_limit[at] + leaver.limit >= demand.limit
            and self.free_memory_mb[at] + leaver.memory_mb >= demand.memory_mb
        )

    def left_on(self, at: Counts) -> Remainders:
        """What is left of the devices at these places: requests, limits and memory."""
        return self.free_request[at], self.free_limit[at], self.free_memory_mb[at]

    def beside(self, family: str) -> list[int]:
        """Devices that host what this family shares other devices with, but not the family itself; ascending.

        That is Dilu's workload affinity (section 3.3, principle 1): where one instance of it runs beside a worker of
        a job, the next one goes beside another worker of that job, so that its workers stay equally fast.
        """
        own = self._family_at.get(family)
        if not own:
            return []
        partners = {name: None for at in own for name in self._on[at].values() if name != family}
        return sorted({at for name in partners for at in self._family_at[name]} - set(own))

    def outlook(self, newcomer: ShareDemand) -> FitOutlook:
        """The usefulness of remainders for the demands held now; if none are held, for the newcomer alone.

        It is made anew once an eighth of these demands may have changed, so that it costs little on the whole.
        """
        memory_mb = int(self.memory_sizes_mb[-1]) if len(self.memory_sizes_mb) else 0
        capacity = ShareDemand(self.max_request, self.max_limit, memory_mb)
        if not self.mix:
            return FitOutlook({newcomer: 1}, capacity)
        if self._outlook is None or self._num_changes - self._outlook_at >= 1 + len(self.mix) * STALE_FRACTION:
            self._outlook, self._outlook_at = FitOutlook(dict(self.mix), capacity), self._num_changes
        return self._outlook

    def load(self, device_id: DeviceId) -> Load:
        """The sums of what workloads share of a device."""
        at = self._index(device_id)
        return Load(
            num_holders=len(self._on[at]),
            request=(self.max_request + TOLERANCE_UNITS - int(self.free_request[at])) / UNITS,
            limit=(self.max_limit + TOLERANCE_UNITS - int(self.free_limit[at])) / UNITS,
            memory_mb=int(self.memory_mb[at] - self.free_memory_mb[at]),
        )

    def sums_on(self, at: Counts) -> tuple[Sums, Sums]:
        """The sums of requests and of limits on the devices at these places, as `load` has them."""
        requests: Sums = (self.max_request + TOLERANCE_UNITS - self.free_request[at]) / UNITS
        limits: Sums = (self.max_limit + TOLERANCE_UNITS - self.free_limit[at]) / UNITS
        return requests, limits

    def holders(self, device_id: DeviceId) -> Mapping[WorkloadId, str]:
        """The workloads that share a device, each with its family, in order of arrival."""
        return self._on[self._index(device_id)]

    def demands_on(self, at: int) -> list[ShareDemand]:
        """What each sharer of the device at this place holds of it, in order of arrival."""
        return [demand for name in self._on[at] for where, demand in self._held[name][1] if where == at]

    def devices_of(self, workload_id: WorkloadId) -> tuple[DeviceId, ...]:
        """The devices of a workload in rank order; empty if it holds nothing."""
        _, demands = self._held.get(workload_id, ("", ()))
        return tuple(self.device_ids[at] for at, _ in demands)

    @property
    def num_open(self) -> int:
        """How many devices are shared, by one workload or more."""
        return int(np.count_nonzero(self.is_open))

    def num_open_on_nodes(self) -> Counts:
        """How many devices of each node are shared; not to be changed. Shape (nodes,)."""
        if self._num_open is None:
            self._num_open = np.bincount(self.node_at[self.is_open], minlength=len(self.nodes))
        return self._num_open

    def _note_change(self) -> None:
        self._rooms.clear()
        self._num_open = None

    def _index(self, device_id: DeviceId) -> int:
        at = self.at.get(device_id)
        if at is None:
            raise InvalidRequest(f"there is no device {device_id!r:.80} in this cluster; choose one of its topology")
        return at

    def _has_room(self, at: int, demand: ShareDemand) -> bool:
        return bool(
            self.is_usable[at]
            and self.free_request[at] >= demand.request
            and self.free_limit[at] >= demand.limit
            and self.free_memory_mb[at] >= demand.memory_mb
        )

    def _add(self, at: int, demand: ShareDemand, sign: int) -> None:
        self.free_request[at] -= sign * demand.request
        self.free_limit[at] -= sign * demand.limit
        self.free_memory_mb[at] -= sign * demand.memory_mb


def parts_of(device_ids: Iterable[DeviceId], share: Share) -> tuple[Part, ...]:
    """The same share of each of these devices."""
    return tuple(Part(device_id, share) for device_id in device_ids)


class _Columns(NamedTuple):
    """What the ledgers of a cluster have in common; nothing of it is changed."""

    device_ids: tuple[DeviceId, ...]
    at: dict[DeviceId, int]
    nodes: tuple[range, ...]
    grid: Counts
    node_at: Counts
    memory_mb: Counts
    memory_sizes_mb: Counts
    memory_kind: Counts


@lru_cache(maxsize=8)
def _columns_of(key: SameNodes) -> _Columns:
    devices = [device for node in key.nodes for device in node.devices]
    device_ids = tuple([device.device_id for device in devices])
    nodes = _ranges([len(node.devices) for node in key.nodes])
    grid: Counts = np.full((len(nodes), max(map(len, nodes), default=1)), -1, dtype=np.int64)
    for row, mine in zip(grid, nodes, strict=True):
        row[: len(mine)] = mine
    memory_mb = np.array([device.memory_mb or UNCOUNTED_MB for device in devices], dtype=np.int64)
    sizes, kinds = np.unique(memory_mb, return_inverse=True)
    return _Columns(
        device_ids,
        {device_id: at for at, device_id in enumerate(device_ids)},
        nodes,
        grid,
        np.repeat(np.arange(len(nodes), dtype=np.int64), [len(mine) for mine in nodes]),
        memory_mb,
        sizes,
        kinds.astype(np.int64),
    )


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def _count_down(counts: dict[KeyT, int], key: KeyT) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
