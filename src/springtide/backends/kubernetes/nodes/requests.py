"""What pods request of nodes: of one pod, of a replica by the settings, of the pods of others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from springtide.backends.kubernetes.client.cache import ObjectChange
from springtide.backends.kubernetes.client.kinds import Object
from springtide.backends.kubernetes.client.overlay import merge
from springtide.backends.kubernetes.pods.spec import CONTAINER_NAME, label_value
from springtide.backends.kubernetes.settings import PLATFORM_LABEL, REPLICA_LABEL, KubernetesSettings
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_quantity
from springtide.core.resources import HostResources, Node, NodeId, NodeRoom

# The pods that take room on a node: those that are bound and have not ended.
BOUND_FIELDS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_PLENTY = "1P"
# Amounts are journaled as 64 bits, and added up over the pods of a node.
_MOST = 10**15
_NOTHING = HostResources()
_ONE_POD = HostResources(num_pods=1)
_KEPT_METADATA = ("name", "namespace", "uid", "resourceVersion")


def pod_request(spec: Mapping[str, Any], device: str = "") -> HostResources:
    """What a pod with this spec requests, as kubelets count it. `device` is the extended resource that is a device."""
    most = beside = _NOTHING
    for each in spec.get("initContainers") or ():
        if each.get("restartPolicy") == "Always":
            # It runs beside the containers, and beside the init containers after it.
            beside += _request(each, device)
        else:
            most = _most(most, beside + _request(each, device))
    whole = _amounts((spec.get("resources") or {}).get("requests") or {})
    asked = _most(most, beside + _sum(_request(each, device) for each in spec.get("containers") or ()))
    asked = HostResources(
        cpu_m=asked.cpu_m if whole.cpu_m == 0 else whole.cpu_m,
        memory_bytes=asked.memory_bytes if whole.memory_bytes == 0 else whole.memory_bytes,
        num_devices=asked.num_devices,
    )
    return asked + _amounts(spec.get("overhead") or {}) + _ONE_POD


def room_of(node: Object, settings: KubernetesSettings) -> NodeRoom:
    """The room on a node without what others request; what its object does not say is there in plenty."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    told = {name: allocatable.get(name, _PLENTY) for name in ("cpu", "memory", "pods")}
    counted = _amount(allocatable.get(settings.device_resource), 1)
    total = _amounts(told) + HostResources(num_pods=_amount(told["pods"], 1), num_devices=counted)
    worker = {name: value for name, value in (("cpu", settings.pod.cpu), ("memory", settings.pod.memory)) if value}
    given = {"containers": [{"name": CONTAINER_NAME, "resources": {"requests": worker}}]}
    spec = merge(given, settings.pod.overlay)
    own = _sum(_request(each) for each in spec["containers"] if each.get("name") == CONTAINER_NAME)
    replica = pod_request(spec)
    one = HostResources(num_devices=min(counted, 1))
    return NodeRoom(total=total, replica=replica + one, beside=replica - own)


class OtherPods:
    """What the pods that are not the platform's replicas request on each node. Kept up to date by a cache's changes.

    `beside` is called under the lock of the node table; `trim` and `note` on the API thread.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        self._platform = label_value(settings.name)
        self._device = settings.device_resource
        self._on: defaultdict[NodeId, HostResources] = defaultdict(HostResources)
        self._nodes: dict[NodeId, tuple[Node, Node]] = {}

    def beside(self, node: Node) -> Node:
        """The node with what others request there; the same object again as long as nothing changes."""
        if node.room is None:
            return node
        others = self._on.get(node.node_id, _NOTHING)
        known = self._nodes.get(node.node_id)
        if known is not None and known[0] is node and known[1].room is not None and known[1].room.others == others:
            return known[1]
        found = node if node.room.others == others else replace(node, room=replace(node.room, others=others))
        self._nodes[node.node_id] = (node, found)
        return found

    def trim(self, pod: Object) -> Object:
        """What is kept of a pod: its node and what it requests."""
        metadata, spec = pod["metadata"], pod.get("spec") or {}
        labels = metadata.get("labels") or {}
        is_replica = labels.get(PLATFORM_LABEL) == self._platform and REPLICA_LABEL in labels
        return {
            "metadata": {name: metadata[name] for name in _KEPT_METADATA if name in metadata},
            "node": spec.get("nodeName", ""),
            "requests": _NOTHING if is_replica else pod_request(spec, self._device),
        }

    def note(self, change: ObjectChange) -> None:
        """A pod was bound, has changed, or is over."""
        if change.before is not None:
            self._on[change.before["node"]] -= change.before["requests"]
        if change.now is not None:
            self._on[change.now["node"]] += change.now["requests"]


def _request(container: Mapping[str, Any], device: str = "") -> HostResources:
    resources = container.get("resources") or {}
    # What is limited and not requested is requested up to its limit.
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})}, device)


def _amounts(named: Mapping[str, Any], device: str = "") -> HostResources:
    return HostResources(
        cpu_m=_amount(named.get("cpu"), 1000),
        memory_bytes=_amount(named.get("memory"), 1),
        num_devices=_amount(named.get(device), 1),
    )


def _amount(value: Any, factor: int) -> int:
    try:
        return 0 if value is None else min(_MOST, math.ceil(parse_quantity(str(value)) * factor))
    except InvalidRequest:
        return 0


def _sum(parts: Iterable[HostResources]) -> HostResources:
    return sum(parts, start=_NOTHING)


def _most(one: HostResources, other: HostResources) -> HostResources:
    return HostResources(
        cpu_m=max(one.cpu_m, other.cpu_m),
        memory_bytes=max(one.memory_bytes, other.memory_bytes),
        num_devices=max(one.num_devices, other.num_devices),
    )
