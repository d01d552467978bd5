"""Inference in pods: a real kubelet, the whole platform as a process, requests over its gateway to pods' addresses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kube_http import GROUP, Kube, wait_for
from lab import missing_lab, running
from lab_nodes import DEVICE_RESOURCE, NodeLab, missing_nodes
from lab_pods import IMAGE
from live_cluster import BUCKET, LivePlatform

from springtide.backends.kubernetes.custom_resources import custom_resource_definitions
from springtide.backends.kubernetes.settings import NODE_LABEL
from springtide.testing.servers import running_s3

pytestmark = pytest.mark.kubernetes

LIMIT_S = 90.0
SOURCE = """
import os, time
import springtide as st

@st.serve
class Double:
    def predict(self, values: list[int], nap_s: float = 0.0) -> list[int]:
        time.sleep(nap_s)
        return [2 * value for value in values]
"""


class ThisMachine:
    """The one node of a cluster that KUBECONFIG names: this machine."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.api = Kube(kubeconfig)
        self.host = ""

    def find_host(self, namespace: str) -> None:
        """The address at which pods reach this machine: the one it reaches a pod from."""
        container = {"name": "where", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"]}
        (node,) = (node["metadata"]["name"] for node in self.api.items("api/v1/nodes"))
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "where", "namespace": namespace},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]},
        }
        self.api.post(f"api/v1/namespaces/{namespace}/pods", pod)
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

    def deploy(self, name: str, **spec: Any) -> None:
        body = {
            "apiVersion": "springtide.dev/v1alpha1",
            "kind": "InferenceFunction",
            "metadata": {"name": name, "namespace": self.platform.namespace},
            "spec": {"source": {"class": "Double", "files": {"serve.py": SOURCE}}, "grace": "10s", **spec},
        }
        self.platform.api.post(f"{GROUP}/namespaces/{self.platform.namespace}/inferencefunctions", body)

    def remove(self, name: str) -> None:
        self.platform.api.delete(f"{GROUP}/namespaces/{self.platform.namespace}/inferencefunctions/{name}")
        wait_for("its pods to be gone", lambda: not self.pods(name), LIMIT_S)

    def ask(self, name: str, values: list[int], *, timeout: str = "80s", **more: float) -> Answer:
        request = urllib.request.Request(
            f"http://{self.platform.lab.host}:{self.platform.port}/f/{name}",
            data=json.dumps({"values": values, **more}).encode(),
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
        return self._pool.submit(self.ask, name, values, **more)

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


@pytest.fixture(scope="module")
def node() -> Iterator[ThisMachine | NodeLab]:
    if named := os.environ.get("KUBECONFIG"):
        machine = ThisMachine(Path(named))
        if [node["metadata"]["name"] for node in machine.api.items("api/v1/nodes")] != ["127.0.0.1"]:
            pytest.skip(
                f"{named} is no cluster whose only node is this machine: its pods could not reach this platform"
            )
        yield machine
        return
    if why := missing_lab() or missing_nodes():
        pytest.skip(why)
    with running(NodeLab()) as lab:
        assert isinstance(lab, NodeLab)
        lab.offer("127.0.0.1", 4, {NODE_LABEL: "true"})
        yield lab


@pytest.fixture(scope="module")
def serving(node: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    namespace = f"h-serve-{os.getpid()}"
    api = node.api
    for definition in custom_resource_definitions():
        api.apply(definition)
    api.post("api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wait_for("the account", lambda: api.find(f"api/v1/namespaces/{namespace}/serviceaccounts/default"))
    try:
        if isinstance(node, ThisMachine):
            node.find_host(namespace)
        with running_s3(buckets=(BUCKET,), host=node.host) as store:
            platform = LivePlatform(node, tmp_path_factory.mktemp("serving"), namespace, store)
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


def test_a_service_at_zero_wakes_answers_all_who_waited_and_sleeps_again(serving: Serving) -> None:
    serving.deploy("sleeper", scale="0..1", idle="3s")
    wait_for("it to be known", lambda: serving.ask("sleeper", [1], timeout="10ms").status == 503, LIMIT_S)
    impatient = serving.ask("sleeper", [1], timeout="300ms")
    assert impatient.status == 503
    assert int(impatient.headers["retry-after"]) >= 1
    assert "no replica of 'sleeper' became ready" in impatient.body["error"]["message"]
    patient = [serving.begin("sleeper", [number]) for number in range(20)]
    answers = [request.result(LIMIT_S) for request in patient]
    assert [(answer.status, answer.body) for answer in answers] == [(200, {"outputs": [2 * n]}) for n in range(20)]
    assert all("cold_start=0ms" not in answer.headers["x-springtide"] for answer in answers)
    (pod,) = serving.pods("sleeper")
    assert DEVICE_RESOURCE in pod["spec"]["containers"][0]["resources"]["limits"]
    wait_for("it to sleep", lambda: not serving.pods("sleeper"), LIMIT_S)
    again = serving.ask("sleeper", [21])
    assert (again.status, again.body) == (200, {"outputs": [42]})
    assert all(one["metadata"]["uid"] != pod["metadata"]["uid"] for one in serving.pods("sleeper"))
    serving.remove("sleeper")


def test_a_deleted_pod_drains_and_nobody_loses_a_request(serving: Serving) -> None:
    serving.deploy("pair", scale="2..2")
    wait_for("two that the kubelet finds ready", lambda: len(serving.ready("pair")) == 2, LIMIT_S)
    before = {pod["metadata"]["annotations"]["springtide.dev/replica-id"]: pod for pod in serving.ready("pair")}
    answers: list[Answer] = []
    is_over = threading.Event()

    def keep_asking() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            answer = serving.ask("pair", [number])
            answers.append(answer)
            assert answer.body == {"outputs": [2 * number]}, answer
            time.sleep(0.02)

    askers = [serving._pool.submit(keep_asking) for _ in range(3)]
    held = serving.begin("pair", [1000], nap_s=4.0)
    wait_for("some answers", lambda: len(answers) > 20, LIMIT_S)
    # Which of the two has it shows when it answers; both are asked to go, one after the other.
    for replica_id, pod in sorted(before.items()):
        path = f"api/v1/namespaces/{serving.platform.namespace}/pods/{pod['metadata']['name']}"
        serving.platform.api.delete(path)

        def is_replaced(replica_id: str = replica_id) -> bool:
            names = {one["metadata"]["annotations"]["springtide.dev/replica-id"] for one in serving.ready("pair")}
            return replica_id not in names and len(names) == 2

        wait_for("another in its place", is_replaced, LIMIT_S)
    is_over.set()
    for asker in askers:
        asker.result(LIMIT_S)
    napped = held.result(LIMIT_S)
    assert (napped.status, napped.body) == (200, {"outputs": [2000]})
    # It was answered by the very pod that was asked to go while it worked on it: it drained.
    assert napped.headers["x-springtide"].split("replica=")[1].split()[0] in before
    assert {answer.status for answer in answers} == {200}
    assert len(answers) > 100
    serving.remove("pair")


def test_a_killed_replica_is_replaced_and_its_request_asked_again(serving: Serving) -> None:
    serving.deploy("victim", scale="1..1")
    (pod,) = wait_for("one that is ready", lambda: serving.ready("victim"), LIMIT_S)
    held = serving.begin("victim", [5], nap_s=1.5)
    replica = serving.platform.lab.container_pids(pod["metadata"]["uid"])[-1]
    time.sleep(0.5)
    os.kill(replica, signal.SIGKILL)
    answer = held.result(LIMIT_S)
    assert (answer.status, answer.body) == (200, {"outputs": [10]})
    (other,) = wait_for("another", lambda: serving.ready("victim"), LIMIT_S)
    assert other["metadata"]["uid"] != pod["metadata"]["uid"]
    serving.remove("victim")


def test_a_pod_that_cannot_start_is_named_to_who_waits(serving: Serving) -> None:
    serving.deploy("stuck", scale="0..1", container={"image": "localhost/there-is-no-such-image:1"})
    wait_for("it to be known", lambda: serving.ask("stuck", [1], timeout="10ms").status == 503, LIMIT_S)

    def told() -> bool:
        answer = serving.ask("stuck", [1], timeout="2s")
        assert answer.status == 503
        assert answer.headers["retry-after"]
        return "ErrImageNeverPull" in answer.body["error"]["message"]

    wait_for("the reason", told, LIMIT_S)
    serving.remove("stuck")


def test_the_gateway_goes_on_with_the_same_pods_after_the_control_plane_was_killed(serving: Serving) -> None:
    serving.deploy("steady", scale="1..1")
    (pod,) = wait_for("one that is ready", lambda: serving.ready("steady"), LIMIT_S)
    assert serving.ask("steady", [3]).body == {"outputs": [6]}
    serving.platform.kill()
    serving.platform.start()
    serving.wait_leading()
    answer = serving.ask("steady", [4])
    assert (answer.status, answer.body) == (200, {"outputs": [8]})
    assert "cold_start=0ms" in answer.headers["x-springtide"] or answer.headers["x-springtide"]
    (same,) = serving.pods("steady")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    serving.remove("steady")
