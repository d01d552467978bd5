"""Ways to a real API server: a service account as in a pod, a client certificate that is renewed, log lines, rights."""

from __future__ import annotations

import asyncio
import base64
import shutil
from pathlib import Path

import pytest
import yaml

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from springtide.backends.kubernetes.client import api as api_module
from springtide.backends.kubernetes.client import auth as api_auth
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import KubeForbidden, NotAuthenticated
from springtide.backends.kubernetes.client.kinds import NAMESPACE, POD, SECRET, SERVICE_ACCOUNT
from springtide.core.errors import BackendError

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]


@pytest.fixture
def pki(cluster: Cluster) -> Path:
    if cluster.lab is None:
        pytest.skip("the keys of the cluster that KUBECONFIG names are not ours to use")
    return cluster.lab.folder / "pki"


def with_api(api: KubeApi, task):
    async def run():
        try:
            return await task(api)
        finally:
            await api.close()

    return asyncio.run(run())


def test_as_in_a_pod(cluster, namespace, pki, tmp_path, monkeypatch):
    """With the token, the certificate and the variables that a pod finds: known, and with no more rights than given."""

    def token() -> str | None:
        account = cluster.api.get(f"api/v1/namespaces/{namespace}/serviceaccounts/default")
        for each in account.get("secrets") or ():
            found = cluster.api.find(f"api/v1/namespaces/{namespace}/secrets/{each['name']}")
            if found and "token" in (found.get("data") or {}):
                return base64.b64decode(found["data"]["token"]).decode()
        return None

    (tmp_path / "token").write_text(wait_for("the account's token", token))
    (tmp_path / "namespace").write_text(namespace)
    shutil.copy(pki / "ca.crt", tmp_path)
    host, port = cluster.api.server.removeprefix("https://").split(":")
    monkeypatch.setattr(api_module, "SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    api = KubeApi.connect()
    assert api.namespace == namespace

    async def ask(api: KubeApi) -> tuple[str, bool]:
        with pytest.raises(KubeForbidden, match=f"system:serviceaccount:{namespace}:default"):
            await api.list(SECRET, namespace)
        return await api.version(), await api.review("list", SECRET, namespace)

    version, may_list = with_api(api, ask)
    assert version.startswith("v1.")
    assert not may_list


def test_a_client_certificate_that_is_renewed(cluster, pki, tmp_path, monkeypatch):
    """The same files become somebody else's while the client lives: who has fewer rights becomes the administrator."""
    monkeypatch.setattr(api_auth, "FILE_BELIEVED_S", 0.0)

    def be(name: str) -> None:
        for end in ("crt", "key"):
            shutil.copy(pki / f"{name}.{end}", tmp_path / f"next.{end}")
            (tmp_path / f"next.{end}").replace(tmp_path / f"me.{end}")

    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"client-certificate": "me.crt", "client-key": "me.key"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    be("kubelet")
    api = KubeApi.connect(tmp_path / "config")

    async def ask(api: KubeApi) -> int:
        with pytest.raises(KubeForbidden, match="system:node"):
            await api.list(NAMESPACE)
        be("admin")
        return len((await api.list(NAMESPACE)).items)

    assert with_api(api, ask) >= 4


def test_keys_within_the_kubeconfig(cluster, pki, tmp_path):
    def text(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    config = yaml.safe_load(cluster.kubeconfig.read_text())
    inner = config["clusters"][0]["cluster"]
    config["clusters"][0]["cluster"] = {"server": inner["server"], "certificate-authority-data": text("ca.crt")}
    keys = {"client-certificate-data": text("admin.crt"), "client-key-data": text("admin.key")}
    config["users"][0]["user"] = keys
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    assert with_api(KubeApi.connect(tmp_path / "config"), lambda api: api.list(NAMESPACE)).items


def test_a_server_that_is_not_trusted_is_not_spoken_to(cluster, pki, tmp_path):
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    # A certificate of the lab's that is nobody's authority.
    config["clusters"][0]["cluster"]["certificate-authority"] = str(pki / "admin.crt")
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    with pytest.raises(BackendError, match="certificate verify failed"):
        with_api(KubeApi.connect(tmp_path / "config"), lambda api: api.version())


def test_a_wrong_token(cluster):
    with pytest.raises(NotAuthenticated):
        with_api(KubeApi.connect(cluster.kubeconfig, token="nobody's"), lambda api: api.list(NAMESPACE))


def test_acting_as_somebody_else(cluster, namespace):
    somebody = f"system:serviceaccount:{namespace}:default"
    with pytest.raises(KubeForbidden, match=somebody):
        with_api(KubeApi.connect(cluster.kubeconfig, impersonate=somebody), lambda api: api.list(SECRET))


def test_rights_are_asked_for(cluster, namespace):
    async def ask(api: KubeApi) -> list[bool]:
        return [await api.review("create", POD, namespace, subresource="binding"), await api.review("get", NAMESPACE)]

    assert with_api(KubeApi.connect(cluster.kubeconfig), ask) == [True, True]


def test_metadata_alone(cluster, namespace):
    async def ask(api: KubeApi):
        return await api.list(SERVICE_ACCOUNT, namespace, metadata_only=True)

    (account,) = with_api(KubeApi.connect(cluster.kubeconfig), ask).items
    assert account["metadata"]["name"] == "default"
    assert "secrets" not in account
