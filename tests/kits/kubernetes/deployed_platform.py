"""The platform as a cluster runs it: the rendered manifests in real pods, and what a lab lacks beside them, played.

A cluster has a scheduler and a kube-proxy, a lab has neither. Here a thread binds the Deployment's pods, and the
addresses of Services are put on this machine and lead where the API server's Endpoints say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kits.kubernetes.kube_http import GROUP, Refused, wait_for
from kits.kubernetes.lab.nodes import DEVICE_RESOURCE, NODES, NodeLab
from kits.kubernetes.lab.pods import PYTHON, pod_settings
from kits.kubernetes.lab.remains import bridge_name
from kits.kubernetes.live_cluster import BUCKET, CREDENTIALS, Door
from kits.kubernetes.paced_job import apply
from kits.kubernetes.service_account import path_of
from kits.servers import RunningServer, running_postgres, running_s3
from springtide.backends.kubernetes.install.manifests import ACTIVE_LABEL, CONTAINER_NAME
from springtide.backends.kubernetes.settings import HOME_LABEL, NODE_LABEL, POOL_LABEL

Target = Callable[[], tuple[str, int] | None]
# What a Service of the API server's own has as its address: its certificate speaks of it.
API_ADDRESS = "10.96.0.1"
# A busy machine is no reason to fail: what is waited for here comes, or it never does.
LONG_S = 240.0
LEASE_S = 4.0


class Forward:
    """Takes connections at an address of this machine and passes them on to whom `target` names at that moment."""

    def __init__(self, host: str, port: int, target: Target) -> None:
        self._host, self._port, self._target = host, port, target
        self._loop = asyncio.new_event_loop()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"forward-{host}:{port}")

    def __enter__(self) -> Forward:
        self._thread.start()
        assert self._is_open.wait(30.0), f"nobody can listen at {self._host}:{self._port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        passing: set[asyncio.Task[None]] = set()

        def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            passing.add(task := asyncio.create_task(self._pass_on(reader, writer)))
            task.add_done_callback(passing.discard)

        server = await asyncio.start_server(taken, self._host, self._port)
        self._is_open.set()
        await self._end.wait()
        server.close()
        for task in (*passing,):
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, Refused, ValueError):
            target = await asyncio.to_thread(self._target)
            if target is None:
                return
            there_reader, there_writer = await asyncio.open_connection(*target)
            with contextlib.closing(there_writer):
                await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    # The one that has ended tells the other side so, which may still have something to say.
    with contextlib.suppress(OSError):
        writer.write_eof()


class Scheduler:
    """Binds pods that ask for the scheduler that every cluster has: to a ready node, where fewest of their like are."""

    def __init__(self, lab: NodeLab, namespace: str) -> None:
        self._api, self._namespace = lab.api, namespace
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler")

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        while not self._has_ended.wait(0.2):
            with contextlib.suppress(OSError, Refused, ValueError):
                self._look()

    def _look(self) -> None:
        pods = self._api.pods(self._namespace)
        # Those that are about to go count as well: so two of one update come to two nodes.
        taken = [pod["spec"].get("nodeName", "") for pod in pods]
        for pod in pods:
            spec = pod["spec"]
            if spec.get("nodeName") or spec["schedulerName"] != "default-scheduler":
                continue
            nodes = [node["metadata"]["name"] for node in self._api.items("api/v1/nodes") if _takes_pods(node)]
            if not nodes:
                return
            chosen = min(nodes, key=taken.count)
            taken.append(chosen)
            target = {"apiVersion": "v1", "kind": "Node", "name": chosen}
            name = pod["metadata"]["name"]
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self._api.post(f"api/v1/namespaces/{self._namespace}/pods/{name}/binding", binding)


def _takes_pods(node: dict[str, Any]) -> bool:
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"]["conditions"])
    return is_ready and not node["spec"].get("unschedulable")


def is_living(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return is_living(pod) and any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


class DeployedPlatform(Door):
    """Two control planes as pods of a Deployment, reached through their Service; workers in a namespace beside it."""

    def __init__(self, lab: NodeLab, folder: Path, home: str, store: RunningServer, database: RunningServer) -> None:
        super().__init__(lab, f"{home}-team", home, "")
        self.folder = folder
        self.store_url = f"{store.s3_url(BUCKET, home)}&allow_http=true"
        self.database = database
        worker = pod_settings()
        self.settings: dict[str, Any] = {
            "name": home,
            "namespace": home,
            "namespaces": [self.namespace],
            "device_resource": DEVICE_RESOURCE,
            "device_kind": "cpu",
            "store_url": self.store_url,
            "store_secret": "store",
            # The password is in the Secret: settings are none.
            "journal_url": f"postgresql://springtide@{lab.host}:{database.port}/postgres",
            "lease_s": LEASE_S,
            "pod": {**worker, "memory": "900Mi"},
            "controller": {**_as_controller(worker), "cpu": "100m"},
            "install": {"replicas": 2},
            # Gives a job all that it can use, whatever speed it was seen to have while others needed the processors.
            "policy": "edf",
        }
        self.objects: list[dict[str, Any]] = []

    def render(self) -> list[dict[str, Any]]:
        """What `springtide k8s render` prints."""
        file = self.folder / "settings.yaml"
        file.write_text(yaml.safe_dump(self.settings))
        command = [sys.executable, "-m", "springtide", "k8s", "render", "--settings", str(file), "--kubernetes", "1.20"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [each for each in yaml.safe_load_all(printed) if each]

    def apply(self) -> None:
        """`springtide k8s render | kubectl apply -f -`."""
        self.objects = self.render()
        apply(self.lab.kubeconfig, *self.objects)

    def apply_first(self) -> str:
        """The namespace, the Secret and the Service, before anything runs. Returns the Service's address."""
        team = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        apply(self.lab.kubeconfig, team)
        self.objects = self.render()
        for kind in ("Namespace", "Service"):
            (found,) = [each for each in self.objects if each["kind"] == kind]
            apply(self.lab.kubeconfig, found)
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "store", "namespace": self.home},
            "stringData": {**CREDENTIALS, "PGPASSWORD": self.database.password},
        }
        apply(self.lab.kubeconfig, secret)
        address = str(self.service()["spec"]["clusterIP"])
        self.url = f"http://{address}:8787"
        # The lab has no DNS: this is what it would say.
        name = f"{self.home}.{self.home}.svc"
        self.settings["pod"]["overlay"]["hostAliases"] = [{"ip": address, "hostnames": [name]}]
        return address

    def service(self) -> dict[str, Any]:
        return self.api.get(f"api/v1/namespaces/{self.home}/services/{self.home}")

    def endpoints(self, port: str = "http") -> list[tuple[str, int]]:
        """Where the Service leads, as the controller manager keeps it."""
        found = self.api.get(f"api/v1/namespaces/{self.home}/endpoints/{self.home}")
        return [
            (address["ip"], entry["port"])
            for subset in found.get("subsets", ())
            for address in subset.get("addresses", ())
            for entry in subset["ports"]
            if entry["name"] == port
        ]

    def control_planes(self) -> dict[str, dict[str, Any]]:
        """The living pods of the Deployment, by name."""
        selector = f"app.kubernetes.io/instance={self.home},app.kubernetes.io/component=control-plane"
        return {pod["metadata"]["name"]: pod for pod in self.api.pods(self.home, selector) if is_living(pod)}

    def deployment(self) -> dict[str, Any]:
        return self.api.get(f"apis/apps/v1/namespaces/{self.home}/deployments/{self.home}")

    def leader(self) -> str:
        """The pod that leads, once all agree on it: its label, the Lease, the Service, and what each pod says."""
        pods = self.control_planes()
        lease = self.api.get(f"apis/coordination.k8s.io/v1/namespaces/{self.home}/leases/{self.home}")
        holder = str(lease["spec"].get("holderIdentity") or "").partition("_")[0]
        marked = [name for name, pod in pods.items() if pod["metadata"]["labels"].get(ACTIVE_LABEL) == "true"]
        if marked != [holder] or len(pods) != 2 or not all(is_ready(pod) for pod in pods.values()):
            return ""
        addresses = {name: pod["status"]["podIP"] for name, pod in pods.items()}
        if self.endpoints() != [(addresses[holder], 8787)]:
            return ""
        roles = {name: _role_at(address) for name, address in addresses.items()}
        return holder if sorted(roles.values()) == ["leading", "standby"] and roles[holder] == "leading" else ""

    def wait_led(self) -> str:
        """Wait until two are ready and one of them leads. Returns its pod's name."""
        return str(wait_for("one leader of two", self.leader, LONG_S))

    def term(self) -> int:
        return int(self.view("/v1/cluster")["term"])

    def drain(self, node: str) -> None:
        """`kubectl drain`: what a budget does not let go yet is asked to go until it may. Waits until all are gone."""
        if shutil.which("kubectl") is not None:
            command = ["kubectl", "--kubeconfig", str(self.lab.kubeconfig), "drain", node]
            options = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={LONG_S:g}s"]
            done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            return
        self.api.patch(f"api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        wait_for("the node to be empty", lambda: not self._evict_from(node), LONG_S)

    def on_node(self, node: str) -> list[tuple[str, str]]:
        """Namespace and name of every pod there that belongs to the platform."""
        return [
            (namespace, pod["metadata"]["name"])
            for namespace in (self.home, self.namespace)
            for pod in self.api.pods(namespace)
            if pod["spec"].get("nodeName") == node and pod["status"].get("phase") not in ("Succeeded", "Failed")
        ]

    def _evict_from(self, node: str) -> list[tuple[str, str]]:
        found = self.on_node(node)
        for namespace, name in found:
            self.evict(namespace, name)
        return found

    def evict(self, namespace: str, pod: str) -> int:
        """What `kubectl drain` asks for each pod. Returns the status of the answer."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        try:
            self.api.post(f"api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)
        except Refused as refusal:
            return refusal.status
        return 201

    def disruptions_allowed(self) -> int:
        """How many control planes may be evicted now."""
        path = f"apis/policy/v1beta1/namespaces/{self.home}/poddisruptionbudgets/{self.home}"
        return int(self.api.get(path)["status"]["disruptionsAllowed"])

    def log(self) -> str:
        told = []
        for name in self.control_planes():
            for previous in ("true", "false"):
                with contextlib.suppress(OSError, Refused):
                    path = f"api/v1/namespaces/{self.home}/pods/{name}/log"
                    text = self.api.get(path, previous=previous, tailLines="60").get("message", "")
                    told.append(f"--- {name} previous={previous}\n{text}")
        return "\n".join(told)


def _role_at(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}:8787/readyz", timeout=5.0) as answer:
            return str(json.loads(answer.read())["status"])
    except (OSError, urllib.error.URLError, ValueError):
        return ""


def _as_controller(worker: dict[str, Any]) -> dict[str, Any]:
    """The lab's image for the control plane: what it is for a worker, but for the container's name and command."""
    overlay = worker["overlay"]
    (container,) = overlay["containers"]
    return {
        "image": worker["image"],
        "image_pull_policy": worker["image_pull_policy"],
        "command": [PYTHON, "-m", "springtide"],
        "overlay": {**overlay, "containers": [{**container, "name": CONTAINER_NAME}]},
    }


@contextlib.contextmanager
def _address(address: str) -> Iterator[None]:
    """An address of this machine's, at which pods of both nodes reach it."""
    where = [f"{address}/32", "dev", bridge_name(0)]
    subprocess.run(["ip", "addr", "add", *where], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "addr", "del", *where], check=False)


@contextlib.contextmanager
def deployed_on(lab: NodeLab, folder: Path) -> Iterator[DeployedPlatform]:
    """The platform with two replicas in namespaces of its own, one device on each node; nothing of it stays."""
    api = lab.api
    folder.mkdir(parents=True, exist_ok=True)
    home = f"deployed-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    server = urlsplit(api.server)
    for node in NODES:
        lab.offer(node, 1, {NODE_LABEL: "true"})
        api.patch(f"api/v1/nodes/{node}", {"metadata": {"labels": {POOL_LABEL: None, HOME_LABEL: None}}})
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_s3(buckets=(BUCKET,), host=lab.host))
        database = stack.enter_context(running_postgres())
        stack.enter_context(Forward(lab.host, database.port, lambda: (database.host, database.port)))
        stack.enter_context(_address(API_ADDRESS))
        stack.enter_context(Forward(API_ADDRESS, 443, lambda: (server.hostname or "", server.port or 443)))
        platform = DeployedPlatform(lab, folder, home, store, database)
        stack.callback(_take_away, platform)
        address = platform.apply_first()
        stack.enter_context(_address(address))
        for entry in platform.service()["spec"]["ports"]:
            name = entry["name"]
            target: Target = lambda name=name: next(iter(platform.endpoints(name)), None)  # noqa: E731
            stack.enter_context(Forward(address, entry["port"], target))
        stack.enter_context(Scheduler(lab, home))
        platform.apply()
        yield platform


def _take_away(platform: DeployedPlatform) -> None:
    api, team = platform.api, platform.namespace
    for node in NODES:
        api.patch(f"api/v1/nodes/{node}", {"spec": {"unschedulable": None}})
    for item in api.items(f"{GROUP}/namespaces/{team}/trainingfunctions"):
        api.delete(f"{GROUP}/namespaces/{team}/trainingfunctions/{item['metadata']['name']}")
    for each in reversed(platform.objects):
        # Definitions are everybody's.
        if each["kind"] != "CustomResourceDefinition":
            api.delete(path_of(each))
    for namespace in (platform.home, team):
        for pod in api.pods(namespace):
            api.delete(f"api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", gracePeriodSeconds=0)
    api.delete(f"api/v1/namespaces/{team}")
