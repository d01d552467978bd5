"""Dates in logs as seconds since 1970."""

from __future__ import annotations

import datetime

from springtide.workloads.trace import MAX_TIME_S


def parse_moment_s(text: str) -> float:
    """`2017-10-09 07:01:55`, with or without an offset (without: UTC), as seconds since 1970. Raises ValueError."""
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    seconds = moment.timestamp()
    if not 0 <= seconds <= MAX_TIME_S:
        raise ValueError("it lies before 1970 or thousands of years ahead")
    return seconds
