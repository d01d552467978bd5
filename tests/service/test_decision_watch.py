"""Why nothing is decided is known, and only while nothing is."""

from __future__ import annotations

from springtide.core.errors import JournalError, PolicyError
from springtide.service.decision_watch import STUCK_S, DecisionWatch


class Hands:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_loop_that_waits_for_hours_is_well() -> None:
    clock = Hands()
    watch = DecisionWatch(clock)
    assert watch.trouble == ""
    watch.note_begun()
    watch.note_durable()
    watch.note_waiting()
    clock.now_s += 10_000.0
    assert watch.trouble == ""


def test_a_turn_that_does_not_end_is_told_until_it_ends() -> None:
    clock = Hands()
    watch = DecisionWatch(clock)
    watch.note_begun()
    clock.now_s += STUCK_S - 1.0
    assert watch.trouble == ""
    clock.now_s += 60.0
    assert watch.trouble == "the control loop has been busy with one decision for 1m29"
    watch.note_durable()
    watch.note_waiting()
    assert watch.trouble == ""


def test_a_journal_that_refuses_is_told_until_the_turn_is_durable() -> None:
    watch = DecisionWatch(Hands())
    watch.note_begun()
    watch.note_journal_error(JournalError("the disk is full"))
    assert watch.trouble == "decisions wait until the journal can be written: the disk is full"
    watch.note_durable()
    assert watch.trouble == ""


def test_a_broken_policy_is_told_until_a_turn_without_an_error() -> None:
    watch = DecisionWatch(Hands())
    watch.note_begun()
    watch.note_policy_error(PolicyError("it gives n/0 to two jobs"))
    watch.note_durable()
    watch.note_waiting()
    assert watch.trouble.endswith("it gives n/0 to two jobs")
    watch.note_begun()
    assert watch.trouble.endswith("it gives n/0 to two jobs"), "not known to be over"
    watch.note_durable()
    assert watch.trouble == ""
