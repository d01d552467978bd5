"""The model of a job's directory refuses writers of the past and complains of what must never be."""

from __future__ import annotations

import pytest

from springtide.core.errors import Fenced, StorageError
from springtide.core.workload import Checkpoint
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.store import JobStore


def make_store() -> JobStore:
    store = JobStore("job", complain)
    store.begin(1, 0, is_fresh=True, born_generation=1)
    store.commit(1, 0, 4)
    return store


def test_writer_of_the_past_is_refused_and_changes_nothing() -> None:
    store = make_store()
    store.raise_fence(2)
    with pytest.raises(Fenced):
        store.commit(1, 4, 5)
    with pytest.raises(Fenced):
        store.write_manifest(Checkpoint(generation=1, step=4, path="p"))
    assert (store.num_steps, store.num_refused, store.manifests) == (4, 2, {})


@pytest.mark.parametrize(("first", "end"), [(3, 5), (5, 6)])
def test_step_committed_twice_or_left_out_is_a_violation(first: int, end: int) -> None:
    with pytest.raises(InvariantViolation, match="samples-once"):
        make_store().commit(1, first, end)


def test_fresh_group_rolls_the_log_back_to_its_checkpoint() -> None:
    store = make_store()
    store.begin(2, 2, is_fresh=True, born_generation=2)
    store.commit(2, 2, 6)
    assert store.commits == [(1, 0, 2), (2, 2, 6)]


def test_group_without_state_is_a_violation() -> None:
    store = make_store()
    with pytest.raises(InvariantViolation, match="state-carried"):
        store.begin(2, 0, is_fresh=True, born_generation=1)


def test_full_disk_takes_no_checkpoint() -> None:
    store = make_store()
    store.is_full = True
    with pytest.raises(StorageError, match="no space left"):
        store.write_blobs("p")
    assert store.newest() is None
