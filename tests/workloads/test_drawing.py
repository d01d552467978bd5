from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.workloads.drawing import check_complete, draw_missing, generate_jobs
from springtide.workloads.formats import elasticflow
from springtide.workloads.profiles import Profiles, rate_at
from springtide.workloads.trace import TraceJob, make_trace

TABLES = Profiles(
    name="tables",
    tables={
        "large": {128: {4: 2.0, 8: 3.0, 64: 9.0}},
        "small": {32: {1: 5.0, 2: 8.0, 4: 9.0}, 64: {1: 3.0, 2: 5.0, 4: 8.0, 8: 10.0, 16: 11.0}},
    },
)


def bare_jobs(count: int, num_devices: int = 2) -> list[TraceJob]:
    return [
        TraceJob(job_id=f"j{number}", submit_s=10.0 * number, num_devices=num_devices, duration_s=100.0)
        for number in range(count)
    ]


def test_length_follows_from_duration_and_rate_and_deadline_from_the_factor() -> None:
    trace = draw_missing(make_trace("t", bare_jobs(400)), TABLES, seed=1)
    for job in trace.jobs:
        assert job.num_steps == round(100.0 * TABLES.steps_per_s(*job.pair)[2])
        assert job.deadline_s is not None
        assert 50.0 <= job.deadline_s - job.submit_s <= 150.0
    factors = [(job.deadline_s - job.submit_s) / 100.0 for job in trace.jobs if job.deadline_s is not None]
    assert np.mean(factors) == pytest.approx(1.0, abs=0.05)
    # Two devices are fewer than "large" was measured on; the other two pairs come about equally often.
    counts = Counter(job.pair for job in trace.jobs)
    assert set(counts) == {("small", 32), ("small", 64)}
    assert min(counts.values()) > 150


def test_a_job_larger_than_every_table_runs_at_the_most_measured() -> None:
    trace = draw_missing(make_trace("t", bare_jobs(50, num_devices=128)), TABLES, seed=1)
    assert {job.pair for job in trace.jobs} == set(TABLES.pairs)
    for job in trace.jobs:
        assert job.num_steps == round(100.0 * rate_at(TABLES.steps_per_s(*job.pair), 128))


def test_a_longer_trace_begins_as_a_shorter_one() -> None:
    short, long = (draw_missing(make_trace("t", bare_jobs(count)), TABLES, seed=3).jobs for count in (20, 60))
    assert long[:20] == short


def test_what_the_trace_tells_stays() -> None:
    jobs = [
        TraceJob(job_id="a", submit_s=0.0, model="small", global_batch_size=64, num_steps=50, num_devices=2),
        TraceJob(job_id="b", submit_s=1.0, model="small", global_batch_size=32, duration_s=10.0),
        TraceJob(job_id="c", submit_s=2.0, duration_s=5.0, deadline_s=99.0),
        TraceJob(job_id="d", submit_s=3.0, duration_s=5.0, is_best_effort=True),
        TraceJob(job_id="e", submit_s=4.0),
        TraceJob(job_id="f", submit_s=5.0, num_steps=10, global_batch_size=4, samples_per_s_1=2.0, parallel_fraction=1),
    ]
    trace = draw_missing(make_trace("t", jobs), TABLES, seed=0, deadline_factor=(2.0, 2.0))
    a, b, c, d, f = trace.jobs
    assert (a.num_steps, a.duration_s, a.deadline_s) == (50, 10.0, 20.0)
    assert (b.num_steps, b.deadline_s) == (50, 21.0)
    assert c.deadline_s == 99.0
    assert d.is_best_effort
    assert d.deadline_s is None
    assert (f.model, f.duration_s, f.deadline_s) == ("", 20.0, 45.0)
    assert trace.skipped == {"runs for an unknown time": 1}
    assert "U[2, 2] (seed 0)" in trace.drawn[-1]


def test_nothing_is_said_to_be_drawn_where_nothing_was() -> None:
    job = TraceJob(
        job_id="a", submit_s=0.0, model="small", global_batch_size=64, num_steps=9, duration_s=3.0, is_best_effort=True
    )
    trace = make_trace("t", [job])
    assert draw_missing(trace, TABLES, seed=0) == trace
    assert check_complete(trace) is trace


def test_what_cannot_be_drawn_is_refused() -> None:
    unknown = TraceJob(job_id="a", submit_s=0.0, model="gpt2", global_batch_size=64, num_steps=5)
    with pytest.raises(InvalidRequest, match="tables has no model 'gpt2'"):
        draw_missing(make_trace("t", [unknown]), TABLES, seed=0)
    with pytest.raises(InvalidRequest, match="no job says how long it runs"):
        draw_missing(make_trace("t", [TraceJob(job_id="a", submit_s=0.0)]), TABLES, seed=0)
    for factor in ((1.5, 0.5), (-1.0, 1.0), (0.5, float("nan")), (0.5, float("inf"))):
        with pytest.raises(InvalidRequest, match="deadline factors"):
            draw_missing(make_trace("t", bare_jobs(1)), TABLES, seed=0, deadline_factor=factor)
    with pytest.raises(InvalidRequest, match="seed -1"):
        draw_missing(make_trace("t", bare_jobs(1)), TABLES, seed=-1)
    with pytest.raises(InvalidRequest, match=r"job j0 has no model; .*--draw"):
        check_complete(make_trace("t", bare_jobs(1)))
    with pytest.raises(InvalidRequest, match="job a has no length"):
        check_complete(make_trace("t", [TraceJob(job_id="a", submit_s=0, model="small", global_batch_size=64)]))


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
