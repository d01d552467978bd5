"""The chart by Helm itself on a real API server: installed, changed, undone and taken away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kits.kubernetes.chart_cases import CHART, in_order
from kits.kubernetes.kube_http import GROUP
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.real_helm import Helm, HelmError, found_helm
from kits.kubernetes.service_account import install_definitions, path_of
from springtide.backends.kubernetes.client.yaml_text import read_yaml
from springtide.backends.kubernetes.install.manifests import render
from springtide.backends.kubernetes.install.settings_file import settings_from

pytestmark = pytest.mark.kubernetes


class Release:
    """A release of the chart in a namespace of its own."""

    def __init__(self, helm: Helm, cluster: Cluster, namespace: str) -> None:
        self._helm = helm
        self._options = [f"--kubeconfig={cluster.kubeconfig}", f"--namespace={namespace}"]
        self.cluster = cluster
        # Objects of the whole cluster have names of their own.
        self.values: dict[str, Any] = {"name": namespace, "namespaces": [namespace], "install": {"monitoring": False}}
        self.namespace = namespace

    def __call__(self, verb: str, *arguments: str, values: dict[str, Any] | None = None) -> str:
        return self._helm(*verb.split(), "tide", *arguments, *self._options, values=values)

    def objects(self) -> dict[str, Any]:
        """What Helm says it has made."""
        return in_order(read_yaml(self("get manifest"), "the release"))


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    helm = found_helm()
    # Others of this session may have them already: Helm leaves definitions that are there alone.
    install_definitions(cluster.api)
    with cluster.namespace("helm") as namespace:
        release = Release(helm, cluster, namespace)
        try:
            yield release
        finally:
            if release.namespace in helm("list", "--all", "--output=json", *release._options):
                release("uninstall")


def test_a_release_is_what_render_prints_and_the_server_has_it(release: Release) -> None:
    told = release("install", str(CHART), values=release.values)
    assert f"deployment/{release.namespace}" in told
    assert f"secret {release.namespace}-token" in told
    assert "<no value>" not in told
    settings = settings_from({**release.values, "namespace": release.namespace}, "the test's settings")
    wanted = in_order(each for each in render(settings, _version(release)) if each["kind"] not in ("Namespace",))
    assert release.objects() == wanted
    for each in _raw(release):
        found = release.cluster.api.get(path_of(each))
        assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    # What the server has completed is still what was asked for.
    deployment = release.cluster.api.get(f"apis/apps/v1/namespaces/{release.namespace}/deployments/{release.namespace}")
    (asked,) = (each for each in wanted.values() if each["kind"] == "Deployment")
    assert _holds(deployment["spec"], asked["spec"])


def test_a_change_is_made_and_undone(release: Release) -> None:
    release("install", str(CHART), values=release.values)
    before = release.objects()
    changed = {**release.values, "journal_url": "postgresql://db/springtide", "install": {"replicas": 2}}
    release("upgrade", str(CHART), values=changed)
    path = f"apis/apps/v1/namespaces/{release.namespace}/deployments/{release.namespace}"
    assert release.cluster.api.get(path)["spec"]["replicas"] == 2
    assert any(key.startswith("PodDisruptionBudget/") for key in release.objects())
    with pytest.raises(HelmError, match=r"set journal_url: postgresql://\.\.\. or install\.replicas: 1"):
        release("upgrade", str(CHART), values={**release.values, "install": {"replicas": 2}})
    release("rollback", "1")
    assert release.objects() == before
    assert release.cluster.api.get(path)["spec"]["replicas"] == 1


def test_what_people_made_outlives_the_release(release: Release) -> None:
    release("install", str(CHART), values=release.values)
    made = release.objects()
    place = f"{GROUP}/namespaces/{release.namespace}/trainingfunctions"
    function = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": "kept"},
        "spec": {"source": {"function": "train", "files": {"train.py": "import springtide as st\n"}}},
    }
    release.cluster.api.post(place, function)
    release("uninstall")
    assert release.cluster.api.get(f"{place}/kept")["spec"]["source"] == function["spec"]["source"]
    # Everything else goes, the journal's volume too, which waits until nobody uses it.
    left = [each for each in made.values() if release.cluster.api.find(path_of(each)) is not None]
    assert [each["kind"] for each in left if "deletionTimestamp" not in _meta(release, each)] == []


def _meta(release: Release, each: dict[str, Any]) -> dict[str, Any]:
    found = release.cluster.api.find(path_of(each))
    return {"deletionTimestamp": ""} if found is None else dict(found["metadata"])


def _version(release: Release) -> tuple[int, int]:
    told = release.cluster.api.get("version")
    return int(told["major"]), int(told["minor"].rstrip("+"))


def _raw(release: Release) -> list[dict[str, Any]]:
    return read_yaml(release("get manifest"), "the release")


def _holds(found: Any, asked: Any) -> bool:
    """Whether everything that was asked for is there; the server adds what is usual."""
    if isinstance(asked, dict):
        return all(name in found and _holds(found[name], value) for name, value in asked.items())
    if isinstance(asked, list):
        return len(found) >= len(asked) and all(map(_holds, found, asked))
    return bool(json.dumps(found) == json.dumps(asked))
