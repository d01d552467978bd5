from __future__ import annotations

import re
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads import trace_builder
from springtide.workloads.formats import elasticflow
from springtide.workloads.trace import TraceJob

SAMPLES = Path(__file__).parents[1] / "samples"
HEADER = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration,best_effort"
GOOD = "0,10,100,bert,500,64,4,400,0"


def test_times_and_deadlines_stay_absolute() -> None:
    trace = elasticflow.read(SAMPLES / "elasticflow_cluster.csv")
    assert trace.name == "elasticflow_cluster"
    assert trace.format == "elasticflow"
    assert trace.skipped == {}
    assert trace.drawn == ()
    assert trace.jobs[1] == TraceJob(
        job_id="23b8c1e9-3924-56de-3eb1-3b9046685257",
        submit_s=3717550.0,
        num_steps=48266,
        model="bert",
        global_batch_size=128,
        num_devices=8,
        duration_s=3604.0,
        deadline_s=3720405.0,
    )


def test_iteration_and_duration_count_not_what_the_log_says() -> None:
    job = elasticflow.read(SAMPLES / "elasticflow_philly.csv").jobs[0]
    assert (job.num_steps, job.duration_s) == (1282878, 976571.0)


def test_a_best_effort_job_has_no_deadline() -> None:
    jobs = elasticflow.read(SAMPLES / "elasticflow.csv").jobs
    assert [job.is_best_effort for job in jobs] == [False, False, True]
    assert jobs[2].deadline_s is None
    assert jobs[0].deadline_s == 4426.0


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("1,nan,100,bert,500,64,4,400,0", "column submit_time: 'nan' must be a finite number"),
        ("1,-3,100,bert,500,64,4,400,0", "column submit_time: '-3' must be a finite number"),
        ("1,10,1.5,bert,500,64,4,400,0", "column iteration: '1.5' must be a whole number"),
        ("1,10,0,bert,500,64,4,400,0", "column iteration: '0' must be a finite number from 1"),
        ("1,10,100,,500,64,4,400,0", "column model_name: it is empty"),
        ("1,10,100,bert,9,64,4,400,0", "column ddl: the deadline 9 lies before the submission at 10"),
        ("1,10,100,bert,,64,4,400,0", "column ddl: it is empty; a number belongs here"),
        ("1,10,100,bert,500,x,4,400,0", "column batch_size: 'x' is not a number"),
        ("1,10,100,bert,500,64,0,400,0", "column num_gpu: '0' must be"),
        ("1,10,100,bert,500,64,4,-1,0", "column duration: '-1' must be"),
        ("1,10,100,bert,500,64,4,400,2", "column best_effort: '2' must be 0 or 1"),
        ("0,10,100,bert,500,64,4,400,0", "column job_id: '0' is already the job of line 2"),
        ("a b,10,100,bert,500,64,4,400,0", "column job_id: the id 'a b' is not allowed"),
    ],
)
def test_bad_rows_are_refused_with_line_and_column(tmp_path: Path, row: str, sentence: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"{HEADER}\n{GOOD}\n{row}\n")
    with pytest.raises(InvalidRequest, match=re.escape(f"bad.csv line 3, {sentence}")):
        elasticflow.read(path)


def test_a_missing_column_is_named_in_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(HEADER.replace("ddl", "d") + f"\n{GOOD}\n")
    with pytest.raises(InvalidRequest, match=r"bad.csv line 1: no column 'ddl' or 'deadline'"):
        elasticflow.read(path)


def test_a_trace_of_too_many_jobs_asks_for_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_builder, "MAX_JOBS", 3)
    path = tmp_path / "long.csv"
    path.write_text(HEADER + "".join(f"\n{number}{GOOD[1:]}" for number in range(5)))
    with pytest.raises(InvalidRequest, match=r"long.csv line 5: more than 3 jobs; .*--jobs N"):
        elasticflow.read(path)
    assert len(elasticflow.read(path, 3).jobs) == 3
