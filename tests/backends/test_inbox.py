from __future__ import annotations

import threading

import pytest

from springtide.backends.inbox import NUM_PROMPT_REPORTS, Inbox
from springtide.core.events import JobFinished, PauseRequested, ProgressReported
from springtide.core.workload import WorkloadId

JOB = WorkloadId("job")


class FrozenClock:
    def now_s(self) -> float:
        return 100.0


def progress(step: int, generation: int = 1) -> ProgressReported:
    return ProgressReported(job_id=JOB, generation=generation, step=step, total_steps=10, world_size=1)


def test_nothing_at_the_deadline() -> None:
    assert Inbox[int](FrozenClock()).wait(100.0) == []


def test_another_threads_event_ends_the_wait() -> None:
    inbox = Inbox[int](FrozenClock())
    event = PauseRequested(job_id=JOB)
    thread = threading.Thread(target=inbox.post, args=(event,))
    thread.start()
    assert inbox.wait(None) == [event]
    thread.join()


def test_the_first_progress_comes_at_once_and_the_newest_of_the_rest_later() -> None:
    inbox = Inbox[int](FrozenClock())
    assert inbox.progress(progress(1))
    assert inbox.wait(None) == [progress(1)]
    for step in (2, 3, 4):
        assert inbox.progress(progress(step))
    assert inbox.wait(100.0) == []
    assert inbox.wait(None) == [progress(4)]


def test_a_group_is_heard_of_soon_and_then_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox[int](FrozenClock())
    now_s = [50.0]
    monkeypatch.setattr("springtide.backends.inbox.time.monotonic", lambda: now_s[0])

    def num_delivered(generation: int, seconds: int) -> int:
        number = 0
        for tick in range(seconds * 20):
            now_s[0] += 0.05
            inbox.progress(progress(tick, generation))
            number += len(inbox.wait(0.0))
        return number

    assert num_delivered(1, 1) == NUM_PROMPT_REPORTS
    assert 9 <= num_delivered(1, 10) <= 11
    assert num_delivered(2, 1) == NUM_PROMPT_REPORTS


def test_progress_of_the_past_is_refused() -> None:
    inbox = Inbox[int](FrozenClock())
    inbox.progress(progress(5, generation=2))
    assert not inbox.progress(progress(9, generation=1))
    assert not inbox.progress(progress(4, generation=2))
    assert inbox.wait(None) == [progress(5, generation=2)]
    assert not inbox.progress(progress(9, generation=1))


def test_the_last_progress_comes_before_the_end() -> None:
    inbox = Inbox[int](FrozenClock())
    inbox.progress(progress(1))
    inbox.wait(None)
    inbox.progress(progress(2))
    finished = JobFinished(job_id=JOB, generation=1, step=2)
    inbox.post(finished)
    assert inbox.wait(None) == [progress(2), finished]


def test_sources_are_given_out_once_and_equal_events_one_by_one() -> None:
    inbox = Inbox[int](FrozenClock())
    first, second = PauseRequested(job_id=JOB), PauseRequested(job_id=JOB)
    inbox.post(first, [1])
    inbox.post(second, [2])
    assert inbox.take_sources([PauseRequested(job_id=JOB)]) == [1]
    assert inbox.take_sources([second]) == [2]
    assert inbox.take_sources([first]) == []


def test_a_closed_inbox_keeps_nobody_waiting() -> None:
    inbox = Inbox[int](FrozenClock())
    inbox.close()
    assert inbox.wait(None) == []
