"""How a simulated device is divided among its replicas: at every moment, each between its request and limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from springtide.core.resources import DeviceId
from springtide.core.shares import MAX_LIMIT, TOLERANCE, Share, load_of
from springtide.core.workload import ReplicaId

# What is left of a device after rounding is not worth another round.
_NOTHING = 1e-12


def overfull(held: Sequence[Share | None], memory_mb: int = 0) -> str:
    """What is wrong about the holders of a device, as a sentence; "" where all fit. None stands for the whole device.

    A holder of the whole must be alone, and the sums of requests, limits and memory must keep their bounds.
    """
    if len(held) <= 1:
        return ""
    load = load_of(held)
    if load.is_exclusive:
        return f"{load.num_holders} hold it, one of them the whole"
    if load.request > 1.0 + TOLERANCE:
        return f"the requests on it add up to {load.request:g}"
    if load.limit > MAX_LIMIT + TOLERANCE:
        return f"the limits on it add up to {load.limit:g}, more than {MAX_LIMIT:g}"
    if memory_mb and load.memory_mb > memory_mb:
        return f"its sharers hold {load.memory_mb} of its {memory_mb} MB"
    return ""


class Wish(NamedTuple):
    """What a tenant may have of a device, and how much of it it could use just now (0 to 1)."""

    share: Share
    demand: float


def divide(wishes: Sequence[Wish]) -> tuple[float, ...]:
    """The fraction of the device that each tenant gets.

    Each gets what it can use up to its request; what is left goes to those that can use more, in proportion to their
    requests, up to their limits (Dilu, section 3.2: request is guaranteed, limit is reached where others leave it).
    Where even the requests do not fit, which no ledger allows, they are scaled down alike.
    """
    given = [min(wish.demand, wish.share.request) for wish in wishes]
    total = sum(given)
    if total > 1.0:
        return tuple(part / total for part in given)
    most = [min(wish.demand, wish.share.limit) for wish in wishes]
    left = 1.0 - total
    open_ = [index for index in range(len(wishes)) if most[index] > given[index]]
    while open_ and left > _NOTHING:
        weight = sum(wishes[index].share.request for index in open_)
        sure = [index for index in open_ if most[index] - given[index] <= left * wishes[index].share.request / weight]
        if not sure:
            for index in open_:
                given[index] += left * wishes[index].share.request / weight
            break
        for index in sure:
            left -= most[index] - given[index]
            given[index] = most[index]
        open_ = [index for index in open_ if index not in sure]
    return tuple(given)


class SharedDevices:
    """The shares that replicas hold of devices, and the speed of each there. Holders of whole devices are not in it.

    `changed` is called for every tenant whose rate is another one than before, but for the one that caused it.
    """

    def __init__(self, changed: Callable[[ReplicaId], None]) -> None:
        self._changed = changed
        self._place: dict[ReplicaId, DeviceId] = {}
        self._on: dict[DeviceId, dict[ReplicaId, Wish]] = {}
        self._rates: dict[ReplicaId, float] = {}

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._place

    @property
    def num_beside(self) -> int:
        """How many tenants more there are than devices that they are on."""
        return len(self._place) - len(self._on)

    def shares_on(self, device_id: DeviceId) -> tuple[Share, ...]:
        """The shares that are held of a device, in the order in which they were taken."""
        return tuple(wish.share for wish in self._on.get(device_id, {}).values())

    def share_of(self, replica_id: ReplicaId) -> Share | None:
        """What a replica holds of its device; None: the whole of it, or it is not known."""
        device_id = self._place.get(replica_id)
        return None if device_id is None else self._on[device_id][replica_id].share

    def rate(self, replica_id: ReplicaId) -> float:
        """The fraction of its device that a replica computes at; 1 for one that has the whole of it."""
        return self._rates.get(replica_id, 1.0)

    def slowest(self, replica_ids: Iterable[ReplicaId]) -> float:
        return min([self._rates.get(replica_id, 1.0) for replica_id in replica_ids], default=1.0)

    def hold(self, replica_id: ReplicaId, device_id: DeviceId, share: Share, demand: float = 0.0) -> None:
        """A replica takes its share of a device. It asks for nothing of it yet, unless `demand` says so."""
        self._place[replica_id] = device_id
        self._on.setdefault(device_id, {})[replica_id] = Wish(share, demand)
        self._divide(device_id, replica_id)

    def let_go(self, replica_id: ReplicaId) -> None:
        device_id = self._place.pop(replica_id, None)
        if device_id is None:
            return
        del self._on[device_id][replica_id]
        del self._rates[replica_id]
        self._divide(device_id, replica_id)
        if not self._on[device_id]:
            del self._on[device_id]

    def set_share(self, replica_id: ReplicaId, share: Share) -> None:
        """A replica holds another share of its device from now on; of one that is not known nothing changes."""
        self._set(replica_id, share=share)

    def set_demand(self, replica_ids: Iterable[ReplicaId], demand: float) -> None:
        for replica_id in replica_ids:
            self._set(replica_id, demand=demand)

    def _set(self, replica_id: ReplicaId, *, share: Share | None = None, demand: float | None = None) -> None:
        device_id = self._place.get(replica_id)
        if device_id is None:
            return
        known = self._on[device_id][replica_id]
        wish = Wish(share or known.share, known.demand if demand is None else demand)
        if wish != known:
            self._on[device_id][replica_id] = wish
            self._divide(device_id, None if share is not None else replica_id)

    def _divide(self, device_id: DeviceId, cause: ReplicaId | None) -> None:
        """Divide the device anew, and call `changed` for the tenants whose rate changes by that."""
        wishes = self._on[device_id]
        slower: list[ReplicaId] = []
        for replica_id, rate in zip(wishes, divide(tuple(wishes.values())), strict=True):
            if self._rates.get(replica_id) != rate:
                self._rates[replica_id] = rate
                if replica_id != cause:
                    slower.append(replica_id)
        for replica_id in slower:
            self._changed(replica_id)
