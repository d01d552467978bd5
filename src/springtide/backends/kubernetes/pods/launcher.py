"""Turns a StartReplica into a pod: one at a time on its devices, after older writers of the job are fenced off."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.kubernetes.client.errors import QuotaExceeded
from springtide.backends.kubernetes.client.kinds import Key, Object, key_of
from springtide.backends.kubernetes.pods.driver import PodDriver, PodReplica
from springtide.backends.kubernetes.pods.quota import NamespaceQuota
from springtide.backends.kubernetes.pods.spec import make_pod, make_secret, namespace_of, pod_name
from springtide.backends.kubernetes.pods.state import PodLifecycle, PodState
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.actions import StartReplica
from springtide.core.errors import BackendError
from springtide.core.resources import Device, DeviceId, HostResources, Node, NodeId
from springtide.core.tokens import workload_key
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.demand import demand_of


class Machines(Protocol):
    """The part of the node table that a launcher needs."""

    def find(self, device_id: DeviceId) -> tuple[Node, Device] | None:
        """A device and its node, offered or not."""
        ...

    def counts_resource(self, node_id: NodeId) -> bool:
        """Whether the kubelet of that node counts devices by the extended resource."""
        ...


class _Place(NamedTuple):
    """The devices of one replica, and the node that all of them are of."""

    node: Node
    devices: list[Device]


class PodLauncher:
    """Creates pods for replicas, as soon as device, fence and quota allow. Runs on the I/O thread."""

    def __init__(
        self,
        driver: PodDriver,
        machines: Machines,
        settings: KubernetesSettings,
        term: int,
        master_key: bytes,
        credentials: Mapping[str, str],
        quota: NamespaceQuota,
    ) -> None:
        self._driver = driver
        self._table = driver.table
        self._pods = driver.pods
        self._machines = machines
        self._settings = settings
        self._term = term
        self._master_key = master_key
        self._credentials = credentials
        self._quota = quota
        self._queue: deque[PodReplica] = deque()
        self._is_pump_due = False
        self._leaving: list[PodState] = []
        self.reasons: dict[str, str] = {}
        self._ownerless: dict[WorkloadId, Key] = {}
        self._pods.on_refused = self._on_refused
        driver.on_room = self._on_over
        self._pods.on_made = lambda pod: quota.accepted(pod.key.namespace)
        driver.on_early = self._make
        self._pods.is_expected = self._is_expected
        quota.on_room = self.pump

    def start(self, action: StartReplica) -> None:
        """Start one replica, unless it has existed before. Raises BackendError if a device of it is not there."""
        table = self._table
        if table.has_existed(action.replica_id):
            table.counts["repeated_actions"] += 1
            return
        place = self._place_of(action)
        if place is None:
            missing = self._missing_of(action)
            raise BackendError(f"there is no device {missing}: its node is not there, or has fewer devices")
        self._raise_fence(action)
        replica = self._driver.make_replica(action)
        replica.handle.node_id = place.node.node_id
        self._queue.append(replica)
        self.pump()

    def pump(self) -> None:
        """Create the pods of queued replicas that may start now, once the queued calls of the reactor have run."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._table.reactor.after(0.0, self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        waiting: deque[PodReplica] = deque()
        self._leaving = [pod for pod in self._pods.pods.values() if pod.state is PodLifecycle.ENDING]
        while self._queue:
            replica = self._queue.popleft()
            self.reasons.pop(replica.replica_id, None)
            if replica.phase is not MemberPhase.QUEUED:
                continue
            reason = self._obstacle(replica)
            if reason:
                self.reasons[replica.replica_id] = reason
                waiting.append(replica)
            else:
                self._make(replica)
        self._queue = waiting

    def adopt(self, replica: PodReplica, pod: PodState, *, is_bound: bool) -> None:
        """Take over a pod that an earlier control plane created, or may have created; bind it if that is missing."""
        replica.handle.pod = self._pods.enter(pod)
        if not is_bound and not self._order(replica, pod):
            self._pods.delete(pod, 1)

    def key_of(self, replica: PodReplica) -> Key:
        """The namespace and name of a replica's pod."""
        return Key("", "") if replica.action is None else self._key_of(replica.action)

    def state_of(self, action: StartReplica) -> PodState:
        """The state of a replica's pod before its object is read."""
        place = self._place_of(action)
        return PodState(
            replica_id=action.replica_id,
            workload_id=action.workload_id,
            key=self._key_of(action),
            device_ids=action.device_ids,
            node_id=place.node.node_id if place is not None else NodeId(""),
            requests=_requests(action, place.node) if place is not None else None,
            is_sharer=action.share is not None,
        )

    def pod_like(self, replica: PodReplica) -> Object | None:
        """A pod like a replica's, under another name; None if a device of it is gone."""
        place = self._place_of(replica.action) if replica.action is not None else None
        if replica.action is None or place is None:
            return None
        obj = self._object_of(replica.action, place)
        obj["metadata"]["name"] = f"{obj['metadata']['name'][:56]}-probe"
        return obj

    def forget_job(self, workload_id: WorkloadId) -> None:
        """A job has ended and its last pod is over: delete its Secret if it has no owner that would take it along."""
        key = self._ownerless.pop(workload_id, None)
        if key is not None:
            self._pods.forget_secret(workload_id, key)

    # --- one pod -----------------------------------------------------------------------------------------------------

    def _obstacle(self, replica: PodReplica) -> str:
        """Why a pod must not be created yet; empty if it may."""
        action = replica.action
        assert action is not None, "only what was asked for is started"
        if self._driver.is_fencing(action.workload_id):
            return "older writers of the job are being fenced off in the object store"
        for device_id in action.device_ids:
            holder = self._pods.holder(device_id, is_sharer=action.share is not None)
            if holder is not None:
                return f"{device_id} is held by pod {holder.key.name} until that is gone: {holder.reason}"
        if replica.replica_id in self._pods.pods:
            return "an earlier pod of that name is not gone yet"
        leaving = self._in_the_way(action)
        if leaving is not None:
            return f"node {leaving.node_id} has no room for it until pod {leaving.key.name} is gone: {leaving.reason}"
        return self._quota.obstacle(namespace_of(action.workload, self._settings))

    def _in_the_way(self, action: StartReplica) -> PodState | None:
        """A pod that is ending, if the node has no room for the new one before that. Otherwise its kubelet decides."""
        node_id = NodeId(action.device_id.rpartition("/")[0])
        leaving = [pod for pod in self._leaving if pod.node_id == node_id]
        place = self._place_of(action) if leaving else None
        if place is None or place.node.room is None:
            return None
        here = [pod for pod in self._pods.pods.values() if pod.node_id == node_id and not pod.is_over]
        free = place.node.room.free - sum((pod.requests for pod in here if pod.requests), start=HostResources())
        return None if _requests(action, place.node).times_in(free, 1) else leaving[0]

    def _make(self, replica: PodReplica) -> None:
        assert replica.action is not None, "only what was asked for is started"
        replica.phase = MemberPhase.SPAWNING
        replica.born_at_s = time.monotonic()
        pod = self.state_of(replica.action)
        self._table.crash_point("executor.create.before")
        if self._order(replica, pod):
            replica.handle.pod = self._pods.enter(pod)
            self._table.counts["creates"] += 1
        else:
            self._quota.withdrawn(pod.key.namespace)
        self._table.crash_point("executor.create.after")

    def _order(self, replica: PodReplica, pod: PodState) -> bool:
        """Order a pod to be created and bound; False if that is impossible, and the replica is lost."""
        action = replica.action
        assert action is not None, "only what was asked for is started"
        place = self._place_of(action)
        if place is None:
            self._table.lose(replica, f"there is no device {self._missing_of(action)} any more")
            return False
        try:
            obj = self._object_of(action, place)
            key = workload_key(self._master_key, action.workload_id)
            secret = make_secret(action.workload, self._settings, key, self._credentials)
        except BackendError as error:
            self._table.lose(replica, str(error))
            return False
        if "ownerReferences" not in secret["metadata"]:
            self._ownerless[action.workload_id] = key_of(secret)
        self._pods.make(pod, obj, secret)
        return True

    def _is_expected(self, key: Key) -> bool:
        return any(replica.phase is MemberPhase.QUEUED and self.key_of(replica) == key for replica in self._queue)

    def _key_of(self, action: StartReplica) -> Key:
        return Key(namespace_of(action.workload, self._settings), pod_name(action.replica_id))

    def _place_of(self, action: StartReplica) -> _Place | None:
        """The devices of a replica and their node; None if one of them is not there."""
        found = [self._machines.find(device_id) for device_id in action.device_ids]
        there = [each for each in found if each is not None]
        return _Place(there[0][0], [device for _, device in there]) if len(there) == len(found) else None

    def _missing_of(self, action: StartReplica) -> DeviceId:
        return next((each for each in action.device_ids if self._machines.find(each) is None), action.device_id)

    def _object_of(self, action: StartReplica, place: _Place) -> Object:
        counts = self._machines.counts_resource(place.node.node_id)
        return make_pod(action, self._settings, place.devices, term=self._term, counts_resource=counts)

    def _on_over(self, pod: PodState) -> None:
        self._quota.released(pod.key.namespace)
        if not pod.uid:
            self._quota.withdrawn(pod.key.namespace)
        self.pump()

    def _on_refused(self, pod: PodState, error: BackendError) -> None:
        """The pod was not created."""
        if not isinstance(error, QuotaExceeded):
            self._quota.withdrawn(pod.key.namespace)
        replica = self._table.replicas.get(pod.replica_id)
        if replica is None or replica.handle.pod is not pod:
            return
        replica.handle.pod = None
        if replica.asked_to_stop:
            self._table.note_exit(replica)
        elif isinstance(error, QuotaExceeded):
            replica.phase = MemberPhase.QUEUED
            self._table.counts["quota_refusals"] += 1
            self._quota.refused(replica, pod.key.namespace, str(error))
            self._queue.append(replica)
            self.pump()
        else:
            self._table.lose(replica, f"the API server refuses its pod: {error}")

    def _raise_fence(self, action: StartReplica) -> None:
        """On a fresh start of a job, prevent workers of older generations from writing."""
        table = self._table
        job = table.jobs.get(action.workload_id)
        known = job.generation if job is not None else 0
        if action.generation <= known or table.of_workload(action.workload_id):
            return
        fresh = self._driver.fresh_job(action.workload_id, action.generation)
        if action.generation > 0:
            self._driver.fence_storage(fresh, action.generation, self.pump)


def _requests(action: StartReplica, node: Node) -> HostResources:
    # The pod of a sharer requests no device.
    demand = demand_of(action.workload.container, action.share, len(action.device_ids))
    return demand.on(node, is_beside=action.share is not None)
