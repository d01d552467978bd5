"""How reports of a job's speed are merged: reports of the same seconds count once, and what lasts prevails."""

from __future__ import annotations

import itertools

import pytest

from springtide.control.learnt import MOMENT_S
from springtide.core import events


def report(stage, at_s, samples_per_s, *, generation=1, world_size=2):
    stage.tell(
        events.ProgressReported(
            job_id="a",
            generation=generation,
            step=stage.job("a").progress.step + 1,
            total_steps=1_000_000,
            world_size=world_size,
            samples_per_s=samples_per_s,
        ),
        at_s=at_s,
    )
    return stage.job("a").learnt.throughput_samples_per_s[world_size]


def test_many_reports_of_one_moment_count_once(stage):
    stage.running("a", "01")
    for number in range(5):
        assert report(stage, 10.0 + 5.0 * number, 100.0) == pytest.approx(100.0)
    # Four times a second a worker tells how fast its last seconds were: a busy moment is in all of these.
    for number in range(int(MOMENT_S / 0.25)):
        speed = report(stage, 40.0 + 0.25 * number, 20.0)
    assert speed == pytest.approx(0.7 * 100.0 + 0.3 * 20.0)
    # Nor does one good moment make up for it at once.
    assert report(stage, 44.0, 100.0) == pytest.approx(0.7 * 76.0 + 0.3 * 100.0)


def test_of_the_first_moment_the_newest_report_counts(stage):
    stage.running("a", "01")
    assert report(stage, 10.0, 20.0) == 20.0
    assert report(stage, 12.0, 90.0) == 90.0
    assert report(stage, 14.0, 100.0) == pytest.approx(93.0)


def test_what_lasts_prevails(stage):
    stage.running("a", "01")
    speeds = [report(stage, 10.0 + 5.0 * number, 100.0 if number < 4 else 50.0) for number in range(14)]
    assert speeds[3] == pytest.approx(100.0)
    assert all(later < sooner for sooner, later in itertools.pairwise(speeds[3:]))
    assert speeds[-1] == pytest.approx(50.0, rel=0.05)


def test_another_group_is_another_moment(stage):
    stage.running("a", "01")
    assert report(stage, 10.0, 100.0) == 100.0
    stage.want(a="0")
    stage.tell(at_s=10.5)
    stage.resized("a", direction="shrink", step=5)
    assert report(stage, 11.0, 60.0, generation=2, world_size=1) == 60.0
    # What was known of two workers stays as it is while there is one.
    assert stage.job("a").learnt.throughput_samples_per_s == {1: 60.0, 2: 100.0}
