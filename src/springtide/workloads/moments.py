"""Dates in logs as seconds since 1970."""

from __future__ import annotations

import datetime


def parse_moment_s(text: str) -> float:
    """`2017-10-09 07:01:55`, with or without an offset (without: UTC), as seconds since 1970. Raises ValueError."""
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    seconds = moment.timestamp()
    if seconds < 0:
        raise ValueError("it lies before 1970")
    return seconds
