"""What goes of a workload that has ended, and what does not: its fence, and what it made."""

from __future__ import annotations

import os
import secrets

import pytest

from springtide.core.errors import Fenced
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.store import WorkloadStore

JOB = WorkloadId("job")


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("s3_credentials")
        name = f"retire-{os.getpid()}-{secrets.token_hex(4)}"
        return open_store(request.getfixturevalue("s3_server").s3_url("tests", name))
    return CheckedStore(FileStore(tmp_path / "objects", is_durable=False))


@pytest.fixture
def ended(store, tmp_path):
    """A workload with one of everything, and an artifact whose swap never came."""
    workload = WorkloadStore(store, JOB)
    file = tmp_path / "model.safetensors"
    file.write_text("state")
    workload.put_source("train.py", b"def fit(ctx): ...")
    workload.publish_checkpoint(1, 5, {"model.safetensors": file})
    workload.log_steps(1, lambda step: [(number, f'{{"step": {number}}}') for number in range(step + 1, 3)])
    workload.publish_artifact("model.pt", b"the model", 1, 5)
    store.put(workload.artifact_key("model.pt", 1, 4), b"never named")
    workload.put_log(ReplicaId("job.0"), b"said")
    return workload


def keys(workload):
    return [key.removeprefix(workload.prefix) for key in workload.store.keys(workload.prefix)]


@pytest.mark.parametrize("keeps_artifacts", [True, False])
def test_all_goes_but_the_fence_and_what_it_made(ended, keeps_artifacts):
    stays = ["artifacts/00000001-0000000005/model.pt", "head"] if keeps_artifacts else ["head"]
    num_before = len(keys(ended))
    assert ended.retire(keeps_artifacts=keeps_artifacts) == num_before - len(stays)
    assert keys(ended) == stays
    assert set(ended.artifacts()) == ({"model.pt"} if keeps_artifacts else set())
    if keeps_artifacts:
        assert ended.read_artifact("model.pt") == b"the model"
    assert ended.retire(keeps_artifacts=keeps_artifacts) == 0
    assert keys(ended) == stays


def test_who_sleeps_while_it_goes_is_refused_when_he_wakes_up(ended, store, tmp_path):
    sleeper = WorkloadStore(store, JOB)
    assert sleeper.head().generation <= 1
    WorkloadStore(store, JOB).retire(keeps_artifacts=True)
    with pytest.raises(Fenced):
        sleeper.publish_checkpoint(7, 9, {"model.safetensors": tmp_path / "model.safetensors"})
    with pytest.raises(Fenced):
        sleeper.publish_artifact("model.pt", b"late", 7, 9)
    assert ended.read_artifact("model.pt") == b"the model"


def test_of_a_workload_that_kept_nothing_nothing_is_made(store):
    unknown = WorkloadStore(store, JOB)
    assert unknown.retire(keeps_artifacts=True) == 0
    assert keys(unknown) == []


def test_others_lose_nothing(ended, store):
    other = WorkloadStore(store, WorkloadId("job-2"))
    other.put_source("train.py", b"x")
    ended.retire(keeps_artifacts=False)
    assert keys(other) == ["source/train.py"]
