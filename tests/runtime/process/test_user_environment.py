"""What a worker's process sets for its workload, before anything of the user's is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.runtime.runtime_plane import make_job
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import ReplicaId
from springtide.runtime.process.user_environment import set_user_environment


def spec_of(job, work_dir: Path) -> WorkerSpec:
    return WorkerSpec(
        workload=job,
        replica_id=ReplicaId("job.0"),
        generation=1,
        control_address="unix:///nowhere",
        token="t",
        work_dir=str(work_dir),
        log_path="",
    )


def test_variables_replace_those_of_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/of/the/platform")
    monkeypatch.setenv("OTHER", "stays")
    job = replace(make_job(tmp_path, "def fit(ctx): ..."), env={"HF_HOME": "/of/the/job"})
    set_user_environment(spec_of(job, tmp_path))
    assert (os.environ["HF_HOME"], os.environ["OTHER"]) == ("/of/the/job", "stays")
