"""The state of one job's run on functions: its coordinator owns it, the coordinator's parts read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from springtide.backends.functions.coordinator.function_pool import FunctionPool, JobFacts
from springtide.backends.functions.coordinator.ledger import Ledger
from springtide.backends.functions.coordinator.messages import WriteControl
from springtide.backends.functions.coordinator.pace import StepTiming
from springtide.backends.functions.coordinator.progress import FunctionProgress
from springtide.core.functions import FunctionPlan, Usage
from springtide.core.status.functions import PlanChange
from springtide.core.wire.functions import ControlRecord


class Mode(StrEnum):
    """What the run as a whole is doing."""

    # No plan yet, or paused: waiting for the control plane.
    IDLE = "idle"
    # Finding the saved step from which an attempt can begin.
    LOOKING = "looking"
    # Waiting for the parameter store.
    OPENING = "opening"
    RUNNING = "running"
    # Functions were told to stop; `After` says what follows once they have.
    CLOSING = "closing"
    # All have stopped: finding the step that they saved last.
    LOOKING_LAST = "looking_last"
    # No function runs because the stream has too few samples.
    RESTING = "resting"
    # The last step is done; the model's file is being put together.
    ASSEMBLING = "assembling"
    OVER = "over"


class After(StrEnum):
    """What to do once the functions have stopped."""

    NOTHING = ""
    RESIZE = "resize"
    PREEMPT = "preempt"
    STOP = "stop"
    BUDGET = "budget"
    LOST = "lost"
    FAILED = "failed"
    REST = "rest"
    DATA = "data"


@dataclass(eq=False)
class Run:
    """The state that the coordinator and its parts share. Only the coordinator sets `mode`, `after` and `attempt`.

    `now_s` is the instant of the stimulus being handled (platform seconds). `record` is the newest control record,
    `reason` the newest sentence for users. `plan` is in force as `generation`; `next_plan` follows once the functions
    have stopped. `resized_generation` is the newest generation reported to the control plane. `progress_at_s` is the
    last time a step was completed, or could not be for lack of samples; `close_by_s` when to stop waiting for functions
    to stop; `paused_at_s` since when functions stand still for another plan. Functions of generations from `stays_from`
    on may continue; `num_stayed` of them did at the newest change of plan.
    """

    facts: JobFacts
    ledger: Ledger
    pool: FunctionPool
    progress: FunctionProgress
    pace: StepTiming
    now_s: float
    progress_at_s: float
    mode: Mode = Mode.IDLE
    after: After = After.NOTHING
    record: ControlRecord | None = None
    plan: FunctionPlan | None = None
    next_plan: FunctionPlan | None = None
    generation: int = 0
    resized_generation: int = 0
    attempt: int = 0
    reason: str = ""
    close_by_s: float = math.inf
    paused_at_s: float | None = None
    stays_from: int = 0
    num_stayed: int = 0
    num_redone_steps: int = 0
    changes: tuple[PlanChange, ...] = ()

    @classmethod
    def of(cls, facts: JobFacts, now_s: float, base: Usage) -> Run:
        """A run that has not begun; `base` is what the job used before."""
        ledger = Ledger(facts.service, base, facts.budget_usd)
        return cls(
            facts=facts,
            ledger=ledger,
            pool=FunctionPool(facts, ledger),
            progress=FunctionProgress(facts.job_id),
            pace=StepTiming(facts.service, None),
            now_s=now_s,
            progress_at_s=now_s,
        )

    @property
    def is_stepping(self) -> bool:
        """Whether functions make steps, be it only up to the next boundary."""
        if self.record is None or self.record.verb == "stop":
            return False
        return self.mode is Mode.RUNNING or (self.mode is Mode.CLOSING and self.record.last_step is not None)

    @property
    def is_starved(self) -> bool:
        """Whether the samples that the record releases are too few for another step."""
        record = self.record
        if record is None or record.num_available is None or record.is_stream_closed:
            return False
        return record.num_available < (self.progress.furthest + 1) * self.facts.global_batch_size

    def amend(self, **changes: object) -> WriteControl:
        """Change fields of the control record; returns the order that writes it."""
        assert self.record is not None
        self.record = replace(self.record, **changes)
        return WriteControl(record=self.record)

    def expect(self, plan: FunctionPlan) -> None:
        """Functions start anew under a plan: forget measured durations, and use the plan's prediction."""
        option = self.facts.option(plan)
        self.pace = StepTiming(self.facts.service, option.step_s if option is not None else None)

    def empty_slots(self) -> None:
        """Retire every slot of the present plan."""
        self.pool.retire(self.pool)
        self.pool.slots.clear()
