"""What there is to hold: devices, the nodes they sit in, and the topology of all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NewType

import msgspec

NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
DeviceKind = Literal["gpu", "cpu"]
# What a node is labelled for. On a shared one jobs and services may sit side by side, device by device.
Pool = Literal["shared", "training", "inference"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a replica can hold: a GPU or, on a node without GPUs, a CPU slot."""

    device_id: DeviceId
    node_id: NodeId
    index: int
    kind: DeviceKind = "cpu"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with devices. `pool` is what it is labelled for now, `home` the pool that owns it ("": as labelled).

    A node away from home is on loan. `isolates_devices` says that whoever sits on one of its devices leaves those on
    the others alone, so that a part of it can be loaned (it is shared then); otherwise the whole node is the unit.
    `switches` are the network switches above it, from its own to the one that all nodes share; nodes without any hang
    on one switch.
    """

    node_id: NodeId
    devices: tuple[Device, ...]
    pool: Pool = "shared"
    switches: tuple[str, ...] = ()
    home: Pool | Literal[""] = ""
    isolates_devices: bool = False

    @property
    def owner(self) -> Pool:
        """The pool that owns it."""
        return self.home or self.pool

    @property
    def is_loaned(self) -> bool:
        """Whether it is labelled for another pool than the one that owns it."""
        return self.pool != self.owner


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All nodes that are alive, in the order in which they joined. What is derived from them is computed once."""

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
    def by_id(self) -> dict[NodeId, Node]:
        """Every node by its id."""
        return {node.node_id: node for node in self.nodes}

    @cached_property
    def has_pools(self) -> bool:
        """Whether any node is labelled for one kind of workload."""
        return any(node.pool != "shared" for node in self.nodes)

    @cached_property
    def _device_ids(self) -> tuple[DeviceId, ...]:
        return tuple(device.device_id for device in self.devices())


def admits(pool: Pool, *, is_job: bool) -> bool:
    """Whether a node with this label may hold a job's workers, or else a service's replicas."""
    return pool == "shared" or pool == ("training" if is_job else "inference")


def make_node(
    name: str,
    num_devices: int,
    *,
    kind: DeviceKind = "cpu",
    pool: Pool = "shared",
    switches: tuple[str, ...] = (),
    isolates_devices: bool = False,
) -> Node:
    """Build a node whose devices are named `<name>/<index>`."""
    node_id = NodeId(name)
    devices = tuple(
        Device(device_id=DeviceId(f"{name}/{index}"), node_id=node_id, index=index, kind=kind)
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
