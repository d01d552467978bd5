"""Request rates second by second: files of one number a line, seeded rates of three kinds, and arrivals by them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.generators import MAX_ARRIVALS

KINDS = ("bursty", "periodic", "sporadic")
MAX_SECONDS = 1_000_000
MAX_RATE_PER_S = 1e6
Rates = NDArray[np.float64]


def read_rates(path: Path, *, scale: float = 1.0) -> Rates:
    """Read a file of one number a line, a second each, times `scale`: requests a second, shape (seconds,).

    Empty lines are passed over. Raises InvalidRequest in one sentence that names the file and the line.
    """
    rates: list[float] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                text = line.strip()
                if text:
                    rates.append(_rate(path, number, text) * scale)
                if len(rates) > MAX_SECONDS:
                    raise InvalidRequest(f"{path.name} line {number}: over {MAX_SECONDS:,} seconds; give a part of it")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path.name} line 1: it cannot be read: {error}") from error
    if not rates:
        raise InvalidRequest(f"{path.name} line 1: it holds no numbers; one request rate a line is wanted")
    return np.asarray(rates)


def draw_rates(kind: str, seed: int, num_seconds: int) -> Rates:
    """Draw rates of one of KINDS, unitless as in the published files (means of about 5, 3 and 0.15; peaks up to 15).

    bursty: a level that drifts, with surges of seconds to a minute and rare silences. periodic: humps every two to
    three minutes on a low floor. sporadic: mostly nothing, short visits, rarely a larger one, and long silences.
    Raises InvalidRequest.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"there is no kind of request rates {kind!r:.40}; choose {', '.join(KINDS)}")
    if not 1 <= num_seconds <= MAX_SECONDS or seed < 0:
        raise InvalidRequest(f"give 1 to {MAX_SECONDS:,} seconds and a seed of 0 or more")
    rng = np.random.default_rng(np.random.SeedSequence([seed, KINDS.index(kind)]))
    draw = {"bursty": _bursty, "periodic": _periodic, "sporadic": _sporadic}[kind]
    rates: Rates = np.maximum(draw(rng, num_seconds), 0.0)
    return rates


def draw_arrivals(rates_per_s: Rates, seed: int, *, variation: float = 1.0) -> Rates:
    """Draw moments at which requests arrive: sorted, in [0, seconds).

    Gaps have the coefficient of variation `variation` (1: Poisson; up to 6 in the evaluation of Dilu) on a clock that
    runs with the rate, so that every second has its mean. Raises InvalidRequest.
    """
    total = float(rates_per_s.sum())
    if total > MAX_ARRIVALS:
        raise InvalidRequest(f"over {MAX_ARRIVALS:,} arrivals; lower the rates or give fewer seconds")
    if not (math.isfinite(variation) and 0.01 <= variation <= 100.0):
        raise InvalidRequest(f"the variation {variation!r} must be from 0.01 to 100")
    rng = np.random.default_rng(np.random.SeedSequence([seed, 3]))
    shape = 1.0 / variation**2
    marks = np.empty(0)
    reached = 0.0
    while reached < total:
        gaps = rng.gamma(shape, 1.0 / shape, size=max(64, math.ceil((total - reached) * 1.05)))
        more = reached + np.cumsum(gaps)
        marks = np.concatenate([marks, more])
        reached = float(marks[-1])
    marks = marks[marks < total]
    ends = np.cumsum(rates_per_s)
    seconds = np.searchsorted(ends, marks, side="right")
    seconds = np.minimum(seconds, len(rates_per_s) - 1)
    begins = ends[seconds] - rates_per_s[seconds]
    within = np.clip((marks - begins) / rates_per_s[seconds], 0.0, 1.0 - 1e-9)
    return np.sort(seconds + within)


def _rate(path: Path, number: int, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise InvalidRequest(f"{path.name} line {number}: {text!r:.40} is no number") from None
    if not (math.isfinite(rate) and 0.0 <= rate <= MAX_RATE_PER_S):
        raise InvalidRequest(f"{path.name} line {number}: a rate is from 0 to {MAX_RATE_PER_S:g}, got {text:.40}")
    return rate


def _drift(rng: np.random.Generator, num_seconds: int, mean: float, deviation: float, memory_s: float) -> Rates:
    """A level that returns to its mean, with a stationary deviation."""
    keep = math.exp(-1.0 / memory_s)
    steps = rng.standard_normal(num_seconds) * deviation * math.sqrt(1.0 - keep * keep)
    levels = np.empty(num_seconds)
    level = mean
    for second in range(num_seconds):
        level = mean + keep * (level - mean) + steps[second]
        levels[second] = level
    return levels


def _bursty(rng: np.random.Generator, num_seconds: int) -> Rates:
    rates = _drift(rng, num_seconds, 4.5, 1.5, 90.0) + rng.standard_normal(num_seconds) * 0.6
    at_s = float(rng.exponential(40.0))
    while at_s < num_seconds:
        length = float(rng.choice([6.0, 20.0, 50.0])) * float(rng.uniform(0.5, 1.5))
        rates[int(at_s) : int(at_s + length)] += rng.uniform(2.0, 7.0)
        at_s += length + float(rng.exponential(50.0))
    at_s = float(rng.exponential(400.0))
    while at_s < num_seconds:
        length = float(rng.uniform(3.0, 20.0))
        rates[int(at_s) : int(at_s + length)] = 0.0
        at_s += length + float(rng.exponential(400.0))
    return rates


def _periodic(rng: np.random.Generator, num_seconds: int) -> Rates:
    period_s = float(rng.uniform(120.0, 200.0))
    phase = float(rng.uniform(0.0, 1.0))
    turns = np.arange(num_seconds) / period_s + phase
    heights = rng.uniform(2.0, 11.0, size=int(turns[-1]) + 2)
    humps = np.sin(np.pi * (turns % 1.0)) ** 3 * heights[turns.astype(np.int64)]
    return np.asarray(humps + _drift(rng, num_seconds, 1.0, 0.6, 30.0) + rng.standard_normal(num_seconds) * 0.5)


def _sporadic(rng: np.random.Generator, num_seconds: int) -> Rates:
    rates = np.zeros(num_seconds)
    at_s = 0.0
    while at_s < num_seconds:
        length = 1 + int(rng.geometric(0.35))
        peak = float(rng.exponential(0.35)) if rng.random() < 0.97 else float(rng.uniform(1.0, 4.5))
        end = min(num_seconds, int(at_s) + length)
        rates[int(at_s) : end] = peak * rng.uniform(0.3, 1.0, size=end - int(at_s))
        at_s += length + (float(rng.exponential(5.0)) if rng.random() < 0.96 else float(rng.uniform(20.0, 140.0)))
    return rates
