"""This machine's devices: its GPUs, or CPU slots if it has none, as one node or as one node per device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from springtide.backends.sharing.gpu.discovery import VISIBLE_VARIABLE, Gpu, discover_gpus
from springtide.core.errors import InvalidRequest
from springtide.core.resources import Device, DeviceId, Node, NodeId, Pool, make_node

__all__ = ["VISIBLE_VARIABLE", "Gpu", "discover_gpus", "discover_node", "gpus_of", "split_node"]


def discover_node(num_slots: int | None = None, *, name: str = "local") -> Node:
    """Return this machine as a node: one device for each GPU, else `num_slots` CPU slots (default: one a core).

    Raises InvalidRequest for fewer than one slot. With GPUs, `num_slots` limits how many of them are offered.
    """
    if num_slots is not None and num_slots < 1:
        raise InvalidRequest(f"a machine needs at least one slot, got {num_slots}; for example 2")
    gpus = discover_gpus()[:num_slots]
    if not gpus:
        return make_node(name, num_slots or os.cpu_count() or 1, kind="cpu")
    node = make_node(name, len(gpus), kind="gpu")
    devices = [
        replace(device, memory_mb=gpu.memory_mb, accelerator=gpu.name.replace(" ", "-"))
        for device, gpu in zip(node.devices, gpus, strict=True)
    ]
    return replace(node, devices=tuple(devices))


def gpus_of(nodes: Sequence[Node], gpus: Sequence[Gpu]) -> dict[DeviceId, Gpu]:
    """The GPU of each device of this machine. However it is divided into nodes, both are in the driver's order."""
    devices = [device for node in nodes for device in node.devices if device.kind == "gpu"]
    return {device.device_id: gpu for device, gpu in zip(devices, gpus, strict=False)}


def split_node(node: Node, pools: Mapping[Pool, int]) -> tuple[Node, ...]:
    """Divide a machine into nodes of one device each, `<name>-0` and so on: nodes are what pools loan.

    The last of them are owned by inference, the others by training; a pool that `pools` leaves out owns the rest.
    Raises InvalidRequest if the numbers do not fit the machine.
    """
    total = len(node.devices)
    asked = sum(pools.values())
    if asked > total or (len(pools) == 2 and asked != total):
        had = f"there {'is' if total == 1 else 'are'} {total}"
        raise InvalidRequest(
            f"the pools take {asked} slots and {had}: ask for {total} together, or name one pool and leave the other "
            "the rest, like inference=1; --slots N changes how many there are"
        )
    num_inference = pools.get("inference", total - pools.get("training", total))
    return tuple(
        _part_of(node, device, "inference" if place >= total - num_inference else "training")
        for place, device in enumerate(node.devices)
    )


def _part_of(node: Node, device: Device, pool: Pool) -> Node:
    name = NodeId(f"{node.node_id}-{device.index}")
    part = replace(device, device_id=DeviceId(f"{name}/0"), node_id=name, index=0)
    return Node(node_id=name, devices=(part,), pool=pool, home=pool, switches=node.switches)
