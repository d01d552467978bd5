"""The loop's order is the safety argument, so it is what is tested."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from springtide.control.controller import Controller
from springtide.control.journal.archive import JournalSnapshot
from springtide.control.journal.memory import MemoryJournal
from springtide.control.loop import recover, run, verify
from springtide.control.state_data import PlatformSnapshot, data_of, encode_snapshot
from springtide.core import events
from springtide.core.errors import JournalError
from springtide.core.events import Event
from springtide.core.ports import Standing, Step
from springtide.core.resources import make_node
from springtide.scheduling.policies.fifo import Fifo


class Script:
    """An executor, clock and journal in one, which notes the order in which the loop calls it."""

    def __init__(self, batches: Sequence[Sequence[Event]], *, failures: int = 0) -> None:
        self.batches = list(batches)
        self.failures = failures
        self.calls: list[str] = []
        self.journal = MemoryJournal()
        self.standing: Standing | None = None

    def now_s(self) -> float:
        return float(len(self.calls))

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        self.calls.append("wait")
        return self.batches.pop(0) if self.batches else ()

    def append(self, step: Step) -> int:
        if self.failures:
            self.failures -= 1
            self.calls.append("full disk")
            raise JournalError("the disk is full")
        self.calls.append("append")
        return self.journal.append(step)

    def read(self, after_seq: int = 0):
        return self.journal.read(after_seq)

    def acknowledge(self, happened: Sequence[Event]) -> None:
        self.calls.append(f"acknowledge {len(happened)}")

    def start(self, action: object) -> None:
        self.calls.append(type(action).__name__)

    def recover(self, standing: Standing) -> None:
        self.standing = standing

    def done(self) -> bool:
        return not self.batches


def play(script: Script) -> Controller:
    controller = Controller(Fifo())
    run(controller, script, script, script, until=script.done)
    return controller


def test_durable_first_then_acknowledged_then_done(job):
    script = Script([[events.NodeJoined(node=make_node("n", 1))], [events.JobSubmitted(job=job("a"))]])
    play(script)
    assert script.calls == ["wait", "append", "acknowledge 1", "wait", "append", "acknowledge 1", "StartReplica"]


def test_a_full_disk_halts_decisions_and_loses_nothing(job):
    join = events.NodeJoined(node=make_node("n", 1))
    script = Script([[join], [events.JobSubmitted(job=job("a"))], ()], failures=1)
    controller = play(script)
    assert script.calls[:5] == ["wait", "full disk", "wait", "append", "acknowledge 1"]
    assert "a" in controller.state.jobs
    assert [len(step.events) for _, step in script.read()] == [1, 1]


def test_turns_without_news_are_not_journaled():
    script = Script([(), (), [events.NodeJoined(node=make_node("n", 1))]])
    play(script)
    assert script.calls.count("append") == 1


def test_recovery_restores_the_state_and_hands_the_executor_what_should_run(job):
    script = Script([[events.NodeJoined(node=make_node("n", 1))], [events.JobSubmitted(job=job("a"))]])
    controller = play(script)
    fresh = Controller(Fifo())
    assert recover(fresh, script, script) == 2
    assert fresh.state == controller.state
    assert script.standing is not None
    assert [start.replica_id for start in script.standing.replicas] == ["a.0"]
    assert verify(Controller(Fifo()), script) == 2


def test_a_journal_that_another_policy_wrote_does_not_verify(job):
    class Refuses:
        def decide(self, snapshot):
            from springtide.core.decision import Plan

            return Plan()

    script = Script([[events.NodeJoined(node=make_node("n", 1))], [events.JobSubmitted(job=job("a"))]])
    play(script)
    with pytest.raises(JournalError, match="differs"):
        verify(Controller(Refuses()), script)


class Stream:
    """A hundred jobs that each report once a second, on a clock that stands still between events."""

    def __init__(self, seconds: float, urgent_s: float = math.inf) -> None:
        self.agenda = sorted((second + at / 100, at) for second in range(int(seconds)) for at in range(100))
        self.urgent_s, self.time_s = urgent_s, 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        due_s, number = self.agenda[0] if self.agenda else (math.inf, 0)
        if deadline_s is not None and deadline_s < due_s:
            self.time_s = max(self.time_s, deadline_s)
            return ()
        self.agenda.pop(0)
        self.time_s = max(self.time_s, due_s)
        if self.time_s >= self.urgent_s:
            self.urgent_s = math.inf
            return [events.NodeJoined(node=make_node("n", 1))]
        return [events.ProgressReported(job_id=f"job-{number}", generation=1, step=1, total_steps=2, world_size=1)]

    def acknowledge(self, happened: Sequence[Event]) -> None: ...


@pytest.mark.parametrize(("gather_s", "expected"), [(0.0, 1000), (0.5, 21)])
def test_the_journal_does_not_grow_with_the_number_of_jobs(gather_s: float, expected: int) -> None:
    stream, journal = Stream(10), MemoryJournal()
    run(Controller(Fifo()), stream, stream, journal, until=lambda: not stream.agenda, gather_progress_s=gather_s)
    steps = [step for _, step in journal.read()]
    assert len(steps) <= expected
    assert sum(len(step.events) for step in steps) == 1000


def test_what_is_urgent_does_not_wait_for_progress() -> None:
    stream, journal = Stream(2, urgent_s=0.8), MemoryJournal()
    run(Controller(Fifo()), stream, stream, journal, until=lambda: not stream.agenda, gather_progress_s=0.5)
    (at_s,) = (step.now_s for _, step in journal.read() if any(isinstance(e, events.NodeJoined) for e in step.events))
    assert at_s == pytest.approx(0.8)


def test_a_journal_whose_first_steps_are_gone_is_decided_anew_from_a_snapshot_only() -> None:
    script = Script(
        [[events.NodeJoined(node=make_node("n", 1))], [events.PlatformStarted()], [events.PlatformStarted()]]
    )
    controller = Controller(Fifo())
    run(controller, script, script, script, until=script.done)

    class Late:
        def read(self, after_seq: int = 0):
            return script.read(max(1, after_seq))

    with pytest.raises(JournalError, match="begins at step 2"):
        verify(Controller(Fifo()), Late())
    first = Controller(Fifo())
    first.restore(next(iter(script.read()))[1])
    blob = encode_snapshot(PlatformSnapshot(state=data_of(first.state)))
    assert verify(Controller(Fifo()), Late(), snapshots=[JournalSnapshot(1, b"", 0.0, 2, blob)]) == 2
