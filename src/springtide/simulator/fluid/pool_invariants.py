"""Invariants of labels and drains in long traces, checked on every journaled step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from springtide.core.actions import DrainNode, LabelNode, StartReplica
from springtide.core.resources import DeviceId, Node, NodeId, Pool, admits
from springtide.core.workload import ReplicaId, TrainingJob

# The end of a reclaim may be journaled one turn of the loop after it happens.
_TURN_S = 1.0

Complain = Callable[[str, str, float], None]


class PoolInvariants:
    """The label of every node, and the one it is draining towards: right-pool, cordon, one-label, drain-ends.

    A job starts only where it is labelled for training or shared, a service where it is labelled for inference or
    shared; neither starts on a node that drains to a pool which does not admit it. A new label never evicts replicas.
    All that is about whole devices: parts of them are given on every node.
    A node that comes back has the label that it had. A reclaim ends within the longest grace of all workloads.
    """

    def __init__(self, home: Mapping[DeviceId, NodeId], complain: Complain) -> None:
        self._home = home
        self._complain = complain
        self._labels: dict[NodeId, Pool] = {}
        self._alive: set[NodeId] = set()
        self._drains: dict[NodeId, Pool] = {}
        self._reclaimed_s: dict[NodeId, float] = {}
        self._longest_grace_s = 0.0
        self._parts: set[ReplicaId] = set()

    def join(self, node: Node, now_s: float) -> None:
        """A node is here (again)."""
        known = self._labels.setdefault(node.node_id, node.pool)
        if known != node.pool and node.node_id not in self._alive:
            detail = f"{node.node_id} comes back for {node.pool}, and was labelled for {known}"
            self._complain("one-label", detail, now_s)
        self._alive.add(node.node_id)

    def lose(self, node_id: NodeId) -> None:
        """A node is gone, and its drain with it."""
        self._alive.discard(node_id)
        self._drains.pop(node_id, None)
        self._reclaimed_s.pop(node_id, None)

    def start(self, action: StartReplica, now_s: float) -> None:
        self._longest_grace_s = max(self._longest_grace_s, action.workload.grace_s)
        if action.share is not None:
            self._parts.add(action.replica_id)
            return
        node_id = self._home[action.device_id]
        is_job = isinstance(action.workload, TrainingJob)
        label, drain = self._labels[node_id], self._drains.get(node_id)
        if not admits(label, is_job=is_job):
            detail = f"{action.workload_id} is given {action.device_id}, which is labelled for {label}"
            self._complain("right-pool", detail, now_s)
        if drain is not None and not admits(drain, is_job=is_job):
            detail = f"{action.workload_id} is given {action.device_id}, which is on its way to {drain}"
            self._complain("cordon", detail, now_s)

    def drain(self, action: DrainNode, now_s: float) -> None:
        if action.node_id not in self._alive:
            self._complain("one-label", f"{action.node_id} is drained, and is not there", now_s)
        self._drains[action.node_id] = action.pool
        if action.is_reclaim:
            self._reclaimed_s.setdefault(action.node_id, now_s)
        else:
            self._reclaimed_s.pop(action.node_id, None)

    def label(
        self,
        action: LabelNode,
        holders: Mapping[DeviceId, Collection[ReplicaId]],
        serving: Collection[ReplicaId],
        now_s: float,
    ) -> None:
        """A node has a new label. `holders` are those of all devices, `serving` the replicas of services."""
        if action.node_id not in self._alive:
            self._complain("one-label", f"{action.node_id} is labelled for {action.pool}, and is not there", now_s)
        self._drains.pop(action.node_id, None)
        self._reclaimed_s.pop(action.node_id, None)
        self._labels[action.node_id] = action.pool
        if action.pool == "shared":
            return
        here = [
            (d, replica_id) for d, held in holders.items() if self._home[d] == action.node_id for replica_id in held
        ]
        for device_id, replica_id in here:
            is_part = replica_id in self._parts
            if not admits(action.pool, is_job=replica_id not in serving, is_part=is_part):
                detail = f"{action.node_id} is labelled for {action.pool} while {replica_id} holds {device_id}"
                self._complain("right-pool", detail, now_s)

    def check(self, now_s: float) -> None:
        """After a step: no job is still on a node whose reclaim should be over."""
        for node_id, since_s in self._reclaimed_s.items():
            if now_s > since_s + self._longest_grace_s + _TURN_S:
                detail = f"{node_id} was reclaimed at {since_s:.6f} s and is not free yet"
                self._complain("drain-ends", detail, now_s)
