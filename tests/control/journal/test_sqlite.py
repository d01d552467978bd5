"""The journal keeps what it acknowledged, in order, and says clearly when it cannot."""

from __future__ import annotations

import sqlite3

import pytest

from springtide.control.journal.codec import decode_step, encode_step
from springtide.control.journal.memory import MemoryJournal
from springtide.control.journal.sqlite import SqliteJournal, newest_seq
from springtide.core import actions, events
from springtide.core.errors import JournalError
from springtide.core.ports import Step
from springtide.core.workload import Checkpoint, Entrypoint, TrainingJob

JOB = TrainingJob(job_id="a", name="a", entrypoint=Entrypoint(source_path="a.py"), params={"lr": "0.1"})
STEP = Step(
    now_s=1.5,
    events=(events.JobSubmitted(job=JOB), events.JobFinished(job_id="a", generation=1, step=3)),
    actions=(
        actions.StartReplica(
            workload=JOB,
            replica_id="a.0",
            device_id="n/0",
            generation=1,
            restore=Checkpoint(generation=1, step=2, path="c"),
        ),
    ),
    reasons={"a": "because"},
    memory={"rounds": [1, 2]},
)


@pytest.mark.parametrize("make", [lambda path: SqliteJournal(path / "j.db"), lambda path: MemoryJournal()])
def test_what_was_appended_comes_back_in_order(tmp_path, make):
    journal = make(tmp_path)
    seqs = [journal.append(Step(now_s=float(n))) for n in range(3)] + [journal.append(STEP)]
    assert [seq for seq, _ in journal.read()] == seqs
    assert [step for _, step in journal.read(seqs[2])] == [STEP]
    if isinstance(journal, SqliteJournal):
        journal.close()


def test_a_second_process_can_read_while_one_writes(tmp_path):
    writer = SqliteJournal(tmp_path / "j.db")
    writer.append(STEP)
    reader = SqliteJournal(tmp_path / "j.db", read_only=True)
    writer.append(Step(now_s=2.0))
    assert len(list(reader.read())) == 2
    with pytest.raises(JournalError, match="cannot be written"):
        reader.append(STEP)
    reader.close()
    writer.close()


def test_the_file_is_private_and_synced_on_every_commit(tmp_path):
    journal = SqliteJournal(tmp_path / "j.db")
    assert (tmp_path / "j.db").stat().st_mode & 0o077 == 0
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_a_journal_of_another_schema_is_refused_with_the_mend(tmp_path):
    journal = SqliteJournal(tmp_path / "j.db")
    journal.set_meta("schema", "99")
    journal.close()
    with pytest.raises(JournalError, match="schema 99, this version reads up to 2: it was written by a newer version"):
        SqliteJournal(tmp_path / "j.db")


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "j.db").write_bytes(b"not a database, but long enough to look at" * 40)
    with pytest.raises(JournalError, match="cannot be opened"):
        SqliteJournal(tmp_path / "j.db")


def test_a_damaged_step_is_named(tmp_path):
    journal = SqliteJournal(tmp_path / "j.db")
    journal.append(STEP)
    journal.close()
    with sqlite3.connect(tmp_path / "j.db") as db:
        db.execute("UPDATE steps SET step = ?", (b'{"now_s": "\xff"}',))
    db.close()
    journal = SqliteJournal(tmp_path / "j.db")
    with pytest.raises(JournalError, match=r"step 1 of the journal .*was changed after it was written"):
        list(journal.read())
    journal.close()


def test_steps_survive_the_encoding_whole():
    assert decode_step(encode_step(STEP)) == STEP


def test_the_newest_step_of_a_journal(tmp_path):
    assert newest_seq(tmp_path / "journal.db") == 0
    (tmp_path / "journal.db").write_bytes(b"no database")
    assert newest_seq(tmp_path / "journal.db") == 0
    (tmp_path / "journal.db").unlink()
    journal = sqlite3.connect(tmp_path / "journal.db")
    journal.execute("CREATE TABLE steps (seq INTEGER PRIMARY KEY)")
    assert newest_seq(tmp_path / "journal.db") == 0
    journal.execute("INSERT INTO steps VALUES (41), (42)")
    journal.commit()
    journal.close()
    assert newest_seq(tmp_path / "journal.db") == 42


def test_what_it_was_founded_with_cannot_change_and_notes_of_intakes_can(tmp_path):
    journal = SqliteJournal(tmp_path / "j.db")
    journal.set_meta("clock_began_unix_s", "1.0")
    journal.append(STEP)
    journal.set_meta("intake", "{}")
    with pytest.raises(JournalError, match="what it was founded with cannot change"):
        journal.set_meta("clock_began_unix_s", "2.0")
    assert [seq for seq, _ in journal.read()] == [1]
    journal.close()
