"""A platform of a year: it starts in seconds, and its journal is no larger than what people let it keep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kits.control.years import SOURCE, Years, bare_controller
from kits.simulation.sweeps import only_in_full
from springtide.control.journal.retention import DAY_S, Retention
from springtide.control.journal.segments import Segment, SegmentFolder
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import replay
from springtide.control.state_data import data_of
from springtide.control.upkeep import STAYS_S, JournalUpkeep
from springtide.core.actions import Action, EndJob
from springtide.core.containers import ContainerSettings
from springtide.core.errors import JournalError, Superseded
from springtide.core.events import (
    CancelRequested,
    Event,
    JobsArchived,
    JobSubmitted,
    ServiceDeployed,
    ServicesArchived,
)
from springtide.core.ports import Step
from springtide.core.workload import InferenceService, JobState, TrainingJob

HOUR_S = 3600.0
MB = 10**6


@pytest.fixture(autouse=True)
def fewer_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of commits is not made durable one by one."""
    monkeypatch.setattr("springtide.control.journal.witness.SYNC_EVERY_S", DAY_S)


def begun(folder: Path, keep: Retention, num_at_once: int) -> Years:
    controller, journal = bare_controller(), SqliteJournal(folder / "journal.db")
    journal.query("PRAGMA synchronous = OFF")
    return Years(journal, JournalUpkeep(controller, journal, keep), controller, num_at_once)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check(years: Years, folder: Path, keep: Retention, *, early: str, most_cpu_s: float) -> None:
    """What a killed control plane left is read in little time, and says what retention has dropped."""
    years.report(num_turns=1_200, num_reports=50)
    years.journal._db.close()
    begun_s = time.process_time()
    journal, controller = SqliteJournal(folder / "journal.db"), bare_controller()
    last_seq = replay(controller, journal, snapshots=journal.archive.snapshots())
    cpu_s = time.process_time() - begun_s
    assert cpu_s < most_cpu_s
    assert last_seq == journal.newest.seq
    assert data_of(controller.state) == data_of(years.controller.state)
    assert len(controller.state.jobs) < 20 * years.num_at_once
    assert sum(segment.num_bytes for segment in journal.archive.segments()) <= keep.steps_bytes + MB
    assert journal.ended.get(early) is None
    assert early not in controller.state.jobs
    dropped_s = journal.ended.dropped_at_s(early)
    assert dropped_s is not None
    newest = f"job-{years.num_jobs - 3 * years.num_at_once}"
    assert newest in controller.state.jobs or journal.ended.get(newest) is not None
    journal.close()


@pytest.mark.slow
def test_a_day_in_small(tmp_path: Path) -> None:
    keep = Retention(steps_s=6 * HOUR_S, steps_bytes=MB // 10, ended_s=DAY_S / 2)
    years = begun(tmp_path, keep, 10)
    years.run(1.2 * DAY_S, 600.0, HOUR_S)
    check(years, tmp_path, keep, early="job-9", most_cpu_s=8.0)


@pytest.mark.slow
@only_in_full
@pytest.mark.timeout(1800)
def test_a_year_of_a_hundred_jobs_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """219,000 jobs of four hours each in 35,000 turns, two in half an hour, with a snapshot every four hours."""
    monkeypatch.setattr("springtide.control.upkeep.SNAPSHOT_S", 4 * HOUR_S)
    keep = Retention(steps_s=7 * DAY_S, steps_bytes=20 * MB, ended_s=90 * DAY_S)
    years = begun(tmp_path, keep, 100)
    sizes = []
    for month in range(1, 13):
        years.run(month * 365 / 12 * DAY_S, 1800.0, 4 * HOUR_S)
        sizes.append(size_of(tmp_path))
    assert years.num_jobs > 215_000
    # The hashes of the ids of dropped jobs are all that grows after the retention of ended jobs.
    assert sizes[-1] < 1.2 * sizes[4]
    month_3 = f"job-{int(2.5 / 12 * years.num_jobs)}"
    check(years, tmp_path, keep, early=month_3, most_cpu_s=2.0)


def test_what_ended_leaves_after_its_time_whatever_it_stands_for(tmp_path: Path) -> None:
    controller, journal = bare_controller(), SqliteJournal(tmp_path / "journal.db")
    upkeep = JournalUpkeep(controller, journal, Retention())
    owned = TrainingJob(
        job_id="owned", name="owned", entrypoint=SOURCE, container=ContainerSettings(owner_name="o", owner_uid="uid")
    )
    services = [InferenceService(service_id=name, name=name, entrypoint=SOURCE) for name in ("gone", "stays")]

    def turn(now_s: float, *happened: Event, acted: Sequence[Action] = ()) -> tuple[Event, ...]:
        due = tuple(upkeep.due_events(now_s))
        step = Step(now_s=now_s, events=(*due, *happened), actions=tuple(acted))
        controller.restore(step)
        journal.append(step)
        upkeep.after_turn(now_s)
        return due

    turn(0.0, JobSubmitted(job=owned), *(ServiceDeployed(service=service) for service in services))
    ended = EndJob(job_id="owned", state=JobState.SUCCEEDED, reason="done")
    turn(100.0, CancelRequested(workload_id="gone"), acted=(ended,))
    assert turn(100.0 + STAYS_S - 1.0) == ()
    assert turn(100.0 + STAYS_S + 600.0) == (JobsArchived(job_ids=("owned",)), ServicesArchived(service_ids=("gone",)))
    assert [*controller.state.jobs, *controller.state.services] == ["stays"]
    assert journal.ended.of_owner("uid") is not None
    assert journal.ended.service("gone") is not None
    again = bare_controller()
    replay(again, journal)
    assert data_of(again.state) == data_of(controller.state)
    journal.close()


def test_a_control_plane_that_comes_back_late_starts_with_what_leaves_the_state(tmp_path: Path) -> None:
    """What ended since the last snapshot is looked at again after a recovery, and gone before it is."""
    journal, controller = SqliteJournal(tmp_path / "journal.db"), bare_controller()
    jobs = [TrainingJob(job_id=name, name=name, entrypoint=SOURCE) for name in ("ended", "waits")]
    journal.append(controller.step(0.0, [JobSubmitted(job=job) for job in jobs]))
    journal.append(controller.step(1.0, [CancelRequested(workload_id="ended")]))
    again = bare_controller()
    upkeep = JournalUpkeep(again, journal, Retention())
    replay(again, journal)
    upkeep.begin(0, 0.0)
    now_s = 1.0 + STAYS_S + 600.0
    due = upkeep.due_events(now_s)
    assert due == [JobsArchived(job_ids=("ended",))]
    step = again.step(now_s, due)
    assert step.actions == ()
    assert list(again.state.jobs) == ["waits"]
    assert again.step(now_s + 1.0, [CancelRequested(workload_id="waits")]).actions != ()
    journal.close()


def test_a_segment_for_which_no_folder_can_be_made_is_a_journal_error(tmp_path: Path) -> None:
    (tmp_path / "segments").touch()
    segment = Segment(1, 1, b"", b"", b"", 1, 0.0)
    with pytest.raises(JournalError):
        SegmentFolder(tmp_path / "segments" / "inner").write(segment, b"x")


class Refusing:
    """A journal on a full disk."""

    def __init__(self, error: JournalError) -> None:
        self.newest = (10, b"")
        self.error = error
        self.num_tries = 0
        self.ended = self

    def cut(self, *arguments: object) -> None:
        self.num_tries += 1
        raise self.error

    def put(self, jobs: object) -> None:
        raise self.error


def test_a_disk_that_is_full_is_asked_again_later_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    journal = Refusing(JournalError("the disk is full"))
    upkeep = JournalUpkeep(bare_controller(), journal, Retention())
    for now_s in (1.0, 700.0, 701.0, 800.0):
        upkeep.after_turn(now_s)
    assert journal.num_tries == 1
    assert "no snapshot of the state was kept; the next one is due in 600 s: the disk is full" in caplog.text
    journal.newest = (11, b"")
    upkeep.after_turn(1400.0)
    assert journal.num_tries == 2


def test_a_control_plane_that_was_superseded_ends() -> None:
    journal = Refusing(Superseded("another control plane has taken over"))
    upkeep = JournalUpkeep(bare_controller(), journal, Retention())
    with pytest.raises(Superseded):
        upkeep.after_turn(700.0)
