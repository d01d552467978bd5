"""What people are told when a pod does not come up or does not go well, on real kubelets."""

from __future__ import annotations

from typing import Any

import pytest
from kube_http import GROUP, wait_for
from live_cluster import LivePlatform, platform_on

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


@pytest.fixture(scope="module")
def platform(node_lab, tmp_path_factory):
    with platform_on(node_lab, tmp_path_factory.mktemp("trouble"), "trouble", policy="fifo") as live:
        live.start()
        yield live


def submit(platform: LivePlatform, name: str, text: str, **container: Any) -> None:
    spec = {"source": {"function": "fit", "files": {"job.py": text}}, "workers": 1, "retries": 0}
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


def gone(platform: LivePlatform, name: str) -> None:
    workload_id = platform.workload_id(name)
    platform.api.delete(f"{GROUP}/namespaces/{platform.namespace}/trainingfunctions/{name}")
    wait_for("its pods to be gone", lambda: not platform.pods_of(workload_id), LONG_S)
