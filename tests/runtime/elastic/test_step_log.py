"""The step log on a disk that is full for a while: every line once, none torn, none lost."""

from __future__ import annotations

import json
import resource

import pytest

from springtide.runtime.elastic.step_log import StepLog, StepRecord


def record(step):
    return StepRecord(generation=1, step=step, epoch=0, loss=0.5, num_samples=16, ids_digest="d" * 16)


def test_a_write_that_fails_half_way_is_repeated_whole(tmp_path):
    log, path = StepLog(tmp_path), tmp_path / "steps.jsonl"
    log.remember(record(1))
    log.write(1)
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file may grow by half a line from here: what a full disk does to a write.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
    try:
        for step in range(2, 102):
            log.remember(record(step))
            with pytest.raises(OSError, match="too large"):
                log.write(1)
            assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write(1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 102))


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_member_that_took_over_the_state_writes_what_the_dead_leader_left_out(tmp_path):
    leader, survivor, joiner = StepLog(tmp_path), StepLog(tmp_path), StepLog(tmp_path)
    for step in range(1, 8):
        leader.remember(record(step))
        survivor.remember(record(step))
        leader.write(1)
    # The leader commits step 8 and dies before it writes the line; the survivor gives its state away and dies too.
    survivor.remember(record(8))
    joiner.take_over(survivor.newest())
    joiner.forget_written()
    joiner.remember(record(9))
    joiner.write(2)
    assert steps_in(tmp_path / "steps.jsonl") == list(range(1, 10))


def test_whoever_writes_a_checkpoint_brings_the_log_up_to_it_without_leading(tmp_path):
    leader, other = StepLog(tmp_path), StepLog(tmp_path)
    # Both began from a checkpoint of step 4, so that the second one's idea of the log is old by now.
    leader.restart_at(4)
    other.restart_at(4)
    for step in range(5, 8):
        leader.remember(record(step))
        other.remember(record(step))
        leader.write(1)
    other.remember(record(8))
    other.write(2, is_leader=False)
    assert steps_in(tmp_path / "steps.jsonl") == [5, 6, 7, 8]
