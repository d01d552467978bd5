"""Training on functions without a pipeline, as published: LambdaML and HybridPS, each with gradient accumulation, too
(FuncPipe, section 5.1), timed with the same profile and bandwidths as pipelines are.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from springtide.core.functions import MIB, LayerProfile, ModelProfile

BaselineName = Literal["LambdaML", "LambdaML-GA", "HybridPS", "HybridPS-GA"]
BASELINES: tuple[BaselineName, ...] = ("LambdaML", "LambdaML-GA", "HybridPS", "HybridPS-GA")


class ParameterServerBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that all workers of HybridPS share: its link each way, and its price."""

    name: str
    bytes_per_s: float
    usd_per_hour: float


# A c5.9xlarge (FuncPipe, section 5.1): 10 Gbit/s and the list price of us-east-1.
C5_9XLARGE = ParameterServerBaseline(name="c5.9xlarge", bytes_per_s=10e9 / 8, usd_per_hour=1.53)


class BaselineStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one of them: on how many workers of how much memory, its time by part, and the memory held (c_mem).

    `cost_mb_s` is that of the functions (equation 6 with P = 1), `server_usd` what the parameter server adds.
    """

    name: BaselineName
    num_workers: int
    memory_mb: int
    local_batch_size: int
    step_s: float
    computation_s: float
    sync_s: float
    cost_mb_s: float
    server_usd: float = 0.0


def baseline_step(
    name: BaselineName, profile: ModelProfile, global_batch_size: int, *, server: ParameterServerBaseline = C5_9XLARGE
) -> BaselineStep | None:
    """What a step of the baseline takes, or None where no function holds the whole model with one sample.

    Every worker has the whole model. LambdaML and HybridPS take the largest memory and the largest local batch that
    fits it, and as many workers as that needs; with accumulation (GA) as many workers have the least memory that
    holds the model with one sample at a time. Computation is taken to be proportional to samples and does not overlap
    with communication, so the profile's slowdown does not count. One worker alone exchanges nothing and needs no
    parameter server.
    """
    largest = max(profile.memory_mb)
    num_workers = _num_workers(profile, largest, global_batch_size)
    if num_workers is None:
        return None
    local = -(-global_batch_size // num_workers)
    memory_mb = largest
    if name.endswith("-GA"):
        fitting = [size for size in sorted(profile.memory_mb) if _largest_batch(profile, size, num_workers) >= 1]
        memory_mb = fitting[0]
    size = profile.memory_mb.index(memory_mb)
    sample_s = _computation_s(profile, size) / profile.micro_batch_size
    computation_s = local * sample_s
    sync_s = 0.0
    server_usd = 0.0
    if num_workers > 1:
        sync_s = _sync_s(name, profile, profile.bytes_per_s[size], num_workers, server)
        if name.startswith("Hybrid"):
            server_usd = (computation_s + sync_s) / 3600.0 * server.usd_per_hour
    step_s = computation_s + sync_s
    return BaselineStep(
        name=name,
        num_workers=num_workers,
        memory_mb=memory_mb,
        local_batch_size=local,
        step_s=step_s,
        computation_s=computation_s,
        sync_s=sync_s,
        cost_mb_s=step_s * memory_mb * num_workers,
        server_usd=server_usd,
    )


def _num_workers(profile: ModelProfile, memory_mb: int, global_batch_size: int) -> int | None:
    """The fewest that the batch fits on; more than one need memory for what they exchange."""
    if _largest_batch(profile, memory_mb, 1) >= global_batch_size:
        return 1
    shared = _largest_batch(profile, memory_mb, 2)
    return None if shared < 1 else max(2, -(-global_batch_size // shared))


def _largest_batch(profile: ModelProfile, memory_mb: int, num_workers: int) -> int:
    """The most samples that fit: constraint 3b for the whole model, with activations by the sample; 0 if none do."""
    if None in (time for layer in profile.layers for time in _times(profile, memory_mb, layer)):
        return 0
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    activations = sum(layer.activation_bytes for layer in profile.layers) / profile.micro_batch_size
    free = memory_mb * MIB - profile.base_bytes - parameters * (2 if num_workers == 1 else 4)
    return max(0, math.floor(free / max(activations, 1e-9)))


def _times(profile: ModelProfile, memory_mb: int, layer: LayerProfile) -> tuple[float | None, float | None]:
    size = profile.memory_mb.index(memory_mb)
    return layer.forward_s[size], layer.backward_s[size]


def _computation_s(profile: ModelProfile, size: int) -> float:
    """Forward and backward of one micro-batch through all layers, alone on a worker of that size."""
    return sum((layer.forward_s[size] or 0.0) + (layer.backward_s[size] or 0.0) for layer in profile.layers)


def _sync_s(
    name: BaselineName, profile: ModelProfile, bytes_per_s: float, num_workers: int, server: ParameterServerBaseline
) -> float:
    num_bytes = sum(layer.parameter_bytes for layer in profile.layers)
    if name.startswith("Lambda"):
        # Three phases (equation 1).
        return (3.0 - 2.0 / num_workers) * num_bytes / bytes_per_s + 4.0 * profile.latency_s
    # Gradients up, parameters down, each over what the server's link leaves for one of its workers.
    share = min(bytes_per_s, server.bytes_per_s / num_workers)
    return 2.0 * num_bytes / share + 2.0 * profile.latency_s
