"""Quotes from the live platform: the request as a submission would make it, put to the platform's own policy."""

from __future__ import annotations

import threading

from springtide.control.quote import quote
from springtide.core.errors import CapacityError
from springtide.core.quote import Quote
from springtide.core.workload import Entrypoint, WorkloadId
from springtide.service import sources
from springtide.service.contract import PlatformLike
from springtide.service.experience import experience_of
from springtide.service.schemas import JobIn, check_job
from springtide.service.submission import make_job

# Quotes are worked out one at a time, so that many who ask never take the loop's time from it; so long one waits.
PATIENCE_S = 20.0


class QuoteDesk:
    """Answers quotes on the caller's thread: an instance of the policy of its own is asked about a snapshot."""

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        self._one_at_a_time = threading.Lock()

    def quote(self, request: JobIn) -> Quote:
        """Say what submitting `request` now would meet. Raises InvalidRequest, CapacityError (too many ask)."""
        check_job(request)
        sources.check_source(request.source)
        sources.check_import_root(request.source.import_root)
        if not self._one_at_a_time.acquire(timeout=PATIENCE_S):
            raise CapacityError("others are asking for quotes; ask again", retry_after_s=5.0)
        try:
            view = self._platform.view()
            known = experience_of(view, request)
            snapshot = self._platform.snapshot()
            entrypoint = Entrypoint(source_path="", object_name=request.source.object_name, kind=request.source.kind)
            job_id = WorkloadId(f"{request.name}-asked")
            job = make_job(request, job_id, entrypoint, snapshot.now_s, known)
            return quote(
                snapshot,
                self._platform.make_policy(),
                job,
                spread=known.spread,
                usd_per_device_hour=self._platform.usd_per_device_hour,
                policy_name=view.policy,
            )
        finally:
            self._one_at_a_time.release()
