"""What tenants of a modelled GPU run: kernels, iterations made of them, and when requests come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from springtide.core.shares import Share
from springtide_studies.dilu.share_latency import ShareLatency

# What is launched and gated as one kernel here stands for a group of kernels of about this length.
KERNEL_S = 0.001
# A training step is a forward pass and a backward pass of twice its work.
TRAINING_PASSES = 3.0
# How many blocks a second of the whole device launches: what a policy that counts blocks sees. An A100 holds some
# 108 x 16 blocks at once, of some 40 us each.
BLOCKS_PER_DEVICE_S = 40e6


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel: how long it takes alone, which fractions of the SMs and of the memory bandwidth it fills."""

    duration_s: float
    sm_fraction: float
    bandwidth_fraction: float = 0.0
    num_blocks: float = 0.0

    @property
    def device_s(self) -> float:
        """Its work, in seconds of the whole device."""
        return self.duration_s * self.sm_fraction


class IterationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: host work first, then kernels in order on one stream, then a wait that needs no device."""

    host_s: float
    kernels: tuple[Kernel, ...]
    idle_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """How long it takes alone."""
        return self.host_s + sum(kernel.duration_s for kernel in self.kernels) + self.idle_s

    @property
    def device_s(self) -> float:
        """Its work, in seconds of the whole device."""
        return sum(kernel.device_s for kernel in self.kernels)


class ModelledTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant of the device: plans by batch size, and the instants at which requests come (training: none).

    A training has one plan, under the size of its batch, and begins an iteration when the last one ended. An inference
    takes what waits, up to its largest batch, when it is free.
    """

    tenant_id: str
    share: Share
    is_slo: bool
    plans: Mapping[int, IterationPlan]
    arrivals: tuple[float, ...] = ()
    slo_s: float = 0.0

    @property
    def max_batch_size(self) -> int:
        """The largest batch there is a plan for."""
        return max(self.plans)


def plan_iteration(
    latency: ShareLatency,
    batch_size: int,
    *,
    passes: float = 1.0,
    idle_fraction: float = 0.0,
    bandwidth_fraction: float = 0.0,
) -> IterationPlan:
    """Cut an iteration of a measured model into kernels of about a millisecond.

    `passes` multiplies its device work (training: 3), `idle_fraction` is the part of the whole iteration alone that
    waits for a collective.
    """
    width = latency.saturation_at(batch_size)
    duration_s = passes * latency.device_s(batch_size) / width
    num_kernels = max(1, round(duration_s / KERNEL_S))
    kernel = Kernel(
        duration_s=duration_s / num_kernels,
        sm_fraction=width,
        bandwidth_fraction=bandwidth_fraction,
        num_blocks=duration_s / num_kernels * width * BLOCKS_PER_DEVICE_S,
    )
    busy_s = latency.host_s + duration_s
    return IterationPlan(
        host_s=latency.host_s,
        kernels=(kernel,) * num_kernels,
        idle_s=busy_s * idle_fraction / (1.0 - idle_fraction),
    )


def poisson_arrivals(rng: np.random.Generator, rate_per_s: float, horizon_s: float) -> tuple[float, ...]:
    """Return arrivals of a Poisson process."""
    return gamma_arrivals(rng, rate_per_s, horizon_s, 1.0)


def gamma_arrivals(
    rng: np.random.Generator, rate_per_s: float, horizon_s: float, variation: float
) -> tuple[float, ...]:
    """Return arrivals whose gaps are Gamma distributed with this coefficient of variation (1: Poisson)."""
    shape = 1.0 / variation**2
    arrivals: list[float] = []
    now_s = 0.0
    while now_s < horizon_s:
        for gap_s in rng.gamma(shape, 1.0 / (rate_per_s * shape), size=256).tolist():
            now_s += gap_s
            if now_s >= horizon_s:
                break
            arrivals.append(now_s)
    return tuple(arrivals)


def bursty_arrivals(
    rng: np.random.Generator, rate_per_s: float, horizon_s: float, *, factor: float = 4.0, every_s: float = 8.0
) -> tuple[float, ...]:
    """Return Poisson arrivals that surge to `factor` times a calm rate in the second quarter of each period.

    The mean rate is `rate_per_s`.
    """
    calm_per_s = rate_per_s / (1.0 + 0.25 * (factor - 1.0))
    return thinned_arrivals(
        rng,
        lambda now_s: calm_per_s * (factor if 0.25 <= now_s / every_s % 1.0 < 0.5 else 1.0),
        calm_per_s * factor,
        horizon_s,
    )


def thinned_arrivals(
    rng: np.random.Generator, rate_at: Callable[[float], float], peak_per_s: float, horizon_s: float
) -> tuple[float, ...]:
    """Return arrivals of a Poisson process whose rate changes with time, at most `peak_per_s`."""
    candidates = poisson_arrivals(rng, peak_per_s, horizon_s)
    draws = rng.random(len(candidates)).tolist()
    return tuple(now_s for now_s, draw in zip(candidates, draws, strict=True) if draw * peak_per_s < rate_at(now_s))


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return a percentile of sorted values, 0.0 of none."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(fraction * len(ordered)) - 1))] if ordered else 0.0
