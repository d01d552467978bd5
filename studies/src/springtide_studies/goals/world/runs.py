"""One job in the world of goals: its course of steps, its meter of money, what its steps have shown, and its story."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from springtide.core.function_search import FunctionMeasurement, WorkerModel, batch_at, steps_of
from springtide.core.functions import Bill, FunctionPlan, FunctionPrices, Usage
from springtide.core.workload import JobState, ReplicaId, TrainingJob
from springtide.perf.functions.bill import bill_of, gb_s_of
from springtide_studies.goals.world.truth import StepTruth

# Measurements are told after so many steps, then whenever their number has doubled.
FIRST_TOLD = 3


class WorldCourse:
    """Which epoch and global batch each step of a job belongs to. `total_steps` is None for an open stream."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self.total_steps = None if job.stream else job.total_steps
        self._ends: list[int] = []
        if not job.stream and job.num_samples:
            self.total_steps = steps_of(job.batch_schedule, job.num_samples, job.num_epochs, job.global_batch_size)
            done = 0
            for epoch in range(job.num_epochs):
                done += -(-job.num_samples // batch_at(job.batch_schedule, epoch, job.global_batch_size))
                self._ends.append(done)

    def epoch_of(self, step: int) -> int:
        """The epoch of the step after `step` steps, from 0."""
        return next((epoch for epoch, end in enumerate(self._ends) if step < end), max(0, len(self._ends) - 1))

    def batch_of(self, step: int) -> int:
        """How many samples the step after `step` steps has, over all workers."""
        return batch_at(self._job.batch_schedule, self.epoch_of(step), self._job.global_batch_size)


class CostMeter:
    """What a job uses, counted as it goes."""

    def __init__(self, prices: FunctionPrices, has_parameter_store: bool) -> None:
        self._prices = prices
        self._has_parameter_store = has_parameter_store
        self._gb_s = self._puts = self._gets = self._stored_gb_s = self._store_s = 0.0
        self._invocations = 0

    def invoke(self, count: int) -> None:
        """So many functions were called; each asks for what it needs to begin."""
        self._invocations += count
        self._puts += 2 * count
        self._gets += 4 * count

    def run(self, plan: FunctionPlan, duration_s: float, *, count: int | None = None) -> None:
        """Functions of the plan (all, or so many of them) ran for so long."""
        num_functions = plan.num_functions if count is None else count
        self._gb_s += gb_s_of(plan.stages[0].memory_mb * num_functions, duration_s)

    def hold_store(self, duration_s: float) -> None:
        """The parameter store, where there is one, was up for so long."""
        self._store_s += duration_s if self._has_parameter_store else 0.0

    def ask(self, step: StepTruth, duration_s: float) -> None:
        """A step's requests, and what lay in the store meanwhile."""
        self._puts += step.num_puts
        self._gets += step.num_gets
        self._stored_gb_s += step.stored_gb * duration_s

    def usage(self) -> Usage:
        """All so far; counts rounded once."""
        return Usage(
            function_gb_s=self._gb_s,
            num_invocations=self._invocations,
            num_puts=round(self._puts),
            num_gets=round(self._gets),
            stored_gb_s=self._stored_gb_s,
            parameter_store_s=self._store_s,
        )

    def bill(self) -> Bill:
        """What that costs."""
        return bill_of(self.usage(), self._prices)


class Shown:
    """What the steps of one plan, batch and gradient have shown: sums for means."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._step_s = self._squares = self._compute_s = self._sync_s = self._usd = 0.0
        self._told = 0

    def add(self, step_s: float, compute_s: float, sync_s: float, usd: float) -> None:
        """One more step."""
        self.num_steps += 1
        self._step_s += step_s
        self._squares += step_s * step_s
        self._compute_s += compute_s
        self._sync_s += sync_s
        self._usd += usd

    def is_due(self) -> bool:
        """Whether it is to be told now; then it has been."""
        if self.num_steps < max(FIRST_TOLD, 2 * self._told):
            return False
        self._told = self.num_steps
        return True

    def measurement(self, plan: FunctionPlan, batch: int, gradient_bytes: int) -> FunctionMeasurement:
        """The means."""
        count = self.num_steps
        mean_s = self._step_s / count
        return FunctionMeasurement(
            plan=plan,
            global_batch_size=batch,
            gradient_bytes=gradient_bytes,
            num_steps=count,
            step_s=mean_s,
            deviation_s=math.sqrt(max(0.0, self._squares / count - mean_s * mean_s)),
            compute_s=self._compute_s / count,
            sync_s=self._sync_s / count,
            usd=self._usd / count,
        )


class WorldMoment(msgspec.Struct, frozen=True, kw_only=True):
    """A point in a run's history: from then on it ran as `plan` (None: as nothing), having done `step` steps."""

    at_s: float
    step: int
    plan: FunctionPlan | None
    spent_usd: float


class WorldReport(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it went, for pictures."""

    at_s: float
    step: int
    num_workers: int
    memory_mb: int
    global_batch_size: int
    step_s: float


class WorldPlanSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on its way: its joiners are warm at `ready_s`; until then those of the old plan go on."""

    plan: FunctionPlan
    begun_s: float
    ready_s: float
    num_joiners: int


class GoalRun:
    """Everything that the world knows of one job."""

    def __init__(
        self, job: TrainingJob, model: WorkerModel, meter: CostMeter, rng: np.random.Generator, submitted_s: float
    ) -> None:
        self.job, self.model, self.meter, self.rng = job, model, meter, rng
        self.course = WorldCourse(job)
        self.submitted_s = submitted_s
        self.ended_s: float | None = None
        self.state = JobState.PENDING
        self.reason = ""
        self.alternatives: tuple[str, ...] = ()
        self.replica_id: ReplicaId | None = None
        self.generation = 0
        self.plan: FunctionPlan | None = None
        self.change: WorldPlanSwitch | None = None
        self.step = self.saved_step = 0
        self.num_taken = 0
        self.is_up = self.is_leaving = self.is_parked = self.is_first_step = False
        # A step or a pause that was begun under another token has been called off.
        self.token = 0
        self.born_s = 0.0
        self.last_report_s = -math.inf
        self.num_deaths = self.num_redone = self.num_changes = self.num_starts = 0
        self.shown: dict[tuple[FunctionPlan, int, int], Shown] = {}
        self.moments: list[WorldMoment] = []
        self.told: list[WorldReport] = []
        self.committed: list[int] = []

    def shown_of(self, batch: int) -> Shown:
        """The sums for what runs now."""
        assert self.plan is not None
        return self.shown.setdefault((self.plan, batch, self.model.parameter_bytes), Shown())

    def note(self, at_s: float) -> None:
        """It changes what it runs as."""
        plan = self.plan if self.is_up else None
        self.moments.append(WorldMoment(at_s=at_s, step=self.step, plan=plan, spent_usd=self.meter.bill().total_usd))
