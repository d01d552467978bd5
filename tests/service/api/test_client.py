"""The typed client against the real API over a real socket: both sides mean the same."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kits.service.api_fixtures import TOKEN, Served, job_body, service_body
from springtide.client.api import Client, connect
from springtide.core.errors import BackendError, Conflict, InvalidRequest, NotFound, Unauthorized
from springtide.core.events import CancelRequested, JobFailed
from springtide.core.status.platform import JobStatus, ServiceStatus
from springtide.service.api.application import build_api


def source_of(body):
    known = {"object_name": "", "args": (), "import_root": "", "files": {}, "library": ""}
    return SimpleNamespace(**{**known, **body["source"]})


JOB_SOURCE = source_of(job_body())
SERVICE_SOURCE = source_of(service_body())


@pytest.fixture
def url(platform):
    with Served(build_api(platform, token=TOKEN, registry=CollectorRegistry())) as url:
        yield url


@pytest.fixture
def client(url):
    with Client(url, TOKEN) as client:
        yield client


def test_a_job_from_submission_to_its_end(client, platform):
    job = client.submit_job("digits", JOB_SOURCE, {"max_workers": 2, "deadline_s": 60.0})
    assert isinstance(job, JobStatus)
    platform.run_job(job.job_id)
    assert client.job("digits").state == "RUNNING"
    assert [known.job_id for known in client.jobs()] == [job.job_id]
    assert client.status().jobs[0].num_workers == 2
    assert isinstance(client.scale(job.job_id, 1, 4), JobStatus)
    assert client.change(job.job_id, {"budget_usd": 7.0}).budget_usd == 7.0
    assert client.pause(job.job_id).state == "PREEMPTING"
    platform.stop_replicas(job.job_id)
    assert client.resume(job.job_id).state == "STARTING"
    assert client.cancel(job.job_id).state == "CANCELLED"
    assert client.history(job.job_id)[0].kind == "submitted"
    assert client.why(job.job_id).state == "CANCELLED"
    assert client.timeline().intervals
    client.shutdown(stop_workers=False)
    assert platform.shutdowns == [False]


def test_a_service_from_deployment_to_removal(client):
    status = client.deploy_service("sentiment", SERVICE_SOURCE, {"max_replicas": 2})
    assert isinstance(status, ServiceStatus)
    assert client.services() == [client.service("sentiment")]
    assert isinstance(client.scale("sentiment", 0, 3), ServiceStatus)
    assert client.remove_service("sentiment").state == "REMOVED"


def test_refusals_come_back_as_the_errors_they_are(client, url, platform):
    with pytest.raises(NotFound, match="springtide ps"):
        client.job("nobody")
    with pytest.raises(InvalidRequest, match="deadline_s must be above 0"):
        client.submit_job("digits", JOB_SOURCE, {"deadline_s": -1})
    with pytest.raises(InvalidRequest, match="max_workers"):
        client.submit_job("digits", JOB_SOURCE, {"workers": 1})
    job = client.submit_job("digits", JOB_SOURCE)
    client.cancel(job.job_id)
    with pytest.raises(Conflict):
        client.pause(job.job_id)
    with pytest.raises(NotFound):
        client.why("../../v1/status")
    with Client(url, "not-the-token") as stranger, pytest.raises(Unauthorized, match="wrong"):
        stranger.status()
    platform.is_broken = True
    with pytest.raises(BackendError, match="did not record"):
        client.submit_job("digits", JOB_SOURCE)


def test_a_key_submits_once(client):
    first = client.submit_job("digits", JOB_SOURCE, idempotency_key="k")
    assert client.submit_job("digits", JOB_SOURCE, idempotency_key="k").job_id == first.job_id
    assert client.submit_job("digits", JOB_SOURCE).job_id != first.job_id


@pytest.mark.slow
def test_the_stream_survives_every_line_break_that_unicode_knows(client, platform):
    job = client.submit_job("digits", JOB_SOURCE)
    platform.run_job(job.job_id)
    generation = platform.view().jobs[job.job_id].group.generation
    stream = client.stream()
    assert next(stream).jobs[0].state == "RUNNING"
    strange = "one\u2028two\u0085three\r\nfour\x0b"
    platform.play(JobFailed(job_id=job.job_id, generation=generation, error=strange))
    assert next(stream).jobs[0].reason == strange
    stream.close()


@pytest.mark.slow
def test_logs_are_followed_until_the_job_ends(client, platform):
    job = client.submit_job("digits", JOB_SOURCE)
    folder = platform.workload_dir(job.job_id) / "logs"
    folder.mkdir()
    (folder / f"{job.job_id}.0.log").write_text("one\u2028still one\ntwo\n")
    expected = [f"[{job.job_id}.0] one\u2028still one", f"[{job.job_id}.0] two"]
    assert list(client.logs(job.job_id)) == expected
    assert list(client.logs(job.job_id, tail=1)) == expected[1:]
    lines = client.logs(job.job_id, follow=True)
    assert next(lines) == expected[0]

    def end():
        platform.play(CancelRequested(workload_id=job.job_id))
        platform.stop_replicas(job.job_id)

    thread = threading.Thread(target=end)
    thread.start()
    assert list(lines) == expected[1:]
    thread.join()
    with pytest.raises(NotFound):
        list(client.logs("nobody", follow=True))


def test_connecting_through_the_state_directory(url, tmp_path, monkeypatch):
    for variable in ("SPRINGTIDE_URL", "SPRINGTIDE_TOKEN", "SPRINGTIDE_STATE"):
        monkeypatch.delenv(variable, raising=False)
    state = tmp_path / "state"
    state.mkdir()
    (state / "platform.json").write_bytes(msgspec.json.encode({"pid": 1, "url": url, "version": "0"}))
    (state / "token").write_text(f"{TOKEN}\n")
    with connect(state_dir=state) as client:
        assert client.status().policy == "arrival-order"
    monkeypatch.setenv("SPRINGTIDE_STATE", str(state))
    with connect() as client:
        assert client.status().policy == "arrival-order"
