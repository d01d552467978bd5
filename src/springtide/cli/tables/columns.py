"""Phrases and columns shared by the text output of all commands. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from springtide.core.quantities import format_duration

UNKNOWN = "-"
_MAX_REASON = 60
_MIN_LAST_COLUMN = 12
# Text of users in a cell must not look like further rows.
_ON_ONE_LINE = re.compile(r"[\t\n\r\v\f]+")


def align(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Aligned columns, two spaces apart; the last one is not padded, and cut at `width`."""
    lines = [[_ON_ONE_LINE.sub(" ", cell) for cell in row] for row in (header, *rows)]
    if width is not None:
        used = sum(max(len(line[column]) for line in lines) + 2 for column in range(len(header) - 1))
        lines = [[*line[:-1], shorten(line[-1], max(_MIN_LAST_COLUMN, width - used))] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def shorten(text: str, length: int = _MAX_REASON) -> str:
    """At most `length` characters on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def percent(fraction: float | None) -> str:
    """Like 57 %; a dash if unknown."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """Like 3m12; a dash if unknown."""
    return UNKNOWN if seconds is None else format_duration(seconds)


def pause(seconds: float) -> str:
    """Like 41 ms or 0.13 ms: with more digits below a millisecond, so that a short pause does not show as 0."""
    return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else format_duration(seconds)


def slack(seconds: float | None) -> str:
    """Like +2m05 or -40.0 s, always with a sign."""
    if seconds is None:
        return UNKNOWN
    return format_duration(seconds) if seconds < 0 else f"+{format_duration(seconds)}"


def number(value: float | None, digits: int = 4) -> str:
    """The value with `digits` significant digits; a dash if unknown."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def count(how_many: int, what: str) -> str:
    """1 worker, 2 workers."""
    return f"{how_many} {what}{'' if how_many == 1 else 's'}"


def bounds(minimum: int, maximum: int) -> str:
    """1..4, or 4 if both are the same."""
    return str(minimum) if minimum == maximum else f"{minimum}..{maximum}"
