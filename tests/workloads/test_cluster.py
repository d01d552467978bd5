from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.core.resources import Topology
from springtide.workloads.cluster import cluster_nodes, parse_cluster


@given(nodes=st.integers(1, 1_000), devices=st.integers(1, 100))
def test_a_cluster_is_written_as_nodes_by_devices(nodes: int, devices: int) -> None:
    assert parse_cluster(f"{nodes}x{devices}") == (nodes, devices)
    assert parse_cluster(f" {nodes}X{devices} ") == (nodes, devices)


@pytest.mark.parametrize("text", ["", "8", "x8", "8x", "0x8", "8x0", "-1x8", "4x8x2", "4 x 8", "²x8", "1e3x8", "٣x8"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write it like 16x8"):
        parse_cluster(text)


@pytest.mark.parametrize("text", ["100001x1", "99999x99999", "9" * 5_000 + "x1"])
def test_a_cluster_beyond_all_bounds_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="16x8"):
        parse_cluster(text)


def test_switches_are_named_from_the_nearest_up():
    nodes = cluster_nodes("16x8@6+6+4")
    assert [node.switches[0] for node in nodes].count("switch-0") == 6
    assert {node.switches[1] for node in nodes} == {"core"}
    assert len(nodes[15].devices) == 8
    assert nodes[15].switches[0] == "switch-2"
    assert parse_cluster("16x8@6+6+4") == (16, 8)
    assert all(node.switches == () for node in cluster_nodes("4x2"))


def test_a_tree_of_switches_nests():
    nodes = cluster_nodes("1000x1@10x10x10")
    assert nodes[0].switches == ("switch-0-0", "switch-1-0", "switch-2-0")
    assert nodes[999].switches == ("switch-0-99", "switch-1-9", "switch-2-0")
    assert len({node.switches[0] for node in cluster_nodes("800x1@10x10x10")}) == 80


@pytest.mark.parametrize("text", ["16x8@6+6", "16x8@", "16x8@a+b", "1000x8@10x10", "16x8@0+16"])
def test_switches_that_do_not_fit_are_refused(text):
    with pytest.raises(InvalidRequest, match="switches"):
        cluster_nodes(text)


def test_a_cluster_of_several_models_names_them_and_numbers_its_nodes_on():
    nodes = cluster_nodes("2x4:NVIDIA-V100,1x8:T4")
    assert [(node.node_id, len(node.devices)) for node in nodes] == [("node-000", 4), ("node-001", 4), ("node-002", 8)]
    assert [node.devices[0].accelerator for node in nodes] == ["NVIDIA-V100", "NVIDIA-V100", "T4"]
    assert Topology(nodes=tuple(nodes)).accelerators == ("NVIDIA-V100", "T4")


@pytest.mark.parametrize("text", ["2x4,2x4:T4", "2x4:", "2x4:T4@1+1", "90000x9:A,90000x9:B"])
def test_a_part_without_its_model_or_with_switches_is_refused(text):
    with pytest.raises(InvalidRequest, match=r"8x4:V100|give a smaller"):
        cluster_nodes(text)
