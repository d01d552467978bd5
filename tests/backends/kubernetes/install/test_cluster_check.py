"""What is told of a cluster, on objects as data. On a real API server: tests/kubernetes/test_k8s_check.py."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

import pytest

from springtide.backends.kubernetes.client import kinds
from springtide.backends.kubernetes.client.errors import KubeForbidden, Unreachable
from springtide.backends.kubernetes.client.kinds import Kind
from springtide.backends.kubernetes.install.cluster_check import SUBJECT_ACCESS_REVIEW, ClusterFinding, check_cluster
from springtide.backends.kubernetes.install.manifests import render
from springtide.backends.kubernetes.install.settings_file import SettingsFile, settings_from
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions

VALUES: dict[str, Any] = {
    "namespaces": ["team"],
    "store_url": "s3://bucket/x",
    "store_secret": "store",
    "journal_url": "postgresql://u@db/x",
    "node_selector": {"pool": "ml"},
    "pools": True,
    "install": {"share_daemon": True, "replicas": 2, "monitoring": True},
}
READY = {"type": "Ready", "status": "True"}


def node(name: str, pool: str, *conditions: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"pool": "ml", "springtide.dev/home-pool": pool}},
        "spec": {},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [*(conditions or (READY,))]},
    }


def whole_cluster() -> list[dict[str, Any]]:
    """Everything that is needed, and all of it runs."""
    objects = [copy.deepcopy(each) for each in (*custom_resource_definitions(), *render(settings_from(VALUES, "it")))]
    for each in objects:
        if each["kind"] == "Deployment":
            each["status"] = {"readyReplicas": 2}
        if each["kind"] == "DaemonSet":
            each["status"] = {"numberReady": 2, "desiredNumberScheduled": 2}
    labels = {"app.kubernetes.io/name": "springtide", "springtide.dev/active": "true"}
    meta = {"name": "servicemonitors.monitoring.coreos.com"}
    keys = {"AWS_ACCESS_KEY_ID": "eA==", "AWS_SECRET_ACCESS_KEY": "eA==", "PGPASSWORD": "eA=="}
    objects += [
        {"kind": "Namespace", "metadata": {"name": "team"}},
        {"kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "team"}},
        {"kind": "CustomResourceDefinition", "metadata": meta, "spec": {}},
        {"kind": "Secret", "metadata": {"name": "store", "namespace": "springtide"}, "data": keys},
        {"kind": "Pod", "metadata": {"name": "springtide-1", "namespace": "springtide", "labels": labels}},
        {"kind": "Node", **node("a", "training")},
        {"kind": "Node", **node("b", "inference")},
    ]
    return objects


class Cluster:
    """Objects that an API server would have, and what it would answer to what is asked here."""

    server = "https://cluster"

    def __init__(
        self, objects: list[dict[str, Any]], *, refused: tuple[str, ...] = (), away_after: int = 10**9
    ) -> None:
        self.objects, self.refused, self.calls_left = objects, refused, away_after
        self.may_not: set[str] = set()
        self.may_all = False

    def _call(self, kind: Kind) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Unreachable("the API server does not answer")
        if kind.name in self.refused:
            raise KubeForbidden(403, "Forbidden", f"{kind.plural} is forbidden")

    async def version(self) -> str:
        self._call(kinds.NAMESPACE)
        return "v1.30.2"

    async def find(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any] | None:
        self._call(kind)
        key = (kind.name, name, namespace)
        for each in self.objects:
            if (each["kind"], each["metadata"]["name"], each["metadata"].get("namespace", "")) == key:
                return each
        return None

    async def list(self, kind: Kind, namespace: str = "", *, labels: str = "", fields: str = "") -> Any:
        self._call(kind)

        class Found:
            items = [
                each
                for each in self.objects
                if each["kind"] == kind.name and namespace in ("", each["metadata"].get("namespace", ""))
            ]

        return Found

    async def create(self, kind: Kind, obj: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self._call(kind)
        assert kind == SUBJECT_ACCESS_REVIEW
        attributes = obj["spec"]["resourceAttributes"]
        is_too_much = attributes.get("namespace") == "kube-system" or (
            (attributes["verb"], attributes["resource"])
            in {("list", "secrets"), ("delete", "nodes"), ("create", "clusterrolebindings")}
        )
        return {"status": {"allowed": self.may_all or not (is_too_much or attributes["resource"] in self.may_not)}}


def look(cluster: Cluster, values: dict[str, Any] | None = None) -> list[ClusterFinding]:
    return asyncio.run(check_cluster(cluster, settings_from(values or VALUES, "it")))  # type: ignore[arg-type]


def named(findings: list[ClusterFinding], name: str) -> list[ClusterFinding]:
    return [each for each in findings if each.name == name]


def test_a_cluster_that_has_everything_is_told_so() -> None:
    findings = look(Cluster(whole_cluster()))
    assert {each.verdict for each in findings} == {"ok"}, [each for each in findings if each.verdict != "ok"]
    assert len({each.name for each in findings}) == 11
    assert named(findings, "control plane")[0].text == "2 ready; springtide-1 decides"
    assert named(findings, "nodes")[0].text == "2 of 2 with 16 x nvidia.com/gpu"


@pytest.mark.parametrize(
    ("kind", "name", "where", "sentence"),
    [
        ("CustomResourceDefinition", "trainingfunctions.springtide.dev", "objects", "does not know TrainingFunction"),
        ("Namespace", "team", "namespaces", "there is no namespace team"),
        ("ServiceAccount", "default", "namespaces", "no service account default in team: pods are refused there"),
        ("ServiceAccount", "springtide", "rights", "there is no service account springtide:springtide"),
        ("Secret", "store", "store", "there is no Secret springtide/store"),
        (
            "CustomResourceDefinition",
            "servicemonitors.monitoring.coreos.com",
            "monitoring",
            "does not know ServiceMonitor",
        ),
        ("Deployment", "springtide", "control plane", "not installed"),
        ("Pod", "springtide-1", "control plane", "none of them decides yet"),
        ("DaemonSet", "springtide-shares", "share daemon", "not installed"),
        ("Node", "b", "pools", "nothing can be loaned"),
    ],
)
def test_each_thing_that_is_missing_is_told_with_its_mend(kind: str, name: str, where: str, sentence: str) -> None:
    objects = [each for each in whole_cluster() if (each["kind"], each["metadata"]["name"]) != (kind, name)]
    assert len(objects) == len(whole_cluster()) - 1
    wrong = [each for each in look(Cluster(objects)) if each.verdict != "ok"]
    assert where in {each.name for each in wrong}
    assert any(sentence in each.text for each in wrong), wrong
    assert all(each.mend for each in wrong)


def test_pods_of_others_that_hold_gpus_where_the_platform_chooses_them_are_warned_of() -> None:
    def pod(name: str, node: str, **labels: str) -> dict[str, Any]:
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        meta = {"name": name, "namespace": "team", "labels": labels}
        return {"kind": "Pod", "metadata": meta, "spec": {"nodeName": node, "containers": [limits]}}

    own = pod("job-0", "a", **{"springtide.dev/platform": "springtide", "springtide.dev/replica": "job.0"})
    others = [pod("notebook", "b"), pod("elsewhere", "c")]
    told = named(look(Cluster([*whole_cluster(), own, *others])), "share daemon")
    assert [each.verdict for each in told] == ["ok", "warn"]
    assert told[1].text.startswith(
        "team/notebook holds nvidia.com/gpu on b, and may be given one that the platform uses"
    )
    assert told[1].mend == "keep others off: kubectl taint node b nvidia.com/gpu=springtide:NoSchedule"


def test_rights_that_belong_together_are_one_sentence() -> None:
    cluster = Cluster(whole_cluster())
    cluster.may_not = {"nodes"}
    (told,) = named(look(cluster), "rights")
    assert told.text.startswith("the control plane may not get, list, watch, patch nodes: it finds devices")


def test_rights_that_are_too_many_are_warnings() -> None:
    cluster = Cluster(whole_cluster())
    cluster.may_all = True
    told = named(look(cluster), "rights")
    assert [each.verdict for each in told] == ["ok", "warn", "warn", "warn", "warn"]
    assert told[1].text.endswith("may create pods in namespace kube-system, which it does not need")


def test_a_platform_for_every_namespace_is_warned_of_what_that_means() -> None:
    told = named(look(Cluster(whole_cluster()), {**VALUES, "namespaces": []}), "rights")
    assert told[-1].verdict == "warn"
    assert told[-1].mend.startswith("set namespaces")


def test_an_unready_node_and_a_faulty_annotation_are_told() -> None:
    objects = whole_cluster()
    objects[-1] = {"kind": "Node", **node("b", "inference", {"type": "Ready", "status": "Unknown"})}
    objects[-2]["metadata"]["annotations"] = {"springtide.dev/link-groups": "0,1;99"}
    told = named(look(Cluster(objects)), "nodes")
    assert [each.verdict for each in told] == ["ok", "warn", "warn"]
    assert {name for each in told[1:] for name in ("a", "b") if f" {name}:" in f" {each.text}"} == {"a", "b"}


def test_why_a_control_plane_does_not_come_up_is_told() -> None:
    objects = whole_cluster()
    for each in objects:
        if each["kind"] == "Deployment":
            each["status"] = {}
        if each["kind"] == "Pod":
            waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
            each["status"] = {"containerStatuses": [{"state": {"waiting": waiting}}]}
    (told,) = named(look(Cluster(objects)), "control plane")
    assert told.text == "0 of 2 ready: ImagePullBackOff no such image"


def test_what_one_may_not_see_keeps_nothing_else_from_being_looked_at() -> None:
    findings = look(Cluster(whole_cluster(), refused=("Node", "Secret")))
    assert {each.name for each in findings if each.verdict == "warn"} == {"nodes", "store", "journal"}
    assert {each.name for each in findings if each.verdict == "ok"} >= {"objects", "rights", "control plane"}


def test_a_server_that_goes_away_ends_the_looking_with_one_sentence() -> None:
    findings = look(Cluster(whole_cluster(), away_after=4))
    assert findings[-1] == ClusterFinding(
        name="server", verdict="fail", text="the API server does not answer", mend="try again"
    )
    assert [each.name for each in look(Cluster([], away_after=0))] == ["server"]


def test_the_function_service_is_looked_at_with_what_the_control_plane_has() -> None:
    given = {
        "provider": "aws",
        "region": "eu-central-1",
        "role": "arn:aws:iam::123456789012:role/a",
        "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/a:1",
    }
    asked: list[dict[str, str]] = []

    def functions(settings: SettingsFile, secret: Mapping[str, str]) -> list[ClusterFinding]:
        asked.append(dict(secret))
        return [ClusterFinding(name="functions", verdict="ok", text=settings.functions.region)]

    def ask(values: dict[str, Any], cluster: Cluster) -> list[ClusterFinding]:
        settings = settings_from(values, "the test's settings")
        return named(asyncio.run(check_cluster(cluster, settings, functions)), "functions")  # type: ignore[arg-type]

    assert ask(VALUES, Cluster(whole_cluster())) == []
    (found,) = ask({**VALUES, "functions": given}, Cluster(whole_cluster()))
    assert found.text == "eu-central-1"
    assert asked == [{"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "PGPASSWORD": "x"}]
    (refused,) = ask({**VALUES, "functions": given}, Cluster(whole_cluster(), refused=("Secret",)))
    assert (refused.verdict, len(asked)) == ("warn", 1)
    objects = [each for each in whole_cluster() if each["kind"] != "Secret"]
    assert ask({**VALUES, "functions": given}, Cluster(objects))[0].verdict == "ok"
    assert asked[-1] == {}


def test_the_workers_own_keys_are_looked_for_and_may_be_none() -> None:
    values = {**VALUES, "worker_store_secret": "workers"}
    assert [each.verdict for each in named(look(Cluster(whole_cluster()), values), "store")] == ["ok", "fail"]
    for data, verdict in (({}, "warn"), ({"AWS_ACCESS_KEY_ID": "eA=="}, "fail")):
        secret = {"kind": "Secret", "metadata": {"name": "workers", "namespace": "springtide"}, "data": data}
        told = named(look(Cluster([*whole_cluster(), secret]), values), "store")
        assert [each.verdict for each in told] == ["ok", verdict]
        assert "springtide/workers" in told[1].text
