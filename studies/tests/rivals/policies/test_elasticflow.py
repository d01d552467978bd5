"""ElasticFlow: deadlines promised one by one, kept, and spare devices where they bring most."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view
from kits.studies.elasticflow_plays import play, promised, trace_of
from springtide.core.decision import Overheads
from springtide.core.workload import Goal, JobState
from springtide.perf.curve import curve_of
from springtide_studies.rivals.policies.admission import OwnerQuota
from springtide_studies.rivals.policies.elastic_jobs import CurveTable, ElasticRow
from springtide_studies.rivals.policies.elastic_plan import SLOT_S
from springtide_studies.rivals.policies.elasticflow import ElasticFlow, ElasticFlowArtifact

CONCAVE = {1: 1.0, 2: 1.5, 4: 2.0}
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}


def as_soft(view):
    return replace(view, job=replace(view.job, goal=replace(view.job.goal, is_soft=True)))


def owned(view, owner):
    return replace(view, job=replace(view.job, owner=owner))


# --- admission ------------------------------------------------------------------------------------------------------


def test_a_deadline_that_fits_is_promised_and_one_that_does_not_is_refused_at_once():
    views = [
        make_view("fits", steps=300, deadline_s=200.0, profile=CONCAVE),
        make_view("never", steps=500, deadline_s=200.0, profile=CONCAVE),
    ]
    plan = look(ElasticFlow(), views, slots=4)
    assert dict(plan.admitted) == {"fits": 200.0}
    assert list(plan.rejected) == ["never"]
    assert "needs 250 s even on 4 devices" in plan.rejected["never"].reason
    assert counts(plan) == {"fits": 4}


def test_arrivals_of_one_moment_are_judged_each_on_its_own():
    views = [
        make_view("first", steps=400, deadline_s=100.0, most=4, profile=LINEAR),
        make_view("second", steps=400, deadline_s=100.0, most=4, profile=LINEAR),
        make_view("third", steps=100, deadline_s=400.0, most=1, profile=LINEAR),
    ]
    assert sorted(look(ElasticFlow(), views, slots=4).admitted) == ["first", "third"]
    together = look(ElasticFlowArtifact(), views, slots=4)
    assert not together.admitted
    assert sorted(together.rejected) == ["first", "second", "third"]


def test_an_admission_breaks_no_promise():
    # 4 devices for 100 s are promised; what is left before that is nothing.
    old = promised(make_view("old", steps=400, deadline_s=100.0, most=4, profile=LINEAR))
    new = make_view("new", steps=50, deadline_s=90.0, most=1, profile=LINEAR)
    plan = look(ElasticFlow(), [old, new], slots=4)
    assert list(plan.rejected) == ["new"]
    assert "promised to another job" in plan.rejected["new"].reason
    assert counts(plan) == {"old": 4}


def test_a_late_job_vetoes_nobody_but_the_artifact_lets_it():
    late = promised(make_view("late", steps=1000, deadline_s=50.0, profile=CONCAVE))
    new = make_view("new", steps=100, deadline_s=500.0, most=1, profile=CONCAVE)
    plan = look(ElasticFlow(), [late, new], slots=8)
    assert list(plan.admitted) == ["new"]
    assert counts(plan)["late"] == 4
    vetoed = look(ElasticFlowArtifact(), [late, new], slots=8)
    assert "'late' is late" in vetoed.rejected["new"].reason


def test_a_late_job_ends_soon_but_breaks_no_other_promise():
    late = promised(make_view("late", steps=100, deadline_s=50.0, most=2, profile=LINEAR))
    tight = promised(make_view("tight", steps=800, deadline_s=301.0, most=4, profile=LINEAR), at_s=100.0)
    plan = look(ElasticFlow(), [late, tight], slots=4, now_s=100.0)
    assert counts(plan) == {"tight": 4}, "it waits for what the other can spare"
    loose = promised(make_view("tight", steps=400, deadline_s=301.0, most=4, profile=LINEAR), at_s=100.0)
    assert counts(look(ElasticFlow(), [late, loose], slots=4, now_s=100.0))["late"] == 2


def test_a_job_of_unknown_speed_runs_without_a_promise_and_is_promised_its_deadline_later():
    unknown = make_view("new", steps=1000, deadline_s=1000.0, profile={})
    plan = look(ElasticFlow(), [unknown])
    assert counts(plan) == {"new": 1}
    assert not plan.admitted
    assert not plan.rejected
    measured = with_fields(
        unknown, throughput_samples_per_s={1: 64.0}, state=JobState.RUNNING, num_replicas=1, started_at_s=0.0
    )
    assert list(look(ElasticFlow(), [measured], held={"new": [0]}, now_s=5.0).admitted) == ["new"]
    hopeless = with_fields(measured, throughput_samples_per_s={1: 0.0001}, max_workers=1)
    plan = look(ElasticFlow(), [hopeless], held={"new": [0]}, now_s=5.0)
    assert counts(plan) == {"new": 1}, "who has run already is not thrown out"
    assert not plan.rejected


def test_overhead_is_reserved_on_request():
    view = make_view("new", steps=395, deadline_s=400.0, most=1, profile=LINEAR)
    overheads = Overheads(change_s=10.0)
    assert look(ElasticFlow(), [view], overheads=overheads).admitted == {"new": 400.0}
    refused = look(ElasticFlow(reserves_overhead=True), [view], overheads=overheads)
    assert list(refused.rejected) == ["new"]


def test_reserved_devices_are_promised_to_nobody_but_used():
    views = [make_view(f"j{n}", steps=390, deadline_s=400.0, most=1, profile=LINEAR) for n in range(4)]
    assert len(look(ElasticFlow(), views, slots=4).admitted) == 4
    plan = look(ElasticFlow(reserve_fraction=0.25), views, slots=4)
    assert len(plan.admitted) == 3
    spare = make_view("best effort", profile=LINEAR)
    assert counts(look(ElasticFlow(reserve_fraction=0.25), [*views, spare], slots=4))["best effort"] == 1


def test_hooks_are_asked_last_and_their_words_reach_the_owner():
    views = [owned(make_view(f"j{n}", steps=100, deadline_s=400.0, profile=LINEAR), "ada") for n in range(3)]
    policy = ElasticFlow(hooks=(OwnerQuota(max_unfinished=2),))
    plan = look(policy, views)
    assert sorted(plan.admitted) == ["j0", "j1"]
    assert "'ada' has 2 jobs" in plan.rejected["j2"].reason
    again = owned(make_view("j3", at_s=1.0, steps=100, deadline_s=400.0, profile=LINEAR), "ada")
    kept = [promised(view) for view in views[:2]]
    plan = look(policy, [*kept, again], now_s=1.0, memory=plan.memory)
    assert list(plan.rejected) == ["j3"]


# --- allocation -----------------------------------------------------------------------------------------------------


def test_spare_devices_go_where_they_waste_least_and_upside_down_in_the_artifact():
    steep = make_view("steep", steps=4000, deadline_s=8000.0, profile=LINEAR)
    flat = make_view("flat", steps=4000, deadline_s=8000.0, profile={1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3})
    assert counts(look(ElasticFlow(), [flat, steep], slots=9)) == {"steep": 8, "flat": 1}
    assert counts(look(ElasticFlow(), [flat, steep], slots=5)) == {"steep": 4, "flat": 1}
    assert counts(look(ElasticFlowArtifact(), [flat, steep], slots=5)) == {"steep": 1, "flat": 4}


def test_soft_deadlines_and_best_effort_come_after_the_shares():
    tight = make_view("tight", steps=790, deadline_s=200.0, most=4, profile=LINEAR)
    soft = as_soft(make_view("soft", steps=400, deadline_s=100.0, profile=LINEAR))
    plan = look(ElasticFlow(), [soft, make_view("whenever", profile=LINEAR), tight], slots=5)
    assert counts(plan) == {"tight": 4, "soft": 1}
    assert list(plan.admitted) == ["tight"]
    assert not plan.rejected


def test_nothing_useful_stays_idle():
    views = [make_view("a", steps=1000, deadline_s=9000.0, profile=CONCAVE), make_view("b", profile=CONCAVE)]
    assert sum(counts(look(ElasticFlow(), views, slots=8)).values()) == 8


def test_only_powers_of_two_unless_told_otherwise():
    profile = {1: 1.0, 8: 8.0}
    views = [make_view("a", steps=1000, deadline_s=9000.0, profile=profile, most=7)]
    assert counts(look(ElasticFlow(), views, slots=7)) == {"a": 4}
    assert counts(look(ElasticFlow(levels="all"), views, slots=7)) == {"a": 7}


def test_the_smallest_size_that_a_job_accepts_is_a_level_too():
    views = [make_view("a", steps=1000, least=3, profile=LINEAR)]
    assert counts(look(ElasticFlow(), views, slots=3)) == {"a": 3}
    assert counts(look(ElasticFlow(), views, slots=8)) == {"a": 8}


def test_nothing_is_remembered_of_other_nodes():
    policy = ElasticFlow()
    view = make_view("a", steps=1000, deadline_s=1500.0, most=4, profile=LINEAR)
    memory = look(policy, [view], slots=8).memory
    running = promised(view, held=4)
    held = {"a": [0, 1, 2, 3]}
    for asked in (policy, ElasticFlow()):
        plan = look(asked, [running], slots=6, held=held, now_s=1.0, memory=memory)
        assert plan.memory["cluster"] != memory["cluster"]
        assert counts(plan) == {"a": 4}


def test_an_inelastic_job_has_all_its_workers_or_none():
    views = [make_view("a", steps=1000, most=3, elastic=False), make_view("b", steps=1000, most=8, profile=LINEAR)]
    assert counts(look(ElasticFlow(), views, slots=4)) == {"a": 3, "b": 1}


def test_the_plan_of_the_future_ends_with_the_work():
    view = make_view("a", steps=600, deadline_s=601.0, most=1, profile=LINEAR)
    plan = look(ElasticFlow(), [view], slots=1)
    (run,) = plan.future["a"]
    assert (run.start_s, run.end_s, run.num_devices) == (0.0, 600.0, 1)
    assert set(plan.future) == {"a"}
    assert len(plan.future) == 1


def test_a_share_begins_with_a_slot_before_its_last_moment():
    waits = promised(make_view("waits", steps=100, deadline_s=1000.0, most=1, profile=LINEAR))
    fills = [promised(make_view(f"f{n}", steps=590, deadline_s=600.0, most=1, profile=LINEAR)) for n in range(2)]
    plan = look(ElasticFlow(), [waits, *fills], slots=2)
    assert counts(plan) == {"f0": 1, "f1": 1}
    assert plan.revisit_at_s == 900.0 // SLOT_S * SLOT_S


# --- standing by what was decided -----------------------------------------------------------------------------------


def test_progress_alone_changes_nothing_before_the_moment_that_was_named():
    policy = ElasticFlow()
    view = make_view("a", steps=1000, deadline_s=1500.0, most=4, profile=LINEAR)
    plan = look(policy, [view])
    running = with_fields(promised(view, held=4), step=40)
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    for asked in (policy, ElasticFlow()):
        again = look(asked, [running], held={"a": [0, 1, 2, 3]}, now_s=10.0, memory=memory)
        assert again.memory == memory
        assert counts(again) == counts(plan)
    restarted = with_fields(running, num_restarts=1)
    assert look(policy, [restarted], held={"a": [0, 1, 2, 3]}, now_s=10.0, memory=memory).memory != memory


def test_newcomers_wait_for_the_end_of_a_slot():
    policy = ElasticFlow(slot_s=60.0)
    first = make_view("a", steps=1000, deadline_s=3000.0, most=1, profile=LINEAR)
    plan = look(policy, [first])
    new = make_view("b", at_s=10.0, steps=100, deadline_s=3000.0, most=1, profile=LINEAR)
    running = promised(first, held=1)
    held = {"a": [0]}
    waiting = look(policy, [running, new], held=held, now_s=10.0, memory=plan.memory)
    assert counts(waiting) == {"a": 1}
    assert not waiting.admitted
    assert waiting.revisit_at_s == 60.0
    decided = look(policy, [running, new], held=held, now_s=60.0, memory=waiting.memory)
    assert list(decided.admitted) == ["b"]
    wide = promised(make_view("a", steps=1000, deadline_s=3000.0, most=4, profile=LINEAR), held=4)
    plan = look(policy, [wide], held={"a": [0, 1, 2, 3]})
    narrowed = with_fields(wide, max_workers=1)
    plan = look(policy, [narrowed, new], held={"a": [0, 1, 2, 3]}, now_s=10.0, memory=plan.memory)
    assert counts(plan)["a"] == 1, "its owner's bounds wait for no slot"


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_without_overhead_every_promise_is_kept(seed):
    # `strict` raises at the first admitted job that ends late.
    figures = play(trace_of(seed), ElasticFlow(), overhead="none", strict=True)
    assert figures["declined"] > 0
    assert figures["admitted_and_broken"] == 0


@pytest.mark.slow
def test_with_overhead_the_reserve_breaks_fewer_promises():
    plain = [play(trace_of(seed), ElasticFlow(), overhead="elasticflow", strict=False) for seed in range(4)]
    careful = [
        play(trace_of(seed), ElasticFlow(reserves_overhead=True), overhead="elasticflow", strict=False)
        for seed in range(4)
    ]
    assert sum(f["admitted_and_broken"] for f in careful) <= sum(f["admitted_and_broken"] for f in plain)
    assert sum(f["deadlines_met"] for f in plain) > 0


@pytest.mark.parametrize("policy", [ElasticFlowArtifact(), ElasticFlow(levels="all")])
def test_the_others_run_to_the_end(policy):
    figures = play(trace_of(1), policy, overhead="elasticflow", strict=False)
    assert figures["deadlines_met"] > 0


@pytest.mark.slow
def test_the_artifacts_faults_cost_deadlines():
    mended = [play(trace_of(seed), ElasticFlow(), strict=False)["deadlines_met"] for seed in range(4)]
    faulty = [play(trace_of(seed), ElasticFlowArtifact(), strict=False)["deadlines_met"] for seed in range(4)]
    assert sum(faulty) < sum(mended)


# --- rows of jobs ---------------------------------------------------------------------------------------------------


def test_rows_are_kept_while_the_view_is_the_same_and_tables_grow():
    from springtide.core.decision import Snapshot
    from springtide.core.resources import Topology

    curves = CurveTable()
    views = tuple(make_view(f"j{n}", steps=100, deadline_s=400.0, most=1 + n % 8, profile=LINEAR) for n in range(100))
    first = curves.rows(Snapshot(now_s=0.0, cluster=Topology(), jobs=views))
    changed = (*views[:50], with_fields(views[50], step=10), *views[60:])
    second = curves.rows(Snapshot(now_s=0.0, cluster=Topology(), jobs=changed))
    assert all(one is other for one, other in zip(first[:50], second[:50], strict=True))
    assert second[50] is not first[50]
    assert second[50].speed_bucket == first[50].speed_bucket, "progress is no reason to decide anew"
    sizes, rates = curves.curves(second)
    for row, row_sizes, row_rates in zip(second, sizes.tolist(), rates.tolist(), strict=True):
        assert tuple(row_sizes[: len(row.sizes)]) == row.sizes
        assert set(row_sizes[len(row.sizes) :]) <= {row.sizes[-1]}
        assert row_rates[0] == curve_of(row.view).rate(row.sizes[0])


def test_work_left_reckons_with_the_price_of_the_last_change():
    view = make_view("a", steps=1000, done=100, most=4, profile=LINEAR, state=JobState.RUNNING)
    row = ElasticRow(with_fields(view, progress_at_s=50.0, resized_at_s=50.0), 0, only_doublings=True)
    overheads = Overheads(change_s=5.0)
    assert row.work_left(53.0, 4, overheads) == 900.0
    assert row.work_left(60.0, 4, overheads) == 880.0
    assert row.work_left(60.0, 0, overheads) == 900.0
    assert row.work_left(1e6, 4, overheads) == 1.0
    assert row.rate(3) == 2.0
    assert row.rate(0) == 0.0


def test_goals_without_a_known_length_are_best_effort():
    row = ElasticRow(replace(make_view("a", deadline_s=100.0), total_steps=None), 0, only_doublings=True)
    assert not row.is_hard
    assert row.deadline_s == float("inf")
    assert Goal(deadline_s=1.0).is_hard
