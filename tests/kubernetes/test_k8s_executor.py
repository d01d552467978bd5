"""KubernetesExecutor against a real API server: what it makes, whom it adopts, and what it does at every end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kubelet_player import MASTER_KEY
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.pod_platform import PodPlatform
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.pods import holds as pod_holds
from springtide.backends.kubernetes.pods import machines as pod_machines
from springtide.backends.kubernetes.pods import quota
from springtide.backends.kubernetes.pods import recovery as pod_recovery
from springtide.core.actions import EndJob
from springtide.core.containers import ContainerSettings
from springtide.core.events import (
    JobResized,
    NodeJoined,
    NodeLost,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    ScaleRequested,
    StartHeldUp,
)
from springtide.core.ports import Standing
from springtide.core.shares import Share
from springtide.core.tokens import group_key, workload_key
from springtide.core.workload import JobState

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


def is_create(request) -> bool:
    return request.method == "POST" and request.path.endswith("/pods") and "dryRun" not in request.query


# --- making ----------------------------------------------------------------------------------------------------------


def test_a_replica_is_one_pod_on_its_node_with_its_secret(platform: PodPlatform) -> None:
    for _ in range(3):
        platform.start(0, device=2)
    platform.until(ReplicaReady)
    platform.start(0, device=2)
    platform.settle(0.5)
    pods = platform.kubelet.pods()
    assert list(pods) == ["job.0"]
    assert pods["job.0"]["spec"]["nodeName"] == platform.kubelet.nodes[1]
    assert pods["job.0"]["metadata"]["labels"][names.TERM_LABEL] == "1"
    secrets = f"api/v1/namespaces/{platform.namespace}/secrets"
    assert set(platform.api.get(f"{secrets}/springtide-job")["data"]) >= {"key"}
    assert len(platform.of(ReplicaReady)) == 1
    assert platform.executor.counts()["creates"] == 1


def test_a_fresh_start_raises_the_fence_before_a_pod_is_made(platform: PodPlatform) -> None:
    platform.start(0, generation=4)
    platform.proxy.wait_for(is_create)
    assert platform.fence() == 4
    platform.until(ReplicaReady)


def test_a_group_meets_at_the_pod_of_rank_0_and_goes_on_without_who_leaves(platform: PodPlatform) -> None:
    platform.train(0, 1)
    orders = platform.kubelet.workers["job.1"].orders
    (order,) = [each for each in orders if type(each).__name__ == "FormGroup"]
    assert order.rendezvous == "tcp://127.0.0.1:29401"
    assert order.key == group_key(workload_key(MASTER_KEY, "job"), 1)
    platform.resize(2, 0)
    platform.until(JobResized, lambda event: event.generation == 2)
    assert platform.until(ReplicaStopped).replica_id == "job.1"
    assert not platform.of(ReplicaLost)
    platform.wait_for("the pod to go", lambda: list(platform.kubelet.pods()) == ["job.0"])


@pytest.mark.parametrize("suffix", ["/pods", "/binding"])
def test_an_answer_that_is_lost_makes_no_second_pod(platform: PodPlatform, suffix: str) -> None:
    platform.proxy.lose_answer(lambda request: request.method == "POST" and request.path.endswith(suffix))
    platform.start(0)
    platform.until(ReplicaReady)
    platform.settle(0.5)
    assert len(platform.kubelet.uids["job.0"]) == 1
    assert not platform.of(ReplicaLost)


def test_while_the_api_server_is_away_nobody_waits_and_everything_is_made_up_for(platform: PodPlatform) -> None:
    platform.train(0)
    platform.proxy.go_away()
    began_s = time.monotonic()
    platform.start(1)
    assert time.monotonic() - began_s < 0.1
    platform.settle(3.0)
    assert not platform.of(ReplicaLost), "workers that still talk are not lost"
    assert "does not take it yet" in platform.reason_of(1)
    platform.proxy.come_back()
    platform.until(ReplicaReady, lambda event: event.replica_id == "job.1")


def test_what_the_api_server_refuses_is_lost_with_its_reason(platform: PodPlatform) -> None:
    platform.proxy.answer(is_create, 403, reason="Forbidden", message="pods are forbidden: no")
    platform.start(0)
    assert "pods are forbidden: no" in platform.until(ReplicaLost).reason
    platform.start(1)
    platform.until(ReplicaReady)


def test_a_device_that_is_not_there_is_said_so(platform: PodPlatform) -> None:
    platform.kubelet.nodes = ("nowhere", *platform.kubelet.nodes)
    try:
        platform.start(0)
        assert "there is no device nowhere/0" in platform.until(ReplicaLost).reason
    finally:
        platform.kubelet.nodes = platform.kubelet.nodes[1:]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_lost_once_with_its_exit_code(platform: PodPlatform) -> None:
    platform.train(0)
    platform.kubelet.die("job.0", 137)
    lost = platform.until(ReplicaLost)
    assert (lost.exit_code, lost.reason) == (137, "the worker was killed (exit code 137)")
    assert lost.is_fault
    platform.settle(1.0)
    assert len(platform.of(ReplicaLost)) == 1
    assert not platform.of(ReplicaStopped)


def test_a_pod_that_the_kubelet_refuses_is_no_crash(platform: PodPlatform) -> None:
    platform.kubelet.refusing = "OutOfcpu"
    platform.start(0)
    lost = platform.until(ReplicaLost)
    node = platform.kubelet.nodes[0]
    assert lost.reason == f"node {node} refused the pod: OutOfcpu: Pod was rejected"
    assert (lost.exit_code, lost.is_fault, lost.is_refused) == (None, False, True)
    platform.kubelet.refusing = ""
    platform.start(1)
    platform.until(ReplicaReady)


def test_a_pod_is_made_when_the_ending_ones_have_left_it_the_processors(platform: PodPlatform) -> None:
    container = ContainerSettings(cpu="40")
    platform.start(0, container=container)
    platform.until(ReplicaReady)
    platform.kubelet.workers["job.0"].is_stuck = True
    platform.kubelet.is_stopped = True
    platform.stop(0, grace_s=0.1)
    platform.wait_for("its deletion", lambda: "deletionTimestamp" in platform.kubelet.pods()["job.0"]["metadata"])
    platform.start(1, container=container)
    platform.start(2, container=container)
    platform.wait_for("the one on the other node", lambda: "job.2" in platform.kubelet.pods())
    assert f"node {platform.kubelet.nodes[0]} has no room for it until pod job-0 is gone" in platform.reason_of(1)
    assert "job.1" not in platform.kubelet.pods()
    platform.kubelet.is_stopped = False
    platform.until(ReplicaReady, lambda event: event.replica_id == "job.1")


def test_nodes_say_what_the_pods_of_others_request(platform: PodPlatform, cluster: Cluster) -> None:
    platform.settle(0.2)
    node = platform.kubelet.nodes[0]

    def taken() -> int:
        (found,) = [each for each in platform.executor.nodes() if each.node_id == node]
        assert found.room is not None
        assert found.room.total.cpu_m == 64_000
        return found.room.others.cpu_m

    platform.start(3, device=1, container=ContainerSettings(cpu="8"))
    platform.until(ReplicaReady)
    assert taken() == 0, "the platform's own replicas are not counted"
    with cluster.namespace("others") as others:
        container = {"name": "c", "image": "x", "resources": {"requests": {"cpu": "1500m"}}}
        spec = {"nodeName": node, "containers": [container], "automountServiceAccountToken": False}
        pod = {"metadata": {"name": "busy", "namespace": others}, "spec": spec}
        account = f"api/v1/namespaces/{others}/serviceaccounts/default"
        platform.wait_for("the account", lambda: platform.api.find(account) is not None)
        platform.api.post(f"api/v1/namespaces/{others}/pods", {"apiVersion": "v1", "kind": "Pod", **pod})
        platform.wait_for("it to be counted", lambda: taken() == 1500)
        platform.until(NodeJoined, lambda event: event.node.node_id == node)
        platform.api.delete(f"api/v1/namespaces/{others}/pods/busy", gracePeriodSeconds=0)
        platform.wait_for("it to be gone", lambda: taken() == 0)


def test_a_pod_stays_until_the_journal_knows_of_its_end(platform: PodPlatform) -> None:
    platform.train(0)
    platform.acknowledges = False
    platform.kubelet.die("job.0", 1)
    platform.until(ReplicaLost)
    platform.settle(1.5)
    assert "job.0" in platform.kubelet.pods()
    platform.executor.acknowledge(platform.events)
    platform.wait_for("the pod to go", lambda: not platform.kubelet.pods())


def test_a_silent_worker_is_lost_and_its_device_is_held_until_its_pod_is_gone(platform: PodPlatform) -> None:
    platform.train(0)
    platform.kubelet.is_stopped = True
    platform.kubelet.workers["job.0"].is_mute = True
    assert "went silent" in platform.until(ReplicaLost).reason
    platform.start(1, device=0, generation=2)
    platform.settle(1.5)
    assert "is held by pod job-0" in platform.reason_of(1)
    assert "job.1" not in platform.kubelet.pods()
    platform.kubelet.is_stopped = False
    platform.until(ReplicaReady, lambda event: event.replica_id == "job.1")
    assert len(platform.of(ReplicaLost)) == 1


def test_a_silent_kubelet_is_no_dead_worker(platform: PodPlatform) -> None:
    platform.train(0)
    platform.kubelet.is_stopped = True
    node = platform.kubelet.nodes[0]
    condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    platform.api.patch(f"api/v1/nodes/{node}/status", {"status": {"conditions": [condition]}}, "strategic")
    platform.settle(4.0)
    assert not platform.of(ReplicaLost)
    assert not platform.of(NodeLost)


def test_who_is_asked_to_stop_and_does_not_is_deleted(platform: PodPlatform) -> None:
    platform.train(0)
    platform.kubelet.workers["job.0"].is_stuck = True
    platform.stop(0, grace_s=1.0)
    platform.until(ReplicaStopped)
    assert platform.kubelet.workers["job.0"].exit_code == 137
    assert not platform.of(ReplicaLost)


def test_a_start_that_is_taken_back_leaves_nothing(platform: PodPlatform) -> None:
    platform.proxy.rules.delays.append((is_create, 1.0))
    platform.start(0)
    platform.proxy.wait_for(is_create)
    platform.stop(0)
    platform.until(ReplicaStopped)
    platform.settle(1.0)
    assert not platform.kubelet.pods()
    assert not platform.of(ReplicaLost)


def test_a_pod_that_somebody_deletes_is_lost_with_that_reason(platform: PodPlatform) -> None:
    platform.train(0, 1)
    platform.api.delete(platform.path_of(1))
    lost = platform.until(ReplicaLost)
    assert lost.replica_id == "job.1"
    assert "deleted from outside" in lost.reason
    assert not lost.is_fault
    platform.resize(2, 0, forced=True)
    assert platform.until(JobResized, lambda event: event.generation == 2).world_size == 1
    assert platform.fence() == 2
    platform.settle(1.0)
    assert len(platform.of(ReplicaLost)) == 1
    assert not platform.of(ReplicaStopped)


def test_the_last_worker_of_a_job_saves_before_it_counts_as_lost(platform: PodPlatform) -> None:
    platform.train(0)
    platform.api.delete(platform.path_of(0))
    lost = platform.until(ReplicaLost)
    assert "deleted from outside" in lost.reason
    assert not lost.is_fault
    kinds = [type(order).__name__ for order in platform.kubelet.workers["job.0"].orders]
    assert "Fence" not in kinds, "what it has not saved yet would be lost"


def test_an_image_that_cannot_be_had_is_waited_for_with_its_reason_which_is_told(
    platform: PodPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.kubelet.waiting = "ImagePullBackOff"
    platform.start(0)
    platform.wait_for("the reason", lambda: "ImagePullBackOff: image x: because" in platform.reason_of(0))
    monkeypatch.setattr(pod_holds, "HELD_AFTER_S", 0.1)
    assert platform.until(StartHeldUp).is_stuck
    assert not platform.of(ReplicaLost)


def test_what_ran_on_a_machine_that_is_no_more_is_lost(platform: PodPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_machines, "CHECK_EVERY_S", 0.3)
    platform.train(0, 2)
    platform.kubelet.is_stopped = True
    platform.api.delete(f"api/v1/nodes/{platform.kubelet.nodes[1]}")
    assert platform.until(NodeLost).node_id == platform.kubelet.nodes[1]
    assert platform.until(ReplicaLost).replica_id == "job.2"
    platform.wait_for("the pod to go", lambda: list(platform.kubelet.pods()) == ["job.0"], 40.0)
    assert len(platform.of(ReplicaLost)) == 1


# --- a new control plane ---------------------------------------------------------------------------------------------


def standing_of(*starts, actions=()) -> Standing:
    return Standing(replicas=tuple(starts), generations={"job": 1}, actions=tuple(actions))


def test_a_new_control_plane_adopts_what_runs(platform: PodPlatform) -> None:
    starts = platform.train(0, 1)
    uids = {each: set(platform.kubelet.uids[each]) for each in ("job.0", "job.1")}
    platform.restart(standing_of(*starts))
    platform.wait_for("both", lambda: platform.executor.counts().get("adopted") == 2)
    platform.settle(3.0)
    assert not platform.of(ReplicaLost)
    pods = platform.kubelet.pods()
    assert {pod["metadata"]["labels"][names.TERM_LABEL] for pod in pods.values()} == {"2"}
    platform.resize(2, 0, 1)
    platform.until(JobResized, lambda event: event.generation == 2)
    assert {each: platform.kubelet.uids[each] for each in uids} == uids


def test_what_ended_meanwhile_is_lost_and_what_nobody_names_is_ended(platform: PodPlatform) -> None:
    starts = platform.train(0, 1, 2)
    other = {**platform.kubelet.pods()["job.2"]}
    platform.crash()
    platform.kubelet.die("job.1", 1)
    stranger = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "theirs",
            "namespace": platform.namespace,
            "labels": {**other["metadata"]["labels"], names.PLATFORM_LABEL: "another"},
        },
        "spec": {"containers": [{"name": "worker", "image": "x"}], "schedulerName": "springtide"},
    }
    platform.api.post(f"api/v1/namespaces/{platform.namespace}/pods", stranger)
    platform.events.clear()
    platform.open().recover(standing_of(starts[0], starts[1]))
    lost = platform.until(ReplicaLost)
    assert (lost.replica_id, lost.exit_code) == ("job.1", 1)
    platform.wait_for("the third to go", lambda: "job.2" not in platform.kubelet.pods())
    platform.settle(1.0)
    assert [event.replica_id for event in platform.of(ReplicaLost)] == ["job.1"]
    assert "job.0" in platform.kubelet.pods()
    assert platform.api.find(f"api/v1/namespaces/{platform.namespace}/pods/theirs") is not None


def test_a_start_that_was_cut_off_is_made_once(platform: PodPlatform) -> None:
    action = platform.start(0)
    platform.until(ReplicaReady)
    # The order is in the journal; that it was carried out, and that the replica is ready, is not.
    platform.restart(standing_of(action, actions=[action]))
    platform.until(ReplicaReady)
    platform.settle(0.5)
    assert len(platform.kubelet.uids["job.0"]) == 1


def test_a_pod_that_was_never_made_is_made_now(platform: PodPlatform) -> None:
    platform.proxy.go_away()
    action = platform.start(0)
    platform.settle(0.5)
    platform.crash()
    platform.proxy.come_back()
    platform.events.clear()
    platform.open().recover(standing_of(action, actions=[action]))
    platform.until(ReplicaReady)
    assert len(platform.kubelet.uids["job.0"]) == 1


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_listing_from_the_past_ends_nobody(platform: PodPlatform, was_ready: bool) -> None:
    path = f"api/v1/namespaces/{platform.namespace}/pods"
    platform.proxy.freeze(f"/{path}")
    starts = platform.train(0)
    platform.restart(standing_of(*starts, actions=() if was_ready else starts))
    platform.settle(2.0)
    platform.proxy.rules.frozen.clear()
    platform.resize(2, 0)
    platform.until(JobResized, lambda event: event.generation == 2)
    assert not platform.of(ReplicaLost)
    assert len(platform.kubelet.uids["job.0"]) == 1


def test_a_recovery_that_fails_half_way_ends_nobody(platform: PodPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = platform.train(0, 1)
    platform.crash()

    def fail(*_: object) -> None:
        raise ValueError("a pod like no other")

    monkeypatch.setattr(pod_recovery, "share_of", fail)
    shared = [replace(start, share=Share(request=0.5, limit=0.5)) for start in starts]
    platform.open().recover(standing_of(*shared))
    platform.wait_for("the problem", lambda: "a pod like no other" in platform.executor.status().problem)
    platform.settle(1.0)
    pods = platform.kubelet.pods()
    assert set(pods) == {"job.0", "job.1"}
    assert not any("deletionTimestamp" in pod["metadata"] for pod in pods.values())


def test_an_end_that_nobody_was_notified_of_is_found_out(platform: PodPlatform) -> None:
    platform.train(0)
    platform.proxy.rules.lost_events.append(
        lambda request, kind, obj: obj["metadata"]["name"] == "job-0" and kind in ("MODIFIED", "DELETED")
    )
    platform.kubelet.die("job.0", 1)
    platform.until(ReplicaLost, timeout_s=20.0)


def test_pods_of_a_later_term_end_every_writing(platform: PodPlatform) -> None:
    platform.train(0, 1)
    label = {"metadata": {"labels": {names.TERM_LABEL: "9"}}}
    platform.api.patch(platform.path_of(0), label)
    platform.wait_for("the news", lambda: platform.superseded)
    assert platform.superseded == [9]
    platform.stop(0, grace_s=0.2)
    platform.start(3)
    platform.settle(1.5)
    pods = platform.kubelet.pods()
    assert set(pods) >= {"job.1"}
    assert "deletionTimestamp" not in pods["job.1"]["metadata"]
    assert "job.3" not in pods
    assert "taken over" in platform.executor.status().problem


def test_a_predecessor_cannot_delete_what_its_successor_has_taken_over(platform: PodPlatform) -> None:
    platform.train(0)
    # It sleeps through the change: no notification reaches it, and it goes by what it knew.
    platform.proxy.rules.held.append(lambda request: request.is_of("pods"))
    platform.api.patch(platform.path_of(0), {"metadata": {"labels": {names.TERM_LABEL: "9"}}})
    platform.kubelet.workers["job.0"].is_stuck = True
    platform.stop(0, grace_s=0.2)
    platform.wait_for("the news", lambda: platform.superseded)
    assert "deletionTimestamp" not in platform.kubelet.pods()["job.0"]["metadata"]
    platform.proxy.rules.held.clear()


# --- quota -----------------------------------------------------------------------------------------------------------


def set_quota(platform: PodPlatform, pods: int) -> None:
    spec = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": platform.namespace}}
    platform.api.apply({**spec, "spec": {"hard": {"pods": str(pods)}}})
    path = f"api/v1/namespaces/{platform.namespace}/resourcequotas/few"
    platform.wait_for("the quota", lambda: platform.api.get(path)["status"].get("hard", {}).get("pods") == str(pods))


def test_quota_makes_a_job_smaller_and_room_makes_it_larger_again(
    platform: PodPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "PATIENCE_S", 1.0)
    monkeypatch.setattr(quota, "PROBE_S", (0.5, 1.0))
    set_quota(platform, 1)
    platform.train(0)
    platform.start(1)
    scaled = platform.until(ScaleRequested)
    assert (scaled.workload_id, scaled.minimum, scaled.maximum) == ("job", 1, 1)
    assert "quota" in platform.reason_of(1)
    assert platform.executor.quota_caps() == {"job": 1}
    # What the controller does then: the worker that waits is not wanted any more.
    platform.stop(1)
    platform.until(ReplicaStopped)
    platform.settle(2.0)
    assert len(platform.of(ScaleRequested)) == 1, "there is no room yet"
    set_quota(platform, 5)
    grown = platform.until(ScaleRequested, lambda event: event.maximum > 1)
    assert (grown.minimum, grown.maximum) == (1, 4)
    assert platform.executor.quota_caps() == {}
    platform.start(2)
    platform.until(ReplicaReady, lambda event: event.replica_id == "job.2")
    assert not platform.of(ReplicaLost)


def test_a_pod_that_waits_for_quota_comes_when_there_is_room(platform: PodPlatform) -> None:
    set_quota(platform, 0)
    platform.start(0, elastic=False)
    platform.wait_for("the reason", lambda: "waiting for quota" in platform.reason_of(0))
    set_quota(platform, 1)
    platform.until(ReplicaReady)
    assert not platform.of(ReplicaLost)
    assert not platform.of(ScaleRequested)


def test_the_end_of_a_job_takes_its_secret_along_where_nobody_owns_it(platform: PodPlatform) -> None:
    platform.train(0)
    platform.executor.start(EndJob(job_id="job", state=JobState.CANCELLED))
    platform.until(ReplicaStopped)
    path = f"api/v1/namespaces/{platform.namespace}/secrets/springtide-job"
    platform.wait_for("the secret to go", lambda: platform.api.find(path) is None)
