"""Fields that a trace lacks are drawn from a seed, by the rule of ElasticFlow's paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from springtide.core.errors import InvalidRequest
from springtide.workloads.profiles import Pair, Profiles, rate_at
from springtide.workloads.trace import Trace, TraceJob

# ElasticFlow, section 6.1: deadline = submission + lambda * duration with lambda uniform in this range.
DEADLINE_FACTOR = (0.5, 1.5)


def draw_missing(
    trace: Trace, profiles: Profiles, seed: int, *, deadline_factor: tuple[float, float] = DEADLINE_FACTOR
) -> Trace:
    """Give every job a model, a length, a duration and a deadline where it has none (ElasticFlow, section 6.1).

    A model and batch size is drawn evenly from the pairs that run on as many devices as the job asks for (from all
    pairs when none does); its length is duration * measured rate on these devices. A job that names its pair and its
    length, but no duration, gets the duration that follows. The deadline is submission + lambda * duration, lambda
    uniform in `deadline_factor`; best-effort jobs stay so. A job of unknown length is left out and counted. Each job
    takes one draw from each stream in order of submission, so a longer trace begins as a shorter one does.

    Raises InvalidRequest when a pair that the trace names is in no table or nothing would be left.
    """
    check_factor(deadline_factor)
    pair_rng, deadline_rng = _streams(seed, 2)
    pair_draws = pair_rng.random(len(trace.jobs)).tolist()
    factors = deadline_rng.uniform(*deadline_factor, size=len(trace.jobs)).tolist()
    choices: dict[int, Sequence[Pair]] = {}
    skipped = dict(trace.skipped)
    jobs = []
    for job, pair_draw, factor in zip(trace.jobs, pair_draws, factors, strict=True):
        if not job.model and not job.has_own_curve and job.duration_s is not None:
            if job.num_devices not in choices:
                choices[job.num_devices] = pairs_for(profiles, job.num_devices)
            fitting = choices[job.num_devices]
            job = with_pair(job, fitting[int(pair_draw * len(fitting))], profiles)
        elif job.num_steps == 0 and job.model and job.global_batch_size and job.duration_s is not None:
            job = with_pair(job, job.pair, profiles)
        job = _with_duration(job, profiles)
        if not job.is_complete or job.duration_s is None:
            reason = "runs for an unknown time"
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        if job.deadline_s is None and not job.is_best_effort:
            job = replace(job, deadline_s=job.submit_s + factor * job.duration_s)
        jobs.append(job)
    if not jobs:
        raise InvalidRequest(f"trace {trace.name}: no job says how long it runs, so nothing can be drawn for it")
    drawn = [*trace.drawn]
    if any(not job.model and not job.has_own_curve for job in trace.jobs):
        drawn.append(f"model and global_batch_size: evenly from the pairs of {profiles.name} (seed {seed})")
        drawn.append(f"num_steps: duration * the rate of {profiles.name} on num_devices")
    if any(job.deadline_s is None and not job.is_best_effort for job in trace.jobs):
        low, high = deadline_factor
        drawn.append(f"deadline_s: submit_s + lambda * duration_s, lambda ~ U[{low:g}, {high:g}] (seed {seed})")
    return replace(trace, jobs=tuple(jobs), skipped=skipped, drawn=tuple(drawn))


def check_complete(trace: Trace) -> Trace:
    """Return the trace if every job has what it needs to run. Raises InvalidRequest naming the first that has not."""
    for job in trace.jobs:
        if not job.is_complete:
            lacks = "length" if job.model or job.has_own_curve else "model"
            raise InvalidRequest(
                f"trace {trace.name}: job {job.job_id} has no {lacks}; this format does not tell, so let what is "
                "missing be drawn from scaling tables and a seed (--draw)"
            )
    return trace


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    if seed < 0:
        raise InvalidRequest(f"seed {seed} is negative; give 0 or more")
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def check_factor(factor: tuple[float, float]) -> None:
    low, high = factor
    if not 0 <= low <= high or not math.isfinite(high):
        raise InvalidRequest(f"deadline factors {low!r} to {high!r} are not possible; give 0.5 to 1.5 or the like")


def pairs_for(profiles: Profiles, num_devices: int) -> Sequence[Pair]:
    """The pairs whose measured range holds `num_devices`; all pairs if there is none."""
    reach = {pair: sorted(profiles.steps_per_s(*pair)) for pair in profiles.pairs}
    fitting = [pair for pair, counts in reach.items() if counts[0] <= num_devices <= counts[-1]]
    return fitting or list(profiles.pairs)


def with_pair(job: TraceJob, pair: Pair, profiles: Profiles) -> TraceJob:
    assert job.duration_s is not None, "a length follows from a duration"
    rate = rate_at(profiles.steps_per_s(*pair), job.num_devices)
    num_steps = max(1, round(job.duration_s * rate))
    return replace(job, model=pair[0], global_batch_size=pair[1], num_steps=num_steps)


def _with_duration(job: TraceJob, profiles: Profiles) -> TraceJob:
    if job.duration_s is not None or not job.is_complete:
        return job
    rate = job.own_steps_per_s(job.num_devices) if job.has_own_curve else 0.0
    if not job.has_own_curve:
        rate = rate_at(profiles.steps_per_s(*job.pair), job.num_devices)
    return replace(job, duration_s=job.num_steps / rate)
