"""Optimus gives each worker to the job whose end it brings nearest."""

from __future__ import annotations

import math
from itertools import product

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide_studies.rivals.policies.optimus import Optimus

CONCAVE = {1: 1.0, 2: 1.8, 3: 2.4, 4: 2.8, 5: 3.1, 6: 3.3, 7: 3.4, 8: 3.45}
FLAT = {1: 1.0, 2: 1.01, 4: 1.02}


def test_a_worker_goes_where_the_remaining_time_shrinks_most():
    views = [make_view("flat", steps=1000, profile=FLAT), make_view("steep", steps=1000)]
    assert counts(look(Optimus(), views)) == {"flat": 1, "steep": 7}
    views = [make_view("short", steps=10), make_view("long", steps=10_000)]
    assert counts(look(Optimus(), views)) == {"short": 1, "long": 7}


@pytest.mark.parametrize("steps", [(100, 100, 100), (100, 300, 900), (50, 60, 4000), (1000, 10, 10)])
def test_for_concave_curves_the_sum_of_completion_times_is_the_least_there_is(steps):
    views = [make_view(f"j{number}", steps=count, profile=CONCAVE) for number, count in enumerate(steps)]

    def total_s(sizes):
        return sum(count / CONCAVE[size] for count, size in zip(steps, sizes, strict=True))

    best = min((sizes for sizes in product(range(1, 9), repeat=3) if sum(sizes) <= 8), key=total_s)
    plan = counts(look(Optimus(), views))
    assert total_s([plan[f"j{number}"] for number in range(3)]) == pytest.approx(total_s(best))


def test_nobody_grows_past_the_number_that_is_fastest():
    assert counts(look(Optimus(), [make_view("a", profile={1: 1.0, 2: 2.0, 4: 1.5})])) == {"a": 2}


def test_with_more_jobs_than_devices_the_shortest_run():
    views = [make_view(f"j{number}", steps=1000 - 100 * number) for number in range(4)]
    plan = look(Optimus(), views, slots=2)
    assert counts(plan) == {"j2": 1, "j3": 1}
    assert plan.reasons["j0"] == "waits for 1 device: shorter jobs come first"


def test_devices_move_only_at_the_interval_but_a_new_job_starts_where_some_are_idle():
    long, new = make_view("long", steps=100_000, most=4), make_view("new", at_s=100.0, steps=8000)
    run = play(Optimus(interval_s=600.0), [long, new], until_s=700.0)
    assert run.at(50.0) == {"long": 4}
    assert run.at(150.0) == {"long": 4, "new": 1}, "on its minimum until the interval ends"
    assert run.at(650.0) == {"long": 4, "new": 4}


def test_who_cannot_be_foretold_gets_its_minimum_and_what_the_others_leave():
    unknown = replace(make_view("unknown"), total_steps=None)
    known = make_view("known", steps=10_000, most=4)
    assert counts(look(Optimus(), [unknown, known])) == {"unknown": 4, "known": 4}
    assert counts(look(Optimus(), [unknown, with_fields(known, max_workers=8)])) == {"unknown": 1, "known": 7}


def test_the_next_interval_is_told():
    assert look(Optimus(interval_s=60.0), [make_view("a")], now_s=5.0).revisit_at_s == 65.0
    assert look(Optimus(), []).revisit_at_s is None
    assert math.isfinite(play(Optimus(), [make_view("a", steps=10_000)]).finished_at_s["a"])
