"""What a worker holds: a share of a device, or several. Policies count a job's devices, all others its workers.

The counts of a job whose workers hold several devices each become devices here, where policies are to see it, and
devices become workers in `grants.by_workers`, where a plan is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from springtide.core.decision import JobView
from springtide.core.job_parts import JobBounds, LearntSpeed
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


# --- several devices each ---------------------------------------------------------------------------------------------


def job_in_devices(job: TrainingJob) -> TrainingJob:
    """The job as policies see it: every number of workers is one of devices. Only for what has not been converted."""
    each = job.devices_each
    if each == 1:
        return job
    belief, asked = job.belief, job.requested_workers
    return replace(
        job,
        min_workers=job.min_workers * each,
        max_workers=job.max_workers * each,
        num_virtual_shards=job.num_virtual_shards * each,
        requested_workers=None if asked is None else asked * each,
        profile_steps_per_s=_by_devices(job.profile_steps_per_s, each),
        profiles={model: _by_devices(speeds, each) for model, speeds in job.profiles.items()},
        belief=None if belief is None else replace(belief, slower=_by_devices(belief.slower, each)),
    )


def bounds_in_devices(bounds: JobBounds, each: int) -> JobBounds:
    """The bounds as policies see them."""
    return replace(bounds, min_workers=bounds.min_workers * each, max_workers=bounds.max_workers * each)


def learnt_in_devices(learnt: LearntSpeed, each: int) -> LearntSpeed:
    """What was measured as policies see it: the samples of a step are those of a device."""
    return replace(
        learnt,
        throughput_samples_per_s=_by_devices(learnt.throughput_samples_per_s, each),
        by_accelerator={model: _by_devices(speeds, each) for model, speeds in learnt.by_accelerator.items()},
        step_times=tuple(
            replace(
                known,
                placement=tuple(count * each for count in known.placement),
                local_batch_size=max(1, known.local_batch_size // each),
            )
            for known in learnt.step_times
        ),
    )


def _by_devices(speeds: Mapping[int, float], each: int) -> dict[int, float]:
    return {count * each: speed for count, speed in speeds.items()}
