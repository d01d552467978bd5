"""Rival packers of shares: whole devices, INFless+ by limit or by request, FaST-GS+."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
import numpy as np

from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.scheduling.sharing.demand import UNITS, ShareDemand, demand_of
from springtide.scheduling.sharing.ledger import Counts, Flags, ShareLedger
from springtide.scheduling.sharing.packing import PlacementRequest

# A rectangle in the plane of computing rate and time: left, low, width, height, in units.
Rectangle = tuple[int, int, int, int]
_WHOLE: Rectangle = (0, 0, UNITS, UNITS)


class ExclusivePacker(msgspec.Struct, frozen=True, kw_only=True):
    """Each replica gets whole devices: the first node with enough idle ones, as few as possible left there."""

    summary: ClassVar[str] = "A device of its own for every workload with a share."

    def booked(self, share: Share) -> Share:
        """The whole device with all of its memory, whatever part of it is declared."""
        return Share(request=1.0, limit=1.0, memory_mb=share.memory_mb)

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Different idle devices, or None. The ledger is unchanged."""
        room = request.room(ledger) & ~ledger.is_open
        return _first_fit(ledger, room, request)


class InflessLimit(msgspec.Struct, frozen=True, kw_only=True):
    """INFless+-l: each replica gets the limit all the time; the device with the least computing rate left is best.

    Groups take the first node with room (INFless extended to training, Dilu section 5.1 and its artifact).
    """

    summary: ClassVar[str] = "Shares booked at their limit (INFless+-l in Dilu, 5.1)."

    def booked(self, share: Share) -> Share:
        """The limit as request and limit."""
        return Share(request=share.limit, limit=share.limit, memory_mb=share.memory_mb)

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Different devices with room, or None. The ledger is unchanged."""
        return _fullest(ledger, request)


class InflessRequest(msgspec.Struct, frozen=True, kw_only=True):
    """INFless+-r: as INFless+-l, but each replica gets the request and never more."""

    summary: ClassVar[str] = "Shares held to their request (INFless+-r, 5.1)."

    def booked(self, share: Share) -> Share:
        """The request as request and limit."""
        return Share(request=share.request, limit=share.request, memory_mb=share.memory_mb)

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Different devices with room, or None. The ledger is unchanged."""
        return _fullest(ledger, request)


class FastGsPacker(msgspec.Struct, frozen=True, kw_only=True):
    """FaST-GS+: partitions of computing rate, each for a part of the time, as rectangles that must not overlap.

    A share is as wide as its limit and as high as request / limit, the part of the time that it needs at that rate.
    A device has room where one of its maximal free rectangles holds it; the one that fits most tightly is best
    (FaST-GShare, ICPP 2023: maximal rectangles; extended to training as Dilu's section 5.1 says).
    """

    summary: ClassVar[str] = "Shares booked at their limit, first fit (FaST-GS+, 5.1)."

    def booked(self, share: Share) -> Share:
        """The share itself: its request is the area of its rectangle."""
        return share

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Different devices with room, or None. The ledger is unchanged."""
        demand = demand_of(request.share)
        size = _sides(demand)
        room = request.room(ledger)
        tightest: dict[int, int] = {}
        for at in np.flatnonzero(room & ledger.is_open).tolist():
            waste = _least_waste(free_rectangles(map(_sides, ledger.demands_on(at))), size)
            if waste is None:
                room[at] = False
            else:
                tightest[at] = waste
        if request.num_devices == 1 and tightest:
            return (ledger.device_ids[min(tightest, key=lambda at: (tightest[at], at))],)
        return _first_fit(ledger, room, request)


def free_rectangles(sizes: Iterable[tuple[int, int]]) -> list[Rectangle]:
    """The maximal free rectangles of a device, each size (width, height) being put where it fits most tightly, in turn.

    A replica that fits nowhere, since earlier ones have left others' places free, stands for the whole.
    """
    free = [_WHOLE]
    for width, height in sizes:
        fitting = [each for each in free if each[2] >= width and each[3] >= height]
        if not fitting:
            return []
        left, low, _, _ = min(fitting, key=lambda each: (min(each[2] - width, each[3] - height), each))
        free = _without(free, (left, low, width, height))
    return free


def _without(free: list[Rectangle], taken: Rectangle) -> list[Rectangle]:
    """The maximal rectangles that are left of the free ones once one is taken."""
    left, low, width, height = taken
    right, high = left + width, low + height
    cut: list[Rectangle] = []
    for each in free:
        x, y, w, h = each
        if x >= right or left >= x + w or y >= high or low >= y + h:
            cut.append(each)
            continue
        parts = ((x, y, left - x, h), (right, y, x + w - right, h), (x, y, w, low - y), (x, high, w, y + h - high))
        cut += [part for part in parts if part[2] > 0 and part[3] > 0]
    kept = list(dict.fromkeys(cut))
    return [each for each in kept if not any(other != each and _holds(other, each) for other in kept)]


def _holds(outer: Rectangle, inner: Rectangle) -> bool:
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and outer[0] + outer[2] >= inner[0] + inner[2]
        and outer[1] + outer[3] >= inner[1] + inner[3]
    )


def _sides(demand: ShareDemand) -> tuple[int, int]:
    return demand.limit, -(-demand.request * UNITS // demand.limit)


def _least_waste(free: Iterable[Rectangle], size: tuple[int, int]) -> int | None:
    sides = [min(w - size[0], h - size[1]) for _, _, w, h in free if w >= size[0] and h >= size[1]]
    return min(sides, default=None)


def _fullest(ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
    room = request.room(ledger)
    shared = np.flatnonzero(room & ledger.is_open)
    if request.num_devices == 1 and len(shared):
        return (ledger.device_ids[shared[int(ledger.free_request[shared].argmin())]],)
    return _first_fit(ledger, room, request)


def _first_fit(ledger: ShareLedger, room: Flags, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
    """Shared devices on the first node that has enough of them, else shared and idle ones on the first that has."""
    count = request.num_devices
    if not request.same_node:
        order = np.concatenate([np.flatnonzero(room & ledger.is_open), np.flatnonzero(room & ~ledger.is_open)])
        return tuple(ledger.device_ids[at] for at in order[:count].tolist()) if len(order) >= count else None
    for candidates in (room & ledger.is_open, room):
        node = _first_node(ledger, candidates, count)
        if node is not None:
            devices = ledger.nodes[node]
            within = devices.start + np.flatnonzero(candidates[devices.start : devices.stop])
            by_state = within[np.argsort(~ledger.is_open[within], kind="stable")][:count]
            return tuple(ledger.device_ids[at] for at in sorted(by_state.tolist()))
    return None


def _first_node(ledger: ShareLedger, candidates: Flags, count: int) -> int | None:
    num_at: Counts = np.bincount(ledger.node_at[candidates], minlength=len(ledger.nodes))
    nodes = np.flatnonzero(num_at >= count)
    return int(nodes[0]) if len(nodes) else None
