"""Shares of a GPU between pods: a real kubelet, containers as nobody in particular, the stub driver, the share agent.

The agent and its daemon are in a pod that sees the node's processes. Each sharer is a pod whose program launches
kernels under the preloaded library; a small server in it passes on what it is told to do.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kits.kubernetes.kube_http import Kube, wait_for
from kits.kubernetes.lab.pods import PYTHON, plain_pod, pod_settings
from kits.kubernetes.serving_kit import RESOURCE, serving_on
from kits.native.native_build import Native
from kits.nvidia_smi import install_nvidia_smi
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.pods.shares import SHARE_ANNOTATION, share_parts, share_text
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.sharing.gpu.build import find_compiler, find_headers
from springtide.core.errors import BackendError
from springtide.core.resources import Device, DeviceId, NodeId
from springtide.core.shares import Share

pytestmark = pytest.mark.kubernetes

LIMIT_S = 60.0
ORDERS_PORT = 9100
MB = 1_000_000
# Passes lines on to the program that launches, which is its child's child: all of a pod's processes are one tenant.
RELAY = f"""
import os, socket, subprocess
def connected():
    listener = socket.create_server((os.environ["POD_IP"], {ORDERS_PORT}))
    while True:
        yield listener.accept()[0].makefile("rw")
program = subprocess.Popen(
    ["/bin/sh", "-c", "/opt/h/share_client 0 layer@1000000; true"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
program.stdout.readline()
for stream in connected():
    for line in stream:
        program.stdin.write(line)
        program.stdin.flush()
        stream.write(program.stdout.readline())
        stream.flush()
"""


class Node:
    """One node of a cluster, this machine's, with the folder that everything of the test lies in."""

    def __init__(self, api: Kube, name: str, folder: Path, namespace: str) -> None:
        self.api, self.name, self.folder, self.namespace = api, name, folder, namespace
        self.settings = KubernetesSettings(
            name=namespace,
            namespace=namespace,
            namespaces=(namespace,),
            share_directory=str(folder / "run"),
        )

    def path(self, pod: str) -> str:
        return f"api/v1/namespaces/{self.namespace}/pods/{pod}"

    def start(self, pod: dict[str, Any]) -> str:
        """Start a pod and return its address, once it runs."""
        name = pod["metadata"]["name"]
        self.api.post(f"api/v1/namespaces/{self.namespace}/pods", pod)

        def address() -> str:
            status = self.api.get(self.path(name))["status"]
            assert status.get("phase") not in ("Failed", "Succeeded"), self.api.logs(self.namespace, name)
            return status.get("podIP", "") if status.get("phase") == "Running" else ""

        return wait_for(f"pod {name}", address, LIMIT_S)

    def sharer(self, name: str, share: Share | None, *, labelled: bool = True) -> dict[str, Any]:
        """A pod as pod_spec would make it of a replica with a share, whose program is the relay."""
        pod = plain_pod(name, self.namespace, self.name, RELAY, STUB_CLOCK="virtual")
        device = Device(device_id=DeviceId(f"{self.name}/0"), node_id=NodeId(self.name), index=0, kind="gpu")
        parts = share_parts(share or Share(request=0.1, limit=0.1), device, self.settings)
        (container,) = pod["spec"]["containers"]
        container["env"] += parts.environment
        for variable in container["env"]:
            if variable["name"] == "LD_LIBRARY_PATH":
                variable["value"] += ":/opt/h/stub"
        container["volumeMounts"] += [*parts.mounts, {"name": "h", "mountPath": "/opt/h", "readOnly": True}]
        pod["spec"]["volumes"] += [*parts.volumes, {"name": "h", "hostPath": {"path": str(self.folder / "bin")}}]
        pod["metadata"]["labels"] = {names.PLATFORM_LABEL: self.settings.name} if labelled else {}
        pod["metadata"]["annotations"] = {
            **(parts.annotations if share is not None else {}),
            names.WORKLOAD_ANNOTATION: f"w-{name}",
            names.REPLICA_ANNOTATION: f"{name}.1",
            names.DEVICE_ANNOTATION: f"{self.name}/0",
            names.DEVICE_INDEX_ANNOTATION: "0",
        }
        return pod

    def agent(self, port: int) -> dict[str, Any]:
        """The share agent's pod: as the DaemonSet makes it, but for this machine's Python and way to the API server."""
        pod = plain_pod("agent", self.namespace, self.name, "")
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        spec["hostPID"] = True
        # The lab's API server listens on this machine's loopback alone.
        spec["hostNetwork"] = True
        container["command"] = [PYTHON, "-m", "springtide.backends.kubernetes.share_agent.agent"]
        container["args"] = ["--settings", "/opt/h/settings.yaml", "--library", "/opt/h/library.so"]
        container["args"] += ["--host", "127.0.0.1", "--port", str(port)]
        container["env"] += [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "KUBECONFIG", "value": "/opt/h/kubeconfig"},
            {"name": "PATH", "value": "/opt/h:/usr/bin:/bin"},
        ]
        container["securityContext"] = {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["SYS_NICE"]},
        }
        container["volumeMounts"] += [
            {"name": "h", "mountPath": "/opt/h", "readOnly": True},
            {"name": "shares", "mountPath": self.settings.share_directory},
        ]
        spec["volumes"] += [
            {"name": "h", "hostPath": {"path": str(self.folder / "bin")}},
            {"name": "shares", "hostPath": {"path": self.settings.share_directory, "type": "DirectoryOrCreate"}},
        ]
        return pod

    def page(self, port: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)


class Sharer:
    """A sharer's program, by way of its pod."""

    def __init__(self, address: str) -> None:
        def connect() -> socket.socket | None:
            try:
                return socket.create_connection((address, ORDERS_PORT), timeout=LIMIT_S)
            except OSError:
                return None

        with wait_for("the relay", connect, LIMIT_S) as connection:
            # The socket itself is closed with the file.
            self.stream = connection.makefile("rw")

    def say(self, order: str) -> dict[str, int]:
        self.stream.write(order + "\n")
        self.stream.flush()
        line = self.stream.readline()
        assert line, "the program has ended"
        found: dict[str, int] = json.loads(line)
        return found

    def close(self) -> None:
        self.stream.close()


def self_contained(kubeconfig: Path) -> dict[str, Any]:
    """The same configuration with what it names in it, for a container that has none of those files."""
    config: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    for entry in (*(each["cluster"] for each in config["clusters"]), *(each["user"] for each in config["users"])):
        for name in ("certificate-authority", "client-certificate", "client-key"):
            if name in entry:
                entry[f"{name}-data"] = base64.b64encode(Path(entry.pop(name)).read_bytes()).decode()
    return config


@pytest.fixture(scope="module")
def node(machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    try:
        find_compiler()
        headers = find_headers()
    except BackendError as error:
        pytest.skip(f"the library cannot be compiled here: {error}")
    api, kubeconfig = machine.api, machine.kubeconfig
    folder = tmp_path_factory.mktemp("h")
    namespace = f"h-shares-{os.getpid()}"
    native = Native(folder / "native", headers)
    (folder / "bin").mkdir()
    for source, target in (
        (native.library, "library.so"),
        (native.program("share_client"), "share_client"),
    ):
        shutil.copy(source, folder / "bin" / target)
    (folder / "bin" / "kubeconfig").write_text(json.dumps(self_contained(kubeconfig)))
    shutil.copytree(native.stub_dir, folder / "bin" / "stub", symlinks=True)
    install_nvidia_smi(folder / "bin")
    for path in (folder, *folder.parents[:3]):
        # Pods come as nobody in particular.
        path.chmod(path.stat().st_mode | 0o755)
    found = Node(api, "127.0.0.1", folder, namespace)
    settings = {
        "name": namespace,
        "namespace": namespace,
        "namespaces": [namespace],
        "share_directory": found.settings.share_directory,
    }
    (folder / "bin" / "settings.yaml").write_text(json.dumps(settings))
    api.post("api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wait_for("the account", lambda: api.find(f"api/v1/namespaces/{namespace}/serviceaccounts/default"))
    try:
        yield found
    finally:
        for pod in api.pods(namespace):
            api.delete(found.path(pod["metadata"]["name"]), gracePeriodSeconds=0)
        api.delete(f"api/v1/namespaces/{namespace}")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_pods_share_a_gpu_and_each_is_held_to_its_own(node: Node, stack: ExitStack) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def sharing() -> dict[str, dict[str, Any]]:
        status, body = node.page(port, "/sharing")
        tenants = json.loads(body)["tenants"] if status == 200 else []
        return {tenant["workload_id"]: tenant for tenant in tenants}

    node.start(node.agent(port))
    wait_for("the agent", lambda: node.page(port, "/readyz")[0] == 200, LIMIT_S)
    assert node.page(port, "/livez")[0] == 200
    one, other, stranger = (
        stack.enter_context(closing(Sharer(node.start(pod))))
        for pod in (
            node.sharer("one", Share(request=0.2, limit=0.4, memory_mb=100)),
            node.sharer("other", Share(request=0.3, limit=0.6, memory_mb=200)),
            node.sharer("stranger", None),
        )
    )
    wait_for("both to be told", lambda: set(sharing()) == {"w-one", "w-other"}, LIMIT_S)
    # Whoever holds no share is counted by nobody, and not held.
    for each in (one, other, stranger):
        assert each.say("launch 20")["failed"] == 0
    wait_for("launches to be counted", lambda: all(t["num_launches"] == 20 for t in sharing().values()), LIMIT_S)
    # Memory: the limit is the pod's own, whichever of its processes allocates.
    assert one.say("alloc 90")["result"] == 0
    assert one.say("alloc 20")["result"] != 0
    assert other.say("alloc 190")["result"] == 0
    assert stranger.say("alloc 300")["result"] == 0
    wait_for(
        "memory to be told", lambda: [sharing()[f"w-{n}"]["memory_used_mb"] for n in ("one", "other")] == [90, 190]
    )
    assert sharing()["w-one"]["num_denied"] == 1

    # Another share of a living pod: one patch, as SetShare makes it, and what was refused fits.
    larger = Share(request=0.25, limit=0.5, memory_mb=150)
    node.api.patch(node.path("one"), {"metadata": {"annotations": {SHARE_ANNOTATION: share_text(larger)}}})
    wait_for("the other share", lambda: (sharing()["w-one"]["limit"], sharing()["w-one"]["memory_mb"]) == (0.5, 150))
    assert one.say("alloc 20")["result"] == 0
    # Nonsense instead of a share is told, and frees nobody.
    node.api.patch(node.path("other"), {"metadata": {"annotations": {SHARE_ANNOTATION: '{"request": 7}'}}})
    wait_for("the agent to say so", lambda: "is no share" in node.page(port, "/readyz")[1], LIMIT_S)
    assert sharing()["w-other"]["memory_mb"] == 200
    assert other.say("alloc 20")["result"] != 0
    node.api.patch(
        node.path("other"),
        {"metadata": {"annotations": {SHARE_ANNOTATION: share_text(Share(request=0.3, limit=0.6, memory_mb=200))}}},
    )
    wait_for("it to be well again", lambda: node.page(port, "/readyz")[0] == 200, LIMIT_S)

    # The daemon dies: another goes on with the same files, and the sharers need not even ask again.
    private = Path(node.settings.share_directory) / "private"
    before = json.loads((private / "gpu.json").read_text())
    os.kill(before["pid"], 9)
    wait_for("another daemon", lambda: json.loads((private / "gpu.json").read_text())["pid"] != before["pid"], LIMIT_S)
    wait_for("it to be told", lambda: set(sharing()) == {"w-one", "w-other"}, LIMIT_S)
    assert json.loads((private / "gpu.json").read_text())["num_adopted"] >= 1
    assert one.say("launch 5")["failed"] == 0
    wait_for("the count to go on", lambda: sharing()["w-one"]["num_launches"] == 25, LIMIT_S)
    metrics = node.page(port, "/metrics")[1]
    assert f'springtide_node_share_launches_total{{workload="w-one",replica="one.1@{node.namespace}"' in metrics

    # Sharers see a socket and the library, and not the daemon's own directory.
    assert (private.stat().st_mode & 0o777) == 0o700
    node.api.delete(node.path("one"), gracePeriodSeconds=0)
    wait_for("it to be forgotten", lambda: set(sharing()) == {"w-other"}, LIMIT_S)


def test_a_sharer_waits_for_a_node_that_can_hold_it(node: Node) -> None:
    pod = node.sharer("early", Share(request=0.2, limit=0.4))
    for volume in pod["spec"]["volumes"]:
        if volume["name"] == "springtide-shares":
            volume["hostPath"]["path"] = str(node.folder / "nowhere" / "public")
    node.api.post(f"api/v1/namespaces/{node.namespace}/pods", pod)

    def told() -> bool:
        events = node.api.items(f"api/v1/namespaces/{node.namespace}/events")
        return any(event["involvedObject"]["name"] == "early" and event["reason"] == "FailedMount" for event in events)

    wait_for("the kubelet to say why", told, LIMIT_S)
    assert node.api.get(node.path("early"))["status"]["phase"] == "Pending"
    node.api.delete(node.path("early"), gracePeriodSeconds=0)


SERVED = """
import json, subprocess
import springtide as st

@st.serve
class Served:
    def load(self):
        self.program = subprocess.Popen(
            ["/opt/h/share_client", "0", "layer@1000000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.program.stdout.readline()

    def predict(self, order: str) -> dict[str, int]:
        self.program.stdin.write(order + chr(10))
        self.program.stdin.flush()
        return json.loads(self.program.stdout.readline())
"""


def test_a_service_with_a_share_is_held_to_it_and_changes_it_without_a_pause(
    node: Node, machine: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The whole way: an object with a share, the policy, the pod, the agent, the daemon; and another share later."""
    pod = pod_settings()
    (worker,) = pod["overlay"]["containers"]
    for variable in worker["env"]:
        if variable["name"] == "LD_LIBRARY_PATH":
            variable["value"] += ":/opt/h/stub"
    worker["env"].append({"name": "STUB_CLOCK", "value": "virtual"})
    worker["volumeMounts"].append({"name": "h", "mountPath": "/opt/h", "readOnly": True})
    pod["overlay"]["volumes"].append({"name": "h", "hostPath": {"path": str(node.folder / "bin")}})
    namespace = f"{node.namespace}-whole"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"device_kind": "gpu", "share_directory": f"{node.settings.share_directory}-whole", "pod": pod}
    told = {"name": namespace, "namespace": namespace, "namespaces": [namespace], **settings}
    (node.folder / "bin" / "settings-whole.yaml").write_text(json.dumps(told))
    agent = node.agent(port)
    agent["metadata"]["name"] = "agent-whole"
    for volume in agent["spec"]["volumes"]:
        if volume["name"] == "shares":
            volume["hostPath"]["path"] = settings["share_directory"]
    (container,) = agent["spec"]["containers"]
    container["args"][1] = "/opt/h/settings-whole.yaml"
    container["volumeMounts"][-1]["mountPath"] = settings["share_directory"]

    def tenant() -> dict[str, Any]:
        status, body = node.page(port, "/sharing")
        tenants = json.loads(body)["tenants"] if status == 200 else []
        return tenants[0] if tenants else {}

    with serving_on(machine, tmp_path_factory.mktemp("whole"), namespace, **settings) as serving:
        serving.deploy("shared", SERVED, scale="1..1", share="0.2..0.4", deviceMemory="100MB")
        wait_for("its pod", lambda: serving.pods("shared"), 90.0)
        # Nobody can hold it yet: the pod waits for its node's daemon.
        node.start(agent)
        (found,) = wait_for("one that is ready", lambda: serving.ready("shared"), 90.0)
        assert RESOURCE not in found["spec"]["containers"][0]["resources"].get("limits", {})
        wait_for("it to be held", lambda: tenant().get("memory_mb") == 100, LIMIT_S)
        assert (tenant()["request"], tenant()["limit"]) == (0.2, 0.4)
        answer = serving.ask_with("shared", {"order": "alloc 90"})
        assert (answer.status, answer.body["outputs"]["result"]) == (200, 0)
        assert serving.ask_with("shared", {"order": "alloc 20"}).body["outputs"]["result"] != 0
        assert answer.headers["x-springtide"].endswith("share=0.2..0.4")
        wait_for("the refusal to be told", lambda: tenant()["num_denied"] == 1, LIMIT_S)

        serving.change("shared", share="0.3..0.6", deviceMemory="150MB")
        wait_for("the other share", lambda: (tenant()["limit"], tenant()["memory_mb"]) == (0.6, 150), LIMIT_S)
        assert serving.ask_with("shared", {"order": "alloc 20"}).body["outputs"]["result"] == 0
        (same,) = serving.pods("shared")
        assert same["metadata"]["uid"] == found["metadata"]["uid"], "no pod was started for it"
        sharing = serving.platform.view("/v1/sharing")
        assert "cuda-preload" in json.dumps(sharing)
        serving.remove("shared")
    node.api.delete(node.path("agent-whole"), gracePeriodSeconds=0)
