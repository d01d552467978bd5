"""Losses and states put together from reports: each step once, whatever is told late, twice or never."""

from __future__ import annotations

import msgspec
import pytest

from springtide.backends.functions.coordinator.progress import FunctionProgress
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import FunctionReport
from springtide.core.workload import WorkloadId

PLAN = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=1, memory_mb=512),), num_replicas=2)


def report(
    replica: int, *losses: tuple[int, float | None, int], saved: int | None = None, stage: int = 0, step: int = 0
) -> FunctionReport:
    return FunctionReport(
        stage=stage,
        replica=replica,
        incarnation=1,
        generation=1,
        attempt=1,
        phase="training",
        total_steps=10,
        losses=losses,
        step=step or saved or max([0, *(one for one, _, _ in losses)]),
        saved_step=saved,
    )


@pytest.fixture
def progress() -> FunctionProgress:
    return FunctionProgress(WorkloadId("j"))


def test_a_step_s_loss_is_the_mean_over_its_samples(progress: FunctionProgress) -> None:
    progress.observe_losses(report(0, (1, 1.0, 3)), PLAN)
    progress.commit(1)
    assert progress.losses == []
    progress.observe_losses(report(1, (1, 5.0, 1)), PLAN)
    progress.commit(1)
    assert progress.losses == [(1, 2.0, 4)]
    # Told again, it is not taken again.
    progress.observe_losses(report(1, (1, 5.0, 1)), PLAN)
    progress.commit(1)
    assert progress.losses == [(1, 2.0, 4)]


def test_what_one_never_told_holds_nobody_up(progress: FunctionProgress) -> None:
    progress.observe_losses(report(0, (1, 1.0, 2), (2, 1.0, 2), (3, 1.0, 2)), PLAN)
    # The other replica was replaced after the second step.
    progress.observe_losses(report(1, (3, 3.0, 2)), PLAN)
    progress.commit(3)
    assert progress.losses == [(1, 1.0, 2), (2, 1.0, 2), (3, 2.0, 4)]


def test_what_is_not_committed_by_all_is_not_told(progress: FunctionProgress) -> None:
    for replica in (0, 1):
        progress.observe_losses(report(replica, (1, 1.0, 2), (2, 1.0, 2)), PLAN)
    progress.commit(1)
    assert [step for step, _, _ in progress.losses] == [1]


def test_steps_that_are_redone_are_told_anew(progress: FunctionProgress) -> None:
    for replica in (0, 1):
        progress.observe_losses(report(replica, (1, 1.0, 2), (2, 9.0, 2)), PLAN)
    progress.commit(1)
    progress.new_attempt(1)
    for replica in (0, 1):
        progress.observe_losses(report(replica, (2, 4.0, 2)), PLAN)
    progress.commit(2)
    assert progress.losses == [(1, 1.0, 4), (2, 4.0, 4)]


def test_after_the_last_step_nobody_is_waited_for(progress: FunctionProgress) -> None:
    progress.observe_losses(report(0, (1, 1.0, 2)), PLAN)
    progress.commit(1, is_last=True)
    assert progress.losses == [(1, 1.0, 2)]


def test_a_state_is_whole_when_every_stage_has_passed_its_step(progress: FunctionProgress) -> None:
    progress.observe(report(0, saved=8), PLAN)
    assert progress.complete_state(2, 4) == 0
    progress.observe(report(0, saved=6, stage=1), PLAN)
    # The other stage saved step 4, too, but nobody saved both 6 and 8.
    assert progress.complete_state(2, 4) == 4
    progress.observe(report(0, saved=8, stage=1), PLAN)
    assert progress.complete_state(2, 4) == 8


def test_progress_is_told_once(progress: FunctionProgress) -> None:
    progress.observe(report(0), PLAN)
    progress.commit(3)
    event = progress.event(1, PLAN, 0.5)
    assert event is not None
    assert (event.step, event.total_steps, event.world_size) == (3, 10, 2)
    assert progress.event(1, PLAN, 0.5) is None


def test_an_older_report_that_is_read_later_takes_no_sample_back(progress: FunctionProgress) -> None:
    older, newer = (msgspec.structs.replace(report(0, step=step), ids_digest=f"to {step}") for step in (4, 5))
    progress.observe(newer, PLAN)
    progress.observe(older, PLAN)
    assert progress.ids_digest == "to 5"
    progress.new_attempt(4)
    progress.observe(older, PLAN)
    assert progress.ids_digest == "to 4"


def test_what_was_saved_of_later_steps_before_they_are_redone_is_no_state(progress: FunctionProgress) -> None:
    progress.new_attempt(3)
    progress.observe(report(0, saved=5, step=3), PLAN)
    assert progress.complete_state(1, 1) == 0
    progress.observe(report(0, saved=4, step=4), PLAN)
    assert progress.complete_state(1, 1) == 4


def test_a_loss_that_is_no_number_is_told_as_such(progress: FunctionProgress) -> None:
    # A function of an earlier version sends the largest number instead of nothing.
    for replica, loss in ((0, None), (1, 1e300)):
        progress.observe_losses(report(replica, (1, 1.0, 2), (2, loss, 2), (3, 1.0, 2)), PLAN)
    progress.commit(2)
    event = progress.event(1, PLAN, 0.5)
    assert event is not None
    assert (event.step, event.loss, event.is_diverged, event.diverged_at_step) == (2, None, True, 2)
    progress.commit(3)
    event = progress.event(1, PLAN, 0.5)
    assert event is not None
    assert (event.step, event.loss, event.is_diverged, event.diverged_at_step) == (3, 1.0, False, 2)
