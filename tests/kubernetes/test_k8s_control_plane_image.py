"""The control plane as its image has it: the wheel with exactly the recipe's extras, under the manifests' rights."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_http import GROUP, Kube, wait_for
from lab import Cluster, free_ports
from service_account import RIGHTS, install_definitions, installed, kubeconfig_of

from springtide.backends.kubernetes.settings import NODE_LABEL
from springtide.backends.kubernetes.yaml_text import write_yaml
from springtide.testing.servers import running_s3

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "containers" / "Containerfile"
TRAIN = "def train(ctx):\n    pass\n"


def extras_of(role: str) -> str:
    """What the recipe installs for a role, as in `kubernetes,stores`."""
    stage = re.search(rf"^FROM \S+ AS {role}-parts\n(.*?)^FROM ", RECIPE.read_text(), re.MULTILINE | re.DOTALL)
    assert stage is not None
    (extras,) = re.findall(r"springtide-\*\.whl\)\[([a-z,-]+)\]", stage[1])
    return str(extras)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (built,) = folder.glob("springtide-*.whl")
    return built


@pytest.fixture(scope="module")
def control_plane(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a Python that has what the control plane's image has."""
    folder = tmp_path_factory.mktemp("image") / "springtide"
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{wheel}[{extras_of('control-plane')}]"], check=True, timeout=500)
    return folder / "bin"


def environment(**changes: str) -> dict[str, str]:
    """As a container has it: nothing of the developer's machine but how to find programs."""
    return {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONUNBUFFERED": "1", **changes}


def test_the_control_planes_image_has_no_torch(control_plane: Path) -> None:
    listed = subprocess.run(
        [control_plane / "python", "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    found = {each["name"].lower() for each in json.loads(listed.stdout)}
    assert {"springtide", "lightkube", "psycopg", "obstore", "fastapi"} <= found
    assert not found & {"torch", "jax", "safetensors", "optuna", "boto3", "scikit-learn", "pytest", "moto"}


def test_it_prints_the_manifests(control_plane: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [control_plane / "springtide", "k8s", "render", "--set", "namespaces=[ml]"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.stdout.count("\nkind: ") > 15


class Served:
    """The control plane, as a process, and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def ask(self, path: str, token: str = "") -> tuple[int, str]:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            return answer.status, answer.read().decode()


@pytest.fixture
def home(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace("image") as name:
        yield name


@pytest.fixture
def node(cluster: Cluster, home: str) -> Iterator[str]:
    """A node with two devices that no kubelet stands for: pods are bound there and go no further."""
    name = f"node-{home}"
    labels = {NODE_LABEL: "false", "test": home}
    cluster.api.post("api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    status = {
        "allocatable": {"example.com/device": "2", "cpu": "8", "memory": "8Gi", "pods": "50"},
        "capacity": {"example.com/device": "2", "cpu": "8", "memory": "8Gi", "pods": "50"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": "there"}],
    }
    cluster.api.patch(f"api/v1/nodes/{name}/status", {"status": status})
    cluster.api.patch(f"api/v1/nodes/{name}", {"metadata": {"labels": {NODE_LABEL: None}}, "spec": {"taints": None}})
    yield name
    cluster.api.delete(f"api/v1/nodes/{name}")


@pytest.fixture
def served(cluster: Cluster, control_plane: Path, home: str, node: str, tmp_path: Path) -> Iterator[Served]:
    """Started with the settings of the ConfigMap, as the service account, from the installed wheel."""
    install_definitions(cluster.api)
    port, control_port = free_ports(2)
    with running_s3(buckets=("springtide",)) as s3:
        values: dict[str, Any] = {
            "name": home,
            "namespace": home,
            "namespaces": [home],
            "advertise": "127.0.0.1",
            "port": port,
            "control_port": control_port,
            "device_resource": "example.com/device",
            "device_kind": "cpu",
            "node_selector": {"test": home},
            "store_url": f"{s3.s3_url('springtide', home)}&allow_http=true",
            "lease_s": 5,
            "share_directory": "",
        }
        with installed(cluster, RIGHTS, **values):
            kubeconfig = kubeconfig_of(cluster, home, home, tmp_path)
            (tmp_path / "settings.yaml").write_text(write_yaml([values]))
            command = [control_plane / "springtide", "k8s", "serve", "--settings", tmp_path / "settings.yaml"]
            log = tmp_path / "log"
            keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
            with open(log, "wb") as file:
                process = subprocess.Popen(
                    [*command, "--state", tmp_path / "state", "--host", "127.0.0.1"],
                    stdout=file,
                    stderr=file,
                    cwd=tmp_path,
                    env=environment(KUBECONFIG=str(kubeconfig), **keys),
                )
            try:
                yield Served(process, port, log)
            finally:
                process.kill()
                process.wait(30.0)


def test_it_runs_without_torch_under_exactly_its_rights(cluster: Cluster, served: Served, home: str, node: str) -> None:
    wait_for("the control plane", lambda: served.ask("/readyz")[0] == 200)
    body = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": "digits"},
        "spec": {
            "source": {"function": "train", "file": "train.py", "files": {"train.py": TRAIN}},
            "workers": "1..2",
            "epochs": 5,
            "globalBatch": 32,
        },
    }
    place = f"{GROUP}/namespaces/{home}/trainingfunctions"
    cluster.api.post(place, body)
    pods = wait_for("bound pods", lambda: _bound(cluster.api, home))
    assert {pod["spec"]["nodeName"] for pod in pods} == {node}
    wait_for("its state", lambda: cluster.api.get(f"{place}/digits").get("status", {}).get("state"))
    events = wait_for("an event about it", lambda: _events(cluster.api, home, "digits"))
    assert all(event["message"] for event in events)
    token = base64.b64decode(
        cluster.api.get(f"api/v1/namespaces/{home}/secrets/{home}-token")["data"]["token"]
    ).decode()
    jobs = json.loads(served.ask("/v1/jobs", token)[1])
    assert len(jobs["jobs"] if isinstance(jobs, dict) else jobs) == 1
    assert "springtide_" in served.ask("/metrics")[1]
    loaded = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "obstore" in loaded
    assert "torch" not in loaded
    cluster.api.delete(f"{place}/digits")
    wait_for("the end of its pods", lambda: not cluster.api.pods(home))
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60.0) == 0
    told = served.log.read_text()
    assert not re.search(r"forbidden|Traceback|cannot (get|list|watch|create|patch|delete)", told), told[-3000:]


def _bound(api: Kube, namespace: str) -> list[dict[str, Any]]:
    return [pod for pod in api.pods(namespace) if pod["spec"].get("nodeName")]


def _events(api: Kube, namespace: str, name: str) -> list[dict[str, Any]]:
    return [
        each for each in api.items(f"api/v1/namespaces/{namespace}/events") if each["involvedObject"]["name"] == name
    ]
