"""The world of goals: a seed plays the same run again, money adds up, deaths lose nothing, who can stay stays."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from springtide.core.decision import FunctionAllocation, Plan, Snapshot
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.workload import Goal, JobState
from springtide.perf.functions.bill import bill_of
from springtide_studies.goals.world.best import all_plans, all_runs, best_of, expected_run
from springtide_studies.goals.world.cases import CASES, fixed_job, lambda_of_all_sizes, surface_of
from springtide_studies.goals.world.executor import GoalWorld, JobArrival
from springtide_studies.goals.world.play import GoalPlayed, outcome_of, play_world
from springtide_studies.goals.world.runs import CostMeter
from springtide_studies.goals.world.streams import Arrivals, daily_arrivals
from springtide_studies.goals.world.truth import MOST_WRONG, Truth, draw_truth, mean_of_slowest
from springtide_studies.goals.world.walks import walked_sync_s

SERVICE = lambda_of_all_sizes()
CASE = replace(CASES["resnet50"], num_epochs=5)


def plan(n: int, memory_mb: int) -> FunctionPlan:
    return FunctionPlan(
        stages=(FunctionStage(first_layer=0, end_layer=8, memory_mb=memory_mb),),
        num_replicas=n,
        num_micro_batches=-(-512 // n // 8),
        micro_batch_size=8,
    )


class Given:
    """Runs the one job as the plan that is due at each moment."""

    def __init__(self, *plans: tuple[float, FunctionPlan]) -> None:
        self.plans = plans

    def decide(self, snapshot: Snapshot) -> Plan:
        due = [plan for at_s, plan in self.plans if at_s <= snapshot.now_s][-1]
        later = [at_s for at_s, _ in self.plans if at_s > snapshot.now_s]
        place = snapshot.cluster.device_ids()[0]
        return Plan(
            allocations={
                view.job.job_id: FunctionAllocation(device_ids=(place,), plan=due) for view in snapshot.jobs[:1]
            },
            revisit_at_s=min(later, default=None),
        )


def world(
    *plans: tuple[float, FunctionPlan], seed: int = 3, truth: Truth | None = None, goal: Goal | None = None
) -> GoalWorld:
    job = fixed_job(CASE, SERVICE, plans[0][1], goal)
    return play_world(
        truth or draw_truth(seed, SERVICE),
        SERVICE,
        [JobArrival(job=job, model=CASE.model)],
        seed=seed,
        policy=Given(*plans),
    )


def played(*plans: tuple[float, FunctionPlan], **more: object) -> GoalPlayed:
    return outcome_of(world(*plans, **more).crews["job"])


def test_the_same_seed_plays_the_same_run_to_the_last_bit() -> None:
    assert played((0.0, plan(16, 2048))) == played((0.0, plan(16, 2048)))
    assert played((0.0, plan(16, 2048)), seed=4).took_s != played((0.0, plan(16, 2048))).took_s


def test_money_is_the_bill_of_what_was_used() -> None:
    crew = world((0.0, plan(16, 2048)), (60.0, plan(24, 2048))).crews["job"]
    usage, bill = crew.run.meter.usage(), crew.run.meter.bill()
    assert bill == bill_of(usage, SERVICE.prices)
    assert bill.total_usd == pytest.approx(
        bill.function_usd + bill.invocation_usd + bill.request_usd + bill.storage_usd
    )
    # Sixteen functions from the beginning to the end, and no more than twenty-four.
    took_s = outcome_of(crew).took_s
    assert 16 * 2 * (took_s - 1.0) < usage.function_gb_s < 24 * 2 * took_s
    spent = [moment.spent_usd for moment in crew.run.moments]
    assert spent == sorted(spent)
    assert spent[-1] <= bill.total_usd


def test_deaths_lose_nothing_and_cost_what_is_redone() -> None:
    calm = replace(draw_truth(3, SERVICE), death_fraction=0.0)
    deadly = replace(calm, death_fraction=0.5)
    undisturbed, disturbed = (world((0.0, plan(16, 2048)), truth=truth).crews["job"] for truth in (calm, deadly))
    assert undisturbed.run.num_deaths == 0
    assert disturbed.run.num_deaths > 0
    for crew in (undisturbed, disturbed):
        assert crew.run.state is JobState.SUCCEEDED
        assert crew.run.step == CASE.num_steps
        assert crew.run.num_taken == CASE.num_steps * CASE.global_batch_size
    assert outcome_of(disturbed).took_s > outcome_of(undisturbed).took_s
    # Every step was done, and those that were lost once more.
    assert [told.step for told in undisturbed.run.told] == list(range(1, CASE.num_steps + 1))
    assert len(disturbed.run.told) == CASE.num_steps + disturbed.run.num_redone


def test_who_can_stay_goes_on_until_joiners_are_warm() -> None:
    truth = replace(draw_truth(3, SERVICE), death_fraction=0.0)
    run = world((0.0, plan(16, 2048)), (60.0, plan(24, 2048)), truth=truth).crews["job"].run
    change = next(moment for moment in run.moments if moment.plan == plan(24, 2048))
    # Steps went on between the wish and the change, and none was lost by it.
    assert [told for told in run.told if 60.0 < told.at_s <= change.at_s]
    assert [told.step for told in run.told] == list(range(1, CASE.num_steps + 1))
    assert run.num_changes == 1
    # Only the joiners were called: sixteen at first, eight for the change.
    assert run.meter.usage().num_invocations == 24
    moved = world((0.0, plan(16, 2048)), (60.0, plan(16, 3072)), truth=truth).crews["job"].run
    assert moved.meter.usage().num_invocations == 32


def test_a_budget_is_a_cap() -> None:
    whole = played((0.0, plan(16, 2048))).usd
    run = played((0.0, plan(16, 2048)), goal=Goal(budget_usd=whole / 2))
    assert run.state is not JobState.SUCCEEDED
    assert run.usd <= whole / 2
    assert 0 < run.num_steps < CASE.num_steps


def test_a_played_run_is_what_is_expected_of_it_on_average() -> None:
    truth = draw_truth(5, SERVICE)
    expected = expected_run(truth, SERVICE, CASE.model, plan(24, 2048), [(CASE.global_batch_size, CASE.num_steps)])
    runs = [played((0.0, plan(24, 2048)), truth=truth, seed=seed) for seed in range(12)]
    assert sum(run.took_s for run in runs) / 12 == pytest.approx(expected.took_s, rel=0.05)
    assert sum(run.usd for run in runs) / 12 == pytest.approx(expected.usd, rel=0.05)


def test_the_best_of_all_is_within_its_goal_and_none_that_is_costs_less() -> None:
    small = replace(CASE, max_workers=12)
    truth, surface = draw_truth(7, SERVICE), surface_of(small, SERVICE)
    plans = [one for one in all_plans(surface, 12) if one.stages[0].memory_mb % 1024 == 0]
    assert {one.num_replicas for one in plans} == set(range(1, 13))
    runs = all_runs(truth, SERVICE, small.model, plans, [(512, small.num_steps)])
    goal = Goal(deadline_s=sorted(run.took_s for run in runs)[len(runs) // 2])
    best = best_of(runs, goal)
    assert best is not None
    assert best.took_s <= (goal.deadline_s or 0.0)
    assert all(run.usd >= best.usd for run in runs if run.meets(goal, 1.645))
    assert best_of(runs, Goal(deadline_s=1.0)) is None


def test_the_truth_is_wrong_by_what_it_says_and_no_more() -> None:
    for seed in range(10):
        truth = draw_truth(seed, SERVICE)
        factors = [truth.wrong_factor(n, m) for n, m in itertools.product((1, 4, 32, 128), (256, 1024, 4096, 10240))]
        assert all(1.0 / MOST_WRONG <= factor <= MOST_WRONG for factor in factors)
        assert max(factors) / min(factors) > 1.1


def test_more_workers_straggle_more_and_an_exchange_is_no_formula() -> None:
    assert mean_of_slowest(1, 0.1) < mean_of_slowest(8, 0.1) < mean_of_slowest(64, 0.1)
    free_s = walked_sync_s("duplex", 8, 1e8, 7e7, 0.0)
    assert 2 * 7 / 8 * 1e8 / 7e7 < free_s < 3 * 1e8 / 7e7
    assert free_s < walked_sync_s("duplex", 8, 1e8, 7e7, 0.1)
    five_s, four_s, six_s = (walked_sync_s("duplex", n, 1e8, 7e7, 0.04) for n in (5, 4, 6))
    assert min(four_s, six_s) <= five_s <= max(four_s, six_s)


def test_a_stream_that_waits_costs_nothing_and_every_sample_is_trained_once() -> None:
    stream = Arrivals(
        [10.0 + 0.05 * number for number in range(5000)] + [4000.0 + number for number in range(300)], 5000.0
    )
    job = replace(fixed_job(CASE, SERVICE, plan(8, 2048)), stream="clicks", total_steps=None, num_samples=None)
    truth = replace(draw_truth(3, SERVICE), death_fraction=0.2)
    arrival = JobArrival(job=job, model=CASE.model)
    policy = Given((0.0, plan(8, 2048)))
    crew = play_world(truth, SERVICE, [arrival], policy=policy, streams={"clicks": stream}).crews["job"]
    run = crew.run
    assert run.state is JobState.SUCCEEDED
    assert run.num_taken == 5300
    pairs = list(itertools.pairwise(run.moments))
    idle_s = max(after.at_s - before.at_s for before, after in pairs if before.plan is None)
    assert idle_s > 600.0
    # While it waited nothing was spent.
    before, after = next(pair for pair in pairs if pair[1].at_s - pair[0].at_s == idle_s)
    state_s = truth.state_s(CASE.model, 2048)
    left = CostMeter(SERVICE.prices, False)
    left.run(plan(8, 2048), state_s)
    left.invoke(8)
    assert after.spent_usd - before.spent_usd <= left.bill().total_usd * 1.01


def test_a_day_of_arrivals_has_its_shape() -> None:
    day = daily_arrivals(1, 0.1)
    night, afternoon = day.count(6 * 3600.0) - day.count(0.0), day.count(18 * 3600.0) - day.count(12 * 3600.0)
    assert night < afternoon / 2
    assert day.when(day.count(86_400.0) + 1) == 86_400.0
    assert day.is_closed(86_400.0)
