"""The position of a training on functions, and the result of a committed step."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.core.wire.functions import LaneTimes
from springtide.runtime.data.shards import GlobalBatch


@dataclass(frozen=True, slots=True)
class Position:
    """Committed steps, the samples they used, and a digest of the ids of these samples."""

    step: int = 0
    num_seen: int = 0
    ids_digest: str = ""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A committed step. `loss` is the mean over this place's own samples, on the last stage only.

    `is_last`: at least one place asked for this step to be the last one. The value is the same at all places.
    """

    batch: GlobalBatch
    num_samples: int
    loss: float | None
    is_last: bool
    lanes: LaneTimes
