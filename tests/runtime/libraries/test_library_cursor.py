"""The position of a library's loop: in steps, each as one batch of the job."""

from __future__ import annotations

import numpy as np

from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.libraries.library_cursor import LibraryCursor


def batch_of(step, size, epoch=0):
    return GlobalBatch(step=step, epoch=epoch, ids=np.arange(size), global_batch_size=8)


def test_steps_samples_and_what_is_left_are_counted():
    entrypoint = Entrypoint(source_path="train.py", kind="script", library="lightning")
    cursor = LibraryCursor(TrainingJob(job_id=WorkloadId("a"), name="a", entrypoint=entrypoint, global_batch_size=32))
    assert (cursor.step, cursor.total_steps, cursor.is_over) == (0, 0, False)
    cursor.cursor = Cursor()
    cursor.set_batch_size(0)
    assert cursor.cursor.global_batch_size == 32
    for step, (size, epoch) in enumerate([(8, 0), (3, 0), (8, 1)]):
        cursor.offer(batch_of(step, size, epoch), 3 - step)
        assert (cursor.total_steps, cursor.epoch, len(cursor.next_batch().ids)) == (3, epoch, size)
        cursor.commit(cursor.next_batch(), None, 0.0)
    assert (cursor.step, cursor.cursor.num_seen, cursor.progress, cursor.is_over) == (3, 19, 3.0, True)


def test_a_length_that_the_library_does_not_know_is_zero():
    entrypoint = Entrypoint(source_path="train.py", kind="script", library="lightning")
    cursor = LibraryCursor(TrainingJob(job_id=WorkloadId("a"), name="a", entrypoint=entrypoint))
    cursor.offer(batch_of(0, 8), None)
    cursor.commit(cursor.next_batch(), None, 0.0)
    assert (cursor.total_steps, cursor.is_over) == (0, False)
