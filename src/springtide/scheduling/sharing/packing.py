"""Which devices a newcomer shares: Dilu's Algorithm 1, by what is left over and by how useful that still is."""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec
import numpy as np

from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.demand import UNITS, ShareDemand, demand_of
from springtide.scheduling.sharing.ledger import Counts, Flags, ShareLedger
from springtide.scheduling.sharing.outlook import FitOutlook, Fractions, Remainders

# Among equals, the node with the fewest idle devices is taken, so that whole nodes stay free for others.
_IDLE_TIE = 1e-9
# Without foresight a new device is taken only where no shared one has room.
_DEARER_THAN_SHARED = 1e6
# How much less than a new device a shared one costs if no workload larger than the newcomer loses room on it.
_JUST_LESS = 1e-3


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A workload that needs `num_devices` more devices, `share` of each; all on one node where `same_node`.

    `family` is the same for all instances of one function. `is_large`: it may be split over several devices if no
    single one has room. Devices in `avoid` are not chosen, with `only` none but these, without `may_open` none that is
    not shared yet, nor any of those in `closed`, and with `beside_shared` none of a node on which none is shared.
    """

    workload_id: WorkloadId
    family: str
    share: Share
    num_devices: int = 1
    same_node: bool = True
    is_large: bool = False
    avoid: frozenset[DeviceId] = frozenset()
    closed: frozenset[DeviceId] = frozenset()
    only: frozenset[DeviceId] | None = None
    may_open: bool = True
    beside_shared: bool = False

    def room(self, ledger: ShareLedger) -> Flags:
        """The devices on which there is room for the share within the ledger's bounds. Shape (num_devices,)."""
        demand = demand_of(self.share)
        found = ledger.room_among(demand, may_open=self.may_open, beside_shared=self.beside_shared)
        room = found.on.copy()
        if self.avoid and found.is_any:
            room[[at for device_id in self.avoid if (at := ledger.at.get(device_id)) is not None]] = False
        if self.closed and self.may_open and found.is_any:
            closed = [at for device_id in self.closed if (at := ledger.at.get(device_id)) is not None]
            room[closed] &= ledger.is_open[closed]
        if self.only is not None:
            is_one = np.zeros_like(room)
            is_one[[at for device_id in self.only if (at := ledger.at.get(device_id)) is not None]] = True
            room &= is_one
        return room


class Packer(Protocol):
    """Chooses devices for one newcomer at a time; workloads that have devices are never moved."""

    def booked(self, share: Share) -> Share:
        """The share to reserve and enforce for a declared share."""
        ...

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Different devices with room for `request.share` as given, or None. The ledger is unchanged."""
        ...


class DiluPacker(msgspec.Struct, frozen=True, kw_only=True):
    """Dilu's Algorithm 1 (section 3.3): beside known partners, else on a shared device, else on a new one.

    Without `foresight` this is Algorithm 1 as printed: among devices with room the one with the least left over is
    best, by alpha (1 - requests) + beta (1 - memory), and a new device is taken only if no shared one has room. That
    fills a device up with whatever comes first.

    With `foresight` the cost of a device is the usefulness that it loses (FitOutlook); what is left over, times `tie`,
    only decides between near equals. A new device costs `opening` less its remaining usefulness. It is also taken if it
    costs least and the best shared one would lose room for a workload larger than the newcomer. If more than `reusable`
    of its usefulness is left, it is opened on the node with the most idle devices, so that a group of workers can join
    it there; otherwise on the node with the fewest.
    """

    summary: ClassVar[str] = "Shares packed on few devices within bounds (Dilu, 3.3)."

    alpha: float = 0.6
    beta: float = 0.4
    foresight: bool = True
    opening: float = 1.0
    tie: float = 0.2
    reusable: float = 0.25

    def booked(self, share: Share) -> Share:
        """The share itself."""
        return share

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Different devices with room within the ledger's bounds, or None. The ledger is unchanged."""
        demand = demand_of(request.share)
        outlook = ledger.outlook(demand) if self.foresight else None
        if not ledger.room_among(demand, may_open=request.may_open, beside_shared=request.beside_shared).is_any:
            return None
        room = request.room(ledger)
        if not room.any():
            return None
        chosen: Counts | None = None
        known = ledger.beside(request.family)
        if known:
            near = np.zeros_like(room)
            near[known] = True
            near &= room
            chosen = self._choose(ledger, outlook, demand, near, request)
        if chosen is None:
            chosen = self._choose(ledger, outlook, demand, room, request)
        return None if chosen is None else tuple(ledger.device_ids[at] for at in chosen.tolist())

    def _choose(
        self,
        ledger: ShareLedger,
        outlook: FitOutlook | None,
        demand: ShareDemand,
        room: Flags,
        request: PlacementRequest,
    ) -> Counts | None:
        rests = _rests_of_new(ledger, demand)
        use_after = None if outlook is None else outlook.usefulness(rests)
        new_costs = self._new_costs(ledger, use_after, rests)
        shared = np.flatnonzero(room & ledger.is_open)
        costs = self._costs(ledger, outlook, demand, shared)
        least_new = float(new_costs.min(initial=np.inf))
        if request.num_devices == 1 and len(shared):
            best = shared[[int(costs.argmin())]]
            if costs.min() <= least_new or (outlook and not outlook.spoils(demand, ledger.left_on(best))[0]):
                return best
        elif outlook is not None and costs.max(initial=0.0) > least_new - _JUST_LESS:
            is_kept = ~outlook.spoils(demand, ledger.left_on(shared))
            costs[is_kept] = np.minimum(costs[is_kept], least_new - _JUST_LESS)
        idle = np.flatnonzero(room & ~ledger.is_open)
        # The last entry is for the gaps in rows of nodes with fewer devices.
        by_device = np.full(len(room) + 1, np.inf)
        by_device[idle] = new_costs[ledger.memory_kind[idle]]
        by_device[shared] = costs
        if request.num_devices == 1 or not request.same_node:
            side = np.full(len(new_costs), _IDLE_TIE)
            if use_after is not None:
                side[use_after > self.reusable] *= -1.0
            by_device[:-1] += side[ledger.memory_kind] * ledger.num_idle[ledger.node_at]
            order = by_device[:-1].argsort(kind="stable")[: request.num_devices]
            return order if len(order) == request.num_devices and np.isfinite(by_device[order]).all() else None
        return _cheapest_node(ledger, by_device, request.num_devices)

    def _costs(self, ledger: ShareLedger, outlook: FitOutlook | None, demand: ShareDemand, at: Counts) -> Fractions:
        """The cost of each of these shared devices: the usefulness that it loses, and what is left over."""
        left = ledger.left_on(at)
        rate = self.alpha / UNITS * (left[0] - demand.request)
        spare: Fractions = rate + self.beta * ((left[2] - demand.memory_mb) / ledger.memory_mb[at])
        return spare if outlook is None else outlook.losses(demand, left) + self.tie * spare

    def _new_costs(self, ledger: ShareLedger, use_after: Fractions | None, rests: Remainders) -> Fractions:
        """The cost of a new device, for each size of memory that devices have here."""
        spare: Fractions = self.alpha / UNITS * rests[0] + self.beta * (rests[2] / ledger.memory_sizes_mb)
        return _DEARER_THAN_SHARED + spare if use_after is None else self.opening - use_after + self.tie * spare


def _rests_of_new(ledger: ShareLedger, demand: ShareDemand) -> Remainders:
    """What a new device has left once it holds the demand, for each size of memory that devices have here."""
    sizes = ledger.memory_sizes_mb
    return (
        np.full_like(sizes, ledger.max_request - demand.request),
        np.full_like(sizes, ledger.max_limit - demand.limit),
        sizes - demand.memory_mb,
    )


def _cheapest_node(ledger: ShareLedger, by_device: Fractions, count: int) -> Counts | None:
    """The cheapest `count` devices of one node, in their order; `by_device` ends with a place for the grid's gaps."""
    if count > ledger.grid.shape[1]:
        return None
    rows = by_device[ledger.grid]
    sums = np.sort(rows, axis=1)[:, :count].sum(axis=1) + _IDLE_TIE * ledger.num_idle
    node = int(sums.argmin())
    if not np.isfinite(sums[node]):
        return None
    return np.sort(ledger.grid[node][rows[node].argsort(kind="stable")[:count]])
