from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.workloads.cluster import cluster_nodes, parse_cluster, read_cluster

HEADER = "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n"


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


def test_a_specification_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "n64g8.csv"
    path.write_text(HEADER + "2,32,8,64,256")
    shape = read_cluster(path)
    assert (shape.num_nodes, shape.devices_per_node, shape.cpus_per_node) == (64, 8, 64)
    assert shape.memory_per_node_gb == 256.0


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("", "n.csv line 2: no row below the header"),
        ("1,2,3,4,5\n1,2,3,4,5\n", "n.csv line 3: a second row"),
        ("0,2,3,4,5\n", "n.csv line 2, column num_switch: '0' must be"),
        ("1,2,nan,4,5\n", "n.csv line 2, column num_gpu_p_node: 'nan' must be"),
        ("1000,1000,8,4,5\n", "n.csv line 2, column num_switch: over 100,000 devices in all"),
    ],
)
def test_bad_specifications_are_refused(tmp_path: Path, rows: str, sentence: str) -> None:
    path = tmp_path / "n.csv"
    path.write_text(HEADER + rows)
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        read_cluster(path)


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
