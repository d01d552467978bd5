"""Nodes on a real API server: what joins and is lost, labels that are written and kept, behind an unruly proxy."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.nodes.registry import NodeTable
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.actions import LabelNode
from springtide.core.events import NodeJoined, NodeLost
from springtide.core.resources import DeviceId, NodeId

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]
RESOURCE = "springtide.test~1device"


class Nodes:
    """Node objects of one test, without kubelets: their status is what the test says."""

    def __init__(self, cluster: Cluster) -> None:
        self.api = cluster.api
        self.team = f"t-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
        self.names: list[str] = []

    def make(self, count: int, pool: str = "") -> str:
        name = f"{self.team}-{len(self.names)}"
        labels = {"team": self.team} | ({"springtide.dev/pool": pool} if pool else {})
        self.api.post(
            "api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        )
        self.names.append(name)
        resources = [
            {"op": "add", "path": f"/status/{where}", "value": {"springtide.test/device": str(count)}}
            for where in ("capacity", "allocatable")
        ]
        self.api.patch(f"api/v1/nodes/{name}/status", resources, "json")
        self.ready(name, "True")
        return name

    def ready(self, name: str, status: str) -> None:
        conditions = [{"type": "Ready", "status": status, "reason": "Test"}]
        self.api.patch(f"api/v1/nodes/{name}/status", {"status": {"conditions": conditions}}, "strategic")

    def change(self, name: str, **spec: object) -> None:
        self.api.patch(f"api/v1/nodes/{name}", {"spec": spec})

    def label(self, name: str, **labels: str | None) -> None:
        named = {f"springtide.dev/{key.replace('_', '-')}": value for key, value in labels.items()}
        self.api.patch(f"api/v1/nodes/{name}", {"metadata": {"labels": named}})

    def labels(self, name: str) -> dict[str, str]:
        return dict(self.api.get(f"api/v1/nodes/{name}")["metadata"]["labels"])

    def delete(self, name: str) -> None:
        self.api.delete(f"api/v1/nodes/{name}")


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    nodes = Nodes(cluster)
    yield nodes
    for name in nodes.names:
        nodes.delete(name)


class Book:
    """A node book and what it told."""

    def __init__(self, thread: ApiThread, nodes: Nodes, compare_every_s: float = 30.0, **settings) -> None:
        self.held: dict[str, set[DeviceId]] = {}
        self.told: list[NodeJoined | NodeLost] = []
        self.lock = threading.Lock()
        self.book = NodeTable(
            thread,
            KubernetesSettings(
                device_resource="springtide.test/device", node_selector={"team": nodes.team}, pools=True, **settings
            ),
            held=lambda node_id: self.held.get(node_id, set()),
            post=self.told.append,
            compare_every_s=compare_every_s,
        )
        thread.sync(10)

    def offered(self) -> dict[str, list[int]]:
        return {node.node_id: [device.index for device in node.devices] for node in self.book.nodes()}

    def last(self, name: str) -> object:
        """What was told last of a node: its devices, or that it is lost."""
        for event in reversed(self.told):
            if isinstance(event, NodeLost) and event.node_id == name:
                return "lost"
            if isinstance(event, NodeJoined) and event.node.node_id == name:
                return [device.index for device in event.node.devices]
        return None


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster.kubeconfig) as proxy:
        yield proxy


@pytest.fixture
def thread(proxy: ApiProxy) -> Iterator[ApiThread]:
    with ApiThread(proxy.connect) as thread:
        yield thread


def test_nothing_is_told_before_it_begins_and_only_differences_after(thread, nodes):
    first, second = nodes.make(2), nodes.make(1)
    book = Book(thread, nodes)
    assert book.offered() == {first: [0, 1], second: [0]}
    third = nodes.make(4)
    nodes.delete(second)
    time.sleep(0.5)
    assert book.told == []
    book.book.begin()
    wait_for("the differences", lambda: book.last(third) == [0, 1, 2, 3] and book.last(second) == "lost", 10)
    assert book.last(first) is None


def test_cordon_silence_and_return(thread, nodes):
    name = nodes.make(2)
    book = Book(thread, nodes, node_lost_after_s=1.0)
    book.offered()
    book.book.begin()
    book.held = {name: {DeviceId(f"{name}/1")}}
    nodes.change(name, unschedulable=True)
    wait_for("the cordon", lambda: book.last(name) == [1], 10)
    book.held = {}
    book.book.compare_soon()
    wait_for("that it is lost", lambda: book.last(name) == "lost", 10)
    nodes.change(name, unschedulable=None)
    wait_for("its return", lambda: book.last(name) == [0, 1], 10)
    book.held = {name: {DeviceId(f"{name}/0")}}
    nodes.ready(name, "Unknown")
    wait_for("that it is silent", lambda: book.last(name) == [0], 10)
    found = book.book.find(DeviceId(f"{name}/1"))
    assert found is not None
    assert found[1].index == 1
    nodes.ready(name, "True")
    wait_for("its voice", lambda: book.last(name) == [0, 1], 10)


def test_a_label_is_written_with_who_owns_the_node_and_kept(thread, proxy, nodes):
    name = nodes.make(1, pool="inference")
    book = Book(thread, nodes)
    book.offered()
    book.book.begin()
    # The first attempts meet a server that is not well, then a lost answer.
    proxy.answer(lambda request: request.method == "PATCH", 503, times=2, reason="ServiceUnavailable")
    proxy.lose_answer(lambda request: request.method == "PATCH", times=1)
    book.book.label(LabelNode(node_id=NodeId(name), pool="training"))
    wait_for("the label", lambda: nodes.labels(name)["springtide.dev/pool"] == "training", 20)
    assert nodes.labels(name)["springtide.dev/home-pool"] == "inference"
    # Who decided it is not told of it.
    assert book.told == []
    (offered,) = book.book.nodes()
    assert (offered.pool, offered.owner) == ("training", "inference")
    nodes.label(name, pool="shared")
    wait_for("the label again", lambda: nodes.labels(name)["springtide.dev/pool"] == "training", 20)
    # Back home; the owner's label stays.
    book.book.label(LabelNode(node_id=NodeId(name), pool="inference"))
    wait_for("the label of before", lambda: nodes.labels(name)["springtide.dev/pool"] == "inference", 20)
    assert nodes.labels(name)["springtide.dev/home-pool"] == "inference"


def test_a_label_that_the_journal_has_and_the_object_has_not(thread, nodes):
    """The control plane died between the journal's LabelNode and its write."""
    name = nodes.make(1, pool="inference")
    book = Book(thread, nodes)
    book.offered()
    book.book.begin({NodeId(name): "training"})
    wait_for("the label", lambda: nodes.labels(name)["springtide.dev/pool"] == "training", 10)
    assert nodes.labels(name)["springtide.dev/home-pool"] == "inference"


def test_a_label_for_a_node_that_is_gone_is_written_when_it_is_back(thread, nodes):
    name = nodes.make(1, pool="inference")
    book = Book(thread, nodes)
    book.offered()
    book.book.begin()
    nodes.delete(name)
    wait_for("that it is lost", lambda: book.last(name) == "lost", 10)
    book.book.label(LabelNode(node_id=NodeId(name), pool="training"))
    wait_for("the end of writes", lambda: thread.num_pending == 0, 10)
    assert nodes.make(1, pool="inference") != name
    nodes.names.remove(name)
    nodes.api.post(
        "api/v1/nodes",
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"team": nodes.team, "springtide.dev/pool": "inference"}},
        },
    )
    nodes.names.append(name)
    resources = [{"op": "add", "path": "/status/allocatable", "value": {"springtide.test/device": "1"}}]
    nodes.api.patch(f"api/v1/nodes/{name}/status", resources, "json")
    wait_for("the label", lambda: nodes.labels(name)["springtide.dev/pool"] == "training", 20)


def test_a_lost_notification_of_a_cordon_costs_time_not_truth(thread, proxy, nodes):
    name = nodes.make(2)
    book = Book(thread, nodes, compare_every_s=0.5)
    book.offered()
    book.book.begin()
    proxy.rules.lost_events.append(lambda request, kind, obj: request.is_of("nodes") and kind == "MODIFIED")
    nodes.change(name, unschedulable=True)
    wait_for("what nobody told of", lambda: book.last(name) == "lost", 20)
    assert proxy.num_lost_events >= 1
