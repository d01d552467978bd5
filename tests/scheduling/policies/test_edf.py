"""EDF gives the nearest deadline all that makes it faster, and no more."""

from __future__ import annotations

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide.scheduling.policies.edf import EarliestDeadlineFirst

LINEAR_TO_3 = {1: 1.0, 2: 2.0, 3: 3.0}
PEAK = {1: 1.0, 2: 1.8, 4: 3.0, 8: 2.0}


def test_a_job_stops_at_the_number_it_is_fastest_on():
    views = [make_view("soon", deadline_s=100.0, profile=PEAK), make_view("late", deadline_s=200.0)]
    assert counts(look(EarliestDeadlineFirst(), views)) == {"soon": 4, "late": 4}


def test_the_artifact_takes_more_even_where_it_is_slower():
    views = [make_view("soon", deadline_s=100.0, profile=PEAK), make_view("late", deadline_s=200.0)]
    assert counts(look(EarliestDeadlineFirst(caps=False), views)) == {"soon": 8}


def test_of_few_devices_it_takes_no_number_that_is_slower_than_a_smaller_one():
    dip = {1: 1.0, 2: 2.0, 4: 1.0, 5: 1.5, 8: 4.0}
    views = [make_view("first", deadline_s=1.0, profile=LINEAR_TO_3), make_view("second", deadline_s=2.0, profile=dip)]
    assert counts(look(EarliestDeadlineFirst(), views)) == {"first": 3, "second": 2}


def test_a_job_that_waits_after_a_crash_is_given_nothing_before_it_may_start():
    policy = EarliestDeadlineFirst()
    views = [make_view("soon", deadline_s=100.0, profile=PEAK), make_view("late", deadline_s=200.0)]
    before = look(policy, views)
    crashed = [with_fields(views[0], starts_at_s=30.0), views[1]]
    plan = look(policy, crashed, now_s=20.0, memory=before.memory)
    assert counts(plan) == {"late": 8}
    assert (plan.revisit_at_s, plan.reasons["soon"]) == (30.0, "starts again after a pause")
    assert counts(look(policy, crashed, now_s=30.0, memory=plan.memory)) == {"soon": 4, "late": 4}


def test_workers_that_are_left_after_a_loss_go_on_below_their_minimum():
    views = [make_view("soon", deadline_s=100.0, most=3), make_view("late", deadline_s=200.0, least=2)]
    plan = look(EarliestDeadlineFirst(), views, slots=4, held={"soon": [0, 1, 2], "late": [3]})
    assert counts(plan) == {"soon": 3, "late": 1}
    assert counts(look(EarliestDeadlineFirst(), views, slots=4, held={"soon": [0, 1, 2]})) == {"soon": 3}


def test_an_earlier_deadline_takes_devices_back():
    late = make_view("late", steps=4000, deadline_s=9000.0)
    soon = make_view("soon", at_s=100.0, steps=800, deadline_s=500.0)
    run = play(EarliestDeadlineFirst(), [late, soon])
    assert run.at(50.0) == {"late": 8}
    assert run.at(150.0) == {"soon": 8}
    assert run.at(250.0) == {"late": 8}


def test_a_minimum_beyond_the_profile_is_given_all_the_same():
    assert counts(look(EarliestDeadlineFirst(), [make_view("a", least=4, profile={1: 1.0, 2: 2.0})])) == {"a": 4}
