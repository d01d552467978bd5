"""Reader of SenseTime's Helios traces (SC'21), `cluster_log.csv`: users, numbers of GPUs, submission, duration."""

from __future__ import annotations

from pathlib import Path

from springtide.workloads.rows import TextRow, read_rows
from springtide.workloads.trace import Trace, TraceJob
from springtide.workloads.trace_builder import TraceBuilder

# The files also have cpu_num, node_num, state, start_time, end_time and queue, which are not read.
COLUMNS = ("job_id", "user", "gpu_num", "submit_time", "duration")


def read(path: Path, limit: int | None = None) -> Trace:
    """Read a log; moments become seconds since 1970, read as UTC. Raises InvalidRequest naming line and column.

    Jobs without a GPU and jobs that never ran are left out and counted.
    """
    builder = TraceBuilder(path, limit)
    for row in read_rows(path, COLUMNS):
        _read_row(row, builder)
        if builder.is_full:
            break
    return builder.build("helios")


def _read_row(row: TextRow, builder: TraceBuilder) -> None:
    num_devices = row.devices("gpu_num", lowest=0)
    submit_s = row.moment("submit_time")
    duration_s = row.number("duration")
    if num_devices == 0:
        builder.skip("asks for no GPU")
    elif duration_s == 0:
        builder.skip("never ran")
    else:
        builder.add(
            TraceJob(
                job_id=builder.claim_row(row, "job_id"),
                submit_s=submit_s,
                num_devices=num_devices,
                duration_s=duration_s,
                owner=row.text("user"),
            )
        )
