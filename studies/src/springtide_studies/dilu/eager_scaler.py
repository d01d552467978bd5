"""The rivals of the co-scaler: one that follows every change of the load, and one that keeps replicas warm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class EagerRules(msgspec.Struct, frozen=True, kw_only=True):
    """FaST-GShare's reactive scaling (ICPP'23, algorithm 1; window and period are those of its published autoscaler).

    Every `period` seconds the mean load of the last `window` seconds is divided by what one replica does at its static
    share, `throughput_per_s`; replicas are started and stopped to meet that number at once.
    """

    throughput_per_s: float
    min_replicas: int = 1
    max_replicas: int = 1
    window: int = 10
    period: int = 2


class EagerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted, the newest loads (requests a second) and the seconds seen so far."""

    wanted: int = 0
    rates_per_s: tuple[float, ...] = ()
    num_seen: int = 0


def scale_eagerly(rules: EagerRules, state: EagerState, rate_per_s: float) -> EagerState:
    """Take in one more second; `wanted` of the answer is how many replicas are to run."""
    rates = (*state.rates_per_s, rate_per_s)[-rules.window :]
    num_seen = state.num_seen + 1
    wanted = state.wanted
    if num_seen % rules.period == 0 or wanted == 0:
        wanted = math.ceil(math.fsum(rates) / len(rates) / rules.throughput_per_s)
    return EagerState(
        wanted=max(rules.min_replicas, min(rules.max_replicas, wanted)), rates_per_s=rates, num_seen=num_seen
    )


class KeepAliveRules(msgspec.Struct, frozen=True, kw_only=True):
    """INFless's scaling (ASPLOS'22, section 3.5): out as the load asks, in after a replica was not needed for a time.

    `keep_alive_s` comes from what is known of the function before (`keep_alive_of`). A replica does
    `throughput_per_s` at its static share.
    """

    throughput_per_s: float
    keep_alive_s: int
    min_replicas: int = 0
    max_replicas: int = 1


class KeepAliveState(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted, and how many replicas each of the newest seconds needed, oldest first."""

    wanted: int = 0
    needed: tuple[int, ...] = ()


def scale_with_keep_alive(rules: KeepAliveRules, state: KeepAliveState, rate_per_s: float) -> KeepAliveState:
    """Take in one more second; `wanted` of the answer is how many replicas are to run, warm ones included."""
    needed = (*state.needed, math.ceil(rate_per_s / rules.throughput_per_s))[-max(1, rules.keep_alive_s) :]
    return KeepAliveState(wanted=max(rules.min_replicas, min(rules.max_replicas, max(needed))), needed=needed)


def keep_alive_of(
    rates_per_s: Sequence[float],
    *,
    num_short: int = 200,
    long_fraction: float = 0.5,
    tail_fraction: float = 0.99,
    unknown_s: int = 60,
) -> int:
    """Return for how many seconds a replica is kept that has nothing to do, from a load of one value a second.

    A long and a short histogram of the silences, mixed (INFless's LSTH; the tail is that of Azure's hybrid histogram,
    ATC'20). Where there was no silence, nothing can be learnt: `unknown_s`.
    """
    long, short = _silences(rates_per_s), _silences(rates_per_s[:num_short])
    if not long:
        return unknown_s
    tail = long_fraction * _quantile(long, tail_fraction) + (1 - long_fraction) * _quantile(
        short or long, tail_fraction
    )
    return max(1, math.ceil(tail))


def _silences(rates_per_s: Sequence[float]) -> list[int]:
    """The lengths of the spans without a request, in seconds, sorted."""
    spans: list[int] = []
    length = 0
    for rate in (*rates_per_s, 1.0):
        if rate > 0:
            spans += [length] if length else []
            length = 0
        else:
            length += 1
    return sorted(spans)


def _quantile(ordered: Sequence[int], fraction: float) -> float:
    """Linear between neighbours."""
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
