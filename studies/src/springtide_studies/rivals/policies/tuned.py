"""Tiresias and Optimus as Pollux's published artifact plays them against it, on requests tuned by hand.

Qiao et al., "Pollux", OSDI 2021, section 5.1 ("TunedJobs") and the artifact (petuum/adaptdl, branch osdi21-artifact):
both decide once a minute on the batch size that was asked for. They are here to check figures against the published
ones; `tiresias` and `optimus` are the papers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import msgspec

from springtide.core.decision import JobView, Plan, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId, NodeId
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of, interpolate
from springtide.scheduling.decisions.rounds import Devices, Round, RoundDecision, decide_in_rounds
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.placement.gangs import fixed_size

# (job, number of devices that it holds, present moment) -> steps left.
StepsLeft = Callable[[JobView, int, float], float]


class TiresiasTuned(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs at the size that was asked for, in two queues by service attained.

    A job that has held `threshold_s` device-seconds since it was submitted (the artifact's 16 hours of one device)
    goes to the second queue. A job that does not fit is passed over; none is promoted.
    """

    summary: ClassVar[str] = "Tiresias as Pollux's published artifact plays it, every minute, on tuned requests."

    round_s: float = 60.0
    threshold_s: float = 57600.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(repr(self), self.round_s, snapshot, self._decide)

    def _decide(self, now: Round) -> RoundDecision:
        state = now.state or {"first": [], "second": [], "ran_s": {}, "at_s": 0.0}
        total = len(now.devices)
        size_of = {view.job.job_id: fixed_size(view, total) for view in now.snapshot.jobs}
        first = [job_id for job_id in state["first"] if job_id in size_of]
        second = [job_id for job_id in state["second"] if job_id in size_of]
        known = {*first, *second}
        first += [job_id for job_id in size_of if job_id not in known]
        ran_s: dict[str, float] = {}
        for job_id, size in size_of.items():
            ran_s[job_id] = state["ran_s"].get(job_id, 0.0)
            if now.held[job_id]:
                ran_s[job_id] += now.snapshot.now_s - state["at_s"]
            if job_id in first and int(ran_s[job_id]) * size >= self.threshold_s:
                first.remove(job_id)
                second.append(job_id)
        left, running = total, []
        for job_id in (*first, *second):
            if 0 < size_of[job_id] <= left:
                left -= size_of[job_id]
                running.append(job_id)
        counts = {job_id: size_of[job_id] for job_id in running}
        remembered = {"first": first, "second": second, "ran_s": ran_s, "at_s": now.snapshot.now_s}
        return RoundDecision(allocations=_spread_out(now, counts, running), state=remembered)


class OptimusOracle(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then each job a worker, by arrival, and one more at a time to the job it helps most.

    The help is measured in seconds that the steps left take less, by the speeds that the job was submitted with. A job
    that keeps its number keeps its devices.
    """

    summary: ClassVar[str] = "Optimus as Pollux's published artifact plays it, every minute, told all speeds."

    round_s: float = 60.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(repr(self), self.round_s, snapshot, lambda now: share_by_gain(now, reported_steps_left))


def reported_steps_left(view: JobView, num_held: int, now_s: float) -> float:
    """Steps left, less those done since the last report; 1 if the length is not known or has been reached."""
    if view.total_steps is None:
        return 1.0
    steps = view.total_steps - (view.equivalent_steps or view.progress.step)
    if num_held and view.state is JobState.RUNNING:
        rates = _submitted_steps_per_s(view)
        steps -= rates[min(num_held, len(rates) - 1)] * max(0.0, now_s - view.progress.progress_at_s)
    return max(1.0, steps)


def share_by_gain(now: Round, steps_left: StepsLeft) -> RoundDecision:
    """A worker for each job, by arrival, then one more at a time to the job that it helps most."""
    left = len(now.devices)
    counts: dict[WorkloadId, int] = {}
    gains: dict[WorkloadId, float] = {}
    views = {view.job.job_id: view for view in now.snapshot.jobs}
    rates_of = {who: _submitted_steps_per_s(view) for who, view in views.items()}
    steps = {who: steps_left(view, len(now.held[who]), now.snapshot.now_s) for who, view in views.items()}

    def gain(who: WorkloadId) -> float:
        count, rates = counts[who], rates_of[who]
        if not views[who].job.elastic or count + 1 >= len(rates) or left < 1:
            return 0.0
        # A job without speed on its present number of workers gains infinitely by one more.
        return steps[who] * (1.0 / rates[count] - 1.0 / rates[count + 1]) if rates[count] > 0.0 else math.inf

    for who, view in views.items():
        least = view.bounds.min_workers if view.job.elastic else fixed_size(view, len(now.devices))
        counts[who] = least if 0 < least <= left else 0
        left -= counts[who]
        gains[who] = gain(who) if counts[who] else 0.0
    while left > 0 and gains:
        who = max(gains, key=gains.__getitem__)
        if gains[who] <= 0.0:
            break
        counts[who] += 1
        gains[who] = gain(who)
        left -= 1
    order = sorted((who for who in counts if counts[who]), key=counts.__getitem__)
    return RoundDecision(allocations=_spread_out(now, counts, order), state=None)


def _submitted_steps_per_s(view: JobView) -> tuple[float, ...]:
    """Steps a second by number of workers as submitted, not corrected by measurements."""
    told = interpolate(view.job.profile_steps_per_s, most_workers(view))
    return told if len(told) > 1 else curve_of(view).steps_per_s


def _spread_out(
    now: Round, counts: Mapping[WorkloadId, int], order: Iterable[WorkloadId]
) -> dict[WorkloadId, PoolAllocation]:
    """Let a job that holds its count stay; the others, in `order`, fill the emptiest node first (the artifact)."""
    given: dict[WorkloadId, Devices] = {}
    for who, devices in now.held.items():
        if devices and len(devices) == counts.get(who, 0):
            given[who] = devices
    taken = {device for devices in given.values() for device in devices}
    node_of = now.snapshot.cluster.node_of
    free: dict[NodeId, list[DeviceId]] = {}
    for device in now.devices:
        if device not in taken:
            free.setdefault(node_of[device], []).append(device)
    for who in order:
        if who not in given and counts[who]:
            given[who] = _take(free, counts[who])
    return {who: PoolAllocation(device_ids=devices) for who, devices in given.items()}


def _take(free: Mapping[NodeId, list[DeviceId]], count: int) -> Devices:
    chosen: list[DeviceId] = []
    while len(chosen) < count:
        emptiest = max(free.values(), key=len)
        part = emptiest[: count - len(chosen)]
        chosen += part
        del emptiest[: len(part)]
    return tuple(chosen)
