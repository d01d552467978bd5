"""What pods request, on two real kubelets of two processors each: what fits runs, what does not waits and says why."""

from __future__ import annotations

from typing import Any

import pytest

from kits.kubernetes.kube_http import GROUP, wait_for
from kits.kubernetes.lab.nodes import NODES
from kits.kubernetes.live_cluster import LivePlatform, platform_on

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
LONG_S = 120.0
STEADY = """
import time
import torch

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    for batch in ctx.batches((torch.ones(64, 4), torch.ones(64, 1))):
        time.sleep(0.02)
        ctx.step(((model(batch.x) - batch.y) ** 2).mean())
"""


@pytest.fixture(scope="module")
def platform(node_lab, tmp_path_factory):
    with platform_on(node_lab, tmp_path_factory.mktemp("room"), "room") as live:
        live.start()
        yield live


def submit(platform: LivePlatform, name: str, cpu: str, workers: str = "1..4") -> None:
    source = {"function": "fit", "files": {"job.py": STEADY}}
    resources = {"resources": {"cpu": cpu}}
    spec = {"source": source, "workers": workers, "retries": 0, "epochs": 100_000, "globalBatch": 8}
    platform.api.apply(
        {
            "apiVersion": "springtide.dev/v1alpha1",
            "kind": "TrainingFunction",
            "metadata": {"name": name, "namespace": platform.namespace},
            "spec": {**spec, "container": resources},
        }
    )


def status_of(platform: LivePlatform, name: str) -> dict[str, Any]:
    return platform.find("trainingfunctions", name).get("status", {})


def remove(platform: LivePlatform, *names: str) -> None:
    for name in names:
        platform.api.delete(f"{GROUP}/namespaces/{platform.namespace}/trainingfunctions/{name}")
    wait_for("all pods to be gone", lambda: not platform.api.pods(platform.namespace), LONG_S)


def test_one_worker_on_each_node_of_two_devices_and_two_processors(platform):
    submit(platform, "wide", "1500m")
    workload_id = platform.workload_id("wide")
    wait_for("a worker on each node", lambda: len(platform.running(workload_id)) == len(NODES), LONG_S)
    wait_for("both to train", lambda: platform.view(f"/v1/jobs/{workload_id}")["num_workers"] == len(NODES))
    pods = platform.api.pods(platform.namespace)
    assert sorted(pod["spec"]["nodeName"] for pod in pods) == sorted(NODES), "and no other pod was ever tried"
    submit(platform, "late", "1")
    late = platform.workload_id("late")
    wait_for("one of them to give way", lambda: platform.running(late), LONG_S)
    ((_, pod),) = platform.running(workload_id).items()
    assert pod["spec"]["nodeName"] != next(iter(platform.running(late).values()))["spec"]["nodeName"]
    told = [platform.view(f"/v1/jobs/{each}") for each in (workload_id, late)]
    assert [job["num_restarts"] for job in told] == [0, 0]
    remove(platform, "late", "wide")


def test_what_no_node_can_take_waits_says_so_and_never_fails(platform):
    submit(platform, "huge", "16")
    told = wait_for("why it waits", lambda: status_of(platform, "huge").get("reason"))
    assert told == "asks for 16 CPUs per worker; the largest node has 2"
    submit(platform, "small", "500m", workers="1")
    small = platform.workload_id("small")
    wait_for("another job to run meanwhile", lambda: platform.running(small), LONG_S)
    assert status_of(platform, "huge")["state"] == "PENDING"
    remove(platform, "huge", "small")


def test_a_pod_of_others_takes_room_and_gives_it_back(platform):
    container = {
        "name": "busy",
        "image": "localhost/busybox:1",
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "1500m"}},
    }
    for number, node in enumerate(NODES):
        platform.api.post(
            "api/v1/namespaces/default/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"busy-{number}", "namespace": "default"},
                "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]},
            },
        )
    submit(platform, "patient", "1", workers="1")
    # Where the platform did not know yet, a kubelet has refused the first pods, which are no crashes.
    why = "asks for 1 CPU and 900 MiB of memory per worker; pods of others leave at most 0.5 CPUs and "
    wait_for("why it waits", lambda: str(status_of(platform, "patient").get("reason")).startswith(why))
    assert status_of(platform, "patient")["state"] == "PENDING"
    platform.api.delete("api/v1/namespaces/default/pods/busy-1")
    workload_id = platform.workload_id("patient")
    (pod,) = wait_for("room", lambda: list(platform.running(workload_id).values()), LONG_S)
    assert pod["spec"]["nodeName"] == NODES[1]
    platform.api.delete("api/v1/namespaces/default/pods/busy-0")
    remove(platform, "patient")
