"""The sentences that are made of codes and facts."""

from __future__ import annotations

import msgspec
import pytest

from springtide.core.actions import ResizeJob
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.reasons import ChosenPlan, GroupChange

PLAN = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=1, memory_mb=512),), num_replicas=1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (GroupChange(code="start", after=1), "started on 1 worker"),
        (GroupChange(code="start", after=4), "started on 4 workers"),
        (GroupChange(code="start", after=1, why="1 function", chosen=ChosenPlan(plan=PLAN)), "started: 1 function"),
        (GroupChange(code="recover", after=3), "re-formed with 3 workers after a loss"),
        (GroupChange(code="resize", before=2, after=3, why="a free device"), "resized 2 -> 3 (a free device)"),
        (GroupChange(code="resize", before=2, after=1), "resized 2 -> 1"),
        (GroupChange(code="move", before=2, after=2, why="close (together)"), "moving 2 -> 2 (close (together))"),
        (GroupChange(code="batch", before=32, after=64), "batch 32 -> 64"),
        (GroupChange(code="plan", why="tries more"), "new plan (tries more)"),
    ],
)
def test_a_change_of_a_group_is_told_in_one_sentence(change, text):
    assert change.text() == text


def test_a_journal_that_was_written_before_changes_had_codes_is_read():
    written = b'{"action":"ResizeJob","job_id":"a","generation":1,"replica_ids":["a.0"],"global_batch_size":8}'
    assert msgspec.json.decode(written, type=ResizeJob).change is None
    change = GroupChange(code="plan", why="w", chosen=ChosenPlan(plan=PLAN, why="w"))
    action = ResizeJob(job_id="a", generation=1, replica_ids=("a.0",), global_batch_size=8, change=change)
    assert msgspec.json.decode(msgspec.json.encode(action), type=ResizeJob) == action
