"""How fast a job is on parts of devices: what it can count on, and how much better it may come."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.core.decision import JobView
from springtide.core.shares import Share
from springtide.core.workload import TrainingJob
from springtide.perf.curve import SpeedCurve, curve_of


def share_of(job: TrainingJob) -> Share | None:
    """What the job's workers hold of each device; None: the whole, or it takes no device."""
    return None if job.is_on_functions else job.share


def sure_curve(view: JobView) -> SpeedCurve:
    """The job's speed curve; on parts of devices where only whole ones were profiled, at its request.

    Computation is taken to go in proportion to the part. What was measured while it ran was measured on its parts,
    beside its neighbours there, and is used unchanged.
    """
    curve, share = curve_of(view), share_of(view.job)
    if share is None or curve.source == "guess" or view.learnt.throughput_samples_per_s:
        return curve
    return replace(curve, steps_per_s=tuple([rate * share.request for rate in curve.steps_per_s]))


def best_fraction(job: TrainingJob) -> float:
    """A job's time at its limit over its time at its request; it has its limit while its neighbours are idle."""
    share = share_of(job)
    return 1.0 if share is None else share.request / share.limit


def price_fraction(job: TrainingJob) -> float:
    """The part of a device's price that is the job's: what is kept for it."""
    share = share_of(job)
    return 1.0 if share is None else share.request
