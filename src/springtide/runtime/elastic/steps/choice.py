"""Which way a job's steps are computed and exchanged."""

from __future__ import annotations

from springtide.core.errors import InvalidRequest
from springtide.core.workload import TrainingJob
from springtide.runtime.elastic.steps.library import LibrarySteps
from springtide.runtime.elastic.steps.library_turns import LibraryTurns
from springtide.runtime.elastic.steps.method import StepMethod
from springtide.runtime.elastic.steps.overlapped import OverlappedSteps
from springtide.runtime.elastic.steps.sharded import ShardedSteps
from springtide.runtime.models.named_tensors import TrainingState


def step_method(
    job: TrainingJob,
    state: TrainingState,
    *,
    measures_noise: bool,
    micro_batch: int = 0,
    metrics: dict[str, float] | None = None,
    takes_turns: bool = False,
) -> StepMethod:
    """Sharded steps for an exact job, and where gradient noise is measured, which takes several parts of a batch.

    `micro_batch` is the most samples of one pass (0: no limit). Raises InvalidRequest if the job fixes its parts, and
    for several optimizers where a batch has several parts. The passes of a library's loop are its own; `takes_turns`:
    its program calls the optimizers' steps itself. What an exact job measures of its steps goes into `metrics`.
    """
    if job.entrypoint.has_library_loop:
        return LibraryTurns(state) if takes_turns else LibrarySteps(state)
    if len(state.optimizers) > 1 and (job.exact or measures_noise or micro_batch):
        raise InvalidRequest(
            f"{len(state.optimizers)} optimizers take turns on one pass over a batch; leave out micro_batch, exact and "
            "bounds of the batch"
        )
    if not job.exact:
        limits = [micro_batch, job.batch.max_local_size or 0 if job.batch is not None else 0]
        return OverlappedSteps(state, min(filter(None, limits), default=0), measures_noise=measures_noise)
    if micro_batch:
        how = "max_local_batch" if job.batch is not None else "a larger power of two as exact"
        raise InvalidRequest(
            f"micro_batch={micro_batch} cannot cut a job's fixed parts; leave it out, and give the job {how} "
            "for parts of fewer samples"
        )
    return ShardedSteps(state, job.num_virtual_shards, measures_noise=measures_noise, seed=job.seed, metrics=metrics)
