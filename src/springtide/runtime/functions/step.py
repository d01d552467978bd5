"""Values of a training step on functions: the training's position, and the result of a committed step."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.core.wire.functions import LaneTimes
from springtide.runtime.data.shards import GlobalBatch


@dataclass(frozen=True, slots=True)
class Position:
    """Where a training stands: committed steps, the samples behind it, and the chain of their ids."""

    step: int = 0
    num_seen: int = 0
    ids_digest: str = ""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A committed step. `loss` is the mean over this place's own samples, on the last stage only.

    `is_last` says that at least one place asked for the step to be the last one: the value is the same at all places.
    """

    batch: GlobalBatch
    num_samples: int
    loss: float | None
    is_last: bool
    lanes: LaneTimes
