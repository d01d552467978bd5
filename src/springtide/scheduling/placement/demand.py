"""What one replica requests of a node beside its devices: processors, memory, a pod."""

from __future__ import annotations

from typing import NamedTuple

from springtide.core.containers import ContainerSettings
from springtide.core.resources import HostResources, Node
from springtide.core.shares import Share

_NOTHING = HostResources()
_UNTOLD = ContainerSettings()


class Demand(NamedTuple):
    """What one replica requests, as far as its workload says; None: as much as the platform's settings say.

    Of `num_devices` it holds all of one node; processors and memory are those of all of it.
    """

    cpu_m: int | None = None
    memory_bytes: int | None = None
    share_m: int | None = None
    num_devices: int = 1

    def on(self, node: Node, *, is_beside: bool = False) -> HostResources:
        """What it requests on this node; `is_beside`: on a device that is taken already, beside its other sharers."""
        if node.room is None:
            return _NOTHING
        replica, beside = node.room.replica, node.room.beside
        cpu_m, memory_bytes = replica.cpu_m, replica.memory_bytes
        if self.share_m is not None and node.devices[0].kind == "cpu":
            # Such a device is a processor, and so a part of it one, too.
            cpu_m = beside.cpu_m + self.share_m
        elif self.cpu_m is not None:
            cpu_m = beside.cpu_m + self.cpu_m
        if self.memory_bytes is not None:
            memory_bytes = beside.memory_bytes + self.memory_bytes
        return HostResources(
            cpu_m=cpu_m,
            memory_bytes=memory_bytes,
            num_pods=replica.num_pods,
            num_devices=0 if is_beside else replica.num_devices * self.num_devices,
        )

    def times_on(self, node: Node) -> int:
        """How many such replicas the node has room for, each on devices of its own."""
        most = len(node.devices) // self.num_devices
        return most if node.room is None else self.on(node).times_in(node.room.free, most)


def demand_of(container: ContainerSettings | None, share: Share | None, num_devices: int = 1) -> Demand:
    """The demand of a replica with these settings on so many devices."""
    told = container or _UNTOLD
    return Demand(
        cpu_m=told.cpu_m,
        memory_bytes=told.memory_bytes,
        share_m=None if share is None else max(1, round(share.request * 1000)),
        num_devices=num_devices,
    )
