"""Parses `--pools` and `--day`: the slots that each pool owns, the policy that moves them, the length of a day."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, get_args

from springtide.core.errors import InvalidRequest
from springtide.core.resources import Pool
from springtide.core.tide import DAY_S, Tide

# The pools that can own slots. "shared" cannot: it is the pool of all slots on a platform without pools.
OWNERS: tuple[Pool, ...] = tuple(pool for pool in get_args(Pool) if pool != "shared")
# The strategy that moves slots between pools if only a training policy is named.
STRATEGY = "tide"
# Reclaiming a slot takes some seconds on a busy machine, because a job stops or shrinks and a replica starts. The
# policy could not react to a finer resolution of the day.
SHORTEST_BIN_S = 5.0
SHORTEST_DAY_S = 20.0
_USUAL_BINS_PER_DAY = Tide().bins_per_day


def parse_pools(value: Any) -> dict[Pool, int]:
    """Parse "inference=2", "training=2,inference=2" or a mapping like that; "" has no pools.

    Raises InvalidRequest for an unknown pool or an invalid number.
    """
    if isinstance(value, Mapping):
        value = ",".join(f"{name}={count}" for name, count in value.items())
    if not isinstance(value, str):
        raise _unreadable(value)
    found: dict[Pool, int] = {}
    for part in value.split(",") if value.strip() else ():
        name, equals, count = (piece.strip() for piece in part.partition("="))
        owner = next((owner for owner in OWNERS if owner == name), None)
        if not equals:
            raise _unreadable(value)
        if owner is None:
            raise InvalidRequest(f"there is no pool {name!r:.40}; the pools are {' and '.join(OWNERS)}, as inference=2")
        if owner in found:
            raise InvalidRequest(f"the pool {name} is named twice in {value!r:.80}; name it once")
        if not (count.isascii() and count.isdecimal() and len(count) <= 6):
            raise InvalidRequest(f"the pool {name} needs a whole number of slots, not {count!r:.40}; like {name}=2")
        found[owner] = int(count)
    return found


def write_pools(pools: Mapping[Pool, int]) -> str:
    """Write pools in the format that `parse_pools` reads: "training=2,inference=2"."""
    return ",".join(f"{name}={count}" for name, count in pools.items())


def policy_with_pools(policy: str, pools: Mapping[Pool, int]) -> str:
    """The name of the policy that decides: with pools, a plain training policy is combined with STRATEGY."""
    if not pools or "/" in policy:
        return policy
    return f"{STRATEGY}/{policy}"


def midnight_before_s(unix_s: float) -> float:
    """The last midnight of this machine's local time, in Unix time."""
    moment = datetime.fromtimestamp(unix_s).astimezone()
    return unix_s - timedelta(hours=moment.hour, minutes=moment.minute, seconds=moment.second).total_seconds()


def tide_of(day_s: float | None) -> Tide:
    """An empty record of days of this length. Raises InvalidRequest for a day that is too short."""
    day_s = DAY_S if day_s is None else day_s
    if not SHORTEST_DAY_S <= day_s <= 1e7:
        raise InvalidRequest(
            f"a day of {day_s:g} s cannot be followed: it takes some seconds to hand a slot over; "
            f"use at least {SHORTEST_DAY_S:g} s, like --day 2m"
        )
    return Tide(day_s=day_s, bins_per_day=min(_USUAL_BINS_PER_DAY, int(day_s // SHORTEST_BIN_S)))


def _unreadable(value: Any) -> InvalidRequest:
    return InvalidRequest(f"pools {value!r:.80} is not a division of slots; write it like inference=2")
