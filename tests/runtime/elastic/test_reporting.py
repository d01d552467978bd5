"""What rank 0 says of its steps: progress and time, and noise where the batch may change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kits.runtime.training_jobs import ADAPTIVE, make_job, make_script
from springtide.core.wire.workers import Progress, Switched
from springtide.runtime.elastic import reporting
from springtide.runtime.elastic.reporting import Reporter
from springtide.runtime.elastic.training_cursor import LEAST_NOISE_STEPS, TrainingCursor


class Told:
    """The link of a worker that nobody listens to."""

    def __init__(self):
        self.reports = []

    def send(self, report):
        self.reports.append(report)
        return len(self.reports)

    def hold(self, report):
        pass

    def update(self, **standing):
        pass

    def newest(self):
        return [report for report in self.reports if isinstance(report, Progress)][-1]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now.s)
    return now


def train(clock, training_cursor, squares, num_steps, world_size=2, step_s=0.5, sync_s=0.1):
    told = Told()
    reporter = Reporter(told)
    formation = SimpleNamespace(
        generation=3, rank=0, world_size=world_size, order=SimpleNamespace(forced=False, previous=0)
    )
    reporter.group_changed(formation, None, 0)
    for _ in range(num_steps):
        reporter.step_begins()
        batch = training_cursor.next_batch()
        training_cursor.commit(batch, squares, training_cursor.last_square)
        clock.s += step_s
        reporter.step_ended(training_cursor, batch, 1.0, sync_s=sync_s)
    reporter.flush()
    assert any(isinstance(report, Switched) for report in told.reports)
    return told


def test_a_fixed_batch_reports_its_steps_and_their_time_and_no_noise(clock):
    training_cursor = TrainingCursor(make_job())
    training_cursor.start(160)
    report = train(clock, training_cursor, None, 5).newest()
    assert (report.step, report.total_steps) == (5, 20)
    assert report.samples_per_s == pytest.approx(32.0)
    assert (report.progress, report.total_progress, report.global_batch_size) == (5.0, 20.0, 16)
    assert report.step_s == pytest.approx(0.5)
    assert report.grad_sqr is report.grad_var is None


def test_steps_of_a_script_count_as_batches_of_the_size_that_its_job_has(clock):
    training_cursor = TrainingCursor(make_script(global_batch_size=64))
    training_cursor.set_epochs(4)
    training_cursor.take_batch_size(16)
    training_cursor.start(80)
    report = train(clock, training_cursor, None, 5).newest()
    assert (report.total_steps, report.progress, report.global_batch_size, report.local_batch_size) == (20, 5.0, 64, 32)
    assert report.samples_per_s == pytest.approx(64 / 0.5)
    assert report.step_s == pytest.approx(0.5)


def test_a_batch_that_may_change_reports_a_step_as_one_pass_over_a_workers_share(clock):
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE, num_epochs=9))
    training_cursor.start(1600)
    training_cursor.set_batch_size(40)
    report = train(clock, training_cursor, (4.0, 1.5), LEAST_NOISE_STEPS + 1).newest()
    assert (report.global_batch_size, report.local_batch_size, report.world_size) == (40, 20, 2)
    assert report.step_s == pytest.approx(0.5)
    assert report.sync_s == pytest.approx(0.1)
    assert report.progress == (LEAST_NOISE_STEPS + 1) * 40 / 16
    assert report.total_progress == 900.0
    assert report.grad_sqr is not None
    assert report.grad_var is not None


def test_a_short_last_batch_counts_in_proportion(clock):
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE, num_epochs=9))
    training_cursor.start(24)
    # Every other batch has half the samples; here it takes as long, so a full step is reckoned longer.
    report = train(clock, training_cursor, None, 5).newest()
    assert report.step_s == pytest.approx(0.5 * 4 / 3)


@pytest.mark.parametrize(("squares", "num_steps"), [((4.0, 1.5), LEAST_NOISE_STEPS), ((4.0, 0.9), 40)])
def test_noise_is_not_told_before_it_is_known_nor_where_no_signal_is_left(clock, squares, num_steps):
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE, num_epochs=9))
    training_cursor.start(1600)
    report = train(clock, training_cursor, squares, num_steps).newest()
    assert report.grad_sqr is report.grad_var is None
    assert report.step_s is not None


def test_steps_longer_than_the_window_have_a_speed_too(clock):
    training_cursor = TrainingCursor(make_job())
    training_cursor.start(160)
    newest = train(clock, training_cursor, (), 3, step_s=20.0).newest()
    assert newest.samples_per_s == pytest.approx(training_cursor.cursor.global_batch_size / 20.0)
    assert newest.step_s == pytest.approx(20.0)


def test_the_first_loss_that_is_no_number_is_told_at_once_and_remembered(clock):
    training_cursor = TrainingCursor(make_job())
    training_cursor.start(160)
    told, losses = Told(), [1.0, float("nan"), 1.0, float("inf"), 2.0]
    reporter = Reporter(told)
    order = SimpleNamespace(forced=False, previous=0)
    reporter.group_changed(SimpleNamespace(generation=3, rank=0, world_size=1, order=order), None, 0)
    for loss in losses:
        batch = training_cursor.next_batch()
        training_cursor.commit(batch, None, training_cursor.last_square)
        clock.s += 0.001
        reporter.step_ended(training_cursor, batch, loss, sync_s=0.0)
    reports = [report for report in told.reports if isinstance(report, Progress)]
    assert [(report.step, report.is_diverged, report.diverged_at_step) for report in reports[1:]] == [(2, True, 2)]
    reporter.flush()
    assert (told.newest().step, told.newest().is_diverged, told.newest().diverged_at_step) == (5, False, 2)
    assert reporter.diverged_at_step == 2


def test_a_long_evaluation_is_heard_of_once_a_second(clock):
    told, cursor = Told(), TrainingCursor(make_job())
    cursor.start(200)
    reporter = Reporter(told)
    reporter.still_at_work()
    order = SimpleNamespace(forced=False, previous=0)
    reporter.group_changed(SimpleNamespace(generation=3, rank=0, world_size=2, order=order), None, 0)
    batch = cursor.next_batch()
    cursor.commit(batch, None, 0.0)
    reporter.step_ended(cursor, batch, 1.0, sync_s=0.1)
    told.reports.clear()
    for _ in range(9):
        clock.s += 0.4
        reporter.still_at_work()
    assert [report.step for report in told.reports] == [1, 1, 1]
    # Another member says it from now on, as soon as the group has made a step.
    reporter.group_changed(SimpleNamespace(generation=4, rank=1, world_size=2, order=order), None, 1)
    clock.s += 2.0
    reporter.still_at_work()
    batch = cursor.next_batch()
    cursor.commit(batch, None, 0.0)
    reporter.step_ended(cursor, batch, 1.0, sync_s=0.1)
    clock.s += 2.0
    reporter.still_at_work()
    assert [type(report) for report in told.reports[3:]] == [Switched]
