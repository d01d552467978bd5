"""Deadlines of jobs on parts of devices: what a number of parts is sure to bring, and when a job ends with it."""

from __future__ import annotations

import math

from springtide.core.decision import JobView, Overheads
from springtide.core.workload import JobState
from springtide.perf.curve import curve_of
from springtide.scheduling.placement.allocation_ledger import most_workers

# A job is late when it is planned to end so long after its deadline, as a part of the time it still takes: speeds vary.
_LATE_FRACTION = 0.02


def is_promised(view: JobView) -> bool:
    """Whether its deadline is promised."""
    return view.promise.admitted_at_s is not None


def can_promise(view: JobView) -> bool:
    """Whether its hard deadline is to be promised or refused: its length and its speed are known."""
    curve = curve_of(view)
    is_known = curve.source != "guess" and bool(curve.sizes) and view.total_equivalent_steps is not None
    return view.job.goal.is_hard and view.promise.admitted_at_s is None and is_known


def sure_s(view: JobView, num_devices: int, overheads: Overheads) -> float:
    """Seconds to the end of a job that starts now, with nothing but its request on each of so many devices. What was
    measured may be with all that its limit allows."""
    share = view.job.share
    assert share is not None
    assert view.total_equivalent_steps is not None
    part = share.request / share.limit if view.learnt.throughput_samples_per_s else share.request
    rate = curve_of(view).rate(num_devices) * part
    left = max(0.0, view.total_equivalent_steps - view.equivalent_steps)
    return left / rate + overheads.cost_s(num_devices) if rate > 0.0 else math.inf


def end_s(view: JobView, num_devices: int, now_s: float) -> float:
    """When the job ends on parts of so many devices: as fast as it was there, at first as fast as it can count on."""
    if view.total_equivalent_steps is None or view.job.share is None:
        return now_s
    rate = curve_of(view).rate(num_devices)
    rate *= 1.0 if view.learnt.throughput_samples_per_s else view.job.share.request
    left = max(0.0, view.total_equivalent_steps - view.equivalent_steps)
    since_s = view.progress.progress_at_s if view.state is JobState.RUNNING else now_s
    return max(now_s, since_s + left / rate) if rate > 0.0 else math.inf


def is_late(view: JobView, num_devices: int, now_s: float) -> bool:
    """Whether the job misses its deadline on parts of so many devices."""
    deadline_s, ends_s = view.job.goal.deadline_s, end_s(view, num_devices, now_s)
    return deadline_s is not None and (now_s > deadline_s or ends_s > deadline_s + _LATE_FRACTION * (ends_s - now_s))


def fewest_in_time(view: JobView, now_s: float, overheads: Overheads) -> int | None:
    """The fewest devices on whose parts the job makes its deadline if others have to leave them first; None: no
    number does, or it has none."""
    deadline_s = view.job.goal.deadline_s
    if deadline_s is None or view.job.share is None or view.total_equivalent_steps is None:
        return None
    for count in range(max(1, view.bounds.min_workers), most_workers(view) + 1, view.job.devices_each):
        if now_s + overheads.change_s + sure_s(view, count, overheads) <= deadline_s:
            return count
    return None


def rescued_by(view: JobView, num_devices: int, now_s: float, overheads: Overheads) -> int | None:
    """The fewest devices on which a promised job that is late on `num_devices` is not; None: it is in time, or no
    number helps."""
    if not (is_promised(view) and view.job.elastic and is_late(view, num_devices, now_s)):
        return None
    most, each, soon_s = most_workers(view), view.job.devices_each, now_s + overheads.change_s
    return next((n for n in range(num_devices + each, most + 1, each) if not is_late(view, n, soon_s)), None)


def least_workers(view: JobView, now_s: float, overheads: Overheads) -> int:
    """The fewest workers that a running job has to keep: its minimum, and as many as a promised deadline needs."""
    most = most_workers(view)
    if not view.job.elastic:
        return most
    if not is_promised(view):
        return view.bounds.min_workers
    count = fewest_in_time(view, now_s, overheads)
    return most if count is None else count


def relative_speed(view: JobView, num_devices: int) -> float:
    """How fast the job is on so many whole devices, as a multiple of one; by shape alone if nothing was measured."""
    curve = curve_of(view)
    return curve.rate(num_devices) / (curve.rate(1) or 1.0)


def saved_s(view: JobView, num_devices: int, before: float, after: float, now_s: float) -> float:
    """How much earlier the job ends at the relative speed `after` than at `before`, its speed on the devices that it
    has now; negative if later. Infinite where it is not known when it ends."""
    left_s = end_s(view, num_devices, now_s) - now_s
    if view.total_equivalent_steps is None or curve_of(view).source == "guess":
        left_s = math.inf
    factor = 1.0 - before / after if after > 0.0 else -math.inf
    return left_s * factor if factor else 0.0
