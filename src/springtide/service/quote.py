"""Quotes from the live platform: the request as a submission would make it, put to the platform's own policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from springtide.control.quote import quote
from springtide.control.records import JobRecord
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
        with self._turn(PATIENCE_S):
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

    def offers(self, record: JobRecord) -> tuple[str, ...]:
        """What would be accepted now instead of a job that was refused: the changes, as commands take them.

        Its deadline counts anew from now. Empty if others are asking, too.
        """
        platform = self._platform
        try:
            with self._turn(0.0):
                snapshot = platform.snapshot()
                goal = record.job.goal
                if goal.deadline_s is not None:
                    goal = replace(goal, deadline_s=snapshot.now_s + goal.deadline_s - record.submitted_at_s)
                job = replace(record.job, job_id=WorkloadId(f"{record.job.name}-asked"), goal=goal)
                price = platform.usd_per_device_hour
                answer = quote(snapshot, platform.make_policy(), job, usd_per_device_hour=price)
        except CapacityError:
            return ()
        if answer.verdict == "accepted":
            return ("submit it again: now it would be accepted",)
        return tuple(offer.change for offer in answer.alternatives)

    @contextmanager
    def _turn(self, patience_s: float) -> Iterator[None]:
        if not self._one_at_a_time.acquire(timeout=patience_s):
            raise CapacityError("others are asking for quotes; ask again", retry_after_s=5.0)
        try:
            yield
        finally:
            self._one_at_a_time.release()
