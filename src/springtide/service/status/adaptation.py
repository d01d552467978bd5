"""What is known of a job whose batch may change: noise scale, efficiency, goodput, and what is left. Pure functions."""

from __future__ import annotations

import msgspec

from springtide.control.records import JobRecord
from springtide.core.job_parts import GradientNoise
from springtide.core.workload import TrainingJob
from springtide.perf.goodput import efficiency, learning_rate_factor, noise_scale


class Adaptation(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch of the present size is worth; None where that is not known, or the batch never changes.

    `noise_scale` is in samples. `efficiency_fraction` is the progress that a sample makes, against one in a batch of
    the initial size; samples a second times that are the goodput.
    """

    noise_scale: float | None = None
    efficiency_fraction: float | None = None
    goodput_samples_per_s: float | None = None
    learning_rate_factor: float | None = None


def adaptation_of(
    job: TrainingJob, noise: GradientNoise | None, global_batch_size: int, samples_per_s: float | None
) -> Adaptation:
    """Return what a batch of this size means for the job at this speed."""
    if job.batch is None:
        return Adaptation()
    scale = global_batch_size / job.global_batch_size
    factor = learning_rate_factor(job.batch.learning_rate, noise, scale)
    if noise is None:
        return Adaptation(learning_rate_factor=factor)
    fraction = float(efficiency(noise, scale))
    return Adaptation(
        noise_scale=noise_scale(noise, job.global_batch_size),
        efficiency_fraction=fraction,
        goodput_samples_per_s=None if samples_per_s is None else samples_per_s * fraction,
        learning_rate_factor=factor,
    )


def progress_of(record: JobRecord) -> tuple[float, float | None]:
    """Return what is done and of how much, in steps of the initial batch size (None: its length is not known)."""
    if record.progress.equivalent_steps is not None and record.progress.total_equivalent_steps is not None:
        return record.progress.equivalent_steps, record.progress.total_equivalent_steps
    return float(record.progress.step), None if record.progress.total_steps is None else float(
        record.progress.total_steps
    )


def num_samples_left(record: JobRecord) -> float | None:
    """Return how many samples are still to be trained on with the batch as it is; None while that is not known."""
    done, total = progress_of(record)
    if total is None:
        return None
    left = max(0.0, total - done) * record.job.global_batch_size
    if record.job.length_unit == "progress":
        fraction = adaptation_of(record.job, record.learnt.noise, record.batch_size, None).efficiency_fraction
        # A sample in a large batch makes less progress, so more samples are left.
        left /= fraction if fraction else 1.0
    return left
