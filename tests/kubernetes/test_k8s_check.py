"""`springtide k8s check` on a real API server: what is missing is told in sentences, each mend mends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.service_account import apply, install_definitions, installed, kubeconfig_of
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.install.cluster_check import ClusterFinding, check_cluster
from springtide.backends.kubernetes.install.settings_file import settings_from
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.settings import HOME_LABEL, NODE_LABEL
from springtide.cli.main import cli

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]
RESOURCE = "example.com/checked"


def findings(cluster: Cluster, values: dict[str, Any]) -> list[ClusterFinding]:
    async def look() -> list[ClusterFinding]:
        api = KubeApi.connect(cluster.kubeconfig)
        try:
            return await check_cluster(api, settings_from(values, "the test's settings"))
        finally:
            await api.close()

    return asyncio.run(look())


def told(cluster: Cluster, values: dict[str, Any], name: str) -> list[ClusterFinding]:
    return [each for each in findings(cluster, values) if each.name == name]


@pytest.fixture
def values(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Settings of a platform in a namespace of its own, for workloads in another."""
    install_definitions(cluster.api)
    with cluster.namespace("check") as home, cluster.namespace("checked") as work:
        yield {
            "name": home,
            "namespace": home,
            "namespaces": [work],
            "device_resource": RESOURCE,
            "node_selector": {"checked": home},
            "store_url": "s3://bucket/prefix",
        }


@pytest.fixture
def node(cluster: Cluster, values: dict[str, Any]) -> Iterator[str]:
    name = f"node-{values['name']}"
    cluster.api.post("api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    yield name
    cluster.api.delete(f"api/v1/nodes/{name}")


def test_rights_that_are_missing_are_named_with_their_reason(cluster: Cluster, values: dict[str, Any]) -> None:
    (nobody,) = told(cluster, values, "rights")
    assert (nobody.verdict, nobody.mend) == ("fail", "springtide k8s render --settings FILE | kubectl apply -f -")
    assert nobody.text == f"there is no service account {values['name']}:{values['name']}"
    with installed(cluster, ("ServiceAccount", "Role", "RoleBinding"), **values):
        few = told(cluster, values, "rights")
        assert [each.verdict for each in few] == ["fail", "fail"]
        assert few[0].text == (
            "the control plane may not get, list, watch, patch nodes: it finds devices on nodes, and loans and "
            "reclaims by writing a node's pool label"
        )
        assert few[1].text.startswith("the control plane may not get, list, watch pods: it sees how much of a node's")
    with installed(cluster, **values):
        (all_of_them,) = told(cluster, values, "rights")
        assert all_of_them.verdict == "ok"


def test_more_rights_than_are_needed_are_told(cluster: Cluster, values: dict[str, Any]) -> None:
    name = values["name"]
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"too-much-{name}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": name}],
    }
    with installed(cluster, **values):
        apply(cluster.api, binding)
        try:
            warned = [each for each in told(cluster, values, "rights") if each.verdict == "warn"]
        finally:
            cluster.api.delete(f"apis/rbac.authorization.k8s.io/v1/clusterrolebindings/too-much-{name}")
    assert len(warned) == 4
    assert warned[1].text == f"service account {name}:{name} may list secrets, which it does not need"
    assert warned[1].mend.startswith("see who bound what to it: kubectl get clusterrolebindings")


def test_nodes_without_devices_are_told_and_the_mend_mends_it(
    cluster: Cluster, values: dict[str, Any], node: str
) -> None:
    (none,) = told(cluster, values, "nodes")
    assert none.verdict == "fail"
    assert none.mend == f"kubectl label node NAME checked={values['name']}"
    cluster.api.patch(f"api/v1/nodes/{node}", {"metadata": {"labels": {"checked": values["name"]}}})
    (bare,) = told(cluster, values, "nodes")
    assert bare.verdict == "fail"
    assert bare.mend == f"install the device plugin of {RESOURCE}, or set devices_per_node"
    status = {"allocatable": {RESOURCE: "4"}, "capacity": {RESOURCE: "4"}}
    ready = [{"type": "Ready", "status": "True", "reason": "x", "message": "x"}]
    cluster.api.patch(f"api/v1/nodes/{node}/status", {"status": {**status, "conditions": ready}})
    found = told(cluster, values, "nodes")
    assert found[0].verdict == "ok"
    assert found[0].text.endswith(f"with 4 x {RESOURCE}")
    cluster.api.patch(f"api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
    cordoned = told(cluster, values, "nodes")[1]
    assert (cordoned.verdict, node in cordoned.text) == ("warn", True)
    pools = told(cluster, {**values, "pools": True}, "pools")
    assert (pools[0].verdict, pools[0].mend) == (
        "warn",
        f"kubectl label node NAME {HOME_LABEL}=training (or inference)",
    )
    cluster.api.patch(f"api/v1/nodes/{node}", {"metadata": {"labels": {NODE_LABEL: "false"}}})
    assert told(cluster, values, "nodes")[0].verdict == "fail"


def test_where_state_and_checkpoints_go_is_looked_at(cluster: Cluster, values: dict[str, Any]) -> None:
    home = values["namespace"]
    (nowhere,) = told(cluster, {**values, "store_url": ""}, "store")
    assert (nowhere.verdict, nowhere.mend) == ("fail", "set store_url: s3://bucket/springtide")
    with_secret = {**values, "store_secret": "store"}
    (absent,) = told(cluster, with_secret, "store")
    assert absent.mend == (
        f"kubectl --namespace {home} create secret generic store --from-literal=AWS_ACCESS_KEY_ID=... "
        "--from-literal=AWS_SECRET_ACCESS_KEY=..."
    )
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "store"},
        "stringData": {"AWS_ACCESS_KEY_ID": "a"},
    }
    cluster.api.post(f"api/v1/namespaces/{home}/secrets", secret)
    (half,) = told(cluster, with_secret, "store")
    assert half.text == f"Secret {home}/store lacks AWS_SECRET_ACCESS_KEY"
    keys = {"stringData": {"AWS_SECRET_ACCESS_KEY": "b", "PGPASSWORD": "c"}}
    cluster.api.patch(f"api/v1/namespaces/{home}/secrets/store", keys)
    assert [each.verdict for each in told(cluster, with_secret, "store")] == ["ok"]
    postgres = {**with_secret, "journal_url": "postgresql://u@db/x"}
    assert [each.verdict for each in told(cluster, postgres, "journal")] == ["ok"]
    (unknown,) = told(cluster, {**values, "install": {"storage_class": "none-such"}}, "journal")
    assert unknown.text.startswith("there is no storage class none-such")


def test_a_namespace_that_is_not_there_and_one_that_refuses_the_pods(cluster: Cluster, values: dict[str, Any]) -> None:
    (work,) = values["namespaces"]
    absent = told(cluster, {**values, "namespaces": [work, "no-such"]}, "namespaces")[-1]
    assert (absent.text, absent.mend) == ("there is no namespace no-such", "kubectl create namespace no-such")
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.api.patch(f"api/v1/namespaces/{work}", labels)
    assert {each.verdict for each in told(cluster, values, "namespaces")} == {"ok"}
    mounted = {**values, "pod": {"overlay": {"volumes": [{"name": "d", "hostPath": {"path": "/data"}}]}}}
    refused = told(cluster, mounted, "namespaces")[-1]
    assert refused.verdict == "fail"
    assert "hostPath" in refused.mend


def test_a_quota_is_told_and_one_that_refuses_every_pod_is_a_fault(cluster: Cluster, values: dict[str, Any]) -> None:
    (work,) = values["namespaces"]
    hard = {f"requests.{RESOURCE}": "4", "limits.memory": "8Gi"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": hard}}
    cluster.api.post(f"api/v1/namespaces/{work}/resourcequotas", quota)
    wait_for(
        "its count", lambda: cluster.api.get(f"api/v1/namespaces/{work}/resourcequotas/team")["status"].get("used")
    )
    ok, fault = told(cluster, values, "quota")
    assert ok.text == f"{work}/team: 0 of 4 requests.{RESOURCE} used"
    assert (fault.verdict, fault.mend) == ("fail", "set pod.memory")
    assert len(told(cluster, {**values, "pod": {"memory": "2Gi"}}, "quota")) == 1


def test_definitions_of_another_version_are_told(cluster: Cluster, values: dict[str, Any]) -> None:
    definition = json.loads(json.dumps(custom_resource_definitions()[0]))
    name = definition["metadata"]["name"]
    path = f"apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    assert {each.verdict for each in told(cluster, values, "objects")} == {"ok"}
    columns = definition["spec"]["versions"][0]["additionalPrinterColumns"]
    change = [{"op": "replace", "path": "/spec/versions/0/additionalPrinterColumns", "value": columns[:-1]}]
    cluster.api.patch(path, change, "json")
    try:
        old = told(cluster, values, "objects")[0]
    finally:
        install_definitions(cluster.api)
    assert (old.verdict, old.mend) == ("fail", "springtide k8s crds | kubectl apply -f -")
    assert {each.verdict for each in told(cluster, values, "objects")} == {"ok"}


def test_what_one_may_not_look_at_is_a_warning_and_the_rest_is_looked_at(
    cluster: Cluster, values: dict[str, Any], tmp_path: Path
) -> None:
    home = values["namespace"]
    kubeconfig = kubeconfig_of(cluster, home, "default", tmp_path)
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(values))
    answer = CliRunner().invoke(
        cli, ["k8s", "check", "--settings", str(settings), "--kubeconfig", str(kubeconfig), "--json"]
    )
    checks = json.loads(answer.output)["checks"]
    assert checks[0]["verdict"] == "ok"
    warned = [each for each in checks if each["text"].startswith("you may not look")]
    assert {"objects", "namespaces", "nodes"} <= {each["name"] for each in warned}
    assert all(each["verdict"] == "warn" and each["mend"] for each in warned)


def test_a_control_plane_that_does_not_come_up_is_told_with_the_reason(
    cluster: Cluster, values: dict[str, Any]
) -> None:
    (absent,) = told(cluster, values, "control plane")
    assert (absent.verdict, absent.text) == ("warn", "not installed")
    with installed(
        cluster, ("ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Service", "Deployment"), **values
    ):
        (waits,) = told(cluster, values, "control plane")
        assert waits.verdict == "fail"
        assert waits.text.startswith("0 of 1 ready")
