"""Jobs whose batch size is chosen while they run, as the executor of long traces plays them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from springtide.core.decision import EMPTY
from springtide.core.events import ProgressReported
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.simulator.fluid.rules import RunSpeed, exact_boundary_s, make_run
from springtide.simulator.fluid.runs import FluidRun
from springtide_studies.adaptive.truth import DEVICES_PER_NODE, AppTruth, Split, compact_placement

# Running jobs report progress every minute, as often as the published simulator decides.
_REPORT_EVERY_S = 60.0
# Added to the moment of events that fall on a whole minute but have to come after that minute's decisions.
_AFTER_S = 1e-3
_ROUND_S = 60.0


@dataclass(slots=True)
class _TrueJob:
    """One job's truth. `ends` are its epochs' ends in steps of its own initial batch size; `worths` is the progress of
    such a step in each epoch, in steps of the application's initial batch size."""

    truth: AppTruth
    ends: tuple[float, ...]
    worths: tuple[float, ...]
    split: Split
    epoch: int = 0


class GoodputSpeeds:
    """The speed of jobs by their placement, their batch size and the epoch that they are in.

    A job's `family` names its application. With `whole_seconds` every epoch ends at a whole second and the nodes of a
    group follow each other in the order of its ranks, as in the published simulator: its runs are reproduced to the
    second that way. `model_speeds` has how fast devices of each model are beside those that were measured; workers on
    different models wait for the slowest.
    """

    report_every_s = _REPORT_EVERY_S

    def __init__(
        self,
        truths: Mapping[str, AppTruth],
        *,
        whole_seconds: bool = False,
        model_speeds: Mapping[str, float] = EMPTY,
    ) -> None:
        self._truths = truths
        self._model_speeds = model_speeds
        self._whole_seconds = self.rings_by_rank = whole_seconds
        self._jobs: dict[WorkloadId, _TrueJob] = {}

    def open_run(self, job: TrainingJob, now_s: float, done_steps: float = 0.0) -> FluidRun:
        """The run of a job that arrives now; its length is that of all its epochs."""
        truth = self._truths[job.family]
        ends, worths = lengths(truth, job.global_batch_size)
        self._jobs[job.job_id] = _TrueJob(truth, ends, worths, truth.split(job.global_batch_size, 1))
        alone_s = truth.time_alone_s(compact_placement(1), truth.batch_grid())
        alone_per_s = ends[-1] / alone_s if math.isfinite(alone_s) else 0.0
        return make_run(job, now_s, length=ends[-1], single_steps_per_s=alone_per_s, done_steps=done_steps)

    def pace(self, run: FluidRun) -> RunSpeed:
        """Progress a second in the present epoch, in steps of the job's initial batch size."""
        known = self._jobs[run.job.job_id]
        epoch = bisect.bisect_right(known.ends, run.done_steps, hi=len(known.ends) - 1)
        split = known.truth.split(_within(run), len(run.members))
        known.split, known.epoch = split, epoch
        gain = known.truth.gain(split.global_batch_size, epoch) / known.worths[epoch]
        rate = gain / self._total_step_s(run, known)
        efficiency = rate / run.single_steps_per_s if run.single_steps_per_s else 0.0
        fewest = -(-len(run.members) // DEVICES_PER_NODE)
        return RunSpeed(rate, efficiency, known.ends[epoch], len(run.placement) > fewest)

    def boundary_s(self, run: FluidRun) -> float:
        """When the epoch ends."""
        exact_s = exact_boundary_s(run)
        return run.since_s + round(exact_s - run.since_s) if self._whole_seconds else exact_s

    def observed_s(self, run: FluidRun) -> float:
        """When the platform learns of it: after a minute's decisions if only rounding puts the boundary before them."""
        if not self._whole_seconds or run.boundary_s % _ROUND_S or exact_boundary_s(run) < run.boundary_s:
            return run.boundary_s
        return run.boundary_s + _AFTER_S

    def first_report_s(self, run: FluidRun) -> float:
        """A group reports as soon as its first step is done."""
        known = self._jobs[run.job.job_id]
        return self._total_step_s(run, known)

    def _total_step_s(self, run: FluidRun, known: _TrueJob) -> float:
        return known.truth.total_step_s(run.placement, known.split) / self._slowest(run)

    def _slowest(self, run: FluidRun) -> float:
        return min((self._model_speeds.get(model, 1.0) for model in run.accelerators), default=1.0)

    def report(self, run: FluidRun) -> ProgressReported:
        """A report of progress, step times and gradient noise."""
        known = self._jobs[run.job.job_id]
        split, truth, job = known.split, known.truth, run.job
        speed = self._slowest(run)
        step_s, sync_s = (time_s / speed for time_s in truth.step_times(run.placement, split.local_batch_size))
        grad_sqr, grad_var = truth.noise(split.global_batch_size, known.epoch)
        return ProgressReported(
            job_id=job.job_id,
            generation=run.generation,
            step=run.step,
            total_steps=job.total_steps or 0,
            world_size=len(run.members),
            epoch=known.epoch,
            samples_per_s=split.global_batch_size / self._total_step_s(run, known),
            progress=run.done_steps,
            total_progress=run.length if job.total_steps is not None else None,
            global_batch_size=split.global_batch_size,
            local_batch_size=split.local_batch_size,
            step_s=step_s,
            sync_s=sync_s,
            grad_sqr=grad_sqr,
            # The table's variance is that of the application's initial batch size, the job's may be another.
            grad_var=grad_var * truth.app.initial_batch_size / job.global_batch_size,
        )


def lengths(truth: AppTruth, initial_batch_size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Where epochs end in steps of `initial_batch_size`, and what such a step is worth in those of the application."""
    if initial_batch_size == truth.app.initial_batch_size:
        return truth.epoch_ends, (1.0,) * len(truth.epoch_ends)
    worths = tuple(truth.gain(initial_batch_size, epoch) for epoch in range(len(truth.epoch_ends)))
    ends, done, begun = [], 0.0, 0.0
    for end, worth in zip(truth.epoch_ends, worths, strict=True):
        done += (end - begun) / worth
        begun = end
        ends.append(done)
    return tuple(ends), worths


def _within(run: FluidRun) -> int:
    bounds = run.job.batch
    return run.batch_size if bounds is None else min(max(run.batch_size, bounds.min_size), bounds.max_size)
