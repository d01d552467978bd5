"""Whole traces after the recipe of the generator in ElasticFlow's artifact, and the file that holds them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.workloads.drawing import DEADLINE_FACTOR, check_factor, pairs_for, with_pair
from springtide.workloads.profiles import Profiles
from springtide.workloads.trace import MAX_JOBS, Trace, TraceJob, make_trace
from springtide_studies.workloads.generators import streams

# The artifact's generator: durations in minutes are 10 to the power of a uniform exponent, four fifths of them from
# the first range; devices are 1, 2, 4, 8, 16 with these shares.
_SHORT_SHARE = 0.8
_SHORT_EXPONENTS, _LONG_EXPONENTS = (1.0, 2.5), (2.5, 4.0)
_DEVICE_COUNTS = (1, 2, 4, 8, 16)
_DEVICE_SHARES = (0.83, 0.03, 0.03, 0.10, 0.01)
_COLUMNS = (
    "job_id",
    "submit_time",
    "iteration",
    "model_name",
    "ddl",
    "batch_size",
    "num_gpu",
    "duration",
    "best_effort",
)


def generate_jobs(
    num_jobs: int,
    profiles: Profiles,
    seed: int,
    *,
    mean_gap_s: float = 1500.0,
    deadline_factor: tuple[float, float] = DEADLINE_FACTOR,
    best_effort_fraction: float = 0.0,
    max_devices: int = 16,
) -> Trace:
    """A trace after the recipe of ElasticFlow's artifact (trace_generator): exponential gaps from the first job at 0,
    heavy-tailed durations, mostly one device, even draws of pairs, a deadline by the paper's rule or best effort.

    The recipe, not the numbers: chance comes from NumPy's streams, one for each of the six draws, so that the first
    jobs do not change when more are asked for, nor the others' draws when a fraction does. Raises InvalidRequest.
    """
    if not 1 <= num_jobs <= MAX_JOBS:
        raise InvalidRequest(f"{num_jobs} jobs cannot be drawn; ask for 1 to {MAX_JOBS:,}")
    if not math.isfinite(mean_gap_s) or mean_gap_s < 0 or mean_gap_s > 1e5:
        raise InvalidRequest(f"a mean gap of {mean_gap_s!r} s is not possible; give one from 0 to 100000")
    if not 0 <= best_effort_fraction <= 1:
        raise InvalidRequest(f"best_effort_fraction {best_effort_fraction!r} must be from 0 to 1")
    if max_devices < 1:
        raise InvalidRequest(f"max_devices {max_devices} must be at least 1")
    check_factor(deadline_factor)
    gap_rng, kind_rng, length_rng, device_rng, pair_rng, goal_rng = streams(seed, 6)
    moments_s = np.cumsum(gap_rng.exponential(1.0, num_jobs) * mean_gap_s)
    moments_s -= moments_s[0]
    is_short = kind_rng.random(num_jobs) < _SHORT_SHARE
    spots = length_rng.random(num_jobs)
    low, high = (np.where(is_short, *ends) for ends in zip(_SHORT_EXPONENTS, _LONG_EXPONENTS, strict=True))
    durations_s = 60.0 * 10.0 ** (low + (high - low) * spots)
    device_indexes = np.searchsorted(np.cumsum(_DEVICE_SHARES)[:-1], device_rng.random(num_jobs), side="right")
    pair_draws = pair_rng.random(num_jobs)
    goals = goal_rng.random((num_jobs, 2))
    choices = {count: pairs_for(profiles, count) for count in range(1, min(max_devices, _DEVICE_COUNTS[-1]) + 1)}
    jobs = []
    for index in range(num_jobs):
        num_devices = min(max_devices, _DEVICE_COUNTS[int(device_indexes[index])])
        fitting = choices[num_devices]
        submit_s, duration_s = float(moments_s[index]), float(durations_s[index])
        is_best_effort = bool(goals[index, 1] < best_effort_fraction)
        factor = deadline_factor[0] + (deadline_factor[1] - deadline_factor[0]) * float(goals[index, 0])
        job = TraceJob(
            job_id=f"job-{index:06d}",
            submit_s=submit_s,
            num_devices=num_devices,
            duration_s=duration_s,
            deadline_s=None if is_best_effort else submit_s + factor * duration_s,
            is_best_effort=is_best_effort,
        )
        jobs.append(with_pair(job, fitting[int(pair_draws[index] * len(fitting))], profiles))
    drawn = (f"every job: {num_jobs} after ElasticFlow's generator with {profiles.name} (seed {seed})",)
    return make_trace(f"drawn-{num_jobs}-seed{seed}", jobs, drawn=drawn, format="drawn")


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace in the format `elasticflow`, whose reader gives the same jobs again.

    Owners, bounds on workers and profiles are not in this format.

    Raises InvalidRequest for a job that the format cannot say: no model, no length, no duration, or no deadline
    without being best effort.
    """
    lines = [",".join(_COLUMNS)]
    for job in trace.jobs:
        if not job.model or not job.num_steps or not job.global_batch_size or job.duration_s is None:
            raise InvalidRequest(f"job {job.job_id} cannot be written: model, batch, steps and duration must be known")
        if job.deadline_s is None and not job.is_best_effort:
            raise InvalidRequest(f"job {job.job_id} cannot be written: it has no deadline and is not best effort")
        if any(mark in job.model for mark in ',"\r\n') or job.model != job.model.strip():
            raise InvalidRequest(f"job {job.job_id} cannot be written: its model's name holds a comma, quote or blank")
        moments = [_shortest(job.submit_s), "" if job.deadline_s is None else _shortest(job.deadline_s)]
        lines.append(
            f"{job.job_id},{moments[0]},{job.num_steps},{job.model},{moments[1]},{job.global_batch_size},"
            f"{job.num_devices},{_shortest(job.duration_s)},{int(job.is_best_effort)}"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shortest(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
