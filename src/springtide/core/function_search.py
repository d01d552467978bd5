"""The search for a job's functions: how many workers, with how much memory, and the measurements it is based on.

Terms are those of SMLT (sections 3.2 and 4.1). A worker holds the whole model and computes its share of each global
batch; a configuration is a number of workers and their memory.
"""

from __future__ import annotations

import msgspec

from springtide.core.functions import MIB, FunctionPlan, MemorySize

# How many measurements are kept of a job's configurations, and of earlier runs of the same function.
MAX_MEASUREMENTS = 64


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a worker's step before the job runs, as measured on one core.

    A worker with n samples computes for `fixed_s` + n x `sample_s` on one vCPU, and exchanges `parameter_bytes` of
    gradients. Its memory is `base_bytes` (interpreter and framework) + `state_factor` x `parameter_bytes` +
    `sample_bytes` for each of the `micro_batch_size` samples of one pass. `source` says how it was measured.
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
    """The configurations to choose from: every number of workers within the bounds, with every size (ascending)."""

    max_workers: int
    sizes: tuple[MemorySize, ...]
    min_workers: int = 1


class FunctionMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The mean time and cost of a step with one plan, over `num_steps` steps, and the deviation of single steps.

    `compute_s` and `sync_s` are those of the slowest worker; `usd` is the cost of a step, functions and requests
    together. `gradient_bytes` is what each worker exchanged. A new measurement of the same plan, batch and gradient
    size replaces the previous one.
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
    """The input of the search for a job's configuration: its model, the space, and measurements of earlier runs.

    `error_fraction` is the observed relative error of predictions from the model alone; `has_parameter_store` says that
    gradients are exchanged through a parameter store.
    """

    model: WorkerModel
    space: SearchSpace
    earlier: tuple[FunctionMeasurement, ...] = ()
    error_fraction: float = 0.25
    has_parameter_store: bool = False


class BatchPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a batch schedule: from this epoch (from 0) on a step has `global_batch_size` samples (b_i)."""

    from_epoch: int
    global_batch_size: int


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a growing dataset: samples so far, their rate of arrival, and whether it is closed."""

    name: str
    num_samples: int
    arrivals_per_s: float = 0.0
    is_closed: bool = False


def batch_at(phases: tuple[BatchPhase, ...], epoch: int, default: int) -> int:
    """The global batch size of an epoch: that of the last phase begun, or `default` before the first."""
    size = default
    for phase in phases:
        if phase.from_epoch <= epoch:
            size = phase.global_batch_size
    return size


def steps_of(phases: tuple[BatchPhase, ...], num_samples: int, num_epochs: int, default: int) -> int:
    """Number of steps of all epochs; the last step of an epoch may have fewer samples."""
    return sum(-(-num_samples // batch_at(phases, epoch, default)) for epoch in range(num_epochs))
