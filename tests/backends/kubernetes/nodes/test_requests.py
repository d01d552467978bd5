"""What pods request of nodes, counted as kubelets count it."""

from __future__ import annotations

from typing import Any

import pytest

from springtide.backends.kubernetes.client.cache import ObjectChange
from springtide.backends.kubernetes.client.kinds import POD, key_of
from springtide.backends.kubernetes.nodes.requests import OtherPods, pod_request, room_of
from springtide.backends.kubernetes.settings import (
    PLATFORM_LABEL,
    REPLICA_LABEL,
    KubernetesSettings,
    PodSettings,
)
from springtide.core.resources import HostResources, NodeRoom, make_node

MIB = 1 << 20


def asks(cpu: str = "", memory: str = "", *, which: str = "requests", **more: Any) -> dict[str, Any]:
    named = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value}
    return {"name": "c", "resources": {which: named}, **more}


@pytest.mark.parametrize(
    ("spec", "cpu_m", "memory_mib"),
    [
        ({"containers": [{"name": "c"}]}, 0, 0),
        ({"containers": [asks("1500m", "64Mi"), asks("1", "1Gi")]}, 2500, 1088),
        ({"containers": [asks("2", "64Mi", which="limits")]}, 2000, 64),
        ({"containers": [asks("1")], "initContainers": [asks("3", "8Mi"), asks("500m")]}, 3000, 8),
        ({"containers": [asks("1")], "initContainers": [asks("500m", restartPolicy="Always"), asks("2")]}, 2500, 0),
        ({"containers": [asks("1")], "overhead": {"cpu": "250m", "memory": "120Mi"}}, 1250, 120),
        ({"containers": [asks("1")], "resources": {"requests": {"cpu": "3"}}}, 3000, 0),
        ({"containers": [asks("a lot")]}, 0, 0),
        ({"containers": [asks("9999999999999E")]}, 10**15, 0),
    ],
)
def test_what_a_pod_requests(spec: dict[str, Any], cpu_m: int, memory_mib: int) -> None:
    assert pod_request(spec) == HostResources(cpu_m=cpu_m, memory_bytes=memory_mib * MIB, num_pods=1)


def test_the_room_of_a_node_and_what_a_replica_takes_of_it_by_the_settings() -> None:
    sidecar = {"name": "proxy", "resources": {"requests": {"cpu": "100m"}}}
    pod = PodSettings(cpu="2", memory="64Mi", overlay={"containers": [sidecar]})
    obj = {"status": {"allocatable": {"cpu": "15900m", "memory": "1024Mi", "pods": "110"}}}
    assert room_of(obj, KubernetesSettings(pod=pod)) == NodeRoom(
        total=HostResources(cpu_m=15900, memory_bytes=1024 * MIB, num_pods=110),
        replica=HostResources(cpu_m=2100, memory_bytes=64 * MIB, num_pods=1),
        beside=HostResources(cpu_m=100, num_pods=1),
    )
    gpus = room_of({"status": {"allocatable": {"cpu": "4", "nvidia.com/gpu": "8"}}}, KubernetesSettings())
    assert (gpus.total.num_devices, gpus.replica.num_devices, gpus.beside.num_devices) == (8, 1, 0)
    untold = room_of({"status": {"allocatable": {"cpu": "4"}}}, KubernetesSettings())
    assert (untold.total.cpu_m, untold.total.memory_bytes, untold.total.num_pods) == (4000, 10**15, 10**15)


def pod(name: str, cpu: str, *, node: str = "n", gpus: int = 0, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "x", "uid": name, "resourceVersion": "1", "labels": labels}
    asked = asks(cpu)
    asked["resources"]["limits"] = {"nvidia.com/gpu": gpus} if gpus else {}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [asked]}}


def test_the_pods_of_others_are_counted_and_the_platform_s_replicas_are_not() -> None:
    others = OtherPods(KubernetesSettings(name="mine"))

    def note(before: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
        then, after = (None if each is None else others.trim(each) for each in (before, now))
        others.note(ObjectChange(POD, key_of(before or now or {}), then, after))

    room = NodeRoom(total=HostResources(cpu_m=4000, num_pods=10))
    node = make_node("n", 1)
    assert others.beside(node) is node
    node = type(node)(node_id=node.node_id, devices=node.devices, room=room)
    assert others.beside(node) is node
    replica = {PLATFORM_LABEL: "mine", REPLICA_LABEL: "a.0"}
    for each in (
        pod("web", "500m"),
        pod("ours", "1", **replica),
        pod("control", "250m", **{PLATFORM_LABEL: "mine"}),
        pod("theirs", "2", gpus=1, **{**replica, PLATFORM_LABEL: "yours"}),
        pod("notebook", "0", gpus=2),
        pod("mine", "0", gpus=4, **replica),
        pod("far", "1", node="m"),
    ):
        note(None, each)
    found = others.beside(node)
    assert found.room == NodeRoom(total=room.total, others=HostResources(cpu_m=2750, num_pods=4, num_devices=3))
    assert others.beside(node) is found, "the same object, so that nothing is reported anew"
    note(pod("theirs", "2", gpus=1, **{**replica, PLATFORM_LABEL: "yours"}), None)
    note(pod("notebook", "0", gpus=2), None)
    note(pod("web", "500m"), pod("web", "750m"))
    assert others.beside(node).room == NodeRoom(total=room.total, others=HostResources(cpu_m=1000, num_pods=2))
