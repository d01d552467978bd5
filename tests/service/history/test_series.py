"""A job's training over time: thinned out when long, from the journal alone when the platform comes up."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kits.job_parts import with_fields
from kits.service.platform_double import View
from springtide.control.records import JobRecord, Lifecycle, StateReason
from springtide.core.decision import PlannedRun
from springtide.core.events import JobFinished, JobSubmitted, ProgressReported
from springtide.core.job_parts import JobBounds, JobProgress, LearntSpeed
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import AdaptiveBatch, Entrypoint, JobState, TrainingJob
from springtide.service.history.series import LEAST_GAP_S, MAX_METRICS, MAX_POINTS, SeriesIndex, planned_of

JOB = TrainingJob(
    job_id="fit-1",
    name="fit",
    entrypoint=Entrypoint(source_path="/fit.py", object_name="fit"),
    global_batch_size=10,
    batch=AdaptiveBatch(min_size=10, max_size=80),
)
EMPTY = View(0, 0.0, {}, {}, (make_node("local", 2),), "p")


def progress(step, **known):
    given = {"generation": 1, "total_steps": 1000, "world_size": 1, "samples_per_s": 100.0, **known}
    return ProgressReported(job_id="fit-1", step=step, **given)


def fed(*moments, view=EMPTY):
    index = SeriesIndex()
    index.add(1, Step(now_s=0.0, events=(JobSubmitted(job=JOB),), actions=()), view)
    for seq, (now_s, event) in enumerate(moments, start=2):
        index.add(seq, Step(now_s=now_s, events=(event,), actions=()), view)
    return index.series("fit-1", 99.0).points


def test_a_point_tells_progress_batch_goodput_and_noise():
    report = progress(
        50, progress=80.0, total_progress=100.0, global_batch_size=40, local_batch_size=40, grad_sqr=1.0, grad_var=3.0
    )
    (point,) = fed((5.0, report))
    assert (point.at_s, point.progress_fraction, point.global_batch_size, point.noise_scale) == (5.0, 0.8, 40, 30.0)
    assert point.goodput_samples_per_s == pytest.approx(100.0 * 4 / 7)
    assert point.predicted_finish_at_s is None


def test_a_point_has_the_first_metrics_by_name():
    many = {f"m{number:02}": float(number) for number in range(MAX_METRICS + 3)}
    (point,) = fed((5.0, progress(50, metrics=many)))
    assert point.metrics == {f"m{number:02}": float(number) for number in range(MAX_METRICS)}


def test_reports_close_together_are_one_point_but_a_change_is_told_at_once():
    points = fed(
        (1.0, progress(1)),
        (1.0 + LEAST_GAP_S / 2, progress(2)),
        (1.1 + LEAST_GAP_S / 2, progress(3, global_batch_size=20)),
        (1.2 + LEAST_GAP_S / 2, progress(4, global_batch_size=20, world_size=2)),
    )
    assert [point.step for point in points] == [1, 3, 4]


def test_a_long_job_keeps_its_first_and_last_point_and_no_more_than_so_many():
    points = fed(*((float(step), progress(step)) for step in range(1, 5000)))
    assert len(points) <= MAX_POINTS
    assert points[0].step == 1
    assert points[-1].step > 4950
    gaps = {round(later.at_s - point.at_s) for point, later in pairwise(points)}
    assert max(gaps) <= 32


def test_a_finished_job_ends_at_all_of_it():
    points = fed((1.0, progress(990)), (2.0, JobFinished(job_id="fit-1", generation=1, step=1000, artifact_path="")))
    assert [point.progress_fraction for point in points] == [0.99, 1.0]


def test_a_step_that_was_taken_in_changes_nothing_and_a_job_nobody_knows_has_no_points():
    index = SeriesIndex()
    index.add(2, Step(now_s=0.0, events=(JobSubmitted(job=JOB),), actions=()), EMPTY)
    index.add(2, Step(now_s=0.0, events=(progress(1),), actions=()), EMPTY)
    assert index.series("fit-1", 9.0).points == ()
    assert index.series("other-1", 9.0).points == ()


def planning_view(**known):
    plain = JobRecord(
        job=JOB,
        bounds=JobBounds(min_workers=1, max_workers=2),
        lifecycle=Lifecycle(state=JobState.RUNNING, reason=StateReason(""), submitted_at_s=0.0),
        learnt=LearntSpeed(throughput_samples_per_s={1: 100.0}),
        progress=JobProgress(total_steps=1000),
    )
    record = with_fields(plain, **known)
    runs = (
        PlannedRun(start_s=1.0, end_s=3.0, num_devices=1),
        PlannedRun(start_s=3.0, end_s=9.0, num_devices=0),
        PlannedRun(start_s=9.0, end_s=12.0, num_devices=2),
    )
    return replace_view(EMPTY, {"fit-1": record}, {"fit-1": runs})


def replace_view(view, jobs, future):
    return View(view.seq, view.now_s, jobs, {}, view.nodes, view.policy, future)


def test_what_is_planned_is_told_from_now_on_and_is_the_prediction_of_its_moment():
    view = planning_view()
    planned = planned_of(view, 2.0)
    told = [(stretch.num_devices, stretch.start_s, stretch.end_s) for stretch in planned]
    assert told == [(1, 2.0, 3.0), (2, 9.0, 12.0)]
    (point,) = fed((5.0, progress(50)), view=view)
    assert point.predicted_finish_at_s == 12.0
    ended = replace_view(view, {"fit-1": with_fields(view.jobs["fit-1"], state=JobState.SUCCEEDED)}, view.future)
    assert planned_of(ended, 2.0) == ()


def test_without_a_plan_the_present_speed_is_the_prediction():
    view = planning_view(step=500, samples_per_s=100.0)
    view = replace_view(view, view.jobs, {})
    (point,) = fed((5.0, progress(500)), view=view)
    assert point.predicted_finish_at_s == 5.0 + 500 * 10 / 100.0
