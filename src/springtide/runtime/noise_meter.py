"""Gradient noise from what one step's virtual shards show, smoothed; plain numbers that travel with the state."""

from __future__ import annotations

import math

import msgspec

from springtide.core.decision import GradientNoise
from springtide.core.workload import LearningRateRule
from springtide.perf.goodput import gain

_KEPT_FRACTION = 0.99


class NoiseState(msgspec.Struct, frozen=True, kw_only=True):
    """Moving means of the gradient's square norm and its variance at the initial batch, and the weight they have."""

    sqr: float = 0.0
    var: float = 0.0
    weight: float = 0.0

    def estimate(self) -> GradientNoise | None:
        """The two, with the bias of a young mean taken out; None before the first step."""
        if self.weight <= 0.0:
            return None
        return GradientNoise(grad_sqr=max(0.0, self.sqr / self.weight), grad_var=max(0.0, self.var / self.weight))


def observe(
    state: NoiseState | None, *, shard_square: float, mean_square: float, num_shards: int, scale: float
) -> NoiseState | None:
    """Take in one step (McCandlish et al., 2018, appendix A.1); the state itself where it says nothing."""
    if num_shards < 2 or not math.isfinite(shard_square) or not math.isfinite(mean_square):
        return state
    sqr = (num_shards * mean_square - shard_square) / (num_shards - 1)
    var = (shard_square - mean_square) * scale / (num_shards - 1)
    old = state or NoiseState()
    new = 1.0 - _KEPT_FRACTION
    return NoiseState(
        sqr=_KEPT_FRACTION * old.sqr + new * sqr,
        var=_KEPT_FRACTION * old.var + new * var,
        weight=_KEPT_FRACTION * old.weight + new,
    )


def learning_rate_factor(rule: LearningRateRule, scale: float, noise: GradientNoise | None) -> float:
    """What a batch `scale` times the initial one makes of the learning rate."""
    if rule == "none" or scale == 1.0:
        return 1.0
    if rule == "linear":
        return scale
    if rule == "sqrt":
        return math.sqrt(scale)
    return float(gain(noise, scale))
