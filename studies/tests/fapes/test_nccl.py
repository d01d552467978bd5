"""The analytic NCCL: regimes, sharing of links, and noise."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from springtide.core.resources import DeviceId, Topology, make_node
from springtide.perf.communication.fabric import T4_SERVER, V100_SERVER, Fabric, Links, Subgraph
from springtide.perf.communication.query import Query
from springtide_studies.fapes.nccl import LL, LL128, RING, SIMPLE, TREE, Nccl, _two_trees


def cluster(links: Links = V100_SERVER, devices: int = 8) -> Fabric:
    nodes = tuple(make_node(f"n{i}", devices, switches=(f"leaf-{i // 4}", "core")) for i in range(16))
    return Fabric(Topology(nodes=nodes), links)


def on(fabric: Fabric, **slots: range | tuple[int, ...]) -> Subgraph:
    return fabric.subgraph([DeviceId(f"{node}/{slot}") for node, chosen in slots.items() for slot in chosen])


def bus_gb_per_s(nccl: Nccl, subgraph: Subgraph, num_bytes: int = 1 << 30) -> float:
    num = subgraph.num_devices
    return num_bytes / nccl.time_s(Query(subgraph, num_bytes)) / 1e9 * 2 * (num - 1) / num


def test_a_single_device_has_nothing_to_exchange() -> None:
    assert Nccl().time_s(Query(on(cluster(), n0=(0,)), 1 << 20)) == 0.0


def test_large_tensors_run_at_the_speed_of_the_links() -> None:
    nccl, fabric = Nccl(), cluster()
    # Two NVLinks of 20 GB/s join devices 0 and 3; 0 and 5 meet through the sockets only.
    assert bus_gb_per_s(nccl, on(fabric, n0=(0, 3))) == pytest.approx(40.0, rel=0.01)
    assert bus_gb_per_s(nccl, on(fabric, n0=(0, 5))) == pytest.approx(0.45 * 20.8, rel=0.01)
    assert 80.0 < bus_gb_per_s(nccl, on(fabric, n0=range(8))) < 130.0
    # Between servers PCIe to the card is the narrowest place, if a device sits next to it.
    assert bus_gb_per_s(nccl, on(fabric, n0=range(8), n1=range(8))) == pytest.approx(12.0, rel=0.01)
    assert bus_gb_per_s(nccl, on(fabric, n0=(6, 7), n1=(6, 7))) == pytest.approx(0.45 * 20.8, rel=0.01)


def test_every_pair_of_a_mesh_has_a_way() -> None:
    nccl, fabric = Nccl(), cluster()
    speeds = {pair: round(bus_gb_per_s(nccl, on(fabric, n0=pair)), 1) for pair in combinations(range(8), 2)}
    assert sorted(set(speeds.values())) == pytest.approx([9.4, 20.0, 40.0], rel=0.02)
    assert all((speed > 10) == bool(V100_SERVER.nvlinks[a][b]) for (a, b), speed in speeds.items())


def test_protocols_and_algorithms_change_with_size_and_group() -> None:
    nccl, fabric = Nccl(), cluster()
    eight = on(fabric, n0=range(8))
    assert [nccl.choice(Query(eight, size))[1] for size in (1 << 10, 1 << 20, 1 << 30)] == [LL, LL128, SIMPLE]
    many = on(fabric, **{f"n{i}": range(8) for i in range(16)})
    assert nccl.choice(Query(many, 1 << 12))[0] == TREE
    assert nccl.choice(Query(many, 1 << 30)) == (RING, SIMPLE)
    # Without NVLink there is no LL128.
    small = on(cluster(T4_SERVER, 4), n0=range(4), n1=range(4))
    assert all(nccl.choice(Query(small, 1 << power))[1] != LL128 for power in range(10, 31))


def test_time_grows_with_size_but_for_changes_of_protocol() -> None:
    """NCCL's own choice may be a poor one near a change; elsewhere more bytes never take less time."""
    nccl, fabric = Nccl(), cluster()
    for subgraph in (on(fabric, n0=range(8)), on(fabric, n0=range(4), n4=range(4), n8=(0, 5))):
        sizes = [round(1024 * 1.05**step) for step in range(280)]
        times = [nccl.time_s(Query(subgraph, size)) for size in sizes]
        choices = [nccl.choice(Query(subgraph, size)) for size in sizes]
        assert len(set(choices)) >= 3
        for index in range(1, len(sizes)):
            if choices[index] == choices[index - 1] and choices[index][0] == RING:
                assert times[index] >= times[index - 1] * 0.55, "opening a channel at most doubles the speed"
        assert times[-1] > 1000 * times[0]


def test_narrow_uplinks_are_felt_between_switches_only() -> None:
    narrow = Links(
        name="narrow",
        device_type="T4",
        pcie_bytes_per_s=8e9,
        host_bytes_per_s=20.8e9,
        nic_bytes_per_s=6.25e9,
        uplink_bytes_per_s=3e9,
    )
    nccl, fabric = Nccl(), cluster(narrow, 4)
    beside, apart = on(fabric, n0=(0,), n1=(0,)), on(fabric, n0=(0,), n4=(0,))
    assert bus_gb_per_s(nccl, apart) < 0.6 * bus_gb_per_s(nccl, beside)


def test_element_types_matter_where_the_links_do_not() -> None:
    nccl, fabric = Nccl(), cluster()
    fast, slow = on(fabric, n0=(0, 3)), on(fabric, n0=range(4), n1=range(4))
    times = [nccl.time_s(Query(fast, 1 << 28, dtype)) for dtype in ("float32", "float16", "int8")]
    assert times[0] < times[1] < times[2]
    assert nccl.time_s(Query(slow, 1 << 28, "int8")) == pytest.approx(nccl.time_s(Query(slow, 1 << 28)), rel=1e-6)


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 11, 16])
def test_both_trees_span_all_servers_and_their_leaves_differ(num: int) -> None:
    inner = []
    for parents in _two_trees(num):
        assert sum(parent < 0 for parent in parents) == 1
        for server in range(num):
            at, steps = server, 0
            while parents[at] >= 0:
                at, steps = parents[at], steps + 1
                assert steps <= num
        children = [parents.count(server) for server in range(num)]
        assert max(children) <= 2
        inner.append({server for server in range(num) if children[server] == 2})
    assert not inner[0] & inner[1] or num < 3


def test_noise_is_seeded_and_spares_the_median() -> None:
    nccl = Nccl()
    query = Query(on(cluster(), n0=range(8), n5=range(8)), 1 << 24)
    first = [nccl.measure_s(query, np.random.default_rng(7)) for _ in range(2)]
    assert first[0] == first[1]
    rng = np.random.default_rng(0)
    drawn = np.array([nccl.measure_s(query, rng) for _ in range(2000)]) / nccl.time_s(query)
    assert np.median(drawn) == pytest.approx(1.0, abs=0.01)
    assert np.quantile(drawn, 0.995) > 1.3, "others' traffic is felt between servers"
