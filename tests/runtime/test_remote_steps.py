"""The step log in a store: written in the background, whole before every checkpoint, fenced."""

from __future__ import annotations

import secrets
import threading

import pytest

from springtide.core.errors import Fenced, StorageError
from springtide.core.workload import WorkloadId
from springtide.runtime import remote_steps
from springtide.runtime.records import StepRecord
from springtide.runtime.remote_steps import RemoteStepLog
from springtide.storage.open import open_store
from springtide.storage.workload_store import WorkloadStore

JOB = WorkloadId("job")


@pytest.fixture
def url():
    return f"memory://{secrets.token_hex(8)}"


def open_log(url):
    return RemoteStepLog(WorkloadStore(open_store(url), JOB))


def remember(log, first, last, generation=1):
    for step in range(first, last + 1):
        log.remember(
            StepRecord(generation=generation, step=step, epoch=0, loss=0.5, num_samples=4, ids_digest=f"{step:x}")
        )


def logged(url):
    return [(record["step"], record["generation"]) for record in WorkloadStore(open_store(url), JOB).steps()]


def test_steps_are_written_in_the_background_when_many_wait(url, monkeypatch):
    written = threading.Event()
    log = open_log(url)
    log_steps = log._store.log_steps

    def tell(*arguments):
        step = log_steps(*arguments)
        written.set()
        return step

    monkeypatch.setattr(log._store, "log_steps", tell)
    monkeypatch.setattr(remote_steps, "_MANY_LINES", 100)
    monkeypatch.setattr(log, "_interval_s", 1e9)
    remember(log, 1, 99)
    log.write(1)
    assert log._thread is None
    remember(log, 100, 100)
    log.write(1)
    assert written.wait(30)
    assert [step for step, _ in logged(url)] == list(range(1, 101))


def test_who_leaves_writes_at_once_and_the_next_leader_only_what_is_lacking(url):
    leader, survivor = open_log(url), open_log(url)
    remember(leader, 1, 6)
    leader.write(1, is_leader=False)
    remember(survivor, 1, 8)
    survivor.forget_written()
    survivor.flush(2)
    remember(survivor, 9, 9, generation=2)
    survivor.flush(2)
    assert logged(url) == [*((step, 1) for step in range(1, 9)), (9, 2)]
    assert WorkloadStore(open_store(url), JOB).head().generation == 2


def test_a_job_that_goes_on_from_a_checkpoint_logs_again_what_it_does_again(url):
    first, second = open_log(url), open_log(url)
    remember(first, 1, 10)
    first.flush(1)
    second.restart_at(4)
    remember(second, 5, 12, generation=2)
    second.flush(2)
    assert logged(url) == [*((step, 1) for step in range(1, 5)), *((step, 2) for step in range(5, 13))]


def test_a_refusal_in_the_background_is_told_with_the_next_step(url, monkeypatch):
    log = open_log(url)
    WorkloadStore(open_store(url), JOB).raise_fence(5)
    monkeypatch.setattr(log, "_interval_s", 0.0)
    remember(log, 1, 3)
    log.write(4)

    def refused():
        with pytest.raises(Fenced, match="a newer one"):
            log.write(4)
        return True

    wait = threading.Event()
    for _ in range(1000):
        if log._fenced_generation == 4:
            break
        wait.wait(0.01)
    assert refused()
    # In the newer generation it may write again.
    log.write(5)
    with pytest.raises(Fenced):
        log.flush(4)
    log.flush(5)
    assert [step for step, _ in logged(url)] == [1, 2, 3]


def test_a_store_that_is_away_costs_no_lines(url, monkeypatch, capsys):
    log = open_log(url)
    monkeypatch.setattr(log, "_interval_s", 0.0)
    failed = threading.Event()
    log_steps = log._store.log_steps

    def away(*arguments):
        if not failed.is_set():
            failed.set()
            raise StorageError("nobody answers")
        return log_steps(*arguments)

    monkeypatch.setattr(log._store, "log_steps", away)
    remember(log, 1, 5)
    log.write(1)
    assert failed.wait(30)
    remember(log, 6, 7)
    log.flush(1)
    assert [step for step, _ in logged(url)] == list(range(1, 8))


def test_any_one_member_that_is_left_can_make_the_log_whole(url):
    leader, joiner, late = open_log(url), open_log(url), open_log(url)
    remember(leader, 1, 300)
    leader.flush(1)
    # Many seconds' steps wait when a joiner comes; then the leader is killed, then whoever fed the next joiner.
    remember(leader, 301, 700)
    joiner.take_over(leader.newest())
    remember(joiner, 701, 720)
    joiner.forget_written()
    late.take_over(joiner.newest())
    remember(late, 721, 725)
    late.flush(3)
    assert [step for step, _ in logged(url)] == list(range(1, 726))


def test_a_leader_hands_over_all_that_waits_however_long_the_store_was_away(url):
    leader, joiner = open_log(url), open_log(url)
    remember(leader, 1, 10)
    leader.flush(1)
    remember(leader, 11, 6000)
    leader._interval_s, leader._written_at_s = 1e9, 0.0
    leader._asked_generation = 1
    assert [record["step"] for record in leader.newest()] == list(range(11, 6001))
    joiner.take_over(leader.newest())
    joiner.flush(2)
    assert [step for step, _ in logged(url)] == list(range(1, 6001))


def test_a_new_leader_writes_at_its_first_step(url):
    log = open_log(url)
    remember(log, 1, 5)
    log.flush(1)
    log._interval_s = 1e9
    log.forget_written()
    remember(log, 6, 6)
    log.write(2)
    assert log._thread is not None


def test_steps_that_nobody_knows_any_more_are_told(url, capsys):
    log = open_log(url)
    remember(log, 1, 3)
    log.flush(1)
    other = open_log(url)
    remember(other, 8, 9)
    other.flush(2)
    assert "the step log will lack steps 4 to 7" in capsys.readouterr().err


def test_who_led_and_leaves_writes_what_waits_unless_others_do(url):
    log = open_log(url)
    remember(log, 1, 4)
    log.leave(1, is_leader=False)
    assert logged(url) == []
    log.leave(1, is_leader=True)
    assert [step for step, _ in logged(url)] == [1, 2, 3, 4]
    WorkloadStore(open_store(url), JOB).raise_fence(2)
    remember(log, 5, 5)
    log.leave(1, is_leader=True)
    assert [step for step, _ in logged(url)] == [1, 2, 3, 4]


def test_what_is_handed_over_is_what_the_giver_remembers(url):
    giver, taker = open_log(url), open_log(url)
    remember(giver, 1, 30)
    taker.take_over(giver.newest())
    giver.flush(1)
    remember(taker, 31, 31)
    taker.flush(2)
    assert [step for step, _ in logged(url)] == list(range(1, 32))
