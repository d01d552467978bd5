"""The task of goals_on_emulator.py: a linear model whose samples take time by a function's memory, not by this machine.

Two cores that others use cannot give four functions their share at the same moment. So a function waits for as long as
its samples would take on a CPU that grows with its memory, less than in proportion; all else is real: processes,
starts, requests, transfers, saving, exchanging.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import springtide as st

SAMPLE_S = 0.03
NUM_SAMPLES, NUM_FEATURES = 360, 250_000
# What a profile on one core finds is less than what functions need, as it is where real code meets a slower cache.
PROFILED_FRACTION = 0.7
MEMORY_MB = float(os.environ.get("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "0"))


def sample_s(memory_mb: float) -> float:
    """Seconds a sample takes in a function of this memory; for 0, the profiled time."""
    if memory_mb <= 0:
        return SAMPLE_S * PROFILED_FRACTION
    return SAMPLE_S / min(1.0, memory_mb / 1769) ** 0.8


class Waiting:
    """A gradient of 1 MB in single precision, so that exchanging it takes time."""

    def __init__(self) -> None:
        self.weights = np.zeros(NUM_FEATURES, dtype=np.float32)

    def gradients(self, x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
        """The mean loss, returned after the time that the samples take."""
        time.sleep(sample_s(MEMORY_MB) * len(x))
        value = float(np.asarray(x, dtype=np.float64).mean())
        gradient = np.full(NUM_FEATURES, value, dtype=np.float32)
        return abs(value), {"weights": gradient}

    def apply(self, gradients: Mapping[str, Any]) -> None:
        """Plain descent."""
        self.weights = self.weights - np.float32(0.01) * gradients["weights"]

    def state(self) -> Mapping[str, Any]:
        """The weights."""
        return {"weights": self.weights}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the weights."""
        self.weights = np.array(state["weights"])


def samples() -> tuple[Any, Any]:
    """Inputs and targets from a fixed seed."""
    return np.random.default_rng(3).normal(size=(NUM_SAMPLES, 4)), np.zeros(NUM_SAMPLES, dtype=np.int64)


waiting = st.Task(model=Waiting, dataset=samples, name="waiting", global_batch=24, epochs=12)
