"""Draws placements and times all-reduces on them with the analytic NCCL: samples to train and to test predictors with.

Placements of the three sets have nothing in common: single servers differ in the devices held, groups of servers in how
many servers they span or, among equal numbers, in what is held of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.resources import DeviceId, Node, Topology, make_node
from springtide.perf.communication.fabric import T4_SERVER, V100_SERVER, Fabric, Links, Subgraph
from springtide.perf.communication.query import DTYPES, CommunicationSample, Query, SampleFile
from springtide_studies.fapes.nccl import Nccl

SETS = ("train", "test", "final")
# How many servers the groups of each set span; what no set names is drawn for none.
NUM_SERVERS = (("train", (2, 3, 4, 6, 8, 12)), ("test", (5, 10, 16)), ("final", (7, 9, 14)))
# Of the placements that are not set apart by their number of servers, so many go to each set.
_SHARES = (("train", 0.7), ("test", 0.15), ("final", 0.15))
SMALLEST_BYTES, LARGEST_BYTES = 1 << 10, 1 << 30
_DTYPE_SHARES = (0.5, 0.25, 0.1, 0.15)


class SampledCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind with their links."""

    links: Links
    nodes: tuple[Node, ...]

    def fabric(self) -> Fabric:
        """The cluster as a graph."""
        return Fabric(Topology(nodes=self.nodes), self.links)


def clusters() -> tuple[SampledCluster, ...]:
    """The testbed of FaPES (16 servers of 8 V100 under three switches: 6, 6, 4) and that of Pollux (16 of 4 T4) under
    four switches of four, whose uplinks carry half of what the servers can send.
    """
    paper = tuple(
        make_node(f"v100-{i:02d}", 8, kind="gpu", switches=(f"switch-{min(i // 6, 2)}", "core")) for i in range(16)
    )
    small = tuple(make_node(f"t4-{i:02d}", 4, kind="gpu", switches=(f"switch-{i // 4}", "core")) for i in range(16))
    t4 = msgspec.structs.replace(T4_SERVER, uplink_bytes_per_s=2 * T4_SERVER.nic_bytes_per_s)
    return SampledCluster(links=V100_SERVER, nodes=paper), SampledCluster(links=t4, nodes=small)


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one set: what was asked, what was measured (s), and what the model says without noise (s)."""

    queries: tuple[Query, ...]
    measured_s: NDArray[np.float64]
    true_s: NDArray[np.float64] | None


def draw_sets(seed: int, *, num_train: int = 1500, num_held_out: int = 320, sizes_each: int = 4) -> dict[str, Drawn]:
    """Placements for each set, `sizes_each` sizes and types on each, over both clusters. Same seed, same samples."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 4]))
    nccl = Nccl()
    wanted = {"train": num_train, "test": num_held_out, "final": num_held_out}
    placements: dict[str, list[Subgraph]] = {name: [] for name in SETS}
    for cluster in clusters():
        fabric = cluster.fabric()
        # The kinds of server share each set evenly; a small server has few combinations, so groups fill its half.
        for name, found in _placements(cluster, fabric, rng, wanted).items():
            placements[name] += found
    return {name: _measure(placements[name], sizes_each, nccl, rng) for name in SETS}


def _placements(
    cluster: SampledCluster, fabric: Fabric, rng: np.random.Generator, wanted: dict[str, int]
) -> dict[str, list[Subgraph]]:
    """Distinct subgraphs for each set: a third on one server as far as there are so many, the rest over servers."""
    spans = dict(NUM_SERVERS)
    found: dict[str, list[Subgraph]] = {name: [] for name in SETS}
    taken: dict[Subgraph, str] = {}
    singles = [fabric.subgraph(ids) for ids in _masks(cluster.nodes[0])]
    order = rng.permutation(len(singles))
    start = 0
    for name, share in _SHARES:
        end = start + max(1, round(share * len(singles)))
        found[name] = [singles[index] for index in order[start:end]][: wanted[name] // 6]
        start = end
    for name in SETS:
        while len(found[name]) < wanted[name] // 2:
            # Half of the held-out groups span numbers that training never sees, half are unseen combinations.
            others = rng.random() < 0.5 and name != "train"
            span = int(rng.choice(spans["train"] if others else spans[name]))
            subgraph = fabric.subgraph(_group(cluster, span, rng))
            if taken.setdefault(subgraph, name) == name and subgraph not in found[name]:
                found[name].append(subgraph)
    return found


def _masks(node: Node) -> Iterator[list[DeviceId]]:
    """Every combination of two or more devices of a node."""
    for mask in range(1 << len(node.devices)):
        if mask.bit_count() > 1:
            yield [device.device_id for device in node.devices if mask >> device.index & 1]


def _group(cluster: SampledCluster, span: int, rng: np.random.Generator) -> list[DeviceId]:
    """Devices on `span` servers: whole servers, equally many of each, or whatever chance leaves; servers next to each
    other or anywhere.
    """
    num_nodes, per_node = len(cluster.nodes), len(cluster.nodes[0].devices)
    if rng.random() < 0.5:
        begin = int(rng.integers(0, num_nodes - span + 1))
        chosen = np.arange(begin, begin + span)
    else:
        chosen = np.sort(rng.choice(num_nodes, span, replace=False))
    kind = rng.choice(("equal", "aligned", "ragged"))
    count = int(rng.integers(1, per_node + 1))
    ids: list[DeviceId] = []
    for index in chosen:
        devices = cluster.nodes[index].devices
        if kind == "aligned":
            slots = np.arange(count)
        else:
            number = count if kind == "equal" else int(rng.integers(1, per_node + 1))
            slots = np.sort(rng.choice(per_node, number, replace=False))
        ids += [devices[slot].device_id for slot in slots]
    return ids


def _measure(subgraphs: list[Subgraph], sizes_each: int, nccl: Nccl, rng: np.random.Generator) -> Drawn:
    queries = []
    for subgraph in subgraphs:
        sizes = np.exp(rng.uniform(np.log(SMALLEST_BYTES), np.log(LARGEST_BYTES), sizes_each))
        dtypes = rng.choice(DTYPES, sizes_each, p=_DTYPE_SHARES)
        # Tensors are whole numbers of elements; four bytes hold each type.
        queries += [Query(subgraph, int(size) // 4 * 4, str(dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
    return Drawn(
        queries=tuple(queries),
        measured_s=np.array([nccl.measure_s(query, rng) for query in queries]),
        true_s=np.array([nccl.time_s(query) for query in queries]),
    )


def sample_file(cluster: SampledCluster, placements: list[list[DeviceId]], *, sizes_each: int, seed: int) -> SampleFile:
    """Samples of the analytic NCCL in the form of measured ones, to try what reads such files."""
    rng = np.random.default_rng(seed)
    fabric, nccl = cluster.fabric(), Nccl()
    samples = []
    for ids in placements:
        drawn = _measure([fabric.subgraph(ids)], sizes_each, nccl, rng)
        samples += [
            CommunicationSample(
                device_ids=tuple(ids), num_bytes=query.num_bytes, dtype=query.dtype, duration_s=float(duration_s)
            )
            for query, duration_s in zip(drawn.queries, drawn.measured_s, strict=True)
        ]
    return SampleFile(
        source="analytic model of NCCL (no hardware)",
        nodes=cluster.nodes,
        links=(cluster.links,),
        samples=tuple(samples),
    )
