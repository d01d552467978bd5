"""Training on function services: what a service offers, what a model's layers need, and the plan that a job runs as.

Terms and symbols are those of FuncPipe (section 3.4 and appendix A). A megabyte of function memory is 2^20 bytes, as
providers count it. Weighted objectives are in MB s (memory held times time) plus seconds times a weight.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

MIB = 1 << 20
MAX_LAYERS = 1024
Collective = Literal["lambdaml", "funcpipe", "smlt", "parameter-server", "duplex", "all-to-all"]


class MemorySize(msgspec.Struct, frozen=True, kw_only=True):
    """A memory size of a function, with the compute and the speed of each link (up and down) that come with it."""

    memory_mb: int
    vcpus: float
    bytes_per_s: float


class FunctionPrices(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's prices in US dollars. Lists cost `usd_per_put`; reads that find nothing cost `usd_per_get`."""

    usd_per_gb_s: float
    usd_per_invocation: float = 0.0
    usd_per_put: float = 0.0
    usd_per_get: float = 0.0
    usd_per_stored_gb_month: float = 0.0
    usd_per_parameter_store_hour: float = 0.0


class FunctionService(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's functions as priced, limited capacity. `sizes` are in ascending order of memory.

    `lifetime_s` is the longest time of one invocation, `concurrency` the number that may run at a time, `latency_s` the
    time to the first byte of a request to the object store, `cold_start_s` the time until a new function's code runs.
    `total_vcpus` is the compute of all functions together if they share one machine (None: each has its own);
    `base_bytes` is the memory that a function uses before any user code runs.
    """

    name: str
    sizes: tuple[MemorySize, ...]
    prices: FunctionPrices
    lifetime_s: float = 900.0
    concurrency: int = 1000
    latency_s: float = 0.04
    cold_start_s: float = 5.0
    total_vcpus: float | None = None
    base_bytes: int = 0

    def size(self, memory_mb: int) -> MemorySize:
        """The size with this much memory. Raises KeyError."""
        for size in self.sizes:
            if size.memory_mb == memory_mb:
                return size
        raise KeyError(memory_mb)


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, per micro-batch: s_i, a_i, o_i, g_i and the computation times on each memory size (T_fc, T_bc).

    `gradient_bytes` is the size of the gradient that its backward pass sends to the previous layer. Times are in the
    order of the profile's `memory_mb`; None for sizes on which the layer does not fit.
    """

    name: str
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    gradient_bytes: int
    forward_s: tuple[float | None, ...]
    backward_s: tuple[float | None, ...]


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model's profiled layers and the constants of the functions on which they were profiled: the input of planning.

    `memory_mb` (M_j) and `bytes_per_s` (W_j) have one entry per memory size. `slowdown` is beta, the factor by which
    computation takes longer during communication; `latency_s` is t_lat, `base_bytes` is s_0. `micro_batch_size` is in
    samples. `fixed_s` is the part of a micro-batch's time on one core, over all layers, that does not grow with its
    samples. `source` says how the profile was obtained (measured, scaled, synthetic).
    """

    model: str
    micro_batch_size: int
    memory_mb: tuple[int, ...]
    bytes_per_s: tuple[float, ...]
    layers: tuple[LayerProfile, ...]
    latency_s: float = 0.04
    slowdown: float = 1.0
    base_bytes: int = 300 * MIB
    fixed_s: float = 0.0
    source: str = ""


class FunctionStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the pipeline: the layers from `first_layer` (counted from 0) up to, but not including, `end_layer`."""

    first_layer: int
    end_layer: int
    memory_mb: int


class FunctionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The functions that a job runs as: `stages` x `num_replicas` of them.

    A step's global batch is at most `num_replicas` x `num_micro_batches` x `micro_batch_size` samples. `num_chunks` is
    the number of parts in which each rank's split of a gradient is sent, `num_in_flight` the number of concurrent
    requests of a function on each link. `num_shards` is SMLT's m (0: as many as replicas).
    """

    stages: tuple[FunctionStage, ...]
    num_replicas: int = 1
    num_micro_batches: int = 1
    micro_batch_size: int = 4
    collective: Collective = "duplex"
    num_chunks: int = 1
    num_in_flight: int = 4
    num_shards: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError unless the stages follow each other without a gap and all counts are positive."""
        if not self.stages or self.stages[0].first_layer != 0:
            raise ValueError("the first stage begins at layer 0")
        if any(one.end_layer != other.first_layer for one, other in pairwise(self.stages)):
            raise ValueError("each stage begins where the one before it ends")
        if any(stage.end_layer <= stage.first_layer or stage.memory_mb <= 0 for stage in self.stages):
            raise ValueError("a stage has at least one layer and some memory")
        counts = (self.num_replicas, self.num_micro_batches, self.micro_batch_size, self.num_chunks, self.num_in_flight)
        if min(counts) < 1:
            raise ValueError("replicas, micro-batches, their size, chunks and requests in flight are at least 1")

    @property
    def num_functions(self) -> int:
        """Number of functions that run at a time."""
        return len(self.stages) * self.num_replicas

    @property
    def memory_mb(self) -> int:
        """The memory of all functions together (c_mem, equation 5)."""
        return self.num_replicas * sum(stage.memory_mb for stage in self.stages)


class FunctionOption(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run a job: time and cost of a step (functions and requests), and time and cost of the start."""

    plan: FunctionPlan
    step_s: float
    step_usd: float
    start_s: float = 0.0
    start_usd: float = 0.0


class FunctionMenu(msgspec.Struct, frozen=True, kw_only=True):
    """A job's Pareto-optimal options (no other is both faster and cheaper), cheapest first, planned before it runs.

    `recommended` is the index of the fastest one whose speed-up is worth its cost (FuncPipe, section 5.1, delta at
    least 0.8). `error_fraction` is the observed relative error of predictions of `step_s`.
    """

    service: str
    options: tuple[FunctionOption, ...]
    recommended: int = 0
    error_fraction: float = 0.12
    num_layers: int = 0
    source: str = "profile"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of everything that a provider charges for. `stored_gb_s` is the size of stored objects times how long.

    `machines_usd` is what a job that has moved to functions had cost on machines before.
    """

    function_gb_s: float = 0.0
    num_invocations: int = 0
    num_puts: int = 0
    num_gets: int = 0
    num_lists: int = 0
    num_deletes: int = 0
    stored_gb_s: float = 0.0
    parameter_store_s: float = 0.0
    machines_usd: float = 0.0

    def plus(self, other: Usage) -> Usage:
        """The sum of both."""
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What a run or a plan costs, in US dollars, item by item; `machines_usd` is of machines that it ran on before."""

    function_usd: float = 0.0
    invocation_usd: float = 0.0
    request_usd: float = 0.0
    storage_usd: float = 0.0
    parameter_store_usd: float = 0.0
    profiling_usd: float = 0.0
    machines_usd: float = 0.0

    @property
    def total_usd(self) -> float:
        """The sum."""
        return float(sum(getattr(self, name) for name in self.__struct_fields__))
