"""Artifacts over the API: listed, hashed, and sent as they are; nothing else of the machine."""

from __future__ import annotations

import hashlib

import pytest

from kits.service.api_fixtures import job_body


@pytest.fixture
def job_id(http, platform):
    made = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    root = platform.workload_dir(made) / "artifacts"
    (root / "plots").mkdir(parents=True)
    (root / "model.safetensors").write_bytes(b"weights" * 400_000)
    (root / "plots" / "a b.png").write_bytes(b"plot")
    return made


def test_what_a_job_left_is_listed_and_sent(http, job_id):
    listed = http.get(f"/v1/jobs/{job_id}/artifacts").json()
    assert [(each["name"], each["num_bytes"], each["sha256"]) for each in listed] == [
        ("model.safetensors", 2_800_000, ""),
        ("plots/a b.png", 4, ""),
    ]
    hashed = http.get(f"/v1/jobs/{job_id}/artifacts?digests=true").json()
    answer = http.get(f"/v1/jobs/{job_id}/artifacts/model.safetensors")
    assert answer.headers["content-length"] == "2800000"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert hashlib.sha256(answer.content).hexdigest() == hashed[0]["sha256"]
    assert http.get(f"/v1/jobs/{job_id}/artifacts/plots/a%20b.png").content == b"plot"
    assert http.get("/v1/jobs/digits/artifacts").json() == listed


@pytest.mark.parametrize(
    "name", ["nowhere", "..%2Ffence", "%2E%2E%2Fsource%2Fdigits.py", "plots", "%2Fetc%2Fpasswd", "plots%2F..%2F..%2Fx"]
)
def test_other_names_are_not_found(http, job_id, name):
    answer = http.get(f"/v1/jobs/{job_id}/artifacts/{name}")
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_a_job_without_any_has_an_empty_list_and_no_job_is_not_found(http):
    made = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    assert http.get(f"/v1/jobs/{made}/artifacts").json() == []
    assert http.get("/v1/jobs/nowhere/artifacts").status_code == 404


def test_without_the_token_nothing_is_sent(stranger, job_id):
    assert stranger.get(f"/v1/jobs/{job_id}/artifacts/model.safetensors").status_code == 401
