"""Several namespaces and their quotas, with the platform under exactly its rights on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.served_platform import (
    DEVICE,
    Served,
    bound,
    events_of,
    functions_in,
    served,
    still_node,
    training_function,
)
from springtide.backends.kubernetes.settings import PLATFORM_LABEL

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]


@pytest.fixture
def places(cluster: Cluster) -> Iterator[tuple[str, str, str, str]]:
    """The platform's namespace, two that it reconciles, and one that it does not."""
    with (
        cluster.namespace("home") as home,
        cluster.namespace("one") as one,
        cluster.namespace("two") as two,
        cluster.namespace("other") as other,
    ):
        yield home, one, two, other


@pytest.fixture
def platform(cluster: Cluster, places: tuple[str, str, str, str], tmp_path: Path) -> Iterator[Served]:
    home, one, two, _ = places
    with still_node(cluster.api, home, 8), served(cluster, home, tmp_path, namespaces=[one, two]) as running:
        wait_for("the control plane", lambda: running.ask("/readyz")[0] == 200)
        yield running


def quota(cluster: Cluster, namespace: str, **hard: str) -> None:
    cluster.api.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "team", "namespace": namespace},
            "spec": {"hard": hard},
        }
    )
    path = f"api/v1/namespaces/{namespace}/resourcequotas/team"
    wait_for("the quota", lambda: cluster.api.get(path).get("status", {}).get("hard") == hard)


def status_of(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    return dict(cluster.api.get(f"{functions_in(namespace)}/{name}").get("status", {}))


def test_workloads_live_where_they_were_asked_for_and_nowhere_else(
    cluster: Cluster, places: tuple[str, str, str, str], platform: Served
) -> None:
    home, one, two, other = places
    for namespace in (one, two, other):
        cluster.api.post(functions_in(namespace), training_function("digits"))
    for namespace in (one, two):
        pods = wait_for(f"pods in {namespace}", lambda namespace=namespace: bound(cluster.api, namespace))
        assert {pod["metadata"]["labels"][PLATFORM_LABEL] for pod in pods} == {home}
        uid = cluster.api.get(f"{functions_in(namespace)}/digits")["metadata"]["uid"]
        assert {owner["uid"] for pod in pods for owner in pod["metadata"]["ownerReferences"]} == {uid}
    # Two of the same name are two workloads.
    ids = {status_of(cluster, namespace, "digits").get("workloadId") for namespace in (one, two)}
    assert len(ids) == 2
    assert None not in ids
    # What is not reconciled is not touched, nor are there pods in the platform's own namespace.
    assert cluster.api.pods(other) == cluster.api.pods(home) == []
    (told,) = status_of(cluster, other, "digits")["conditions"]
    assert (told["type"], told["status"], told["reason"]) == ("Accepted", "Unknown", "NotSeen")
    assert len(platform.jobs()) == 2
    # Each workload's Secret is beside its pods, and no other workload's.
    secrets = {
        namespace: [
            each["metadata"]["name"]
            for each in cluster.api.items(f"api/v1/namespaces/{namespace}/secrets")
            if each["metadata"].get("labels", {}).get(PLATFORM_LABEL) == home
        ]
        for namespace in (one, two)
    }
    assert all(len(names) == 1 for names in secrets.values())
    assert secrets[one] != secrets[two]
    assert "forbidden" not in platform.log.read_text()


def test_deleting_one_leaves_its_namesake_alone(
    cluster: Cluster, places: tuple[str, str, str, str], platform: Served
) -> None:
    _, one, two, _ = places
    for namespace in (one, two):
        cluster.api.post(functions_in(namespace), training_function("digits", workers=1))
        wait_for("a pod", lambda namespace=namespace: bound(cluster.api, namespace))
    cluster.api.delete(f"{functions_in(one)}/digits")
    wait_for("the end", lambda: all("deletionTimestamp" in pod["metadata"] for pod in cluster.api.pods(one)))
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.api.pods(two))


def test_a_quota_makes_a_job_wait_with_that_reason_and_room_lets_it_go_on(
    cluster: Cluster, places: tuple[str, str, str, str], platform: Served
) -> None:
    _, one, two, _ = places
    quota(cluster, one, **{f"requests.{DEVICE}": "0"})
    cluster.api.post(functions_in(one), training_function("waits", workers=1))
    waiting = wait_for(
        "the reason",
        lambda: [pod for pod in status_of(cluster, one, "waits").get("pods", []) if "quota" in pod["reason"]],
    )
    assert all(pod.get("reason") for pod in waiting)
    assert cluster.api.pods(one) == []
    # It is no failure: nothing is lost, no restart is counted, and who has quota is not held up.
    cluster.api.post(functions_in(two), training_function("runs", workers=1))
    wait_for("a pod elsewhere", lambda: bound(cluster.api, two))
    (job,) = [job for job in platform.jobs() if job["name"] == "waits"]
    assert job["state"] not in ("FAILED", "failed")
    assert not [event for event in events_of(cluster.api, one, "waits") if event["reason"] == "ReplicaLost"]
    quota(cluster, one, **{f"requests.{DEVICE}": "4"})
    wait_for("its pod", lambda: bound(cluster.api, one))
    wait_for(
        "no reason any more",
        lambda: not [pod for pod in status_of(cluster, one, "waits").get("pods", []) if "quota" in pod["reason"]],
    )


def test_what_quota_leaves_room_for_is_started(
    cluster: Cluster, places: tuple[str, str, str, str], platform: Served
) -> None:
    _, one, _, _ = places
    quota(cluster, one, **{f"requests.{DEVICE}": "1"})
    cluster.api.post(functions_in(one), training_function("half", workers="1..2"))
    wait_for("one pod", lambda: len(bound(cluster.api, one)) == 1)

    def what_is_told() -> list[str]:
        # The other is told of for the seconds that it waits; then the job is limited to what quota allows.
        status = status_of(cluster, one, "half")
        waiting = [pod["reason"] for pod in status.get("pods", []) if "quota" in pod["reason"]]
        return waiting or ["quota" for plan in [status.get("plan", {})] if plan.get("workers") == 1]

    assert "quota" in wait_for("the reason of the other", what_is_told)[0]
    assert len(cluster.api.pods(one)) == 1
