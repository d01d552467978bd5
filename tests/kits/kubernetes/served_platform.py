"""The control plane as a process under exactly its rights, on a cluster whose nodes no kubelet stands for.

Pods are made and bound there and go no further: what the control plane asks of the API server is all real.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kits.kubernetes.kube_http import GROUP, Kube, Refused
from kits.kubernetes.lab.lab import Cluster, free_ports
from kits.kubernetes.service_account import RIGHTS, install_definitions, installed, kubeconfig_of
from kits.servers import running_s3
from springtide.backends.kubernetes.install.objects import settings_text
from springtide.backends.kubernetes.install.settings_file import complete
from springtide.backends.kubernetes.settings import NODE_LABEL

DEVICE = "example.com/device"
_BEAT_S = 3.0


def environment(**changes: str) -> dict[str, str]:
    """As a container has it: nothing of the developer's machine but how to find programs."""
    return {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONUNBUFFERED": "1", **changes}


class Served:
    """The control plane, as a process, and how to ask it."""

    def __init__(self, api: Kube, namespace: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.api, self.namespace = api, namespace
        self.process, self.port, self.log = process, port, log

    def ask(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; with the platform's token where it has made one."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        secret = self.api.find(f"api/v1/namespaces/{self.namespace}/secrets/{self.namespace}-token")
        if secret is not None:
            request.add_header("Authorization", f"Bearer {base64.b64decode(secret['data']['token']).decode()}")
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def jobs(self) -> list[dict[str, Any]]:
        answer = json.loads(self.ask("/v1/jobs")[1])
        return list(answer["jobs"] if isinstance(answer, dict) else answer)


@contextlib.contextmanager
def still_node(api: Kube, label: str, num_devices: int) -> Iterator[str]:
    """A node with devices, kept ready for as long as the block lasts."""
    name = f"node-{label}"
    path = f"api/v1/nodes/{name}"
    labels = {NODE_LABEL: "false", "test": label}
    api.post("api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    room = {DEVICE: str(num_devices), "cpu": "64", "memory": "64Gi", "pods": "100"}
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            ready = {"type": "Ready", "status": "True", "reason": "Test", "message": f"beat {number}"}
            with contextlib.suppress(Refused, OSError):
                api.patch(f"{path}/status", {"status": {"allocatable": room, "capacity": room, "conditions": [ready]}})
                api.patch(path, {"metadata": {"labels": {NODE_LABEL: None}}, "spec": {"taints": None}})
            ended.wait(_BEAT_S)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield name
    finally:
        ended.set()
        thread.join()
        api.delete(path)


@contextlib.contextmanager
def served(
    cluster: Cluster,
    home: str,
    folder: Path,
    *,
    namespaces: Sequence[str] = (),
    program: Sequence[str] = (sys.executable, "-m", "springtide"),
    **changes: Any,
) -> Iterator[Served]:
    """`springtide k8s serve` with the settings of the ConfigMap, as the platform's service account."""
    install_definitions(cluster.api)
    port, control_port = free_ports(2)
    with running_s3(buckets=("springtide",)) as s3:
        values: dict[str, Any] = {
            "name": home,
            "namespace": home,
            "namespaces": [*namespaces] or [home],
            "advertise": "127.0.0.1",
            "port": port,
            "control_port": control_port,
            "device_resource": DEVICE,
            "device_kind": "cpu",
            "node_selector": {"test": home},
            "store_url": f"{s3.s3_url('springtide', home)}&allow_http=true",
            "lease_s": 5,
            "share_directory": "",
            **changes,
        }
        with installed(cluster, RIGHTS, **values) as settings:
            kubeconfig = kubeconfig_of(cluster, home, home, folder)
            (folder / "settings.yaml").write_text(settings_text(complete(settings)))
            keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
            with open(folder / "log", "wb") as file:
                command = [*program, "k8s", "serve", "--settings", str(folder / "settings.yaml")]
                process = subprocess.Popen(
                    [*command, "--state", str(folder / "state"), "--host", "127.0.0.1"],
                    stdout=file,
                    stderr=file,
                    cwd=folder,
                    env=environment(KUBECONFIG=str(kubeconfig), **keys),
                )
            try:
                yield Served(cluster.api, home, process, port, folder / "log")
            finally:
                process.kill()
                process.wait(30.0)


def training_function(name: str, **spec: Any) -> dict[str, Any]:
    """One that asks for one to two workers, unless told otherwise."""
    source = {"function": "train", "file": "train.py", "files": {"train.py": "def train(ctx):\n    pass\n"}}
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": name},
        "spec": {"source": source, "workers": "1..2", "epochs": 5, "globalBatch": 32, **spec},
    }


def functions_in(namespace: str) -> str:
    """Where the training functions of a namespace are."""
    return f"{GROUP}/namespaces/{namespace}/trainingfunctions"


def bound(api: Kube, namespace: str) -> list[dict[str, Any]]:
    """The pods of a namespace that are on a node."""
    return [pod for pod in api.pods(namespace) if pod["spec"].get("nodeName")]


def events_of(api: Kube, namespace: str, name: str) -> list[dict[str, Any]]:
    """What was told about one object."""
    everything = api.items(f"api/v1/namespaces/{namespace}/events")
    return [each for each in everything if each["involvedObject"]["name"] == name]
