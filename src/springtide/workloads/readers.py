"""Readers of all formats of traces: recognise the format, read the file, and draw the fields that it lacks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.workloads.drawing import draw_missing
from springtide.workloads.formats import elasticflow, google, helios, philly, pollux, springtide
from springtide.workloads.profiles import Profiles, choose_profiles
from springtide.workloads.rows import open_bytes, read_header
from springtide.workloads.trace import Trace


class Format(msgspec.Struct, frozen=True):
    """A format of traces of jobs: its reader, and the columns by which a header is recognised."""

    read: Callable[[Path, int | None], Trace]
    columns: tuple[str, ...] = ()


FORMATS = {
    "elasticflow": Format(elasticflow.read, elasticflow.COLUMNS),
    "springtide": Format(springtide.read, springtide.COLUMNS),
    "pollux": Format(pollux.read, pollux.COLUMNS),
    "philly": Format(philly.read_json),
    "philly-csv": Format(philly.read_csv, philly.COLUMNS),
    "helios": Format(helios.read, helios.COLUMNS),
    "google": Format(google.read),
}
# The Azure Functions trace of 2019. It holds requests and no jobs: it is recognised only to say so.
AZURE_COLUMNS = ("HashOwner", "HashApp", "HashFunction", "Trigger")
# A header that shares less than half of its columns with a format is not a damaged header of that format.
_LEAST_LIKENESS = 0.5


def read_trace(
    path: Path | str,
    *,
    format: str = "auto",
    limit: int | None = None,
    models: Profiles | None = None,
    seed: int = 0,
) -> Trace:
    """Read a trace of jobs, at most the first `limit` jobs of the file; a name that ends in .gz is decompressed.

    With `models`, fields that the format lacks are drawn from these tables and the seed (see `draw_missing`); without,
    they stay unknown. Raises InvalidRequest in one sentence that names the file, the line and the column.
    """
    place = Path(path)
    name = detect_format(place) if format == "auto" else format
    if name == "azure":
        raise InvalidRequest(f"{place.name} line 1: this file counts requests to functions, it holds no jobs")
    if name not in FORMATS:
        raise InvalidRequest(f"there is no trace format {name!r:.40}; choose auto, {', '.join(FORMATS)}")
    trace = FORMATS[name].read(place, limit)
    return draw_missing(trace, choose_profiles(trace, place, models), seed) if models is not None else trace


def detect_format(path: Path) -> str:
    """The format of a file by its beginning: the one most of whose columns the header has.

    A header that only resembles a format counts as that format, so that its reader can name the column that is
    missing. Raises InvalidRequest.
    """
    with open_bytes(path) as file:
        try:
            begins = file.read(4096)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidRequest(f"{path.name} line 1: it cannot be read: {error}") from error
    if begins.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return "philly"
    header = read_header(path)
    if _looks_like_google(header):
        return "google"
    columns = {elasticflow.spell(column) for column in header}
    candidates = {name: set(known.columns) for name, known in FORMATS.items() if known.columns}
    candidates["azure"] = set(AZURE_COLUMNS)
    likeness = {name: len(columns & wanted) / len(wanted) for name, wanted in candidates.items()}
    # Some formats are a subset of another: of equally likely ones take the one with more columns.
    best = max(likeness, key=lambda name: (likeness[name], len(candidates[name])))
    if likeness[best] < _LEAST_LIKENESS:
        raise InvalidRequest(
            f"{path.name} line 1: this header belongs to no known format ({', '.join(candidates)}, philly, google); "
            "see docs/traces.md for their columns"
        )
    return best


def _looks_like_google(fields: list[str]) -> bool:
    """Google's files have no header: thirteen fields; the first, third and fourth are numbers, the sixth 0 to 8."""
    if len(fields) != len(google.COLUMNS):
        return False
    return all(fields[index].isdecimal() for index in (0, 2, 3)) and fields[5] in list("012345678")
