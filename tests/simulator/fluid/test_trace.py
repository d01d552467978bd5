"""Traces as jobs of the platform: the clock starts at the first, bounds fit the cluster, bad ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.simulator.fluid.trace import generate, read_jobs

HEADER = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration,best_effort"
TABLE = "global_batch_size,1,2,4,8\n32,1.0,1.9,3.4,\n64,,0.9,1.7,3.0\n"


def write(folder: Path, *rows: str) -> str:
    (folder / "profiles").mkdir(exist_ok=True)
    (folder / "profiles" / "net.csv").write_text(TABLE, encoding="utf-8")
    path = folder / "trace.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    return str(path)


def test_rows_become_jobs_on_a_clock_that_starts_at_the_first(tmp_path: Path) -> None:
    trace = write(tmp_path, "a,1000,50,net,1090,32,2,60,0", "b,1010,80,net,0,64,16,60,1")
    jobs = read_jobs(trace, 4)
    (first_s, first), (second_s, second) = jobs.arrivals
    assert (first_s, second_s) == (0.0, 10.0)
    assert first.goal.deadline_s == 90.0
    assert first.goal.waits
    assert second.goal.deadline_s is None
    assert (first.min_workers, first.max_workers, first.total_steps, first.requested_workers) == (1, 4, 50, 2)
    # Batch 64 does not run on one device, and this cluster has no more than four.
    assert (second.min_workers, second.max_workers, second.requested_workers) == (2, 4, 4)
    assert first.profile_steps_per_s == {1: 1.0, 2: 1.9, 4: 3.4}
    assert first.num_virtual_shards >= first.max_workers
    assert jobs.profiles == "profiles"


def test_a_limit_keeps_the_first_jobs(tmp_path: Path) -> None:
    trace = write(tmp_path, *(f"j{i},{1000 + i},50,net,{2000 + i},32,1,60,0" for i in range(5)))
    assert [job.job_id for _, job in read_jobs(trace, 4, limit=3).arrivals] == ["j0", "j1", "j2"]


def test_the_platforms_own_format_brings_its_speeds(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    header = (
        "job_id,submit_s,samples,global_batch_size,min_workers,max_workers,deadline_s,samples_per_s_1,parallel_fraction"
    )
    path.write_text(f"{header}\na,0,640,64,1,2,100,64,0.5\n", encoding="utf-8")
    ((_, job),) = read_jobs(str(path), 8).arrivals
    assert job.total_steps == 10
    assert job.profile_steps_per_s == {1: pytest.approx(1.0), 2: pytest.approx(1 / 0.75)}


def test_a_model_that_no_table_knows_is_refused_where_it_stands(tmp_path: Path) -> None:
    trace = write(tmp_path, "a,0,80,net,100,64,1,60,0", "b,5,80,bart,100,64,1,60,0")
    with pytest.raises(InvalidRequest, match=r"line 3.*bart"):
        read_jobs(trace, 4)
    with pytest.raises(InvalidRequest, match=r"line 3.*bart"):
        read_jobs(trace, 4, profiles=tmp_path / "profiles")


def test_what_a_trace_does_not_tell_is_drawn_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "net.csv").write_text(TABLE, encoding="utf-8")
    path = tmp_path / "venus.csv"
    header = "job_id,user,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
    row = "7,u1,2,4,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:10,2020-04-01 00:10:10,600,10"
    path.write_text(f"{header}\n{row}\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="--draw"):
        read_jobs(str(path), 4)
    first, again = (read_jobs(str(path), 4, draws=True, seed=3) for _ in range(2))
    assert first == again
    ((_, job),) = first.arrivals
    assert job.params == {"model": "net"}
    assert job.goal.deadline_s is not None
    assert any("seed 3" in sentence for sentence in first.drawn)


def test_a_job_that_no_such_cluster_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 2 devices, this cluster has 1"):
        read_jobs(write(tmp_path, "b,0,80,net,100,64,16,60,0"), 1)


@pytest.mark.parametrize("trace", ["generated:0", "generated:x", "generated:-3", "no/such/file.csv"])
def test_bad_name_is_refused(trace: str) -> None:
    with pytest.raises(InvalidRequest):
        read_jobs(trace, 4)


def test_generated_trace_depends_on_the_seed_alone() -> None:
    assert generate(20, 8, 3) == generate(20, 8, 3)
    assert generate(20, 8, 3) != generate(20, 8, 4)
    assert len(read_jobs("generated:20", 8, seed=3).arrivals) == 20
