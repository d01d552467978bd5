"""The cluster as a graph, and what of it joins an allocation."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.perf.communication.fabric import (
    A100_SERVER,
    HOST,
    NETWORK,
    NVLINK,
    PCIE,
    T4_SERVER,
    V100_SERVER,
    Fabric,
    Links,
    Subgraph,
)


def paper_fabric(links: Links = V100_SERVER) -> Fabric:
    nodes = tuple(
        make_node(f"node-{i:02d}", 8, kind="gpu", switches=(f"switch-{min(i // 6, 2)}", "core")) for i in range(16)
    )
    return Fabric(Topology(nodes=nodes), links)


def held(*names: str) -> list[DeviceId]:
    """`00/0-3` is four devices of the first node."""
    ids = []
    for name in names:
        node, _, slots = name.partition("/")
        first, _, last = slots.partition("-")
        ids += [DeviceId(f"node-{node}/{slot}") for slot in range(int(first), int(last or first) + 1)]
    return ids


def count(subgraph: Subgraph, kind: int) -> int:
    return int(np.sum(subgraph.edges.kind == kind))


def test_the_mesh_of_eight_gives_each_device_six_links() -> None:
    assert V100_SERVER.nvlink_degrees(range(8)) == (6,) * 8
    assert all(row == column for row, column in zip(V100_SERVER.nvlinks, zip(*V100_SERVER.nvlinks)))  # noqa: B905


def test_one_server_has_no_switch_and_only_the_cpus_of_what_is_held() -> None:
    """Figure 7 (b) of the paper: devices 0, 2, 5 and 7 with their NVLinks and affinity CPUs."""
    subgraph = paper_fabric().subgraph(held("03/0", "03/2", "03/5", "03/7"))
    edges = subgraph.edges
    assert (edges.num_gpus, edges.num_cpus, edges.num_switches) == (4, 4, 0)
    over_nvlink = np.flatnonzero(edges.kind == NVLINK)
    assert {(int(edges.source[e]), int(edges.target[e]), edges.bytes_per_s[e] / 25e9) for e in over_nvlink} == {
        (0, 1, 1.0),
        (2, 3, 1.0),
    }
    assert count(subgraph, PCIE) == 4
    assert count(subgraph, HOST) == 6
    assert count(subgraph, NETWORK) == 0


def test_servers_are_joined_up_to_the_lowest_switch_that_all_share() -> None:
    fabric = paper_fabric()
    beside = fabric.subgraph(held("00/0-7", "01/0-7"))
    assert (beside.edges.num_switches, beside.num_leaf_switches) == (1, 1)
    apart = fabric.subgraph(held("00/0-7", "06/0-7"))
    assert (apart.edges.num_switches, apart.num_leaf_switches) == (3, 2)
    assert count(apart, NETWORK) == 2 + 2
    uplinks = apart.edges.bytes_per_s[apart.edges.kind == NETWORK]
    assert sorted(uplinks) == [25e9, 25e9, 50e9, 50e9]


def test_allocations_that_look_alike_have_the_same_subgraph() -> None:
    fabric = paper_fabric()
    assert fabric.subgraph(held("00/0-3", "07/2")) is fabric.subgraph(held("12/2", "06/0-3"))
    assert fabric.subgraph(held("00/0-3", "07/2")) is not fabric.subgraph(held("00/0-3", "01/2"))
    assert fabric.subgraph(held("02/1", "02/0")) is fabric.subgraph(held("02/0", "02/1"))
    assert fabric.subgraph(held("00/0", "00/1")) is not fabric.subgraph(held("00/0", "00/2"))


def test_a_card_far_from_what_is_held_brings_its_cpu_along() -> None:
    subgraph = paper_fabric().subgraph(held("00/6-7", "01/6-7"))
    assert subgraph.edges.num_cpus == 4
    assert not V100_SERVER.has_device_at_card(subgraph.servers[0])
    assert A100_SERVER.nic_cpus(8) == (0, 1, 2, 3)
    assert T4_SERVER.nic_cpus(4) == (0,)


def test_deep_trees_are_cut_at_the_common_switch() -> None:
    nodes = tuple(
        make_node(f"node-{i:02d}", 8, switches=(f"rack-{i // 2}", f"row-{i // 4}", "core")) for i in range(16)
    )
    fabric = Fabric(Topology(nodes=nodes), V100_SERVER)
    row = fabric.subgraph(held("00/0", "02/0"))
    assert row.edges.num_switches == 3
    hall = fabric.subgraph(held("00/0", "02/0", "04/0"))
    # Three racks, two rows and the core.
    assert hall.edges.num_switches == 6
    assert hall is fabric.subgraph(held("08/0", "10/0", "14/0"))


def test_nodes_without_switches_hang_on_one() -> None:
    fabric = Fabric(Topology(nodes=(make_node("node-00", 4), make_node("node-01", 4))), T4_SERVER)
    subgraph = fabric.subgraph(held("00/0", "01/0"))
    assert subgraph.edges.num_switches == 1
    assert subgraph.num_servers == 2


def test_kinds_of_server_may_be_mixed() -> None:
    nodes = (make_node("node-00", 8), make_node("node-01", 4))
    fabric = Fabric(Topology(nodes=nodes), {nodes[0].node_id: V100_SERVER, nodes[1].node_id: T4_SERVER})
    subgraph = fabric.subgraph(held("00/0-1", "01/0"))
    assert [links.name for links in subgraph.links] == ["t4", "v100"]
    assert subgraph.narrowest_bytes_per_s == T4_SERVER.nic_bytes_per_s


@pytest.mark.parametrize(
    ("names", "gb_per_s"),
    [
        (["00/0"], np.inf),
        (["00/0-7"], 150.0),
        (["00/0", "00/3"], 50.0),
        (["00/0", "00/5"], 16.0),
        (["00/0-7", "01/0-7"], 16.0),
    ],
)
def test_the_narrowest_place(names: list[str], gb_per_s: float) -> None:
    assert paper_fabric().subgraph(held(*names)).narrowest_bytes_per_s == gb_per_s * 1e9


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no device node-99/0"):
        paper_fabric().subgraph([DeviceId("node-99/0")])
    with pytest.raises(InvalidRequest, match="at least one"):
        paper_fabric().subgraph([])


def test_eight_thousand_devices_cost_a_subgraph_nothing() -> None:
    """The arrays are as large as the allocation, whatever the cluster holds."""
    nodes = tuple(
        make_node(f"node-{i:02d}", 8, switches=(f"rack-{i // 10}", f"row-{i // 100}", "core")) for i in range(1000)
    )
    subgraph = Fabric(Topology(nodes=nodes), V100_SERVER).subgraph(held("00/0-7", "999/0-7"))
    assert subgraph.edges.num_gpus == 16
    assert subgraph.edges.num_switches == 5
