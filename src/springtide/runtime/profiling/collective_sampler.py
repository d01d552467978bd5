"""Measuring collectives: real all-reduces by processes of this machine, over worker counts, placements and sizes.

This is the parent's side, without torch: it chooses the placements, starts the processes and collects their samples.
"""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
from collections.abc import Callable, Sequence

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.resources import Device, DeviceId, Node, NodeId
from springtide.perf.communication.fabric import SERVERS, Links
from springtide.perf.communication.query import CommunicationSample, SampleFile
from springtide.runtime.process.child_processes import MeasurementProcesses
from springtide.runtime.profiling.namespaces import NamespaceNetwork, RackNetwork, ended_by_signals

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
DEADLINE_S = 3600.0
_MAX_PLACEMENTS_OF_SIZE = 12
# Stands for no limit, as of the spine of a network without racks.
_UNLIMITED_BYTES_PER_S = 1e12


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one member is to do: its rank and address, and the groups of ranks and sizes to measure."""

    rank: int
    num_workers: int
    address: str
    groups: list[list[int]]
    sizes_bytes: list[int]
    is_gpu: bool
    name: str
    directory: str


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one group's all-reduce of one size; each repeat is that of the slowest member."""

    group: list[int]
    num_bytes: int
    repeats_s: list[float]
    duration_s: float


def count_gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def local_groups(num_workers: int, *, is_gpu: bool) -> list[list[int]]:
    """Groups to measure on one machine: one of each size for CPUs, which are alike; up to twelve of each for GPUs."""
    if not is_gpu:
        return [list(range(count)) for count in range(2, num_workers + 1)]
    groups = []
    for count in range(2, num_workers + 1):
        every = list(itertools.combinations(range(num_workers), count))
        stride = max(1, len(every) // _MAX_PLACEMENTS_OF_SIZE)
        groups += [list(group) for group in every[::stride][:_MAX_PLACEMENTS_OF_SIZE]]
    return groups


def rack_groups(network: RackNetwork, num_slots: int) -> list[list[int]]:
    """One group for each way to spread workers over nodes and racks, up to a reordering of nodes or racks.

    Ranks are numbered node by node, with `num_slots` on each.
    """
    first_node = [sum(network.racks[:rack]) for rack in range(len(network.racks))]
    seen, groups = set(), []
    for counts in itertools.product(range(num_slots + 1), repeat=network.num_nodes):
        racks = [
            tuple(sorted((count for count in counts[first : first + size] if count), reverse=True))
            for first, size in zip(first_node, network.racks, strict=True)
        ]
        shape = tuple(sorted(filter(None, racks), reverse=True))
        if sum(counts) < 2 or shape in seen:
            continue
        seen.add(shape)
        groups.append([node * num_slots + slot for node, count in enumerate(counts) for slot in range(count)])
    return sorted(groups, key=lambda group: (len(group), group))


def server_links(name: str, device_type: str, local: float, nic: float, uplink: float) -> Links:
    """A server whose devices reach each other at the rate `local`; all rates in bytes per second."""
    return Links(
        name=name,
        device_type=device_type,
        pcie_bytes_per_s=local,
        host_bytes_per_s=local,
        nic_bytes_per_s=nic,
        uplink_bytes_per_s=uplink,
        num_cpu_cores=os.cpu_count() or 1,
    )


def sample_here(
    num_workers: int,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    deadline_s: float = DEADLINE_S,
    on_progress: Callable[[str], None] = lambda _: None,
) -> SampleFile:
    """Measure on this machine: with NCCL if it has `num_workers` GPUs, else with gloo over loopback.

    Raises InvalidRequest, BackendError.
    """
    _check(num_workers, sizes_bytes)
    is_gpu = count_gpus() >= num_workers
    measured = _run_members(
        local_groups(num_workers, is_gpu=is_gpu),
        sizes_bytes,
        [("127.0.0.1", [])] * num_workers,
        is_gpu=is_gpu,
        deadline_s=deadline_s,
        on_progress=on_progress,
    )
    node = _node("local", num_workers, (), "gpu" if is_gpu else "cpu")
    links = _own_links(measured, is_gpu=is_gpu)
    backend = "nccl" if is_gpu else "gloo over loopback"
    return _as_file(measured, (node,), links, f"all-reduces of {backend} on {_machine()}")


def sample_namespaces(
    network: RackNetwork,
    num_slots: int = 2,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    deadline_s: float = DEADLINE_S,
    on_progress: Callable[[str], None] = lambda _: None,
) -> SampleFile:
    """Measure in network namespaces with `num_slots` workers on each node; the namespaces are removed afterwards.

    Workers of one node communicate over its loopback, others over rate-limited links. Raises InvalidRequest,
    BackendError.
    """
    _check(network.num_nodes * num_slots, sizes_bytes)
    with ended_by_signals(), NamespaceNetwork(network) as made:
        places = [
            (made.address(node), made.prefix(node)) for node in range(network.num_nodes) for _ in range(num_slots)
        ]
        groups = rack_groups(network, num_slots)
        measured = _run_members(
            groups, sizes_bytes, places, is_gpu=False, deadline_s=deadline_s, on_progress=on_progress
        )
    nodes = tuple(
        _node(f"node-{node}", num_slots, (f"rack-{network.rack_of(node)}", "spine"), "cpu")
        for node in range(network.num_nodes)
    )
    inside = [entry for entry in measured if len({rank // num_slots for rank in entry.group}) == 1]
    local = _fastest(inside) or network.nic_bytes_per_s
    links = server_links("namespace", "cpu", local, network.nic_bytes_per_s, network.uplink_bytes_per_s)
    rates = f"{network.nic_bytes_per_s / 1e6:g} MB/s to a rack, {network.uplink_bytes_per_s / 1e6:g} MB/s to the spine"
    source = f"all-reduces of gloo over network namespaces ({rates}) on {_machine()}"
    return _as_file(measured, nodes, links, source)


def _check(num_workers: int, sizes_bytes: Sequence[int]) -> None:
    if num_workers < 2:
        raise InvalidRequest("an all-reduce takes at least two workers; give --workers 2")
    if not sizes_bytes or any(size < 4 for size in sizes_bytes):
        raise InvalidRequest("sizes are bytes, at least 4 (one number); give for example --sizes 1K,1M")


def _run_members(
    groups: list[list[int]],
    sizes_bytes: Sequence[int],
    places: Sequence[tuple[str, list[str]]],
    *,
    is_gpu: bool,
    deadline_s: float,
    on_progress: Callable[[str], None],
) -> list[CollectiveTimes]:
    with MeasurementProcesses(deadline_s=deadline_s, on_progress=on_progress) as processes:
        for rank, (address, prefix) in enumerate(places):
            name = f"worker-{rank}"
            spec = SampleSpec(
                rank=rank,
                num_workers=len(places),
                address=address,
                groups=groups,
                sizes_bytes=list(sizes_bytes),
                is_gpu=is_gpu,
                name=name,
                directory=str(processes.directory),
            )
            path = processes.directory / f"{name}.spec.json"
            path.write_bytes(msgspec.json.encode(spec))
            processes.start(name, ["sample-communication", "--spec", str(path)], prefix=prefix)
        processes.wait()
        results = [processes.files(f"worker-{rank}").result.read_bytes() for rank in range(len(places))]
    # The first member of a group reports the group's times.
    measured = [entry for result in results for entry in decode_json(result, list[CollectiveTimes])]
    return sorted(measured, key=lambda entry: (len(entry.group), entry.group, entry.num_bytes))


def _as_file(measured: Sequence[CollectiveTimes], nodes: tuple[Node, ...], links: Links, source: str) -> SampleFile:
    device_ids = [device.device_id for node in nodes for device in node.devices]
    return SampleFile(
        source=source,
        nodes=nodes,
        links=(links,),
        samples=tuple(
            CommunicationSample(
                device_ids=tuple(device_ids[rank] for rank in entry.group),
                num_bytes=entry.num_bytes,
                duration_s=entry.duration_s,
            )
            for entry in measured
        ),
    )


def _own_links(measured: Sequence[CollectiveTimes], *, is_gpu: bool) -> Links:
    """The links of a known kind of server, else links estimated from the fastest exchange of two members."""
    local = _fastest(measured) or _UNLIMITED_BYTES_PER_S
    if is_gpu:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        known = [links for links in SERVERS.values() if links.device_type in listed]
        if known:
            return known[0]
    return server_links("local", "gpu" if is_gpu else "cpu", local, _UNLIMITED_BYTES_PER_S, _UNLIMITED_BYTES_PER_S)


def _fastest(measured: Sequence[CollectiveTimes]) -> float:
    """The highest rate of an exchange between two members in bytes per second; 0.0 if there was none."""
    return max((entry.num_bytes / entry.duration_s for entry in measured if len(entry.group) == 2), default=0.0)


def _node(name: str, num_devices: int, switches: tuple[str, ...], kind: str) -> Node:
    node_id = NodeId(name)
    devices = tuple(
        Device(
            device_id=DeviceId(f"{name}/{index}"),
            node_id=node_id,
            index=index,
            kind="gpu" if kind == "gpu" else "cpu",
        )
        for index in range(num_devices)
    )
    return Node(node_id=node_id, devices=devices, switches=switches)


def _machine() -> str:
    return f"{os.cpu_count()} {platform.machine()} cores"
