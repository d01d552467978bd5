import time

import msgspec
import pytest

from springtide.core.errors import StorageError
from springtide.core.wire.functions import MAX_LOSSES, FunctionOrder, FunctionReport, Keys, Place
from springtide.runtime.functions.reporting import FunctionReporter
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.memory import MemoryStore
from springtide.storage.stores.open import memory_store

ORDER = FunctionOrder(
    job_id="job-1", store_url="", prefix="jobs/job-1", generation=2, attempt=1, stage=3, replica=1, incarnation=4
)
KEY = Keys("jobs/job-1").report(Place(3, 1), 4)


class Breaking(CheckedStore):
    def __init__(self):
        super().__init__(MemoryStore())
        self.is_broken = False

    def put(self, key, data):
        if self.is_broken:
            raise StorageError("the bucket is gone")
        super().put(key, data)


@pytest.fixture
def store():
    return Breaking()


@pytest.fixture
def reporter(store):
    reporter = FunctionReporter(ORDER, store, [store, memory_store()], time.monotonic)
    yield reporter
    reporter.close()


def written(store):
    return msgspec.json.decode(store.get(KEY), type=FunctionReport)


def test_the_first_report_is_there_before_anything_else(store, reporter):
    report = written(store)
    assert (report.stage, report.replica, report.incarnation) == (3, 1, 4)
    assert (report.generation, report.attempt, report.phase) == (2, 1, "starting")
    assert report.memory_bytes > 0


def test_a_new_phase_is_written_at_once_and_steps_are_held_back(store, reporter):
    reporter.update("training", step=1)
    assert (written(store).phase, written(store).step) == ("training", 1)
    num_puts = store.requests().num_puts
    for step in range(2, 50):
        reporter.update(step=step)
    assert store.requests().num_puts <= num_puts + 2
    reporter.close()
    assert written(store).step == 49


def test_losses_are_numbers_the_newest_and_each_once(store, reporter):
    reporter.add_loss(1, float("nan"), 4)
    reporter.add_loss(2, float("-inf"), 4)
    reporter.add_loss(2, 0.5, 4)
    assert reporter.report.losses == ((1, None, 4), (2, 0.5, 4))
    for step in range(3, MAX_LOSSES + 3):
        reporter.add_loss(step, 0.25, 4)
    assert [loss[0] for loss in reporter.report.losses] == list(range(3, MAX_LOSSES + 3))
    reporter.close()
    assert written(store).losses == reporter.report.losses


def test_what_the_one_before_has_told_is_told_on(store, reporter):
    reporter.take_losses([(3, 0.5, 4), (4, 0.25, 4)])
    reporter.add_loss(5, 0.125, 4)
    reporter.update("training", step=5)
    assert written(store).losses == ((3, 0.5, 4), (4, 0.25, 4), (5, 0.125, 4))


def test_requests_of_the_object_store_are_told(store, reporter):
    store.put("x", b"12")
    store.get("x")
    reporter.update("training")
    report = written(store)
    assert report.usage.num_puts >= 2
    assert report.usage.num_gets == 1
    assert report.bytes_down == 2


def test_a_report_that_cannot_be_written_stops_nobody(store, reporter, capfd):
    store.is_broken = True
    reporter.update("training", step=7)
    assert "could not be written: the bucket is gone" in capfd.readouterr().err
    store.is_broken = False
    reporter.close()
    assert written(store).step == 7


def test_who_may_not_write_any_more_does_not(store, reporter):
    store.is_broken = True
    reporter.update(step=9)
    reporter.close(writes=False)
    store.is_broken = False
    reporter.close()
    assert written(store).step == 0
