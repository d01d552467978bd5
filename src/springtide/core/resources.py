"""What workloads hold: devices, the nodes that contain them, and the topology of all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NewType

import msgspec

from springtide.core.functions import FunctionService

NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
DeviceKind = Literal["gpu", "cpu", "function"]
# What a node is labelled for. On a shared node jobs and services may hold devices side by side.
Pool = Literal["shared", "training", "inference"]


class HostResources(msgspec.Struct, frozen=True, kw_only=True):
    """What replicas take of a node: processors in thousandths, memory, pods, and devices that pods request."""

    cpu_m: int = 0
    memory_bytes: int = 0
    num_pods: int = 0
    num_devices: int = 0

    def __add__(self, other: HostResources) -> HostResources:
        """Both together."""
        return HostResources(
            cpu_m=self.cpu_m + other.cpu_m,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            num_pods=self.num_pods + other.num_pods,
            num_devices=self.num_devices + other.num_devices,
        )

    def __sub__(self, other: HostResources) -> HostResources:
        """What is left without `other`; negative where that is more."""
        return HostResources(
            cpu_m=self.cpu_m - other.cpu_m,
            memory_bytes=self.memory_bytes - other.memory_bytes,
            num_pods=self.num_pods - other.num_pods,
            num_devices=self.num_devices - other.num_devices,
        )

    def times_in(self, free: HostResources, most: int) -> int:
        """How many times it fits into `free`, `most` at most."""
        pairs = (
            (self.cpu_m, free.cpu_m),
            (self.memory_bytes, free.memory_bytes),
            (self.num_pods, free.num_pods),
            (self.num_devices, free.num_devices),
        )
        return max(0, min([most, *(left // needed for needed, left in pairs if needed > 0)]))


class NodeRoom(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a node replicas may request.

    `total` is what the node has, `others` what is requested there by pods that are not the platform's. `replica` is
    what a replica requests whose workload does not say how much; `beside` is the part of it that is requested for
    every replica, whatever its workload says. Devices are counted here where pods request them (else 0).
    """

    total: HostResources
    others: HostResources = HostResources()
    replica: HostResources = HostResources()
    beside: HostResources = HostResources()

    @property
    def free(self) -> HostResources:
        """What is left for the platform's replicas, those that are there included."""
        return self.total - self.others


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica holds, whole or a share of it: a GPU, a CPU slot, or a place for a job on functions.

    `memory_mb` is the memory that its sharers divide (0: not counted). `accelerator` is its model
    (`NVIDIA-A100-SXM4-80GB`; empty: not known): workers on different models differ in speed.
    """

    device_id: DeviceId
    node_id: NodeId
    index: int
    kind: DeviceKind = "cpu"
    memory_mb: int = 0
    accelerator: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with devices. `pool` is what it is labelled for now, `home` the pool that owns it ("": as labelled).

    A node whose label is not its owner's is on loan. `functions` is set if the node stands for a function service: each
    of its devices is then a place for one job, which may run many functions. `isolates_devices` says that workloads on
    different devices of the node do not disturb each other, so that part of it can be loaned (as a shared node);
    otherwise only the whole node. `switches` are the network switches above the node, from its own to the one that all
    nodes share; nodes without switches are all connected to a single one. `room` is what replicas may request beside
    devices (None: not counted).
    """

    node_id: NodeId
    devices: tuple[Device, ...]
    pool: Pool = "shared"
    switches: tuple[str, ...] = ()
    home: Pool | Literal[""] = ""
    isolates_devices: bool = False
    functions: FunctionService | None = None
    room: NodeRoom | None = None

    @property
    def owner(self) -> Pool:
        """The pool that owns the node."""
        return self.home or self.pool

    @property
    def is_loaned(self) -> bool:
        """Whether the node is labelled for another pool than its owner."""
        return self.pool != self.owner


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All living nodes in the order in which they joined. Derived values are computed once."""

    nodes: tuple[Node, ...] = ()

    def devices(self) -> Iterator[Device]:
        """Every device, node by node, in index order."""
        for node in self.nodes:
            yield from node.devices

    def device_ids(self) -> tuple[DeviceId, ...]:
        """The ids of every device, in the order of `devices`."""
        return self._device_ids

    @cached_property
    def device_set(self) -> frozenset[DeviceId]:
        """The ids of every device."""
        return frozenset(self._device_ids)

    @cached_property
    def node_of(self) -> dict[DeviceId, NodeId]:
        """The node of every device."""
        return {device.device_id: device.node_id for device in self.devices()}

    @cached_property
    def memory_of(self) -> dict[DeviceId, int]:
        """The memory of every device whose memory is counted, in MB."""
        return {device.device_id: device.memory_mb for device in self.devices() if device.memory_mb}

    @cached_property
    def accelerator_of(self) -> dict[DeviceId, str]:
        """The model of every device."""
        return {device.device_id: device.accelerator for device in self.devices()}

    @cached_property
    def accelerators(self) -> tuple[str, ...]:
        """The models of the devices of machines, in the order in which they are first met."""
        return tuple(dict.fromkeys(device.accelerator for device in self.machines.devices()))

    @cached_property
    def by_id(self) -> dict[NodeId, Node]:
        """Every node by its id."""
        return {node.node_id: node for node in self.nodes}

    @cached_property
    def has_rooms(self) -> bool:
        """Whether any node says how much replicas may request beside its devices."""
        return any(node.room is not None for node in self.nodes)

    @cached_property
    def has_pools(self) -> bool:
        """Whether any node is labelled for one kind of workload."""
        return any(node.pool != "shared" for node in self.nodes)

    @cached_property
    def machines(self) -> Topology:
        """The nodes that are machines; the topology itself where all are."""
        nodes = tuple(node for node in self.nodes if node.functions is None)
        return self if len(nodes) == len(self.nodes) else Topology(nodes=nodes)

    @cached_property
    def function_services(self) -> tuple[Node, ...]:
        """The nodes that are function services."""
        return tuple(node for node in self.nodes if node.functions is not None)

    @cached_property
    def _device_ids(self) -> tuple[DeviceId, ...]:
        return tuple(device.device_id for device in self.devices())


def admits(pool: Pool, *, is_job: bool, is_part: bool = False) -> bool:
    """Whether a node with this label may hold a job's workers (`is_job`), or a service's replicas.

    Labels are about whole devices: jobs and services may have parts of one (`is_part`) beside each other on every node.
    """
    return is_part or pool == "shared" or pool == ("training" if is_job else "inference")


def make_node(
    name: str,
    num_devices: int,
    *,
    kind: DeviceKind = "cpu",
    pool: Pool = "shared",
    switches: tuple[str, ...] = (),
    isolates_devices: bool = False,
    memory_mb: int = 0,
    accelerator: str = "",
) -> Node:
    """Build a node whose devices are named `<name>/<index>`, each with `memory_mb` of memory (0: not counted)."""
    node_id = NodeId(name)
    devices = tuple(
        Device(
            device_id=DeviceId(f"{name}/{index}"),
            node_id=node_id,
            index=index,
            kind=kind,
            memory_mb=memory_mb,
            accelerator=accelerator,
        )
        for index in range(num_devices)
    )
    return Node(
        node_id=node_id,
        devices=devices,
        pool=pool,
        switches=switches,
        home=pool,
        isolates_devices=isolates_devices,
    )
