"""Jobs on functions in long traces: the same controller and policy as live, with steps as their plans say."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.decision import FunctionAllocation
from springtide.core.functions import (
    FunctionMenu,
    FunctionOption,
    FunctionPlan,
    FunctionPrices,
    FunctionService,
    FunctionStage,
    MemorySize,
)
from springtide.core.resources import Device, DeviceId, Node, NodeId, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob, WorkloadId
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule


def service(concurrency: int, num_places: int) -> Node:
    places = tuple(
        Device(device_id=DeviceId(f"f/{n}"), node_id=NodeId("f"), index=n, kind="function") for n in range(num_places)
    )
    offered = FunctionService(
        name="f",
        sizes=(MemorySize(memory_mb=512, vcpus=0.3, bytes_per_s=1e7),),
        prices=FunctionPrices(usd_per_gb_s=1e-5),
        concurrency=concurrency,
    )
    return Node(node_id=NodeId("f"), devices=places, functions=offered)


def option(num_stages: int, step_s: float, step_usd: float) -> FunctionOption:
    stages = tuple(FunctionStage(first_layer=n, end_layer=n + 1, memory_mb=512) for n in range(num_stages))
    return FunctionOption(plan=FunctionPlan(stages=stages), step_s=step_s, step_usd=step_usd, start_s=5.0)


MENU = FunctionMenu(
    service="f", options=(option(1, 2.0, 0.01), option(4, 1.0, 0.03)), recommended=0, error_fraction=0.0
)


def job(name: str, goal: Goal | None = None) -> TrainingJob:
    entrypoint = Entrypoint(source_path="trace")
    return TrainingJob(
        job_id=WorkloadId(name), name=name, entrypoint=entrypoint, goal=goal or Goal(), menu=MENU, total_steps=100
    )


def played(*arrivals: tuple[float, TrainingJob], concurrency: int = 8, num_places: int = 4, policy: str = "fifo"):
    nodes = [make_node("n", 2), service(concurrency, num_places)]
    return play(
        WithFunctions(make_policy(policy)),
        arrivals,
        nodes,
        rule=overhead_rule("none", 2),
        speeds=ProfiledSpeeds(devices_per_node=2),
        reports_progress=True,
    ).runs


def test_a_job_takes_its_start_and_its_steps():
    run = played((0.0, job("a")))["a"]
    assert run.state is JobState.SUCCEEDED
    assert run.ended_s == pytest.approx(5.0 + 100 * 2.0)


def test_a_deadline_picks_the_entry_that_makes_it_and_jobs_on_machines_run_beside():
    plain = TrainingJob(
        job_id=WorkloadId("m"),
        name="m",
        entrypoint=Entrypoint(source_path="trace"),
        total_steps=10,
        profile_steps_per_s={1: 1.0},
    )
    runs = played((0.0, job("a", Goal(deadline_s=150.0))), (0.0, plain))
    assert runs["a"].ended_s == pytest.approx(105.0)
    assert runs["m"].ended_s == pytest.approx(10.0)
    refused = played((0.0, job("a", Goal(deadline_s=50.0))))["a"]
    assert refused.state is JobState.REJECTED


def test_who_finds_no_functions_free_waits_for_them():
    goal = Goal(deadline_s=1000.0)
    runs = played((0.0, job("a", Goal(deadline_s=150.0))), (1.0, job("b", goal)), (1.0, job("c", goal)), concurrency=5)
    # The first holds four of five functions, so the second gets the last one, and the third waits for the first.
    assert runs["b"].ended_s == pytest.approx(1.0 + 205.0)
    assert runs["c"].ended_s == pytest.approx(105.0 + 205.0)


def test_the_same_trace_ends_the_same_under_the_default_policy():
    arrivals = [(float(n), job(f"j{n}", Goal(deadline_s=400.0 + 10 * n) if n % 2 else None)) for n in range(12)]
    first, second = (played(*arrivals, concurrency=9, num_places=5, policy="springtide") for _ in range(2))
    assert {k: v.ended_s for k, v in first.items()} == {k: v.ended_s for k, v in second.items()}
    assert all(run.state in (JobState.SUCCEEDED, JobState.REJECTED) for run in first.values())
    promised = [run for run in first.values() if run.admitted_s is not None]
    assert promised
    assert all(run.ended_s <= run.job.goal.deadline_s for run in promised)


class Checked:
    """The policy, with what no plan may do checked at every turn."""

    def __init__(self, concurrency: int, num_places: int) -> None:
        self.inner = WithFunctions(make_policy("fifo"))
        self.concurrency, self.num_places = concurrency, num_places

    def decide(self, snapshot):
        plan = self.inner.decide(snapshot)
        given = [held.plan for held in plan.allocations.values() if isinstance(held, FunctionAllocation)]
        assert sum(wanted.num_functions for wanted in given) <= self.concurrency
        assert len(given) <= self.num_places
        again = self.inner.decide(snapshot)
        assert (again.allocations, again.admitted, again.rejected) == (plan.allocations, plan.admitted, plan.rejected)
        return plan


@pytest.mark.parametrize("seed", range(60))
def test_whatever_arrives_promises_are_kept_and_nobody_gets_more_than_there_is(seed):
    chance = np.random.default_rng(seed)
    concurrency, num_places = int(chance.integers(4, 12)), int(chance.integers(1, 6))
    arrivals = []
    for number in range(20):
        at_s = float(chance.uniform(0, 1500))
        deadline_s = at_s + float(chance.uniform(60, 1500)) if chance.random() < 0.6 else None
        budget_usd = float(chance.uniform(0.5, 4.0)) if chance.random() < 0.3 else None
        goal = Goal(deadline_s=deadline_s, budget_usd=budget_usd, waits=bool(chance.random() < 0.2))
        arrivals.append((at_s, job(f"j{number}", goal)))
    runs = play(
        Checked(concurrency, num_places),
        sorted(arrivals, key=lambda arrival: arrival[0]),
        [make_node("n", 2), service(concurrency, num_places)],
        rule=overhead_rule("none", 2),
        speeds=ProfiledSpeeds(devices_per_node=2),
        reports_progress=True,
    ).runs
    promised = [run for run in runs.values() if run.admitted_s is not None]
    assert all(run.ended_s <= run.job.goal.deadline_s + 1e-6 for run in promised)
    assert all(run.state in (JobState.SUCCEEDED, JobState.REJECTED) for run in runs.values())
