"""Static sizes: started in order, never stopped, never resized."""

from __future__ import annotations

from msgspec.structs import replace

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide.core.workload import JobState
from springtide_studies.rivals.policies.static import Static


def test_jobs_run_to_the_end_on_what_they_asked_for_in_order():
    views = [make_view(f"j{number}", at_s=float(number), steps=100, ask=ask) for number, ask in enumerate((4, 8, 2))]
    run = play(Static(), views)
    assert run.num_changes == 0
    assert {count for who, _, _, count in run.spans if who == "j1"} == {8}
    started = [next(start for who, start, _, _ in run.spans if who == f"j{number}") for number in range(3)]
    assert started == sorted(started), "the wide one in the middle blocks the narrow one behind it"


def test_one_size_for_all_within_each_ones_bounds():
    views = [make_view("a", ask=8), make_view("b", ask=1, most=2), make_view("c", ask=1, least=4)]
    assert counts(look(Static(num_workers=3), views, slots=16)) == {"a": 3, "b": 2, "c": 4}


def test_without_a_wish_a_job_gets_its_minimum():
    assert counts(look(Static(), [make_view("a", ask=None, least=2)])) == {"a": 2}


def test_a_running_job_keeps_its_size_and_gets_a_lost_device_back():
    view = make_view("a", ask=4)
    first = look(Static(), [view], slots=4)
    running = replace(view, state=JobState.RUNNING, num_replicas=4)
    cut_down = look(Static(), [running], slots=3, held={"a": (0, 1, 2)}, memory=first.memory)
    assert counts(cut_down) == {"a": 3}
    assert counts(look(Static(), [running], slots=4, held={"a": (0, 1, 2)}, memory=first.memory)) == {"a": 4}
    assert counts(look(Static(num_workers=1), [running], held={"a": (0, 1, 2)})) == {"a": 3}, "whoever started it"
