"""Real all-reduces: which groups are measured, and what holds of the times over processes and network namespaces."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from springtide.core.errors import InvalidRequest
from springtide.perf.communication.query import read_samples, write_samples
from springtide.runtime.profiling import namespaces
from springtide.runtime.profiling.collective_sampler import (
    CollectiveTimes,
    _as_file,
    _fastest,
    _node,
    local_groups,
    rack_groups,
    sample_here,
    sample_namespaces,
    server_links,
)
from springtide.runtime.profiling.collective_worker import num_repeats
from springtide.runtime.profiling.namespaces import NamespaceNetwork, RackNetwork, list_namespaces, why_not_here

SMALL, LARGE = 1 << 10, 1 << 20


def spread(group: list[int], num_slots: int, network: RackNetwork) -> tuple[tuple[int, ...], ...]:
    counts = [sum(rank // num_slots == node for rank in group) for node in range(network.num_nodes)]
    racks = [[counts[node] for node in range(network.num_nodes) if network.rack_of(node) == rack] for rack in (0, 1)]
    return tuple(sorted(tuple(sorted(rack)) for rack in racks))


def test_every_way_to_spread_workers_is_measured_once():
    network = RackNetwork()
    groups = rack_groups(network, 2)
    spreads = [spread(group, 2, network) for group in groups]
    assert len(groups) == len(set(spreads)) == 19
    assert {len(group) for group in groups} == set(range(2, 9))
    assert all(group == sorted(set(group)) for group in groups)
    # In racks of different sizes, what fits into several of them is one way.
    assert rack_groups(RackNetwork(racks=(2, 1)), 1) == [[0, 1], [1, 2], [0, 1, 2]]
    assert [network.rack_of(node) for node in range(4)] == [0, 0, 1, 1]


def test_groups_on_one_machine():
    assert local_groups(4, is_gpu=False) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    pairs = [group for group in local_groups(4, is_gpu=True) if len(group) == 2]
    assert len(pairs) == 6, "which two GPUs matters"
    assert all(len([g for g in local_groups(8, is_gpu=True) if len(g) == count]) <= 12 for count in range(2, 9))


def test_slow_exchanges_are_repeated_less_often():
    assert num_repeats(0.0) == num_repeats(0.001) == 15
    assert num_repeats(0.2) == 5
    assert num_repeats(10.0) == 3


def test_samples_name_the_devices_of_their_group(tmp_path):
    measured = [CollectiveTimes(group=[0, 3], num_bytes=SMALL, repeats_s=[0.1, 0.2, 0.4], duration_s=0.2)]
    nodes = tuple(_node(f"node-{place}", 2, (f"rack-{place}", "spine"), "cpu") for place in range(2))
    samples = _as_file(measured, nodes, server_links("here", "cpu", 1e9, 1e8, 1e7), "a test")
    write_samples(tmp_path / "samples.json", samples)
    assert read_samples(tmp_path / "samples.json") == samples
    (sample,) = samples.samples
    assert sample.device_ids == ("node-0/0", "node-1/1")
    (query,), durations_s = samples.queries()
    assert query.subgraph.num_servers == 2
    assert durations_s.tolist() == [0.2]
    assert _fastest(measured) == pytest.approx(SMALL / 0.2)
    assert _fastest([]) == 0.0


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(InvalidRequest, match="at least two workers"):
        sample_here(1)
    with pytest.raises(InvalidRequest, match="sizes are bytes"):
        sample_here(2, [2])


def test_without_the_means_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert why_not_here() == "network namespaces need root, so links of different rates are left out"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    assert "install iproute2" in why_not_here()


@pytest.mark.slow
def test_all_reduces_over_loopback():
    told: list[str] = []
    samples = sample_here(3, [SMALL, LARGE], on_progress=told.append)
    times = {(len(sample.device_ids), sample.num_bytes): sample.duration_s for sample in samples.samples}
    assert set(times) == {(2, SMALL), (2, LARGE), (3, SMALL), (3, LARGE)}
    assert all(took_s > 0 for took_s in times.values())
    assert samples.queries()[1].tolist() == [sample.duration_s for sample in samples.samples]
    assert told


@pytest.fixture
def needs_namespaces():
    if reason := why_not_here():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_namespaces")
def test_slower_links_make_slower_exchanges_and_nothing_stays():
    network = RackNetwork(nic_bytes_per_s=20e6, uplink_bytes_per_s=5e6)
    samples = sample_namespaces(network, 1, [4 * LARGE])
    assert not [name for name in list_namespaces() if f"-{os.getpid()}-" in name]
    pairs = {sample.device_ids: sample.duration_s for sample in samples.samples if len(sample.device_ids) == 2}
    racks = {node.node_id: node.switches[0] for node in samples.nodes}
    by_racks = {len({racks[name.partition("/")[0]] for name in ids}): took_s for ids, took_s in pairs.items()}
    # 4 MiB go each way: the rates alone make it 0.2 s within a rack and 0.8 s between two.
    assert by_racks[1] > 0.15
    assert by_racks[2] > 2 * by_racks[1]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_namespaces")
def test_the_network_is_removed_whatever_happens():
    stack = contextlib.ExitStack()
    stack.enter_context(NamespaceNetwork(RackNetwork(racks=(1, 1))))
    assert len([name for name in list_namespaces() if f"-{os.getpid()}-" in name]) == 5
    stack.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not [name for name in list_namespaces() if f"-{os.getpid()}-" in name]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_network_is_removed_when_the_measurement_is_ended(number):
    program = (
        "from springtide.runtime.profiling.collective_sampler import *;"
        "from springtide.runtime.profiling.namespaces import *;"
        "sample_namespaces(RackNetwork(), 1, [1 << 22] * 50, on_progress=lambda text: print(text, flush=True))"
    )
    process = subprocess.Popen(
        # Whoever runs the tests in the background has them ignore Ctrl-C, and children inherit that. Not by a function
        # before the child's program: that forks a process in which JAX may have started threads.
        ["env", "--default-signal=INT", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline(), "it has begun to measure"
    left = [name for name in list_namespaces() if f"-{process.pid}-" in name]
    assert len(left) == 7
    process.send_signal(number)
    process.wait(timeout=60)
    process.stdout.close()
    if number == signal.SIGKILL:
        # Nobody could clean up: the next network does. Members look for their parent themselves.
        with NamespaceNetwork(RackNetwork(racks=(1,))):
            pass
    assert not [name for name in list_namespaces() if f"-{process.pid}-" in name]
    end_s = time.monotonic() + 30
    while _members_of(process.pid) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert _members_of(process.pid) == []


def _members_of(pid: int) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if f"SPRINGTIDE_MEASUREMENT_PARENT={pid}".encode() in file.read().split(b"\0"):
                    found.append(entry)
        except OSError:
            continue
    return found
