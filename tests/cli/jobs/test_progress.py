"""Watching a job: what is worth a line, and how many lines a log file gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from springtide.cli.jobs.progress import JobWatcher, PlainDisplay, follow, follow_script
from springtide.core.errors import BackendError
from springtide.core.status.platform import JobStatus

MakeJob = Callable[..., JobStatus]


def _events(*statuses: JobStatus) -> list[str]:
    watcher = JobWatcher()
    return [line for status in statuses for line in watcher.observe(status)]


def test_a_resize_tells_its_pause(make_job: MakeJob) -> None:
    before = make_job(num_workers=2, num_resizes=1)
    after = make_job(num_workers=1, num_resizes=2, step=11402)
    assert _events(before, after, after) == ["resized 2 -> 1, pause 41 ms, global batch 512 kept, step 11402 continued"]


def test_a_resize_tells_what_it_was_for(make_job: MakeJob) -> None:
    after = make_job(
        num_workers=1,
        num_resizes=2,
        step=11402,
        reason="resized 2 -> 1 ('ask' needs a device (its minimum))",
        resize_reason="'ask' needs a device (its minimum)",
    )
    told = (
        "resized 2 -> 1 ('ask' needs a device (its minimum)), pause 41 ms, global batch 512 kept, step 11402 continued"
    )
    assert _events(make_job(num_workers=2, num_resizes=1), after) == [told]


def test_a_restart_tells_from_where(make_job: MakeJob) -> None:
    after = make_job(num_restarts=1, reason="worker 0 was killed by signal 9")
    assert _events(make_job(), after) == ["restarted from its checkpoint at step 500: worker 0 was killed by signal 9"]
    assert "from the beginning" in _events(make_job(), make_job(num_restarts=1, checkpoint_step=None))[0]


def test_losing_the_devices_and_waiting(make_job: MakeJob) -> None:
    waiting = make_job(state="PENDING", num_preemptions=1, num_workers=0, reason="a tighter deadline came")
    assert _events(make_job(), waiting) == [
        "gave its devices back, checkpoint at step 500: a tighter deadline came",
        "PENDING: a tighter deadline came",
    ]


def test_nothing_new_is_silent(make_job: MakeJob) -> None:
    assert _events(make_job(), make_job(step=571, loss=0.4)) == []
    assert _events(make_job(), make_job(state="SUCCEEDED")) == []


def test_a_log_file_gets_a_line_every_two_seconds_and_every_event(make_job: MakeJob) -> None:
    written: list[str] = []
    now = [0.0]
    display = PlainDisplay(written.append, lambda: now[0])
    for tick in range(9):
        now[0] = tick * 0.5
        display.update(make_job(step=tick, progress_fraction=tick / 10))
    display.event("resized")
    assert [line.split("] ")[-1].split("  ")[0] for line in written[:-1]] == ["0 %", "40 %", "80 %"]
    assert written[-1] == "  resized"


def test_an_unchanged_job_is_not_repeated(make_job: MakeJob) -> None:
    written: list[str] = []
    now = [0.0]
    display = PlainDisplay(written.append, lambda: now[0])
    for tick in range(5):
        now[0] = tick * 5.0
        display.update(make_job())
    assert len(written) == 1


class _Restarting:
    """A client whose platform is away for some questions."""

    def __init__(self, job: JobStatus, num_failures: int) -> None:
        self._job = job
        self._left = num_failures

    def job(self, job_id: str) -> JobStatus:
        if self._left:
            self._left -= 1
            raise BackendError("no platform is running")
        return self._job


def test_watching_waits_out_a_restart_of_the_platform(make_job: MakeJob) -> None:
    written: list[str] = []
    ended = make_job(state="SUCCEEDED")
    client = _Restarting(ended, 3)
    slept: list[float] = []
    assert follow(client, "fit-3f2a", PlainDisplay(written.append), slept.append) is ended  # type: ignore[arg-type]
    assert len(slept) == 3
    assert written == ["  no platform is running; waiting for the platform, the workers train on"]


def test_watching_gives_up_after_a_while(make_job: MakeJob) -> None:
    slept: list[float] = []
    client = _Restarting(make_job(), 10_000)
    with pytest.raises(BackendError):
        follow(client, "fit-3f2a", PlainDisplay([].append), slept.append)  # type: ignore[arg-type]
    assert sum(slept) < 40


def test_a_resize_is_told_when_the_workers_have_switched(make_job: MakeJob) -> None:
    one = make_job(num_workers=1, num_resizes=0, last_pause_s=None)
    decided = make_job(num_workers=2, num_resizes=0, last_pause_s=None)
    switched = make_job(num_workers=2, num_resizes=1)
    assert _events(make_job(state="STARTING", num_workers=1, num_resizes=0, reason=""), one, decided) == []
    assert _events(one, decided, decided, switched) == [
        "resized 1 -> 2, pause 41 ms, global batch 512 kept, step 570 continued"
    ]


def test_a_lost_worker_is_no_resize(make_job: MakeJob) -> None:
    survivors = make_job(num_workers=1, last_pause_s=0.3)
    assert _events(make_job(num_workers=2), make_job(num_workers=1), survivors, survivors) == [
        "went on without a lost worker, 2 -> 1, pause 300 ms, global batch 512 kept, step 570 continued"
    ]


def test_a_batch_that_changes_is_told_with_its_resize_and_alone(make_job: MakeJob) -> None:
    before = make_job(num_workers=1, num_resizes=1)
    grown = make_job(num_workers=2, num_resizes=2, global_batch_size=1024, step=700)
    larger = make_job(num_workers=2, num_resizes=3, global_batch_size=2048, step=800)
    assert _events(before, grown, larger) == [
        "resized 1 -> 2, pause 41 ms, batch 512 -> 1024, step 700 continued",
        "batch 1024 -> 2048, pause 41 ms, step 800 continued",
    ]


class _Script:
    """A client whose script writes two lines, then reports steps, and ends."""

    def __init__(self, jobs: list[JobStatus], error: str = "") -> None:
        self._jobs, self._error = jobs, error
        self._written = threading.Event()

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        assert follow
        yield "reading\n"
        if self._error:
            self._written.set()
            raise BackendError(self._error)
        yield "[31m\n"
        self._written.set()

    def job(self, job_id: str) -> JobStatus:
        assert self._written.wait(30.0)
        return self._jobs.pop(0)


@pytest.mark.parametrize(
    ("error", "told"),
    [("", "[31m"), ("connection lost", "  its output is shown no further (connection lost): springtide logs s-1 -f")],
)
def test_a_script_shows_what_it_writes_and_its_steps_once_it_reports_them(
    make_job: MakeJob, error: str, told: str
) -> None:
    silent = make_job(kind="script", step=0, total_steps=None, progress_fraction=None, loss=None)
    assert not silent.has_steps
    ended = make_job(state="SUCCEEDED")
    written: list[str] = []
    client = _Script([silent, make_job(step=4, progress_fraction=0.4), ended], error)
    display = PlainDisplay(written.append)
    assert follow_script(client, "s-1", display, JobWatcher()) is ended  # type: ignore[arg-type]
    assert written[:2] == ["reading", told]
    assert [" 40 %" in line for line in written[2:]] == [True]
