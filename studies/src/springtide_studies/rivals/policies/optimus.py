"""Optimus: one worker for every job, then one at a time to the job that gains most (marginal gain).

Peng et al., "Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning Clusters", EuroSys 2018, sections 3.2
and 4.1: from a speed curve and the estimated steps left it minimises the sum of completion times. Each job gets one
worker first, so that none starves; then the job whose remaining time shrinks most per added worker gets the next one,
until none gains. It decides anew every ten minutes. Elastic; no deadlines.
Differences: all-reduce workers, so there are no parameter servers to count and a worker is the only resource. Steps
left are known or not known, never fitted from a loss curve (3.1): a job whose length or speed is not known gets its
minimum and what the others leave, and the paper's factor for young jobs (0.95) has nothing to correct. "One worker" is
the job's minimum, a step goes to the next number of workers that is faster. With more jobs than devices the shortest
go first. Between two intervals devices are not moved, but a new job starts on its minimum where some are idle.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.core.workload import JobState
from springtide.perf.curve import SpeedCurve, curve_of
from springtide.scheduling.decisions.fingerprint import Fingerprints, Reads
from springtide.scheduling.decisions.recall import State, decide_once, recall_fingerprints, recall_reads
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.gangs import devices_text, remaining_s
from springtide_studies.rivals.policies.gangs import Gangs


class Optimus(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs by marginal gain, anew every `interval_s` (the paper's ten minutes)."""

    interval_s: float = 600.0

    reads: ClassVar[Reads] = recall_reads(
        "job", "progress.progress_at_s", "state", "progress.step", "submitted_at_s", "learnt.throughput_samples_per_s"
    )

    def make_derived(self) -> Fingerprints:
        """The fingerprints to keep between two decisions."""
        return recall_fingerprints(repr(self))

    def decide(self, snapshot: Snapshot, derived: Fingerprints | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_once(repr(self), snapshot, self._decide, derived)

    def _decide(self, shares: AllocationLedger, state: State) -> tuple[float | None, dict[str, Any]]:
        gangs = Gangs(shares)
        serve_minimum(shares)
        serve_demand(shares)
        next_s = state.get("next_s")
        if next_s is None or gangs.now_s >= next_s:
            self._share_out(gangs)
            next_s = gangs.now_s + self.interval_s
        else:
            self._keep_between_intervals(gangs)
        gangs.note_stopped("jobs that end sooner need the devices")
        gangs.note_waiting(lambda view: f"waits for {devices_text(_least(gangs, view))}: shorter jobs come first")
        return (next_s, {"next_s": next_s}) if gangs.views else (None, {})

    def _keep_between_intervals(self, gangs: Gangs) -> None:
        """Between two intervals, let each job keep its devices and new jobs start on their minimum."""
        shares = gangs.shares
        for view in gangs.views:
            if gangs.holds(view):
                count = max(_least(gangs, view), min(gangs.held[view.job.job_id], _most(gangs, view)))
                shares.raise_to(view.job.job_id, count)
        for view in gangs.views:
            if not shares.of(view.job.job_id):
                shares.raise_to(view.job.job_id, _least(gangs, view))

    def _share_out(self, gangs: Gangs) -> None:
        shares = gangs.shares
        views = sorted(gangs.views, key=lambda view: self._rank(gangs, view))
        for view in views:
            shares.raise_to(view.job.job_id, _least(gangs, view))
        heap: list[tuple[bool, float, int, int]] = []
        curves = [curve_of(view) for view in views]
        steps_left = [_steps_left(gangs, view) for view in views]

        def offer(number: int) -> None:
            """Put a job's next step, if it has one, into the heap."""
            curve, left = curves[number], steps_left[number]
            count = shares.of(views[number].job.job_id)
            size = _next_size(curve, count)
            if count and size and views[number].job.elastic:
                # A job whose end cannot be predicted comes after the others, by speedup.
                is_unknown = math.isinf(left)
                weight = curve.rate(curve.sizes[0]) if is_unknown else left
                gain_s = weight / curve.rate(count) - weight / curve.rate(size)
                heapq.heappush(heap, (is_unknown, -gain_s / (size - count), number, size))

        for number in range(len(views)):
            offer(number)
        while heap and shares.left:
            _, _, number, size = heapq.heappop(heap)
            if shares.raise_to(views[number].job.job_id, size):
                offer(number)

    def _rank(self, gangs: Gangs, view: JobView) -> tuple[float, bool, float]:
        """Sort key for first workers: the shortest job first; those of unknown length last, running ones first."""
        left_s = remaining_s(view, max(1, _least(gangs, view)), gangs.now_s, gangs.held.get(view.job.job_id, 0))
        return (left_s, not gangs.holds(view), view.submitted_at_s)


def _least(gangs: Gangs, view: JobView) -> int:
    """The fewest workers that run this job at all; for a script, whose number is fixed, all of them."""
    if not view.job.elastic:
        return gangs.size(view)
    sizes = curve_of(view).sizes
    least = sizes[0] if sizes else view.bounds.min_workers
    return least if least <= gangs.total else 0


def _most(gangs: Gangs, view: JobView) -> int:
    sizes: Sequence[int] = curve_of(view).sizes
    return sizes[-1] if sizes and view.job.elastic else _least(gangs, view)


def _next_size(curve: SpeedCurve, count: int) -> int | None:
    index = bisect.bisect_right(curve.sizes, count)
    return curve.sizes[index] if index < len(curve.sizes) else None


def _steps_left(gangs: Gangs, view: JobView) -> float:
    """Steps left, with those since the last report taken off; infinite while length or speed are not known."""
    curve = curve_of(view)
    if view.total_steps is None or curve.source == "guess":
        return math.inf
    steps = float(view.total_steps - view.progress.step)
    if view.state is JobState.RUNNING:
        steps -= curve.rate(gangs.held.get(view.job.job_id, 0)) * max(0.0, gangs.now_s - view.progress.progress_at_s)
    return max(0.0, steps)
