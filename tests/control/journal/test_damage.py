"""Damage to a journal is found before the first decision, whatever SQLite itself notices."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.simulation.sweeps import part
from springtide.control.journal.inspection import inspect_journal
from springtide.control.journal.sqlite import SqliteJournal, cut, witness_path
from springtide.core.errors import JournalDamaged, JournalError
from springtide.core.events import JobFailed
from springtide.core.ports import Step

NUM_STEPS = 150


def steps(number: int) -> list[Step]:
    draw = random.Random(7)
    return [
        Step(
            now_s=float(at),
            events=(JobFailed(job_id=f"job-{draw.randrange(9)}", generation=1, error=f"{draw.random()}"),),
            reasons={f"job-{at}": "it waits for devices that others have" * draw.randrange(20)},
        )
        for at in range(number)
    ]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A journal that was closed in order."""
    path = tmp_path / "whole" / "journal.db"
    path.parent.mkdir()
    write(path, NUM_STEPS)
    return path


def write(path: Path, number: int) -> SqliteJournal:
    journal = SqliteJournal(path)
    journal.set_meta("clock_began_unix_s", "1700000000.0")
    for step in steps(number):
        journal.append(step)
    journal.close()
    return journal


def copy(path: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path.parent, to)
    return to / path.name


def read(path: Path) -> list[Step]:
    """As a control plane does when it starts."""
    journal = SqliteJournal(path)
    try:
        return [step for _, step in journal.read()]
    finally:
        journal.close()


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_no_flipped_bit_of_the_file_changes_what_is_read(whole: Path, tmp_path: Path) -> None:
    draw, expected, noticed = random.Random(11), steps(NUM_STEPS), 0
    for _ in range(part(200, least=60)):
        path = copy(whole, tmp_path / "copy")
        flip(path, draw)
        try:
            assert read(path) == expected, "the bit can only have been where no step is"
        except JournalError:
            noticed += 1
    # About half of the pages of so short a journal belong to tables without a row.
    assert noticed > part(200, least=60) * 2 // 5


def test_every_flipped_bit_of_the_log_is_noticed(tmp_path: Path) -> None:
    """SQLite drops the rest of its log at the first page that does not fit, without a word."""
    path = tmp_path / "running" / "journal.db"
    path.parent.mkdir()
    journal = SqliteJournal(path)
    for step in steps(NUM_STEPS):
        journal.append(step)
    draw, noticed = random.Random(12), 0
    for _ in range(part(200, least=40)):
        damaged = copy(path, tmp_path / "copy")
        damaged.with_name("journal.db-shm").unlink()
        flip(damaged.with_name("journal.db-wal"), draw)
        before = damaged.with_name("journal.db-wal").read_bytes()
        try:
            assert read(damaged) == steps(NUM_STEPS), "the bit can only have been behind the last step"
        except JournalError:
            noticed += 1
            assert damaged.with_name("journal.db-wal").read_bytes() == before, "what is left of it was thrown away"
    journal.close()
    assert noticed > 0.9 * part(200, least=40)


EDITS: dict[str, tuple[str, str]] = {
    "a row deleted": ("DELETE FROM steps WHERE seq = 70", "step 70 of the journal is missing: step 71 stands there"),
    "the last five deleted": (
        "DELETE FROM steps WHERE seq > 145",
        "the journal ends at step 145, but step 150 was acknowledged: the last 5 steps are missing",
    ),
    "a digit changed": (
        "UPDATE steps SET step = CAST(replace(CAST(step AS TEXT), '\"now_s\":7.0', '\"now_s\":8.0') AS BLOB)",
        "step 8 of the journal was changed",
    ),
    "a time changed": ("UPDATE steps SET now_s = 9999 WHERE seq = 99", "step 99 of the journal was changed"),
    "a term changed": ("UPDATE steps SET term = 3 WHERE seq = 12", "step 12 of the journal was changed"),
    "two rows swapped": (
        "UPDATE steps SET seq = CASE seq WHEN 50 THEN -1 ELSE 50 END WHERE seq IN (50, 51); "
        "UPDATE steps SET seq = 51 WHERE seq = -1",
        "step 50 of the journal was changed",
    ),
    "a foreign row": (
        "INSERT INTO steps SELECT 151, term, now_s, step, chain FROM steps WHERE seq = 3",
        "step 151 of the journal was changed",
    ),
    "all rows deleted": ("DELETE FROM steps", "the journal ends at step 0, but step 150 was acknowledged"),
    "what it was founded with": (
        "UPDATE meta SET value = '1800000000.0' WHERE key = 'clock_began_unix_s'",
        "step 1 of the journal or what the journal was founded with was changed",
    ),
}


@pytest.mark.parametrize(("edit", "said"), EDITS.values(), ids=EDITS.keys())
def test_every_edit_is_noticed_and_named(whole: Path, edit: str, said: str) -> None:
    with sqlite3.connect(whole) as db:
        db.executescript(edit)
    db.close()
    with pytest.raises(JournalDamaged) as found:
        read(whole)
    assert found.value.problem.startswith(said)
    assert "springtide journal check" in str(found.value)
    reader = SqliteJournal(whole, read_only=True)
    assert inspect_journal(reader).problem.startswith(said)
    reader.close()


def test_a_file_that_was_emptied_is_noticed(whole: Path) -> None:
    whole.write_bytes(b"")
    with pytest.raises(JournalDamaged, match="ends at step 0, but step 150 was acknowledged"):
        read(whole)


def test_without_the_note_of_its_end_the_rest_is_still_checked(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    witness_path(whole).unlink()
    assert len(read(whole)) == NUM_STEPS
    assert "journal.head was missing" in caplog.text
    caplog.clear()
    assert len(read(whole)) == NUM_STEPS
    assert not caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda db: db.execute("UPDATE steps SET now_s = 0.5 WHERE seq = 101"),
        lambda db: db.execute("DELETE FROM steps WHERE seq > 100"),
    ],
)
def test_a_repaired_journal_goes_on_from_what_is_sound(
    whole: Path, damage: Callable[[sqlite3.Connection], None]
) -> None:
    with sqlite3.connect(whole) as db:
        damage(db)
    db.close()
    reader = SqliteJournal(whole, read_only=True)
    report = inspect_journal(reader)
    reader.close()
    assert (report.damaged_seq, report.num_sound) == (101, 100)
    kept = cut(whole, 101)
    assert kept.exists()
    journal = SqliteJournal(whole)
    assert [step for _, step in journal.read()] == steps(NUM_STEPS)[:100]
    assert journal.append(Step(now_s=1e6)) == 101
    journal.close()
    assert len(read(whole)) == 101


def test_a_full_disk_under_the_note_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    journal = SqliteJournal(tmp_path / "journal.db")
    monkeypatch.setattr("springtide.control.journal.witness.os.pwrite", refuse)
    for step in steps(3):
        journal.append(step)
    monkeypatch.undo()
    journal.append(Step(now_s=4.0))
    journal.close()
    assert len(read(tmp_path / "journal.db")) == 4
