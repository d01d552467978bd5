"""How devices are shared, and what enforces a share."""

from __future__ import annotations

from collections.abc import Callable

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.shares import Share
from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.shares import SharingStatus
from springtide.service.ports import PlatformLike


class SharingReports:
    """How shares are enforced, and how long services take to start.

    `first_answer_s(name)` is how long the first answer of the service took after its last start from nothing; None
    where that is not known. `admission_of(name)` is what its gateway says of the requests that it lets in and refuses.
    """

    def __init__(
        self,
        platform: PlatformLike,
        first_answer_s: Callable[[str], float | None] = lambda name: None,
        admission_of: Callable[[str], AdmissionStatus | None] = lambda name: None,
    ) -> None:
        self._platform = platform
        self.first_answer_s = first_answer_s
        self._admission_of = admission_of

    def admission(self, record: JobRecord | ServiceRecord) -> AdmissionStatus | None:
        """What the gateway says of a service's requests; None for a job, or before it knows the service."""
        return self._admission_of(record.service.name) if isinstance(record, ServiceRecord) else None

    def enforced(self, share: Share | None) -> str:
        """What enforces a share; empty for a whole device."""
        return "" if share is None else self._platform.sharing().enforced

    def report(self) -> SharingStatus:
        """All shared devices at this instant."""
        return self._platform.sharing()
