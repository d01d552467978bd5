"""Nodes of the cluster as nodes of the platform: which are offered, with which devices, and how they are connected.

`node_of` reads one Node object; `NodeLedger` compares what would be offered now with what was reported before. Of a
node that is cordoned, not ready or gone only the devices that living workers hold are offered, and it is lost when
there are none: a silent kubelet does not mean that the machine is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import NoSuchObject
from springtide.backends.kubernetes.client.kinds import NODE, Object
from springtide.backends.kubernetes.nodes.requests import room_of
from springtide.backends.kubernetes.settings import (
    GROUP,
    HOME_LABEL,
    LINK_GROUPS_ANNOTATION,
    NODE_LABEL,
    POOL_LABEL,
    SWITCHES_ANNOTATION,
    KubernetesSettings,
)
from springtide.core.events import NodeJoined, NodeLost
from springtide.core.resources import Device, DeviceId, Node, NodeId, Pool

_log = logging.getLogger(__name__)

# The devices that living workers hold on a node.
Held = Callable[[NodeId], Collection[DeviceId]]
# A node's network cards and the devices near each: "mlx5_0=0,1,2,3;mlx5_1=4,5,6,7". For display only.
NICS_ANNOTATION = f"{GROUP}/nics"
MEMORY_LABEL = "nvidia.com/gpu.memory"
# The model of a node's devices, as NVIDIA's discovery of features writes it; the local backend names them alike.
PRODUCT_LABEL = "nvidia.com/gpu.product"
# Added above the switches that a node names: one that all nodes share.
COMMON_SWITCH = "cluster"
# For nodes without the annotation: labels of clouds and of node discovery, the nearest switch first.
_SWITCH_LABELS = (
    ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine", "network.topology.nvidia.com/core"),
    (
        "topology.k8s.aws/network-node-layer-3",
        "topology.k8s.aws/network-node-layer-2",
        "topology.k8s.aws/network-node-layer-1",
    ),
    ("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"),
    ("topology.kubernetes.io/rack", "topology.kubernetes.io/zone"),
    ("topology.kubernetes.io/zone",),
)
_POOLS: Mapping[str, Pool] = {"shared": "shared", "training": "training", "inference": "inference"}
# Taints that repeat what is read from the spec or the Ready condition.
_KNOWN_TAINTS = (
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from one Node object. `node` is what it would offer; None if it offers nothing: `reason` says why.

    `has_no_device`: only devices are missing. `cordon` is why no pod may start there (empty: pods may); `is_ready` is
    what its kubelet reports. `nics` are its network cards and the indices of the devices near each. `complaints` are
    sentences about unreadable annotations and how to fix them.
    """

    name: str
    node: Node | None
    reason: str = ""
    has_no_device: bool = False
    cordon: str = ""
    is_ready: bool = True
    nics: dict[str, tuple[int, ...]] = {}
    complaints: tuple[str, ...] = ()


class NodeNote(msgspec.Struct, frozen=True, kw_only=True):
    """A node for users: offered with `num_devices`; `reason` says why with fewer, or not at all."""

    name: str
    is_offered: bool
    num_devices: int
    reason: str = ""
    nics: dict[str, tuple[int, ...]] = {}
    complaints: tuple[str, ...] = ()


def node_of(obj: Object, settings: KubernetesSettings) -> Node | None:
    """The node that an object would offer if it were ready; None if it may not be used or has no devices."""
    return facts_of(obj, settings).node


def facts_of(obj: Object, settings: KubernetesSettings) -> NodeFacts:
    """Read a Node object. Pure.

    The platform may use a node with the label springtide.dev/node=true; nodes without that label only if they have
    all labels of the settings' `node_selector` (and that is not empty).
    """
    metadata = obj["metadata"]
    name = metadata["name"]
    labels: dict[str, str] = metadata.get("labels") or {}
    refused = _refusal(labels, settings)
    if refused:
        return NodeFacts(name=name, node=None, reason=refused)
    count = num_devices(obj, settings)
    if count == 0:
        reason = f"it has no {settings.device_resource} to give"
        return NodeFacts(name=name, node=None, reason=reason, has_no_device=True, is_ready=_is_ready(obj))
    complaints: list[str] = []
    annotations: dict[str, str] = metadata.get("annotations") or {}
    groups = _read(_link_groups, annotations, LINK_GROUPS_ANNOTATION, count, complaints)
    nics = _read(_nics, annotations, NICS_ANNOTATION, count, complaints)
    switches = _read(_switches, annotations, SWITCHES_ANNOTATION, count, complaints)
    return NodeFacts(
        name=name,
        node=Node(
            node_id=NodeId(name),
            devices=_devices(name, _in_groups(count, groups or ()), labels, settings),
            pool=_pool(labels, POOL_LABEL, complaints) or _pool(labels, HOME_LABEL, complaints) or "shared"
            if settings.pools
            else "shared",
            home=_pool(labels, HOME_LABEL, []) or "" if settings.pools else "",
            switches=switches or _switches_of_labels(labels),
            room=room_of(obj, settings),
        ),
        cordon=_cordon(obj, settings),
        is_ready=_is_ready(obj),
        nics=nics or {},
        complaints=tuple(complaints),
    )


def num_devices(obj: Object, settings: KubernetesSettings) -> int:
    """The number of devices of a Node object: as allocatable by its kubelet, else as in the settings."""
    status = obj.get("status") or {}
    allocatable = status.get("allocatable") or status.get("capacity") or {}
    count = allocatable.get(settings.device_resource)
    if count is None:
        return settings.devices_per_node
    return int(count) if str(count).isdecimal() else 0


def counts_resource(obj: Object, settings: KubernetesSettings) -> bool:
    """Whether the node has the extended resource, so that pods request it; else the platform alone counts devices."""
    status = obj.get("status") or {}
    return settings.device_resource in (status.get("allocatable") or status.get("capacity") or {})


async def ensure_labelled(api: KubeApi, name: str, pool: Pool, home: Pool) -> Object | None:
    """Label a node for a pool, and with its owner where no label names it. None: no such node.

    Without the owner's label, a node on loan could not be distinguished from one in its own pool.
    """
    labels: dict[str, str] = {POOL_LABEL: pool}
    try:
        found = await api.get(NODE, name)
        known = found["metadata"].get("labels") or {}
        if known.get(HOME_LABEL) not in _POOLS:
            labels[HOME_LABEL] = home
        if all(known.get(label) == value for label, value in labels.items()):
            return found
        return await api.patch(NODE, name, {"metadata": {"labels": labels}})
    except NoSuchObject:
        return None


class NodeLedger:
    """What was reported of every node, and its present state. Not thread-safe.

    `beside` adds to a node what the pods of others request there.
    """

    def __init__(self, settings: KubernetesSettings, beside: Callable[[Node], Node] = lambda node: node) -> None:
        self._settings = settings
        self._beside = beside
        self._facts: dict[NodeId, tuple[str, NodeFacts]] = {}
        self._reported: dict[NodeId, Node] = {}
        self._silent_since_s: dict[NodeId, float] = {}
        self._labels: dict[NodeId, Pool] = {}
        self._complained: set[str] = set()

    def assume(self, nodes: Iterable[Node]) -> None:
        """Take these nodes as reported already, by an earlier ledger or in the journal."""
        self._reported = {node.node_id: node for node in nodes}

    def offered(self, objects: Iterable[Object], held: Held, now_s: float) -> tuple[Node, ...]:
        """The nodes that would be reported now, without reporting them."""
        return tuple(self._offers(objects, held, now_s).values())

    def want_label(self, node_id: NodeId, pool: Pool) -> None:
        """Treat the node as labelled for that pool from now on, whatever its object says.

        The caller knows of this change already: `update` does not report it.
        """
        self._labels[node_id] = pool
        reported = self._reported.get(node_id)
        if reported is not None and reported.pool != pool:
            self._reported[node_id] = msgspec.structs.replace(reported, pool=pool, home=reported.owner)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they were last reported."""
        return tuple(self._reported.values())

    def update(self, objects: Iterable[Object], held: Held, now_s: float) -> list[NodeJoined | NodeLost]:
        """Compare; return the events to report, joined nodes first. `held` returns the devices of living workers."""
        return self._differences(self._offers(objects, held, now_s))

    def _offers(self, objects: Iterable[Object], held: Held, now_s: float) -> dict[NodeId, Node]:
        offered: dict[NodeId, Node] = {}
        seen: set[NodeId] = set()
        for obj in objects:
            facts = self._read(obj)
            node_id = NodeId(facts.name)
            seen.add(node_id)
            node = self._offer(node_id, facts, held, now_s)
            if node is not None:
                offered[node_id] = self._beside(node)
        for node_id in [known for known in self._facts if known not in seen]:
            del self._facts[node_id]
            self._silent_since_s.pop(node_id, None)
        for node_id, reported in self._reported.items():
            if node_id not in offered and node_id not in seen and (still := held(node_id)):
                # The Node object is gone, but workers still run there.
                offered[node_id] = self._only_held(reported, still)
        return offered

    def labels_due(self) -> list[tuple[NodeId, Pool, Pool]]:
        """The nodes whose object does not have the wanted label: id, wanted pool, owner."""
        due = []
        for node_id, pool in self._labels.items():
            facts = self.facts(node_id)
            if facts is not None and facts.node is not None and facts.node.pool != pool:
                due.append((node_id, pool, facts.node.owner))
        return due

    def facts(self, node_id: NodeId) -> NodeFacts | None:
        """What was last read from a node's object; None if there is no object."""
        known = self._facts.get(node_id)
        return known[1] if known is not None else None

    def describe(self) -> tuple[NodeNote, ...]:
        """Every node of the cluster, offered or not, and why."""
        notes = []
        for node_id, (_, facts) in sorted(self._facts.items()):
            reported = self._reported.get(node_id)
            reason = facts.reason or facts.cordon
            if not reason and not facts.is_ready:
                reason = "its kubelet is not ready"
            notes.append(
                NodeNote(
                    name=facts.name,
                    is_offered=reported is not None,
                    num_devices=len(reported.devices) if reported is not None else 0,
                    reason=reason,
                    nics=facts.nics,
                    complaints=facts.complaints,
                )
            )
        return tuple(notes)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self, obj: Object) -> NodeFacts:
        metadata = obj["metadata"]
        version = f"{metadata.get('uid', '')}/{metadata.get('resourceVersion', '')}"
        known = self._facts.get(NodeId(metadata["name"]))
        if known is not None and known[0] == version and version != "/":
            return known[1]
        facts = facts_of(obj, self._settings)
        self._facts[NodeId(facts.name)] = (version, facts)
        for complaint in facts.complaints:
            if complaint not in self._complained:
                self._complained.add(complaint)
                _log.warning("node %s: %s", facts.name, complaint)
        return facts

    def _offer(self, node_id: NodeId, facts: NodeFacts, held_on: Held, now_s: float) -> Node | None:
        """The part of a node that is offered. `held_on` is called only if needed: it goes through many pods."""
        node, reported = facts.node, self._reported.get(node_id)
        if node is None:
            self._silent_since_s.pop(node_id, None)
            held = held_on(node_id) if reported is not None else ()
            return self._only_held(reported, held) if reported is not None and held else None
        node = self._labelled(node_id, node)
        is_lost = bool(facts.cordon)
        if facts.is_ready:
            self._silent_since_s.pop(node_id, None)
        else:
            since_s = self._silent_since_s.setdefault(node_id, now_s)
            is_lost = is_lost or reported is None or now_s - since_s >= self._settings.node_lost_after_s
        if is_lost:
            held = held_on(node_id)
            return self._only_held(node, held) if held else None
        if reported is node:
            return node
        counted = {device.device_id for device in node.devices}
        if reported is not None and counted.issuperset(device.device_id for device in reported.devices):
            return node
        # Fewer devices than before, or unknown how many there were: a worker may hold one that is no longer counted.
        beyond = [device_id for device_id in held_on(node_id) if device_id not in counted]
        if not beyond:
            return node
        return msgspec.structs.replace(node, devices=(*node.devices, *self._missing(node, beyond)))

    def _only_held(self, node: Node, held: Collection[DeviceId]) -> Node:
        there = tuple(device for device in node.devices if device.device_id in held)
        known = {device.device_id for device in there}
        missing = [device_id for device_id in held if device_id not in known]
        return msgspec.structs.replace(node, devices=(*there, *self._missing(node, missing)))

    def _missing(self, node: Node, device_ids: Iterable[DeviceId]) -> tuple[Device, ...]:
        model = node.devices[0].accelerator if node.devices else ""
        found = (device_of(node.node_id, device_id, self._settings) for device_id in sorted(device_ids))
        return tuple(msgspec.structs.replace(device, accelerator=model) for device in found if device is not None)

    def _labelled(self, node_id: NodeId, node: Node) -> Node:
        wanted = self._labels.get(node_id)
        if wanted is None or wanted == node.pool or not self._settings.pools:
            return node
        if node.owner == "shared":
            # Its owner is "shared" now: such a node gets no pool label.
            del self._labels[node_id]
            return node
        return msgspec.structs.replace(node, pool=wanted, home=node.owner)

    def _differences(self, offered: Mapping[NodeId, Node]) -> list[NodeJoined | NodeLost]:
        joined = [
            NodeJoined(node=node)
            for node_id, node in offered.items()
            if (reported := self._reported.get(node_id)) is not node and reported != node
        ]
        lost = [NodeLost(node_id=node_id) for node_id in self._reported if node_id not in offered]
        self._reported = {
            **{node_id: offered[node_id] for node_id in self._reported if node_id in offered},
            **offered,
        }
        return [*joined, *lost]


def device_of(node_id: NodeId, device_id: DeviceId, settings: KubernetesSettings) -> Device | None:
    """The device with that id; None if it is not on that node."""
    owner, _, index = device_id.rpartition("/")
    if owner != node_id or not index.isdecimal():
        return None
    return Device(device_id=device_id, node_id=node_id, index=int(index), kind=settings.device_kind)


# --- parts of an object ----------------------------------------------------------------------------------------------


def _refusal(labels: Mapping[str, str], settings: KubernetesSettings) -> str:
    """Why the platform may not use a node; empty if it may."""
    permission = labels.get(NODE_LABEL)
    for label, value in settings.node_selector.items():
        if labels.get(label) != value:
            return f"it does not bear the label {label}={value}"
    if permission == "true" or (permission is None and settings.node_selector):
        return ""
    return f"it does not bear the label {NODE_LABEL}=true"


def _is_ready(obj: Object) -> bool:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _cordon(obj: Object, settings: KubernetesSettings) -> str:
    spec = obj.get("spec") or {}
    if "deletionTimestamp" in obj["metadata"]:
        return "it is being removed from the cluster"
    if spec.get("unschedulable"):
        return "it is cordoned"
    # Nodes with devices are often tainted for pods that request devices, as our pods do.
    ours = {"key": settings.device_resource, "operator": "Exists"}
    tolerations = [*settings.pod.overlay.get("tolerations", ()), ours]
    for taint in spec.get("taints") or ():
        if taint.get("effect") not in ("NoSchedule", "NoExecute") or taint.get("key") in _KNOWN_TAINTS:
            continue
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            return (
                f"it bears the taint {taint.get('key')}:{taint.get('effect')}, which the settings' pods do not tolerate"
            )
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")


def _pool(labels: Mapping[str, str], label: str, complaints: list[str]) -> Pool | None:
    value = labels.get(label)
    if value is None:
        return None
    if value not in _POOLS:
        complaints.append(f"label {label}={value} names no pool: training, inference or shared")
    return _POOLS.get(value)


def _devices(
    name: str, order: Iterable[int], labels: Mapping[str, str], settings: KubernetesSettings
) -> tuple[Device, ...]:
    memory = labels.get(MEMORY_LABEL, "")
    memory_mb = int(memory) if memory.isdecimal() and settings.device_kind == "gpu" else 0
    return tuple(
        Device(
            device_id=DeviceId(f"{name}/{index}"),
            node_id=NodeId(name),
            index=index,
            kind=settings.device_kind,
            memory_mb=memory_mb,
            accelerator=labels.get(PRODUCT_LABEL, "") if settings.device_kind == "gpu" else "",
        )
        for index in order
    )


def _in_groups(count: int, groups: Iterable[tuple[int, ...]]) -> list[int]:
    """All indices, with those of one group adjacent: neighbours in this order are placed together."""
    order = [index for group in groups for index in group]
    return [*order, *(index for index in range(count) if index not in set(order))]


def _read(reader: Any, annotations: Mapping[str, str], name: str, count: int, complaints: list[str]) -> Any:
    text = annotations.get(name)
    if text is None:
        return None
    try:
        return reader(text, count)
    except ValueError as error:
        complaints.append(f"annotation {name}={text!r} is not read: {error}")
        return None


def _link_groups(text: str, count: int) -> tuple[tuple[int, ...], ...]:
    groups = tuple(_indices(part, count) for part in text.split(";") if part.strip())
    _each_once([index for group in groups for index in group])
    return groups


def _nics(text: str, count: int) -> dict[str, tuple[int, ...]]:
    nics = {}
    for part in text.split(";"):
        card, equals, indices = part.partition("=")
        if not equals or not card.strip():
            raise ValueError("cards are written as mlx5_0=0,1;mlx5_1=2,3")
        nics[card.strip()] = _indices(indices, count)
    return nics


def _switches(text: str, _: int) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError("switches are written as leaf-3,spine-1: the nearest first, none of them empty")
    _each_once(names)
    return tuple(names) if names[-1] == COMMON_SWITCH else (*names, COMMON_SWITCH)


def _switches_of_labels(labels: Mapping[str, str]) -> tuple[str, ...]:
    for names in _SWITCH_LABELS:
        if all(labels.get(name) for name in names):
            return (*(labels[name] for name in names), COMMON_SWITCH)
    return ()


def _indices(text: str, count: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError("devices are written as their indices: 0,1,2,3;4,5,6,7")
    indices = tuple(int(part) for part in parts)
    if any(index >= count for index in indices):
        raise ValueError(f"the node has {count} devices, so indices end at {count - 1}")
    return indices


def _each_once(names: list[Any]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("a name is there twice")
