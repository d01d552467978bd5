"""Quotes from the live platform: asks the platform's policy what would happen to a job if it were submitted now."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from springtide.control.quotes.confidence import SpeedRisk
from springtide.control.quotes.quote import quote
from springtide.control.records import JobRecord
from springtide.core.errors import CapacityError, InvalidRequest
from springtide.core.options.rules import NO_SERVICE, ONLY_DECLARED
from springtide.core.status.quote import Quote
from springtide.core.workload import Entrypoint, WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.quotes.function_quote import quote_on_functions
from springtide.service.quotes.place_choice import answer_of, choose_place, with_other_place
from springtide.service.status.sharing import SharingReports
from springtide.service.submission import sources
from springtide.service.submission.experience import exact_evidence, experience_of, unlike_evidence
from springtide.service.submission.function_checks import check_container, check_functions, check_machines
from springtide.service.submission.function_menus import menus_of, service_of
from springtide.service.submission.schemas import JobIn, check_job, placed
from springtide.service.submission.shares import check_devices
from springtide.service.submission.submission import make_job

# Quotes are computed one at a time, so that many callers do not slow down the control loop. A caller waits this long.
MAX_WAIT_S = 20.0


class LiveQuotes:
    """Computes quotes on the caller's thread, with a new instance of the policy and a snapshot of the platform."""

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        self._shares = SharingReports(platform)
        self._one_at_a_time = threading.Lock()

    def quote(self, request: JobIn) -> Quote:
        """Predict what would happen if `request` were submitted now. Raises InvalidRequest, CapacityError."""
        check_job(request)
        check_functions(request)
        check_container(request.container, has_pods=self._platform.cluster() is not None)
        sources.check_source(request.source)
        self._platform.source_store.import_root(request.source.import_root)
        with self.turn(MAX_WAIT_S):
            view = self._platform.view()
            known = experience_of(view, request, self._platform.source_store.holds)
            snapshot = self._platform.snapshot()
            source = request.source
            entrypoint = Entrypoint(
                source_path="", object_name=source.object_name, kind=source.kind, library=source.library
            )
            job_id = WorkloadId(f"{request.name}-asked")

            def on_cluster() -> Quote:
                check_machines(request)
                job = make_job(request, job_id, entrypoint, snapshot.now_s, known)
                check_devices(view, request, has_pods=self._platform.cluster() is not None)
                found = quote(
                    snapshot,
                    self._platform.make_policy(),
                    job,
                    spread=known.spread,
                    risk=SpeedRisk(known.outcomes),
                    usd_per_device_hour=self._platform.usd_per_device_hour,
                    policy_name=view.policy,
                )
                evidence = (*found.evidence, *unlike_evidence(known), *exact_evidence(request, known))
                enforced = self._shares.enforced(job.share)
                each = job.devices_each
                return replace(found, share=job.share, enforced=enforced, devices_each=each, evidence=evidence)

            def on_functions() -> Quote:
                if service_of(view) is None:
                    raise InvalidRequest(NO_SERVICE)
                asked = placed(request, "functions")
                if asked.source.kind == "function" and asked.options.layer_profile is None:
                    raise InvalidRequest(f"no profile of its layers came with it: {ONLY_DECLARED}")
                check_job(asked)
                check_functions(asked)
                has_store = self._platform.has_parameter_store
                menus = menus_of(view, request, known.family, snapshot.now_s, has_parameter_store=has_store)
                job = make_job(request, job_id, entrypoint, snapshot.now_s, known, menu=menus.menu, search=menus.search)
                policy = self._platform.make_policy()
                return quote_on_functions(snapshot, policy, job, menus, policy_name=view.policy)

            if request.options.on == "auto":
                return choose_place(answer_of(on_cluster), answer_of(on_functions))
            if request.options.on == "functions":
                return with_other_place(on_functions(), answer_of(on_cluster), "cluster")
            answer = on_cluster()
            if request.options.layer_profile is None or service_of(view) is None:
                return answer
            return with_other_place(answer, answer_of(on_functions), "functions")

    def offers(self, record: JobRecord) -> tuple[str, ...]:
        """Changes, as command line options, with which a refused job would be accepted now.

        The job's deadline is counted from now. Empty if another quote is being computed.
        """
        platform = self._platform
        try:
            with self.turn(0.0):
                snapshot = platform.snapshot()
                goal = record.job.goal
                if goal.deadline_s is not None:
                    goal = replace(goal, deadline_s=snapshot.now_s + goal.deadline_s - record.lifecycle.submitted_at_s)
                job = replace(record.job, job_id=WorkloadId(f"{record.job.name}-asked"), goal=goal)
                price = platform.usd_per_device_hour
                risk = SpeedRisk(platform.view().outcomes)
                answer = quote(snapshot, platform.make_policy(), job, risk=risk, usd_per_device_hour=price)
        except CapacityError:
            return ()
        if answer.verdict == "accepted":
            return ("submit it again: now it would be accepted",)
        return tuple(offer.change for offer in answer.alternatives)

    @contextmanager
    def turn(self, max_wait_s: float) -> Iterator[None]:
        """While no other quote is computed. Raises CapacityError if that takes longer than `max_wait_s`."""
        if not self._one_at_a_time.acquire(timeout=max_wait_s):
            raise CapacityError("too many quotes are requested at once; ask again in a few seconds", retry_after_s=5.0)
        try:
            yield
        finally:
            self._one_at_a_time.release()
