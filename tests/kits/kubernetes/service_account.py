"""The platform's service account, installed from its own manifests: what runs as it has these rights and no others."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kits.kubernetes.kube_http import Kube, Refused, collection, wait_for
from kits.kubernetes.lab.lab import Cluster
from springtide.backends.kubernetes.install.manifests import render
from springtide.backends.kubernetes.install.settings_file import SettingsFile, settings_from
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions

# Kinds that the tests' own collection() cannot spell.
_PLURALS = {"NetworkPolicy": "networkpolicies"}
# What is installed is the platform's to be: nothing of it has to run for its rights to be there.
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def path_of(item: dict[str, Any]) -> str:
    """Where an object is."""
    plural = _PLURALS.get(item["kind"])
    place = collection(item)
    place = f"{place.rpartition('/')[0]}/{plural}" if plural else place
    return f"{place}/{item['metadata']['name']}"


def install_definitions(api: Kube) -> None:
    """The platform's kinds, as `springtide k8s crds | kubectl apply -f -` installs them."""
    for definition in custom_resource_definitions():
        apply(api, definition)
        path = path_of(definition)
        wait_for("the definition", lambda path=path: _is_established(api.get(path)))


def _is_established(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


def apply(api: Kube, item: dict[str, Any]) -> None:
    """What `kubectl apply` does with one object."""
    api.patch(f"{path_of(item)}?fieldManager=test&force=true", item, "apply")


@contextlib.contextmanager
def installed(cluster: Cluster, kinds: tuple[str, ...] = RIGHTS, **values: Any) -> Iterator[SettingsFile]:
    """The platform's objects of these kinds, in namespaces that are there; taken away afterwards."""
    settings = settings_from(values, "the test's settings")
    objects = [each for each in render(settings, (1, 20)) if each["kind"] in kinds]
    try:
        for each in objects:
            apply(cluster.api, each)
        yield settings
    finally:
        for each in reversed(objects):
            cluster.api.delete(path_of(each))


def token_of(cluster: Cluster, namespace: str, account: str) -> str:
    """A token by which whoever has it is that service account, for an hour."""
    path = f"api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    return str(cluster.api.post(path, request)["status"]["token"])


def kubeconfig_of(cluster: Cluster, namespace: str, account: str, folder: Path) -> Path:
    """A kubeconfig that is a service account's. JSON is YAML."""
    admin = cluster.api
    place = folder / f"{account}.kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": admin.server, **_authority(cluster.kubeconfig)}}],
        "users": [{"name": "u", "user": {"token": token_of(cluster, namespace, account)}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "current-context": "x",
    }
    place.write_text(json.dumps(config))
    return place


def _authority(kubeconfig: Path) -> dict[str, str]:
    import yaml

    config = yaml.safe_load(kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    data = cluster.get("certificate-authority-data")
    text = data or base64.b64encode(Path(cluster["certificate-authority"]).read_bytes()).decode()
    return {"certificate-authority-data": text}


def is_refused(api: Kube, verb: str, path: str, body: object = None, kind: str = "application/json") -> bool:
    """Whether a call is refused for want of a right. Any other answer is none."""
    try:
        api.ask(verb, path, body, kind=kind)
    except Refused as refusal:
        return refusal.status == 403 and refusal.body.get("reason") == "Forbidden"
    return False
