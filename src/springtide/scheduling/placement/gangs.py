"""Gang allocation at fixed sizes: for policies that give a job all the workers its owner asked for, or none."""

from __future__ import annotations

import math

from springtide.core.decision import JobView
from springtide.core.workload import JobState
from springtide.perf.curve import curve_of
from springtide.scheduling.placement.allocation_ledger import most_workers


def fixed_size(view: JobView, total: int, wanted: int | None = None) -> int:
    """How many devices a job gets that is never resized: `wanted`, else what its owner asked for, else all it can use.

    Within the job's bounds and clipped to the `total` of the cluster; 0 if its minimum is more than there is. A job
    that is not elastic has one size only.
    """
    most = most_workers(view)
    if not view.job.elastic:
        return most if most <= total else 0
    size = max(view.bounds.min_workers, min(wanted or view.job.requested_workers or most, most, total))
    return size if size <= total else 0


def remaining_s(view: JobView, num_workers: int, now_s: float, num_held: int = 0) -> float:
    """Seconds of work left on `num_workers`, with what it has done on `num_held` since its last report taken off.

    Infinite while its length or its speed is not known, or while it does not run on so few.
    """
    if view.total_steps is None:
        return math.inf
    curve = curve_of(view)
    rate = curve.rate(num_workers)
    if curve.source == "guess" or rate <= 0:
        return math.inf
    steps = float(view.total_steps - view.progress.step)
    if num_held and view.state is JobState.RUNNING:
        steps -= curve.rate(num_held) * max(0.0, now_s - view.progress.progress_at_s)
    return max(0.0, steps) / rate


def devices_text(count: int) -> str:
    """A number of devices with its noun."""
    return "1 device" if count == 1 else f"{count} devices"
