"""The bench of goals, kept small: goals are met near the best of all, and what cannot be met is refused."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from kits.simulation.sweeps import only_in_full
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Goal, JobState
from springtide_studies.goals.bench import case_played, markdown, run_bench
from springtide_studies.goals.rivals import COLLECTIVES, Profiler, RivalPlace, after_profiling, model_alone
from springtide_studies.goals.searches import SEARCHES, accuracy_rows, problem_of, searched
from springtide_studies.goals.world.cases import CASES, lambda_of_all_sizes, search_job, surface_of
from springtide_studies.goals.world.executor import JobArrival
from springtide_studies.goals.world.play import outcome_of, play_world
from springtide_studies.goals.world.truth import draw_truth

SERVICE = lambda_of_all_sizes()
CASE = replace(CASES["resnet50"], num_epochs=10, deadline_s=1200.0, max_workers=8)


def place(seed: int) -> RivalPlace:
    surface = surface_of(CASE, SERVICE)
    goal = CASE.goal("cheapest")
    return RivalPlace(
        case=CASE, truth=draw_truth(seed, SERVICE), service=SERVICE, surface=surface, goal=goal, seed=seed
    )


def test_a_goal_is_met_and_the_best_of_all_is_not_far() -> None:
    (played,) = case_played(CASE, ["cheapest"], [201], has_rivals=True)["cheapest"]
    assert played.is_met
    assert played.best is not None
    assert played.ours.num_steps == CASE.num_steps
    # Ten epochs are little time to look around: what looking costs is no small part of it.
    assert played.value < 1.5 * played.best.value(CASE.goal("cheapest"))
    assert set(played.rivals) == {
        "model alone",
        "fixed allocation",
        *COLLECTIVES,
        "machines (EC2 C5)",
        *SEARCHES,
    }
    assert played.errors.main_time_before > 0.0


def test_what_cannot_be_met_is_refused_with_what_would_do() -> None:
    truth = draw_truth(201, SERVICE)
    late = search_job(CASE, SERVICE, Goal(deadline_s=20.0))
    crew = play_world(truth, SERVICE, [JobArrival(job=late, model=CASE.model)]).crews[late.job_id]
    assert crew.run.state is JobState.REJECTED
    assert any(change.startswith("--deadline") for change in crew.run.alternatives)
    assert outcome_of(crew).usd == 0.0
    poor = search_job(CASE, SERVICE, Goal(budget_usd=0.001, is_fastest=True))
    crew = play_world(truth, SERVICE, [JobArrival(job=poor, model=CASE.model)]).crews[poor.job_id]
    assert crew.run.state is JobState.REJECTED
    assert any(change.startswith("--budget") for change in crew.run.alternatives)


def test_profiling_is_paid_for_and_its_steps_count_where_they_are_kept() -> None:
    here = place(202)
    profiler = Profiler(here)
    plan = here.surface.plan(3, 10)
    shown_s = profiler.measure(plan)
    truth_s = here.truth.step(CASE.model, plan, CASE.global_batch_size, CASE.model.parameter_bytes).step_s
    assert shown_s == pytest.approx(truth_s, rel=0.2)
    kept, lost = (after_profiling(here, profiler, plan, keeps_work=keeps) for keeps in (True, False))
    assert kept.profiled_usd == lost.profiled_usd > 0.0
    assert kept.took_s < lost.took_s
    assert lost.took_s == pytest.approx(profiler.took_s + here.whole(plan).took_s)
    assert model_alone(here).profiled_usd == 0.0


def test_searches_of_others_end_with_a_choice_and_more_runs_do_not_make_them_worse_on_average() -> None:
    here = place(203)
    assert problem_of(here.surface, here.goal, 80).fits.any()
    for name in SEARCHES:
        result = searched(here, name)
        assert result is not None
        assert 0 < result.num_profiled <= 36
    rows = accuracy_rows(CASE, [203, 204])
    assert {row["method"] for row in rows} == {"random", "reinforcement-learning", "bayes", "springtide"}
    assert all(0.0 <= row["after_24"] <= 1.0 for row in rows)


def test_a_report_is_a_table_and_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="cheapest, fastest"):
        run_bench(scenarios=["dearest"], timer=time.process_time)
    with pytest.raises(InvalidRequest, match="bert-medium"):
        run_bench(cases=["none"], timer=time.process_time)


@pytest.mark.slow
@only_in_full
def test_two_worlds_of_the_small_case_pass() -> None:
    report = run_bench(num_seeds=2, first_seed=200, cases=["small"], timer=time.process_time)
    assert report["passed"], markdown(report)
    assert all(row["num_met"] == row["num_runs"] == 2 for row in report["rows"] if row["bound"] is not None)
    assert "small, cheapest within 1500 s" in markdown(report)
