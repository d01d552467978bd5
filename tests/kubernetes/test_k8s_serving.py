"""Inference in pods: a real kubelet, the whole platform as a process, requests over its gateway to pods' addresses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.nodes import NodeLab
from kits.kubernetes.serving_kit import LIMIT_S, RESOURCE, Answer, Serving, ThisMachine, serving_on
from kits.runtime.tiny_wheels import make_wheel
from springtide.cli.main import cli

pytestmark = pytest.mark.kubernetes

SOURCE = """
import os, time
import springtide as st

@st.serve
class Served:
    def predict(self, values: list[int], nap_s: float = 0.0) -> list[int]:
        time.sleep(nap_s)
        return [2 * value for value in values]
"""


@pytest.fixture(scope="module")
def serving(machine: ThisMachine | NodeLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_on(machine, tmp_path_factory.mktemp("serving"), f"h-serve-{os.getpid()}") as found:
        yield found


def test_a_service_at_zero_wakes_answers_all_who_waited_and_sleeps_again(serving: Serving) -> None:
    serving.deploy("sleeper", SOURCE, scale="0..1", idle="3s")
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
    assert RESOURCE in pod["spec"]["containers"][0]["resources"]["limits"]
    wait_for("it to sleep", lambda: not serving.pods("sleeper"), LIMIT_S)
    again = serving.ask("sleeper", [21])
    assert (again.status, again.body) == (200, {"outputs": [42]})
    assert all(one["metadata"]["uid"] != pod["metadata"]["uid"] for one in serving.pods("sleeper"))
    serving.remove("sleeper")


def test_a_deleted_pod_drains_and_nobody_loses_a_request(serving: Serving) -> None:
    serving.deploy("pair", SOURCE, scale="2..2")
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
    serving.deploy("victim", SOURCE, scale="1..1")
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
    serving.deploy("stuck", SOURCE, scale="0..1", container={"image": "localhost/there-is-no-such-image:1"})
    wait_for("it to be known", lambda: serving.ask("stuck", [1], timeout="10ms").status == 503, LIMIT_S)

    def told() -> bool:
        answer = serving.ask("stuck", [1], timeout="2s")
        assert answer.status == 503
        assert answer.headers["retry-after"]
        return "ErrImageNeverPull" in answer.body["error"]["message"]

    wait_for("the reason", told, LIMIT_S)
    serving.withdraw("stuck")
    # A kubelet of this age takes all of the grace to end a pod whose container never started.
    wait_for("its pod to be asked to go", lambda: all(is_leaving(pod) for pod in serving.pods("stuck")), LIMIT_S)
    for pod in serving.pods("stuck"):
        path = f"api/v1/namespaces/{serving.platform.namespace}/pods/{pod['metadata']['name']}"
        serving.platform.api.delete(path, gracePeriodSeconds=0)


def test_the_gateway_goes_on_with_the_same_pods_after_the_control_plane_was_killed(serving: Serving) -> None:
    serving.deploy("steady", SOURCE, scale="1..1")
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


def test_deploy_says_ready_once_the_new_version_answers(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(serving.platform.lab.kubeconfig))
    file = tmp_path / "rolls.py"
    slow = "    def load(self):\n        time.sleep(2.0)\n"
    for factor in (2, 3):
        file.write_text(SOURCE.replace("2 * value", f"{factor} * value") + slow)
        options = ["--on", "k8s", "--namespace", serving.platform.namespace, "--name", "rolls", "--scale", "1"]
        result = CliRunner().invoke(cli, ["deploy", f"{file}:Served", *options])
        assert result.exit_code == 0, result.output
        assert "rolls READY: 1 of 1 replicas ready\n" in result.output
        assert serving.ask("rolls", [1]).body == {"outputs": [factor]}
    assert "revision 1 answers until revision 2 is ready" in result.output
    serving.remove("rolls")


BESIDE = """
import os
import springtide as st
from pkg import factor

try:
    import tiny
except ModuleNotFoundError:
    # The file is also imported where it is deployed.
    tiny = None

@st.serve
class Served:
    def load(self):
        self.plus = int(open("data/plus.bin", "rb").read().strip(b"\\xff"))
        open("data/plus.bin", "wb").write(b"this replica's own")

    def predict(self, values: list[int]) -> list[int]:
        assert __file__ == os.path.abspath("served.py")
        return [factor.FACTOR * value + self.plus + int(tiny.VERSION) for value in values]
"""


def test_folder_and_packages_travel_to_pods_also_to_those_that_come_later(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(serving.platform.lab.kubeconfig))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, wheel = tmp_path / "project", make_wheel(tmp_path, "tiny", "100")
    for name, data in {
        "served.py": BESIDE.encode(),
        "pkg/factor.py": b"FACTOR = 2\n",
        "data/plus.bin": b"\xff10",
        "data/large.bin": os.urandom(1_000_000),
        f"wheels/{wheel.name}": wheel.read_bytes(),
        "requirements.txt": b"--no-index\n--find-links wheels\ntiny\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    namespace = serving.platform.namespace
    options = ["--on", "k8s", "--namespace", namespace, "--name", "beside", "--scale", "1"]
    options += ["--requirements", str(folder / "requirements.txt")]

    def deploy() -> set[str]:
        """Deploy it; the ConfigMaps of its folder."""
        result = CliRunner().invoke(cli, ["deploy", f"{folder / 'served.py'}", *options])
        assert result.exit_code == 0, result.output
        assert f"{folder} travels with it: 6 files, " in result.output
        found = serving.platform.api.items(f"api/v1/namespaces/{namespace}/configmaps")
        return {each["metadata"]["name"] for each in found if each["metadata"]["name"].startswith("beside-folder-")}

    first = deploy()
    assert len(first) == 2
    assert serving.ask("beside", [3]).body == {"outputs": [116]}
    assert deploy() == first
    (pod,) = wait_for("one that is ready", lambda: serving.ready("beside"), LIMIT_S)
    # Of what the control plane had in its own directory nothing is needed: another one has the store alone.
    serving.platform.kill()
    for path in (serving.platform.state_dir / "contents").rglob("?" * 64):
        path.unlink()
    serving.platform.start()
    serving.wait_leading()
    assert serving.ask("beside", [3]).body == {"outputs": [116]}
    (same,) = serving.ready("beside")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    serving.platform.api.delete(f"api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", gracePeriodSeconds=0)
    wait_for("another pod", lambda: [one for one in serving.ready("beside") if one != same], LIMIT_S)
    assert serving.ask("beside", [3]).body == {"outputs": [116]}

    (folder / "pkg/factor.py").write_text("FACTOR = 3\n")
    second = deploy()
    assert (len(second), first & second) == (2, set())
    assert serving.ask("beside", [3]).body == {"outputs": [119]}
    serving.remove("beside")
    gone = [f"api/v1/namespaces/{namespace}/configmaps/{name}" for name in second]
    wait_for("its ConfigMaps to go with it", lambda: not any(map(serving.platform.api.find, gone)), LIMIT_S)


def is_leaving(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def quota_of(pid: int) -> float | None:
    """How many processors the kernel lets the control group of a process use; None where it sets no limit."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            group = Path("/sys/fs/cgroup/cpu" + path)
            quota = int((group / "cpu.cfs_quota_us").read_text())
            return None if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
        if not controllers and (maximum := Path(f"/sys/fs/cgroup{path}/cpu.max")).exists():
            quota_text, period = maximum.read_text().split()
            return None if quota_text == "max" else int(quota_text) / int(period)
    return None


def test_a_share_of_a_cpu_device_is_what_the_kernel_lets_its_pod_use(serving: Serving) -> None:
    serving.deploy("part", SOURCE, scale="1..1", share="0.5..0.8")
    (pod,) = wait_for("one that is ready", lambda: serving.ready("part"), LIMIT_S)
    resources = pod["spec"]["containers"][0]["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == ("500m", "800m")
    assert RESOURCE not in resources["limits"], "a part of a device is none that the kubelet could count"
    pids = serving.platform.lab.container_pids(pod["metadata"]["uid"])
    assert {quota_of(pid) for pid in pids} == {0.8}
    answer = serving.ask("part", [3])
    assert (answer.status, answer.body) == (200, {"outputs": [6]})
    assert answer.headers["x-springtide"].endswith("share=0.5..0.8")
    told = serving.platform.view("/v1/sharing")
    assert told["mechanism"] == "pod-limits"
    assert [tenant["workload_id"] for tenant in told["tenants"]] == ["part"]
    serving.remove("part")
