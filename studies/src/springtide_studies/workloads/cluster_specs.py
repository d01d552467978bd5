"""The specification files of ElasticFlow's traces: the shape of a cluster in one row."""

from __future__ import annotations

from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.workloads.rows import read_rows
from springtide.workloads.trace import MAX_DEVICES

_COLUMNS = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node")


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """So many alike nodes under so many alike switches. Memory in GB, as the specification files give it."""

    num_switches: int
    nodes_per_switch: int
    devices_per_node: int
    cpus_per_node: int
    memory_per_node_gb: float

    @property
    def num_nodes(self) -> int:
        return self.num_switches * self.nodes_per_switch


def read_cluster(path: Path | str) -> ClusterShape:
    """Read a specification of one row: num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node.

    Raises InvalidRequest naming line and column.
    """
    place = Path(path)
    shape: ClusterShape | None = None
    for row in read_rows(place, _COLUMNS):
        if shape is not None:
            raise InvalidRequest(f"{place.name} line {row.line}: a second row; a cluster is one row below the header")
        shape = ClusterShape(
            num_switches=row.devices("num_switch"),
            nodes_per_switch=row.devices("num_node_p_switch"),
            devices_per_node=row.devices("num_gpu_p_node"),
            cpus_per_node=row.count("num_cpu_p_node"),
            memory_per_node_gb=row.number("mem_p_node"),
        )
        if shape.num_nodes * shape.devices_per_node > MAX_DEVICES:
            row.refuse("num_switch", f"over {MAX_DEVICES:,} devices in all; give a smaller cluster")
    if shape is None:
        raise InvalidRequest(f"{place.name} line 2: no row below the header; a cluster is one row")
    return shape
