"""A share in whole numbers, so that sums of shares are exact and what is given back leaves nothing behind."""

from __future__ import annotations

from typing import NamedTuple

from springtide.core.shares import TOLERANCE, Share

# Shares are added up as whole numbers of this part of a device.
UNITS = 10**12
TOLERANCE_UNITS = round(TOLERANCE * UNITS)


class ShareDemand(NamedTuple):
    """A share in whole numbers: request and limit in units (`UNITS` to a device), memory in MB."""

    request: int
    limit: int
    memory_mb: int


def demand_of(share: Share) -> ShareDemand:
    """The share in whole numbers, to the nearest unit."""
    return ShareDemand(round(share.request * UNITS), round(share.limit * UNITS), share.memory_mb)
