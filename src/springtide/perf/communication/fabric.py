"""The cluster as a graph of devices, CPUs, switches and links, and the subgraph that joins an allocation.

Source: FaPES, section 4.1 and figure 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, NodeId, Topology

# Kinds of nodes and of edges.
GPU, CPU, SWITCH = 0, 1, 2
NVLINK, PCIE, HOST, NETWORK = 0, 1, 2, 3
EDGE_KINDS = ("nvlink", "pcie", "host", "network")

# The number of NVLinks between two GPUs in the hybrid cube mesh of a server with eight V100 (six per GPU).
_CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links between devices of one kind of server, and from the server to the cluster. Bandwidths are one-way.

    Devices are connected to CPU nodes (a PCIe switch or a socket) in groups of `num_devices_per_cpu`, in index order.
    Network cards are spread evenly over the CPU nodes, starting with the first. Devices i and j are connected by
    `nvlinks[i][j]` links of `nvlink_bytes_per_s`; () = none.
    """

    name: str
    device_type: str
    pcie_bytes_per_s: float
    host_bytes_per_s: float
    nic_bytes_per_s: float
    uplink_bytes_per_s: float
    nvlink_bytes_per_s: float = 0.0
    nvlinks: tuple[tuple[int, ...], ...] = ()
    num_devices_per_cpu: int = 2
    num_nics: int = 1
    num_cpu_cores: int = 1
    memory_bytes_per_s: float = 1e10

    def nvlink_degrees(self, slots: Sequence[int]) -> tuple[int, ...]:
        """For each of these devices, its number of NVLinks to the others."""
        if not self.nvlinks:
            return (0,) * len(slots)
        return tuple(sum(self.nvlinks[slot][other] for other in slots) for slot in slots)

    def is_nvlink_joined(self, slots: Sequence[int]) -> bool:
        """Whether NVLinks among these devices connect all of them."""
        if not self.nvlinks:
            return len(slots) == 1
        reached, waiting = {slots[0]}, [slots[0]]
        while waiting:
            here = waiting.pop()
            further = [slot for slot in slots if slot not in reached and self.nvlinks[here][slot]]
            reached.update(further)
            waiting += further
        return len(reached) == len(slots)

    def has_device_at_card(self, part: ServerPart) -> bool:
        """Whether any device of the part is connected to a CPU node with a network card."""
        cards = self.nic_cpus(part.num_devices)
        return any(slot // self.num_devices_per_cpu in cards for slot in part.slots)

    def nic_cpus(self, num_devices: int) -> tuple[int, ...]:
        """The CPU nodes with a network card, in a server with `num_devices`."""
        num_cpus = -(-num_devices // self.num_devices_per_cpu)
        num_nics = min(self.num_nics, num_cpus)
        return tuple(index * num_cpus // num_nics for index in range(num_nics))


# The server of FaPES's testbed (section 7.1): 8 V100 with 300 GB/s of NVLink each (six links of 25 GB/s each way)
# and 16 lanes of PCIe 3, a 200 Gbps card, switches joined by 400 GbE. Memory and sockets: two Xeon 8163.
V100_SERVER = Links(
    name="v100",
    device_type="V100",
    nvlink_bytes_per_s=25e9,
    nvlinks=_CUBE_MESH,
    pcie_bytes_per_s=16e9,
    host_bytes_per_s=20.8e9,
    nic_bytes_per_s=25e9,
    uplink_bytes_per_s=50e9,
    num_cpu_cores=96,
    memory_bytes_per_s=256e9,
)
# The server of Pollux's testbed: AWS g4dn.12xlarge, 4 T4 on PCIe 3 with 8 lanes, 50 Gbps, 48 virtual cores.
T4_SERVER = Links(
    name="t4",
    device_type="T4",
    pcie_bytes_per_s=8e9,
    host_bytes_per_s=20.8e9,
    nic_bytes_per_s=6.25e9,
    uplink_bytes_per_s=50e9,
    num_cpu_cores=48,
    memory_bytes_per_s=128e9,
)
# Eight A100 on NVSwitch (twelve links of 25 GB/s to each), PCIe 4, a 200 Gbps card for every two.
A100_SERVER = Links(
    name="a100",
    device_type="A100",
    nvlink_bytes_per_s=25e9,
    nvlinks=tuple(tuple(0 if i == j else 12 for j in range(8)) for i in range(8)),
    pcie_bytes_per_s=32e9,
    host_bytes_per_s=41.6e9,
    nic_bytes_per_s=25e9,
    uplink_bytes_per_s=200e9,
    num_nics=4,
    num_cpu_cores=128,
    memory_bytes_per_s=400e9,
)
SERVERS: Mapping[str, Links] = MappingProxyType({links.name: links for links in (V100_SERVER, T4_SERVER, A100_SERVER)})


class ServerPart(msgspec.Struct, frozen=True, order=True):
    """The part of one server in an allocation: its devices, and the switches above it (numbers within the subgraph,
    nearest first, up to the lowest one that joins all servers; () for a single server).
    """

    links_name: str
    num_devices: int
    slots: tuple[int, ...]
    switches: tuple[int, ...] = ()


class Edges(msgspec.Struct, frozen=True, kw_only=True):
    """The graph of an allocation as arrays: nodes are numbered devices first, then CPUs, then switches. Each edge
    occurs once, with its one-way bandwidth.
    """

    num_gpus: int
    num_cpus: int
    num_switches: int
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    kind: NDArray[np.int64]
    bytes_per_s: NDArray[np.float64]
    cpu_of_gpu: NDArray[np.int64]
    server_of_cpu: NDArray[np.int64]
    switch_of_server: NDArray[np.int64]


class Subgraph(msgspec.Struct, frozen=True, dict=True):
    """The part of the cluster that joins the devices of an allocation, up to isomorphism: allocations with the same
    structure have equal subgraphs. Servers are in a canonical order, those under one switch next to each other.
    """

    servers: tuple[ServerPart, ...]
    links: tuple[Links, ...]

    @cached_property
    def num_devices(self) -> int:
        return sum(len(part.slots) for part in self.servers)

    @property
    def num_servers(self) -> int:
        return len(self.servers)

    @cached_property
    def num_leaf_switches(self) -> int:
        """The number of different nearest switches of the servers; 1 for a single server."""
        return len({part.switches[:1] for part in self.servers})

    def links_of(self, part: ServerPart) -> Links:
        """The links of one of its servers."""
        return next(links for links in self.links if links.name == part.links_name)

    @cached_property
    def narrowest_bytes_per_s(self) -> float:
        """The bottleneck of a ring through all devices (bytes/s, one-way); infinite for a single device.

        Within a server: the NVLinks of the device with the fewest, if NVLinks connect all devices, else PCIe. Between
        servers: the network cards and their PCIe links. Between switches: the uplinks.
        """
        found = [float("inf")]
        for part in self.servers:
            links = self.links_of(part)
            if len(part.slots) > 1 and links.is_nvlink_joined(part.slots):
                found.append(min(links.nvlink_degrees(part.slots)) * links.nvlink_bytes_per_s)
            elif len(part.slots) > 1:
                found.append(min(links.pcie_bytes_per_s, links.host_bytes_per_s))
            if self.num_servers > 1:
                found.append(min(links.nic_bytes_per_s, links.pcie_bytes_per_s) * links.num_nics)
                if self.num_leaf_switches > 1:
                    found.append(links.uplink_bytes_per_s)
        return min(found)

    @cached_property
    def edges(self) -> Edges:
        """Nodes and edges as arrays."""
        return _edges_of(self)


class Fabric:
    """A cluster's topology with its links; cuts out the subgraph of an allocation.

    Built in time linear in the devices of the cluster; a subgraph is cut in time linear in its own devices.
    """

    def __init__(self, topology: Topology, links: Links | Mapping[NodeId, Links]) -> None:
        self._nodes = topology.nodes
        self._place = {
            device.device_id: (position, slot)
            for position, node in enumerate(topology.nodes)
            for slot, device in enumerate(node.devices)
        }
        self._links = [links if isinstance(links, Links) else links[node.node_id] for node in topology.nodes]
        self._known: dict[object, Subgraph] = {}

    def subgraph(self, device_ids: Sequence[DeviceId]) -> Subgraph:
        """The subgraph that joins these devices; the same object for allocations with the same structure.

        Raises InvalidRequest for a device that the cluster does not have, or for none at all.
        """
        held: dict[int, list[int]] = {}
        place = self._place
        try:
            for device_id in device_ids:
                position, slot = place[device_id]
                if position in held:
                    held[position].append(slot)
                else:
                    held[position] = [slot]
        except KeyError as error:
            raise InvalidRequest(
                f"the cluster has no device {error.args[0]}; choose among those of its nodes"
            ) from None
        if not held:
            raise InvalidRequest("an allocation without devices has no subgraph; name at least one device")
        key = self._shape(held)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._cut(held)
        return known

    def _shape(self, held: Mapping[int, list[int]]) -> object:
        """The key of allocations with the same structure: the tree of switches with slots at its leaves."""
        if len(held) == 1:
            ((position, slots),) = held.items()
            return (self._links[position].name, len(self._nodes[position].devices), tuple(sorted(slots)))
        leaves: dict[tuple[str, ...], list[object]] = {}
        for position, slots in held.items():
            node = self._nodes[position]
            slots.sort()
            leaves.setdefault(node.switches, []).append((self._links[position].name, len(node.devices), tuple(slots)))
        return _canonical(leaves)

    def _cut(self, held: Mapping[int, list[int]]) -> Subgraph:
        parts: list[ServerPart] = []
        _number(self._shape(held), (), [0], parts)
        links = {self._links[position].name: self._links[position] for position in held}
        return Subgraph(tuple(parts), tuple(links[name] for name in sorted(links)))


def _canonical(leaves: Mapping[tuple[str, ...], list[object]]) -> object:
    """Nest servers by their switches, drop everything above the lowest common switch, and sort."""
    if len(leaves) == 1:
        (servers,) = leaves.values()
        return ("switch", *sorted(servers))  # type: ignore[type-var]
    depth = max(len(path) for path in leaves)
    level: dict[tuple[str, ...], list[tuple[object, ...]]] = {}
    for path, servers in leaves.items():
        node: tuple[object, ...] = ("switch", *sorted(servers))  # type: ignore[type-var]
        # A switch with a shorter path is connected to the common root by links of its own.
        level.setdefault(path[1:] if path else (), []).append(node)
    for _ in range(depth):
        if len(level) == 1:
            break
        higher: dict[tuple[str, ...], list[tuple[object, ...]]] = {}
        for path, children in level.items():
            higher.setdefault(path[1:], []).append(("switch", *sorted(children, key=repr)))
        level = higher
    (children,) = level.values()
    return children[0] if len(children) == 1 else ("switch", *sorted(children, key=repr))


def _number(node: object, above: tuple[int, ...], counter: list[int], parts: list[ServerPart]) -> None:
    """Walk a canonical tree, number its switches and list its servers."""
    assert isinstance(node, tuple)
    if node[0] != "switch":
        parts.append(ServerPart(node[0], node[1], node[2], above))
        return
    here = counter[0]
    counter[0] += 1
    for child in node[1:]:
        _number(child, (here, *above), counter, parts)


def _edges_of(subgraph: Subgraph) -> Edges:
    """Number the nodes of a subgraph and list its edges."""
    gpus = [(server, slot) for server, part in enumerate(subgraph.servers) for slot in part.slots]
    is_joined = len(subgraph.servers) > 1
    cpus: list[tuple[int, int]] = []
    for server, part in enumerate(subgraph.servers):
        links = subgraph.links_of(part)
        present = {slot // links.num_devices_per_cpu for slot in part.slots}
        if is_joined:
            present |= set(links.nic_cpus(part.num_devices))
        cpus += [(server, cpu) for cpu in sorted(present)]
    gpu_at = {gpu: index for index, gpu in enumerate(gpus)}
    cpu_at = {cpu: len(gpus) + index for index, cpu in enumerate(cpus)}
    first_switch = len(gpus) + len(cpus)
    num_switches = 1 + max((max(part.switches, default=-1) for part in subgraph.servers), default=-1)
    rows: list[tuple[int, int, int, float]] = []
    joined: set[tuple[int, int]] = set()
    for server, part in enumerate(subgraph.servers):
        links = subgraph.links_of(part)
        for order, slot in enumerate(part.slots):
            here = gpu_at[server, slot]
            for other in part.slots[order + 1 :]:
                count = links.nvlinks[slot][other] if links.nvlinks else 0
                if count:
                    rows.append((here, gpu_at[server, other], NVLINK, count * links.nvlink_bytes_per_s))
            rows.append((here, cpu_at[server, slot // links.num_devices_per_cpu], PCIE, links.pcie_bytes_per_s))
        own = [cpu for at, cpu in cpus if at == server]
        for order, cpu in enumerate(own):
            rows += [(cpu_at[server, cpu], cpu_at[server, b], HOST, links.host_bytes_per_s) for b in own[order + 1 :]]
        if part.switches:
            for cpu in links.nic_cpus(part.num_devices):
                rows.append((cpu_at[server, cpu], first_switch + part.switches[0], NETWORK, links.nic_bytes_per_s))
            for low, high in zip(part.switches, part.switches[1:], strict=False):
                if (low, high) not in joined:
                    joined.add((low, high))
                    rows.append((first_switch + low, first_switch + high, NETWORK, links.uplink_bytes_per_s))
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    return Edges(
        num_gpus=len(gpus),
        num_cpus=len(cpus),
        num_switches=num_switches,
        source=np.array(columns[0], dtype=np.int64),
        target=np.array(columns[1], dtype=np.int64),
        kind=np.array(columns[2], dtype=np.int64),
        bytes_per_s=np.array(columns[3], dtype=np.float64),
        cpu_of_gpu=np.array(
            [
                cpu_at[server, slot // subgraph.links_of(subgraph.servers[server]).num_devices_per_cpu] - len(gpus)
                for server, slot in gpus
            ],
            dtype=np.int64,
        ),
        server_of_cpu=np.array([server for server, _ in cpus], dtype=np.int64),
        switch_of_server=np.array([part.switches[0] if part.switches else 0 for part in subgraph.servers], np.int64),
    )
