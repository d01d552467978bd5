from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads.drawing import check_complete, draw_missing
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
