"""What there is to hold: devices, the nodes they sit in, and the topology of all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NewType

import msgspec

NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
DeviceKind = Literal["gpu", "cpu"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a replica can hold: a GPU or, on a node without GPUs, a CPU slot."""

    device_id: DeviceId
    node_id: NodeId
    index: int
    kind: DeviceKind = "cpu"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with devices. `pool` names the purpose it is labelled for.

    `switches` are the network switches above it, from its own to the one that all nodes share; nodes without any hang
    on one switch.
    """

    node_id: NodeId
    devices: tuple[Device, ...]
    pool: str = "shared"
    switches: tuple[str, ...] = ()


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
    def _device_ids(self) -> tuple[DeviceId, ...]:
        return tuple(device.device_id for device in self.devices())


def make_node(
    name: str,
    num_devices: int,
    *,
    kind: DeviceKind = "cpu",
    pool: str = "shared",
    switches: tuple[str, ...] = (),
) -> Node:
    """Build a node whose devices are named `<name>/<index>`."""
    node_id = NodeId(name)
    devices = tuple(
        Device(device_id=DeviceId(f"{name}/{index}"), node_id=node_id, index=index, kind=kind)
        for index in range(num_devices)
    )
    return Node(node_id=node_id, devices=devices, pool=pool, switches=switches)
