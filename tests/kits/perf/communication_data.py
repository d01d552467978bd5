"""A small cluster and samples with a law that tests know, for what learns from samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from springtide.core.resources import DeviceId, Topology, make_node
from springtide.perf.communication.fabric import T4_SERVER, V100_SERVER, Fabric, Links, Subgraph
from springtide.perf.communication.query import Query


def small_fabric(links: Links = V100_SERVER, num_nodes: int = 8, devices: int = 8) -> Fabric:
    nodes = tuple(
        make_node(f"n{i}", devices, kind="gpu", switches=(f"leaf-{i // 4}", "core")) for i in range(num_nodes)
    )
    return Fabric(Topology(nodes=nodes), links)


def subgraph_of(fabric: Fabric, **slots: tuple[int, ...] | range) -> Subgraph:
    return fabric.subgraph([DeviceId(f"{node}/{slot}") for node, chosen in slots.items() for slot in chosen])


def drawn_subgraphs(num: int, seed: int) -> list[Subgraph]:
    """Distinct groups of two or more devices on one to six servers."""
    rng = np.random.default_rng(seed)
    fabric = small_fabric()
    small = small_fabric(T4_SERVER, devices=4)
    found: dict[int, Subgraph] = {}
    while len(found) < num:
        cut, most = (fabric, 8) if rng.random() < 0.6 else (small, 4)
        nodes = rng.choice(8, int(rng.integers(1, 7)), replace=False)
        slots = {f"n{node}": tuple(rng.choice(most, int(rng.integers(1, most + 1)), replace=False)) for node in nodes}
        subgraph = subgraph_of(cut, **slots)
        if subgraph.num_devices > 1:
            found[id(subgraph)] = subgraph
    return list(found.values())


def lawful_samples(
    subgraphs: list[Subgraph], seed: int, sizes_each: int = 6
) -> tuple[list[Query], NDArray[np.float64]]:
    """Latency for each device and server, and the ring's bytes over the narrowest link: smooth, without noise."""
    rng = np.random.default_rng(seed)
    queries = [
        Query(subgraph, int(np.exp(rng.uniform(np.log(1e3), np.log(1e9)))))
        for subgraph in subgraphs
        for _ in range(sizes_each)
    ]
    return queries, np.array([lawful_s(query) for query in queries])


def lawful_s(query: Query) -> float:
    shape = query.subgraph
    latency_s = 5e-6 + 2e-6 * shape.num_devices + 8e-6 * (shape.num_servers - 1)
    part = 2 * (shape.num_devices - 1) / shape.num_devices
    return latency_s + part * query.num_bytes / (0.8 * shape.narrowest_bytes_per_s)
