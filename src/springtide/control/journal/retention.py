"""How long a journal keeps its steps, and the workloads that have ended."""

from __future__ import annotations

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s, parse_size_bytes

DAY_S = 86_400.0
KEEP_STEPS = "7d,2GB"
KEEP_ENDED = "90d"


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Steps are kept for `steps_s`, but not more than `steps_bytes` of them as they are stored; ended jobs `ended_s`.

    The steps since the older of the two newest snapshots are always kept.
    """

    steps_s: float = 7 * DAY_S
    steps_bytes: int = 2 * 10**9
    ended_s: float = 90 * DAY_S


def retention_of(steps: str, ended: str | float) -> Retention:
    """What `7d,2GB` and `90d` ask for. Of the first, either part may be left out. Raises InvalidRequest."""
    found = Retention(ended_s=parse_duration_s(ended, "how long ended jobs are kept"))
    for part in filter(None, (part.strip() for part in steps.split(","))):
        try:
            found = msgspec.structs.replace(found, steps_s=parse_duration_s(part))
        except InvalidRequest:
            try:
                found = msgspec.structs.replace(found, steps_bytes=parse_size_bytes(part))
            except InvalidRequest:
                raise InvalidRequest(
                    f"steps are kept for a time, up to a size, like {KEEP_STEPS}; {part!r:.40} is neither"
                ) from None
    return found
