"""The step log on a disk that is full for a while: every line once, none torn, none lost."""

from __future__ import annotations

import json
import resource

import pytest

from springtide.runtime.records import StepLog, StepRecord


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
