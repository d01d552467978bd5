"""What a job's record is made of as far as policies see it, too: the two share these values instead of copying them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from springtide.core.function_search import FunctionMeasurement, StreamView

# So many different measured steps are remembered of a job; the oldest goes first.
MAX_STEP_TIMES = 64


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it was measured: `placement` counts the workers on each node, descending.

    `step_s` is one forward and backward pass over `local_batch_size` samples on every worker with the exchange of
    gradients and the update; `sync_s` is the part of it that a further pass before the exchange would not take again.
    """

    placement: tuple[int, ...]
    local_batch_size: int
    step_s: float
    sync_s: float | None = None


class GradientNoise(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient's squared norm, and its variance at the job's initial batch size, as last estimated."""

    grad_sqr: float
    grad_var: float


class SpeedReportSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Reports of one group so close together that they tell of the same seconds, from `began_s` on.

    `samples_per_s` is what was known of so many workers before; None: nothing.
    """

    generation: int
    began_s: float
    samples_per_s: float | None = None


class JobBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner allows now: how many workers, and whether it runs at all.

    `pause_reason` says why it was paused, if not by its owner. `num_edits` is how often the owner changed its goal.
    """

    min_workers: int
    max_workers: int
    is_paused: bool = False
    pause_reason: str = ""
    num_edits: int = 0


class DeadlinePromise(msgspec.Struct, frozen=True, kw_only=True):
    """When the job's deadline was promised, and the finish that was planned then (seconds of the platform's clock)."""

    admitted_at_s: float | None = None
    promised_finish_s: float | None = None


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come, as its workers last reported at `progress_at_s`. `total_steps` None: not known yet.

    `equivalent_steps` of `total_equivalent_steps` count in steps of the initial batch size; None where the batch is
    fixed and both follow from `step`. `stream` is how far its growing dataset has come.
    """

    step: int = 0
    total_steps: int | None = None
    progress_at_s: float = 0.0
    epoch: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = {}
    equivalent_steps: float | None = None
    total_equivalent_steps: float | None = None
    stream: StreamView | None = None


class LearntSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What running the job has shown of its speed and cost.

    `throughput_samples_per_s` maps world size to what was measured there, `samples_per_s` is the newest report and
    `span` the one it belongs to. `step_times` holds the newest measurement of each placement and local batch size,
    `measurements` what the plans of a job on functions have shown, the newest last; functions of `too_small_mb` or less
    ran out of memory.
    """

    samples_per_s: float | None = None
    throughput_samples_per_s: Mapping[int, float] = {}
    span: SpeedReportSpan | None = None
    step_times: tuple[StepTime, ...] = ()
    noise: GradientNoise | None = None
    measurements: tuple[FunctionMeasurement, ...] = ()
    too_small_mb: int = 0


class JobRestarts(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong with the job's workers.

    `crashes_at_s` are the moments at which the whole job went down (charged to its restart budget), `losses_at_s` those
    at which one worker did and others went on. New workers wait out a back-off until `runnable_at_s`.
    """

    crashes_at_s: tuple[float, ...] = ()
    losses_at_s: tuple[float, ...] = ()
    runnable_at_s: float = 0.0
    num_restarts: int = 0


class GroupChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of the job's group came to.

    `pauses_s` holds the newest pause of each direction, `last_pause_s` the newest of all. `changed_s` is how long the
    job stood still for changes, all together; `change_s` is what the last forming of a group took, from the decision
    (`resizing_since_s`) to its first step, at `resized_at_s`.
    """

    num_resizes: int = 0
    num_preemptions: int = 0
    last_pause_s: float | None = None
    pauses_s: Mapping[str, float] = {}
    resized_at_s: float | None = None
    changed_s: float = 0.0
    change_s: float = 0.0
    resizing_since_s: float = 0.0
