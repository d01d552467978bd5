"""Reader of the platform's own simple trace: jobs by samples, bounds on workers, and a speed that follows Amdahl."""

from __future__ import annotations

from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_fractions
from springtide.core.shares import Share, make_share
from springtide.workloads.rows import TextRow, read_rows
from springtide.workloads.trace import MAX_STEPS, Trace, TraceJob
from springtide.workloads.trace_builder import TraceBuilder

COLUMNS = (
    "job_id",
    "submit_s",
    "samples",
    "global_batch_size",
    "min_workers",
    "max_workers",
    "deadline_s",
    "samples_per_s_1",
    "parallel_fraction",
)
# A further column, `share`, is optional.
# The most virtual shards that a job of the platform can have.
MAX_WORKERS = 256


def read(path: Path, limit: int | None = None) -> Trace:
    """Read a trace. An empty deadline means best effort. Raises InvalidRequest naming line and column."""
    builder = TraceBuilder(path, limit)
    for row in read_rows(path, COLUMNS):
        builder.add(_read_row(row, builder))
        if builder.is_full:
            break
    return builder.build("springtide")


def _read_row(row: TextRow, builder: TraceBuilder) -> TraceJob:
    job_id = builder.claim_row(row, "job_id")
    submit_s = row.number("submit_s")
    least = row.count("min_workers", highest=MAX_WORKERS)
    most = row.count("max_workers", highest=MAX_WORKERS)
    if least > most:
        row.refuse("max_workers", f"{most} must be from min_workers ({least}) to {MAX_WORKERS}")
    rate = row.number("samples_per_s_1")
    if rate == 0.0:
        row.refuse("samples_per_s_1", "a job that trains nothing in a second never ends; give a rate above 0")
    deadline_s = row.number("deadline_s") if row.has("deadline_s") else None
    if deadline_s is not None and deadline_s < submit_s:
        row.refuse("deadline_s", f"the deadline {deadline_s:g} lies before the submission at {submit_s:g}")
    num_samples, batch_size = row.count("samples"), row.count("global_batch_size", highest=MAX_STEPS)
    job = TraceJob(
        job_id=job_id,
        submit_s=submit_s,
        num_steps=-(-num_samples // batch_size),
        global_batch_size=batch_size,
        num_devices=most,
        deadline_s=deadline_s,
        is_best_effort=deadline_s is None,
        min_workers=least,
        max_workers=most,
        num_samples=num_samples,
        samples_per_s_1=rate,
        parallel_fraction=row.number("parallel_fraction", highest=1.0),
        share=_read_share(row),
    )
    return job


def _read_share(row: TextRow) -> Share | None:
    """What each worker holds of its device: 0.3, 30% or 0.3..0.6; None, the whole device, if empty or no column."""
    if not row.has("share"):
        return None
    try:
        return make_share(*parse_fractions(row.text("share")))
    except InvalidRequest as error:
        row.refuse("share", str(error))
