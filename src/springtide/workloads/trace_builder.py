"""What the readers of all formats share: ids are checked, jobs added or skipped and counted, the trace built."""

from __future__ import annotations

from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import validate_name
from springtide.workloads.rows import TextRow, name_of, shorten
from springtide.workloads.trace import MAX_JOBS, Trace, TraceJob, make_trace


class TraceBuilder:
    """The jobs of one file that were read so far, of which the caller wants `limit` at most."""

    def __init__(self, path: Path, limit: int | None) -> None:
        if limit is not None and not 1 <= limit <= MAX_JOBS:
            raise InvalidRequest(f"a limit of {limit} jobs is not possible; give one from 1 to {MAX_JOBS:,}")
        self.path = path
        self.limit = limit
        self.jobs: list[TraceJob] = []
        self.skipped: dict[str, int] = {}
        self._lines: dict[str, int] = {}
        self._pair_places: dict[tuple[str, int], str] = {}

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached, so that the rest of the file need not be read."""
        return self.limit is not None and len(self.jobs) >= self.limit

    def claim(self, job_id: str, line: int, column: str) -> str:
        """Check that an id is valid and unused, and that the trace does not have too many jobs. Returns the id."""
        where = f"{self.path.name} line {line}"
        if len(self._lines) >= MAX_JOBS:
            raise InvalidRequest(
                f"{where}: more than {MAX_JOBS:,} jobs; read the first N of them with a limit (--jobs N)"
            )
        validate_name(job_id, f"{where}, column {column}: the id")
        first = self._lines.setdefault(job_id, line)
        if first != line:
            raise InvalidRequest(f"{where}, column {column}: {shorten(job_id)} is already the job of line {first}")
        return job_id

    def claim_row(self, row: TextRow, column: str) -> str:
        """`claim` the id in `column` of a row."""
        return self.claim(row.text(column), row.line, column)

    def add(self, job: TraceJob, line: int = 0, model_column: str = "") -> None:
        """Add a job; with `model_column`, remember where its model and batch size were first named."""
        self.jobs.append(job)
        if model_column and job.pair not in self._pair_places:
            self._pair_places[job.pair] = f"{self.path.name} line {line}, column {model_column}"

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def build(self, format: str, drawn: tuple[str, ...] = ()) -> Trace:
        """The trace of the jobs added. Raises InvalidRequest if there are none."""
        if not self.jobs:
            left_out = "; ".join(f"{count} skipped: {reason}" for reason, count in self.skipped.items())
            found = left_out or "there is no job below the header"
            raise InvalidRequest(f"{self.path.name} line 2: no job to read ({found})")
        places = tuple((model, size, place) for (model, size), place in self._pair_places.items())
        return make_trace(
            name_of(self.path), self.jobs, skipped=self.skipped, drawn=drawn, format=format, pair_places=places
        )
