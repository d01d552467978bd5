"""What outlives a job's workers, where they share no file system: whole or not there, and checked before it is used."""

from __future__ import annotations

import json
import resource
import secrets

import pytest
import torch
from torch import nn

from springtide.core.errors import CheckpointError, Fenced, StorageError
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob, WorkloadId
from springtide.runtime.elastic import job_storage
from springtide.runtime.elastic.checkpoint import StateSnapshot
from springtide.runtime.elastic.job_storage import LocalStorage, RemoteStorage, open_storage
from springtide.runtime.elastic.step_log import StepRecord
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.process.exits import EXIT_UNFIT, WorkerExit
from springtide.storage.workloads.store import open_workload_store

JOB = WorkloadId("job")


def make_state(num_steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    state = TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.device("cpu"))
    for _ in range(num_steps):
        model(torch.randn(3, 4)).sum().backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
    return state


def snapshot_of(state, step):
    snapshot = StateSnapshot()
    snapshot.take(state, Cursor(step=step, num_seen=step * 4, global_batch_size=4), 0)
    return snapshot


@pytest.fixture
def url():
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def make_storage(url, tmp_path):
    return lambda name="a": RemoteStorage(open_workload_store(url, JOB), tmp_path / name)


def step(number):
    return StepRecord(generation=1, step=number, epoch=0, loss=0.5, num_samples=4, ids_digest="a")


def same(first, second):
    pairs = zip(first.model.state_dict().items(), second.model.state_dict().items(), strict=True)
    return all(name == other and torch.equal(tensor, twin) for (name, tensor), (other, twin) in pairs)


def test_what_one_worker_saved_another_one_goes_on_from(make_storage, url, tmp_path):
    state = make_state()
    storage = make_storage()
    assert make_storage("b").load_newest(make_state()) is None
    for number in (1, 2, 3):
        storage.step_log.remember(step(number))
    checkpoint = storage.write_checkpoint(snapshot_of(state, 3), 1)
    assert checkpoint.path == "workloads/job/checkpoints/00000001-0000000003"
    fresh = make_state(num_steps=0)
    assert not same(state, fresh)
    assert make_storage("b").load_newest(fresh) == Cursor(step=3, num_seen=12, global_batch_size=4)
    assert same(state, fresh)
    # A checkpoint of a step says that the log holds it, and nothing of either is left lying about here.
    assert [record["step"] for record in open_workload_store(url, JOB).steps()] == [1, 2, 3]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["standing"]


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(make_storage, url):
    storage, state = make_storage(), make_state()
    storage.write_checkpoint(snapshot_of(state, 3), 1)
    newest = storage.write_checkpoint(snapshot_of(state, 5), 1)
    store = open_workload_store(url, JOB)
    key = f"{newest.path}/model.safetensors"
    store.store.put(key, store.store.get(key)[:-1] + b"?")
    assert make_storage("b").load_newest(make_state()).step == 3
    store.store.delete([key])
    assert make_storage("b").load_newest(make_state()).step == 3
    older = store.checkpoints()[1]
    store.store.delete([f"{older.path}/manifest.json"])
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded"):
        make_storage("b").load_newest(make_state())


def test_a_fenced_worker_publishes_nothing(make_storage, url):
    storage, state = make_storage(), make_state()
    store = open_workload_store(url, JOB)
    store.raise_fence(4)
    before = store.store.keys("")
    with pytest.raises(Fenced):
        storage.write_checkpoint(snapshot_of(state, 3), 3)
    with pytest.raises(Fenced):
        storage.publish_artifact("model.safetensors", b"x", 3, 3)
    assert store.store.keys("") == before


def test_an_artifact_is_found_where_everyone_expects_it(make_storage, url):
    storage = make_storage()
    key = storage.publish_artifact("model.safetensors", b"weights", 2, 9)
    assert key == make_storage("b").artifact_path("model.safetensors", 2, 9)
    assert open_workload_store(url, JOB).read_artifact("model.safetensors") == b"weights"


def test_a_result_is_written_after_the_steps_that_a_full_disk_kept_out_of_the_log(tmp_path):
    storage, before = LocalStorage(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in (1, 2, 3):
        storage.step_log.remember(step(number))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(StorageError, match="too large"):
            storage.publish_artifact("model.safetensors", b"weights", 1, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "artifacts" / "model.safetensors").exists()
    storage.publish_artifact("model.safetensors", b"weights", 1, 3)
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_store_that_is_away_costs_the_worker_its_place_and_not_the_job(make_storage, monkeypatch, capsys):
    monkeypatch.setattr(job_storage, "_RESTORE_PATIENCE_S", 0.05)
    monkeypatch.setattr(job_storage, "_RESTORE_RETRY_S", 0.02)
    storage = make_storage()

    def away():
        raise StorageError("nobody answers")

    monkeypatch.setattr(storage._store, "checkpoints", away)
    with pytest.raises(WorkerExit) as left:
        storage.load_newest(make_state())
    assert left.value.code == EXIT_UNFIT
    assert "nobody answers" in capsys.readouterr().err


def test_which_storage_a_job_has_is_said_by_its_spec(tmp_path, url):
    job = TrainingJob(job_id=JOB, name="job", entrypoint=Entrypoint(source_path="a.py"))
    spec = WorkerSpec(
        workload=job,
        replica_id=ReplicaId("job.0"),
        generation=1,
        control_address="tcp://127.0.0.1:9",
        token="t",
        work_dir=str(tmp_path),
        log_path="",
    )
    assert isinstance(open_storage(spec), LocalStorage)
    remote = WorkerSpec(**{field: getattr(spec, field) for field in spec.__struct_fields__} | {"store_url": url})
    assert isinstance(open_storage(remote), RemoteStorage)
