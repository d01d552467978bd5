"""Another goal for a job on functions that runs: what would be promised it, and where it moves for it."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.menu_jobs import CHEAP, FAST, MENU, MIDDLE, cluster, decide, view
from springtide.core.decision import FunctionAllocation, JobView, Snapshot
from springtide.core.functions import FunctionOption
from springtide.core.resources import DeviceId
from springtide.core.workload import Goal, JobState, WorkloadId
from springtide.scheduling.functions.policy import goal_offer

NOW_S = 100.0


def held(option: FunctionOption, place: int = 0) -> FunctionAllocation:
    return FunctionAllocation(device_ids=(DeviceId(f"lambda/{place}"),), plan=option.plan)


def running(name: str = "a", goal: Goal | None = None, step: int = 50, **changes: object) -> JobView:
    return view(name, goal, state=JobState.RUNNING, started_at_s=10.0, step=step, **changes)


def offered(job: JobView, goal: Goal, as_is: FunctionOption = CHEAP, *others: JobView, **allocations: object):
    snapshot = Snapshot(
        now_s=NOW_S,
        cluster=cluster(),
        jobs=(job, *others),
        allocations={job.job.job_id: held(as_is), **allocations},  # type: ignore[dict-item]
    )
    return goal_offer(snapshot, job.job.job_id, goal)


def test_one_that_goes_on_as_it_is_starts_nothing() -> None:
    # 50 steps of 8 s, an eighth on top; the slack of a start would be too much.
    end_s, refusal = offered(running(), Goal(deadline_s=NOW_S + 451.0))
    assert (end_s, refusal) == (NOW_S + 450.0, None)


def test_a_sooner_deadline_is_promised_where_another_way_makes_it() -> None:
    end_s, refusal = offered(running(), Goal(deadline_s=NOW_S + 300.0))
    # As two functions: 10 s until they run, 50 steps of 4 s, an eighth on top.
    assert (end_s, refusal) == (NOW_S + 10.0 + 225.0, None)


def test_one_that_no_way_makes_is_refused_with_what_would_do() -> None:
    end_s, refusal = offered(running(), Goal(deadline_s=NOW_S + 60.0))
    assert end_s is None
    assert refusal is not None
    assert "the fastest way takes up to 123 s, and 60 s are left" in refusal.reason
    assert "--deadline 123s" in refusal.alternatives


def test_what_was_spent_counts_for_a_budget_and_going_on_costs_no_start() -> None:
    spent = running(spent_usd=0.4)
    # 50 steps of a cent, an eighth on top.
    assert offered(spent, Goal(budget_usd=0.97))[1] is None
    refusal = offered(spent, Goal(budget_usd=0.9))[1]
    assert refusal is not None
    assert "its cheapest way on functions costs up to $0.96" in refusal.reason
    assert refusal.alternatives == ("--budget 0.97",)


def test_what_was_promised_to_others_is_kept() -> None:
    # The other one holds two functions until it is through; the fast way needs eight of ten.
    other = running("b", Goal(deadline_s=NOW_S + 2000.0), step=0, admitted_at_s=0.0, promised_finish_s=NOW_S + 500.0)
    goal = Goal(deadline_s=NOW_S + 150.0)
    assert offered(running(), goal)[1] is None
    assert offered(running(), goal, CHEAP, other, b=held(MIDDLE, 1))[1] is None
    third = running("c", Goal(), step=0)
    refusal = offered(running(), goal, CHEAP, other, third, b=held(MIDDLE, 1), c=held(MIDDLE, 2))[1]
    assert refusal is not None
    # Where it would be the fastest it would have to wait longer than the next one takes.
    assert "the fastest way takes up to 235 s" in refusal.reason


def test_who_has_neither_begun_nor_a_promise_makes_way() -> None:
    waiting = view("b", Goal(is_fastest=True))
    assert offered(running(), Goal(deadline_s=NOW_S + 150.0), CHEAP, waiting)[1] is None


def test_a_job_moves_for_its_new_goal_and_stays_without_one() -> None:
    """It runs dear and fast; with time to spare the cheapest way that makes it is worth a start."""
    later = Goal(deadline_s=NOW_S + 3000.0)
    now = {"a": held(FAST)}
    unchanged = decide(running(goal=later), now_s=NOW_S, held=now)
    assert unchanged.allocations[WorkloadId("a")] == held(FAST)
    changed = decide(running(goal=later, num_edits=1), now_s=NOW_S, held=now)
    assert changed.allocations[WorkloadId("a")] == held(CHEAP)
    assert changed.reasons[WorkloadId("a")].endswith("its owner changed its goal; the cheapest that makes its deadline")
    # It is there now: nothing is to be won by another change.
    there = decide(running(goal=later, num_edits=1), now_s=NOW_S, held={"a": held(CHEAP)})
    assert there.allocations[WorkloadId("a")] == held(CHEAP)


def test_a_smaller_budget_moves_it_to_what_it_can_pay() -> None:
    # Fast: 50 steps of 3 cents, an eighth on top: $1.69. Two functions: $0.73.
    changed = decide(running(goal=Goal(budget_usd=1.0), num_edits=1), now_s=NOW_S, held={"a": held(FAST)})
    assert changed.allocations[WorkloadId("a")] == held(MIDDLE)


def test_a_sooner_deadline_moves_it_at_once() -> None:
    sooner = Goal(deadline_s=NOW_S + 300.0)
    changed = decide(running(goal=sooner, num_edits=1), now_s=NOW_S, held={"a": held(CHEAP)})
    assert changed.allocations[WorkloadId("a")] == held(MIDDLE)


def test_no_goal_at_all_moves_nobody() -> None:
    for option in (CHEAP, MIDDLE, FAST):
        changed = decide(running(goal=Goal(), num_edits=2), now_s=NOW_S, held={"a": held(option)})
        assert changed.allocations[WorkloadId("a")] == held(option)


def test_what_was_tried_is_compared_by_what_it_took() -> None:
    """The cheap way was three times as slow as predicted, does not make this deadline, and that is not forgotten."""
    measured = {1: 32 / (3 * CHEAP.step_s), 8: 32 / FAST.step_s}
    job = running(goal=Goal(deadline_s=NOW_S + 1000.0), num_edits=1, throughput_samples_per_s=measured)
    moved = decide(job, now_s=NOW_S, held={"a": held(FAST)})
    assert moved.allocations[WorkloadId("a")] == held(MIDDLE)
    # And from there it is not gone back to either.
    measured[2] = 32 / MIDDLE.step_s
    job = with_fields(job, throughput_samples_per_s=measured)
    assert decide(job, now_s=NOW_S, held={"a": held(MIDDLE)}).allocations[WorkloadId("a")] == held(MIDDLE)


@pytest.mark.slow
def test_moves_for_a_goal_come_to_an_end_whatever_is_found_on_the_way() -> None:
    """Every way takes another time than predicted, which is seen only there: nobody goes in circles."""
    random = Random(7)
    for _ in range(300):
        truth = {option.plan.num_functions: random.uniform(0.4, 2.5) for option in MENU.options}
        goal = Goal(
            deadline_s=NOW_S + random.uniform(100.0, 1500.0) if random.random() < 0.8 else None,
            budget_usd=random.uniform(0.3, 3.0) if random.random() < 0.6 else None,
            is_soft=random.random() < 0.5,
        )
        option, measured, held_by = random.choice(MENU.options), {}, []
        for _ in range(8):
            held_by.append(option.plan)
            measured[option.plan.num_functions] = 32 / (option.step_s * truth[option.plan.num_functions])
            job = running(goal=goal, num_edits=1, throughput_samples_per_s=dict(measured))
            given = decide(job, now_s=NOW_S, held={"a": held(option)}).allocations[WorkloadId("a")]
            assert isinstance(given, FunctionAllocation)
            option = next(each for each in MENU.options if each.plan == given.plan)
        assert held_by[-1] == held_by[-2] == held_by[-3], (goal, truth)


def test_a_menu_is_as_it_was_afterwards() -> None:
    offered(running(), Goal(deadline_s=NOW_S + 300.0))
    assert all(option.start_s == 10.0 for option in MENU.options)
    assert replace(MENU) == MENU
