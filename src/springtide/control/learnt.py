"""What the platform learns from workers' reports: the speed of a job, and how long changes of jobs take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from springtide.control.records import JobRecord, PlatformState, StateReason
from springtide.control.watches import seen_at_s
from springtide.core import events
from springtide.core.decision import Overheads
from springtide.core.function_search import MAX_MEASUREMENTS
from springtide.core.job_parts import MAX_STEP_TIMES, GradientNoise, JobProgress, LearntSpeed, SpeedReportSpan, StepTime
from springtide.core.quantities import format_duration
from springtide.core.workload import JobState

# Reports within this time measure the same seconds of training, so together they count as one measurement.
MOMENT_S = 4.0
# The weight of a new measurement in the moving average of the speed.
_NEW_FRACTION = 0.3
# How many of the last changes are kept, and as how many of them the initial estimate counts.
MAX_CHANGES = 32
PRIOR_CHANGES = 4
# The quantile of change times that plans reckon with: three changes in four are at most this long.
_USUAL = 0.75
_LEAST_S, _LONGEST_S, _GRAIN_S = 0.5, 120.0, 0.5


def with_report(record: JobRecord, event: events.ProgressReported, state: PlatformState, now_s: float) -> JobRecord:
    """The record after a progress report."""
    progress, runs_as = record.progress, record.runs_as
    if record.job.is_on_functions and event.global_batch_size:
        # On functions the batch follows the job's own schedule; elsewhere the policy decides it.
        runs_as = replace(runs_as, global_batch_size=event.global_batch_size)
    equivalent_steps, total_equivalent_steps = event.progress, event.total_progress
    is_further, lifecycle = event.step > progress.step, record.lifecycle
    longest_gap_s, stalled_since_s = progress.longest_gap_s, progress.stalled_since_s
    if is_further:
        longest_gap_s, stalled_since_s = max(longest_gap_s, now_s - seen_at_s(record, state)), None
    if is_further and progress.stalled_since_s is not None:
        reason = f"steps again, after {format_duration(now_s - progress.stalled_since_s)} without one"
        lifecycle = replace(lifecycle, reason=StateReason(reason))
    return replace(
        record,
        lifecycle=lifecycle,
        progress=replace(
            progress,
            step=event.step,
            progress_at_s=now_s,
            longest_gap_s=longest_gap_s,
            stalled_since_s=stalled_since_s,
            total_steps=event.total_steps or progress.total_steps,
            epoch=event.epoch,
            loss=event.loss if event.loss is not None else progress.loss,
            is_diverged=event.is_diverged,
            diverged_at_step=event.diverged_at_step or progress.diverged_at_step,
            metrics=event.metrics or progress.metrics,
            exact_obstacle=event.exact_obstacle or progress.exact_obstacle,
            equivalent_steps=equivalent_steps if equivalent_steps is not None else progress.equivalent_steps,
            total_equivalent_steps=total_equivalent_steps
            if total_equivalent_steps is not None
            else progress.total_equivalent_steps,
        ),
        learnt=_learnt(record, event, state, now_s),
        runs_as=runs_as,
    )


def progress_of_group(record: JobRecord, event: events.JobResized, now_s: float) -> JobProgress:
    """The job's progress once its new group trains."""
    step = max(record.progress.step, event.step)
    if record.job.is_script:
        # It is where it says that it is: one that starts again may have nothing to go on from.
        step = event.step
    return replace(record.progress, step=step, progress_at_s=now_s, stalled_since_s=None)


def _learnt(record: JobRecord, event: events.ProgressReported, state: PlatformState, now_s: float) -> LearntSpeed:
    """The job's speed on the reported number of workers, the time of a step there, and its gradient noise."""
    found: dict[str, Any] = {}
    accelerator = _accelerator(record, state)
    if event.samples_per_s is not None:
        found["samples_per_s"] = event.samples_per_s
    if event.samples_per_s:
        known = record.learnt.throughput_samples_per_s
        if accelerator and record.learnt.by_accelerator:
            known = record.learnt.by_accelerator.get(accelerator, {})
        found["span"], speed = _smoothed_speed(known, record, event, event.samples_per_s, now_s)
        if found["span"].samples_per_s is None:
            speed = _first_speed(record, event.world_size, event.samples_per_s, accelerator, now_s)
        found["throughput_samples_per_s"] = {**known, event.world_size: speed}
        if accelerator:
            found["by_accelerator"] = {
                **record.learnt.by_accelerator,
                accelerator: found["throughput_samples_per_s"],
            }
    if event.grad_sqr is not None and event.grad_var is not None:
        found["noise"] = GradientNoise(grad_sqr=event.grad_sqr, grad_var=event.grad_var)
    if event.step_s is not None and event.local_batch_size and event.generation == record.group.generation:
        node_of = state.topology().node_of
        device_of = {replica.replica_id: replica.device_id for replica in record.replicas}
        nodes = [node_of.get(device_of[member]) for member in record.group.members if member in device_of]
        placement = tuple(sorted((nodes.count(node) for node in dict.fromkeys(nodes)), reverse=True))
        if len(nodes) == event.world_size and None not in nodes:
            measured = StepTime(
                placement=placement,
                local_batch_size=event.local_batch_size,
                step_s=event.step_s,
                sync_s=event.sync_s,
                accelerator=accelerator,
            )
            others = [known for known in record.learnt.step_times if not known.is_of_same(measured)]
            found["step_times"] = (*others, measured)[-MAX_STEP_TIMES:]
    return replace(record.learnt, **found) if found else record.learnt


def _accelerator(record: JobRecord, state: PlatformState) -> str:
    """The model of the devices of the job's group; empty if it is not known, or they differ."""
    topology = state.topology()
    if topology.accelerators == ("",):
        return ""
    members = set(record.group.members)
    found = {
        topology.accelerator_of.get(replica.device_id, "")
        for replica in record.replicas
        if replica.replica_id in members
    }
    return found.pop() if len(found) == 1 else ""


def _smoothed_speed(
    known_speeds: Mapping[int, float],
    record: JobRecord,
    event: events.ProgressReported,
    samples_per_s: float,
    now_s: float,
) -> tuple[SpeedReportSpan, float]:
    """The span that a report belongs to, and the moving average of the speed on its number of workers.

    Within a span the newest report replaces the earlier ones.
    """
    moment = record.learnt.span
    is_new = moment is None or now_s - moment.began_s >= MOMENT_S or moment.generation != event.generation
    if moment is None or is_new:
        known = known_speeds.get(event.world_size)
        moment = SpeedReportSpan(generation=event.generation, began_s=now_s, samples_per_s=known)
    if moment.samples_per_s is None:
        return moment, samples_per_s
    return moment, (1.0 - _NEW_FRACTION) * moment.samples_per_s + _NEW_FRACTION * samples_per_s


def _first_speed(record: JobRecord, world_size: int, samples_per_s: float, accelerator: str, now_s: float) -> float:
    """The speed on a number of workers that was not measured before.

    The first steps of new processes are slow. Until `MOMENT_S` after the change the profile that a job was promised on
    counts for the rest of that time, so that two slow steps do not give up its promise.
    """
    job, resized_at_s = record.job, record.changes.resized_at_s
    if record.promise.admitted_at_s is None or resized_at_s is None:
        return samples_per_s
    profile = job.profiles.get(accelerator, {}) if accelerator else job.profile_steps_per_s
    profiled = profile.get(world_size, 0.0) * job.global_batch_size
    if not profiled or job.share is not None or job.batch is not None or job.is_on_functions:
        return samples_per_s
    known = min(1.0, max(0.0, now_s - resized_at_s) / MOMENT_S)
    return known * samples_per_s + (1.0 - known) * profiled


def with_confirmation(record: JobRecord, event: events.JobResized, now_s: float) -> JobRecord:
    """The job when the members of its group have switched to it."""
    is_first = record.lifecycle.started_at_s is None
    is_pause = event.direction not in ("start", "resume")
    is_resize, changes = event.direction in ("grow", "shrink", "replace"), record.changes
    return replace(
        record,
        group=replace(
            record.group,
            is_confirmed=True,
            oldest_generation=event.generation,
            previous_members=(),
            state_holders=record.group.members,
        ),
        lifecycle=replace(
            record.lifecycle,
            state=JobState.RUNNING if record.state is JobState.STARTING else record.state,
            started_at_s=now_s if is_first else record.lifecycle.started_at_s,
        ),
        progress=progress_of_group(record, event, now_s),
        changes=replace(
            changes,
            num_resizes=changes.num_resizes + is_resize,
            last_pause_s=event.pause_s if is_pause else changes.last_pause_s,
            change_s=max(0.0, now_s - changes.resizing_since_s),
            changed_s=changes.changed_s + (event.pause_s if is_resize else 0.0),
            pauses_s={**changes.pauses_s, event.direction: event.pause_s} if is_pause else changes.pauses_s,
            resized_at_s=now_s,
        ),
        learnt=replace(record.learnt, samples_per_s=None),
    )


def with_measurement(record: JobRecord, event: events.FunctionsMeasured) -> JobRecord:
    """The record after a measurement of steps on functions.

    The coordinator gives functions that ran out of memory more than the plan says; the record then takes over the plan
    as measured.
    """
    others = tuple(known for known in record.learnt.measurements if not known.is_of_same(event.measurement))
    learnt = replace(record.learnt, measurements=(*others, event.measurement)[-MAX_MEASUREMENTS:])
    plan, measured = record.runs_as.plan, event.measurement.plan
    is_present = event.generation == record.group.generation and record.group.is_confirmed
    if plan is None or not is_present or record.job.search is None or len(plan.stages) != len(measured.stages):
        return replace(record, learnt=learnt)
    had_mb, has_mb = plan.stages[0].memory_mb, measured.stages[0].memory_mb
    if has_mb <= had_mb:
        return replace(record, learnt=learnt)
    return replace(
        record,
        learnt=replace(learnt, too_small_mb=max(learnt.too_small_mb, had_mb)),
        runs_as=replace(record.runs_as, plan=measured),
    )


def record_change_time(record: JobRecord, state: PlatformState, now_s: float) -> None:
    """Record how long a change took, from the order for the last new worker to the first step of the group.

    `record` is the one from before the confirmation of the change. A change without new workers is not recorded.
    """
    fresh = set(record.group.members).difference(record.group.previous_members)
    ordered_s = [replica.started_at_s for replica in record.replicas if replica.replica_id in fresh]
    if ordered_s and not record.job.is_on_functions:
        state.change_times_s = (*state.change_times_s, now_s - max(ordered_s))[-MAX_CHANGES:]


def learnt_overheads(prior: Overheads, change_times_s: tuple[float, ...]) -> Overheads:
    """The overheads with `change_s` estimated from observed changes: the time within which three in four were done.

    A quantile, so that one very slow change (a cold image) has little weight. It is rounded up to half a second, so
    that plans do not change with every small difference.
    """
    if not change_times_s:
        return prior
    bounded = [min(max(time_s, _LEAST_S), _LONGEST_S) for time_s in change_times_s]
    times_s = sorted([prior.change_s] * PRIOR_CHANGES + bounded)
    usual_s = times_s[math.ceil(_USUAL * len(times_s)) - 1]
    return replace(prior, change_s=math.ceil(usual_s / _GRAIN_S - 1e-9) * _GRAIN_S)
