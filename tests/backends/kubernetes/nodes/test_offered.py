"""Node objects as nodes of the platform: devices, pools, switches, groups of links; what is told when they change."""

from __future__ import annotations

import copy

import pytest

from springtide.backends.kubernetes.nodes.offered import NodeLedger, facts_of, node_of
from springtide.backends.kubernetes.settings import KubernetesSettings, PodSettings
from springtide.core.events import NodeJoined, NodeLost
from springtide.core.resources import NodeId

SETTINGS = KubernetesSettings(pools=True, node_lost_after_s=40.0)


def node(name: str = "n1", gpus: str | None = "4", *, ready: str = "True", version: str = "1", **changes) -> dict:
    labels = {"springtide.dev/node": "true", **changes.pop("labels", {})}
    status = {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]}
    if gpus is not None:
        status |= {"allocatable": {"cpu": "8", "nvidia.com/gpu": gpus}, "capacity": {"nvidia.com/gpu": "8"}}
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": version, "labels": labels}
    return {"metadata": metadata | changes.pop("metadata", {}), "spec": changes, "status": status}


def annotated(**annotations: str) -> dict:
    named = {f"springtide.dev/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return node("n1", "8", metadata={"annotations": named})


def test_devices_are_what_the_kubelet_may_allocate() -> None:
    found = node_of(
        node(gpus="4", labels={"nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "NVIDIA-L4"}), SETTINGS
    )
    assert found is not None
    assert [device.device_id for device in found.devices] == ["n1/0", "n1/1", "n1/2", "n1/3"]
    assert {device.kind for device in found.devices} == {"gpu"}
    assert {device.memory_mb for device in found.devices} == {81920}
    assert {device.accelerator for device in found.devices} == {"NVIDIA-L4"}


def test_devices_are_counted_by_the_settings_where_no_resource_says_how_many() -> None:
    assert node_of(node(gpus=None), SETTINGS) is None
    counted = KubernetesSettings(devices_per_node=2, device_kind="cpu")
    found = node_of(node(gpus=None), counted)
    assert found is not None
    assert [device.kind for device in found.devices] == ["cpu", "cpu"]
    # A device plugin that says none means none.
    assert node_of(node(gpus="0"), counted) is None


@pytest.mark.parametrize(
    ("labels", "selector", "is_used"),
    [
        ({}, {}, True),
        ({"springtide.dev/node": "false"}, {}, False),
        ({"springtide.dev/node": None}, {}, False),
        ({"springtide.dev/node": None, "team": "ml"}, {"team": "ml"}, True),
        ({"springtide.dev/node": "false", "team": "ml"}, {"team": "ml"}, False),
        ({"team": "web"}, {"team": "ml"}, False),
    ],
)
def test_which_nodes_are_used(labels: dict, selector: dict, is_used: bool) -> None:
    obj = node(labels=labels)
    obj["metadata"]["labels"] = {name: value for name, value in obj["metadata"]["labels"].items() if value is not None}
    facts = facts_of(obj, KubernetesSettings(node_selector=selector))
    assert (facts.node is not None) == is_used
    assert bool(facts.reason) != is_used


@pytest.mark.parametrize(
    ("labels", "pool", "home"),
    [
        ({}, "shared", ""),
        ({"springtide.dev/pool": "training"}, "training", ""),
        ({"springtide.dev/pool": "training", "springtide.dev/home-pool": "inference"}, "training", "inference"),
        ({"springtide.dev/home-pool": "inference"}, "inference", "inference"),
        ({"springtide.dev/pool": "nonsense"}, "shared", ""),
    ],
)
def test_pools_are_labels(labels: dict, pool: str, home: str) -> None:
    found = node_of(node(labels=labels), SETTINGS)
    assert found is not None
    assert (found.pool, found.home) == (pool, home)
    without = node_of(node(labels=labels), KubernetesSettings())
    assert without is not None
    assert (without.pool, without.home) == ("shared", "")


def test_devices_with_links_between_them_are_neighbours() -> None:
    found = node_of(annotated(link_groups="0,2,4,6;1,3,5"), SETTINGS)
    assert found is not None
    assert [device.index for device in found.devices] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert found.devices[1].device_id == "n1/2"


def test_switches_are_annotated_or_labelled_and_end_at_one_that_all_share() -> None:
    def switches(obj: dict) -> tuple[str, ...]:
        found = node_of(obj, SETTINGS)
        assert found is not None
        return found.switches

    assert switches(annotated(switches="leaf-3, spine-1")) == ("leaf-3", "spine-1", "cluster")
    assert switches(annotated(switches="leaf-3,cluster")) == ("leaf-3", "cluster")
    assert switches(node(labels={"topology.kubernetes.io/zone": "z1"})) == ("z1", "cluster")
    rack = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r7"}
    assert switches(node(labels=rack)) == ("r7", "z1", "cluster")
    assert switches(node()) == ()


@pytest.mark.parametrize(
    ("annotations", "told"),
    [
        ({"link_groups": "0,1;8"}, "indices end at 7"),
        ({"link_groups": "0,1;1,2"}, "twice"),
        ({"link_groups": "gpu0,gpu1"}, "0,1,2,3;4,5,6,7"),
        ({"switches": "leaf,,spine"}, "leaf-3,spine-1"),
        ({"nics": "mlx5_0"}, "mlx5_0=0,1;mlx5_1=2,3"),
    ],
)
def test_what_cannot_be_read_is_left_out_and_told(annotations: dict, told: str) -> None:
    facts = facts_of(annotated(**annotations), SETTINGS)
    assert facts.node is not None
    assert [device.index for device in facts.node.devices] == list(range(8))
    assert facts.node.switches == ()
    (complaint,) = facts.complaints
    assert told in complaint


def test_cards_are_read_for_people() -> None:
    assert facts_of(annotated(nics="mlx5_0=0,1,2,3;mlx5_1=4,5,6,7"), SETTINGS).nics == {
        "mlx5_0": (0, 1, 2, 3),
        "mlx5_1": (4, 5, 6, 7),
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"unschedulable": True}, "cordoned"),
        ({"taints": [{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]}, "disk-pressure"),
        ({"taints": [{"key": "dedicated", "value": "x", "effect": "PreferNoSchedule"}]}, ""),
        ({"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, ""),
        ({"taints": [{"key": "team", "value": "ml", "effect": "NoSchedule"}]}, ""),
        ({"taints": [{"key": "team", "value": "web", "effect": "NoSchedule"}]}, "team"),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "removed"),
    ],
)
def test_what_keeps_new_work_off_a_node(changes: dict, told: str) -> None:
    tolerations = [{"key": "team", "value": "ml", "effect": "NoSchedule"}]
    settings = KubernetesSettings(pod=PodSettings(overlay={"tolerations": tolerations}))
    cordon = facts_of(node(**changes), settings).cordon
    assert told in cordon
    assert bool(told) == bool(cordon)


class Ledger:
    """A ledger with a cluster beside it."""

    def __init__(self, settings: KubernetesSettings = SETTINGS) -> None:
        self.ledger = NodeLedger(settings)
        self.objects: dict[str, dict] = {}
        self.held: dict[str, set[str]] = {}
        self.now_s = 0.0
        self._version = 1

    def put(self, obj: dict) -> None:
        self._version += 1
        obj = copy.deepcopy(obj)
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.objects[obj["metadata"]["name"]] = obj

    def update(self, after_s: float = 0.0) -> list[tuple[str, ...]]:
        self.now_s += after_s
        told = self.ledger.update(self.objects.values(), lambda node_id: self.held.get(node_id, ()), self.now_s)
        return [self._short(event) for event in told]

    @staticmethod
    def _short(event: NodeJoined | NodeLost) -> tuple[str, ...]:
        if isinstance(event, NodeLost):
            return ("lost", event.node_id)
        return ("joined", event.node.node_id, *(str(device.index) for device in event.node.devices))


def test_nodes_are_told_once() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "2"))
    cluster.put(node("n2", "1"))
    assert cluster.update() == [("joined", "n1", "0", "1"), ("joined", "n2", "0")]
    cluster.put(node("n1", "2", labels={"other": "label"}))
    assert cluster.update() == []
    cluster.put(node("n1", "3"))
    assert cluster.update() == [("joined", "n1", "0", "1", "2")]
    del cluster.objects["n2"]
    assert cluster.update() == [("lost", "n2")]


def test_a_cordoned_node_is_offered_with_what_is_held() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "4"))
    cluster.update()
    cluster.held = {"n1": {"n1/1", "n1/3"}}
    cluster.put(node("n1", "4", unschedulable=True))
    assert cluster.update() == [("joined", "n1", "1", "3")]
    cluster.held = {"n1": {"n1/3"}}
    assert cluster.update() == [("joined", "n1", "3")]
    cluster.held = {}
    assert cluster.update() == [("lost", "n1")]
    cluster.put(node("n1", "4"))
    assert cluster.update() == [("joined", "n1", "0", "1", "2", "3")]


def test_a_silent_kubelet_is_not_a_dead_machine() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "2"))
    cluster.update()
    cluster.held = {"n1": {"n1/0"}}
    cluster.put(node("n1", "2", ready="Unknown"))
    assert cluster.update() == []
    assert cluster.update(39.0) == []
    assert cluster.update(2.0) == [("joined", "n1", "0")]
    assert cluster.update(1000.0) == []
    # Now the workers are silent, too.
    cluster.held = {}
    assert cluster.update() == [("lost", "n1")]
    cluster.put(node("n1", "2"))
    assert cluster.update() == [("joined", "n1", "0", "1")]


def test_a_moment_of_silence_is_nothing_and_does_not_add_up() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "2"))
    cluster.update()
    for _ in range(5):
        cluster.put(node("n1", "2", ready="False"))
        assert cluster.update() == []
        assert cluster.update(30.0) == []
        cluster.put(node("n1", "2"))
        assert cluster.update() == []


def test_a_node_that_was_never_ready_is_not_offered_but_with_what_lives_there() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "2", ready="False"))
    cluster.put(node("n2", "2", ready="Unknown"))
    cluster.held = {"n2": {"n2/1"}}
    assert cluster.update() == [("joined", "n2", "1")]


def test_an_object_that_is_gone_loses_the_node_when_nobody_works_there() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "2"))
    cluster.update()
    cluster.held = {"n1": {"n1/1"}}
    del cluster.objects["n1"]
    assert cluster.update() == [("joined", "n1", "1")]
    cluster.held = {}
    assert cluster.update() == [("lost", "n1")]
    assert cluster.update() == []


def test_a_device_that_is_held_stays_when_fewer_are_counted() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "4"))
    cluster.update()
    cluster.held = {"n1": {"n1/3"}}
    cluster.put(node("n1", "2"))
    assert cluster.update() == [("joined", "n1", "0", "1", "3")]
    cluster.put(node("n1", "0"))
    assert cluster.update() == [("joined", "n1", "3")]
    cluster.held = {}
    assert cluster.update() == [("lost", "n1")]


def test_who_holds_what_is_not_asked_of_nodes_that_are_well() -> None:
    cluster = Ledger()
    for index in range(3):
        cluster.put(node(f"n{index}", "2"))
    cluster.update()
    asked: list[str] = []

    def held(node_id: NodeId) -> set:
        asked.append(node_id)
        return set()

    for _ in range(5):
        assert cluster.ledger.update(cluster.objects.values(), held, 1.0) == []
    assert asked == []
    cluster.put(node("n1", "2", unschedulable=True))
    cluster.ledger.update(cluster.objects.values(), held, 1.0)
    assert asked == ["n1"]


def test_a_device_that_is_held_beyond_what_is_counted_is_known_at_the_first_look() -> None:
    cluster = Ledger()
    cluster.held = {"n1": {"n1/3"}}
    cluster.put(node("n1", "2"))
    assert cluster.update() == [("joined", "n1", "0", "1", "3")]
    assert cluster.update() == []


def test_labels_that_are_wanted_count_before_they_are_written() -> None:
    cluster = Ledger()
    labels = {"springtide.dev/pool": "inference"}
    cluster.put(node("n1", "1", labels=labels))
    cluster.update()
    cluster.ledger.want_label(NodeId("n1"), "training")
    # Who decided it knows it already.
    assert cluster.update() == []
    (told,) = cluster.ledger.nodes()
    assert (told.pool, told.owner) == ("training", "inference")
    assert cluster.ledger.labels_due() == [("n1", "training", "inference")]
    cluster.put(node("n1", "1", labels={"springtide.dev/pool": "training", "springtide.dev/home-pool": "inference"}))
    assert cluster.update() == []
    assert cluster.ledger.labels_due() == []
    # Somebody writes over it.
    cluster.put(node("n1", "1", labels={"springtide.dev/pool": "shared", "springtide.dev/home-pool": "inference"}))
    assert cluster.update() == []
    assert cluster.ledger.labels_due() == [("n1", "training", "inference")]


def test_a_node_that_is_made_nobodys_is_labelled_no_more() -> None:
    cluster = Ledger()
    cluster.put(node("n1", "1", labels={"springtide.dev/pool": "training", "springtide.dev/home-pool": "inference"}))
    cluster.update()
    cluster.ledger.want_label(NodeId("n1"), "inference")
    cluster.put(node("n1", "1"))
    assert cluster.update() == [("joined", "n1", "0")]
    assert cluster.ledger.labels_due() == []


def test_what_was_told_before_a_restart_is_not_told_again() -> None:
    before = Ledger()
    before.put(node("n1", "2"))
    before.put(node("n2", "2"))
    before.update()
    after = Ledger()
    after.ledger.assume(before.ledger.nodes())
    after.put(node("n1", "2"))
    assert after.update() == [("lost", "n2")]


def test_people_are_told_of_every_node_and_why() -> None:
    cluster = Ledger()
    cluster.put(node("a", "2"))
    cluster.put(node("b", "2", unschedulable=True))
    cluster.put(node("c", "2", ready="Unknown"))
    cluster.put(node("d", "0"))
    cluster.put(node("e", "2", labels={"springtide.dev/node": "false"}))
    cluster.update()
    notes = {note.name: note for note in cluster.ledger.describe()}
    assert notes["a"].is_offered
    assert notes["a"].num_devices == 2
    assert notes["a"].reason == ""
    assert not any(notes[name].is_offered for name in "bcde")
    assert "cordoned" in notes["b"].reason
    assert "not ready" in notes["c"].reason
    assert "nvidia.com/gpu" in notes["d"].reason
    assert "springtide.dev/node=true" in notes["e"].reason
