"""Shares of a device: the rate that a holder is guaranteed, the most it may use, and which shares fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from springtide.core.errors import InvalidRequest

# Sums of shares are compared with this much tolerance: 0.1 + 0.2 + 0.7 fills a device.
TOLERANCE = 1e-9
# The largest sum of the limits on one device (Dilu, section 3.3: the oversubscription gamma).
MAX_LIMIT = 1.5


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica or a worker holds of one device (Dilu, section 3.2).

    `request` is the fraction of the device's computing rate (0 to 1) that the holder gets whenever it needs it, `limit`
    (from `request` to 1) the most that it may use. `memory_mb` is the device memory that it holds (0: not counted).
    """

    request: float
    limit: float
    memory_mb: int = 0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a device is held: the sums over its sharers. `is_exclusive`: one holder has the whole device."""

    num_holders: int = 0
    request: float = 0.0
    limit: float = 0.0
    memory_mb: int = 0
    is_exclusive: bool = False


FREE = Load()


def load_of(shares: Iterable[Share | None]) -> Load:
    """Sum up the shares on one device; None stands for a holder of the whole device."""
    held = list(shares)
    if not held:
        return FREE
    parts = [share for share in held if share is not None]
    return Load(
        num_holders=len(held),
        request=math.fsum(share.request for share in parts),
        limit=math.fsum(share.limit for share in parts),
        memory_mb=sum(share.memory_mb for share in parts),
        is_exclusive=len(parts) < len(held),
    )


def has_room(
    load: Load,
    share: Share | None,
    memory_mb: int = 0,
    *,
    max_request: float = 1.0,
    max_limit: float = MAX_LIMIT,
) -> bool:
    """Whether one more holder fits on a device with `memory_mb` of memory (0: it is not counted).

    `max_request` and `max_limit` bound the sums of requests and limits (Dilu's Omega and gamma). A holder of the whole
    device (None) needs an empty one and leaves no room.
    """
    if load.is_exclusive or (share is None and load.num_holders):
        return False
    if share is None:
        return True
    return (
        load.request + share.request <= max_request + TOLERANCE
        and load.limit + share.limit <= max_limit + TOLERANCE
        and (not memory_mb or load.memory_mb + share.memory_mb <= memory_mb)
    )


def make_share(request: float, limit: float | None = None, memory_mb: int = 0) -> Share:
    """Build a checked share; without a limit it is twice the request (Dilu, section 3.2), at most 1.

    Raises InvalidRequest.
    """
    if not (math.isfinite(request) and 0.0 < request <= 1.0):
        raise InvalidRequest(
            f"the request of a share is a fraction of a device, above 0 and at most 1, got {request:g}"
            + ("; each worker and replica runs on one device: ask for more of these instead" if request > 1.0 else "")
        )
    limit = min(1.0, 2.0 * request) if limit is None else limit
    if not (math.isfinite(limit) and request <= limit <= 1.0):
        raise InvalidRequest(
            f"the limit of a share lies between its request ({request:g}) and 1, got {limit:g}; leave it out for twice "
            "the request"
        )
    if memory_mb < 0:
        raise InvalidRequest(f"the memory of a share is in MB and not negative, got {memory_mb}")
    return Share(request=request, limit=limit, memory_mb=memory_mb)
