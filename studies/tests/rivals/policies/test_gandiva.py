"""Gandiva lets everybody run at once, in turns where that does not fit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide_studies.rivals.policies.gandiva import Gandiva


def test_without_contention_nobody_is_ever_stopped():
    views = [make_view(f"j{number}", at_s=10.0 * number, steps=500, ask=2) for number in range(4)]
    run = play(Gandiva(), views)
    assert run.num_changes == 0
    assert run.finished_at_s["j3"] == pytest.approx(30.0 + 250.0)


def test_jobs_that_do_not_fit_share_the_time_fairly():
    views = [make_view(f"j{number}", steps=1_000_000, ask=8) for number in range(3)]
    run = play(Gandiva(quantum_s=60.0), views, until_s=1800.0)
    assert [run.seconds(f"j{number}") for number in range(3)] == pytest.approx([600.0] * 3, abs=60.0)


def test_nobody_waits_longer_than_one_round():
    views = [make_view(f"j{number}", steps=1_000_000, ask=4) for number in range(6)]
    run = play(Gandiva(quantum_s=60.0), views, until_s=900.0)
    for number in range(6):
        starts = sorted(start for who, start, _, _ in run.spans if who == f"j{number}")
        assert starts[0] <= 120.0
        assert max(b - a for a, b in pairwise(starts)) <= 180.0


def test_a_wide_job_is_not_starved_by_narrow_ones():
    narrow = [make_view(f"n{number}", steps=1_000_000, ask=1) for number in range(12)]
    run = play(Gandiva(quantum_s=60.0), [make_view("wide", steps=1_000_000, ask=8), *narrow], until_s=3600.0)
    assert run.seconds("wide") >= 3600.0 / 3 - 60.0


def test_within_a_turn_what_comes_free_is_taken_up_but_nobody_is_stopped():
    long, short = make_view("long", steps=1_000_000, ask=4), make_view("short", steps=40, ask=4)
    late = make_view("late", at_s=5.0, steps=1_000_000, ask=4)
    run = play(Gandiva(quantum_s=60.0), [long, short, late], until_s=50.0)
    assert run.at(6.0) == {"long": 4, "short": 4}
    assert run.at(11.0) == {"long": 4, "late": 4}, "the short one ended at 10 s"


def test_growing_lends_idle_devices_and_takes_them_back():
    first = make_view("first", steps=1_000_000, ask=2)
    second = make_view("second", at_s=100.0, steps=1_000_000, ask=4)
    run = play(Gandiva(grows=True), [first, second], until_s=200.0)
    assert run.at(50.0) == {"first": 8}
    assert run.at(150.0) == {"first": 4, "second": 4}, "two of its own, and the two that nobody wants"
    assert counts(look(Gandiva(), [first])) == {"first": 2}, "off by default: ElasticFlow's Gandiva is not elastic"


def test_the_reasons_say_whose_turn_it_is():
    views = [make_view("a", ask=8), make_view("b", ask=8)]
    plan = look(Gandiva(), views)
    assert plan.reasons["b"] == "waits for its turn on 8 devices"
    over = look(Gandiva(), views, held={"a": range(8)}, now_s=60.0, memory=plan.memory)
    assert counts(over) == {"b": 8}
    assert over.reasons["a"] == "its turn is over"
