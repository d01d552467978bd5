"""What commands say of a platform that stands on a cluster: one line of it, its pods, and what is wrong."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.cli.doctor.machine import check_cluster
from springtide.core.status.pods import ClusterStatus, PodStatus

CLUSTER = ClusterStatus(
    server="https://10.0.0.1:6443", leader="springtide-0_1_ab", term=7, num_nodes=3, num_pods=1, watch_age_s=2.0
)
POD = PodStatus(
    workload_id="fit-3f2a",
    replica_id="fit-3f2a.0",
    namespace="ml",
    pod="fit-3f2a-0",
    node_id="node-a",
    phase="starting",
    reason="ImagePullBackOff: the image nowhere/worker:1 cannot be pulled",
    since_s=75.0,
)


def test_ps_says_who_leads_and_how_the_cluster_is_reached(springtide, client):
    assert "kubernetes" not in springtide("ps").output
    client.cluster_now = CLUSTER
    assert (
        "kubernetes https://10.0.0.1:6443   3 nodes, 1 pod   led by springtide-0_1_ab in term 7"
        in springtide("ps").output
    )
    client.cluster_now = replace(CLUSTER, problem="the API server does not answer", pending_writes=4)
    told = springtide("ps").output
    assert "4 writes under way" in told
    assert "\nkubernetes: the API server does not answer" in told
    client.cluster_now = replace(CLUSTER, watch_age_s=400.0)
    assert "nothing has been heard of the API server for 6m40" in springtide("ps").output


def test_status_lists_the_pods_with_why_they_wait(springtide, client, make_job, make_service):
    client.add(make_job(pods=(POD,)), make_service())
    told = springtide("status", "fit").output
    assert "ml/fit-3f2a-0" in told
    assert "ImagePullBackOff: the image nowhere/worker:1 cannot be pulled" in told
    assert "POD" not in springtide("status", "sentiment").output


def test_doctor_names_what_to_mend(client, make_job):
    assert list(check_cluster(client.status())) == []
    client.cluster_now = CLUSTER
    assert [(check.name, check.verdict) for check in check_cluster(client.status())] == [
        ("cluster", "ok"),
        ("pods", "ok"),
    ]
    client.add(make_job(pods=(POD, replace(POD, reason=""), replace(POD, pod="fit-3f2a-1"))))
    _, pods = check_cluster(client.status())
    assert pods.verdict == "warn"
    assert pods.text == f"ml/fit-3f2a-0: {POD.reason} and 1 more"
    assert "springtide why fit-3f2a" in pods.mend
    for cluster, verdict, text in (
        (replace(CLUSTER, problem="403: not allowed"), "fail", "403: not allowed"),
        (replace(CLUSTER, watch_age_s=400.0), "fail", "nothing has been heard"),
        (replace(CLUSTER, num_nodes=0), "warn", "no devices"),
    ):
        client.cluster_now = cluster
        first = next(check_cluster(client.status()))
        assert (first.name, first.verdict) == ("cluster", verdict)
        assert text in first.text
        assert "springtide k8s check" in first.mend
