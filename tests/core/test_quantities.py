"""Durations, sizes, money, ranges and names as people write them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import (
    format_duration,
    parse_duration_s,
    parse_fractions,
    parse_money_usd,
    parse_quantity,
    parse_range,
    parse_size_bytes,
    validate_name,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("2d", 172800.0),
        ("45", 45.0),
        (1.5, 1.5),
        (" 1H 5s ", 3605.0),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "10 min utes", "-5s", "0", 0, -1, math.inf, math.nan, "nan", "inf", True, "5m!", "m", "1h nonsense"],
)
def test_no_duration(text: str | float) -> None:
    with pytest.raises(InvalidRequest, match="deadline"):
        parse_duration_s(text, "deadline")


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24_000_000_000), ("512MiB", 512 * 1024**2), ("1k", 1000), (7, 7), ("1.5 kb", 1500)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1GB", 0, True, "1XB"])
def test_no_size(text: str | int) -> None:
    with pytest.raises(InvalidRequest):
        parse_size_bytes(text)


@pytest.mark.parametrize(("text", "usd"), [("$4", 4.0), ("0.50", 0.5), (3, 3.0)])
def test_money(text: str | float, usd: float) -> None:
    assert parse_money_usd(text) == usd


@pytest.mark.parametrize("text", ["", "four", "$-1", 0, math.nan, math.inf, True])
def test_no_money(text: str | float) -> None:
    with pytest.raises(InvalidRequest, match="budget"):
        parse_money_usd(text)


@pytest.mark.parametrize(("text", "expected"), [(4, (4, 4)), ("4", (4, 4)), ((1, 8), (1, 8)), ("1..8", (1, 8))])
def test_ranges(text: int | str | tuple[int, int], expected: tuple[int, int]) -> None:
    assert parse_range(text) == expected


def test_a_range_from_zero_needs_permission() -> None:
    assert parse_range("0..4", lowest=0) == (0, 4)
    with pytest.raises(InvalidRequest):
        parse_range("0..4")


@pytest.mark.parametrize("text", ["", "8..1", "1..", "..4", "a..b", 0, -1, True, (1, 2, 3), "1..2..3", (0, 0)])
def test_no_range(text: int | str | tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="workers"):
        parse_range(text, "workers")


@pytest.mark.parametrize("name", ["a", "fit-3f2a", "my.job_1", "0", "a" * 63])
def test_names(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "A", "a b", "a/b", "a..b", "..", "a" * 64, "ü", "a\n"])
def test_no_name(name: str) -> None:
    with pytest.raises(InvalidRequest):
        validate_name(name)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.041, "41 ms"), (7.54, "7.5 s"), (192, "3m12"), (7500, "2h05"), (-125, "-2m05"), (0, "0 ms"), (3599.6, "1h00")],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(1, 999), st.integers(1, 59))
def test_hours_and_minutes_add_up(hours: int, minutes: int) -> None:
    assert parse_duration_s(f"{hours}h{minutes}m") == hours * 3600 + minutes * 60


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        assert parse_duration_s(text) > 0
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        (0.3, (0.3, None)),
        ("30%", (0.3, None)),
        ("0.3..0.6", (0.3, 0.6)),
        ("7% .. 58 %", (0.07, 0.58)),
        ((0.3, 1), (0.3, 1.0)),
    ],
)
def test_fractions(text: float | str | tuple[float, float], bounds: tuple[float, float | None]) -> None:
    assert parse_fractions(text) == bounds


@pytest.mark.parametrize("text", ["", "x", "..", "0.3..", True, float("inf"), (1, 2, 3), None, "30%%"])
def test_no_fractions(text: Any) -> None:
    with pytest.raises(InvalidRequest, match="no fraction of a device"):
        parse_fractions(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4", "4"),
        ("1500m", "1.5"),
        ("0.5", "0.5"),
        ("16Gi", str(1 << 34)),
        ("1e3", "1000"),
        ("2M", "2000000"),
        ("5n", "5e-9"),
    ],
)
def test_quantities(text: str, amount: str) -> None:
    assert parse_quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "a lot", "4 GB", "-1", "1e999", "NaN", "1mm", "9" * 40])
def test_no_quantity(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_quantity(text)
