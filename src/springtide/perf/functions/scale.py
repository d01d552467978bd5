"""Scales a profile that was measured on one core to the memory sizes of a service.

FuncPipe (section 3.4.2) profiles T_fc and T_bc on each size instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, FunctionService, LayerProfile, ModelProfile

# The serial fraction of a layer's computation; with it 4.7 vCPUs compute 4 times as fast as one.
SERIAL_FRACTION = 0.05


def compute_speed(vcpus: float, serial_fraction: float = SERIAL_FRACTION) -> float:
    """The speed relative to one core, by Amdahl's law; proportional below one core."""
    if vcpus <= 1.0:
        return vcpus
    return 1.0 / (serial_fraction + (1.0 - serial_fraction) / vcpus)


def scaled_profile(
    profile: ModelProfile,
    service: FunctionService,
    *,
    serial_fraction: float = SERIAL_FRACTION,
    core_speed: float = 1.0,
) -> ModelProfile:
    """The profile scaled to every memory size of the service.

    `profile` has one size, with times of one thread on one core; a vCPU of the service computes `core_speed` times as
    fast as that core. A layer has no time (None) on a size that cannot hold it with one micro-batch: a + 2 s + s_0
    (constraint 3b with one layer, no replicas). Raises InvalidRequest if a layer fits no size or was not measured.
    """
    if len(profile.memory_mb) != 1:
        raise InvalidRequest(
            f"the profile of {profile.model} already has {len(profile.memory_mb)} memory sizes; scale one that was "
            "measured on one core"
        )
    speeds = [compute_speed(size.vcpus, serial_fraction) * core_speed for size in service.sizes]
    return msgspec.structs.replace(
        profile,
        memory_mb=tuple(size.memory_mb for size in service.sizes),
        bytes_per_s=tuple(size.bytes_per_s for size in service.sizes),
        layers=tuple(_scaled_layer(layer, profile.base_bytes, service, speeds) for layer in profile.layers),
        latency_s=service.latency_s,
        source=f"{profile.source}; scaled to {service.name} by its CPU for each memory size",
    )


def layer_bytes(layer: LayerProfile, base_bytes: int) -> int:
    """The memory that one layer needs with one micro-batch: parameters, their gradients, activations, s_0."""
    return layer.activation_bytes + 2 * layer.parameter_bytes + base_bytes


def _scaled_layer(
    layer: LayerProfile, base_bytes: int, service: FunctionService, speeds: Sequence[float]
) -> LayerProfile:
    needed = layer_bytes(layer, base_bytes)
    fits = [needed <= size.memory_mb * MIB for size in service.sizes]
    if not any(fits):
        raise InvalidRequest(
            f"layer {layer.name} needs {-(-needed // MIB):,} MB with one micro-batch and the largest function of "
            f"{service.name} has {service.sizes[-1].memory_mb:,} MB; divide the layer, or take a smaller micro-batch"
        )
    forward_s, backward_s = layer.forward_s[0], layer.backward_s[0]
    if forward_s is None or backward_s is None:
        raise InvalidRequest(f"layer {layer.name} has no measured time; profile it again where it fits")
    return msgspec.structs.replace(
        layer,
        forward_s=tuple(forward_s / speed if fit else None for speed, fit in zip(speeds, fits, strict=True)),
        backward_s=tuple(backward_s / speed if fit else None for speed, fit in zip(speeds, fits, strict=True)),
    )
