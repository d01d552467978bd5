"""Two small policies of the tests' own for devices held in parts: first fit, and one that changes shares all the time.

First fit knows nothing of the packers it stands beside: it counts what is held and asks for nothing it cannot have.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from springtide.core.decision import Allocation, Plan, Policy, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.shares import Share, has_room, load_of
from springtide.core.workload import WorkloadId


class FirstFit:
    """Services first, then jobs in order of arrival, each on the first devices that have room for its share."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        board = _Board(snapshot)
        # Everyone who is there keeps its places before anybody is given more.
        wanted: list[tuple[WorkloadId, Share | None, int, int]] = []
        for view in snapshot.services:
            need = view.needed_replicas
            wanted.append((view.service.service_id, view.service.share, 0, need))
        for job in snapshot.jobs:
            most = min(job.bounds.max_workers, job.job.num_virtual_shards)
            wanted.append((job.job.job_id, job.job.share, job.bounds.min_workers, most))
        for who, share, _, most in wanted:
            board.keep(who, share, most)
        for who, share, least, most in wanted:
            board.give(who, share, least, most)
        reasons = {who: "first fit" for who, _, _, _ in wanted}
        return Plan(allocations=board.allocations(), reasons=reasons)


class _Board:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._cluster = snapshot.cluster
        self._held: dict[DeviceId, list[Share | None]] = {device_id: [] for device_id in self._cluster.device_ids()}
        self._given: dict[WorkloadId, list[DeviceId]] = {}
        self._shares: dict[WorkloadId, Share | None] = {}

    def _put(self, who: WorkloadId, share: Share | None, device_id: DeviceId) -> bool:
        if device_id not in self._held or device_id in self._given[who]:
            return False
        if not has_room(load_of(self._held[device_id]), share, self._cluster.memory_of.get(device_id, 0)):
            return False
        self._held[device_id].append(share)
        self._given[who].append(device_id)
        return True

    def keep(self, who: WorkloadId, share: Share | None, most: int) -> None:
        self._given[who] = []
        held = self._snapshot.allocations.get(who)
        # Whoever holds whole devices keeps them so until it starts anew.
        self._shares[who] = share if held is None else (held.share and share)
        for device_id in held.device_ids[:most] if held is not None else ():
            self._put(who, self._shares[who], device_id)

    def give(self, who: WorkloadId, share: Share | None, least: int, most: int) -> None:
        mine = self._given[who]
        if mine and least:
            return
        before = len(mine)
        for device_id in self._held:
            if len(mine) >= most:
                break
            self._put(who, self._shares[who], device_id)
        if len(mine) < least:
            for device_id in mine[before:]:
                self._held[device_id].remove(self._shares[who])
            del mine[before:]

    def allocations(self) -> dict[WorkloadId, Allocation]:
        return {
            who: PoolAllocation(device_ids=tuple(devices), share=self._shares[who])
            for who, devices in self._given.items()
            if devices
        }


class Restless:
    """Another policy's plans, but all shares are halved every other period: they change in place, in any state."""

    def __init__(self, inner: Policy, period_s: float = 3.0) -> None:
        self._inner = inner
        self._period_s = period_s

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        plan = self._inner.decide(snapshot)
        number = math.floor(snapshot.now_s / self._period_s)
        factor = 0.5 if number % 2 else 1.0
        allocations = {who: _scaled(given, factor) for who, given in plan.allocations.items()}
        next_s = (number + 1) * self._period_s
        moments = [at_s for at_s in (plan.revisit_at_s, next_s) if at_s is not None and at_s > snapshot.now_s]
        has_shares = any(given.share is not None for given in allocations.values())
        revisit_at_s = min(moments) if has_shares else plan.revisit_at_s
        return replace(plan, allocations=allocations, revisit_at_s=revisit_at_s)


def _scaled(given: Allocation, factor: float) -> Allocation:
    share = given.share
    if share is None:
        return given
    scaled = Share(request=share.request * factor, limit=share.limit * factor, memory_mb=share.memory_mb)
    return replace(given, share=scaled)
