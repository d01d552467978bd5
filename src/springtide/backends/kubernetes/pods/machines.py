"""Relates pods and nodes: the devices that living workers hold, and the pods whose machine is gone."""

from __future__ import annotations

import time
from collections import defaultdict

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.kubernetes.client.cache import Cache
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.nodes.registry import NodeTable
from springtide.backends.kubernetes.pods.driver import PodHandle
from springtide.backends.kubernetes.pods.reading import devices_in
from springtide.backends.kubernetes.pods.table import PodTable
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.resources import DeviceId, NodeId

CHECK_EVERY_S = 5.0
# How long the table of held devices is reused.
_HELD_AGE_S = 0.25


class PodMachines:
    """Runs on the I/O thread, except for `held`, which is thread-safe."""

    def __init__(self, pod_cache: Cache, settings: KubernetesSettings) -> None:
        self._cache = pod_cache
        self._lost_after_s = settings.worker_lost_after_s
        self._table: ReplicaTable[PodHandle] | None = None
        self._is_started = False
        self._held: tuple[float, dict[NodeId, list[DeviceId]]] = (float("-inf"), {})

    def join(self, table: ReplicaTable[PodHandle], pods: PodTable, nodes: NodeTable, api_thread: ApiThread) -> None:
        """Connect this object to the tables of replicas, pods and nodes. No replica is adopted before `start`."""
        self._table, self._pods, self._nodes, self._api = table, pods, nodes, api_thread

    def start(self) -> None:
        """All living replicas have been adopted: start the periodic checks of machines."""
        self._is_started = True
        self._held = (float("-inf"), {})
        self._check()

    def held(self, node_id: NodeId) -> frozenset[DeviceId]:
        """The devices of a node whose workers send heartbeats; before replicas are adopted, those with a pod."""
        now_s = time.monotonic()
        at_s, held = self._held
        if now_s - at_s > _HELD_AGE_S:
            # Computed for all nodes in one pass: callers ask for one after the other.
            held = self._living(now_s) if self._table is not None and self._is_started else self._found()
            self._held = (now_s, held)
        return frozenset(held.get(node_id, ()))

    def lose(self, node_id: NodeId) -> None:
        """Report the replicas of a lost node as lost. Their pods are deleted once their kubelet answers again."""
        assert self._table is not None, "no node can be lost before there are pods"
        for replica in list(self._table.replicas.values()):
            if replica.handle.pod is None or replica.handle.pod.node_id != node_id:
                continue
            if replica.asked_to_stop:
                self._pods.delete(replica.handle.pod, 1.0)
                self._table.note_exit(replica)
            else:
                self._table.lose(replica, f"node {node_id} was lost")

    def _living(self, now_s: float) -> dict[NodeId, list[DeviceId]]:
        assert self._table is not None
        held: dict[NodeId, list[DeviceId]] = defaultdict(list)
        for replica in list(self._table.replicas.values()):
            pod = replica.handle.pod
            if pod is None or replica.lost_reason is not None:
                continue
            talks = replica.heard_at_s > 0.0 and now_s - replica.heard_at_s < self._lost_after_s
            if talks or replica.phase is MemberPhase.ADOPTING:
                held[pod.node_id].extend(pod.device_ids)
        return held

    def _found(self) -> dict[NodeId, list[DeviceId]]:
        found: dict[NodeId, list[DeviceId]] = defaultdict(list)
        for obj in self._cache.objects():
            is_over = (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            if not is_over:
                node_id = NodeId((obj.get("spec") or {}).get("nodeName", ""))
                found[node_id].extend(devices_in(obj["metadata"].get("annotations") or {}))
        return found

    def _check(self) -> None:
        """Find pods on nodes that the cluster no longer knows: they do not run, whatever their status says."""
        assert self._table is not None
        self._table.reactor.after(CHECK_EVERY_S, self._check)
        pods = list(self._pods.pods.values())
        missing = {pod.node_id for pod in pods if pod.uid and not pod.is_over}
        for node_id in sorted(node_id for node_id in missing if node_id and not self._nodes.is_there(node_id)):
            self._ask_about(node_id)

    def _ask_about(self, node_id: NodeId) -> None:
        """Ask the API server itself for the node: the cached listing may be outdated."""
        table, pods = self._table, self._pods
        assert table is not None

        def told(found: object) -> None:
            if found is None:
                table.reactor.call(lambda: pods.note_node_gone(node_id))

        self._api.confirm(self._nodes.cache, node_id, "", told)
