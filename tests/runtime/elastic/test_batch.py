"""Batches that change under real workers: of exact jobs, the same (step, batch) sequence gives the same bits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from kits.runtime.runtime_plane import TRAIN, artifact_hash
from kits.simulation.sweeps import only_in_full
from springtide.core.wire.workers import CheckpointWritten, Preempt, Progress
from springtide.core.workload import AdaptiveBatch
from springtide.runtime.data.shards import SampleSchedule
from springtide.runtime.local import inprocess
from springtide.runtime.process.entry import load_object

# Nothing that a module draws or computes over its part of a batch, which differs with the parts.
PLAIN = (
    TRAIN.replace("nn.BatchNorm1d(16), ", "")
    .replace(", nn.Dropout(0.2)", "")
    .replace(" + 0.01 * torch.randn_like(batch.x)", "")
)


def batch(rule="adascale"):
    return AdaptiveBatch(min_size=8, max_size=64, learning_rate=rule)


def replayed(plane, directory, monkeypatch):
    """Do the logged sequence of (step, batch) again with one worker in this process; returns the losses."""
    size_of = {record["step"] - 1: plane.batch_sizes[record["generation"]] for record in plane.steps()}
    begin, commit, losses = inprocess._OneWorker.next_shard, inprocess._OneWorker._commit, []

    def next_shard(worker):
        if worker._batch is None:
            worker.training_cursor.set_batch_size(size_of.get(worker.step, 0))
        return begin(worker)

    def committed(worker, reduced):
        commit(worker, reduced)
        losses.append(reduced.loss)

    monkeypatch.setattr(inprocess._OneWorker, "next_shard", next_shard)
    monkeypatch.setattr(inprocess._OneWorker, "_commit", committed)
    for name in ("STEP_S", "OPTIMIZER"):
        monkeypatch.setenv(name, plane.environment[name] if name != "STEP_S" else "0")
    function = load_object(plane.job.entrypoint, f"replayed_{os.getpid()}")
    result = inprocess.run_local(function, plane.job, directory / "artifacts", write=lambda line: None)
    assert result.num_steps == len(plane.steps())
    return losses


def replayed_hash(plane, directory, monkeypatch):
    replayed(plane, directory, monkeypatch)
    return artifact_hash(directory)


def assert_every_sample_once(plane):
    """The log has the samples of every epoch exactly once, in their order."""
    schedule = SampleSchedule(
        num_samples=200, global_batch_size=1, num_epochs=plane.job.num_epochs, seed=plane.job.seed
    )
    num_seen = 0
    for record in plane.steps():
        step, size = record["step"], plane.batch_sizes[record["generation"]]
        expected = schedule.batch_at(step - 1, num_seen, size)
        assert (record["ids_digest"], record["epoch"]) == (expected.ids_digest, expected.epoch), record
        num_seen += record["num_samples"]
    assert num_seen == 200 * plane.job.num_epochs


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adascale", "linear"])
def test_a_batch_that_changes_with_the_workers_gives_the_bits_of_one_worker(make_plane, tmp_path, monkeypatch, rule):
    plane = make_plane(step_s=0.005, num_epochs=8, batch=batch(rule))
    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b", batch=48)
    plane.wait_step(len(plane.steps()) + 3)
    plane.form("a", "b", batch=24)
    plane.wait_step(len(plane.steps()) + 3)
    plane.form("b", batch=13)
    plane.wait_finished()
    assert set(plane.batch_sizes.values()) == {16, 48, 24, 13}
    assert_every_sample_once(plane)
    assert plane.result_hash() == replayed_hash(plane, tmp_path / "again", monkeypatch)
    told = plane.of(Progress)[-1]
    assert (told.global_batch_size, told.progress, told.total_progress) == (13, 100.0, 100.0)
    assert told.step == told.total_steps
    # The last report is silent about noise where the averages leave no gradient above it.
    assert any(report.grad_var for report in plane.of(Progress))


@pytest.mark.slow
def test_a_length_in_progress_takes_more_samples_on_larger_batches(make_plane, tmp_path, monkeypatch):
    plane = make_plane(num_epochs=4, batch=batch(), length_unit="progress")
    plane.start_group("a", "b", batch=64)
    plane.wait_finished()
    told = plane.of(Progress)[-1]
    assert told.progress == told.total_progress == 50.0
    assert sum(record["num_samples"] for record in plane.steps()) > 4 * 200
    assert plane.result_hash() == replayed_hash(plane, tmp_path / "again", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "catchup"),
    [
        ("sgd", "0"),
        ("adamw", "1"),
        *(pytest.param(*rest, marks=only_in_full) for rest in [("sgd", "1"), ("adamw", "0")]),
    ],
)
def test_batches_on_one_to_four_workers_with_a_kill(make_plane, tmp_path, monkeypatch, optimizer, catchup):
    plane = make_plane(
        step_s=0.01,
        optimizer=optimizer,
        environment={"SPRINGTIDE_CATCHUP": catchup},
        num_epochs=16,
        batch=batch(),
    )
    plane.start_group("a", batch=20)
    plane.wait_step(5)
    plane.grow("b", "c", batch=64)
    plane.wait_step(len(plane.steps()) + 3)
    plane.kill("a")
    plane.form("b", "c", forced=True, batch=64)
    plane.wait_step(len(plane.steps()) + 3)
    plane.grow("d", "e", batch=40)
    plane.wait_step(len(plane.steps()) + 3)
    plane.form("e", batch=8)
    plane.wait_finished()
    assert_every_sample_once(plane)
    assert plane.result_hash() == replayed_hash(plane, tmp_path / "again", monkeypatch)


@pytest.mark.slow
def test_a_job_that_is_not_exact_measures_noise_on_any_number_of_workers(make_plane, tmp_path, monkeypatch):
    # A rule that does not follow the noise, whose estimate depends on how many workers there are.
    plane = make_plane(PLAIN, step_s=0.01, num_epochs=16, batch=batch("linear"), exact=False)
    plane.start_group("a", batch=20)
    plane.wait_step(20)
    plane.grow("b", "c", batch=64)
    plane.wait_step(len(plane.steps()) + 20)
    plane.kill("a")
    plane.form("b", "c", forced=True, batch=40)
    plane.wait_step(len(plane.steps()) + 3)
    plane.form("c", batch=8)
    plane.wait_finished()
    assert_every_sample_once(plane)
    assert any(report.grad_var for report in plane.of(Progress))
    losses = [record["loss"] for record in plane.steps()]
    assert losses == pytest.approx(replayed(plane, tmp_path / "again", monkeypatch), rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_preempted_job_goes_on_at_its_sample_with_another_batch(make_plane, tmp_path, monkeypatch):
    plane = make_plane(step_s=0.01, num_epochs=10, batch=batch())
    plane.start_group("a", "b")
    plane.wait_step(5)
    plane.form("a", "b", batch=40)
    plane.wait_step(len(plane.steps()) + 3)
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation), "a", "b")
    plane.wait_exit("a", "b")
    (written,) = plane.of(CheckpointWritten)
    manifest = json.loads((Path(written.checkpoint.path) / "manifest.json").read_text())
    assert manifest["cursor"]["global_batch_size"] == 40
    resumed = make_plane(step_s=0.0, num_epochs=10, batch=batch(), work_dir=plane.work_dir)
    resumed.batch_sizes = dict(plane.batch_sizes)
    resumed.start_group("c", batch=28)
    resumed.wait_finished()
    assert_every_sample_once(resumed)
    assert resumed.result_hash() == replayed_hash(resumed, tmp_path / "again", monkeypatch)


@pytest.mark.slow
def test_a_crash_of_all_goes_back_to_the_checkpoints_sample(make_plane, tmp_path, monkeypatch):
    plane = make_plane(step_s=0.01, num_epochs=10, batch=batch(), checkpoint_interval_s=0.3)
    plane.start_group("a", "b")
    plane.wait_step(5)
    plane.form("a", "b", batch=40)
    plane.wait(lambda: any(told.checkpoint.step > 12 for told in plane.of(CheckpointWritten)), "a checkpoint")
    for name in ("a", "b"):
        plane.signal(name, signal.SIGKILL)
    plane.wait(lambda: {"a", "b"} <= set(plane.exits), "exits")
    resumed = make_plane(step_s=0.0, num_epochs=10, batch=batch(), work_dir=plane.work_dir)
    resumed.batch_sizes = dict(plane.batch_sizes)
    resumed.start_group("c", batch=40)
    resumed.wait_finished()
    # Steps after the checkpoint were done again: the line of the highest generation counts.
    newest = {}
    for record in resumed.steps():
        newest[record["step"]] = record
    resumed.steps = lambda: [newest[step] for step in sorted(newest)]
    assert_every_sample_once(resumed)
    assert resumed.result_hash() == replayed_hash(resumed, tmp_path / "again", monkeypatch)
