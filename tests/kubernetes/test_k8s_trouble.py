"""What people are told when a pod does not come up or does not go well, on real kubelets."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.kube_http import GROUP, wait_for
from kits.kubernetes.lab.pods import pod_settings
from kits.kubernetes.live_cluster import CREDENTIALS, LivePlatform, platform_on
from kits.kubernetes.slow_registry import slow_registry
from springtide.core.errors import ObjectMissing
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.workloads.store import open_workload_store

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
LONG_S = 240.0
WRONG = """
def fit(ctx):
    raise ValueError("the data set is not where it was")
"""
GREEDY = """
def fit(ctx):
    held = []
    while True:
        held.append(bytearray(b"x" * (8 << 20)))
"""
SLEEPY = """
import time

def fit(ctx):
    time.sleep(1000)
"""
STEADY = """
import time
import torch

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    print("it trains", flush=True)
    for batch in ctx.batches((torch.ones(64, 4), torch.ones(64, 1))):
        time.sleep(0.02)
        ctx.step(((model(batch.x) - batch.y) ** 2).mean())
"""


@pytest.fixture(scope="module")
def platform(node_lab, tmp_path_factory):
    pod = {**pod_settings(), "memory": "900Mi", "image_pull_policy": "IfNotPresent"}
    with platform_on(node_lab, tmp_path_factory.mktemp("trouble"), "trouble", policy="fifo", pod=pod) as live:
        live.start()
        yield live


def submit(
    platform: LivePlatform,
    name: str,
    text: str,
    *,
    epochs: int = 1,
    globalBatch: int = 32,
    startTimeout: str = "30m",
    **container: Any,
) -> None:
    source = {"function": "fit", "files": {"job.py": text}}
    spec = {"source": source, "workers": 1, "retries": 0, "epochs": epochs, "globalBatch": globalBatch}
    spec["startTimeout"] = startTimeout
    platform.api.apply(
        {
            "apiVersion": "springtide.dev/v1alpha1",
            "kind": "TrainingFunction",
            "metadata": {"name": name, "namespace": platform.namespace},
            "spec": {**spec, **({"container": container} if container else {})},
        }
    )


def status_of(platform: LivePlatform, name: str) -> dict[str, Any]:
    return platform.find("trainingfunctions", name).get("status", {})


def ended(platform: LivePlatform, name: str) -> dict[str, Any]:
    def arrived() -> dict[str, Any] | None:
        status = status_of(platform, name)
        return status if status.get("state") in ("FAILED", "SUCCEEDED", "CANCELLED") else None

    try:
        return wait_for(f"the end of {name}", arrived, LONG_S)
    except AssertionError:
        print(platform.told())
        raise


def test_an_image_that_is_not_there(platform):
    submit(platform, "no-image", SLEEPY, image="localhost/nothing:1")

    def reason() -> str:
        pods = status_of(platform, "no-image").get("pods", [])
        return next((pod.get("reason", "") for pod in pods if "localhost/nothing:1" in pod.get("reason", "")), "")

    told = wait_for("the reason", reason, LONG_S)
    assert "image" in told.lower()
    assert status_of(platform, "no-image")["state"] == "STARTING"
    gone(platform, "no-image")


def test_the_time_of_a_pull_is_none_of_the_jobs_start(platform, node_lab):
    image = node_lab.folder / "img" / "busybox.tar"
    # The object of an earlier attempt stays on the platform.
    job = f"large-{secrets.token_hex(3)}"
    with slow_registry(image, "large") as (name, is_let_go):
        submit(platform, job, STEADY, startTimeout="30s", image=name)
        workload_id = platform.workload_id(job)
        began_s = time.monotonic()

        def lines() -> list[str]:
            return platform.view(f"/v1/workloads/{workload_id}/why")["evidence"]

        (line,) = wait_for("the pull", lambda: [line for line in lines() if "pulls its image" in line], LONG_S)
        assert "is starting for" in line
        assert line.endswith(f'UTC: Pulling image "{name}"'), line
        # Longer than it may take to start, and than control planes look at it.
        time.sleep(max(0.0, began_s + 32.0 - time.monotonic()))
        assert status_of(platform, job)["state"] == "STARTING"
        assert status_of(platform, job).get("restarts", 0) == 0
        is_let_go.set()
        status = ended(platform, job)
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 0), {
        key: str(status.get(key)) for key in ("state", "reason", "message", "restarts")
    }
    told = [entry["text"] for entry in platform.view(f"/v1/workloads/{workload_id}/why")["history"]]
    assert any("cannot begin yet: pulls its image since" in text for text in told), told
    # A worker that is ready at the next look, a second later, is told as warm only.
    assert any(text.endswith((".0 has begun", ".0 is warm")) for text in told), told


def test_code_that_fails_says_why(platform):
    submit(platform, "wrong", WRONG)
    status = ended(platform, "wrong")
    assert status["state"] == "FAILED"
    assert "the data set is not where it was" in status["reason"]


def test_a_container_that_wants_more_memory_than_it_may_have(platform):
    submit(platform, "greedy", GREEDY, resources={"memory": "600Mi"})
    status = ended(platform, "greedy")
    assert status["state"] == "FAILED"
    assert "memory limit" in status["reason"]
    assert "600Mi" in status["reason"]


def test_a_deleted_object_takes_its_pods_along(platform):
    submit(platform, "sleepy", SLEEPY)
    workload_id = platform.workload_id("sleepy")
    (pod,) = wait_for("its pod to run", lambda: list(platform.running(workload_id).values()), LONG_S)
    assert platform.pids_of(pod)
    gone(platform, "sleepy")
    wait_for("its processes to be gone", lambda: not platform.pids_of(pod), LONG_S)


def test_what_was_written_while_the_store_was_away_is_there_when_it_is_back(platform, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    submit(platform, "cut-off", STEADY, epochs=100_000, globalBatch=8)
    workload_id = platform.workload_id("cut-off")

    def step() -> int:
        return int(status_of(platform, "cut-off").get("step", 0))

    wait_for("its first steps", lambda: step() > 0, LONG_S)
    ((replica_id, pod),) = platform.running(workload_id).items()
    with held(platform.store.pid):
        before = step()
        wait_for("more steps", lambda: step() >= before + 100, LONG_S)
        os.kill(worker_of(platform.pids_of(pod)), signal.SIGKILL)
        status = ended(platform, "cut-off")
        assert status["state"] == "FAILED"
        told = step()
    store = open_workload_store(platform.store_url, WorkloadId(workload_id))

    def output() -> bytes | None:
        with contextlib.suppress(ObjectMissing):
            return store.read_log(ReplicaId(replica_id))
        return None

    try:
        assert b"it trains" in (wait_for("its output", output, LONG_S) or b"")
        steps = wait_for("its last steps", lambda: len(s := store.steps()) >= told and s, LONG_S)
        assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
        assert "springtide-steps" not in platform.call(f"/v1/jobs/{workload_id}/logs")[1]
    finally:
        store.close()


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Meanwhile the process answers nobody."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def worker_of(pids: tuple[int, ...]) -> int:
    """Of a container's processes the one that trains: the first child of the first one."""
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    (keeper,) = [pid for pid, parent in parents.items() if parent not in parents]
    return min(pid for pid, parent in parents.items() if parent == keeper)


def gone(platform: LivePlatform, name: str) -> None:
    workload_id = platform.workload_id(name)
    platform.api.delete(f"{GROUP}/namespaces/{platform.namespace}/trainingfunctions/{name}")
    wait_for("its pods to be gone", lambda: not platform.pods_of(workload_id), LONG_S)
