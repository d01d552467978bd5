"""EDF with an admission test, and EDF with ElasticFlow's allocation."""

from __future__ import annotations

from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view
from kits.studies.elasticflow_plays import play, promised, trace_of
from springtide.core.workload import JobState
from springtide_studies.rivals.policies.admission import OwnerQuota
from springtide_studies.rivals.policies.edf_variants import EdfAdmission, EdfElastic

PEAK = {1: 1.0, 2: 1.8, 4: 3.0, 8: 2.0}
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
CONCAVE = {1: 1.0, 2: 1.5, 4: 2.0}


def test_the_nearest_deadline_takes_all_that_makes_it_faster():
    views = [make_view("late", deadline_s=200.0, profile=PEAK), make_view("soon", deadline_s=100.0, profile=PEAK)]
    plan = look(EdfAdmission(), views, slots=6)
    assert counts(plan) == {"soon": 4, "late": 2}
    assert plan.admitted["soon"] == 100 / 3.0


def test_the_example_in_which_edf_fails():
    # Figure 3: two jobs of 3 units of work with deadlines 3 and 3.5 on two devices.
    views = [
        make_view("a", steps=300, deadline_s=300.0, most=2, profile={1: 1.0, 2: 1.5}),
        make_view("b", steps=300, deadline_s=350.0, most=2, profile={1: 1.0, 2: 1.5}),
    ]
    plan = look(EdfAdmission(), views, slots=2)
    assert list(plan.admitted) == ["a"]
    assert "would not end by its own" in plan.rejected["b"].reason
    assert counts(look(EdfElastic(), views, slots=2)) == {"a": 1, "b": 1}


def test_an_earlier_deadline_is_refused_if_it_breaks_a_promise():
    old = promised(make_view("old", steps=400, deadline_s=101.0, most=4, profile=LINEAR))
    new = make_view("new", steps=20, deadline_s=50.0, most=4, profile=LINEAR)
    plan = look(EdfAdmission(), [old, new], slots=4)
    assert "'old', which was promised its own, would miss it" in plan.rejected["new"].reason


def test_a_late_job_vetoes_nobody():
    late = promised(make_view("late", steps=1000, deadline_s=50.0, profile=CONCAVE))
    new = make_view("new", steps=100, deadline_s=500.0, most=1, profile=CONCAVE)
    assert list(look(EdfAdmission(), [late, new], slots=8).admitted) == ["new"]


def test_best_effort_takes_what_deadlines_leave_and_hooks_are_asked():
    views = [make_view("whenever", profile=LINEAR), make_view("soon", deadline_s=100.0, most=4, profile=LINEAR)]
    assert counts(look(EdfAdmission(), views, slots=6)) == {"soon": 4, "whenever": 2}
    plan = look(EdfAdmission(hooks=(OwnerQuota(max_unfinished=0),)), views, slots=6)
    assert list(plan.rejected) == ["soon"]


def test_who_has_run_already_is_not_thrown_out():
    view = make_view("a", steps=10_000, deadline_s=10.0, profile=LINEAR, state=JobState.RUNNING, started_at_s=0.0)
    plan = look(EdfAdmission(), [replace(view, num_replicas=8)], held={"a": range(8)})
    assert counts(plan) == {"a": 8}
    assert not plan.rejected


def test_a_job_that_waits_after_a_crash_is_given_nothing_before_it_may_start():
    soon = make_view("soon", steps=400, deadline_s=101.0, most=4, profile=LINEAR)
    crashed = with_fields(soon, starts_at_s=30.0, num_restarts=1)
    views = [crashed, make_view("late", steps=400, deadline_s=900.0, most=4, profile=LINEAR)]
    plan = look(EdfElastic(), views, slots=4, now_s=20.0)
    assert counts(plan) == {"late": 4}
    assert plan.revisit_at_s == 30.0
    assert counts(look(EdfElastic(), views, slots=4, now_s=30.0, memory=plan.memory))["soon"] == 4


def test_workers_that_are_left_after_a_loss_go_on_below_their_minimum():
    views = [
        make_view("a", steps=4000, deadline_s=4000.0, most=4, profile=LINEAR),
        make_view("b", steps=400, deadline_s=90000.0, least=2, most=4, profile=LINEAR),
    ]
    assert counts(look(EdfElastic(), views, slots=2, held={"a": [0], "b": [1]})) == {"a": 1, "b": 1}
    assert counts(look(EdfElastic(), views, slots=2, held={"a": [0]})) == {"a": 2}


def test_without_admission_nobody_is_refused_and_the_late_keep_their_turn():
    views = [
        make_view("hopeless", steps=10_000, deadline_s=100.0, most=4, profile=LINEAR),
        make_view("fine", steps=300, deadline_s=400.0, most=4, profile=LINEAR),
    ]
    plan = look(EdfElastic(), views, slots=4)
    assert counts(plan) == {"hopeless": 4}
    assert not plan.admitted
    assert not plan.rejected


def test_whole_runs():
    trace = trace_of(2)
    # EDF's own plan changes only when somebody comes, so that without overhead it keeps what it promised.
    figures = play(trace, EdfAdmission(), overhead="none", strict=True)
    assert figures["admitted_and_broken"] == 0
    assert figures["declined"] > 0
    assert play(trace, EdfElastic(), strict=False)["declined"] == 0
