"""Reader of the Azure Functions trace of 2019 (ATC'20): calls of each function in each minute of a day."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.workloads.readers import AZURE_COLUMNS
from springtide.workloads.rows import TextRow, name_of, read_header, read_rows, shorten
from springtide_studies.workloads.request_trace import FunctionCalls, RequestTrace

MAX_FUNCTIONS = 100_000
# One busy minute of one function takes sixteen bytes: this holds a file to about 160 MB.
MAX_BUSY_MINUTES = 10_000_000
MAX_CALLS_PER_MINUTE = 2**31 - 1
_MINUTE_S = 60.0


def read(path: Path, limit: int | None = None) -> RequestTrace:
    """Read one day, at most the first `limit` functions: HashOwner,HashApp,HashFunction,Trigger,1,2,...,1440.

    Functions that were never called are left out and counted. Raises InvalidRequest naming line and column.
    """
    if limit is not None and not 1 <= limit <= MAX_FUNCTIONS:
        raise InvalidRequest(f"a limit of {limit} functions is not possible; give one from 1 to {MAX_FUNCTIONS:,}")
    minutes = _minutes_of(path, read_header(path))
    functions: list[FunctionCalls] = []
    known: dict[tuple[str, ...], int] = {}
    num_silent = num_busy = 0
    for row in read_rows(path, (*AZURE_COLUMNS, *minutes)):
        key = tuple(row.text(column) for column in AZURE_COLUMNS)
        first = known.setdefault(key, row.line)
        if first != row.line:
            row.refuse(
                "HashFunction", f"{shorten(key[2])} of this app and trigger is already the function of line {first}"
            )
        intervals, counts = _read_counts(row, minutes)
        if not intervals:
            num_silent += 1
            continue
        num_busy += len(intervals)
        if len(known) > MAX_FUNCTIONS or num_busy > MAX_BUSY_MINUTES:
            raise InvalidRequest(
                f"{path.name} line {row.line}: more than {MAX_FUNCTIONS:,} functions or {MAX_BUSY_MINUTES:,} busy "
                "minutes; read the first N functions with a limit"
            )
        owner, app, function, trigger = key
        functions.append(
            FunctionCalls(function=function, app=app, owner=owner, trigger=trigger, intervals=intervals, counts=counts)
        )
        if limit is not None and len(functions) >= limit:
            break
    if not functions:
        raise InvalidRequest(f"{path.name} line 2: no function below the header is ever called")
    return RequestTrace(
        name=name_of(path),
        functions=tuple(functions),
        interval_s=_MINUTE_S,
        num_intervals=len(minutes),
        skipped={"never called": num_silent} if num_silent else {},
    )


def _minutes_of(path: Path, header: list[str]) -> list[str]:
    """The columns that count, which must be 1, 2, 3 and so on in this order."""
    minutes = [column for column in header if column.isdecimal()]
    for number, column in enumerate(minutes, 1):
        if column != str(number):
            raise InvalidRequest(f"{path.name} line 1, column {column}: minute {number} belongs here")
    if not minutes:
        raise InvalidRequest(f"{path.name} line 1: no column of a minute; the header must name 1, 2, 3 and so on")
    return minutes


def _read_counts(row: TextRow, minutes: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    intervals, counts = [], []
    for index, minute in enumerate(minutes):
        # Nearly all counts are zero, and there are 1,440 in a row.
        if row.fields[row.indexes[minute]] == "0":
            continue
        count = row.big_count(minute, highest=MAX_CALLS_PER_MINUTE)
        if count:
            intervals.append(index)
            counts.append(count)
    return tuple(intervals), tuple(counts)
