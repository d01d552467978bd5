"""The time of decisions: the crowd stays as large as asked, the echo of a decision counts, the report has its shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.decision.bench import BOUND_MS, DEVICES_PER_JOB, markdown, measure, run_bench
from springtide_studies.decision.crowd import draw_jobs


def ticking() -> Callable[[], float]:
    """A timer on which everything between two looks takes a millisecond."""
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-3


def test_jobs_are_drawn_from_the_seed_and_are_mostly_small() -> None:
    drawn = [list(itertools.islice(draw_jobs(np.random.default_rng(3)), 400)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    jobs = [job for job, _ in drawn[0]]
    assert sum((job.requested_workers or 0) <= 8 for job in jobs) > 0.9 * len(jobs)
    assert 0.05 < sum(job.goal.deadline_s is None for job in jobs) / len(jobs) < 0.15
    for job, length_s in drawn[0]:
        rate = job.profile_steps_per_s[job.requested_workers or 0]
        assert (job.total_steps or 0) / rate == pytest.approx(length_s, rel=0.5)


def test_as_many_jobs_live_as_the_size_asks_for() -> None:
    found = measure("fifo", 64, seed=0, timer=ticking(), num_events=40)
    assert found.num_jobs_mean == pytest.approx(64 / DEVICES_PER_JOB, abs=1.5)
    assert found.num_instants >= 20


def test_an_instant_adds_up_all_its_decisions() -> None:
    found = measure("fifo", 64, seed=0, timer=ticking(), num_events=40)
    # Each decision takes one tick here, and an arrival that starts is decided on more than once.
    assert found.p50_ms >= 1.0
    assert found.max_ms >= 2.0
    assert found.turn_p99_ms > found.p99_ms


def test_report_has_the_form_of_every_bench() -> None:
    told: list[str] = []
    report = run_bench(["fifo", "edf"], sizes=[64, 128], timer=ticking(), num_events=20, tell=told.append)
    assert [row["baseline_name"] for row in report["rows"]] == ["edf p99", "edf p99"]
    for row in report["rows"]:
        assert set(row) == {"case", "ours", "baseline", "baseline_name", "ratio", "bound", "unit"}
        assert row["ratio"] == row["ours"] / row["baseline"]
    assert len(told) == len(report["table"]) == 4
    assert not report["passed"], "the size that the aim is about was not measured"
    assert str(BOUND_MS)[:3] in report["criterion"]
    assert len(markdown(report).splitlines()) == 2 + 4


def test_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidRequest):
        run_bench(["fifo", "nonsense"], sizes=[64], timer=ticking())
