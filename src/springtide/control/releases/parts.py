"""What the record of a service holds about its revisions."""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.workload import InferenceService, ReleaseTerms


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that gets no requests any more: another has replaced it, or it was given up, and `reason` says why.

    `service.revision` is its number. `began_at_s` is when its release began, `ended_at_s` when it left.
    """

    service: InferenceService
    state: Literal["retired", "failed", "cancelled"]
    reason: str
    began_at_s: float
    ended_at_s: float


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A new revision on its way to the requests of its service, which another one answers meanwhile.

    `ready_at_s` is when its first replica was ready; None until then. No replica of it starts before `starts_at_s`,
    after `num_crashes` of them have crashed, the last for `crash_reason`.
    """

    service: InferenceService
    began_at_s: float
    terms: ReleaseTerms = ReleaseTerms()
    ready_at_s: float | None = None
    num_crashes: int = 0
    crash_reason: str = ""
    starts_at_s: float = 0.0

    @property
    def revision(self) -> int:
        """The number of the new revision."""
        return self.service.revision
