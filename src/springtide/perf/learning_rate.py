"""By how much the learning rate follows the batch."""

from __future__ import annotations

import math

from springtide.core.decision import GradientNoise
from springtide.core.workload import LearningRateRule
from springtide.perf.goodput import gain


def learning_rate_factor(rule: LearningRateRule, noise: GradientNoise | None, scale: float) -> float:
    """Return what the learning rate of the initial batch is multiplied with at `scale` times that batch.

    `linear`: in proportion (Goyal et al., 2017; for SGD). `sqrt`: by the root (for Adam and its kin). `adascale`: by
    the gain, so that a step moves as far as it brings progress (Johnson et al., 2020, section 3; for SGD); 1 from scale
    1 on while the noise is not known. `none`: 1.
    """
    if rule == "linear":
        return scale
    if rule == "sqrt":
        return math.sqrt(scale)
    if rule == "adascale":
        return float(gain(noise, scale))
    return 1.0
