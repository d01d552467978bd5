"""Services in pods, and those who ask them: the platform as a process beside a cluster whose node is this machine."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kits.kubernetes.kube_http import GROUP, Kube, Refused, wait_for
from kits.kubernetes.lab.pods import IMAGE
from kits.kubernetes.live_cluster import BUCKET, LivePlatform
from kits.servers import running_s3
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.settings import NODE_LABEL

LIMIT_S = 90.0
NODE = "127.0.0.1"
RESOURCE = "springtide.dev/serving-device"


class ThisMachine:
    """The node of a cluster that KUBECONFIG names which is this machine; others may be there for other tests."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.api = Kube(kubeconfig)
        self.host = ""

    def offer(self, num_devices: int) -> None:
        """Give the node devices of a name that no other node of the cluster has, whatever its labels."""
        changes = [
            {"op": "add", "path": f"/status/{place}/{RESOURCE.replace('/', '~1')}", "value": str(num_devices)}
            for place in ("capacity", "allocatable")
        ]
        self.api.patch(f"api/v1/nodes/{NODE}/status", changes, "json")
        self.api.patch(f"api/v1/nodes/{NODE}", {"metadata": {"labels": {NODE_LABEL: "true"}}})

    def find_host(self, namespace: str) -> None:
        """The address at which pods reach this machine: the one it reaches a pod from."""
        container = {"name": "where", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "where", "namespace": namespace},
            "spec": {"nodeName": NODE, "terminationGracePeriodSeconds": 0, "containers": [container]},
        }

        def is_made() -> bool:
            try:
                self.api.post(f"api/v1/namespaces/{namespace}/pods", pod)
            except Refused as refusal:
                # Older servers refuse for a moment, until the namespace's account has its token.
                if refusal.status != 500:
                    raise
                return False
            return True

        wait_for("a pod to be taken", is_made, LIMIT_S)
        path = f"api/v1/namespaces/{namespace}/pods/where"
        address = wait_for("a pod's address", lambda: self.api.get(path)["status"].get("podIP"), LIMIT_S)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            self.host = probe.getsockname()[0]
        self.api.delete(path, gracePeriodSeconds=0)

    def container_pids(self, pod_uid: str) -> list[int]:
        """The processes of a pod's containers, the oldest first; the sandbox's own left out."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cgroup"):
            with contextlib.suppress(OSError):
                if f"pod{pod_uid}" in path.read_text() and (path.parent / "comm").read_text() != "pause\n":
                    found.add(int(path.parent.name))
        return sorted(found)


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]

    @classmethod
    def of(cls, answer: Any) -> Answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return cls(answer.status, json.loads(answer.read()), headers)


class Serving:
    """The platform, and those who ask its services."""

    def __init__(self, platform: LivePlatform) -> None:
        self.platform = platform
        self.wait_leading()
        self._token = (platform.state_dir / "token").read_text().strip()
        self._pool = ThreadPoolExecutor(64)

    def wait_leading(self) -> None:
        """Ready is also who stands by, and who has just begun."""
        wait_for("it to lead", lambda: "leading" in str(self.platform.call("/readyz", token=False)[1]), LIMIT_S)

    def deploy(self, name: str, source: str, **spec: Any) -> None:
        body = {
            "apiVersion": "springtide.dev/v1alpha1",
            "kind": "InferenceFunction",
            "metadata": {"name": name, "namespace": self.platform.namespace},
            "spec": {"source": {"class": "Served", "files": {"serve.py": source}}, "grace": "10s", **spec},
        }
        self.platform.api.post(f"{GROUP}/namespaces/{self.platform.namespace}/inferencefunctions", body)

    def withdraw(self, name: str) -> None:
        self.platform.api.delete(f"{GROUP}/namespaces/{self.platform.namespace}/inferencefunctions/{name}")

    def remove(self, name: str) -> None:
        self.withdraw(name)
        wait_for("its pods to be gone", lambda: not self.pods(name), LIMIT_S)

    def change(self, name: str, **spec: Any) -> None:
        path = f"{GROUP}/namespaces/{self.platform.namespace}/inferencefunctions/{name}"
        self.platform.api.patch(path, {"spec": spec})

    def ask(self, name: str, values: list[int], *, timeout: str = "80s", **more: float) -> Answer:
        return self.ask_with(name, {"values": values, **more}, timeout=timeout)

    def ask_with(self, name: str, arguments: dict[str, Any], *, timeout: str = "80s") -> Answer:
        request = urllib.request.Request(
            f"http://{self.platform.lab.host}:{self.platform.port}/f/{name}",
            data=json.dumps(arguments).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._token}",
                "X-Springtide-Timeout": timeout,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return Answer(
                    answer.status, json.loads(answer.read()), {k.lower(): v for k, v in answer.headers.items()}
                )
        except urllib.error.HTTPError as error:
            with error:
                return Answer.of(error)

    def begin(self, name: str, values: list[int], **more: float) -> Future[Answer]:
        return self._pool.submit(lambda: self.ask(name, values, **more))

    def pods(self, name: str) -> list[dict[str, Any]]:
        return self.platform.api.pods(self.platform.namespace, f"springtide.dev/workload={name}")

    def ready(self, name: str) -> list[dict[str, Any]]:
        """Its pods that the kubelet has found ready, by asking them as the Open Inference Protocol says."""
        return [
            pod
            for pod in self.pods(name)
            if any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in pod["status"].get("conditions", ())
            )
        ]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def serving_on(node: Any, folder: Path, namespace: str, **settings: Any) -> Iterator[Serving]:
    """A platform that leads, with a namespace and a store of its own; nothing of it is left behind."""
    api = node.api
    for definition in custom_resource_definitions():
        api.apply(definition)
    api.post("api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wait_for("the account", lambda: api.find(f"api/v1/namespaces/{namespace}/serviceaccounts/default"))
    try:
        if isinstance(node, ThisMachine):
            node.find_host(namespace)
        with running_s3(buckets=(BUCKET,), host=node.host) as store:
            platform = LivePlatform(node, folder, namespace, store, device_resource=RESOURCE, **settings)
            try:
                platform.start()
                found = Serving(platform)
                yield found
                found.close()
            finally:
                platform.stop()
    finally:
        for item in api.items(f"{GROUP}/namespaces/{namespace}/inferencefunctions"):
            api.delete(f"{GROUP}/namespaces/{namespace}/inferencefunctions/{item['metadata']['name']}")
        for pod in api.pods(namespace):
            api.delete(f"api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", gracePeriodSeconds=0)
        api.delete(f"api/v1/namespaces/{namespace}")
