"""What the control plane is told of a run; tests of the coordinator hold the events of whole runs."""

from __future__ import annotations

import pytest

from kits.functions.world import World
from springtide.backends.functions.coordinator.reports import USAGE_INTERVAL_S, RunReports
from springtide.backends.functions.coordinator.run import Run
from springtide.backends.functions.coordinator.saved_states import SavedStates


@pytest.fixture
def run() -> Run:
    world = World(total_steps=200)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 3)
    return world.coordinator.run


@pytest.fixture
def reports() -> RunReports:
    return RunReports(SavedStates("job/"))


def test_usage_is_due_at_once_and_then_after_its_interval(run: Run, reports: RunReports) -> None:
    assert reports.is_usage_due(run)
    assert reports.usage(run).job_id == run.facts.job_id
    assert not reports.is_usage_due(run)
    run.now_s += USAGE_INTERVAL_S
    assert reports.is_usage_due(run)


def test_a_plan_in_force_is_reported_once(run: Run, reports: RunReports) -> None:
    assert reports.resized_unless_reported(run, "start") == []
    run.generation += 1
    run.changes = ()
    [order] = reports.resized_unless_reported(run, "start")
    assert (order.event.generation, order.event.direction) == (run.generation, "start")
    assert run.changes[-1].plan == run.plan
    assert reports.resized_unless_reported(run, "start") == []


def test_a_pause_ends_with_the_first_step_of_another_plan(run: Run, reports: RunReports) -> None:
    run.generation += 1
    run.paused_at_s = run.now_s - 2.0
    event = reports.resized_by_start(run)
    assert (event.direction, event.pause_s) == ("replace", 2.0)
    assert run.paused_at_s is None
    assert reports.resized_by_start(run).direction in ("start", "resume")
