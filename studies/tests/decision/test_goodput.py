"""Decisions about jobs whose batch policies choose: the crowd, and that the aims are rows with bounds."""

from __future__ import annotations

import itertools

from springtide_studies.decision.bench import run_bench
from springtide_studies.decision.goodput import AIMS, GoodputCrowd, is_goodput_policy, rows_of


def test_the_crowd_is_of_adaptive_profiled_jobs_and_the_same_again():
    crowd, again = GoodputCrowd(128, 3), GoodputCrowd(128, 3)
    first = crowd.warm()
    assert len(first) == 16
    assert [job for _, job in first] == [job for _, job in again.warm()]
    assert all(job.batch is not None and job.step_profile is not None for _, job in first)
    assert crowd.next(5.0).job_id == "job-000016"


def test_who_chooses_batches_is_measured_with_such_jobs():
    assert is_goodput_policy("fapes:round_s=60")
    assert not is_goodput_policy("springtide")


def test_aims_are_rows_with_their_bounds():
    figures = {"num_jobs_mean": 16.0, "p90_ms": 12.0, "p99_ms": 20.0}
    rows = rows_of("fapes", {128: figures, 512: figures, 8192: figures})
    assert [row["bound"] for row in rows] == [50.0, None, 1000.0]
    assert [row["ours"] for row in rows] == [12.0, 20.0, 20.0]
    assert {size for size, _, _ in AIMS} == {128, 8192}


def test_a_run_on_a_small_cluster_reports_growth():
    ticks = itertools.count()
    report = run_bench(("fapes",), sizes=(16,), num_events=6, timer=lambda: next(ticks) * 1e-3)
    (row,) = report["rows"]
    assert row["case"].startswith("16 devices")
    assert row["ours"] > 0.0
    assert report["table"][0]["p90_ms"] <= report["table"][0]["p99_ms"]
