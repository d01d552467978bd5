"""The model of a worker that holds a whole model, before it runs, and the sizes that it can have at a service."""

from __future__ import annotations

import math

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import SearchSpace, WorkerModel
from springtide.core.functions import MIB, FunctionService, MemorySize, ModelProfile
from springtide.perf.functions.scale import compute_speed
from springtide.perf.functions.services import (
    interpolated,
    lambda_bytes_per_s,
    lambda_enhanced_bytes_per_s,
    lambda_vcpus,
)

# SMLT's granularity of memory (section 3.2), which is also the smallest function of the providers.
STEP_MB = 128
# The default limit of workers: with more, shares of a batch get too small to be worth a request.
MOST_WORKERS = 200
_TOLERANCE = 1e-6


def worker_model_of(profile: ModelProfile, service: FunctionService | None = None) -> WorkerModel:
    """The worker model of a profile: sums over its layers, per sample, on one vCPU.

    A profile with one size was measured on one core. One with several sizes belongs to `service`, and its times on the
    largest size are converted to one vCPU. Raises InvalidRequest if that size is not known or a layer has no time.
    """
    column, speed = len(profile.memory_mb) - 1, 1.0
    if column > 0:
        known = {} if service is None else {size.memory_mb: size for size in service.sizes}
        largest = known.get(profile.memory_mb[-1])
        if largest is None:
            raise InvalidRequest(
                f"the profile of {profile.model} has {len(profile.memory_mb)} memory sizes of an unknown service; take "
                "one on one core: springtide profile FILE --layers"
            )
        speed = compute_speed(largest.vcpus)
    pass_s = 0.0
    for layer in profile.layers:
        forward_s, backward_s = layer.forward_s[column], layer.backward_s[column]
        if forward_s is None or backward_s is None:
            raise InvalidRequest(f"layer {layer.name} has no measured time; profile it again where it fits")
        pass_s += (forward_s + backward_s) * speed
    size = profile.micro_batch_size
    fixed_s = min(profile.fixed_s * speed, pass_s)
    return WorkerModel(
        parameter_bytes=sum(layer.parameter_bytes for layer in profile.layers),
        sample_s=(pass_s - fixed_s) / size,
        fixed_s=fixed_s,
        sample_bytes=-(-sum(layer.activation_bytes for layer in profile.layers) // size),
        micro_batch_size=size,
        base_bytes=profile.base_bytes,
        source=profile.source,
    )


def worker_bytes(model: WorkerModel, size_factor: float = 1.0) -> float:
    """The memory of a worker during a pass over one micro-batch, for a model `size_factor` times as large."""
    activations = model.sample_bytes * model.micro_batch_size
    return model.base_bytes + size_factor * (model.state_factor * model.parameter_bytes + activations)


def space_of(
    service: FunctionService, model: WorkerModel, max_workers: int | None = None, step_mb: int = STEP_MB
) -> SearchSpace:
    """All numbers of workers up to the maximum, with all memory sizes that hold the model, up to the service's largest.

    Sizes are the multiples of `step_mb`, with the CPU and link that the provider gives them (from its published curve
    if there is one, else interpolated between its named sizes). The default of `max_workers` is the service's
    concurrency, at most MOST_WORKERS. Raises InvalidRequest if no size holds the model, with advice.
    """
    if step_mb < 1 or (max_workers is not None and max_workers < 1):
        raise InvalidRequest("a search needs at least one worker, and a step of memory of at least 1 MB")
    needed, largest = worker_bytes(model), service.sizes[-1]
    if needed > largest.memory_mb * MIB:
        raise InvalidRequest(
            f"a worker needs {math.ceil(needed / MIB):,} MB to hold the whole model and {model.micro_batch_size} "
            f"samples, and the largest function of {service.name} has {largest.memory_mb:,} MB; cut the model into "
            "stages (without a search), or take a smaller micro-batch"
        )
    curve = _Curve(service)
    first = max(math.ceil(needed / MIB / step_mb), math.ceil(curve.least_mb / step_mb))
    memory_mb = list(range(first * step_mb, largest.memory_mb + 1, step_mb))
    if not memory_mb or memory_mb[-1] != largest.memory_mb:
        memory_mb.append(largest.memory_mb)
    most = min(service.concurrency, MOST_WORKERS) if max_workers is None else min(max_workers, service.concurrency)
    return SearchSpace(max_workers=most, sizes=tuple(curve.size(each) for each in memory_mb))


class _Curve:
    """CPU and link for any memory size of a service, derived from its named sizes."""

    def __init__(self, service: FunctionService) -> None:
        named = service.sizes
        self._vcpus = tuple((size.memory_mb, size.vcpus) for size in named)
        self._links = tuple((size.memory_mb, size.bytes_per_s) for size in named)
        self._most_vcpus = named[-1].vcpus
        self._is_lambda_cpu = all(
            math.isclose(size.vcpus, min(lambda_vcpus(size.memory_mb), self._most_vcpus), rel_tol=_TOLERANCE)
            for size in named
        )
        self._link = next(
            (
                link
                for link in (lambda_bytes_per_s, lambda_enhanced_bytes_per_s)
                if all(math.isclose(size.bytes_per_s, link(size.memory_mb), rel_tol=_TOLERANCE) for size in named)
            ),
            None,
        )
        # Sizes below the smallest named one are known only from a provider's published curve.
        self.least_mb = STEP_MB if self._is_lambda_cpu else named[0].memory_mb

    def size(self, memory_mb: int) -> MemorySize:
        if self._is_lambda_cpu:
            vcpus = min(lambda_vcpus(memory_mb), self._most_vcpus)
        else:
            vcpus = interpolated(self._vcpus, memory_mb)
        bytes_per_s = interpolated(self._links, memory_mb) if self._link is None else self._link(memory_mb)
        return MemorySize(memory_mb=memory_mb, vcpus=vcpus, bytes_per_s=bytes_per_s)
