"""Moves jobs to functions whose deadline is lost on machines, where functions would still make it: once at most.

Only jobs that were submitted with `--on auto` are moved: their owners left the place to the platform, and their layers
came with them. What is decided is an event of the journal, so a restart decides nothing again.
"""

from __future__ import annotations

import logging
import threading

from springtide.control.quotes.budget import money
from springtide.control.records import JobRecord
from springtide.core.errors import SpringtideError
from springtide.core.quantities import format_duration
from springtide.core.workload import JobState, WorkloadId
from springtide.service.ports import PlatformLike, ViewLike
from springtide.service.quotes.moves import JobMoves, makes_goal
from springtide.service.status.adaptation import num_samples_left
from springtide.service.status.status import planned_moments
from springtide.service.submission.function_menus import kept_layers, service_of

_log = logging.getLogger(__name__)
WATCH_S = 5.0
# A deadline counts as lost if it is for so long: a slow moment alone moves no job.
SETTLED_S = 10.0
# A job for which functions are of no use now is looked at again after this long: plans of machines change, too.
AGAIN_S = 60.0


class MoveWatch:
    """Looks at the jobs on machines every WATCH_S, on a thread of its own from `start` to `stop`."""

    def __init__(self, platform: PlatformLike, moves: JobMoves) -> None:
        self._platform = platform
        self._moves = moves
        self._is_stopping = threading.Event()
        self._lost_since_s: dict[WorkloadId, float] = {}
        self._again_at_s: dict[WorkloadId, float] = {}
        self._thread = threading.Thread(target=self._main, name="springtide-moves", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no further move."""
        self._is_stopping.set()

    def _main(self) -> None:
        while not self._is_stopping.wait(WATCH_S):
            try:
                self.look()
            except SpringtideError as error:
                _log.warning("jobs whose deadline is lost could not be moved: %s", error)

    def look(self) -> None:
        """Move the jobs that are to move now. Raises BackendError if the loop takes no events."""
        view = self._platform.view()
        if service_of(view) is None:
            return
        now_s = self._platform.now_s()
        found = {job_id: lost_on_machines(record, view, now_s) for job_id, record in view.jobs.items()}
        lost = {job_id: why for job_id, why in found.items() if why}
        self._lost_since_s = {job_id: self._lost_since_s.get(job_id, now_s) for job_id in lost}
        self._again_at_s = {job_id: at_s for job_id, at_s in self._again_at_s.items() if job_id in lost}
        for job_id, why in lost.items():
            due_s = max(self._lost_since_s[job_id] + SETTLED_S, self._again_at_s.get(job_id, 0.0))
            if now_s >= due_s and not self._is_stopping.is_set():
                self._again_at_s[job_id] = now_s + AGAIN_S
                self._consider(view.jobs[job_id], why)

    def _consider(self, record: JobRecord, why: str) -> None:
        if kept_layers(self._platform.workload_dir(record.workload_id)) is None:
            return
        try:
            rest = self._moves.rest_of(record)
        except SpringtideError as error:
            _log.info("%s stays on machines, although %s: %s", record.workload_id, why, error)
            return
        if makes_goal(rest.quote):
            finish_s, cost_usd = rest.quote.finish_s.p90 or 0.0, rest.quote.cost_usd.p90 or 0.0
            reason = f"{why}; on functions what is left takes {format_duration(finish_s)} and {money(cost_usd)} at most"
            self._moves.request(record, rest.menu, reason, is_automatic=True)


def lost_on_machines(record: JobRecord, view: ViewLike, now_s: float) -> str:
    """Why the deadline of a job is lost on machines; empty if it is not, or if the job may not be moved.

    A deadline that was not promised is lost if the plan ends after it or, without a plan, if the job would end after it
    at its mean speed on as many workers as it has.
    """
    deadline_s = record.job.goal.deadline_s
    may_move = bool(record.job.place_reason) and not record.job.is_on_functions and record.move is None
    is_going_on = record.lifecycle.outcome is None and not record.is_over and not record.bounds.is_paused
    if deadline_s is None or not may_move or not is_going_on or record.state is JobState.PREEMPTING:
        return ""
    claim = view.claims.get(record.workload_id)
    if claim is not None and claim.code == "given_up":
        return "its deadline is lost on machines"
    if claim is not None and claim.code == "kept_in_time":
        return ""
    _, ends_s = planned_moments(record, view.future.get(record.workload_id, ()))
    if ends_s is None:
        left = num_samples_left(record)
        speed = record.learnt.throughput_samples_per_s.get(record.world_size)
        ends_s = now_s + left / speed if left is not None and speed else None
    if ends_s is not None and ends_s > deadline_s:
        return f"machines would miss its deadline by {format_duration(ends_s - deadline_s)}"
    return ""
