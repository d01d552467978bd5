"""What is said of the cluster that a platform stands on: over REST, as evidence, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from starlette.testclient import TestClient

from kits.service.api_fixtures import TOKEN, job_body
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.service.api.application import build_api
from springtide.service.metrics.platform import cluster_families
from springtide.service.status.cluster_evidence import MAX_PODS_TOLD, cluster_evidence

PULL = "ImagePullBackOff: the image nowhere/worker:1 cannot be pulled"


def pod(workload_id, number, phase="running", reason="", since_s=30.0):
    return PodStatus(
        workload_id=workload_id,
        replica_id=f"{workload_id}.{number}",
        namespace="ml",
        pod=f"{workload_id}-{number}",
        node_id=f"node-{number}",
        phase=phase,
        reason=reason,
        address="10.0.0.1",
        since_s=since_s,
    )


def test_a_platform_of_one_machine_has_no_cluster(http):
    answer = http.get("/v1/cluster")
    assert answer.status_code == 404
    assert "stands on one machine" in answer.json()["error"]["message"]
    assert http.get("/v1/status").json()["cluster"] is None
    assert "springtide_kubernetes" not in http.get("/metrics").text


def test_pods_are_told_with_their_workloads(platform, http):
    job_id = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    platform.cluster_status = ClusterStatus(
        server="https://somewhere:6443",
        leader="pod-a",
        term=3,
        num_nodes=2,
        num_pods=2,
        pods=(pod(job_id, 0), pod(job_id, 1, "starting", PULL), pod("other", 0)),
    )
    job = http.get(f"/v1/jobs/{job_id}").json()
    assert [(found["pod"], found["reason"]) for found in job["pods"]] == [(f"{job_id}-0", ""), (f"{job_id}-1", PULL)]
    status = http.get("/v1/status").json()
    assert status["cluster"] | {"pods": []} == status["cluster"]
    assert (status["cluster"]["leader"], status["cluster"]["term"]) == ("pod-a", 3)
    assert status["jobs"][0]["pods"] == job["pods"]
    assert len(http.get("/v1/cluster").json()["pods"]) == 3
    evidence = http.get(f"/v1/workloads/{job_id}/why").json()["evidence"]
    assert f"pod ml/{job_id}-1 on node-1 is starting for 30.0 s: {PULL}" in evidence


def test_what_hinders_is_told_first_and_not_everything():
    pods = (*(pod("a", number) for number in range(12)), pod("a", 99, "waiting", "quota: pods=4", 0.2))
    told = cluster_evidence("a", ClusterStatus(problem="the API server does not answer", pods=pods))
    assert told[0] == "the cluster: the API server does not answer"
    assert told[1] == "pod ml/a-99 on node-99 is waiting: quota: pods=4"
    assert told[-1] == "and 5 pods more"
    assert len(told) == MAX_PODS_TOLD + 2
    assert cluster_evidence("b", ClusterStatus(pods=pods)) == []
    assert cluster_evidence("b", ClusterStatus(watch_age_s=600.0)) == [
        "nothing has been heard of the API server for 10m00"
    ]


def test_the_figures_name_no_workload(platform):
    platform.cluster_status = ClusterStatus(
        num_nodes=5,
        pending_writes=7,
        term=2,
        watch_age_s=1.5,
        problem="x",
        pods=(pod("a", 0), pod("a", 1, "starting", PULL)),
    )
    registry = CollectorRegistry()
    build_api(platform, token=TOKEN, registry=registry)
    lines = generate_latest(registry).decode().splitlines()
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("springtide_kub")
    }
    assert found == {
        "springtide_kubernetes_nodes": 5.0,
        "springtide_kubernetes_pending_writes": 7.0,
        "springtide_kubernetes_term": 2.0,
        "springtide_kubernetes_watch_age_seconds": 1.5,
        "springtide_kubernetes_problem": 1.0,
        'springtide_kubernetes_pods{phase="waiting"}': 0.0,
        'springtide_kubernetes_pods{phase="creating"}': 0.0,
        'springtide_kubernetes_pods{phase="binding"}': 0.0,
        'springtide_kubernetes_pods{phase="starting"}': 1.0,
        'springtide_kubernetes_pods{phase="running"}': 1.0,
        'springtide_kubernetes_pods{phase="ending"}': 0.0,
        "springtide_kubernetes_hindered_pods": 1.0,
    }
    assert list(cluster_families(None)) == []


def test_a_platform_on_a_network_is_called_by_any_name_and_still_asks_for_its_token(platform):
    app = build_api(
        platform, token=TOKEN, registry=CollectorRegistry(), token_place="the Secret springtide/springtide-token"
    )
    with TestClient(app, base_url="http://springtide.springtide.svc:8787", raise_server_exceptions=False) as client:
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        refused = client.get("/v1/status")
        assert refused.status_code == 401
        assert "the Secret springtide/springtide-token" in refused.json()["error"]["message"]
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/status", headers=known).status_code == 200
        for origin, status in (
            ("http://springtide.springtide.svc:8787", 202),
            ("https://springtide.springtide.svc:8787", 202),
            ("https://evil.example", 403),
        ):
            answer = client.post("/v1/shutdown", json={}, headers=known | {"Origin": origin})
            assert answer.status_code == status, origin


def test_a_platform_of_one_machine_is_called_by_no_other_name(stranger):
    assert stranger.get("/readyz").status_code == 200
    answer = stranger.get("/readyz", headers={"Host": "springtide.springtide.svc:8787"})
    assert answer.status_code == 403


def test_a_platform_that_decides_nothing_is_not_ready_and_says_why(stranger, platform):
    platform.trouble = "decisions wait until the journal can be written: the disk is full"
    answer = stranger.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "leading", "no_decisions": platform.trouble}
    assert stranger.get("/readyz?for=requests").status_code == 200, "requests are answered meanwhile"
    assert stranger.get("/healthz").status_code == 200, "it lives"
    assert "springtide_decisions_made 0.0" in stranger.get("/metrics").text
    known = {"Authorization": f"Bearer {TOKEN}"}
    assert stranger.get("/v1/status", headers=known).json()["trouble"] == platform.trouble
    platform.trouble = ""
    assert stranger.get("/readyz").status_code == 200
    assert "springtide_decisions_made 1.0" in stranger.get("/metrics").text
