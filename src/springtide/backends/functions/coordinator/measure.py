"""Measured duration and cost of steps under a job's present plan, summed from the reports of its functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from springtide.core.events import FunctionsMeasured
from springtide.core.function_search import MAX_MEASUREMENTS, FunctionMeasurement
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.wire.functions import FunctionReport, Place, StepTotals
from springtide.core.workload import WorkloadId

# A measurement is reported after this many steps, and again whenever the number of steps has doubled.
LEAST_STEPS = 3

# What a measurement is of: the plan, the global batch in samples, and the bytes that each worker exchanges.
_Kind = tuple[FunctionPlan, int, int]


class _Asked(msgspec.Struct, frozen=True):
    """The requests that a function had made to the object store after `step` steps."""

    step: int
    usage: Usage


class StepMeasurements:
    """Sums over the steps of each plan, batch and gradient size, over all attempts.

    Functions time their steps from commit to commit and leave out the first one of an attempt, so the time at which
    their reports are read does not matter. The duration of a step is taken from the place that timed the most steps
    (all places wait for each other); computation and exchange from the place that computes longest.
    """

    def __init__(self, job_id: WorkloadId) -> None:
        self._job_id = job_id
        self._plan: FunctionPlan | None = None
        self._newest: tuple[int, int] | None = None
        self._closed: dict[_Kind, StepTotals] = {}
        self._open: dict[tuple[int, int], dict[Place, dict[int, StepTotals]]] = {}
        self._told: dict[_Kind, int] = {}
        self._asked: dict[Place, tuple[int, _Asked, _Asked]] = {}

    def new_attempt(self, plan: FunctionPlan) -> None:
        """From now on reports belong to another attempt, maybe of another plan."""
        if self._plan is not None:
            for size in self._open:
                kind = (self._plan, *size)
                sums = self._sums(kind)
                self._closed.pop(kind, None)
                self._closed[kind] = sums
        self._closed = dict(list(self._closed.items())[-MAX_MEASUREMENTS:])
        self._open, self._asked, self._newest = {}, {}, None
        self._plan = plan

    def observe(self, report: FunctionReport) -> None:
        """Add a report of the present attempt."""
        totals, place = report.totals, Place(report.stage, report.replica)
        # A function that finishes before its first report is due has all its steps in the last one.
        if report.phase not in ("training", "finished") or not report.step:
            return
        known = self._asked.get(place)
        is_known = known is not None and known[0] == report.incarnation
        if report.phase == "training" or not is_known:
            # The end makes more requests than a step: it is used only where no other report is known.
            asked = _Asked(report.step, report.usage)
            self._asked[place] = (report.incarnation, known[1] if known is not None and is_known else asked, asked)
        if not totals.num_steps:
            return
        size = (totals.global_batch_size, totals.gradient_bytes)
        of_place = self._open.setdefault(size, {}).setdefault(place, {})
        before = of_place.get(report.incarnation)
        if before is None or before.num_steps <= totals.num_steps:
            of_place[report.incarnation] = totals
            self._newest = size

    def due(
        self, generation: int, steady_usd: Callable[[float], float], request_usd: Callable[[Usage], float]
    ) -> list[FunctionsMeasured]:
        """The measurements to report now. `steady_usd` gives the cost of seconds of the plan, requests excluded."""
        if self._plan is None:
            return []
        told: list[FunctionsMeasured] = []
        for size in self._open:
            kind = (self._plan, *size)
            sums, before = self._sums(kind), self._told.get(kind, 0)
            is_new = sums.num_steps > before if size != self._newest else sums.num_steps >= 2 * before
            if sums.num_steps < LEAST_STEPS or not is_new:
                continue
            self._told[kind] = sums.num_steps
            measurement = self._measurement(kind, sums, steady_usd, request_usd)
            told.append(FunctionsMeasured(job_id=self._job_id, generation=generation, measurement=measurement))
        return told

    def _measurement(
        self,
        kind: _Kind,
        sums: StepTotals,
        steady_usd: Callable[[float], float],
        request_usd: Callable[[Usage], float],
    ) -> FunctionMeasurement:
        count = sums.num_steps
        step_s = sums.step_s / count
        variance = max(0.0, sums.step_sqr / count - step_s * step_s) * count / max(1, count - 1)
        return FunctionMeasurement(
            plan=kind[0],
            global_batch_size=kind[1],
            gradient_bytes=kind[2],
            num_steps=count,
            step_s=step_s,
            deviation_s=math.sqrt(variance),
            compute_s=sums.compute_s / count,
            sync_s=sums.sync_s / count,
            usd=steady_usd(step_s) + self._requests_usd(request_usd),
        )

    def _requests_usd(self, request_usd: Callable[[Usage], float]) -> float:
        """The cost of all functions' requests in one step, from the difference between two reports of each."""
        found: list[float] = []
        for _, first, last in self._asked.values():
            num_steps = last.step - first.step
            if num_steps > 0:
                found.append((request_usd(last.usage) - request_usd(first.usage)) / num_steps)
        if not found:
            # Only one report each: the mean over all steps so far, the start included.
            found = [request_usd(last.usage) / last.step for _, _, last in self._asked.values()]
        mean = math.fsum(found) / len(found) if found else 0.0
        # Places without a report yet are assumed to make as many requests as the others.
        return mean * (self._plan.num_functions if self._plan is not None else len(found))

    def _sums(self, kind: _Kind) -> StepTotals:
        """The sums of one kind over the ended attempts and the present one."""
        places = [_added(invocations) for _, invocations in sorted(self._open.get(kind[1:], {}).items())]
        closed = self._closed.get(kind)
        if not places:
            return closed or StepTotals(global_batch_size=kind[1], gradient_bytes=kind[2])
        # All places make the same steps: the one that timed the most gives their duration, the slowest its computation.
        longest = max(places, key=lambda totals: totals.num_steps)
        slowest = max(places, key=lambda totals: totals.compute_s / totals.num_steps)
        share = longest.num_steps / slowest.num_steps
        now = msgspec.structs.replace(longest, compute_s=slowest.compute_s * share, sync_s=slowest.sync_s * share)
        return now if closed is None else _sum(closed, now)


def _added(invocations: Mapping[int, StepTotals]) -> StepTotals:
    """The sum over the functions that filled one place one after the other."""
    first, *others = [totals for _, totals in sorted(invocations.items())]
    for other in others:
        first = _sum(first, other)
    return first


def _sum(one: StepTotals, other: StepTotals) -> StepTotals:
    return StepTotals(
        global_batch_size=other.global_batch_size,
        gradient_bytes=other.gradient_bytes,
        num_steps=one.num_steps + other.num_steps,
        step_s=one.step_s + other.step_s,
        step_sqr=one.step_sqr + other.step_sqr,
        compute_s=one.compute_s + other.compute_s,
        sync_s=one.sync_s + other.sync_s,
    )
