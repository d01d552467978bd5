"""What the REST API answers to what is right, and that it answers only after the journal has it."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import httpx2
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kits.service.api_fixtures import HEADERS, SOURCE, TOKEN, Served, job_body, service_body
from springtide.core.events import (
    CheckpointCommitted,
    JobFinished,
    JobSubmitted,
    LoadObserved,
    ProgressReported,
    ReplicaLost,
)
from springtide.core.status.platform import (
    Explanation,
    HistoryEntry,
    JobStatus,
    PlatformStatus,
    ServiceStatus,
    Timeline,
)
from springtide.service.api.application import build_api


def submit(http, **changes):
    answer = http.post("/v1/jobs", json=job_body(**changes))
    assert answer.status_code == 201, answer.text
    return msgspec.json.decode(answer.content, type=JobStatus)


def test_a_submitted_job_is_journaled_with_its_source_on_disk_before_the_answer(http, platform):
    seen = []
    platform.subscribe(
        lambda seq, step, view: seen.extend(
            Path(event.job.entrypoint.source_path).read_text()
            for event in step.events
            if isinstance(event, JobSubmitted)
        )
    )
    job = submit(http)

    assert seen == [SOURCE]
    assert job.name == "digits"
    assert job.job_id.startswith("digits-")
    assert len(job.job_id) in range(len("digits-") + 4, len("digits-") + 7)
    record = platform.view().jobs[job.job_id]
    assert record.job.goal.deadline_s == platform.now_s() + 600
    assert record.job.num_virtual_shards == 4
    assert record.job.elastic
    path = platform.workload_dir(job.job_id) / "source" / "digits.py"
    assert record.job.entrypoint.source_path == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert any(
        isinstance(event, JobSubmitted) and event.job.job_id == job.job_id
        for _, step in platform.journal.read()
        for event in step.events
    )


@pytest.mark.parametrize(("max_workers", "shards"), [(1, 4), (4, 4), (5, 8), (128, 128), (129, 256), (256, 256)])
def test_the_shards_follow_the_most_workers(http, platform, max_workers, shards):
    job = submit(http, options__max_workers=max_workers)
    assert platform.view().jobs[job.job_id].job.num_virtual_shards == shards


def test_a_job_is_exact_where_it_names_its_shards(http, platform):
    bounds = {"min_size": 64, "max_size": 1024, "max_local_size": 64, "learning_rate": "sqrt"}
    shards = {"options__num_virtual_shards": 16}
    asked = [{}, shards, {"options__batch": bounds}, {"options__batch": bounds, **shards}]
    job_ids = [submit(http, **options).job_id for options in asked]
    jobs = [platform.view().jobs[job_id].job for job_id in job_ids]
    assert [job.exact for job in jobs] == [False, True, False, True]
    assert jobs[1].num_virtual_shards == 16


def test_a_batch_with_bounds_and_the_timeline_of_a_step_travel_into_the_job(http, platform):
    profile = {
        "local_batch_size": 16,
        "forward_s": 0.01,
        "backward_s": 0.02,
        "buckets": [{"ready_s": 0.025, "num_bytes": 4096}],
    }
    bounds = {"min_size": 64, "max_size": 1024, "max_local_size": 64, "learning_rate": "sqrt"}
    first = submit(http, options__batch=bounds, options__length_unit="progress", options__step_profile=profile)
    second = submit(http, options__batch=bounds, options__num_epochs=9)
    other = submit(http, options__batch=bounds, source__text="def fit(ctx):\n    return 2\n")
    jobs = platform.view().jobs
    job = jobs[first.job_id].job
    assert (job.batch.max_size, job.batch.learning_rate, job.length_unit) == (1024, "sqrt", "progress")
    # A worker never holds more than 64 samples at once, so that the largest batch takes 16 passes.
    assert job.num_virtual_shards == 16
    assert job.step_profile.buckets[0].num_bytes == 4096
    assert job.family == jobs[second.job_id].job.family != jobs[other.job_id].job.family
    assert (first.batch_bounds, first.initial_batch_size, first.global_batch_size) == ((64, 1024), 64, 64)
    assert http.get(f"/v1/jobs/{first.job_id}/series").json()["points"] == []


def test_a_script_is_not_elastic(http, platform):
    source = {"filename": "train.py", "text": "print('x')\n", "kind": "script", "args": ["--lr", "0.1"]}
    job = submit(http, source=source)
    record = platform.view().jobs[job.job_id]
    assert job.kind == "script"
    assert not record.job.elastic
    assert record.job.entrypoint.args == ("--lr", "0.1")


def test_a_key_makes_submitting_idempotent(http, platform):
    headers = {"Idempotency-Key": "6f9d"}
    first = http.post("/v1/jobs", json=job_body(), headers=headers)
    platform.clock_s += 5
    again = http.post("/v1/jobs", json=job_body(), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["job_id"] == again.json()["job_id"]
    assert again.json()["deadline_at_s"] == first.json()["deadline_at_s"]
    assert len(platform.view().jobs) == 1

    for changed in (job_body(options__seed=7), job_body(name="other")):
        refused = http.post("/v1/jobs", json=changed, headers=headers)
        assert refused.status_code == 409
        assert first.json()["job_id"] in refused.json()["error"]["message"]
    source = platform.workload_dir(first.json()["job_id"]) / "source" / "digits.py"
    assert source.read_text() == SOURCE
    assert len(platform.view().jobs) == 1


# The digest of this request as release 97ccb44 wrote it to its journal.
RETRIED = {
    "name": "digits",
    "source": {"filename": "job.py", "text": "def fit(ctx): pass\n", "object_name": "fit"},
    "options": {"max_workers": 2, "deadline_s": 3600.0},
}
DIGEST_OF_97CCB44 = "5ae3d5d197c270c30f07082bad6ca1e8"


def test_a_key_that_was_used_before_an_upgrade_is_known_after_it(http, platform):
    headers = {"Idempotency-Key": "6f9d"}
    first = http.post("/v1/jobs", json=RETRIED, headers=headers).json()["job_id"]
    record = platform.view().jobs[first]
    key = record.job.submit_key.partition(".")[0]
    platform.view().jobs[first] = replace(record, job=replace(record.job, submit_key=f"{key}.{DIGEST_OF_97CCB44}"))
    again = http.post("/v1/jobs", json=RETRIED, headers=headers)
    assert (again.status_code, again.json()["job_id"]) == (200, first)
    for more in ({"seed": 7}, {"on_nan": "fail"}):
        other = {**RETRIED, "options": {**RETRIED["options"], **more}}
        assert http.post("/v1/jobs", json=other, headers=headers).status_code == 409


def test_what_a_request_says_that_is_so_anyway_makes_no_other_of_it(http):
    headers = {"Idempotency-Key": "6f9d"}
    first = http.post("/v1/jobs", json=RETRIED, headers=headers).json()["job_id"]
    said = {**RETRIED, "options": {**RETRIED["options"], "on_nan": "report"}}
    assert http.post("/v1/jobs", json=said, headers=headers).json()["job_id"] == first


def test_requests_with_one_key_at_the_same_time_make_one_job(http, platform):
    answers = []

    def ask():
        answers.append(http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"}))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
    assert len(platform.view().jobs) == 1


def test_a_submission_that_was_given_up_on_keeps_its_key_and_its_source(http, platform):
    headers = {"Idempotency-Key": "k"}
    platform.is_broken = True
    assert http.post("/v1/jobs", json=job_body(), headers=headers).status_code == 503
    (source,) = platform.state_dir.rglob("digits.py")
    platform.is_broken = False
    other = job_body(source__text="def fit(ctx):\n    return 2\n")
    assert http.post("/v1/jobs", json=other, headers=headers).status_code == 409
    assert source.read_text() == SOURCE
    again = http.post("/v1/jobs", json=job_body(), headers=headers)
    assert again.status_code == 201
    assert platform.view().jobs[again.json()["job_id"]].job.entrypoint.source_path == str(source)


def test_a_job_is_found_by_id_and_by_a_name_that_is_clear(http):
    first = submit(http)
    assert http.get(f"/v1/jobs/{first.job_id}").json()["job_id"] == first.job_id
    assert http.get("/v1/jobs/digits").json()["job_id"] == first.job_id
    second = submit(http)
    refused = http.get("/v1/jobs/digits")
    assert refused.status_code == 409
    assert first.job_id in refused.json()["error"]["message"]
    assert http.post(f"/v1/jobs/{first.job_id}/cancel").status_code == 200
    assert http.get("/v1/jobs/digits").json()["job_id"] == second.job_id
    assert [job["job_id"] for job in http.get("/v1/jobs").json()] == [first.job_id, second.job_id]


def test_pause_resume_scale_and_cancel_change_the_job(http, platform):
    job = submit(http)
    platform.run_job(job.job_id)
    paused = http.post(f"/v1/jobs/{job.job_id}/pause")
    assert (paused.status_code, paused.json()["state"]) == (200, "PREEMPTING")
    assert http.post(f"/v1/jobs/{job.job_id}/pause").status_code == 200
    platform.stop_replicas(job.job_id)
    assert http.get(f"/v1/jobs/{job.job_id}").json()["state"] == "PAUSED"
    assert http.post(f"/v1/jobs/{job.job_id}/resume", json={}).status_code == 200
    assert http.post(f"/v1/jobs/{job.job_id}/resume").status_code == 409
    scaled = http.post(f"/v1/workloads/{job.job_id}/scale", json={"minimum": 1, "maximum": 4})
    assert (scaled.json()["min_workers"], scaled.json()["max_workers"]) == (1, 4)
    cancelled = http.post(f"/v1/jobs/{job.job_id}/cancel")
    assert cancelled.json()["state"] == "CANCELLED"
    assert http.post(f"/v1/jobs/{job.job_id}/cancel").status_code == 200
    for verb in ("pause", "resume"):
        assert http.post(f"/v1/jobs/{job.job_id}/{verb}").status_code == 409
    assert http.post(f"/v1/workloads/{job.job_id}/scale", json={"minimum": 1, "maximum": 1}).status_code == 409


def test_a_job_that_runs_is_given_another_goal(http, platform):
    job = submit(http)
    platform.run_job(job.job_id)
    place = f"/v1/jobs/{job.job_id}"

    def goal():
        return platform.view().jobs[job.job_id].job.goal

    now_s = platform.now_s()
    aimed = http.patch(place, json={"deadline_s": 600.0, "is_soft": True, "budget_usd": 5.0})
    assert aimed.status_code == 200, aimed.text
    assert (goal().is_soft, goal().budget_usd) == (True, 5.0)
    assert goal().deadline_s == pytest.approx(now_s + 600.0, abs=5.0)
    before = goal()
    assert http.patch(place, json={"max_restarts": 9}).status_code == 200
    assert (goal(), platform.view().jobs[job.job_id].job.max_restarts) == (before, 9)
    assert http.patch(place, json={"deadline_s": None, "budget_usd": None}).json()["deadline_at_s"] is None
    assert goal().budget_usd is None
    for body in ({"deadline_s": -1}, {"priority": 3}, {"budget_usd": "much"}):
        assert http.patch(place, json=body).status_code == 422
    http.post(f"{place}/cancel")
    assert http.patch(place, json={"budget_usd": 5.0}).status_code == 409
    assert http.patch("/v1/jobs/nobody", json={"budget_usd": 5.0}).status_code == 404


def test_a_service_is_deployed_revised_and_removed(http, platform):
    first = http.put("/v1/services/sentiment", json=service_body())
    assert first.status_code == 200, first.text
    status = msgspec.json.decode(first.content, type=ServiceStatus)
    assert (status.service_id, status.revision, status.state) == ("sentiment", 1, "IDLE")
    assert status.url == "http://127.0.0.1:8787/f/sentiment"
    first_path = platform.view().services["sentiment"].service.entrypoint.source_path

    assert http.put("/v1/services/sentiment", json=service_body()).json()["revision"] == 1
    changed = service_body(source__text="class Digits:\n    x = 1\n")
    assert http.put("/v1/services/sentiment", json=changed).json()["revision"] == 2
    assert http.put("/v1/services/sentiment", json=changed).json()["revision"] == 2
    second_path = platform.view().services["sentiment"].service.entrypoint.source_path
    assert first_path != second_path
    assert Path(first_path).read_text() == service_body()["source"]["text"]

    assert http.get("/v1/services/sentiment").status_code == 200
    assert http.delete("/v1/services/sentiment").json()["state"] == "REMOVED"
    for answer in (http.get("/v1/services/sentiment"), http.delete("/v1/services/sentiment")):
        assert answer.status_code == 404
    assert http.get("/v1/services").json() == []
    assert http.get("/v1/workloads/sentiment/why").json()["state"] == "REMOVED"
    assert http.put("/v1/services/sentiment", json=service_body()).json()["state"] == "IDLE"


def test_a_service_may_not_take_the_id_of_a_job(http):
    job = submit(http)
    assert http.put(f"/v1/services/{job.job_id}", json=service_body()).status_code == 409


def test_the_status_holds_progress_eta_slack_and_devices(http, platform):
    job = submit(http)
    platform.run_job(job.job_id)
    generation = platform.view().jobs[job.job_id].group.generation
    platform.clock_s += 10
    platform.play(
        ProgressReported(
            job_id=job.job_id,
            generation=generation,
            step=30,
            total_steps=120,
            world_size=2,
            epoch=1,
            loss=0.5,
            samples_per_s=64.0,
        )
    )
    status = msgspec.json.decode(http.get("/v1/status").content, type=PlatformStatus)
    (shown,) = status.jobs
    assert shown.progress_fraction == 0.25
    assert shown.eta_s == 90.0
    assert shown.slack_s == pytest.approx(600 - 10 - 90)
    assert shown.device_seconds == pytest.approx(20)
    assert [replica.rank for replica in shown.replicas] == [0, 1]
    assert {device.workload_id for device in status.devices} == {job.job_id}
    assert status.seq == platform.view().seq


def test_why_history_and_timeline_tell_what_happened(http, platform):
    job = submit(http)
    platform.run_job(job.job_id)
    first = platform.view().jobs[job.job_id].replicas[0].replica_id
    platform.clock_s += 3
    platform.play(ReplicaLost(workload_id=job.job_id, replica_id=first, reason="killed by signal 9"))
    platform.clock_s += 1
    platform.run_job(job.job_id, "recover", pause_s=0.041)
    record = platform.view().jobs[job.job_id]
    platform.play(CheckpointCommitted(job_id=job.job_id, generation=record.group.generation, step=7, path="p"))
    platform.play(CheckpointCommitted(job_id=job.job_id, generation=record.group.generation, step=9, path="q"))
    platform.play(JobFinished(job_id=job.job_id, generation=record.group.generation, step=12))

    history = msgspec.json.decode(http.get(f"/v1/workloads/{job.job_id}/history").content, type=list[HistoryEntry])
    kinds = [entry.kind for entry in history]
    assert kinds[0] == "submitted"
    assert "deadline in 10m00" in history[0].text
    assert kinds.count("checkpoint") == 1
    assert any(entry.kind == "lost" and "signal 9" in entry.text for entry in history)
    assert any(entry.kind == "recover" and "41 ms" in entry.text for entry in history)
    assert "ended" in kinds

    why = msgspec.json.decode(http.get(f"/v1/workloads/{job.job_id}/why").content, type=Explanation)
    assert (why.state, why.reason) == ("SUCCEEDED", "the training function returned")
    assert why.next_steps

    timeline = msgspec.json.decode(http.get("/v1/timeline").content, type=Timeline)
    lost = next(interval for interval in timeline.intervals if interval.replica_id == first)
    assert (lost.start_s, lost.end_s) == (100.0, 103.0)
    assert {"start", "crash", "resize", "end", "deadline"} <= {mark.kind for mark in timeline.marks}
    later = msgspec.json.decode(http.get("/v1/timeline?since_s=103.5").content, type=Timeline)
    assert all(interval.end_s is None or interval.end_s >= 103.5 for interval in later.intervals)
    assert "crash" not in {mark.kind for mark in later.marks}


def test_why_of_a_waiting_job_names_who_holds_the_devices_and_what_to_do(http, platform):
    holder = submit(http, options__min_workers=2)
    waiting = submit(http, name="late", options__min_workers=2)
    why = http.get("/v1/workloads/late/why").json()
    assert why["reason"] == "needs 2 devices, 0 are free"
    assert any(holder.job_id in sentence for sentence in why["evidence"])
    assert f"springtide cancel {waiting.job_id}" in why["next_steps"]


def test_logs_are_answered_with_the_replica_before_each_line(http, platform):
    job = submit(http)
    folder = platform.workload_dir(job.job_id) / "logs"
    folder.mkdir()
    (folder / f"{job.job_id}.0.log").write_bytes(b"one\ntwo\n\xff\x1b[31mred\n")
    answer = http.get(f"/v1/workloads/{job.job_id}/logs?tail=2")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == f"[{job.job_id}.0] two\n[{job.job_id}.0] \ufffd\u241b[31mred\n"
    assert http.get(f"/v1/workloads/{job.job_id}/logs?replica={job.job_id}.9").status_code == 404


@pytest.mark.slow
def test_shutdown_is_passed_on(http, platform):
    assert http.post("/v1/shutdown", json={"stop_workers": False}).status_code == 202
    assert platform.shutdowns == [False]


def test_a_platform_that_does_not_record_is_a_503_with_retry_after(http, platform):
    platform.is_broken = True
    answer = http.post("/v1/jobs", json=job_body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


def test_metrics_count_without_naming_jobs(http, stranger, platform):
    job = submit(http)
    platform.run_job(job.job_id)
    http.post(f"/v1/workloads/{job.job_id}/scale", json={"minimum": 1, "maximum": 1})
    platform.run_job(job.job_id, "shrink", pause_s=0.2)
    http.put("/v1/services/quiet", json=service_body())
    platform.play(LoadObserved(service_id="quiet", arrivals_per_s=1, in_flight=0, queued=0, idle_s=0))
    text = stranger.get("/metrics").text
    assert 'springtide_jobs{state="RUNNING"} 1.0' in text
    assert 'springtide_resize_pause_seconds_bucket{direction="shrink",le="0.1"} 0.0' in text
    assert 'springtide_resize_pause_seconds_bucket{direction="shrink",le="0.25"} 1.0' in text
    assert 'springtide_resize_pause_seconds_count{direction="shrink"} 1.0' in text
    assert 'springtide_job_resizes_total{direction="shrink"} 1.0' in text
    assert "springtide_job_restarts_total 0.0" in text
    assert job.job_id not in text
    assert "quiet" not in text


def test_every_operation_is_described_with_the_shape_of_its_answer(http, app):
    described = http.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    operations = [
        (method, path, operation) for path, item in described["paths"].items() for method, operation in item.items()
    ]
    assert len(operations) >= 20
    for method, path, operation in operations:
        success = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        assert success or path == "/login", (method, path)
        for answer in success:
            (content,) = answer["content"].values()
            assert content["schema"], (method, path)
        assert operation["summary"]
        if path.startswith("/v1/"):
            assert "401" in operation["responses"], (method, path)
    references = set()

    def collect(value):
        if isinstance(value, dict):
            references.update(v for k, v in value.items() if k == "$ref")
            for item in value.values():
                collect(item)
        elif isinstance(value, list):
            for item in value:
                collect(item)

    collect(described)
    assert references
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(schemas)
    assert {"PlatformStatus", "JobStatus", "ServiceStatus", "JobIn", "ServiceIn", "Problem"} <= set(schemas)
    page = http.get("/docs").text
    assert "/v1/jobs" in page
    assert "src=" not in page


@pytest.mark.slow
def test_the_stream_tells_every_change_and_skips_what_was_seen(platform):
    app = build_api(platform, token=TOKEN, registry=CollectorRegistry())
    with Served(app) as url, httpx2.Client(base_url=url, headers=HEADERS, trust_env=False) as http:
        seqs = []
        with http.stream("GET", "/v1/stream") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            for line in lines:
                if line.startswith("data: "):
                    status = msgspec.json.decode(line.removeprefix("data: "), type=PlatformStatus)
                    seqs.append(status.seq)
                    if len(seqs) == 2:
                        break
                    submit(http)
        assert seqs[0] < seqs[1] == platform.view().seq
        assert len(status.jobs) == 1
        headers = {"Last-Event-ID": str(seqs[0])}
        with http.stream("GET", "/v1/stream", headers=headers) as answer:
            first = next(line for line in answer.iter_lines() if line.startswith("id: "))
        assert first == f"id: {seqs[1]}"


@pytest.mark.slow
def test_following_logs_ends_with_the_job(platform):
    app = build_api(platform, token=TOKEN, registry=CollectorRegistry())
    with Served(app) as url, httpx2.Client(base_url=url, headers=HEADERS, trust_env=False) as http:
        job = submit(http)
        folder = platform.workload_dir(job.job_id) / "logs"
        folder.mkdir()
        log = folder / f"{job.job_id}.0.log"
        log.write_text("first\n")
        seen = []
        with http.stream("GET", f"/v1/workloads/{job.job_id}/logs?follow=true") as answer:
            for line in answer.iter_lines():
                seen.append(line)
                if len(seen) == 1:
                    with log.open("a") as file:
                        file.write("second\nhalf")
                    http.post(f"/v1/jobs/{job.job_id}/cancel")
                    platform.stop_replicas(job.job_id)
        assert seen == [f"[{job.job_id}.0] {text}" for text in ("first", "second", "half")]
