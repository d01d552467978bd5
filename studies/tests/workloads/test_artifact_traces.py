"""Traces after the recipe of ElasticFlow's artifact can run, can be written, and have its shape."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.workloads.drawing import check_complete
from springtide.workloads.formats import elasticflow
from springtide.workloads.profiles import Profiles
from springtide_studies.workloads.artifact_traces import generate_jobs

TABLES = Profiles(
    name="tables",
    tables={
        "large": {128: {4: 2.0, 8: 3.0, 64: 9.0}},
        "small": {32: {1: 5.0, 2: 8.0, 4: 9.0}, 64: {1: 3.0, 2: 5.0, 4: 8.0, 8: 10.0, 16: 11.0}},
    },
)


@settings(max_examples=40)
@given(
    num_jobs=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    fraction=st.floats(0, 1),
    low=st.floats(0, 2),
    width=st.floats(0, 2),
    most=st.integers(1, 20),
)
def test_every_recipe_gives_a_trace_that_can_run_and_be_written(
    num_jobs: int,
    seed: int,
    fraction: float,
    low: float,
    width: float,
    most: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    factor = (low, low + width)
    trace = generate_jobs(
        num_jobs, TABLES, seed, deadline_factor=factor, best_effort_fraction=fraction, max_devices=most
    )
    assert len(check_complete(trace).jobs) == num_jobs
    assert trace.jobs[0].submit_s == 0.0
    for job in trace.jobs:
        assert job.num_devices <= most
        assert job.is_best_effort == (job.deadline_s is None)
        assert job.duration_s is not None
        assert 600.0 <= job.duration_s <= 600_000.0
        if job.deadline_s is not None:
            assert low - 1e-6 <= (job.deadline_s - job.submit_s) / job.duration_s <= low + width + 1e-6
    path = tmp_path_factory.mktemp("drawn") / "trace.csv"
    elasticflow.write(trace, path)
    assert elasticflow.read(path).jobs == trace.jobs


def test_the_recipe_has_the_shape_of_the_artifacts() -> None:
    trace = generate_jobs(4_000, TABLES, seed=0, mean_gap_s=900.0, best_effort_fraction=0.3)
    assert trace.jobs[-1].submit_s / 3_999 == pytest.approx(900.0, rel=0.06)
    shares = Counter(job.num_devices for job in trace.jobs)
    for count, share in {1: 0.83, 2: 0.03, 4: 0.03, 8: 0.10, 16: 0.01}.items():
        assert shares[count] / 4_000 == pytest.approx(share, abs=0.02)
    durations_s = np.array([job.duration_s for job in trace.jobs])
    middle_s = 60.0 * 10.0**2.5
    assert (durations_s < middle_s).mean() == pytest.approx(0.8, abs=0.03)
    assert np.median(np.log10(durations_s[durations_s < middle_s] / 60.0)) == pytest.approx(1.75, abs=0.06)
    assert np.mean([job.is_best_effort for job in trace.jobs]) == pytest.approx(0.3, abs=0.03)


def test_more_jobs_or_other_fractions_leave_the_other_draws_alone() -> None:
    short, long = (generate_jobs(count, TABLES, 5) for count in (10, 30))
    assert long.jobs[:10] == short.jobs
    other = generate_jobs(10, TABLES, 5, best_effort_fraction=1.0)
    assert [(job.submit_s, job.pair, job.num_steps) for job in other.jobs] == [
        (job.submit_s, job.pair, job.num_steps) for job in short.jobs
    ]
    assert generate_jobs(10, TABLES, 6).jobs != short.jobs


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_jobs": 0},
        {"num_jobs": 1_000_001},
        {"mean_gap_s": -1.0},
        {"mean_gap_s": float("nan")},
        {"best_effort_fraction": 1.5},
        {"max_devices": 0},
        {"deadline_factor": (2.0, 1.0)},
        {"seed": -1},
    ],
)
def test_a_recipe_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        generate_jobs(**{"num_jobs": 5, "profiles": TABLES, "seed": 0, **wrong})  # type: ignore[arg-type]
