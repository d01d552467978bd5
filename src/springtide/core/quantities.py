"""Durations, sizes, money and ranges as people write them, parsed once into typed values.

"90m" -> 5400.0 s     "24GB" -> 24e9 bytes     "$4" -> 4.0 usd     "1..8" or (1, 8) -> (1, 8)
"30%..0.6" -> (0.3, 0.6)
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from springtide.core.errors import InvalidRequest

_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]?")
_QUANTITY = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?)([numkMGTPE]|[KMGTPE]i|)")
_QUANTITY_UNITS = {
    "": Decimal(1),
    **{
        prefix: Decimal(10) ** power
        for prefix, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
    },
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)},
}
_FRACTION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)")
MAX_NAME_CHARS = 63
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")


def parse_duration_s(value: str | float, what: str = "duration") -> float:
    """Parse "90m", "1h30m", "250ms" or a number of seconds. Raises InvalidRequest unless finite and positive."""
    if isinstance(value, bool):
        raise InvalidRequest(f"{what} {value!r} is not a duration; write it like '90m', '1h30m' or 45 (seconds)")
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        text = value.strip().lower()
        parts = _DURATION_PART.findall(text)
        if parts and _DURATION_PART.sub("", text).strip() == "":
            seconds = sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts)
        else:
            try:
                seconds = float(text)
            except ValueError:
                raise InvalidRequest(
                    f"{what} {value!r} is not a duration; write it like '90m', '1h30m' or '45s'"
                ) from None
    if not math.isfinite(seconds) or seconds <= 0:
        raise InvalidRequest(f"{what} must be a positive, finite time, got {value!r}; for example '10m'")
    return seconds


def parse_size_bytes(value: str | int, what: str = "size") -> int:
    """Parse "24GB", "512MiB" or a number of bytes. Raises InvalidRequest unless positive."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            raise InvalidRequest(f"{what} {value!r} is not a size; write it like '24GB' or '512MiB'")
        number, prefix, binary = match.groups()
        base = 1024 if binary else 1000
        size = int(float(number) * base ** " kmgt".index(prefix.lower() or " "))
    if size <= 0:
        raise InvalidRequest(f"{what} must be positive, got {value!r}")
    return size


def parse_quantity(value: str) -> Decimal:
    """Parse an amount as Kubernetes writes it: "1500m", "16Gi", "2", "1e3". Raises InvalidRequest."""
    match = _QUANTITY.fullmatch(value.strip())
    if match is None:
        raise InvalidRequest(f"{value!r} is not a quantity; write it like '4', '500m' or '16Gi'")
    number, unit = match.groups()
    return Decimal(number) * _QUANTITY_UNITS[unit]


def parse_money_usd(value: str | float, what: str = "budget") -> float:
    """Parse "$4", "4" or a number of US dollars. Raises InvalidRequest unless finite and positive."""
    try:
        amount = float(value.strip().removeprefix("$")) if isinstance(value, str) else float(value)
    except ValueError:
        raise InvalidRequest(f"{what} {value!r} is not an amount of money; write it like '$4' or 0.50") from None
    if isinstance(value, bool) or not math.isfinite(amount) or amount <= 0:
        raise InvalidRequest(f"{what} must be a positive, finite amount, got {value!r}; for example '$4'")
    return amount


def parse_range(value: str | int | tuple[int, int], what: str = "range", *, lowest: int = 1) -> tuple[int, int]:
    """Parse 4, "4", (1, 8) or "1..8" into inclusive bounds. Raises InvalidRequest unless lowest <= min <= max."""
    try:
        if isinstance(value, bool):
            raise ValueError
        if isinstance(value, int):
            bounds = (value, value)
        elif isinstance(value, str):
            first, separator, last = value.strip().partition("..")
            bounds = (int(first), int(last if separator else first))
        else:
            first_bound, last_bound = value
            bounds = (int(first_bound), int(last_bound))
    except (ValueError, TypeError):
        raise InvalidRequest(f"{what} {value!r} is not a range; write it like 4, '1..8' or (1, 8)") from None
    if not lowest <= bounds[0] <= bounds[1] or bounds[1] < 1 or bounds[1] > 100_000:
        raise InvalidRequest(f"{what} {value!r} must run from at least {lowest} up to its maximum; for example '1..4'")
    return bounds


def parse_fractions(
    value: str | float | tuple[float, float],
    what: str = "share",
    *,
    like: str = "0.3, '30%', '0.3..0.6' or (0.3, 0.6)",
) -> tuple[float, float | None]:
    """Parse 0.3, "0.3", "30%", (0.3, 0.6) or "0.3..0.6" into a lower and, where there is one, an upper fraction.

    Raises InvalidRequest, with `like` as the example, for anything that is not a fraction. Callers check whether the
    two fit together.
    """
    parts: tuple[object, ...]
    if isinstance(value, str):
        first, separator, last = value.partition("..")
        parts = (first, last) if separator else (first,)
    elif isinstance(value, tuple | list):
        parts = tuple(value)
    else:
        parts = (value,)
    found = [_fraction(part) for part in parts]
    known = [fraction for fraction in found if fraction is not None]
    if len(known) < len(found) or len(known) not in (1, 2):
        raise InvalidRequest(f"{what} {value!r:.80} is no fraction of a device; write it like {like}")
    return known[0], known[1] if len(known) > 1 else None


def _fraction(value: object) -> float | None:
    if isinstance(value, str):
        match = _FRACTION.fullmatch(value.strip())
        # A division is correctly rounded, so that 30% is the float nearest to 0.3; a product with 0.01 may not be.
        return None if match is None else float(match[1]) / (100.0 if match[2] else 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def validate_name(name: str, what: str = "name") -> str:
    """Return `name` if it is safe as a part of a path, part of a URL and label; else raise InvalidRequest."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or ".." in name:
        raise InvalidRequest(
            f"{what} {name!r:.80} is not allowed; use 1 to 63 of a-z 0-9 . _ - starting with a letter or digit"
        )
    return name


def format_duration(seconds: float) -> str:
    """Write seconds as people read them: 0.3 ms, 41 ms, 7.5 s, 3m12, 2h05."""
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    if 0 < seconds < 0.01:
        return f"{sign}{seconds * 1000:.2g} ms"
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{sign}{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes}m{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}h{minutes:02d}"


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes as people read it: 812 B, 34 kB, 1.2 GB."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.1f} {unit}" if num_bytes < 9.95 else f"{num_bytes:.0f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"
