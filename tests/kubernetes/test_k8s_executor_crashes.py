"""A control plane that dies between any two effects: the next one ends what was begun, and nothing is done twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.pod_platform import PodPlatform
from springtide.backends.kubernetes.pods.driver import CRASH_POINTS
from springtide.core.actions import ResizeJob, StartReplica, StopReplica
from springtide.core.events import JobResized, ReplicaLost, ReplicaReady, ReplicaStopped
from springtide.core.ports import Standing

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


@pytest.fixture
def platform(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[PodPlatform]:
    with ApiProxy(cluster.kubeconfig) as proxy:
        platform = PodPlatform(tmp_path / "state", cluster.api, proxy, namespace)
        with platform.kubelet:
            platform.open()
            try:
                yield platform
            finally:
                platform.close()


def standing_of(*starts, actions=()) -> Standing:
    return Standing(replicas=tuple(starts), generations={"job": 1}, actions=tuple(actions))


@pytest.mark.parametrize("path", ["/secrets", "/pods", "/binding"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_control_plane_that_dies_in_a_start_is_followed_by_one_that_ends_it(
    platform: PodPlatform, path: str, is_done: bool
) -> None:
    def is_it(request) -> bool:
        return request.method in ("POST", "PATCH") and request.path.endswith(path)

    if is_done:
        platform.proxy.lose_answer(is_it, times=1000)
    else:
        platform.proxy.rules.delays.append((is_it, 3600.0))
    action = platform.start(0)
    platform.proxy.wait_for(is_it)
    platform.settle(0.3)
    platform.crash()
    platform.proxy.cut()
    platform.proxy.rules.delays.clear()
    platform.proxy.rules.lost_answers.clear()
    platform.events.clear()
    platform.open().recover(standing_of(action, actions=[action]))
    platform.until(ReplicaReady)
    platform.settle(0.5)
    assert len(platform.kubelet.uids["job.0"]) == 1
    assert not platform.of(ReplicaLost)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_control_plane_that_dies_in_a_deletion_is_followed_by_one_that_ends_it(
    platform: PodPlatform, is_done: bool
) -> None:
    (action,) = platform.train(0)
    platform.kubelet.workers["job.0"].is_stuck = True
    if is_done:
        platform.proxy.lose_answer(lambda request: request.method == "DELETE", times=1000)
    else:
        platform.proxy.rules.delays.append((lambda request: request.method == "DELETE", 3600.0))
    stop = StopReplica(workload_id="job", replica_id="job.0", grace_s=0.3)
    platform.executor.start(stop)
    platform.proxy.wait_for(lambda request: request.method == "DELETE")
    platform.crash()
    platform.proxy.cut()
    platform.proxy.rules.delays.clear()
    platform.proxy.rules.lost_answers.clear()
    platform.events.clear()
    platform.open().recover(standing_of(action, actions=[stop]))
    platform.until(ReplicaStopped)
    platform.settle(0.5)
    assert not platform.of(ReplicaLost)
    assert len(platform.kubelet.uids["job.0"]) == 1


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_control_plane_that_dies_at_any_point_loses_nobody(platform: PodPlatform, point: str) -> None:
    platform.crash()
    died = threading.Event()

    def crash(name: str) -> None:
        if name == point and not died.is_set():
            died.set()
            platform.thread.close()
            # Nothing of this thread goes on: not even what it would do next in the same breath.
            threading.Event().wait()

    platform.open(crash)
    starts = [platform.start(0), platform.start(1)]
    forced = ResizeJob(job_id="job", generation=2, replica_ids=("job.0", "job.1"), global_batch_size=32, forced=True)
    stop = StopReplica(workload_id="job", replica_id="job.1", grace_s=0.4)
    ready: set[str] = set()
    actions: list = [*starts]
    end_s = time.monotonic() + 30.0
    while not died.is_set() and time.monotonic() < end_s:
        platform.take(0.1)
        ready = {event.replica_id for event in platform.of(ReplicaReady)}
        if len(ready) == 2 and forced not in actions:
            actions.append(forced)
            platform.executor.start(forced)
        if platform.of(JobResized) and stop not in actions:
            actions.append(stop)
            platform.kubelet.workers["job.1"].is_stuck = True
            platform.executor.start(stop)
    assert died.is_set(), f"{point} was never passed"
    # What the journal tells: replicas that are not known to be ready may not have been started, and the last decisions
    # may not have been carried out.
    effects = [each for each in actions if not isinstance(each, StartReplica) or each.replica_id not in ready]
    platform.events.clear()
    platform.abandon()
    platform.open().recover(
        Standing(replicas=tuple(starts), generations={"job": 2 if forced in actions else 1}, actions=tuple(effects))
    )
    if stop in actions:
        platform.until(ReplicaStopped, lambda event: event.replica_id == "job.1")
    else:
        platform.wait_for("both", lambda: len(platform.connected()) == 2)
        if forced not in actions:
            for each in starts:
                platform.until(ReplicaReady, lambda event, each=each: event.replica_id == each.replica_id)
            platform.executor.start(forced)
        platform.until(JobResized, lambda event: event.generation == 2)
    platform.settle(0.5)
    assert not platform.of(ReplicaLost)
    assert {each: len(uids) for each, uids in platform.kubelet.uids.items()} == {"job.0": 1, "job.1": 1}
