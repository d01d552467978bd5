"""What statuses look like to people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from springtide.cli.doctor.machine import check_cluster
from springtide.cli.tables.columns import shorten, slack
from springtide.cli.tables.deadlines import promise_line
from springtide.cli.tables.statuses import (
    final_line,
    job_details,
    jobs_table,
    progress_line,
    services_table,
)
from springtide.core.decision import PromiseCondition
from springtide.core.status.platform import JobStatus, ReplicaStatus, ServiceStatus
from springtide.core.status.pods import ClusterStatus, PodStatus

MakeJob = Callable[..., JobStatus]


def test_the_progress_line(make_job: MakeJob) -> None:
    assert progress_line(make_job()) == (
        "fit-3f2a RUNNING 2 workers [#########-------] 57 %  loss 0.412  812 samples/s  ETA 3m12  slack +2m05"
    )


@pytest.mark.parametrize("width", range(16, 120))
def test_the_progress_line_fits_the_terminal(width: int, make_job: MakeJob) -> None:
    line = progress_line(make_job(metrics={"accuracy": 0.98123}), width)
    assert len(line) <= width
    assert line.startswith("fit-3f2a RUNNIN")
    # What says how far it is goes last of all.
    assert "57 %" in line or width < 34


def test_metrics_of_the_function_are_shown(make_job: MakeJob) -> None:
    job = make_job(metrics={"accuracy": 0.98123})
    assert "loss 0.412  accuracy 0.9812  812 samples/s" in progress_line(job)
    assert "  metrics       accuracy 0.9812\n" in job_details(job, now_s=100.0)
    assert "loss 0.412  accuracy 0.9812\n" in final_line(job)


def test_an_ended_job_says_how_its_deadline_went(make_job: MakeJob) -> None:
    met = job_details(make_job(state="SUCCEEDED", ended_at_s=479.0), now_s=500.0, workers="1 -> 4")
    assert "  deadline      met with 2m01 to spare\n" in met
    assert "  workers       1 -> 4  (1..4 allowed)\n" in met
    assert "slack" not in met
    assert "speed" not in met
    assert "missed by 21.0 s" in job_details(make_job(state="SUCCEEDED", ended_at_s=621.0), now_s=700.0)
    assert "ended 2m01 before it" in job_details(make_job(state="CANCELLED", ended_at_s=479.0), now_s=500.0)


def test_a_submission_says_whether_its_deadline_is_promised(make_job: MakeJob) -> None:
    job = make_job(submitted_at_s=100.0, deadline_at_s=400.0)
    assert promise_line(replace(job, is_promised=True)) == "  its deadline in 5m00 is promised"
    assert promise_line(replace(job, is_promised=False)) == "  its deadline in 5m00 is aimed at, not promised"
    unknown = replace(job, is_promised=False, promised_if=PromiseCondition(step_s=0.5, num_workers=1))
    assert "is promised once its speed is measured, if a step takes <= 0.5 s" in promise_line(unknown)
    assert not promise_line(replace(job, deadline_at_s=None))


def test_the_table_is_cut_to_the_terminal(make_job: MakeJob) -> None:
    for width in (90, 100):
        assert max(len(line) for line in jobs_table([make_job()], width).splitlines()) <= width
    ended = jobs_table([make_job(state="SUCCEEDED", ended_at_s=479.0)])
    assert ended.splitlines()[1].split()[:8] == ["fit-3f2a", "SUCCEEDED", "57", "%", "570/1000", "-", "0.412", "3m12"]


def test_a_stalled_job_says_so_and_for_how_long(make_job: MakeJob) -> None:
    job = make_job(stalled_since_s=10.0)
    assert "RUNNING" in jobs_table([job], now_s=730.0)
    assert "STALLED: no step for 12m00, the last was 570/1000" in jobs_table([job], now_s=730.0)
    assert progress_line(job).startswith("fit-3f2a STALLED 2 workers")


def test_what_is_not_known_is_left_out(make_job: MakeJob) -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ("loss", "samples_per_s", "eta_s", "slack_s", "progress_fraction", "total_steps")
    )
    assert (
        progress_line(make_job(num_workers=1, step=3, **unknown))
        == "fit-3f2a RUNNING 1 worker [----------------] step 3"
    )


def test_a_job_that_does_not_run_says_why(make_job: MakeJob) -> None:
    assert progress_line(make_job(state="PENDING", reason="no device is free")) == "fit-3f2a PENDING  no device is free"


def test_the_table_of_jobs(make_job: MakeJob) -> None:
    pending = make_job(
        job_id="other-1",
        state="PENDING",
        reason="no device is free",
        progress_fraction=None,
        loss=None,
        eta_s=None,
        slack_s=-40.0,
        num_workers=0,
        step=0,
        total_steps=None,
        min_workers=2,
        max_workers=2,
    )
    assert jobs_table([make_job(), pending]) == (
        "JOB       STATE    PROGRESS  STEP      WORKERS    LOSS   ETA   SLACK    REASON\n"
        "fit-3f2a  RUNNING  57 %      570/1000  2 of 1..4  0.412  3m12  +2m05    it has the devices that it asked for\n"
        "other-1   PENDING  -         0         0 of 2     -      -     -40.0 s  no device is free"
    )


def test_the_table_of_services(make_service: Callable[..., ServiceStatus]) -> None:
    assert services_table([make_service()]) == (
        "SERVICE    STATE  REPLICAS   ARRIVALS  IN FLIGHT  QUEUED  P50    P99    SLO     REASON\n"
        "sentiment  READY  1 of 0..4  12.5/s    3          0       12 ms  88 ms  200 ms  1 replica answers"
    )


def test_the_end(make_job: MakeJob) -> None:
    ended = make_job(state="SUCCEEDED", ended_at_s=479.0, step=1000, artifact_path="/state/model.safetensors")
    assert final_line(ended) == (
        "fit-3f2a SUCCEEDED in 7m58  step 1000/1000  loss 0.412\n"
        "  deadline met with 2m01 to spare\n"
        "  1 resize, 0 restarts, 240 device-seconds\n"
        "  model /state/model.safetensors"
    )
    failed = make_job(state="FAILED", ended_at_s=700.0, reason="ValueError: no", loss=None)
    assert final_line(failed).splitlines()[1] == "  ValueError: no"
    assert "deadline" not in final_line(failed)
    assert "deadline missed by 1.0 s" in final_line(make_job(state="SUCCEEDED", ended_at_s=601.0))


def test_the_details_say_how_many_devices_each_worker_holds(make_job: MakeJob) -> None:
    assert "  workers       2 of 1..4, 2 devices each  generation" in job_details(make_job(devices_each=2), now_s=100.0)
    assert "devices each" not in job_details(make_job(), now_s=100.0)


def test_the_details_of_a_job(make_job: MakeJob) -> None:
    replica = ReplicaStatus(replica_id="fit-3f2a-0", device_id="local/0", state="READY", rank=0, started_at_s=1.0)
    text = job_details(make_job(replicas=(replica,), alternatives=("--deadline 20m",)), now_s=100.0)
    assert text.startswith("fit-3f2a RUNNING: it has the devices that it asked for\n")
    assert "deadline      in 8m20" in text
    assert "last pause 41 ms" in text
    assert "would work:\n    --deadline 20m" in text
    assert text.endswith("  REPLICA     STATE  DEVICE   RANK\n  fit-3f2a-0  READY  local/0  0")
    text = job_details(make_job(replicas=(replace(replica, device_seen="MIG-7a"),)), now_s=100.0)
    assert text.endswith("  REPLICA     STATE  DEVICE   RANK  SEES\n  fit-3f2a-0  READY  local/0  0     MIG-7a")
    assert "1m40 ago" in job_details(make_job(), now_s=700.0)


@pytest.mark.parametrize(("seconds", "text"), [(125.0, "+2m05"), (-40.0, "-40.0 s"), (None, "-")])
def test_slack_has_its_sign(seconds: float | None, text: str) -> None:
    assert slack(seconds) == text


def test_long_reasons_are_cut_to_one_line() -> None:
    assert shorten("a\nb") == "a b"
    assert shorten("x" * 100, 10) == "xxxxxxxxx…"


def test_what_is_planned_and_what_it_has_cost(make_job: MakeJob) -> None:
    waiting = make_job(
        state="PENDING", eta_s=None, planned_start_at_s=160.0, planned_finish_at_s=400.0, is_promised=True
    )
    assert "starts in 1m00" in jobs_table([waiting], now_s=100.0)
    assert "starts" not in jobs_table([waiting])
    details = job_details(waiting, now_s=100.0)
    assert "  deadline      in 8m20 (promised)\n" in details
    assert "  planned       start in 1m00, end in 5m00\n" in details
    given_up = job_details(replace(waiting, given_up_at_s=70.0), now_s=100.0)
    assert "  deadline      in 8m20 (promised, but its plan misses it for 30.0 s)\n" in given_up
    assert "in 8m20 (aimed at, not promised)\n" in job_details(replace(waiting, is_promised=False), now_s=100.0)
    dear = make_job(cost_usd=0.06)
    assert progress_line(dear).endswith("slack +2m05  $0.06")
    assert "240 device-seconds, $0.06" in job_details(dear, now_s=100.0)
    assert "less than $0.01" in job_details(make_job(cost_usd=0.001), now_s=100.0)


def test_a_batch_that_may_change_has_its_columns_and_its_lines(make_job: MakeJob) -> None:
    changing = make_job(
        job_id="grow-1",
        initial_batch_size=64,
        batch_bounds=(64, 1024),
        noise_scale=412.3,
        efficiency_fraction=0.61,
        goodput_samples_per_s=495.0,
        learning_rate_factor=4.9,
    )
    header, first, second = jobs_table([changing, make_job()]).splitlines()
    assert "BATCH" in header
    assert "512 of 64..1024" in first
    assert "412" in first
    assert "512" in second
    assert "BATCH" not in jobs_table([make_job()])
    details = job_details(changing, 10.0)
    assert "512 of 64..1024, 64 at first, learning rate x4.9" in details
    assert "scale 412 samples, a sample brings 61 %" in details
    assert "495 samples/s as of the first batch" in details
    assert "whatever the number of workers" in job_details(make_job(), 10.0)


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
