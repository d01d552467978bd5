"""What steps take and cost as a job's present plan: put together from the functions' own sums, told now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from springtide.core.events import FunctionsMeasured
from springtide.core.function_search import MAX_MEASUREMENTS, FunctionMeasurement
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.wire.functions import FunctionReport, Place, StepTotals
from springtide.core.workload import WorkloadId

# A measurement is told after so many steps, and whenever it rests on twice as many as the one told before.
LEAST_STEPS = 3

# Of what is measured: the plan, the global batch, and the bytes that each worker exchanges.
_Kind = tuple[FunctionPlan, int, int]


class _Asked(msgspec.Struct, frozen=True):
    """What a function had asked of the object store after so many steps."""

    step: int
    usage: Usage


class Measuring:
    """Sums up the steps of each plan, batch and gradient size, over all attempts.

    Functions time their steps from commit to commit and leave out the first one of an attempt, so nothing depends on
    when their reports are read. A step takes what it takes the place that has timed most of them (they all wait for
    each other); computation and exchange are those of the place that computes longest.
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
        """What comes belongs to another attempt, maybe of another plan."""
        if self._plan is not None:
            for size in self._open:
                kind = (self._plan, *size)
                sums = self._sums(kind)
                self._closed.pop(kind, None)
                self._closed[kind] = sums
        self._closed = dict(list(self._closed.items())[-MAX_MEASUREMENTS:])
        self._open, self._asked, self._newest = {}, {}, None
        self._plan = plan

    def saw(self, report: FunctionReport) -> None:
        """Take in a report of the present attempt."""
        totals, place = report.totals, Place(report.stage, report.replica)
        # A function that is done before its first report is due tells all of it in the last one.
        if report.phase not in ("training", "finished") or not report.step:
            return
        known = self._asked.get(place)
        is_known = known is not None and known[0] == report.incarnation
        if report.phase == "training" or not is_known:
            # Ending asks for more than a step does: it is left out where there is something else to go by.
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
        """What is to be told now. `steady_usd` is what so many seconds of the plan cost, requests left out."""
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
        """What all functions together ask of the object store in one step, as far as their reports tell it apart."""
        found: list[float] = []
        for _, first, last in self._asked.values():
            num_steps = last.step - first.step
            if num_steps > 0:
                found.append((request_usd(last.usage) - request_usd(first.usage)) / num_steps)
        if not found:
            # One report each: what was asked up to there, the start included.
            found = [request_usd(last.usage) / last.step for _, _, last in self._asked.values()]
        mean = math.fsum(found) / len(found) if found else 0.0
        # Places that have told nothing yet are taken to ask as much as the others.
        return mean * (self._plan.num_functions if self._plan is not None else len(found))

    def _sums(self, kind: _Kind) -> StepTotals:
        """Everything of one kind: the attempts that are over, and the present one."""
        places = [_added(invocations) for _, invocations in sorted(self._open.get(kind[1:], {}).items())]
        closed = self._closed.get(kind)
        if not places:
            return closed or StepTotals(global_batch_size=kind[1], gradient_bytes=kind[2])
        # All places make the same steps: the one with the longest view times them, the slowest says what is computed.
        longest = max(places, key=lambda totals: totals.num_steps)
        slowest = max(places, key=lambda totals: totals.compute_s / totals.num_steps)
        share = longest.num_steps / slowest.num_steps
        now = msgspec.structs.replace(longest, compute_s=slowest.compute_s * share, sync_s=slowest.sync_s * share)
        return now if closed is None else _sum(closed, now)


def _added(invocations: Mapping[int, StepTotals]) -> StepTotals:
    """What the functions that filled a place one after the other have timed."""
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
