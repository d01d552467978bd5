from __future__ import annotations

import re
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.cluster_specs import read_cluster

ELASTICFLOW = Path(__file__).parents[4] / "shared" / "data" / "elasticflow"
HEADER = "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n"


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


@pytest.mark.skipif(not ELASTICFLOW.is_dir(), reason="the published traces are not here")
def test_every_specification_says_what_its_name_says() -> None:
    for path in sorted((ELASTICFLOW / "cluster_specs").glob("n*.csv")):
        shape = read_cluster(path)
        nodes, _, devices = path.stem.removeprefix("n").partition("g")
        if path.stem == "n1g2":
            # This one has its two GPUs on two nodes.
            continue
        assert (shape.num_nodes, shape.devices_per_node) == (int(nodes), int(devices)), path.name
