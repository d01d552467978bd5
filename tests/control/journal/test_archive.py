"""A journal that was cut: what is kept, what it begins at, and what a crash or damage leaves of it."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kits.control.years import Years, bare_controller
from kits.simulation.sweeps import part
from springtide.control import upkeep
from springtide.control.journal import archive
from springtide.control.journal.inspection import inspect_journal
from springtide.control.journal.retention import DAY_S, Retention, retention_of
from springtide.control.journal.sqlite import SqliteJournal, cut
from springtide.control.loop import recover, replay
from springtide.control.records import PlatformState
from springtide.control.state_data import StateData, data_of
from springtide.core.errors import InvalidRequest, JournalDamaged, JournalError
from springtide.core.ports import Standing

HOUR_S = 3600.0


class Nowhere:
    """An executor that only takes what it is told to recover."""

    def recover(self, standing: Standing) -> None:
        pass


def recovered(journal: SqliteJournal) -> PlatformState:
    controller = bare_controller()
    recover(controller, Nowhere(), journal, snapshots=journal.archive.snapshots())  # type: ignore[arg-type]
    return controller.state


def played(
    path: Path, hours: float, *, keep: Retention | None = None, at: Callable[[str], None] | None = None
) -> Years:
    """Ten jobs at a time, each for half an hour."""
    controller, journal = bare_controller(), SqliteJournal(path)
    journal.query("PRAGMA synchronous = OFF")
    kept_up = upkeep.JournalUpkeep(controller, journal, keep or Retention(), crash_point=at or (lambda name: None))
    years = Years(journal, kept_up, controller, 10)
    years.run(hours * HOUR_S, 60.0, HOUR_S / 2)
    return years


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "SNAPSHOT_STEPS", 50)
    monkeypatch.setattr(upkeep, "STAYS_S", 600.0)
    monkeypatch.setattr(archive, "SEGMENT_STEPS", 30)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, StateData]]:
    """A journal of some hours that was closed, and the state at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upkeep, "SNAPSHOT_STEPS", 50)
        patch.setattr(upkeep, "STAYS_S", 600.0)
        patch.setattr(archive, "SEGMENT_STEPS", 30)
        years = played(tmp_path_factory.mktemp("long") / "journal.db", 2.12)
    years.journal.close()
    return years.journal._path, data_of(years.controller.state)


def copy(path: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path.parent, to, ignore=shutil.ignore_patterns("*-shm"))
    return to / path.name


def test_it_begins_at_a_snapshot_and_keeps_every_step(long: tuple[Path, StateData]) -> None:
    path, state = long
    journal = SqliteJournal(path, read_only=True)
    (num_rows, first) = journal.query("SELECT count(*), min(seq) FROM steps")[0]
    assert num_rows <= 110
    assert first > 150, "the steps before the older snapshot are still there"
    assert len(journal.archive.segments()) > 5
    assert [seq for seq, _ in journal.read()] == list(range(1, journal.newest.seq + 1))
    assert [row.seq for row in journal.rows(77)] == list(range(78, journal.newest.seq + 1))
    assert {step.memory["turns"][0] for _, step in journal.read(77)} == {1}
    assert data_of(recovered(journal)) == state
    assert len(state.jobs) < 40, "ended jobs are still in the state"
    journal.close()


def test_jobs_that_left_are_found_with_all_that_they_were(long: tuple[Path, StateData]) -> None:
    journal = SqliteJournal(long[0], read_only=True)
    assert journal.ended.count() > 20
    found = journal.ended.get("job-3")
    assert found is not None
    assert found.record.lifecycle.state == "SUCCEEDED"
    assert found.record.progress.step > 0
    assert [job.job.job_id for job in journal.ended.named("job-3", 9)] == ["job-3"]
    by_key = journal.ended.with_key("job-3")
    assert by_key is not None
    assert by_key.job.job_id == "job-3"
    assert [job.job.job_id for job in journal.ended.newest(5)] != []
    assert journal.ended.get("job-99999") is None
    assert journal.ended.with_key("nothing") is None
    journal.close()


def test_a_journal_without_its_segments_says_from_where_it_can_be_read(
    long: tuple[Path, StateData], tmp_path: Path
) -> None:
    path = copy(long[0], tmp_path / "copy")
    shutil.rmtree(path.with_name("segments"))
    journal = SqliteJournal(path)
    assert data_of(recovered(journal)) == long[1], "the segments are not needed for a start"
    controller = bare_controller()
    assert replay(controller, journal, snapshots=list(journal.archive.snapshots())[1:]) == journal.newest.seq
    assert data_of(controller.state) == long[1], "nor for one from the older snapshot"
    report = inspect_journal(journal)
    assert report.damaged_seq is None
    assert report.begins_at > 150
    assert report.damaged_past == "the segment of steps 1 to 20 is missing"
    journal.close()


def test_after_every_interrupted_cut_it_opens_and_has_lost_nothing(tmp_path: Path) -> None:
    names: list[str] = []
    stages: list[tuple[str, Path, StateData]] = []
    years: Years | None = None

    def at(name: str) -> None:
        names.append(name)
        if years is not None and years.now_s > HOUR_S:
            # What a killed process leaves: the files as they are at this moment.
            place = copy(tmp_path / "live" / "journal.db", tmp_path / f"stage-{len(stages)}")
            stages.append((name, place, data_of(years.controller.state)))

    (tmp_path / "live").mkdir()
    years = played(tmp_path / "live" / "journal.db", 0.9, keep=Retention(steps_bytes=3_000), at=at)
    years.run(1.2 * HOUR_S, 60.0, HOUR_S / 2)
    years.journal.close()
    told = {
        *("archive.put.before", "archive.put.after", "cut.snapshot.before", "cut.snapshot.after", "cut.segment.before"),
        *("cut.segment.written", "cut.segment.after", "cut.older.after", "cut.dropped.after", "cut.ended.after"),
        "cut.end",
    }
    assert {name for name, _, _ in stages} == told
    for name, path, state in stages:
        journal = SqliteJournal(path)
        found = recovered(journal)
        assert data_of(found) == state, name
        numbers = [row.seq for row in journal.rows()]
        assert numbers == list(range(numbers[0], journal.newest.seq + 1)), name
        assert inspect_journal(journal).damaged_past == "", name
        lost = [job for job in range(1, years.num_jobs) if not _is_known(journal, found, f"job-{job}", state)]
        assert not lost, f"{name}: {lost}"
        journal.cut(b"", 2 * HOUR_S)
        names_now = {entry.name for entry in path.with_name("segments").iterdir()}
        assert names_now == {f"{s.first_seq}-{s.last_seq}.z" for s in journal.archive.segments()}, name
        journal.close()


def _is_known(journal: SqliteJournal, found: PlatformState, job_id: str, state: StateData) -> bool:
    is_new = int(job_id[4:]) > max(int(job.workload_id[4:]) for job in state.jobs)
    return is_new or job_id in found.jobs or journal.ended.get(job_id) is not None


def test_retention_bounds_the_steps_by_time_and_by_size(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    by_time = played(tmp_path / "a" / "journal.db", 3.0, keep=Retention(steps_s=HOUR_S)).journal
    oldest = next(by_time.rows())
    assert 1.5 * HOUR_S < oldest.now_s < 2.2 * HOUR_S
    by_size = played(tmp_path / "b" / "journal.db", 3.0, keep=Retention(steps_bytes=5_000)).journal
    files = list((tmp_path / "b" / "segments").iterdir())
    assert sum(file.stat().st_size for file in files) <= 5_000
    assert len(files) == len(by_size.archive.segments()) >= 1
    for journal in (by_time, by_size):
        assert len(recovered(journal).jobs.live) == 10
        with pytest.raises(JournalDamaged, match="begins at step"):
            recover(bare_controller(), Nowhere(), journal)  # type: ignore[arg-type]
        journal.close()


def test_a_job_that_retention_drops_is_told_from_one_that_never_was(tmp_path: Path) -> None:
    journal = played(tmp_path / "journal.db", 2.5, keep=Retention(ended_s=HOUR_S)).journal
    assert journal.ended.get("job-2") is None
    dropped_s = journal.ended.dropped_at_s("job-2")
    assert dropped_s is not None
    assert dropped_s < HOUR_S
    assert journal.ended.dropped_at_s("job-9999") is None
    journal.ended.drop(HOUR_S, 40 * HOUR_S)
    assert journal.ended.dropped_at_s("job-2") is None
    assert journal.ended.count() == 0
    journal.close()


def test_what_was_dropped_gives_its_room_back(tmp_path: Path) -> None:
    journal = played(tmp_path / "journal.db", 2.0, keep=Retention(ended_s=HOUR_S / 2)).journal
    assert journal.query("PRAGMA auto_vacuum") == [(2,)]
    journal.cut(b"", 5 * HOUR_S, Retention(ended_s=1.0))
    assert journal.query("PRAGMA freelist_count") == [(0,)]
    assert (tmp_path / "journal.db-wal").stat().st_size == 0
    journal.close()


@pytest.mark.parametrize("places", ["the newest", "both"])
@pytest.mark.parametrize("column", ["seq", "chain", "now_s", "schema", "blob", "checksum"])
def test_a_snapshot_with_a_flipped_bit_is_not_used(
    long: tuple[Path, StateData], tmp_path: Path, column: str, places: str
) -> None:
    draw = random.Random(column)
    for _ in range(3):
        path = copy(long[0], tmp_path / "copy")
        with sqlite3.connect(path) as db:
            for (seq,) in db.execute("SELECT seq FROM snapshots ORDER BY seq DESC").fetchall()[
                : 1 + (places == "both")
            ]:
                (value,) = db.execute(f"SELECT {column} FROM snapshots WHERE seq = ?", (seq,)).fetchone()
                db.execute(f"UPDATE snapshots SET {column} = ? WHERE seq = ?", (_flipped(value, draw), seq))
        db.close()
        journal = SqliteJournal(path, read_only=True)
        assert len(list(journal.archive.snapshots())) == (places == "the newest")
        assert data_of(recovered(journal)) == long[1], "the older one does as well, and so do all steps"
        if places == "both":
            with sqlite3.connect(path) as db:
                db.execute("DELETE FROM segments")
            db.close()
            with pytest.raises(JournalDamaged, match=r"of the journal (is missing|was changed)|begins at"):
                recovered(journal)
        journal.close()


def _flipped(value: object, draw: random.Random) -> object:
    if isinstance(value, bytes):
        bit = draw.randrange(8 * len(value))
        data = bytearray(value)
        data[bit // 8] ^= 1 << bit % 8
        return bytes(data)
    return value + 1  # type: ignore[operator]


def test_no_flipped_bit_of_the_file_changes_the_state(long: tuple[Path, StateData], tmp_path: Path) -> None:
    """Whatever is read at a start is as it was written, or was not used, or the start says that it is damaged."""
    draw, noticed = random.Random(5), 0
    for _ in range(part(300, least=30)):
        path = copy(long[0], tmp_path / "copy")
        data = bytearray(path.read_bytes())
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data))
        try:
            journal = SqliteJournal(path, read_only=True)
        except JournalError:
            noticed += 1
            continue
        try:
            journal.check_end()
            assert data_of(recovered(journal)) == long[1]
            report = inspect_journal(journal)
            noticed += bool(report.damaged_past or report.damaged_seq)
        except JournalError:
            noticed += 1
        finally:
            journal.close()
    assert noticed > part(300, least=30) // 3  # 164 of all 300, 15 of the first 30: the rest hit text that no row uses


def test_every_flipped_bit_of_a_segment_is_noticed(long: tuple[Path, StateData], tmp_path: Path) -> None:
    draw = random.Random(6)
    path = copy(long[0], tmp_path / "copy")
    journal = SqliteJournal(path, read_only=True)
    files = sorted(path.with_name("segments").iterdir())
    for _ in range(part(100, least=20)):
        file = draw.choice(files)
        before = file.read_bytes()
        data = bytearray(before)
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(data))
        report = inspect_journal(journal)
        first, _, last = file.stem.partition("-")
        assert report.damaged_past == f"the segment of steps {first} to {last} was changed after it was written"
        assert report.damaged_seq is None
        file.write_bytes(before)
    assert inspect_journal(journal).damaged_past == ""
    journal.close()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("DELETE FROM segments WHERE first_seq = 61", "the segment of step 61 does not follow the one before"),
        ("UPDATE segments SET chain_out = x'00' WHERE first_seq = 21", "the segment of steps 21 to 40 was changed"),
        ("UPDATE segments SET first_seq = 22 WHERE first_seq = 21", "the segment of step 21 does not follow"),
        ("DELETE FROM segments", "the journal begins at step"),
    ],
)
def test_changed_notes_of_segments_are_noticed(
    long: tuple[Path, StateData], tmp_path: Path, edit: str, said: str
) -> None:
    path = copy(long[0], tmp_path / "copy")
    with sqlite3.connect(path) as db:
        db.execute(edit)
    db.close()
    journal = SqliteJournal(path)
    report = inspect_journal(journal)
    assert report.damaged_past.startswith(said) or report.begins_at > 1
    assert data_of(recovered(journal)) == long[1]
    journal.close()


def test_what_it_was_founded_with_is_still_noticed(long: tuple[Path, StateData], tmp_path: Path) -> None:
    path = copy(long[0], tmp_path / "copy")
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO meta VALUES ('clock_began_unix_s', '1')")
    db.close()
    journal = SqliteJournal(path)
    with pytest.raises(JournalDamaged, match="what the journal was founded with was changed"):
        recovered(journal)
    journal.close()


def test_an_ended_job_whose_row_was_changed_is_left_out(long: tuple[Path, StateData], tmp_path: Path) -> None:
    path = copy(long[0], tmp_path / "copy")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE ended SET ended_at_s = ended_at_s + 1 WHERE id = 'job-3'")
    db.close()
    journal = SqliteJournal(path)
    assert journal.ended.get("job-3") is None
    assert journal.ended.get("job-4") is not None
    assert journal.ended.damaged() == ["job-3"]
    assert inspect_journal(journal).damaged_past == "the record of 1 job that has ended was changed: job-3"
    journal.close()


def test_damage_behind_the_snapshot_is_cut_off_and_damage_before_it_is_no_reason_to(
    long: tuple[Path, StateData], tmp_path: Path
) -> None:
    path = copy(long[0], tmp_path / "copy")
    journal = SqliteJournal(path, read_only=True)
    newest, older = [snapshot.seq for snapshot in journal.archive.snapshots()]
    journal.close()
    for seq in (older + 5, newest + 5):
        with sqlite3.connect(path) as db:
            db.execute("UPDATE steps SET now_s = now_s + 1 WHERE seq = ?", (seq,))
        db.close()
        journal = SqliteJournal(path, read_only=True)
        report = inspect_journal(journal)
        journal.close()
        assert (report.num_sound, report.damaged_seq) == (
            (newest + 4, newest + 5) if seq > newest else (report.num_sound, None)
        )
        assert report.damaged_past.startswith(f"step {older + 5} of the journal was changed")
    cut(path, newest + 5)
    journal = SqliteJournal(path)
    assert journal.newest.seq == newest + 4
    assert recovered(journal).nodes
    journal.close()


def test_retention_as_text() -> None:
    assert retention_of("7d,2GB", "90d") == Retention()
    assert retention_of("36h", "30d") == Retention(steps_s=1.5 * DAY_S, ended_s=30 * DAY_S)
    assert retention_of(" 500MB ", "90d").steps_bytes == 500_000_000
    with pytest.raises(InvalidRequest, match="'two' is neither"):
        retention_of("7d,two", "90d")
