"""The search for a job's functions: how many workers of how much memory, and what is known before and while it runs.

Terms are those of SMLT (sections 3.2 and 4.1). A worker holds the whole model and computes its share of each global
batch; a configuration is a number of workers and their memory.
"""

from __future__ import annotations

import msgspec

from springtide.core.functions import MIB, FunctionPlan, MemorySize

# What is remembered of a job's earlier configurations, and of earlier runs of the same function.
MAX_MEASUREMENTS = 64


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a worker's step before it runs, as measured on one core.

    A worker with n samples computes `fixed_s` + n x `sample_s` on one vCPU, and exchanges `parameter_bytes` of
    gradients. It holds `base_bytes` (interpreter and framework), `state_factor` x `parameter_bytes`, and
    `sample_bytes` for each of the `micro_batch_size` samples of one pass. `source` says how it was taken.
    """

    parameter_bytes: int
    sample_s: float
    fixed_s: float = 0.0
    sample_bytes: int = 0
    micro_batch_size: int = 4
    base_bytes: int = 300 * MIB
    state_factor: float = 4.0
    source: str = ""


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The configurations to choose from: each number of workers within the bounds, each of these sizes, ascending."""

    max_workers: int
    sizes: tuple[MemorySize, ...]
    min_workers: int = 1


class FunctionMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What `num_steps` steps as one plan have shown: means of a step, and how far single steps were off.

    `compute_s` and `sync_s` are of the slowest worker; `usd` is what a step costs, functions and requests together.
    `gradient_bytes` is what each worker exchanged. A new measurement of the same plan, batch and gradient replaces the
    one before.
    """

    plan: FunctionPlan
    global_batch_size: int
    gradient_bytes: int
    num_steps: int
    step_s: float
    deviation_s: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    usd: float = 0.0

    def is_of_same(self, other: FunctionMeasurement) -> bool:
        """Whether both measure the same plan at the same batch size and number of gradient bytes."""
        return (self.plan, self.global_batch_size, self.gradient_bytes) == (
            other.plan,
            other.global_batch_size,
            other.gradient_bytes,
        )


class FunctionSearch(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's configuration is searched with: its model, the space, and what earlier runs have shown.

    `error_fraction` is by how much predictions of the model alone have been off; `has_parameter_store` says that what
    travels goes through one.
    """

    model: WorkerModel
    space: SearchSpace
    earlier: tuple[FunctionMeasurement, ...] = ()
    error_fraction: float = 0.25
    has_parameter_store: bool = False


class BatchPhase(msgspec.Struct, frozen=True, kw_only=True):
    """From this epoch on (from 0) a step has so many samples over all workers: b_i of a batch schedule."""

    from_epoch: int
    global_batch_size: int


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a dataset that grows: samples so far, how fast they come, and whether that is all."""

    name: str
    num_samples: int
    arrivals_per_s: float = 0.0
    is_closed: bool = False


def batch_at(phases: tuple[BatchPhase, ...], epoch: int, default: int) -> int:
    """The global batch of an epoch: that of the last phase that has begun, or the default before the first."""
    size = default
    for phase in phases:
        if phase.from_epoch <= epoch:
            size = phase.global_batch_size
    return size


def steps_of(phases: tuple[BatchPhase, ...], num_samples: int, num_epochs: int, default: int) -> int:
    """How many steps all epochs have: each epoch has as many as its batch needs for all samples once."""
    return sum(-(-num_samples // batch_at(phases, epoch, default)) for epoch in range(num_epochs))
