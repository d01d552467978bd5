"""Jobs on functions: which entry of its menu each one gets, and that nobody else is touched."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.scheduling.menu_jobs import CHEAP, FAST, MENU, MIDDLE, cluster, decide, option, view
from springtide.core.decision import FunctionAllocation, Snapshot
from springtide.core.functions import (
    FunctionPlan,
    FunctionStage,
)
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.workload import Goal, JobState, WorkloadId
from springtide.scheduling.functions.ask import pace_of
from springtide.scheduling.functions.plan_text import words
from springtide.scheduling.functions.policy import WithFunctions, machines_only
from springtide.scheduling.registry import make_policy


def chosen(plan, name: str):
    return plan.allocations[WorkloadId(name)].plan


def test_without_a_goal_the_recommended_entry_runs():
    plan = decide(view("a"))
    assert chosen(plan, "a") == MIDDLE.plan
    assert plan.reasons["a"].startswith("2 functions (2 x 1), 1024 MB each: the recommended of 3 ways")


def test_a_deadline_takes_the_cheapest_entry_that_makes_it_and_is_promised():
    plan = decide(view("a", Goal(deadline_s=500.0)))
    # 10 s to begin and 100 steps of 4 s, an eighth more at the upper end.
    assert chosen(plan, "a") == MIDDLE.plan
    assert plan.admitted["a"] == 10.0 + 100 * 4.0 * 1.125
    assert chosen(decide(view("a", Goal(deadline_s=240.0))), "a") == FAST.plan
    assert chosen(decide(view("a", Goal(deadline_s=5000.0))), "a") == CHEAP.plan


def test_a_deadline_that_no_entry_makes_is_refused_with_what_would_do():
    refused = decide(view("a", Goal(deadline_s=100.0))).rejected["a"]
    assert "fastest way takes up to 235 s, and 100 s are left" in refused.reason
    assert refused.alternatives == ("--deadline 235s", "--best-effort")
    soft = decide(view("a", Goal(deadline_s=100.0, is_soft=True)))
    assert chosen(soft, "a") == FAST.plan
    assert "late" in soft.reasons["a"]


def test_a_budget_takes_the_fastest_entry_within_it_and_what_was_spent_counts():
    assert chosen(decide(view("a", Goal(budget_usd=5.0))), "a") == FAST.plan
    assert chosen(decide(view("a", Goal(budget_usd=1.5))), "a") == MIDDLE.plan
    assert chosen(decide(view("a", Goal(budget_usd=1.5), spent_usd=0.2)), "a") == CHEAP.plan
    refused = decide(view("a", Goal(budget_usd=0.5))).rejected["a"]
    assert "costs up to $1.12, more than its budget of $0.50" in refused.reason
    assert refused.alternatives == ("--budget 1.13",)


def test_both_goals_together_name_the_budget_that_would_make_the_deadline():
    refused = decide(view("a", Goal(deadline_s=240.0, budget_usd=1.5))).rejected["a"]
    assert refused.alternatives[0].startswith("--budget 3.38")


def test_what_runs_is_kept_and_functions_and_places_are_shared_out_in_order():
    held = {"a": FunctionAllocation(device_ids=(DeviceId("lambda/0"),), plan=FAST.plan)}
    running = view("a", state=JobState.RUNNING, num_replicas=1, started_at_s=0.0)
    plan = decide(running, view("b"), view("c"), held=held)
    assert plan.allocations["a"] == held["a"]
    assert chosen(plan, "b") == MIDDLE.plan
    assert "c" not in plan.allocations
    assert plan.reasons["c"] == "waiting for 2 functions: 0 of the 10 that 'lambda' runs at a time are free"
    full = decide(running, view("b"), held=held, places=1)
    assert "all 1 places" in full.reasons["b"]


def test_the_same_plan_comes_again_once_it_has_come_true():
    first = decide(view("a", Goal(deadline_s=500.0)))
    promised = view("a", Goal(deadline_s=500.0), admitted_at_s=0.0, promised_finish_s=450.0, num_replicas=1)
    again = decide(promised, held=dict(first.allocations), now_s=1.0)
    assert again.allocations == first.allocations
    assert not again.admitted
    assert not again.rejected


def test_a_job_that_falls_behind_its_deadline_moves_to_a_faster_entry():
    held = {"a": FunctionAllocation(device_ids=(DeviceId("lambda/0"),), plan=MIDDLE.plan)}
    late = view(
        "a",
        Goal(deadline_s=500.0),
        step=50,
        state=JobState.RUNNING,
        admitted_at_s=0.0,
        num_replicas=1,
        # Steps take 6 s instead of the predicted 4.
        throughput_samples_per_s={2: 32 / 6.0},
    )
    plan = decide(late, held=held, now_s=300.0)
    assert chosen(plan, "a") == FAST.plan
    assert plan.allocations["a"].device_ids == (DeviceId("lambda/0"),)
    assert "fallen behind" in plan.reasons["a"]
    assert chosen(decide(late, held=held, now_s=100.0), "a") == MIDDLE.plan


def test_without_the_service_the_job_waits_and_says_for_what():
    snapshot = Snapshot(now_s=0.0, cluster=Topology(nodes=(make_node("n", 2),)), jobs=(view("a"),))
    plan = WithFunctions(make_policy("fifo")).decide(snapshot)
    assert not plan.allocations
    assert "not connected to" in plan.reasons["a"]


def test_everyone_else_sees_machines_only():
    plain = replace(view("b").job, menu=None)
    other = replace(view("b"), job=plain, total_steps=None)
    plan = decide(view("a"), other)
    assert set(plan.allocations) == {"a", "b"}
    assert all(str(device).startswith("n/") for device in plan.allocations["b"].device_ids)
    snapshot = Snapshot(now_s=0.0, cluster=cluster(), jobs=(view("a"), other), allocations=plan.allocations)
    seen = machines_only(snapshot)
    assert [node.node_id for node in seen.cluster.nodes] == ["n"]
    assert [v.job.job_id for v in seen.jobs] == ["b"]
    assert set(seen.allocations) == {"b"}
    bare = replace(snapshot, cluster=seen.cluster, jobs=seen.jobs, allocations={})
    assert machines_only(bare) is bare


def test_a_plan_in_words():
    assert words(CHEAP.plan) == "1 function (1 x 1), 1024 MB each"
    mixed = FunctionPlan(
        stages=(
            FunctionStage(first_layer=0, end_layer=2, memory_mb=2048),
            FunctionStage(first_layer=2, end_layer=3, memory_mb=1024),
        ),
        num_replicas=3,
    )
    assert words(mixed) == "6 functions (2 x 3), 2048+1024 MB"


def test_the_pace_is_that_of_the_way_it_runs():
    alike = replace(MENU, options=(CHEAP, option(1, 2, 5.0, 0.012), MIDDLE, FAST))
    seen = view("a", throughput_samples_per_s={2: 32 / 6.0})
    assert pace_of(seen, alike, MIDDLE.plan) == pytest.approx(1.5)
    assert pace_of(seen, alike, alike.options[1].plan) == pytest.approx(1.2)
    assert pace_of(seen, alike) == pytest.approx(1.2)
    assert pace_of(view("a"), alike, MIDDLE.plan) == 1.0
