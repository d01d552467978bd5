"""How a job's speed came out against what was expected of it. Kept in the state, for the quotes of later jobs."""

from __future__ import annotations

import math

from springtide.control.records import JobRecord, PlatformState
from springtide.core.job_parts import JobOutcome

# How many of the last outcomes are kept.
MAX_OUTCOMES = 1000


def length_of(record: JobRecord) -> int:
    """The job's length in steps of its initial batch; 0 where unknown."""
    if record.job.batch is not None:
        return math.ceil(record.progress.total_equivalent_steps or 0.0)
    return record.progress.total_steps or 0


def average_rates(record: JobRecord, ended_at_s: float | None) -> dict[int, float]:
    """Samples a second by number of workers.

    For a run that came to its end at `ended_at_s` without restarts on one number of workers it is the average over the
    whole run, which includes evaluation, checkpoints and the end. For any other it is the newest measurement of each.
    """
    rates = {count: rate for count, rate in record.learnt.throughput_samples_per_s.items() if rate > 0}
    began_at_s, length = record.lifecycle.started_at_s, length_of(record)
    is_whole = not record.restarts.num_restarts and not record.changes.num_preemptions
    if is_whole and len(rates) == 1 and length and began_at_s is not None and ended_at_s is not None:
        took_s = ended_at_s - began_at_s
        if took_s > 0:
            return dict.fromkeys(rates, length * record.job.global_batch_size / took_s)
    return rates


def record_outcome(record: JobRecord, state: PlatformState, now_s: float) -> None:
    """Keep how the speed of a job that is done came out, if its plan rested on one.

    The largest number of workers that it ran on speaks for it. Shares of devices and batches that change have other
    speeds than the profile's, and are left out.
    """
    job, belief, restarts = record.job, record.job.belief, record.restarts
    if belief is None or job.share is not None or job.batch is not None or job.is_on_functions:
        return
    rates = average_rates(record, now_s)
    count = max((n for n in rates if job.profile_steps_per_s.get(n)), default=0)
    if not count:
        return
    expected = job.profile_steps_per_s[count] * belief.factor(count)
    outcome = JobOutcome(
        family=job.family,
        basis=belief.basis(count),
        error=math.log(expected * job.global_batch_size / rates[count]),
        num_failures=max(restarts.num_restarts, len({*restarts.losses_at_s, *restarts.crashes_at_s})),
        device_hours=record.attained_service_s(now_s) / 3600.0,
    )
    state.outcomes = (*state.outcomes, outcome)[-MAX_OUTCOMES:]
