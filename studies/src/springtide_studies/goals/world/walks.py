"""How long an all-reduce really takes in the world of goals: walked event by event on unequal links, never a formula.

Walks are kept by shape: a gradient's time over its size and link, S/w, depends on the schedule and on t_lat over S/w
alone, so every seed and model takes its own from the same few walks.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from springtide.collectives.schedule import make_schedule
from springtide.core.functions import Collective
from springtide_studies.communication.collective_walk import StoreLink, walk_s

# Numbers of workers that are walked; between them times follow a straight line over log n.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
# How unequal the workers' links and their requests are: standard deviations of the logarithms.
LINK_SIGMA = 0.08
LATENCY_SIGMA = 0.35
# A store that is polled shows this share of each wait late that an object is there.
POLLED_LATE_FRACTION = 0.045
_LATENCY_BASE = 4.0
_LATENCY_STEPS = 24
# Finer chunks than fit into so many objects change the time by less than a hundredth.
_MOST_OBJECTS = 40_000
_ELEMENTS = 4_000_000
_LINKS_SEED = 7151


@cache
def _unequal() -> tuple[tuple[float, float], ...]:
    """For each rank how fast its link is and how long its requests take, over the usual."""
    rng = np.random.default_rng(_LINKS_SEED)
    speeds = np.exp(LINK_SIGMA * rng.standard_normal(KNOTS[-1]))
    latencies = np.exp(LATENCY_SIGMA * rng.standard_normal(KNOTS[-1]))
    return tuple((float(speed), float(latency)) for speed, latency in zip(speeds, latencies, strict=True))


@cache
def _walked(collective: Collective, chunks: int, in_flight: int, n: int, step: int, is_polled: bool) -> float:
    """The all-reduce of n workers in S/w, where a request takes _LATENCY_BASE ** step of S/w (0 for the last step)."""
    ratio = 0.0 if step == -_LATENCY_STEPS else _LATENCY_BASE**step
    objects = n * n * (1 if collective in ("lambdaml", "funcpipe") else chunks)
    fitting = max(1, min(chunks, chunks * _MOST_OBJECTS // max(1, objects)))
    bytes_per_s = _ELEMENTS * 4.0
    links = [
        StoreLink(
            up_bytes_per_s=bytes_per_s * speed,
            down_bytes_per_s=bytes_per_s * speed,
            latency_s=ratio * latency,
            late_fraction=POLLED_LATE_FRACTION if is_polled else 0.0,
        )
        for speed, latency in _unequal()[:n]
    ]
    return walk_s(make_schedule(collective, n, _ELEMENTS, fitting), links, in_flight)


def _over_latency(collective: Collective, chunks: int, in_flight: int, n: int, ratio: float, is_polled: bool) -> float:
    """The same for any latency over S/w: a straight line between two walks."""
    if n == 1:
        return 0.0
    step = max(1 - _LATENCY_STEPS, math.floor(math.log(max(ratio, 1e-12), _LATENCY_BASE)))
    low, high = _LATENCY_BASE**step, _LATENCY_BASE ** (step + 1)
    if ratio < low:
        step, low, high = -_LATENCY_STEPS, 0.0, low
        upper = 1 - _LATENCY_STEPS
    else:
        upper = step + 1
    share = min(1.0, max(0.0, (ratio - low) / (high - low)))
    below = _walked(collective, chunks, in_flight, n, step, is_polled)
    above = _walked(collective, chunks, in_flight, n, upper, is_polled)
    return (1.0 - share) * below + share * above


def walked_sync_s(
    collective: Collective,
    n: int,
    num_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    *,
    chunks: int = 1,
    in_flight: int = 4,
    is_polled: bool = True,
) -> float:
    """Seconds of an all-reduce of `num_bytes` among n workers whose usual link carries `bytes_per_s` each way."""
    if n <= 1 or num_bytes <= 0:
        return 0.0
    unit_s = num_bytes / bytes_per_s
    ratio = latency_s / unit_s
    above = next((knot for knot in KNOTS if knot >= n), KNOTS[-1])
    below = max(knot for knot in KNOTS if knot <= n)
    high = _over_latency(collective, chunks, in_flight, above, ratio, is_polled)
    if above == below:
        return unit_s * high
    low = _over_latency(collective, chunks, in_flight, below, ratio, is_polled)
    share = math.log(n / below) / math.log(above / below)
    return unit_s * ((1.0 - share) * low + share * high)
