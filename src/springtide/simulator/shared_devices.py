"""How a simulated device is divided among its replicas: at every moment, each between its request and limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from springtide.core.resources import DeviceId
from springtide.core.shares import MAX_LIMIT, TOLERANCE, Share, load_of
from springtide.core.workload import ReplicaId

# Less than this of a device is a rounding error and is not distributed.
_NEGLIGIBLE = 1e-12


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


class TenantDemand(NamedTuple):
    """What a tenant holds of a device, and the fraction of the whole device that it could use now (0 to 1)."""

    share: Share
    demand: float


def divide(tenants: Sequence[TenantDemand]) -> tuple[float, ...]:
    """The fraction of the device that each tenant gets.

    Each gets what it can use up to its request; what is left goes to those that can use more, in proportion to their
    requests, up to their limits (Dilu, section 3.2: request is guaranteed, limit is reached where others leave it).
    If the requests alone exceed the device, which no ledger allows, they are scaled down in proportion.
    """
    given = [min(tenant.demand, tenant.share.request) for tenant in tenants]
    total = sum(given)
    if total > 1.0:
        return tuple(part / total for part in given)
    most = [min(tenant.demand, tenant.share.limit) for tenant in tenants]
    left = 1.0 - total
    unsaturated = [index for index in range(len(tenants)) if most[index] > given[index]]
    while unsaturated and left > _NEGLIGIBLE:
        weight = sum(tenants[index].share.request for index in unsaturated)
        parts = {index: left * tenants[index].share.request / weight for index in unsaturated}
        saturated = [index for index in unsaturated if most[index] - given[index] <= parts[index]]
        if not saturated:
            for index in unsaturated:
                given[index] += parts[index]
            break
        for index in saturated:
            left -= most[index] - given[index]
            given[index] = most[index]
        unsaturated = [index for index in unsaturated if index not in saturated]
    return tuple(given)


class SharedDevices:
    """The shares that replicas hold of devices, and the speed of each there. Holders of whole devices are not in it.

    One that holds its share of several devices is as fast as it is on the slowest of them. `changed` is called for
    every tenant whose rate changes, except for the tenant that caused the change.
    """

    def __init__(self, changed: Callable[[ReplicaId], None]) -> None:
        self._changed = changed
        self._places: dict[ReplicaId, tuple[DeviceId, ...]] = {}
        self._on: dict[DeviceId, dict[ReplicaId, TenantDemand]] = {}
        self._rates: dict[ReplicaId, float] = {}
        # Of replicas on several devices: what each gets of each.
        self._parts: dict[ReplicaId, dict[DeviceId, float]] = {}

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._places

    @property
    def num_extra_tenants(self) -> int:
        """How many more tenants there are than shared devices; one on several devices counts on each."""
        return sum(len(tenants) for tenants in self._on.values()) - len(self._on)

    def shares_on(self, device_id: DeviceId) -> tuple[Share, ...]:
        """The shares that are held of a device, in the order in which they were taken."""
        return tuple(tenant.share for tenant in self._on.get(device_id, {}).values())

    def share_of(self, replica_id: ReplicaId) -> Share | None:
        """What a replica holds of its device; None for the whole device or an unknown replica."""
        places = self._places.get(replica_id)
        return None if places is None else self._on[places[0]][replica_id].share

    def rate(self, replica_id: ReplicaId) -> float:
        """The fraction of its device at which a replica computes; 1 for one that holds the whole device."""
        return self._rates.get(replica_id, 1.0)

    def slowest(self, replica_ids: Iterable[ReplicaId]) -> float:
        return min([self._rates.get(replica_id, 1.0) for replica_id in replica_ids], default=1.0)

    def hold(self, replica_id: ReplicaId, device_ids: tuple[DeviceId, ...], share: Share, demand: float = 0.0) -> None:
        """A replica takes its share of each of these devices; at first it uses `demand` of each."""
        self._places[replica_id] = device_ids
        for device_id in device_ids:
            self._on.setdefault(device_id, {})[replica_id] = TenantDemand(share, demand)
        for device_id in device_ids:
            self._divide(device_id, replica_id)

    def release(self, replica_id: ReplicaId) -> None:
        places = self._places.pop(replica_id, None)
        if places is None:
            return
        del self._rates[replica_id]
        self._parts.pop(replica_id, None)
        for device_id in places:
            del self._on[device_id][replica_id]
            self._divide(device_id, replica_id)
            if not self._on[device_id]:
                del self._on[device_id]

    def set_share(self, replica_id: ReplicaId, share: Share) -> None:
        """Give a replica another share of its device; an unknown replica changes nothing."""
        self._set(replica_id, share=share)

    def set_demand(self, replica_ids: Iterable[ReplicaId], demand: float) -> None:
        for replica_id in replica_ids:
            self._set(replica_id, demand=demand)

    def _set(self, replica_id: ReplicaId, *, share: Share | None = None, demand: float | None = None) -> None:
        for device_id in self._places.get(replica_id, ()):
            known = self._on[device_id][replica_id]
            tenant = TenantDemand(share or known.share, known.demand if demand is None else demand)
            if tenant != known:
                self._on[device_id][replica_id] = tenant
                self._divide(device_id, None if share is not None else replica_id)

    def _divide(self, device_id: DeviceId, cause: ReplicaId | None) -> None:
        """Divide the device anew, and call `changed` for the tenants whose rate changes."""
        tenants = self._on[device_id]
        affected: list[ReplicaId] = []
        for replica_id, part in zip(tenants, divide(tuple(tenants.values())), strict=True):
            rate = part if len(self._places[replica_id]) == 1 else self._slowest_part(replica_id, device_id, part)
            if self._rates.get(replica_id) != rate:
                self._rates[replica_id] = rate
                if replica_id != cause:
                    affected.append(replica_id)
        for replica_id in affected:
            self._changed(replica_id)

    def _slowest_part(self, replica_id: ReplicaId, device_id: DeviceId, part: float) -> float:
        parts = self._parts.setdefault(replica_id, {})
        parts[device_id] = part
        return min(parts.values())
