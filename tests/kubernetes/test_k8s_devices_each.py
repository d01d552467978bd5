"""Pods whose worker holds two devices: what they request and hold, who adopts them, and what becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kube_http import GROUP, wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.lab.nodes import DEVICE_RESOURCE, NODES
from kits.kubernetes.live_cluster import CREDENTIALS, LivePlatform, platform_on
from kits.kubernetes.paced_job import TINY, Pace, apply, each_step_once, paced_function
from kits.kubernetes.pod_platform import RESOURCE, PodPlatform
from springtide.backends.kubernetes.pods.reading import devices_in
from springtide.core.actions import StartReplica
from springtide.core.events import JobResized, ReplicaLost, ReplicaReady
from springtide.core.ports import Standing

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1200)]
NUM_EPOCHS, SHARD_S, LONG_S = 60, 0.2, 300.0
SEES_BOTH = TINY.replace("    torch.manual_seed(7)\n", "    assert len(ctx.devices) == 2\n    torch.manual_seed(7)\n")


# --- with kubelets that are played -----------------------------------------------------------------------------------


@pytest.fixture
def played(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[PodPlatform]:
    with ApiProxy(cluster.kubeconfig) as proxy:
        played = PodPlatform(tmp_path / "state", cluster.api, proxy, namespace)
        with played.kubelet:
            played.open()
            try:
                yield played
            finally:
                played.close()


def start_wide(played: PodPlatform, number: int = 0) -> StartReplica:
    """Start a replica on both devices of the first node."""
    job = played.job(devices_each=2)
    action = StartReplica(
        workload=job,
        replica_id=f"job.{number}",
        device_id=played.device(1),
        more_devices=(played.device(0),),
        generation=1,
    )
    played.executor.start(action)
    return action


def test_a_pod_holds_both_devices_until_it_is_gone_and_is_adopted_with_both(played: PodPlatform) -> None:
    action = start_wide(played)
    played.until(ReplicaReady)
    node, both = played.kubelet.nodes[0], {played.device(0), played.device(1)}
    pod = played.kubelet.pods()["job.0"]
    assert pod["spec"]["containers"][0]["resources"]["requests"][RESOURCE] == "2"
    assert devices_in(pod["metadata"]["annotations"]) == (played.device(1), played.device(0))
    played.resize(1, 0)
    played.until(JobResized)

    played.crash()
    played.events.clear()
    executor = played.open()
    assert executor._machines.held(node) == both, "also before it is adopted"
    executor.recover(Standing(replicas=(action,), generations={"job": 1}))
    played.wait_for("the adoption", lambda: executor.counts().get("adopted") == 1)
    played.wait_for("its heartbeats", lambda: executor._machines.held(node) == both)

    played.start(7, device=0, job_id="other")
    played.settle(1.0)
    (waiting,) = [pod for pod in executor.status().pods if pod.workload_id == "other"]
    assert waiting.reason.startswith(f"{played.device(0)} is held by pod job-0 until that is gone")
    played.kubelet.die("job.0", 137)
    assert played.until(ReplicaLost).replica_id == "job.0"
    played.until(ReplicaReady, lambda event: event.replica_id == "other.7")

    start_wide(played, 1)
    played.settle(1.0)
    assert played.reason_of(1).startswith(f"{played.device(0)} is held by pod other-7"), "its further device is taken"
    assert len(played.kubelet.uids["job.0"]) == 1


# --- with real ones --------------------------------------------------------------------------------------------------


@pytest.fixture
def pace(node_lab: Any) -> Iterator[Pace]:
    pace = Pace(node_lab.host, SHARD_S)
    yield pace
    pace.close()


@pytest.fixture
def platform(node_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePlatform]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with platform_on(node_lab, tmp_path / "platform", "wide", devices=3, policy="springtide") as live:
        live.start()
        yield live


def wide_function(platform: LivePlatform, name: str, pace: Pace, gpu: int, workers: int | str) -> dict[str, Any]:
    given = paced_function(name, platform.namespace, pace.url, NUM_EPOCHS)
    given["spec"] |= {"gpu": gpu, "workers": workers}
    given["spec"]["source"]["files"] = {"job.py": SEES_BOTH}
    return given


def test_a_job_of_two_devices_each_grows_and_outlives_its_pods_and_its_control_plane(
    platform: LivePlatform, pace: Pace
) -> None:
    """Two nodes of three devices: each takes one worker of two, and a job of four each waits and says why."""
    apply(
        platform.lab.kubeconfig,
        wide_function(platform, "wide", pace, 2, 1),
        wide_function(platform, "huge", pace, 4, 1),
    )
    job_id = platform.workload_id("wide")

    def job() -> dict[str, Any]:
        found: dict[str, Any] = platform.view(f"/v1/jobs/{job_id}")
        return found

    def trains_on(count: int) -> bool:
        return bool(job()["num_workers"] == count == len(platform.running(job_id)))

    wait_for("one worker", lambda: trains_on(1), LONG_S)
    ((replica, pod),) = platform.running(job_id).items()
    (told,) = job()["replicas"]
    held = devices_in(pod["metadata"]["annotations"])
    assert (told["device_id"], *told["more_devices"]) == held
    assert {device.rpartition("/")[0] for device in held} == {pod["spec"]["nodeName"]}
    assert pod["spec"]["containers"][0]["resources"]["limits"][DEVICE_RESOURCE] == "2"
    huge = platform.find("trainingfunctions", "huge")["status"]
    why = "no node has 4 devices, which each of its workers needs; the largest has 3"
    assert (huge["state"], huge["reason"]) == ("PENDING", why)

    platform.api.patch(f"{GROUP}/namespaces/{platform.namespace}/trainingfunctions/wide", {"spec": {"workers": "1..4"}})
    wait_for("a second worker", lambda: trains_on(2), LONG_S)
    nodes = sorted(each["spec"]["nodeName"] for each in platform.running(job_id).values())
    assert nodes == sorted(NODES), "the third device of a node is no worker"
    assert replica in platform.running(job_id)
    uids = {name: each["metadata"]["uid"] for name, each in platform.running(job_id).items()}

    platform.kill()
    platform.start()
    wait_for("both workers again", lambda: trains_on(2), LONG_S)
    step = job()["step"]
    wait_for("a step of theirs", lambda: job()["step"] > step, LONG_S)
    assert {name: each["metadata"]["uid"] for name, each in platform.running(job_id).items()} == uids
    assert [len(each["more_devices"]) for each in job()["replicas"]] == [1, 1]
    plan = platform.find("trainingfunctions", "wide")["status"]["plan"]
    assert (plan["workers"], len(set(plan["devices"]))) == (2, 4)

    for pid in platform.pids_of(platform.running(job_id)[replica]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for("the loss", lambda: replica not in platform.running(job_id), LONG_S)
    wait_for("another in its place", lambda: trains_on(2), LONG_S)
    assert [len(each["more_devices"]) for each in job()["replicas"]] == [1, 1]

    pace.pause_s = 0.0
    wait_for("its end", lambda: job()["state"] not in ("STARTING", "RUNNING"), LONG_S)
    assert job()["state"] == "SUCCEEDED", job()["reason"]
    # The survivor goes on alone; on a busy machine the job was seen to be restarted instead, and steps are done again.
    each_step_once(platform.store_url, job_id, NUM_EPOCHS, num_restarts=job()["num_restarts"])
