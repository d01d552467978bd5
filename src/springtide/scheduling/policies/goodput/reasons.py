"""The reasons of the policy `goodput`: why a job gets more, fewer or no devices, with the times compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.rounds import Round
from springtide.scheduling.families.candidates import JobCandidates


def reasons_of(
    rows: Sequence[JobCandidates],
    counts: Mapping[WorkloadId, int],
    devices: Mapping[WorkloadId, Sequence[DeviceId]],
    now: Round,
) -> dict[WorkloadId, str]:
    """A sentence for each job that changes or holds nothing."""
    reasons: dict[WorkloadId, str] = {}
    for row in rows:
        before, after = row.held, counts.get(row.job_id, 0)
        if after != before:
            reasons[row.job_id] = _of_change(row, before, after, now.snapshot.overheads.cost_s(max(after, 1)))
        elif not after:
            reasons[row.job_id] = "waits: the devices bring more to others now"
        elif tuple(devices[row.job_id]) != tuple(now.held[row.job_id]):
            reasons[row.job_id] = "moved, because devices of its own are gone"
    return reasons


def _of_change(row: JobCandidates, before: int, after: int, cost_s: float) -> str:
    then_s, now_s = row.seconds_on(after), row.seconds_on(before)
    if not before:
        return f"starting on {_devices(after)}" + _for(then_s)
    if not after:
        return "stopped: the devices bring more to others now"
    if not (math.isfinite(then_s) and math.isfinite(now_s)):
        return f"{_devices(after)} instead of {before} suit it better"
    if after > before:
        paid = f"; {_time(cost_s)} for the change are paid back" if cost_s >= 0.5 else ""
        if then_s < now_s:
            return f"its remaining {_time(now_s)} shrink to {_time(then_s)} on {_devices(after)}{paid}"
        return f"{_devices(after)} instead of {before}: its speed there is to be found out"
    if then_s <= now_s:
        return f"{_devices(after)} are as fast for it as {before}"
    return f"others gain more: its remaining {_time(now_s)} grow to {_time(then_s)} on {_devices(after)}"


def _for(seconds: float) -> str:
    return f": about {_time(seconds)} to go" if math.isfinite(seconds) else ""


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
