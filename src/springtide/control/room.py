"""How much of every device is free during a round of reconciling, given what is held and what it has granted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from springtide.control.records import JobRecord, PlatformState, ReplicaState, ServiceRecord
from springtide.core.actions import Action, SetShare, StartReplica
from springtide.core.decision import PoolAllocation
from springtide.core.resources import DeviceId, Topology
from springtide.core.shares import FREE, Load, Share, has_room, load_of


class DeviceRoom:
    """Which devices have room for another replica. Valid for one round of reconciling.

    A share is granted only if it fits beside all shares that are held (stopping replicas included) or were granted in
    this round; a whole device only once no replica holds any of it.
    """

    def __init__(self, state: PlatformState, topology: Topology) -> None:
        self._state = state
        self._topology = topology
        self._granted: dict[DeviceId, list[Share | None]] = {}

    def admits(self, device_id: DeviceId, share: Share | None, *, instead_of: Share | None = None) -> bool:
        """Whether a living device has room for a new holder, or for the holder of `instead_of` to change to `share`."""
        if share is None:
            return not self._state.is_held(device_id) and device_id not in self._granted
        load = self._state.load(device_id)
        granted = self._granted.get(device_id)
        if granted is not None:
            load = _sum(load, load_of(granted))
        if instead_of is not None:
            load = Load(
                num_holders=load.num_holders,
                request=load.request - instead_of.request,
                limit=load.limit - instead_of.limit,
                memory_mb=load.memory_mb - instead_of.memory_mb,
                is_exclusive=load.is_exclusive,
            )
        return has_room(load, share, self._topology.memory_of.get(device_id, 0))

    def add(self, actions: Iterable[Action]) -> None:
        """Count what these actions start as taken."""
        for action in actions:
            if isinstance(action, StartReplica):
                self._granted.setdefault(action.device_id, []).append(action.share)

    def reserve_increase(self, device_id: DeviceId, held: Share, wanted: Share) -> None:
        """A replica will hold `wanted` of the device instead of `held`. What it gives up is not free in this round."""
        more = Share(
            request=max(0.0, wanted.request - held.request),
            limit=max(0.0, wanted.limit - held.limit),
            memory_mb=max(0, wanted.memory_mb - held.memory_mb),
        )
        self._granted.setdefault(device_id, []).append(more)


def _sum(one: Load, other: Load) -> Load:
    if one is FREE:
        return other
    return Load(
        num_holders=one.num_holders + other.num_holders,
        request=one.request + other.request,
        limit=one.limit + other.limit,
        memory_mb=one.memory_mb + other.memory_mb,
        is_exclusive=one.is_exclusive or other.is_exclusive,
    )


def share_changes(
    record: JobRecord | ServiceRecord, allocation: PoolAllocation, room: DeviceRoom, why: str
) -> Iterator[Action]:
    """Yield the actions that change running replicas to the plan's share, where their devices have room for it."""
    wanted = allocation.share
    if wanted is None:
        # The holder of a whole device has to be alone on it, so a running replica keeps its share until a restart.
        return
    for replica in record.replicas:
        held = replica.share
        if held is None or held == wanted or replica.state is ReplicaState.STOPPING:
            continue
        if replica.device_id in allocation.device_ids and room.admits(replica.device_id, wanted, instead_of=held):
            room.reserve_increase(replica.device_id, held, wanted)
            yield SetShare(
                workload_id=record.workload_id,
                replica_id=replica.replica_id,
                share=wanted,
                cause="plan",
                reason=why or f"share {held.request:g}..{held.limit:g} -> {wanted.request:g}..{wanted.limit:g}",
            )
