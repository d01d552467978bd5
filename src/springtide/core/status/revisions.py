"""What users see of the revisions of a service."""

from __future__ import annotations

from typing import Literal

import msgspec


class RevisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of a service and the fraction `weight` of the requests that it gets.

    `starting` is a new one before its first replica is ready, `canary` one that gets a part of the requests, `current`
    the one that gets all others. `retired` was replaced and can be rolled back to, `failed` was given up, `cancelled`
    gave way to another deploy. `source` is the file that it was deployed from; `ended_at_s` is when it left.
    """

    revision: int
    state: Literal["starting", "canary", "current", "retired", "failed", "cancelled"]
    reason: str = ""
    weight: float = 0.0
    num_ready: int = 0
    num_replicas: int = 0
    began_at_s: float = 0.0
    ended_at_s: float | None = None
    source: str = ""
