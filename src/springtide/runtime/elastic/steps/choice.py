"""Which way a job's steps are computed and exchanged."""

from __future__ import annotations

from springtide.core.workload import TrainingJob
from springtide.runtime.elastic.steps.method import StepMethod
from springtide.runtime.elastic.steps.overlapped import OverlappedSteps
from springtide.runtime.elastic.steps.sharded import ShardedSteps
from springtide.runtime.models.named_tensors import TrainingState


def step_method(job: TrainingJob, state: TrainingState, *, measures_noise: bool) -> StepMethod:
    """Sharded steps for an exact job, and where gradient noise is measured, which takes several parts of a batch."""
    if job.exact or measures_noise:
        return ShardedSteps(state, job.num_virtual_shards, measures_noise=measures_noise)
    return OverlappedSteps(state)
