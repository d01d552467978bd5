"""An analytic model of NCCL's all-reduce: the stand-in for GPUs where there are none. Not a measurement of anything.

Sources: the constants of NCCL's own cost model (NVIDIA/nccl, src/graph/tuning.cc, release 2.9: base and hardware
latencies, protocol fractions, tree correction, plateau of the ring), the two-tree of Sanders, Speck and Traeff (2009).
The choice of algorithm and protocol follows NCCL's costs; the time follows the links, so the choice can be a poor one.
"""

from __future__ import annotations

from itertools import pairwise, permutations

import msgspec
import numpy as np

from springtide.perf.communication.fabric import Links, ServerPart, Subgraph
from springtide.perf.communication.query import Query

RING, TREE = 0, 1
LL, LL128, SIMPLE = 0, 1, 2
# Microseconds, [algorithm][protocol]; then [hardware][algorithm][protocol] for NVLink, PCIe and the network.
_BASE_US = ((3.6, 10.0, 8.4), (4.4, 4.4, 0.0))
_HOP_US = (
    ((0.47, 1.9, 3.4), (0.52, 1.2, 28.0)),
    ((1.0, 2.5, 5.7), (1.0, 1.9, 28.0)),
    ((2.7, 4.0, 9.6), (5.0, 8.5, 50.0)),
)
_ON_NVLINK, _ON_PCIE, _ON_NETWORK = 0, 1, 2
# What a tree reaches of its bandwidth at 64 B, 128 B, ... 128 MB.
_TREE_FRACTION = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9),
)
# A channel (one thread block) moves so much, GB/s; LL128's figure is NCCL's, the others its speed of one NVLink.
_CHANNEL_GB_PER_S = (5.0, 16.7, 20.0)
# A channel is opened for each so many bytes: threads of a block times the protocol's threshold.
_BYTES_PER_CHANNEL = (512 * 8, 640 * 8, 512 * 64)
# What links deliver of their nominal bandwidth: NCCL counts 20 of 25 GB/s for an NVLink of a V100, 12 of 16 for PCIe 3,
# 9 of 20.8 between Skylake sockets; a card delivers nearly all. Through the root complex PCIe loses a little more.
_NVLINK_FRACTION, _PCIE_FRACTION, _SOCKET_FRACTION, _NIC_FRACTION, _ROOT_FRACTION = 0.8, 0.75, 0.45, 0.92, 0.85
# How much of a channel's speed the reduction leaves, by element type: small elements cost more instructions a byte.
# An assumption of this model; NCCL publishes none.
_REDUCTION_FRACTION = (("float32", 1.0), ("float16", 0.95), ("bfloat16", 0.92), ("int8", 0.78))
_TREE_BUS_FRACTION = 0.9
_PLATEAU = 1.9
_PLATEAU_BYTES_PER_RANK = 4096
# Spread of one measurement (the paper's testbed saw far more), and the traffic of others on shared switches.
NOISE_SIGMA = 0.04
CONTENTION_PROBABILITY = 0.04
CONTENTION_MEAN = 0.25


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a subgraph offers to one algorithm. Bandwidths in GB/s: what NCCL believes, and what the links give to one
    byte of the tensor; latencies in microseconds for each protocol.
    """

    num_channels: int
    believed_gb_per_s: float
    ring_bus_gb_per_s: float
    tree_algorithm_gb_per_s: float
    believed_us: tuple[tuple[float, ...], ...]
    actual_us: tuple[tuple[float, ...], ...]
    has_ll128: bool


class Nccl:
    """Times all-reduces over subgraphs. Deterministic; noise is added by `measure_s` from the generator given."""

    def __init__(self) -> None:
        self._routes: dict[int, tuple[Subgraph, Route]] = {}
        self._rings: dict[tuple[str, tuple[int, ...], bool], int] = {}

    def time_s(self, query: Query) -> float:
        """What the collective takes without noise (s); 0 for a single device."""
        subgraph, num_bytes = query.subgraph, query.num_bytes
        if subgraph.num_devices < 2:
            return 0.0
        algorithm, protocol = self.choice(query)
        route = self._route(subgraph)
        opened = min(route.num_channels, max(1, num_bytes // self._bytes_per_channel(algorithm, protocol, subgraph)))
        reduction = next((fraction for name, fraction in _REDUCTION_FRACTION if name == query.dtype), 1.0)
        of_channels = opened * _CHANNEL_GB_PER_S[protocol] * reduction
        latency_us = route.actual_us[algorithm][protocol]
        if algorithm == RING:
            # Until the buffers are filled for the first time, latencies bound the ring's pace.
            if self._has_plateau(protocol, query):
                latency_us *= _PLATEAU
            bus = min(route.ring_bus_gb_per_s * _ring_fraction(protocol, subgraph), of_channels)
            bandwidth = bus * subgraph.num_devices / (2 * (subgraph.num_devices - 1))
        else:
            bandwidth = min(route.tree_algorithm_gb_per_s * _tree_fraction(protocol, subgraph), of_channels / 2)
            # NCCL's table has steps; the thing it describes has none.
            place = np.log2(max(num_bytes, 64) / 64)
            bandwidth *= float(np.interp(place, range(len(_TREE_FRACTION[0]) + 1), (*_TREE_FRACTION[protocol], 1.0)))
        return latency_us * 1e-6 + num_bytes / (bandwidth * 1e9)

    def choice(self, query: Query) -> tuple[int, int]:
        """Algorithm and protocol with the least cost by NCCL's own model."""
        route, num_bytes, num_ranks = self._route(query.subgraph), query.num_bytes, query.subgraph.num_devices
        step = min(max(int(np.log2(max(num_bytes, 64) // 64)), 0), len(_TREE_FRACTION[0]))
        best, choice = np.inf, (RING, SIMPLE)
        for algorithm in (RING, TREE):
            for protocol in (LL, LL128, SIMPLE):
                if protocol == LL128 and not route.has_ll128:
                    continue
                bus = route.believed_gb_per_s
                latency_us = route.believed_us[algorithm][protocol]
                if algorithm == RING:
                    bus *= _ring_fraction(protocol, query.subgraph)
                    if protocol == LL128:
                        bus = min(bus, route.num_channels * _CHANNEL_GB_PER_S[LL128])
                    bandwidth = bus * num_ranks / (2 * (num_ranks - 1))
                    latency_us *= _PLATEAU if self._has_plateau(protocol, query) else 1.0
                else:
                    bandwidth = bus * _TREE_BUS_FRACTION * _tree_fraction(protocol, query.subgraph) / 2
                    bandwidth *= _TREE_FRACTION[protocol][step] if step < len(_TREE_FRACTION[0]) else 1.0
                cost = latency_us + num_bytes / (bandwidth * 1e3)
                if cost < best:
                    best, choice = cost, (algorithm, protocol)
        return choice

    def measure_s(self, query: Query, rng: np.random.Generator) -> float:
        """One measurement (s): noise multiplies the time and, between servers, now and then the traffic of others."""
        factor = float(np.exp(rng.normal(0.0, NOISE_SIGMA)))
        is_disturbed = rng.random() < CONTENTION_PROBABILITY
        slowdown = 1.0 + float(rng.exponential(CONTENTION_MEAN))
        if is_disturbed and query.subgraph.num_servers > 1:
            factor *= slowdown
        return self.time_s(query) * factor

    @staticmethod
    def _has_plateau(protocol: int, query: Query) -> bool:
        return (
            protocol == SIMPLE
            and query.subgraph.num_servers > 1
            and query.num_bytes >= query.subgraph.num_devices * _PLATEAU_BYTES_PER_RANK
        )

    @staticmethod
    def _bytes_per_channel(algorithm: int, protocol: int, subgraph: Subgraph) -> int:
        return _BYTES_PER_CHANNEL[protocol] * (subgraph.num_devices if (algorithm, protocol) == (RING, LL) else 1)

    def _route(self, subgraph: Subgraph) -> Route:
        known = self._routes.get(id(subgraph))
        if known is None or known[0] is not subgraph:
            known = self._routes[id(subgraph)] = (subgraph, self._find_route(subgraph))
        return known[1]

    def _find_route(self, subgraph: Subgraph) -> Route:
        num_ranks, num_servers = subgraph.num_devices, subgraph.num_servers
        is_joined = num_servers > 1
        inside, cards, on_nvlink, is_near = [], [], True, True
        num_channels = 16
        for part in subgraph.servers:
            links = subgraph.links_of(part)
            rings = self._nvlink_rings(links, part.slots, is_joined)
            alone = len(part.slots) == 1
            if rings:
                inside.append(rings * links.nvlink_bytes_per_s * _NVLINK_FRACTION / 1e9)
                num_channels = min(num_channels, max(rings, 2))
            elif not alone:
                inside.append(_pcie_ring_gb_per_s(links, part, is_joined))
                on_nvlink, num_channels = False, min(num_channels, 2)
            if is_joined:
                speed, near = _card_gb_per_s(links, part)
                cards.append(speed)
                is_near &= near
                num_channels = min(num_channels, 2 * links.num_nics)
        trees = _tree_loads(subgraph)
        per_byte = [2 / (_TREE_BUS_FRACTION * speed) for speed in inside]
        if is_joined:
            per_byte += [load / speed for load, speed in zip(trees.card_loads, cards, strict=True)]
            uplink = min(links.uplink_bytes_per_s for links in subgraph.links) * _NIC_FRACTION / 1e9
            per_byte += [load / uplink for load in trees.uplink_loads]
            # A ring in the order of switches crosses each uplink once.
            bus = min([*inside, *cards, *([uplink] if subgraph.num_leaf_switches > 1 else [])])
        else:
            bus = min(inside)
        # NCCL measures distances, not sharing: it believes in whole cards and PCIe links.
        nominal = [
            *inside,
            *(
                min(links.nic_bytes_per_s * _NIC_FRACTION, links.pcie_bytes_per_s * _PCIE_FRACTION)
                * links.num_nics
                / 1e9
                for links in (subgraph.links if is_joined else ())
            ),
        ]
        hardware = _ON_NVLINK if on_nvlink else _ON_PCIE
        most = max(len(part.slots) for part in subgraph.servers)
        return Route(
            num_channels=num_channels,
            believed_gb_per_s=min(nominal),
            ring_bus_gb_per_s=bus,
            tree_algorithm_gb_per_s=1 / max(per_byte),
            believed_us=_latencies(
                hardware, num_ranks, num_servers, num_ranks // num_servers, int(np.log2(num_servers))
            ),
            actual_us=_latencies(hardware, num_ranks, num_servers, most, trees.depth),
            has_ll128=on_nvlink and is_near and bool(inside) and all(links.nvlinks for links in subgraph.links),
        )

    def _nvlink_rings(self, links: Links, slots: tuple[int, ...], is_open: bool) -> int:
        """How many one-way rings (open: chains) over NVLink pass through all these devices without sharing a link.

        Found greedily as NCCL's search does, fewest spare links first; 0 = they cannot be joined by NVLink alone.
        """
        key = (links.name, slots, is_open)
        if key not in self._rings:
            self._rings[key] = _pack_rings(links, slots, is_open) if links.nvlinks and len(slots) > 1 else 0
        return self._rings[key]


class _TreeLoads(msgspec.Struct, frozen=True, kw_only=True):
    """What the two trees carry, in bytes for each byte of the tensor, one direction: cards of servers, uplinks."""

    card_loads: tuple[float, ...]
    uplink_loads: tuple[float, ...]
    depth: int


def _pack_rings(links: Links, slots: tuple[int, ...], is_open: bool) -> int:
    first, rest = slots[0], slots[1:]
    if is_open:
        orders = list(permutations(slots)) if len(slots) <= 6 else _chains(links, slots)
        paths = [list(pairwise(order)) for order in orders]
    else:
        paths = [list(pairwise((first, *order, first))) for order in permutations(rest)]
    free = {(a, b): links.nvlinks[a][b] for a in slots for b in slots if a != b}
    paths = [path for path in paths if all(free[hop] for hop in path)]
    found = 0
    while paths:
        best = max(paths, key=lambda path: (min(free[hop] for hop in path), sum(free[hop] for hop in path)))
        for hop in best:
            free[hop] -= 1
        found += 1
        paths = [path for path in paths if all(free[hop] for hop in path)]
    return found


def _chains(links: Links, slots: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Chains through many devices, walked along links only; those that start at the first two devices."""
    chains: list[tuple[int, ...]] = []
    stack: list[tuple[int, ...]] = [(slot,) for slot in slots[:2]]
    while stack:
        chain = stack.pop()
        if len(chain) == len(slots):
            chains.append(chain)
            continue
        stack += [(*chain, slot) for slot in slots if slot not in chain and links.nvlinks[chain[-1]][slot]]
    return chains


def _pcie_ring_gb_per_s(links: Links, part: ServerPart, is_joined: bool) -> float:
    """A ring through host memory: hops share the uplinks of their PCIe switch and the link between sockets."""
    order = list(part.slots) if is_joined else [*part.slots, part.slots[0]]
    pcie = links.pcie_bytes_per_s * _PCIE_FRACTION / 1e9
    socket = links.host_bytes_per_s * _SOCKET_FRACTION / 1e9
    half = max(1, -(-part.num_devices // links.num_devices_per_cpu) // 2)
    through, across = 0, [0, 0]
    for a, b in pairwise(order):
        cpu_a, cpu_b = a // links.num_devices_per_cpu, b // links.num_devices_per_cpu
        through += cpu_a != cpu_b
        if cpu_a // half != cpu_b // half:
            across[cpu_a < cpu_b] += 1
    speeds = [pcie * (_ROOT_FRACTION if through else 1.0)]
    speeds += [socket / count for count in across if count]
    return min(speeds)


def _card_gb_per_s(links: Links, part: ServerPart) -> tuple[float, bool]:
    """What the network cards give to a ring through this server, and whether the devices next to them take part."""
    half = max(1, -(-part.num_devices // links.num_devices_per_cpu) // 2)
    held = {slot // links.num_devices_per_cpu for slot in part.slots}
    nic = links.nic_bytes_per_s * _NIC_FRACTION / 1e9
    pcie = links.pcie_bytes_per_s * _PCIE_FRACTION / 1e9
    total, is_near = 0.0, True
    for cpu in links.nic_cpus(part.num_devices):
        if cpu in held:
            total += min(nic, pcie)
            continue
        is_near = False
        is_same_socket = any(other // half == cpu // half for other in held)
        reach = pcie * _ROOT_FRACTION if is_same_socket else links.host_bytes_per_s * _SOCKET_FRACTION / 1e9
        total += min(nic, reach)
    # Fewer devices than cards cannot keep them all busy.
    return min(total, len(part.slots) * pcie), is_near


def _tree_loads(subgraph: Subgraph) -> _TreeLoads:
    num = subgraph.num_servers
    cards = [0.0] * num
    switches: dict[int, float] = {}
    depth = 0
    for parents in _two_trees(num):
        for child, parent in enumerate(parents):
            if parent < 0:
                continue
            # Half of the tensor goes up each edge and half comes down: the same load on both directions.
            cards[child] += 0.5
            cards[parent] += 0.5
            below, above = subgraph.servers[child].switches, subgraph.servers[parent].switches
            for switch in set(below) ^ set(above):
                switches[switch] = switches.get(switch, 0.0) + 0.5
        for child in range(num):
            steps, at = 0, child
            while parents[at] >= 0:
                steps, at = steps + 1, parents[at]
            depth = max(depth, steps)
    return _TreeLoads(card_loads=tuple(cards), uplink_loads=tuple(switches.values()), depth=depth)


def _two_trees(num: int) -> tuple[list[int], list[int]]:
    """The parents (-1 = root) of every server in both binary trees: a leaf of one is an inner node of the other."""
    first = []
    for rank in range(num):
        low = rank & -rank
        parent = (rank ^ low) | (low << 1) if rank else -1
        first.append(rank ^ low if rank and parent >= num else parent)
    second = [0] * num
    for rank, parent in enumerate(first):
        second[_turned(rank, num)] = _turned(parent, num) if parent >= 0 else -1
    return first, second


def _turned(rank: int, num: int) -> int:
    """Where the second tree puts a server: mirrored among an even number, else one further."""
    return num - 1 - rank if num % 2 == 0 else (rank + 1) % num


def _latencies(
    hardware: int, num_ranks: int, num_servers: int, per_server: int, depth: int
) -> tuple[tuple[float, ...], ...]:
    """Microseconds for each algorithm and protocol, by the formulas of NCCL's model."""
    num_steps, num_across = 2 * (num_ranks - 1), 2 * (num_servers - 1)
    rows = []
    for algorithm in (RING, TREE):
        row = []
        for protocol in (LL, LL128, SIMPLE):
            inside = _HOP_US[hardware][algorithm][protocol]
            inside *= 1.8 if num_servers > 1 and protocol == LL else 1.0
            across = _HOP_US[_ON_NETWORK][algorithm][protocol]
            if algorithm == RING:
                hops = (num_steps - num_across) * inside + num_across * across
            else:
                hops = 2 * ((per_server - 1) * inside + depth * across)
            row.append(_BASE_US[algorithm][protocol] + hops)
        rows.append(tuple(row))
    return tuple(rows)


def _ring_fraction(protocol: int, subgraph: Subgraph) -> float:
    if protocol == LL128:
        return 0.7 if subgraph.num_devices < 2 * subgraph.num_servers else 0.92
    return 0.25 if protocol == LL else 1.0


def _tree_fraction(protocol: int, subgraph: Subgraph) -> float:
    if protocol == LL128:
        return 7 / 9 if subgraph.num_servers == 1 else 0.915
    return 1 / 3.8 if protocol == LL else 1.0
