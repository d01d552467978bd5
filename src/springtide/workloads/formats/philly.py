"""Readers of Microsoft's Philly trace (ATC'19): the JSON log of the cluster, and its reduction to one CSV row a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from springtide.core.errors import InvalidRequest
from springtide.workloads.objects import read_objects
from springtide.workloads.rows import parse_moment_s, read_rows, shorten
from springtide.workloads.trace import MAX_DEVICES, MAX_TIME_S, Trace, TraceJob
from springtide.workloads.trace_builder import TraceBuilder

COLUMNS = ("timestamp", "duration", "num_gpus")
_NO_MOMENT = (None, "", "None")


def read_csv(path: Path, limit: int | None = None) -> Trace:
    """Read timestamp,duration,num_gpus[,gpu_time,cluster]: a date read as UTC, seconds, GPUs, virtual cluster.

    A job is named after its line. Raises InvalidRequest naming line and column.
    """
    builder = TraceBuilder(path, limit)
    for row in read_rows(path, COLUMNS):
        submit_s, duration_s = row.moment("timestamp"), row.number("duration")
        num_devices = row.devices("num_gpus", lowest=0)
        if num_devices == 0:
            builder.skip("asks for no GPU")
        elif duration_s == 0:
            builder.skip("never ran")
        else:
            owner = row.text("cluster") if row.has("cluster") else ""
            builder.add(
                TraceJob(
                    job_id=builder.claim(f"philly-{row.line}", row.line, "timestamp"),
                    submit_s=submit_s,
                    num_devices=num_devices,
                    duration_s=duration_s,
                    owner=owner,
                )
            )
        if builder.is_full:
            break
    return builder.build("philly-csv")


def read_json(path: Path, limit: int | None = None) -> Trace:
    """Read `cluster_job_log`. Its dates have no zone and are read as UTC; they become seconds since 1970.

    A job's duration is the sum of its attempts that began and ended, its devices are the GPUs of the last of them,
    its owner is the user in the virtual cluster. Raises InvalidRequest naming the line of the job and the field.
    """
    builder = TraceBuilder(path, limit)
    for line, value in read_objects(path):
        _read_job(_Fields(path.name, line, value), builder)
        if builder.is_full:
            break
    return builder.build("philly")


class _Fields:
    """One object of the log, read field by field."""

    def __init__(self, file: str, line: int, value: dict[str, Any]) -> None:
        self.file = file
        self.line = line
        self.value = value

    def refuse(self, field: str, problem: str) -> NoReturn:
        raise InvalidRequest(f"{self.file} line {self.line}, column {field}: {problem}")

    def get(self, field: str, kind: type) -> Any:
        if field not in self.value:
            self.refuse(field, "this job has no such field; its log gives it for every job")
        found = self.value[field]
        if not isinstance(found, kind):
            self.refuse(field, f"{shorten(str(found))} is not a {'list' if kind is list else 'text'}")
        return found

    def moment(self, field: str, text: object) -> float:
        try:
            return parse_moment_s(text if isinstance(text, str) else str(text))
        except (ValueError, OverflowError):
            self.refuse(field, f"{shorten(str(text))} is not a date like 2017-10-09 07:01:55")


def _read_job(fields: _Fields, builder: TraceBuilder) -> None:
    job_id = fields.get("jobid", str)
    submit_s = fields.moment("submitted_time", fields.get("submitted_time", str))
    owner = f"{fields.get('vc', str)}/{fields.get('user', str)}"
    duration_s, num_devices = 0.0, 0
    for attempt in fields.get("attempts", list):
        if not isinstance(attempt, dict):
            fields.refuse("attempts", f"{shorten(str(attempt))} is not an object")
        if attempt.get("start_time") in _NO_MOMENT or attempt.get("end_time") in _NO_MOMENT:
            continue
        start_s = fields.moment("start_time", attempt["start_time"])
        end_s = fields.moment("end_time", attempt["end_time"])
        if end_s < start_s:
            fields.refuse("end_time", f"{attempt['end_time']} lies before the start at {attempt['start_time']}")
        duration_s += end_s - start_s
        if duration_s > MAX_TIME_S:
            fields.refuse("attempts", "they last for over 3,000 years together; are the dates right?")
        num_devices = _count_devices(fields, attempt)
    if duration_s == 0:
        builder.skip("never ran")
    elif num_devices == 0:
        builder.skip("asks for no GPU")
    else:
        builder.claim(job_id, fields.line, "jobid")
        builder.add(
            TraceJob(job_id=job_id, submit_s=submit_s, num_devices=num_devices, duration_s=duration_s, owner=owner)
        )


def _count_devices(fields: _Fields, attempt: dict[str, Any]) -> int:
    detail = attempt.get("detail", [])
    if not isinstance(detail, list):
        fields.refuse("detail", f"{shorten(str(detail))} is not a list of machines")
    num_devices = 0
    for machine in detail:
        if not isinstance(machine, dict) or not isinstance(machine.get("gpus", []), list):
            fields.refuse("detail", f"{shorten(str(machine))} is not a machine with its gpus")
        num_devices += len(machine.get("gpus", []))
    if num_devices > MAX_DEVICES:
        fields.refuse("detail", f"{num_devices} GPUs; a job has at most {MAX_DEVICES:,}")
    return num_devices
