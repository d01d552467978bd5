"""The jobs of a run without faults: `generated:N`, or a CSV file that is checked line by line."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import validate_name
from springtide.core.workload import TrainingJob
from springtide.sim.workload import make_job

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
MAX_JOBS = 100_000
_MOST_VIRTUAL_SHARDS = 256
# Without faults a checkpoint is only needed where a policy preempts, which writes its own.
_CHECKPOINT_INTERVAL_S = 600.0

Arrivals = list[tuple[float, TrainingJob]]


def read_trace(trace: str, num_devices: int, seed: int) -> Arrivals:
    """Return (moment, job) in order of arrival. Raises InvalidRequest naming line and column of what is wrong."""
    kind, separator, rest = trace.partition(":")
    if kind == "generated" and separator:
        if not rest.isdecimal() or not 1 <= int(rest) <= MAX_JOBS:
            raise InvalidRequest(f"trace {trace!r} needs a number of jobs from 1 to {MAX_JOBS}, such as generated:200")
        return generate(int(rest), num_devices, seed)
    return read_csv(Path(trace))


def generate(num_jobs: int, num_devices: int, seed: int) -> Arrivals:
    """Poisson arrivals that load the cluster by four fifths, log-uniform lengths, half of the jobs with a deadline."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    lengths_s = np.exp(rng.uniform(np.log(60.0), np.log(3600.0), num_jobs))
    gap_s = float(lengths_s.mean()) / (0.8 * num_devices)
    moments_s = np.cumsum(rng.exponential(gap_s, num_jobs))
    arrivals = []
    for index, (at_s, length_s) in enumerate(zip(moments_s.tolist(), lengths_s.tolist(), strict=True)):
        rate = float(np.exp(rng.uniform(np.log(50.0), np.log(2000.0))))
        most = min(num_devices, int(2 ** rng.integers(0, 4)))
        job = make_job(
            f"job-{index:05d}",
            num_samples=max(1, round(rate * length_s)),
            samples_per_s=rate,
            parallel_fraction=float(rng.uniform(0.8, 0.99)),
            batch_size=int(rng.choice([64, 128, 256])),
            workers=(1, most),
            deadline_s=at_s + length_s * float(rng.uniform(0.8, 3.0)) if rng.random() < 0.5 else None,
            checkpoint_interval_s=_CHECKPOINT_INTERVAL_S,
        )
        arrivals.append((at_s, job))
    return arrivals


def read_csv(path: Path) -> Arrivals:
    """Read a trace file. Raises InvalidRequest."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise InvalidRequest(
                    f"{path.name} line 1: no column {missing[0]!r}; the header must name {', '.join(COLUMNS)}"
                )
            arrivals: Arrivals = []
            known: dict[str, int] = {}
            for row in rows:
                arrivals.append(_read_row(row, f"{path.name} line {rows.line_num}", known, rows.line_num))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"the trace {path} cannot be read: {error}") from error
    if not arrivals:
        raise InvalidRequest(f"{path.name} line 2: there is no job below the header")
    return sorted(arrivals, key=lambda arrival: arrival[0])


def _read_row(row: Mapping[str, str | None], where: str, known: dict[str, int], line: int) -> tuple[float, TrainingJob]:
    job_id = validate_name((row["job_id"] or "").strip(), f"{where}, column job_id: the id")
    if job_id in known:
        raise InvalidRequest(f"{where}, column job_id: {job_id!r} is already the job of line {known[job_id]}")
    known[job_id] = line
    submit_s = _number(row, "submit_s", where, lowest=0.0)
    least, most = _count(row, "min_workers", where), _count(row, "max_workers", where)
    if least > most or most > _MOST_VIRTUAL_SHARDS:
        raise InvalidRequest(
            f"{where}, column max_workers: {most} must be from min_workers ({least}) to {_MOST_VIRTUAL_SHARDS}"
        )
    fraction = _number(row, "parallel_fraction", where, lowest=0.0)
    if fraction > 1.0:
        raise InvalidRequest(f"{where}, column parallel_fraction: {fraction} is above 1")
    rate = _number(row, "samples_per_s_1", where, lowest=0.0)
    if rate == 0.0:
        raise InvalidRequest(f"{where}, column samples_per_s_1: a job that trains nothing in a second never ends")
    has_deadline = bool((row["deadline_s"] or "").strip())
    job = make_job(
        job_id,
        num_samples=_count(row, "samples", where),
        samples_per_s=rate,
        parallel_fraction=fraction,
        batch_size=_count(row, "global_batch_size", where),
        workers=(least, most),
        deadline_s=_number(row, "deadline_s", where, lowest=0.0) if has_deadline else None,
        checkpoint_interval_s=_CHECKPOINT_INTERVAL_S,
    )
    return submit_s, job


def _number(row: Mapping[str, str | None], column: str, where: str, *, lowest: float) -> float:
    text = (row[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        raise InvalidRequest(f"{where}, column {column}: {text!r} is not a number") from None
    if not math.isfinite(value) or value < lowest:
        raise InvalidRequest(f"{where}, column {column}: {text!r} must be a finite number of at least {lowest:g}")
    return value


def _count(row: Mapping[str, str | None], column: str, where: str) -> int:
    value = _number(row, column, where, lowest=1.0)
    if value != int(value):
        raise InvalidRequest(f"{where}, column {column}: {value} must be a whole number")
    return int(value)
