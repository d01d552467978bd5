"""Traces after the recipe of ElasticFlow's artifact can run, can be written, and have its shape."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.workloads.drawing import check_complete
from springtide.workloads.formats import elasticflow
from springtide.workloads.profiles import Profiles
from springtide.workloads.trace import Trace, TraceJob, make_trace
from springtide_studies.workloads.artifact_traces import generate_jobs, write_trace

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
    write_trace(trace, path)
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


MOMENTS = st.floats(min_value=0, max_value=1e9)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    jobs = []
    for number in range(draw(st.integers(1, 6))):
        submit_s, is_best_effort = draw(MOMENTS), draw(st.booleans())
        job = TraceJob(
            job_id=f"job-{number}",
            submit_s=submit_s,
            num_steps=draw(st.integers(1, 2**53)),
            model=draw(st.sampled_from(["bert", "gpt2", "modèle"])),
            global_batch_size=draw(st.integers(1, 10**6)),
            num_devices=draw(st.integers(1, 10**5)),
            duration_s=draw(MOMENTS),
            deadline_s=None if is_best_effort else submit_s + draw(MOMENTS),
            is_best_effort=is_best_effort,
        )
        jobs.append(job)
    return make_trace("trace", jobs, format="elasticflow")


@given(trace=traces())
def test_what_is_written_is_read_again(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("written") / "trace.csv"
    write_trace(trace, path)
    found = elasticflow.read(path)
    assert found.jobs == trace.jobs
    assert found.name == trace.name


@pytest.mark.parametrize(
    "changes",
    [{"model": ""}, {"model": "a,b"}, {"num_steps": 0}, {"duration_s": None}, {"is_best_effort": False}],
)
def test_what_the_format_cannot_say_is_not_written(tmp_path: Path, changes: dict[str, object]) -> None:
    known = {"model": "bert", "num_steps": 1, "global_batch_size": 1, "duration_s": 1.0, "is_best_effort": True}
    job = TraceJob(job_id="a", submit_s=0.0, **{**known, **changes})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="job a cannot be written"):
        write_trace(make_trace("t", [job]), tmp_path / "t.csv")
