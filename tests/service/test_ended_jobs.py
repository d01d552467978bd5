"""What has left the platform's state is answered for as before, also by the next control plane."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from kits.service.api_fixtures import job_body, service_body
from kits.service.small_platform import Serving
from springtide.control.journal.retention import Retention
from springtide.core.errors import BackendError
from springtide.core.events import JobFailed
from springtide.core.resources import make_node
from springtide.service.lookup import runs_of_code


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.control.upkeep.STAYS_S", 0.0)
    monkeypatch.setattr("springtide.control.upkeep.SNAPSHOT_STEPS", 1)
    made = []

    def serve(keep=None, nodes=()):
        made.append(Serving(tmp_path, keep, nodes))
        return made[-1]

    yield serve
    for serving in made:
        if serving.platform._thread.is_alive():
            serving.end()


def submit(serving, key, **changes):
    body = job_body(options__deadline_s=None, **changes)
    answer = serving.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})
    assert answer.status_code in (200, 201), answer.text
    return answer.status_code, answer.json()["job_id"]


def test_an_ended_job_is_answered_for_as_before(serve):
    first = serve()
    _, job_id = submit(first, "one")
    _, waiting = submit(first, "two", name="waits")
    first.client.post(f"/v1/jobs/{job_id}/cancel")
    before = {path: first.get(path) for path in (f"/v1/workloads/{job_id}/history", f"/v1/jobs/{job_id}")}
    first.turn()
    assert set(first.platform.view().jobs) == {waiting}, "it has not left the state"
    first.end()
    second = serve()
    second.turn()
    for serving in (second,):
        assert set(serving.platform.view().jobs) == {waiting}
        assert {path: serving.get(path) for path in before} == before
        assert serving.get("/v1/jobs/digits")["job_id"] == job_id, "it is not found by its name"
        assert serving.get(f"/v1/workloads/{job_id}/why")["state"] == "CANCELLED"
        assert serving.client.get(f"/v1/workloads/{job_id}/logs").status_code == 200
        assert serving.get(f"/v1/jobs/{job_id}/series")["points"] == []
        assert [job["job_id"] for job in serving.get("/v1/jobs")] == [job_id, waiting]
        assert [job["job_id"] for job in serving.get("/v1/jobs?name=digits")] == [job_id]
        assert [job["job_id"] for job in serving.get("/v1/status")["jobs"]] == [job_id, waiting]
        assert submit(serving, "one") == (200, job_id), "the same request made another job"
        assert serving.client.post(f"/v1/jobs/{job_id}/pause").status_code == 409
        assert 'springtide_jobs_ended_total{state="CANCELLED"} 1.0' in serving.client.get("/metrics").text
        kinds = [entry["kind"] for entry in serving.get(f"/v1/workloads/{waiting}/history")]
        assert kinds[:2] == ["submitted", "waiting"], "the story of a job that goes on is lost"


def test_runs_that_left_the_state_are_known_by_their_code(serve):
    first = serve()
    _, job_id = submit(first, "one")
    family = first.platform.view().jobs[job_id].job.family
    first.client.post(f"/v1/jobs/{job_id}/cancel")
    first.turn()
    assert not first.platform.view().jobs, "it has not left the state"
    first.end()
    second = serve()
    _, renamed = submit(second, "two", name="renamed")
    _, other = submit(second, "three", name="other", source__text="def fit(ctx):\n    return 2\n")
    jobs = second.platform.view().jobs
    assert jobs[renamed].job.family == family
    assert jobs[other].job.family.startswith("other-")


def test_a_run_of_an_older_version_that_left_the_state_is_known_by_its_name(serve, tmp_path):
    first = serve()
    _, job_id = submit(first, "one", source__text="def fit(ctx):\n    return 1\n", options__params={"width": "1"})
    family = first.platform.view().jobs[job_id].job.family
    first.client.post(f"/v1/jobs/{job_id}/cancel")
    first.turn()
    first.end()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as journal:
        journal.execute("DROP TABLE ended_code")
        journal.commit()
    second = serve()
    _, again = submit(second, "two", source__text="def fit(ctx):\n    return 1\n")
    assert second.platform.view().jobs[again].job.family == family
    view = second.platform.view()
    code = family.rpartition("-")[2]
    assert [record.workload_id for record in runs_of_code(view, code, "digits", 9)] == [again, job_id]
    assert [record.workload_id for record in runs_of_code(view, code, "other", 9)] == [again]


def test_another_body_under_the_key_of_an_ended_job_is_a_conflict(serve):
    serving = serve()
    _, job_id = submit(serving, "one")
    serving.client.post(f"/v1/jobs/{job_id}/cancel")
    serving.turn()
    body = job_body(name="other", options__deadline_s=None)
    answer = serving.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 409
    assert f"was used for {job_id}" in answer.text


def test_a_job_that_retention_dropped_is_told_as_dropped(serve):
    serving = serve(Retention(ended_s=0.2))
    _, job_id = submit(serving, "one")
    serving.client.post(f"/v1/jobs/{job_id}/cancel")
    serving.turn()
    while job_id in str(serving.get("/v1/jobs")):
        serving.turn(1)
    answer = serving.client.get(f"/v1/workloads/{job_id}/why")
    assert answer.status_code == 404
    assert f"the job '{job_id}' was dropped by retention: it ended" in answer.text
    assert "dropped" not in serving.client.get("/v1/jobs/never-was").text


def test_news_of_a_job_that_left_changes_nothing(serve):
    serving = serve()
    _, job_id = submit(serving, "one")
    serving.client.post(f"/v1/jobs/{job_id}/cancel")
    serving.turn()
    serving.platform.submit(JobFailed(job_id=job_id, generation=1, error="late"))
    serving.turn()
    assert serving.get(f"/v1/jobs/{job_id}")["state"] == "CANCELLED"
    assert serving.platform.trouble == ""


def test_a_removed_service_is_answered_for_and_comes_again_with_numbers_of_its_own(serve):
    serving = serve(nodes=(make_node("n", 1),))
    deployed = serving.client.put("/v1/services/digits", json=service_body(options__min_replicas=1))
    assert deployed.status_code in (200, 201), deployed.text
    serving.turn()
    assert [replica["replica_id"] for replica in serving.get("/v1/services/digits")["replicas"]] == ["digits.0"]
    assert serving.client.delete("/v1/services/digits").status_code == 200
    serving.turn(3)
    assert not serving.platform.view().services, "it has not left the state"
    paths = ("/v1/workloads/digits/why", "/v1/workloads/digits/history")
    before = {path: serving.get(path) for path in paths}
    assert before[paths[0]]["state"] == "REMOVED"
    assert before[paths[1]][0]["kind"] == "deployed"
    assert serving.client.get("/v1/services/digits").status_code == 404
    assert serving.client.get("/v1/workloads/digits/logs").status_code == 200
    assert serving.get("/v1/services") == serving.get("/v1/jobs") == []
    scaled = serving.client.post("/v1/workloads/digits/scale", json={"minimum": 1, "maximum": 2})
    assert scaled.status_code == 404, scaled.text
    serving.end()
    again = serve(nodes=(make_node("n", 1),))
    again.turn()
    assert {path: again.get(path) for path in paths} == before
    again.client.put("/v1/services/digits", json=service_body(options__min_replicas=1))
    again.turn()
    record = again.platform.view().services["digits"]
    assert (record.service.revision, [replica.replica_id for replica in record.replicas]) == (2, ["digits.1"])
    assert again.get("/v1/workloads/digits/why")["state"] == "READY"


def test_a_platform_does_not_start_in_a_state_directory_that_was_moved_while_jobs_need_it(serve, tmp_path):
    first = serve()
    _, job_id = submit(first, "one")
    first.end()
    place = tmp_path / "moved"
    place.mkdir()
    for path in set(tmp_path.iterdir()) - {place}:
        path.rename(place / path.name)
    with pytest.raises(BackendError, match=f"when {job_id} was submitted"):
        Serving(place, None, ())
