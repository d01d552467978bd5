"""How fast a job is on shares of devices: the speed it is guaranteed, and the speed it may reach."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.core.decision import JobView
from springtide.core.shares import Share
from springtide.core.workload import TrainingJob
from springtide.perf.curve import SpeedCurve, curve_of


def share_of(job: TrainingJob) -> Share | None:
    """The share of each device that the job's workers hold; None: whole devices, or the job runs on functions."""
    return None if job.is_on_functions else job.share


def guaranteed_curve(view: JobView) -> SpeedCurve:
    """The job's speed curve, scaled to the request of its share if only whole devices were profiled.

    Assumes that computation is proportional to the share. Speeds that were measured while the job ran include the
    effect of its share and its neighbours, so they are used unchanged.
    """
    curve, share = curve_of(view), share_of(view.job)
    if share is None or curve.source == "guess" or view.learnt.throughput_samples_per_s:
        return curve
    return replace(curve, steps_per_s=tuple([rate * share.request for rate in curve.steps_per_s]))


def time_fraction_at_limit(job: TrainingJob) -> float:
    """The job's time at its limit over its time at its request. It runs at its limit while its neighbours are idle."""
    share = share_of(job)
    return 1.0 if share is None else share.request / share.limit


def price_fraction(job: TrainingJob) -> float:
    """The fraction of a device's price that the job pays: its request."""
    share = share_of(job)
    return 1.0 if share is None else share.request
