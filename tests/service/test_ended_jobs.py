"""Jobs that have left the platform's state are answered for as before, also by the next control plane."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from kits.service.api_fixtures import HEADERS, TOKEN, job_body
from springtide.backends.inbox import Inbox
from springtide.control.journal.retention import Retention
from springtide.core.events import JobFailed, PlatformStarted
from springtide.core.status.shares import SharingStatus
from springtide.service.api.application import build_api
from springtide.service.platform import Platform


class NoMachines:
    """An executor without devices: every job waits until it is cancelled."""

    def __init__(self, clock):
        self.inbox = Inbox(clock)
        self.post, self.wait, self.acknowledge = self.inbox.post, self.inbox.wait, self.inbox.take_sources

    def recover(self, standing):
        pass

    def start(self, action):
        pass


class Serving:
    """A control plane of this process with its API."""

    def __init__(self, folder, keep):
        self.platform = Platform(folder, "fifo", (), NoMachines, keep=keep, sharing=SharingStatus)
        self.app = build_api(self.platform, token=TOKEN, registry=CollectorRegistry())
        self.client = TestClient(self.app, base_url="http://127.0.0.1:8787", headers=HEADERS)
        self.ended = threading.Event()
        self.platform.start(on_stop=self.ended.set)

    def turn(self, number=2):
        for _ in range(number):
            self.platform.submit(PlatformStarted())

    def get(self, path, status=200):
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def end(self):
        self.platform.request_shutdown(stop_workers=False)
        self.platform.join(timeout_s=20.0)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.control.upkeep.STAYS_S", 0.0)
    monkeypatch.setattr("springtide.control.upkeep.SNAPSHOT_STEPS", 1)
    made = []

    def serve(keep=None):
        made.append(Serving(tmp_path, keep))
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
