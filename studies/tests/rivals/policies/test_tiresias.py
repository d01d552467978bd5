"""Tiresias serves who has had least, in few queues, and stops nobody within a queue."""

from __future__ import annotations

import pytest

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide.core.workload import JobState
from springtide_studies.rivals.policies.tiresias import Tiresias, gittins_index


def test_a_new_short_job_overtakes_one_that_has_had_much():
    long = make_view("long", steps=100_000, ask=8)
    short = make_view("short", at_s=1000.0, steps=80, ask=8)
    run = play(Tiresias(), [long, short], until_s=5000.0)
    assert run.finished_at_s["short"] == pytest.approx(1010.0, abs=0.1), "it started the moment it came"
    assert run.at(1500.0) == {"long": 8}


def test_within_a_queue_nobody_is_stopped():
    first = make_view("first", steps=2000, ask=8)
    second = make_view("second", at_s=50.0, steps=80, ask=8)
    run = play(Tiresias(), [first, second])
    assert run.finished_at_s == pytest.approx({"first": 250.0, "second": 260.0}), "250 s x 8 stay below the threshold"


def test_a_job_moves_down_at_the_moment_it_crosses_the_threshold():
    long = make_view("long", steps=100_000, ask=8)
    second = make_view("second", at_s=50.0, steps=800, ask=8)
    run = play(Tiresias(thresholds_s=(1600.0,)), [long, second], until_s=1000.0)
    assert run.at(199.0) == {"long": 8}
    assert run.at(201.0) == {"second": 8}, "1,600 device-seconds are 200 s on eight devices"
    assert run.finished_at_s["second"] == pytest.approx(300.0, abs=0.1)


def test_nobody_is_looked_at_while_all_run():
    views = [make_view(f"j{number}", ask=2) for number in range(4)]
    assert look(Tiresias(), views).revisit_at_s is None


def test_who_does_not_fit_is_passed_over():
    plan = look(
        Tiresias(), [make_view("a", ask=6), make_view("wide", ask=8, at_s=1.0), make_view("c", ask=2, at_s=2.0)]
    )
    assert counts(plan) == {"a": 6, "c": 2}
    assert plan.reasons["wide"] == "waits for 8 devices in queue 1 of 2"


def test_a_starving_job_is_promoted():
    starved = make_view("starved", steps=100_000, ask=8, attained_s=8000.0, started_at_s=0.0)
    stream = [make_view(f"s{number:02}", at_s=300.0 * number, steps=2400, ask=8) for number in range(20)]
    without = play(Tiresias(), [starved, *stream], until_s=6000.0)
    promoted = play(Tiresias(promotion_factor=2.0), [starved, *stream], until_s=6000.0)
    assert without.seconds("starved") == 0.0
    # It ran for 1,000 s before, so it goes up once it has stood still for 2,000 s.
    assert promoted.seconds("starved", 0.0, 1999.0) == 0.0
    assert promoted.seconds("starved", 2000.0, 3000.0) > 300.0


def test_the_gittins_index_prefers_who_is_likely_to_end_soon():
    history = [10.0, 10.0, 10.0, 1000.0]
    assert gittins_index(history, 0.0, 20.0) == pytest.approx(3 / (30 + 20))
    assert gittins_index(history, 15.0, 20.0) == 0.0, "of those that needed more than 15 s none ends within 20 s more"
    assert gittins_index(history, 2000.0, 20.0) == 0.0
    fresh = make_view("fresh", ask=8, at_s=5.0)
    stale = make_view("stale", ask=8, attained_s=15.0, started_at_s=1.0, state=JobState.PENDING)
    assert counts(look(Tiresias(), [stale, fresh])) == {"stale": 8}, "first started, first served"
    by_index = Tiresias(thresholds_s=(20.0,), history_device_s=tuple(history))
    assert counts(look(by_index, [stale, fresh])) == {"fresh": 8}
