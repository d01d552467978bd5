"""Traces: generated ones are reproducible, files are refused with the line and the column."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.sim.models import job_model
from springtide.sim.trace import COLUMNS, read_trace

HEADER = ",".join(COLUMNS)
GOOD = "a,0,1000,32,1,4,60,100,0.9"


def write(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_csv_becomes_jobs_in_order_of_arrival(tmp_path: Path) -> None:
    arrivals = read_trace(write(tmp_path, HEADER, "b,5,320,32,1,2,,50,0.8", GOOD), 4, 0)
    assert [(at_s, job.job_id) for at_s, job in arrivals] == [(0.0, "a"), (5.0, "b")]
    first, second = arrivals[0][1], arrivals[1][1]
    assert (first.goal.deadline_s, second.goal.deadline_s) == (60.0, None)
    assert job_model(second).total_steps == 10
    assert job_model(first).rate_per_s(1) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([HEADER.replace("samples,", ""), GOOD], "line 1: no column 'samples'"),
        ([HEADER], "line 2: there is no job"),
        ([HEADER, GOOD.replace("1000", "nan")], "line 2, column samples: 'nan'"),
        ([HEADER, GOOD.replace("a,0", "a,-1")], "line 2, column submit_s: '-1'"),
        ([HEADER, GOOD.replace("1000", "many")], "line 2, column samples: 'many' is not a number"),
        ([HEADER, GOOD.replace("1000", "10.5")], "column samples: 10.5 must be a whole number"),
        ([HEADER, GOOD, GOOD], "line 3, column job_id: 'a' is already the job of line 2"),
        ([HEADER, GOOD.replace("1,4", "4,1")], "line 2, column max_workers"),
        ([HEADER, GOOD.replace("0.9", "1.5")], "line 2, column parallel_fraction"),
        ([HEADER, GOOD.replace(",100,", ",0,")], "line 2, column samples_per_s_1"),
        ([HEADER, "a,0,1000"], "column min_workers"),
        ([HEADER, GOOD.replace("a,", "../a,")], "line 2, column job_id"),
    ],
)
def test_bad_file_is_refused_with_line_and_column(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_trace(write(tmp_path, *lines), 4, 0)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("trace", ["generated:0", "generated:x", "generated:-3", "no/such/file.csv"])
def test_bad_name_is_refused(trace: str) -> None:
    with pytest.raises(InvalidRequest):
        read_trace(trace, 4, 0)


def test_generated_trace_depends_on_the_seed_alone() -> None:
    assert read_trace("generated:20", 8, 3) == read_trace("generated:20", 8, 3)
    assert read_trace("generated:20", 8, 3) != read_trace("generated:20", 8, 4)
