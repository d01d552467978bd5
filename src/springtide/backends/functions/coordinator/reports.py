"""What the control plane is told of a run: what it uses, how far it is, which plan is in force."""

from __future__ import annotations

import math
from typing import Literal

from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.messages import Order
from springtide.backends.functions.coordinator.run import Run
from springtide.backends.functions.coordinator.saved_states import SavedStates
from springtide.core.events import JobResized, ReplicaStopped, UsageReported
from springtide.core.functions import FunctionPlan
from springtide.core.status.functions import MAX_CHANGES, PlanChange

USAGE_INTERVAL_S = 5.0


class RunReports:
    """Makes the events of a run. What is reported counts as reported: each event is to be sent."""

    def __init__(self, saved: SavedStates) -> None:
        self._saved = saved
        self._usage_at_s = -math.inf

    def is_usage_due(self, run: Run) -> bool:
        return run.now_s - self._usage_at_s >= USAGE_INTERVAL_S

    def usage(self, run: Run) -> UsageReported:
        usage = run.ledger.usage(run.now_s)
        self._usage_at_s = run.now_s
        return UsageReported(job_id=run.facts.job_id, usage=usage, bill=run.ledger.bill(usage))

    def progress(self, run: Run, plan: FunctionPlan) -> list[Order]:
        """The order that reports progress, if there is any to report."""
        event = run.progress.event(run.generation, plan, run.pace.measured_step_s)
        return [] if event is None else [messages.Emit(event=event)]

    def stopped(self, run: Run) -> ReplicaStopped:
        return ReplicaStopped(workload_id=run.facts.job_id, replica_id=run.facts.replica_id)

    def resized_by_start(self, run: Run) -> JobResized:
        """Functions train as the newest generation."""
        run.resized_generation = run.generation
        if run.paused_at_s is None:
            return self.resized(run, "resume" if run.record is not None and run.record.restore_step else "start", 0.0)
        pause_s, run.paused_at_s = run.now_s - run.paused_at_s, None
        return self.resized(run, "replace", pause_s)

    def resized_unless_reported(self, run: Run, first: Literal["start", "resume"]) -> list[Order]:
        """The order that reports the newest generation as in force although none of its functions ran.

        `first` is the direction to report where no earlier generation was.
        """
        if run.resized_generation >= run.generation:
            return []
        run.resized_generation = run.generation
        return [messages.Emit(event=self.resized(run, "replace" if run.changes else first, 0.0))]

    def resized(self, run: Run, direction: Literal["start", "resume", "replace"], pause_s: float) -> JobResized:
        """The plan is in force after a pause; it also is the newest of the changes that users are told."""
        step = run.record.restore_step if run.record is not None else self._saved.newest_step
        if run.plan is not None:
            change = PlanChange(step=step, at_s=run.now_s, plan=run.plan, pause_s=pause_s, num_stayed=run.num_stayed)
            run.changes = (*run.changes, change)[-MAX_CHANGES:]
        return JobResized(
            job_id=run.facts.job_id,
            generation=run.generation,
            world_size=1,
            step=max(step, run.progress.furthest if direction == "replace" else step),
            pause_s=pause_s,
            direction=direction,
        )
