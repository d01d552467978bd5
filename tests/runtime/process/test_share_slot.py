"""What workers that hold a part of a device tell the share daemon, and that the others tell nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kits.runtime.training_jobs import make_job
from springtide.core.shares import Share
from springtide.core.wire.shares import SlotReader, SlotWriter, make_slots
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, WorkloadId
from springtide.runtime.elastic.reporting import Reporter
from springtide.runtime.process.share_slot import open_slot
from springtide.runtime.serving.replica import ServedUserModel

SHARE = Share(request=0.3, limit=0.6)


@pytest.fixture
def path(tmp_path):
    make_slots(tmp_path / "slots", 4)
    return tmp_path / "slots"


@pytest.fixture
def reader(path):
    reader = SlotReader(path)
    yield reader
    reader.close()


def spec_of(share, path, slot=1):
    service = InferenceService(
        service_id=WorkloadId("s"), name="s", entrypoint=Entrypoint(source_path="s.py", kind="class")
    )
    return WorkerSpec(
        workload=service,
        replica_id=ReplicaId("s.0"),
        generation=1,
        control_address="unix:///nowhere",
        token="",
        work_dir="",
        log_path="",
        share=share,
        share_path=str(path),
        share_slot=slot,
    )


class Counting:
    """Doubles, and fails on a zero."""

    def predict(self, values: list[int]) -> list[int]:
        if 0 in values:
            raise ValueError("zero")
        return [2 * value for value in values]


class Alone:
    """Takes one call at a time."""

    def predict(self, value: int) -> int:
        return value + 1


def test_who_holds_the_whole_device_has_no_slot(path):
    assert open_slot(spec_of(None, path)) is None
    assert open_slot(spec_of(SHARE, "")) is None, "nothing on this platform listens"


def test_a_slot_that_cannot_be_opened_costs_no_work(tmp_path, caplog):
    assert open_slot(spec_of(SHARE, tmp_path / "none")) is None
    assert "hears nothing of this worker" in caplog.text


def test_every_predicted_batch_is_an_iteration_with_its_size(path, reader):
    reader.read(1)
    model = ServedUserModel(Counting, 2, {}, open_slot(spec_of(SHARE, path)))
    (outcome,) = model.answer([b'{"values": [1, 2, 3]}'])
    assert outcome.body == b"[2,4,6]"
    told = reader.read(1)
    assert (told.num_begun, told.num_ended, told.started_s) == (2, 2, 0.0)
    assert [ended.batch_size for ended in told.finished] == [2, 1], "in batches of at most two"
    model.set_queue_length(3)
    assert reader.read(1).num_queued == 3


def test_a_call_alone_is_an_iteration_of_one(path, reader):
    reader.read(1)
    model = ServedUserModel(Alone, 8, {}, open_slot(spec_of(SHARE, path)))
    model.answer([b'{"value": 1}', b'{"value": 2}'])
    assert [ended.batch_size for ended in reader.read(1).finished] == [1, 1]


def test_calls_at_the_same_time_are_one_iteration(path, reader):
    reader.read(1)
    model = ServedUserModel(Alone, 8, {}, open_slot(spec_of(SHARE, path)))
    model.began(1)
    model.began(1)
    model.ended(is_done=False)
    told = reader.read(1)
    assert (told.num_begun, told.num_ended) == (1, 0)
    model.ended(is_done=True)
    assert reader.read(1).num_ended == 1


def test_a_prediction_that_fails_is_no_measurement(path, reader):
    reader.read(1)
    model = ServedUserModel(Counting, 8, {}, open_slot(spec_of(SHARE, path)))
    (outcome,) = model.answer([b'{"values": [0]}'])
    assert outcome.status == "error"
    told = reader.read(1)
    assert (told.num_begun, told.num_ended, told.started_s, told.finished) == (1, 0, 0.0, ())


def test_an_iteration_shows_while_it_runs(path, reader):
    slot = SlotWriter(str(path), 2, time.monotonic)
    slot.begin(16)
    told = reader.read(2)
    assert (told.batch_size, told.num_begun, told.num_ended) == (16, 1, 0)
    assert 0.0 < told.started_s <= time.monotonic()
    slot.end()
    assert reader.read(2).num_ended == 1


def test_a_training_step_is_an_iteration_until_it_waits_for_others(path, reader):
    reader.read(0)
    link = SimpleNamespace(send=lambda report: 0, update=lambda **standing: None)
    reporter = Reporter(link, SlotWriter(str(path), 0, time.monotonic))
    reporter.step_begins(64)
    assert reader.read(0).batch_size == 64
    assert reporter.computation_ended() <= time.monotonic()
    assert [ended.batch_size for ended in reader.read(0).finished] == [64]
    reporter.step_begins(64)
    reporter.step_given_up()
    assert (reader.read(0).started_s, reader.read(0).num_ended) == (0.0, 1)


def test_without_a_slot_the_reporter_only_reports():
    reporter = Reporter(SimpleNamespace())
    reporter.step_begins(8)
    reporter.step_given_up()
    assert reporter.computation_ended() <= time.monotonic()
    assert make_job().share is None
