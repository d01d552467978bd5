"""What is due happens in order of time."""

from __future__ import annotations

from springtide.simulator.clock import VirtualClock
from springtide_studies.agenda import Agenda


def test_agenda_runs_in_order_of_time_then_of_entry() -> None:
    agenda = Agenda(VirtualClock())
    seen: list[str] = []
    agenda.at(2.0, lambda: seen.append("second"))
    agenda.at(1.0, lambda: seen.append("first"))
    agenda.at(2.0, lambda: seen.append("third"))
    agenda.run_until(2.0)
    assert seen == ["first", "second", "third"]
    assert agenda.clock.now_s() == 2.0


def test_what_is_entered_for_the_past_happens_now() -> None:
    clock = VirtualClock(4.0)
    agenda = Agenda(clock)
    agenda.at(1.0, lambda: None)
    assert agenda.next_s == 4.0
    agenda.run_next()
    assert agenda.next_s is None
    assert clock.now_s() == 4.0
