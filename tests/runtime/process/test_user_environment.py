"""What a worker's process sets for its workload, before anything of the user's is imported."""

from __future__ import annotations

import json
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


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process's variables, without those of trackers, put back after the test."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_trackers_find_the_job_unless_its_environment_says_otherwise(tmp_path: Path, variables) -> None:
    variables |= {"SPRINGTIDE_JOB_ID": "another", "WANDB_TAGS": "mine"}
    job = replace(make_job(tmp_path, "def fit(ctx): ..."), env={"WANDB_RUN_ID": "chosen"})
    set_user_environment(spec_of(job, tmp_path))
    assert (variables["WANDB_RUN_ID"], variables["WANDB_TAGS"]) == ("chosen", "mine")
    assert (variables["SPRINGTIDE_JOB_ID"], variables["WANDB_RESUME"]) == (job.job_id, "allow")
    tags = {"springtide_job_id": job.job_id, "springtide_job_name": job.name}
    assert json.loads(variables["MLFLOW_RUN_CONTEXT"]) == json.loads(variables["MLFLOW_TAGS"]) == tags
