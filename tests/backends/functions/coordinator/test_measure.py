"""Measurements put together from functions' own sums: cumulative, exact, told rarely."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.functions.world import whole_plan
from springtide.backends.functions.coordinator.measure import StepMeasurements
from springtide.core.events import FunctionsMeasured
from springtide.core.functions import Usage
from springtide.core.wire.functions import FunctionReport, StepTotals
from springtide.core.workload import WorkloadId


def report(num_steps: int, *, replica: int = 0, incarnation: int = 1, step: int = 0, **fields: float) -> FunctionReport:
    compute_s, batch = fields.get("compute_s", 0.5), int(fields.get("batch", 64))
    return FunctionReport(
        stage=0,
        replica=replica,
        incarnation=incarnation,
        generation=1,
        attempt=1,
        phase="training",
        step=step or num_steps + 1,
        usage=Usage(num_puts=10 + 4 * (step or num_steps + 1)),
        totals=StepTotals(
            global_batch_size=batch,
            gradient_bytes=1000,
            num_steps=num_steps,
            step_s=2.0 * num_steps,
            step_sqr=5.0 * num_steps,
            compute_s=compute_s * num_steps,
            sync_s=0.3 * num_steps,
        ),
    )


@pytest.fixture
def measuring() -> StepMeasurements:
    made = StepMeasurements(WorkloadId("j"))
    made.new_attempt(whole_plan(2))
    return made


def due(measuring: StepMeasurements) -> list[FunctionsMeasured]:
    return measuring.due(1, lambda seconds: 0.01 * seconds, lambda usage: 0.001 * usage.num_puts)


def test_it_is_told_after_three_steps_and_at_doubled_counts(measuring: StepMeasurements) -> None:
    told = []
    for num_steps in range(1, 26):
        measuring.observe(report(num_steps))
        told += [event.measurement.num_steps for event in due(measuring)]
    assert told == [3, 6, 12, 24]


def test_several_steps_between_two_reports_change_nothing(measuring: StepMeasurements) -> None:
    measuring.observe(report(1))
    assert due(measuring) == []
    measuring.observe(report(17))
    [event] = due(measuring)
    found = event.measurement
    assert (found.num_steps, found.step_s) == (17, 2.0)
    # Each square is 5 where the mean's is 4.
    assert found.deviation_s == pytest.approx((17 / 16) ** 0.5)
    assert (found.compute_s, found.sync_s) == (pytest.approx(0.5), pytest.approx(0.3))
    # Two seconds of the plan, and four puts of each of the two functions.
    assert found.usd == pytest.approx(0.02 + 2 * 4 * 0.001)


def test_a_function_that_ends_before_its_first_report_is_measured_by_the_last_one(measuring: StepMeasurements) -> None:
    measuring.observe(replace(report(299), phase="finished"))
    [event] = due(measuring)
    assert (event.measurement.num_steps, event.measurement.step_s) == (299, 2.0)


def test_what_ending_asks_for_is_no_part_of_a_step(measuring: StepMeasurements) -> None:
    for num_steps in (5, 15):
        measuring.observe(report(num_steps))
    measuring.observe(replace(report(15), phase="finished", usage=Usage(num_puts=1000)))
    [event] = due(measuring)
    assert event.measurement.usd == pytest.approx(0.02 + 2 * 4 * 0.001)


def test_the_slowest_says_what_is_computed_and_the_longest_view_what_a_step_takes(measuring: StepMeasurements) -> None:
    measuring.observe(report(10))
    measuring.observe(report(4, replica=1, compute_s=1.5))
    [event] = due(measuring)
    assert (event.measurement.num_steps, event.measurement.compute_s) == (10, pytest.approx(1.5))


def test_attempts_and_successors_add_up(measuring: StepMeasurements) -> None:
    measuring.observe(report(2))
    measuring.new_attempt(whole_plan(2))
    measuring.observe(report(2))
    measuring.observe(report(1, incarnation=2, step=9))
    [event] = due(measuring)
    assert event.measurement.num_steps == 5


def test_another_batch_ends_the_one_before_with_what_is_known(measuring: StepMeasurements) -> None:
    measuring.observe(report(3))
    due(measuring)
    measuring.observe(report(5))
    measuring.observe(report(1, step=8, batch=128))
    [event] = due(measuring)
    assert (event.measurement.global_batch_size, event.measurement.num_steps) == (64, 5)
    measuring.observe(report(3, step=10, batch=128))
    [event] = due(measuring)
    assert (event.measurement.global_batch_size, event.measurement.num_steps) == (128, 3)


def test_a_plan_that_comes_back_goes_on_being_measured(measuring: StepMeasurements) -> None:
    measuring.observe(report(4))
    due(measuring)
    measuring.new_attempt(whole_plan(3))
    measuring.observe(report(3))
    [event] = due(measuring)
    assert event.measurement.plan == whole_plan(3)
    measuring.new_attempt(whole_plan(2))
    measuring.observe(report(4))
    [event] = due(measuring)
    assert (event.measurement.plan, event.measurement.num_steps) == (whole_plan(2), 8)
