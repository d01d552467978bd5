"""The parts of a job's record that policies see, too: record and view share these values instead of copying them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from springtide.core.function_search import FunctionMeasurement, StreamView
from springtide.core.functions import FunctionMenu
from springtide.core.resources import NodeId
from springtide.core.workload import SpeedBasis, TrainingJob

# How many measured steps are kept per job; the oldest is dropped first.
MAX_STEP_TIMES = 64
# The metric in which an exact job says what its step costs: its processor time as a ratio to that of a plain step.
EXACT_COST = "exact_cost"


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The measured time of a step on a placement, which is the number of workers on each node, descending.

    `step_s` covers one forward and backward pass over `local_batch_size` samples on every worker, the exchange of
    gradients and the update; `sync_s` is the part of it that a further pass before the exchange would not add.
    `accelerator` is the model of the devices (empty: not known, or several).
    """

    placement: tuple[int, ...]
    local_batch_size: int
    step_s: float
    sync_s: float | None = None
    accelerator: str = ""

    def is_of_same(self, other: StepTime) -> bool:
        """Whether both are measurements of the same placement, local batch size and model of device."""
        mine = (self.placement, self.local_batch_size, self.accelerator)
        return mine == (other.placement, other.local_batch_size, other.accelerator)


class GradientNoise(msgspec.Struct, frozen=True, kw_only=True):
    """The latest estimates of the gradient's squared norm, and of its variance at the job's initial batch size."""

    grad_sqr: float
    grad_var: float


class SpeedReportSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Speed reports of one group that are so close together that they count as one measurement, from `began_s` on.

    `samples_per_s` is the average speed on this number of workers before the span; None if there was none.
    """

    generation: int
    began_s: float
    samples_per_s: float | None = None


class JobBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner allows now: how many workers, and whether the job runs at all.

    `pause_reason` says why the job was paused, if not by its owner. `num_edits` counts changes of its goal.
    `fixed_reason` says why it has one worker although it was submitted for a range, `limit_reason` what keeps it from
    more than `max_workers` for now although its owner allows more.
    """

    min_workers: int
    max_workers: int
    is_paused: bool = False
    pause_reason: str = ""
    num_edits: int = 0
    fixed_reason: str = ""
    limit_reason: str = ""


class JobMove(msgspec.Struct, frozen=True, kw_only=True):
    """The job's move from machines to functions, where it runs by `menu`.

    It is "asked" until its workers have left with a checkpoint, and "done" from then on; "failed" if no function could
    start from that checkpoint, so that the job is on machines again, as it was `before` and within these `bounds`.
    `usd_per_device_hour` is the price of what it had on machines. `is_automatic`: the platform decided on it.
    """

    menu: FunctionMenu
    reason: str
    usd_per_device_hour: float
    is_automatic: bool
    state: Literal["asked", "done", "failed"] = "asked"
    before: TrainingJob | None = None
    bounds: JobBounds | None = None


class DeadlinePromise(msgspec.Struct, frozen=True, kw_only=True):
    """When the job's deadline was promised, and the finish that was planned then (seconds of the platform's clock)."""

    admitted_at_s: float | None = None
    promised_finish_s: float | None = None


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come, as its workers last reported at `progress_at_s`. `total_steps` None: not known yet.

    `equivalent_steps` of `total_equivalent_steps` count in steps of the initial batch size; None if the batch is
    fixed, where both follow from `step`. `stream` is the state of its growing dataset. `is_diverged`: the newest
    loss was NaN or infinite, and `loss` is the last one that was not; `diverged_at_step` is the first step with
    such a loss. `longest_gap_s` is the longest time from one report of a new step to the next; `stalled_since_s` is
    set while the job counts as stalled, to when it was last seen to progress. `exact_obstacle` is as last reported.
    """

    step: int = 0
    total_steps: int | None = None
    progress_at_s: float = 0.0
    epoch: int = 0
    loss: float | None = None
    is_diverged: bool = False
    diverged_at_step: int | None = None
    metrics: Mapping[str, float] = {}
    equivalent_steps: float | None = None
    total_equivalent_steps: float | None = None
    stream: StreamView | None = None
    longest_gap_s: float = 0.0
    stalled_since_s: float | None = None
    exact_obstacle: str = ""


class LearntSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of the job's speed and cost while it ran.

    `throughput_samples_per_s` maps world size to the average speed, `samples_per_s` is the newest report and `span` the
    span that it belongs to. `by_accelerator` has the same average speeds by the model of the devices, where that is
    known; the former are then those on the model of the last report. `step_times` holds the newest measurement of each
    placement, local batch size and model,
    `measurements` those of the plans of a job on functions, the newest last. Functions with `too_small_mb` of memory or
    less ran out of it.
    """

    samples_per_s: float | None = None
    throughput_samples_per_s: Mapping[int, float] = {}
    span: SpeedReportSpan | None = None
    by_accelerator: Mapping[str, Mapping[int, float]] = {}
    step_times: tuple[StepTime, ...] = ()
    noise: GradientNoise | None = None
    measurements: tuple[FunctionMeasurement, ...] = ()
    too_small_mb: int = 0


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job that ended came out against what was expected of it.

    Its time at the expected speed was off by the factor exp(`error`); `num_failures` is how often it lost a worker in
    its `device_hours`.
    """

    family: str
    basis: SpeedBasis
    error: float
    num_failures: int = 0
    device_hours: float = 0.0


class NodeRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A node turned a replica of the workload away before it ran, for the `count`-th time in a row.

    The workload does not try it again before `until_s`. `reason` is what the node said.
    """

    node_id: NodeId
    count: int
    until_s: float
    reason: str = ""


class JobRestarts(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of the job's workers.

    `crashes_at_s` are the instants at which no worker was left (charged to its restart budget), `losses_at_s` those at
    which one worker was lost and others went on. After the first kind nothing of the job runs and it starts no earlier
    than `starts_at_s`; after the second its other workers train and none is added before `grows_at_s`. `refusals` are
    the nodes that turned workers away; they are not charged to its restart budget. `num_hangs` is how often in a row
    the job was restarted because it hung, without a step beyond `hung_at_step`.
    """

    crashes_at_s: tuple[float, ...] = ()
    losses_at_s: tuple[float, ...] = ()
    starts_at_s: float = 0.0
    grows_at_s: float = 0.0
    num_restarts: int = 0
    refusals: tuple[NodeRefusal, ...] = ()
    num_hangs: int = 0
    hung_at_step: int = 0


class GroupChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the changes of the job's group.

    `pauses_s` holds the newest pause of each direction, `last_pause_s` the newest of all. `changed_s` is the total time
    without training because of changes; `change_s` is how long the last change took, from the decision
    (`resizing_since_s`) to the group's first step at `resized_at_s`.
    """

    num_resizes: int = 0
    num_preemptions: int = 0
    last_pause_s: float | None = None
    pauses_s: Mapping[str, float] = {}
    resized_at_s: float | None = None
    changed_s: float = 0.0
    change_s: float = 0.0
    resizing_since_s: float = 0.0
