"""What may be granted in one round of reconciling: by the room on each device and by the labels of its node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from springtide.control.records import JobRecord, PlatformState, ReplicaRecord, ReplicaState, ServiceRecord
from springtide.core.actions import Action, SetShare, StartReplica
from springtide.core.decision import EMPTY, Plan, PoolAllocation
from springtide.core.resources import DeviceId, admits
from springtide.core.shares import FREE, Load, Share, has_room, load_of


class Grants:
    """Which devices may be given to which workload. Valid for one round of reconciling: built again after any change.

    A share is granted only if it fits beside all shares that are held (stopping replicas included) or were granted in
    this round; a whole device only once no replica holds any of it. Where nodes have pools or are drained, their labels
    decide on whole devices as well.
    """

    def __init__(self, state: PlatformState, plan: Plan) -> None:
        topology = state.topology()
        self._state = state
        self._plan = plan
        self._alive = topology.device_set
        self._memory_of = topology.memory_of
        self._nodes = topology.by_id
        self._node_of = topology.node_of
        self._held = (state.jobs.held, state.services.held)
        self._granted: dict[DeviceId, list[Share | None]] = {}
        # Every node is shared and no label changes: all labels admit everything.
        self._is_open = not topology.has_pools and not state.drains

    def grantable(
        self,
        record: JobRecord | ServiceRecord,
        allocation: PoolAllocation,
        held: Iterable[DeviceId],
        more: Mapping[DeviceId, tuple[DeviceId, ...]] = EMPTY,
    ) -> list[DeviceId]:
        """The devices of the allocation on which a new replica may start now, in its order; `held` are the record's.
        With `more` each is the first of a worker, whose further devices are granted with it.
        """
        is_job, share = isinstance(record, JobRecord), allocation.share
        return [
            device
            for device in allocation.device_ids
            if device in self._alive
            and (self._is_unheld(device) if share is None else device not in held and self._has_room(device, share))
            and (self._is_open or share is not None or self._is_labelled_for(device, is_job=is_job))
            and (not more or all(other in self._alive and self._may_hold(other, share) for other in more[device]))
        ]

    def _may_hold(self, device_id: DeviceId, share: Share | None) -> bool:
        return self._is_unheld(device_id) if share is None else self._has_room(device_id, share)

    def _is_unheld(self, device_id: DeviceId) -> bool:
        jobs, services = self._held
        return device_id not in jobs and device_id not in services and device_id not in self._granted

    def _has_room(self, device_id: DeviceId, share: Share, *, instead_of: Share | None = None) -> bool:
        """Whether a living device has room for a new holder, or for the holder of `instead_of` to change to `share`."""
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
        return has_room(load, share, self._memory_of.get(device_id, 0))

    def _is_labelled_for(self, device_id: DeviceId, *, is_job: bool) -> bool:
        """Whether a job's worker, or else a service's replica, may start on the node of a living device."""
        node = self._nodes[self._node_of[device_id]]
        drain = self._state.drains.get(node.node_id)
        return admits(node.pool, is_job=is_job) and (drain is None or admits(drain.pool, is_job=is_job))

    def reclaimed(self, record: JobRecord) -> Sequence[tuple[ReplicaRecord, float]]:
        """The job's workers that have to leave a reclaimed node and are not stopping yet, each with the end of its
        grace (platform seconds)."""
        drains = self._state.drains
        allocation = self._plan.allocations.get(record.workload_id)
        wanted = () if allocation is None else allocation.device_ids
        found: list[tuple[ReplicaRecord, float]] = []
        for replica in record.replicas:
            node_id = self._node_of.get(replica.device_id)
            drain = drains.get(node_id) if node_id is not None else None
            if drain is None or drain.reclaim_since_s is None or admits(drain.pool, is_job=True):
                continue
            if replica.share is not None:
                continue
            if replica.state is not ReplicaState.STOPPING and replica.device_id not in wanted:
                found.append((replica, drain.reclaim_since_s + record.job.grace_s))
        return found

    def change_shares(
        self, record: JobRecord | ServiceRecord, allocation: PoolAllocation, wanted: Share, why: str
    ) -> list[Action]:
        """The actions that change running replicas to the share `wanted` in place, where their devices have room.

        The holder of a whole device keeps it until it is started again: it has to be alone there.
        """
        actions: list[Action] = []
        for replica in record.replicas:
            held = replica.share
            if held is None or held == wanted or replica.state is ReplicaState.STOPPING:
                continue
            if replica.device_id not in allocation.device_ids:
                continue
            if not all(self._has_room(device, wanted, instead_of=held) for device in replica.device_ids):
                continue
            # What the replica gives up is not free in this round: it may still use it.
            more = Share(
                request=max(0.0, wanted.request - held.request),
                limit=max(0.0, wanted.limit - held.limit),
                memory_mb=max(0, wanted.memory_mb - held.memory_mb),
            )
            for device_id in replica.device_ids:
                self._granted.setdefault(device_id, []).append(more)
            actions.append(
                SetShare(
                    workload_id=record.workload_id,
                    replica_id=replica.replica_id,
                    share=wanted,
                    cause="plan",
                    reason=why or f"share {held.request:g}..{held.limit:g} -> {wanted.request:g}..{wanted.limit:g}",
                )
            )
        return actions

    def add(self, actions: Iterable[Action]) -> None:
        """Count what these actions start as taken."""
        for action in actions:
            if isinstance(action, StartReplica):
                for device_id in (action.device_id, *action.more_devices):
                    self._granted.setdefault(device_id, []).append(action.share)


def by_workers(
    record: JobRecord | ServiceRecord, planned: PoolAllocation, each: int
) -> tuple[PoolAllocation, Mapping[DeviceId, tuple[DeviceId, ...]]]:
    """The planned devices as workers or replicas of `each`: the first device of each, and under it the further ones.

    One that would hold some of the devices of one that is there, and not exactly these, waits until that has left.
    """
    worker_on = {device: replica.device_ids for replica in record.replicas for device in replica.device_ids}
    more: dict[DeviceId, tuple[DeviceId, ...]] = {}
    for start in range(0, len(planned.device_ids), each):
        worker = planned.device_ids[start : start + each]
        there = {worker_on[device] for device in worker if device in worker_on}
        if not there:
            more[worker[0]] = worker[1:]
        elif len(there) == 1 and set(known := there.pop()) == set(worker):
            more[known[0]] = known[1:]
    return replace(planned, device_ids=tuple(more)), more


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
