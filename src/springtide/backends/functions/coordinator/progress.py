"""The progress of a job, from the reports of its functions: steps, losses, states that are complete."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from springtide.core.events import ProgressReported
from springtide.core.functions import FunctionPlan
from springtide.core.wire.functions import LARGEST_LOSS, FunctionReport
from springtide.core.workload import WorkloadId


@dataclass(eq=False)
class _Told:
    """The losses of one step by replica (mean loss, number of samples); complete once all `num_replicas` reported."""

    num_replicas: int
    by: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.by) >= self.num_replicas


class FunctionProgress:
    """`furthest` is the most steps that every place has ever committed; `losses` holds (step, mean, samples) once.

    `diverged_at_step` is the first step whose mean loss was NaN or infinite.
    """

    def __init__(self, job_id: WorkloadId, furthest: int = 0) -> None:
        self._job_id = job_id
        self.furthest = furthest
        self.total_steps: int | None = None
        self.losses: list[tuple[int, float, int]] = []
        self.diverged_at_step: int | None = None
        self.ids_digest = ""
        self._digest_of = 0
        self._open: dict[int, _Told] = {}
        self._begun_at: int | None = None
        self._told = furthest
        self._epoch = 0
        self._batch: int | None = None
        self._metrics: dict[str, float] = {}
        self._saved: dict[int, int] = {}
        self.saved_step = 0

    @property
    def loss(self) -> float | None:
        """The newest step's mean loss; None where it is not known or not finite."""
        return self.losses[-1][1] if self.losses and not self.is_diverged else None

    @property
    def is_diverged(self) -> bool:
        """Whether the newest step's mean loss is NaN or infinite."""
        return bool(self.losses) and not math.isfinite(self.losses[-1][1])

    @property
    def final_step(self) -> int:
        """The newest step whose loss is final; 0 before there is any."""
        return self.losses[-1][0] if self.losses else 0

    @property
    def losses_known_step(self) -> int | None:
        """The step up to which losses will not become more complete; None where that is unknown.

        That is the newest step whose losses all replicas reported, or the one with which the present attempt began.
        """
        known = [step for step, told in self._open.items() if told.is_whole]
        known += [step for step, _, _ in self.losses[-1:]]
        known += [self._begun_at] if self._begun_at is not None else []
        return max(known, default=None)

    def observe(self, report: FunctionReport, plan: FunctionPlan) -> None:
        """Update from a report of the present attempt, except for its losses."""
        if report.total_steps:
            self.total_steps = report.total_steps
        self._epoch = max(self._epoch, report.epoch)
        self._batch = report.global_batch_size or self._batch
        if report.metrics:
            self._metrics = dict(report.metrics)
        if report.ids_digest and report.stage == 0 and report.step >= self._digest_of:
            # Reports are read concurrently: an older one may arrive after a newer one.
            self.ids_digest, self._digest_of = report.ids_digest, report.step
        if report.saved_step is not None and report.saved_step <= report.step:
            self._saved[report.stage] = max(self._saved.get(report.stage, 0), report.saved_step)

    def observe_losses(self, report: FunctionReport, plan: FunctionPlan) -> None:
        """Add the losses of a report of the present attempt; `plan` is the attempt's."""
        if report.stage != len(plan.stages) - 1:
            return
        for step, loss, count in report.losses:
            # Losses of steps after its own are of an earlier attempt, with maybe other samples per replica.
            if self.final_step < step <= report.step:
                told = self._open.setdefault(step, _Told(plan.num_replicas))
                is_finite = loss is not None and abs(loss) < LARGEST_LOSS
                told.by[report.replica] = (loss if loss is not None and is_finite else math.nan, count)

    def commit(self, step: int, *, is_last: bool = False) -> None:
        """Every place has committed `step` steps: their losses are final once all replicas have reported theirs.

        A replica reports its steps in order. So a loss that is missing before a complete step will never come: the
        function that knew it was replaced. The step's mean is then that of the other replicas.
        """
        self.furthest = max(self.furthest, step)
        whole = [one for one, told in self._open.items() if one <= step and (is_last or told.is_whole)]
        for one in sorted(one for one in self._open if one <= max(whole, default=0)):
            told = self._open.pop(one).by
            count = sum(number for _, number in told.values())
            total = sum(loss * number for _, (loss, number) in sorted(told.items()))
            mean = total / max(1, count)
            if self.diverged_at_step is None and not math.isfinite(mean):
                self.diverged_at_step = one
            self.losses.append((one, mean, count))

    def new_attempt(self, restore_step: int) -> None:
        """Drop the losses of steps that are redone: they will be reported again."""
        self._open = {step: told for step, told in self._open.items() if step <= restore_step}
        self._begun_at = self._digest_of = restore_step
        self._saved = {}

    def complete_state(self, num_stages: int, save_every: int) -> int:
        """The newest step whose state every stage has reported as saved; 0 where there is none."""
        if len(self._saved) < num_stages:
            return 0
        lowest, highest = min(self._saved.values()), max(self._saved.values())
        return lowest if lowest == highest else lowest - lowest % save_every

    def event(self, generation: int, plan: FunctionPlan, step_s: float | None) -> ProgressReported | None:
        """The progress since the last event; None where there is none. `step_s` is the newest step's duration."""
        if self.furthest <= self._told:
            return None
        self._told = self.furthest
        batch = self._batch
        return ProgressReported(
            job_id=self._job_id,
            generation=generation,
            step=self.furthest,
            total_steps=self.total_steps or 0,
            world_size=plan.num_functions,
            epoch=self._epoch,
            loss=self.loss,
            is_diverged=self.is_diverged,
            diverged_at_step=self.diverged_at_step,
            samples_per_s=batch / step_s if batch and step_s else None,
            metrics=self._metrics,
            global_batch_size=batch,
        )
