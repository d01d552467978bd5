"""The state of a running platform as others may play it forward: what GET /v1/export answers."""

from __future__ import annotations

import msgspec

from springtide.core.decision import Snapshot


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy named `policy` was shown at `snapshot.now_s`, with its memory.

    `wall_clock_offset_s` turns the platform's clock into Unix time.
    """

    policy: str
    snapshot: Snapshot
    wall_clock_offset_s: float
    usd_per_device_hour: float = 0.0
