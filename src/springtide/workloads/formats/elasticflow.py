"""Reader of ElasticFlow's traces (ASPLOS'23): jobs with model, batch, iterations and absolute deadline."""

from __future__ import annotations

from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.workloads.rows import TextRow, read_header, read_rows
from springtide.workloads.trace import Trace, TraceJob
from springtide.workloads.trace_builder import TraceBuilder

# The published files spell three of the columns in two ways. `real_iteration` and `real_duration`, which some files
# have too, are from the cluster's log; the artifact uses `iteration` and `duration`, and so does this reader.
_SPELLINGS = {
    "submit_time": ("submit_time", "submission_time"),
    "iteration": ("iteration", "num_iteration"),
    "ddl": ("ddl", "deadline"),
}
_PLAIN = ("job_id", "model_name", "batch_size", "num_gpu", "duration")
COLUMNS = ("submit_time", "iteration", "ddl", *_PLAIN)


def spell(column: str) -> str:
    return next((name for name, spellings in _SPELLINGS.items() if column in spellings), column)


def read(path: Path, limit: int | None = None) -> Trace:
    """Read a trace; times and deadlines stay as absolute as they are in the file. Raises InvalidRequest."""
    header = read_header(path)
    spelled = {name: _find_spelling(path, header, name) for name in _SPELLINGS}
    builder = TraceBuilder(path, limit)
    for row in read_rows(path, ["job_id", *spelled.values(), *_PLAIN[1:]]):
        builder.add(_read_row(row, spelled, builder), row.line, "model_name")
        if builder.is_full:
            break
    return builder.build("elasticflow")


def _find_spelling(path: Path, header: list[str], name: str) -> str:
    for spelling in _SPELLINGS[name]:
        if spelling in header:
            return spelling
    either = " or ".join(repr(spelling) for spelling in _SPELLINGS[name])
    raise InvalidRequest(f"{path.name} line 1: no column {either}; the header must name {', '.join(COLUMNS)}")


def _read_row(row: TextRow, spelled: dict[str, str], builder: TraceBuilder) -> TraceJob:
    job_id = builder.claim_row(row, "job_id")
    submit_s = row.number(spelled["submit_time"])
    is_best_effort = row.flag("best_effort")
    deadline_s = None if is_best_effort else row.number(spelled["ddl"])
    if deadline_s is not None and deadline_s < submit_s:
        row.refuse(spelled["ddl"], f"the deadline {deadline_s:g} lies before the submission at {submit_s:g}")
    model = row.text("model_name")
    if not model:
        row.refuse("model_name", "it is empty; the name of a scaling table belongs here")
    return TraceJob(
        job_id=job_id,
        submit_s=submit_s,
        num_steps=row.count(spelled["iteration"]),
        model=model,
        global_batch_size=row.count("batch_size"),
        num_devices=row.devices("num_gpu"),
        duration_s=row.number("duration"),
        deadline_s=deadline_s,
        is_best_effort=is_best_effort,
    )
