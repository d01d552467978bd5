"""The step log in a store: written in the background, whole before every checkpoint, fenced."""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import threading
import zlib
from collections import deque

import pytest

from springtide.core.errors import Fenced, StorageError
from springtide.core.workload import WorkloadId
from springtide.runtime.elastic import remote_steps
from springtide.runtime.elastic.remote_steps import RemoteStepLog
from springtide.runtime.elastic.step_log import StepRecord
from springtide.runtime.elastic.step_spool import SPOOL_NAME, StepSpool, missing_lines
from springtide.storage.step_lines import gap_line, is_gap, lines_above, pack_lines, unpack_lines
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.store import WorkloadStore

JOB = WorkloadId("job")


@pytest.fixture
def url():
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def open_log(tmp_path):
    """A function that makes another member's log, which has a disk of its own."""
    numbers = itertools.count()
    return lambda url: RemoteStepLog(WorkloadStore(open_store(url), JOB), tmp_path / f"member-{next(numbers)}")


def remember(log, first, last, generation=1):
    for step in range(first, last + 1):
        log.remember(
            StepRecord(generation=generation, step=step, epoch=0, loss=0.5, num_samples=4, ids_digest=f"{step:x}")
        )


def logged(url):
    return [(record["step"], record["generation"]) for record in WorkloadStore(open_store(url), JOB).steps()]


def test_steps_are_written_in_the_background_when_many_wait(open_log, url, monkeypatch):
    written = threading.Event()
    log = open_log(url)
    log_steps = log._store.log_steps

    def tell(*arguments):
        step = log_steps(*arguments)
        written.set()
        return step

    monkeypatch.setattr(log._store, "log_steps", tell)
    monkeypatch.setattr(remote_steps, "_WRITE_LINES", 100)
    monkeypatch.setattr(log, "_interval_s", 1e9)
    remember(log, 1, 99)
    log.write(1)
    assert log._thread is None
    remember(log, 100, 100)
    log.write(1)
    assert written.wait(30)
    assert [step for step, _ in logged(url)] == list(range(1, 101))


def test_who_leaves_writes_at_once_and_the_next_leader_only_what_is_lacking(open_log, url):
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


def test_a_job_that_goes_on_from_a_checkpoint_logs_again_what_it_does_again(open_log, url):
    first, second = open_log(url), open_log(url)
    remember(first, 1, 10)
    first.flush(1)
    second.restart_at(4)
    remember(second, 5, 12, generation=2)
    second.flush(2)
    assert logged(url) == [*((step, 1) for step in range(1, 5)), *((step, 2) for step in range(5, 13))]


def test_a_refusal_in_the_background_is_told_with_the_next_step(open_log, url, monkeypatch):
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


def test_a_store_that_is_away_costs_no_lines(open_log, url, monkeypatch, capsys):
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


def test_any_one_member_that_is_left_can_make_the_log_whole(open_log, url):
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


def test_a_leader_hands_over_all_that_waits_however_long_the_store_was_away(open_log, url):
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


def test_a_new_leader_writes_at_its_first_step(open_log, url):
    log = open_log(url)
    remember(log, 1, 5)
    log.flush(1)
    log._interval_s = 1e9
    log.forget_written()
    remember(log, 6, 6)
    log.write(2)
    assert log._thread is not None


def test_steps_that_nobody_knows_any_more_are_told(open_log, url, capsys):
    log = open_log(url)
    remember(log, 1, 3)
    log.flush(1)
    other = open_log(url)
    remember(other, 8, 9)
    other.flush(2)
    assert "the step log will lack 4 steps, 4 to 7" in capsys.readouterr().err
    assert logged(url) == [(1, 1), (2, 1), (3, 1), (8, 1), (9, 1)]
    store = WorkloadStore(open_store(url), JOB)
    lines = [
        json.loads(line) for key in store.store.keys(store.key("steps/")) for line in store.store.get(key).splitlines()
    ]
    assert [line for line in lines if is_gap(line)] == [{"generation": 1, "step": 7, "num_lost": 4}]


def test_who_led_and_leaves_writes_what_waits_unless_others_do(open_log, url):
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


def test_what_is_handed_over_is_what_the_giver_remembers(open_log, url):
    giver, taker = open_log(url), open_log(url)
    remember(giver, 1, 30)
    taker.take_over(giver.newest())
    giver.flush(1)
    remember(taker, 31, 31)
    taker.flush(2)
    assert [step for step, _ in logged(url)] == list(range(1, 32))


def test_more_than_memory_holds_waits_on_the_disk_while_the_store_is_away(open_log, url, monkeypatch):
    log = open_log(url)
    monkeypatch.setattr(log, "_remembered", deque(maxlen=100))
    log._spool._part_lines = 64
    remember(log, 1, 10)
    log.flush(1)
    remember(log, 11, 5000)
    log.flush(1)
    assert [step for step, _ in logged(url)] == list(range(1, 5001))
    # What the store has leaves the disk.
    assert list(log._spool._directory.glob("*.jsonl")) == []


def test_of_more_than_the_disk_may_hold_the_oldest_go_and_the_log_says_how_many(open_log, url, monkeypatch, capsys):
    log = open_log(url)
    monkeypatch.setattr(log, "_remembered", deque(maxlen=10))
    log._spool._part_lines, log._spool._max_bytes = 16, 8000
    remember(log, 1, 1000)
    log.flush(1)
    kept = [step for step, _ in logged(url)]
    first = kept[0]
    assert 900 < first < 991
    assert kept == list(range(first, 1001))
    assert f"the step log will lack {first - 1} steps, 1 to {first - 1}" in capsys.readouterr().err
    assert sum(path.stat().st_size for path in log._spool._directory.glob("*.jsonl")) <= 8000


def test_what_came_with_a_state_is_on_the_disk_after_a_few_steps(open_log, url):
    giver, taker = open_log(url), open_log(url)
    remember(giver, 1, 1000)
    taker.take_over(giver.newest())
    remember(taker, 1001, 1010)
    assert [step for step, _ in taker._spool.lines(0, 2000)] == list(range(1, 1011))
    taker.take_over([])
    assert taker._spool.lines(0, 2000) == []


def test_a_disk_without_room_costs_no_step(open_log, url, tmp_path):
    (tmp_path / "member-0").write_text("no directory")
    log = open_log(url)
    remember(log, 1, 20)
    log.flush(1)
    assert [step for step, _ in logged(url)] == list(range(1, 21))


# --- after the worker's end ------------------------------------------------------------------------------------------


def heard(log):
    return unpack_lines(missing_lines(log._spool._directory))


def test_the_keeper_says_what_the_store_lacks_of_a_leader_however_that_ended(open_log, url, monkeypatch):
    log = open_log(url)
    monkeypatch.setattr(log, "_interval_s", 1e9)
    monkeypatch.setattr(log, "_written_at_s", 1e18)
    remember(log, 1, 200)
    log.write(1)
    assert heard(log) == log._lines_after(0)
    log.flush(1)
    assert heard(log) == []
    remember(log, 201, 205)
    log.write(1)
    assert [step for step, _ in heard(log)] == [201, 202, 203, 204, 205]
    # Another one leads now, and sees to it.
    log.forget_written()
    assert heard(log) == []


def test_a_line_that_a_death_has_cut_is_none(tmp_path):
    spool = StepSpool(tmp_path / SPOOL_NAME)
    spool.add([(1, '{"generation": 1, "step": 1}'), (2, '{"generation": 1, "step": 2}')])
    spool.note(leads=True, written_step=0)
    (path,) = (tmp_path / SPOOL_NAME).glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-5])
    assert [step for step, _ in unpack_lines(missing_lines(tmp_path / SPOOL_NAME))] == [1]


def test_of_too_many_the_newest_are_said_and_how_many_are_not(tmp_path):
    spool = StepSpool(tmp_path / SPOOL_NAME)
    spool.add((step, json.dumps({"generation": 3, "step": step})) for step in range(1, 301))
    spool.note(leads=True, written_step=20)
    said = missing_lines(tmp_path / SPOOL_NAME, max_lines=200)
    assert max(map(len, said)) < 16_000
    lines = unpack_lines(said)
    assert lines[0] == gap_line(3, 21, 100)
    assert [step for step, _ in lines[1:]] == list(range(101, 301))


def test_anything_may_be_printed_and_only_lines_are_heard():
    lines = [(4, '{"generation": 1, "step": 4}'), (5, '{"generation": 1, "step": 5}')]
    (good,) = pack_lines(lines)
    bomb = base64.b64encode(zlib.compress(b"x" * (64 << 20))).decode()
    strange = [good[:40], "springtide-steps: ???", "springtide-steps: AAAA", "", f"springtide-steps: {bomb}"]
    assert unpack_lines(strange) == []
    (other,) = pack_lines([(3, "[]"), (4, '{"step": 4}'), (5, '{"generation": 1, "step": 5}')])
    assert unpack_lines([good, good, *strange, other]) == lines


def test_a_gap_in_what_is_handed_in_is_as_long_as_what_the_log_lacks():
    lines = [gap_line(2, 5, 9), (10, '{"generation": 2, "step": 10}')]
    assert lines_above(lines, 4) == lines
    assert lines_above(lines, 7) == [gap_line(2, 8, 9), lines[1]]
    assert lines_above(lines, 9) == lines[1:]
    assert lines_above(lines, 2) == [gap_line(2, 3, 9), lines[1]]
    assert lines_above(lines, 10) == []


def test_who_has_to_leave_does_not_wait_for_a_store_that_just_failed(open_log, url, monkeypatch):
    log = open_log(url)
    asked = []

    def away(*arguments):
        asked.append(arguments)
        raise StorageError("nobody answers")

    monkeypatch.setattr(log._store, "log_steps", away)
    remember(log, 1, 5)
    log.leave(1, is_leader=True)
    assert len(asked) == 1
    log.leave(1, is_leader=True)
    assert len(asked) == 1
