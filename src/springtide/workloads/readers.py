"""The one door to traces of jobs: finds out which format a file has and reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.workloads import elasticflow
from springtide.workloads.rows import read_header
from springtide.workloads.trace import Trace

READERS: dict[str, Callable[[Path, int | None], Trace]] = {"elasticflow": elasticflow.read}


def read_trace(path: Path | str, *, format: str = "auto", limit: int | None = None) -> Trace:
    """Read a trace of jobs, at most the first `limit` of the file. Raises InvalidRequest naming line and column."""
    place = Path(path)
    name = detect_format(place) if format == "auto" else format
    if name not in READERS:
        raise InvalidRequest(f"there is no trace format {name!r}; choose auto, {', '.join(READERS)}")
    return READERS[name](place, limit)


def detect_format(path: Path) -> str:
    """The format that the first line of a file shows. Raises InvalidRequest."""
    header = read_header(path)
    if elasticflow.accepts(header):
        return "elasticflow"
    raise InvalidRequest(f"{path.name} line 1: this header belongs to no known format of traces")
