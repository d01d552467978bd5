from __future__ import annotations

import math

import msgspec
import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads.trace import MAX_TIME_S, Trace, TraceJob, make_trace
from springtide_studies.fault_seeds.models import JobModel


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": ""},
        {"job_id": "../x"},
        {"submit_s": -1.0},
        {"submit_s": math.nan},
        {"submit_s": math.inf},
        {"submit_s": 2 * MAX_TIME_S},
        {"duration_s": -1.0},
        {"deadline_s": math.nan},
        {"deadline_s": 4.0},
        {"deadline_s": 9.0, "is_best_effort": True},
        {"num_steps": -1},
        {"global_batch_size": -1},
        {"num_devices": 0},
        {"min_workers": 3, "max_workers": 2},
        {"samples_per_s_1": 0.0},
        {"samples_per_s_1": math.nan},
        {"parallel_fraction": 1.1},
        {"parallel_fraction": math.nan},
    ],
)
def test_a_job_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        TraceJob(**{"job_id": "a", "submit_s": 5.0, **changes})  # type: ignore[arg-type]


def test_jobs_have_their_own_ids_and_an_order() -> None:
    first, second = TraceJob(job_id="a", submit_s=5.0), TraceJob(job_id="b", submit_s=4.0)
    with pytest.raises(InvalidRequest, match="out of order"):
        Trace(name="t", jobs=(first, second))
    with pytest.raises(InvalidRequest, match="two jobs are called 'a'"):
        Trace(name="t", jobs=(first, first))
    assert make_trace("t", [first, second]).jobs == (second, first)


def test_jobs_of_one_instant_keep_the_order_of_the_file() -> None:
    jobs = [TraceJob(job_id=name, submit_s=1.0) for name in ("c", "a", "b")]
    assert [job.job_id for job in make_trace("t", jobs).jobs] == ["c", "a", "b"]


def test_a_job_is_complete_when_length_and_speed_are_known() -> None:
    job = TraceJob(job_id="a", submit_s=0.0, num_steps=5, global_batch_size=64, model="bert")
    assert job.is_complete
    assert not msgspec.structs.replace(job, num_steps=0).is_complete
    assert not msgspec.structs.replace(job, model="").is_complete
    assert not msgspec.structs.replace(job, global_batch_size=0).is_complete
    own = msgspec.structs.replace(job, model="", samples_per_s_1=10.0, parallel_fraction=0.5)
    assert own.is_complete
    assert own.has_own_curve


def test_its_own_curve_is_that_of_the_models() -> None:
    job = TraceJob(job_id="a", submit_s=0.0, global_batch_size=64, samples_per_s_1=100.0, parallel_fraction=0.9)
    truth = JobModel(num_samples=1, samples_per_s=100.0, parallel_fraction=0.9, batch_size=64, num_epochs=1)
    for count in (1, 2, 3, 8):
        assert job.own_steps_per_s(count) == pytest.approx(1 / truth.step_s(count, 64))


def test_a_trace_names_its_pairs_once_and_survives_encoding() -> None:
    jobs = [
        TraceJob(job_id=str(number), submit_s=0.0, model=model, global_batch_size=size)
        for number, (model, size) in enumerate([("b", 64), ("a", 128), ("b", 64), ("", 0)])
    ]
    trace = make_trace("t", jobs, skipped={"why": 2})
    assert trace.pairs == (("a", 128), ("b", 64))
    assert msgspec.json.decode(msgspec.json.encode(trace), type=Trace) == trace
