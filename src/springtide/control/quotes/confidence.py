"""The probability with which a job keeps its deadline, and plans on speeds that are slow enough for a wanted one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from springtide.core.job_parts import JobOutcome
from springtide.core.workload import SpeedBelief, TrainingJob
from springtide.perf.calibration import FinishRisk, SpeedErrors

# From so many outcomes on, ranges are those of the distribution instead of the conventions.
ENOUGH_OUTCOMES = 8
# What a failure costs beside half a checkpoint interval: workers start again.
_RESTART_S = 10.0


class SpeedRisk:
    """What may make the jobs of one family late, as far as outcomes of earlier jobs tell."""

    def __init__(self, outcomes: Iterable[JobOutcome] | SpeedErrors = ()) -> None:
        self._errors = outcomes if isinstance(outcomes, SpeedErrors) else SpeedErrors(outcomes)

    def of(self, job: TrainingJob, num_workers: int) -> FinishRisk:
        """The risk of a run of the job on so many workers."""
        assert job.belief is not None
        return FinishRisk(
            error=self._errors.expected(job.family, job.belief.basis(num_workers)),
            failures=self._errors.failures,
            lost_s=job.checkpoint_interval_s / 2.0 + _RESTART_S,
        )

    def range(self, job: TrainingJob, num_workers: int) -> tuple[float, float] | None:
        """Between which factors of its planned time a run lies in four runs of five; None: as the conventions say."""
        belief = job.belief
        is_known = belief is not None and self._errors.num_outcomes(belief.basis(num_workers)) >= ENOUGH_OUTCOMES
        if belief is None or not (is_known or job.confidence is not None):
            return None
        error, planned = self.of(job, num_workers).error, belief.factor(num_workers)
        return math.exp(error.quantile(0.1)) / planned, math.exp(error.quantile(0.9)) / planned

    def at_level(self, job: TrainingJob, level: float) -> TrainingJob:
        """The job with the speeds on which a plan that ends by its deadline keeps it with the probability `level`."""
        belief, rates = job.belief, job.profile_steps_per_s
        if belief is None or not rates:
            return job
        slower = dict(belief.slower)
        # Of the numbers of workers that were not measured the largest has the most device-hours, and so failures.
        for key in {count if count in slower else 0 for count in rates}:
            count = key or max(count for count in rates if count not in slower)
            expected_s = (job.total_steps or 1) / (rates[count] * belief.factor(count))
            slower[key] = self.of(job, count).slow_factor(level, expected_s, count)
        changed = SpeedBelief(is_declared=belief.is_declared, slower=slower)
        return replace(
            job,
            confidence=level,
            belief=changed,
            profile_steps_per_s={
                count: rate * belief.factor(count) / changed.factor(count) for count, rate in rates.items()
            },
        )
