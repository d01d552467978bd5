from __future__ import annotations

import pytest

from kits.control.quoting import Reserving, platform, training_job
from springtide.control.quotes.budget import WithinBudget, cost_usd, money
from springtide.control.quotes.forecast import roll_forward
from springtide.core.decision import Overheads, Plan, PlannedRun, PoolAllocation
from springtide.core.workload import Goal


class InTurn:
    """One job at a time, on every device; asked again every second for no reason."""

    revisit_s = 1.0

    def __init__(self) -> None:
        self.num_asked = 0

    def decide(self, snapshot):
        self.num_asked += 1
        first = snapshot.jobs[:1]
        devices = snapshot.cluster.device_ids()
        return Plan(
            allocations={
                view.job.job_id: PoolAllocation(device_ids=devices[: view.bounds.max_workers]) for view in first
            },
            revisit_at_s=snapshot.now_s + self.revisit_s,
        )


def test_jobs_end_one_after_the_other():
    jobs = [training_job(name, minutes=10, most=2) for name in ("a", "b")]
    controller = platform(InTurn(), *jobs, devices=2, overheads=Overheads(change_s=5.0))
    snapshot = controller.snapshot(0.0)
    # The first one was given its devices by the controller; in the forecast it has them from the start.
    forecast = roll_forward(snapshot, InTurn())
    first_s, second_s = forecast.finishes_s["a"], forecast.finishes_s["b"]
    assert second_s - first_s == pytest.approx(330.0 + 5.0, rel=0.01)
    assert [run.num_devices for run in forecast.schedules["b"]] == [2]
    assert forecast.schedules["b"][0].start_s == pytest.approx(first_s)


def test_a_policy_that_looks_often_is_not_asked_for_ever():
    policy = InTurn()
    controller = platform(InTurn(), training_job("a", minutes=100_000, most=2), devices=2)
    forecast = roll_forward(controller.snapshot(0.0), policy)
    assert policy.num_asked <= 600
    assert forecast.finishes_s["a"] == pytest.approx(100_000 * 60 * 0.55, rel=1e-6)


def test_what_has_no_known_length_stays():
    controller = platform(
        InTurn(), training_job("a", total_steps=None, most=2), training_job("b", minutes=10), devices=2
    )
    forecast = roll_forward(controller.snapshot(0.0), InTurn(), until="b", max_turns=50)
    assert forecast.finishes_s == {}
    assert "b" not in forecast.schedules


def test_refused_jobs_are_out():
    snapshot = platform(Reserving(), devices=2).snapshot(0.0)
    late = platform(InTurn(), training_job("a", minutes=10, deadline_s=10), devices=2).snapshot(0.0)
    forecast = roll_forward(late, Reserving())
    assert forecast.refusals == {"a": "only 2 devices are not promised to others"}
    assert roll_forward(snapshot, Reserving()).finishes_s == {}


def test_a_schedule_costs_what_its_devices_cost():
    runs = (PlannedRun(start_s=0, end_s=1800, num_devices=2), PlannedRun(start_s=1800, end_s=3600, num_devices=1))
    assert cost_usd(runs, 2.0) == pytest.approx(3.0)
    assert [money(4.2), money(0.0), money(0.0012)] == ["$4.20", "$0.00", "$0.0012"]


def test_a_job_over_its_budget_is_refused_when_it_arrives_and_displaces_no_other_job():
    policy = WithinBudget(Reserving(), 1.0)
    dear = training_job("dear", minutes=60, goal=Goal(deadline_s=2500.0, budget_usd=0.10))
    controller = platform(policy, dear, devices=4)
    assert controller.state.jobs["dear"].state == "REJECTED"
    assert controller.state.jobs["dear"].reason == "its planned cost of $1.10 exceeds the budget of $0.10"
    assert controller.state.memory == {}
    kept = training_job("kept", minutes=60, goal=Goal(deadline_s=2500.0, budget_usd=1.11))
    assert platform(policy, kept, devices=4).state.jobs["kept"].promise.admitted_at_s == 0.0


def test_a_budget_is_judged_once_and_only_where_the_cost_is_known():
    policy = WithinBudget(InTurn(), 1.0)
    unknown = training_job("unknown", profile_steps_per_s={}, goal=Goal(budget_usd=0.01))
    controller = platform(policy, unknown, devices=2)
    assert controller.state.jobs["unknown"].state == "STARTING"
    snapshot = platform(InTurn(), training_job("a", minutes=600, goal=Goal(budget_usd=0.01))).snapshot(1.0)
    assert not policy.decide(snapshot).rejected
