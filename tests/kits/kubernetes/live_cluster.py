"""The platform on a lab with nodes: `springtide k8s serve` as a process that may be killed and started again."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kits.kubernetes.kube_http import GROUP, Kube, Refused, wait_for
from kits.kubernetes.lab.lab import Cluster, free_ports
from kits.kubernetes.lab.nodes import DEVICE_RESOURCE, NODES, NodeLab
from kits.kubernetes.lab.pods import pod_settings
from kits.kubernetes.service_account import install_definitions, installed, kubeconfig_of
from kits.servers import RunningServer, running_s3
from springtide.backends.kubernetes.settings import HOME_LABEL, NODE_LABEL, POOL_LABEL, REPLICA_ANNOTATION

BUCKET = "springtide"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class Door:
    """A platform as people see it: its address, its objects and their pods, all of one namespace.

    `home` is the platform's own namespace, and its name. `url` is where it answers.
    """

    def __init__(self, lab: NodeLab, namespace: str, home: str, url: str) -> None:
        self.lab = lab
        self.namespace = namespace
        self.home = home
        self.url = url
        self._token = ""

    @property
    def api(self) -> Kube:
        return self.lab.api

    def log(self) -> str:
        """What its control planes have said."""
        raise NotImplementedError

    def token(self) -> str:
        """The platform's token, which stays what its first control plane made it."""
        self._token = self._token or self._read_token()
        return self._token

    def _read_token(self) -> str:
        secret = self.api.get(f"api/v1/namespaces/{self.home}/secrets/{self.home}-token")
        return base64.b64decode(secret["data"]["token"]).decode().strip()

    def call(self, path: str, body: object = None, *, verb: str = "", token: bool = True) -> tuple[int, Any]:
        """A request to the platform's own address: status and decoded answer."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=verb or ("GET" if body is None else "POST"),
        )
        if token:
            request.add_header("Authorization", f"Bearer {self.token()}")
        try:
            with urllib.request.urlopen(request, timeout=60.0) as answer:
                status, data = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read()
        try:
            return status, json.loads(data)
        except ValueError:
            return status, data.decode(errors="replace")

    def view(self, path: str) -> Any:
        status, answer = self.call(path)
        assert status == 200, f"{path}: {status} {answer}"
        return answer

    # --- objects ---------------------------------------------------------------------------------------------------

    def find(self, plural: str, name: str) -> dict[str, Any]:
        return self.api.get(f"{GROUP}/namespaces/{self.namespace}/{plural}/{name}")

    def state(self, plural: str, name: str) -> str:
        return str(self.find(plural, name).get("status", {}).get("state", ""))

    def workload_id(self, name: str) -> str:
        return str(
            wait_for(
                f"{name} to be taken in",
                lambda: self.find("trainingfunctions", name).get("status", {}).get("workloadId"),
            )
        )

    def pods_of(self, workload_id: str) -> dict[str, dict[str, Any]]:
        """The pods of a workload that are there and have not ended, by replica id."""
        pods = self.api.pods(self.namespace, f"springtide.dev/workload={workload_id}")
        return {
            pod["metadata"]["annotations"][REPLICA_ANNOTATION]: pod
            for pod in pods
            if pod["status"].get("phase") not in ("Succeeded", "Failed") and "deletionTimestamp" not in pod["metadata"]
        }

    def running(self, workload_id: str) -> dict[str, dict[str, Any]]:
        return {
            replica: pod
            for replica, pod in self.pods_of(workload_id).items()
            if pod["status"].get("phase") == "Running"
        }

    def pids_of(self, pod: dict[str, Any]) -> tuple[int, ...]:
        return tuple(self.lab.container_pids(pod["metadata"]["uid"]))

    def pool(self, node: str) -> str:
        return str(self.api.get(f"api/v1/nodes/{node}")["metadata"]["labels"].get(POOL_LABEL, ""))

    def told(self) -> str:
        """What there is to see, for the message of a test that failed."""
        with contextlib.suppress(OSError, Refused):
            pods = [
                f"{pod['metadata']['name']} {pod['spec'].get('nodeName')} {pod['status'].get('phase')} "
                f"{pod['status'].get('reason', '')} {pod['status'].get('message', '')}"
                for pod in self.api.pods(self.namespace)
            ]
            objects = [
                f"{item['metadata']['name']}: {json.dumps(item.get('status', {}))[:1500]}"
                for plural in ("trainingfunctions", "inferencefunctions")
                for item in self.api.items(f"{GROUP}/namespaces/{self.namespace}/{plural}")
            ]
            return "\n".join(["", *pods, *objects, self.log()[-4000:]])
        return self.log()[-4000:]


class LivePlatform(Door):
    """A control plane on this machine and its pods on the lab's nodes."""

    def __init__(self, lab: NodeLab, folder: Path, namespace: str, store: RunningServer, **settings: Any) -> None:
        self.port, self.control_port = free_ports(2)
        super().__init__(lab, namespace, namespace, f"http://{lab.host}:{self.port}")
        self.folder = folder
        self.store = store
        self.store_url = f"{store.s3_url(BUCKET, namespace)}&allow_http=true"
        self.settings: dict[str, Any] = {
            "name": namespace,
            "namespace": namespace,
            "namespaces": [namespace],
            "advertise": lab.host,
            "port": self.port,
            "control_port": self.control_port,
            "device_resource": DEVICE_RESOURCE,
            "device_kind": "cpu",
            "node_selector": {NODE_LABEL: "true"},
            "store_url": self.store_url,
            "lease_s": 5.0,
            "share_directory": "",
            "pod": {**pod_settings(), "memory": "900Mi"},
            **settings,
        }
        # Whose rights the control plane has: those of the product's own manifests, once they are installed.
        self.kubeconfig = lab.kubeconfig
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start(self, **environment: str) -> None:
        """Start the control plane and wait until it decides."""
        self.spawn(**environment)
        self.wait_ready()

    def spawn(self, **environment: str) -> None:
        """Start the control plane."""
        self.num_starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "settings.yaml"
        file.write_text(json.dumps(self.settings))
        with open(self.log_path, "wb") as log:
            command = ["-m", "springtide", "k8s", "serve", "--settings", str(file), "--state", str(self.state_dir)]
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **CREDENTIALS,
                    "KUBECONFIG": str(self.kubeconfig),
                    "OMP_NUM_THREADS": "1",
                    **environment,
                },
            )

    def wait_ready(self) -> None:
        assert self.process is not None

        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.log()[-3000:]}"
            # A warm standby is ready too; only who leads knows the platform.
            return self.call("/v1/status")[0] == 200

        wait_for("the control plane", is_ready, 180.0)

    def kill(self) -> None:
        """Let it die as kill -9 does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it in order, or by force where it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def log_path(self) -> Path:
        return self.folder / f"control-plane-{self.num_starts}.log"

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("control-plane-*.log")))


class Witness:
    """Sees every pod of a namespace that there ever is: which uids each replica id had, and when pods were there."""

    def __init__(self, lab: NodeLab, namespace: str) -> None:
        self._lab = lab
        self._namespace = namespace
        self._has_ended = threading.Event()
        self.uids: dict[str, set[str]] = defaultdict(set)
        self.starts: dict[str, set[str]] = defaultdict(set)
        self._thread = threading.Thread(target=self._run, name="witness")

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        api = self._lab.api
        while not self._has_ended.wait(0.1):
            # An API server that is away is what some tests are about.
            with contextlib.suppress(OSError, Refused, ValueError):
                for pod in api.pods(self._namespace, "app.kubernetes.io/managed-by=springtide"):
                    self._see(pod)

    def _see(self, pod: dict[str, Any]) -> None:
        replica = pod["metadata"]["annotations"][REPLICA_ANNOTATION]
        self.uids[replica].add(pod["metadata"]["uid"])
        for container in pod["status"].get("containerStatuses", ()):
            if container.get("containerID"):
                self.starts[replica].add(container["containerID"])
            assert container["restartCount"] == 0


@contextlib.contextmanager
def platform_on(lab: NodeLab, folder: Path, prefix: str, devices: int = 2, **settings: Any) -> Iterator[LivePlatform]:
    """A platform with a namespace and a store of its own. The first node is training's, the second inference's."""
    api = lab.api
    namespace = f"{prefix}-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    install_definitions(api)
    for node, home in zip(NODES, ("training", "inference"), strict=True):
        api.patch(f"api/v1/nodes/{node}", {"metadata": {"labels": {POOL_LABEL: None}}})
        lab.offer(node, devices, {NODE_LABEL: "true", HOME_LABEL: home})
    api.post("api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wait_for("the account", lambda: api.find(f"api/v1/namespaces/{namespace}/serviceaccounts/default"))
    with running_s3(buckets=(BUCKET,), host=lab.host) as store:
        platform = LivePlatform(lab, folder, namespace, store, **settings)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            cluster = Cluster(lab.kubeconfig, lab)
            with installed(cluster, **platform.settings):
                platform.kubeconfig = kubeconfig_of(cluster, namespace, namespace, folder)
                yield platform
                platform.stop()
        finally:
            platform.stop()
            for plural in ("trainingfunctions", "inferencefunctions"):
                for item in api.items(f"{GROUP}/namespaces/{namespace}/{plural}"):
                    api.delete(f"{GROUP}/namespaces/{namespace}/{plural}/{item['metadata']['name']}")
            for pod in api.pods(namespace):
                path = f"api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
                api.delete(path, gracePeriodSeconds=0)
            api.delete(f"api/v1/namespaces/{namespace}")
