"""Whose a job is: who claims it later shuts out who claimed it earlier, however their words cross on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from springtide.backends.functions.shell.fence import RecordFence
from springtide.backends.functions.shell.notes import Notes
from springtide.core.errors import Fenced, StorageError
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import ControlRecord, Keys
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore

PLAN = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=2, memory_mb=512),))
KEYS = Keys("jobs/j")


def record(**changes: object) -> ControlRecord:
    given = {"generation": 1, "attempt": 1, "restore_step": 0, "plan": PLAN, "incarnations": {"0.0": 1}, **changes}
    return ControlRecord(**given)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> CheckedStore:
    return CheckedStore(FileStore(tmp_path / "store"))


def now(store: CheckedStore) -> ControlRecord:
    return msgspec.json.decode(store.get(KEYS.control), type=ControlRecord)


def test_a_job_without_a_record_is_claimed_with_one_that_stops_all_functions(store: CheckedStore) -> None:
    assert RecordFence(store, KEYS, 1).claim() == (None, Notes())
    assert (now(store).verb, now(store).generation, now(store).incarnations, now(store).term) == ("stop", 0, {}, 1)


def test_what_was_there_is_taken_over_as_it_is(store: CheckedStore) -> None:
    first = RecordFence(store, KEYS, 1)
    first.claim()
    first.write_notes(Notes(used_incarnations=3))
    first.write_control(record(incarnations={"0.0": 3}))
    known, notes = RecordFence(store, KEYS, 2).claim()
    assert known == record(incarnations={"0.0": 3}, term=1)
    assert notes.used_incarnations == 3
    assert now(store) == record(incarnations={"0.0": 3}, term=2)


@pytest.mark.parametrize("word", ["control", "notes", "check", "claim"])
def test_who_was_asleep_meanwhile_is_fenced_at_its_next_word(store: CheckedStore, word: str) -> None:
    asleep = RecordFence(store, KEYS, 4)
    asleep.claim()
    asleep.write_control(record())
    asleep.write_notes(Notes(used_incarnations=1))
    RecordFence(store, KEYS, 5).claim()
    before = (store.get(KEYS.control), store.get(KEYS.notes))
    said: dict[str, Callable[[], object]] = {
        "control": lambda: asleep.write_control(record(attempt=2)),
        "notes": lambda: asleep.write_notes(Notes(used_incarnations=2)),
        "check": asleep.check,
        "claim": asleep.claim,
    }
    with pytest.raises(Fenced, match="belongs to a later control plane"):
        said[word]()
    assert (store.get(KEYS.control), store.get(KEYS.notes)) == before


def test_one_that_never_wrote_a_record_cannot_write_the_first_after_another_has_claimed(store: CheckedStore) -> None:
    asleep = RecordFence(store, KEYS, 1)
    asleep.claim()
    RecordFence(store, KEYS, 2).claim()
    with pytest.raises(Fenced):
        asleep.write_control(record())
    assert now(store).verb == "stop"


def opened(folder: Path) -> CheckedStore:
    return CheckedStore(FileStore(folder / "store"))


class Between(FileStore):
    """A raw store in which something happens just before a replacement; `fails` loses the answer after it was made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.happens: Callable[[], object] = lambda: None
        self.fails = 0

    def replace(self, key: str, data: memoryview, version: str) -> str | None:
        happens, self.happens = self.happens, lambda: None
        happens()
        replaced = super().replace(key, data, version)
        if self.fails:
            self.fails -= 1
            raise StorageError("the connection broke")
        return replaced


def test_words_that_cross_on_the_way_are_told_apart(tmp_path: Path) -> None:
    """Whatever the earlier one writes while the later one claims is either seen by the later one or refused."""
    store = Between(tmp_path / "store")
    earlier, later = (
        RecordFence(CheckedStore(store), KEYS, 1),
        RecordFence(CheckedStore(FileStore(tmp_path / "store")), KEYS, 2),
    )
    earlier.claim()
    taken: list[tuple[ControlRecord | None, Notes]] = []
    store.happens = lambda: taken.append(later.claim())
    with pytest.raises(Fenced):
        earlier.write_notes(Notes(used_incarnations=7))
    assert taken[0][1].used_incarnations == 0

    crossing = Between(tmp_path / "store")
    third, fourth = (
        RecordFence(CheckedStore(FileStore(tmp_path / "store")), KEYS, 3),
        RecordFence(CheckedStore(crossing), KEYS, 4),
    )
    third.claim()
    crossing.happens = lambda: third.write_control(record(attempt=9))
    known, _ = fourth.claim()
    assert known is not None
    assert known.attempt == 9
    assert (now(CheckedStore(store)).attempt, now(CheckedStore(store)).term) == (9, 4)


def test_an_answer_that_was_lost_is_no_other_coordinator(tmp_path: Path) -> None:
    store = Between(tmp_path / "store")
    fence = RecordFence(CheckedStore(store), KEYS, 1)
    fence.claim()
    store.fails = 1
    fence.write_control(record())
    fence.write_control(record(attempt=2))
    assert now(CheckedStore(store)).attempt == 2


def test_a_newer_generation_of_the_same_control_plane_is_not_undone(store: CheckedStore) -> None:
    older, newer = RecordFence(store, KEYS, 1), RecordFence(store, KEYS, 1)
    older.claim()
    newer.claim()
    newer.write_control(record(generation=3))
    with pytest.raises(Fenced):
        older.write_control(record(generation=2))
    older.write_control(record(generation=3, attempt=5))
    newer.write_control(record(generation=3, attempt=6))
    assert now(store).attempt == 6


def test_a_record_that_cannot_be_read_is_not_overwritten(store: CheckedStore) -> None:
    store.put(KEYS.control, b"{")
    with pytest.raises(StorageError, match="jobs/j/control is unreadable"):
        RecordFence(store, KEYS, 1).claim()
    assert store.get(KEYS.control) == b"{"


def test_a_job_that_has_ended_elsewhere_is_not_begun_anew_by_one_that_slept_through_it(store: CheckedStore) -> None:
    asleep = RecordFence(store, KEYS, 1)
    asleep.claim()
    RecordFence(store, KEYS, 2).claim()
    store.delete([KEYS.control, KEYS.notes])
    for say in (lambda: asleep.write_notes(Notes()), lambda: asleep.write_control(record()), asleep.check):
        with pytest.raises(StorageError, match="is gone from the store"):
            say()
    assert store.keys("") == []
