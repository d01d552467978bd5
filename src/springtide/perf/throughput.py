"""Pollux's model of a step's seconds: computation, the exchange of gradients, and how far they overlap."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# No computation and no exchange takes less: it keeps logarithms and ratios finite.
LEAST_S = 1e-8


class ThroughputModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seven parameters of a job's step (Qiao et al., "Pollux", OSDI'21, section 3.2); all seconds but `gamma`.

    One pass computes for `alpha_c + beta_c * local_batch_size`. The exchange takes nothing on one worker,
    `alpha_r + beta_r * max(0, num_workers - 2)` on one node, and the same with `alpha_n`, `beta_n` over several nodes.
    A step takes `(compute^gamma + exchange^gamma)^(1/gamma)`: their sum at gamma 1, nearly the longer of both at 10.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def compute_s(self, local_batch_size: ArrayLike) -> Floats:
        """Seconds of one pass without an exchange; any shape."""
        return np.maximum(self.alpha_c + self.beta_c * np.asarray(local_batch_size, dtype=np.float64), LEAST_S)

    def exchange_s(self, num_nodes: ArrayLike, num_workers: ArrayLike) -> Floats:
        """Seconds of the exchange if nothing overlapped with it; shapes broadcast."""
        nodes, workers = np.asarray(num_nodes), np.asarray(num_workers)
        beyond_two = np.maximum(workers - 2, 0)
        within = np.where(workers > 1, self.alpha_r + self.beta_r * beyond_two, 0.0)
        return np.asarray(np.where(nodes > 1, self.alpha_n + self.beta_n * beyond_two, within))

    def step_s(
        self, num_nodes: ArrayLike, num_workers: ArrayLike, local_batch_size: ArrayLike
    ) -> tuple[Floats, Floats]:
        """Return (step_s, sync_s) of steps of one pass; shapes broadcast.

        `sync_s` is the part of the step that a further pass before the exchange would not take again.
        """
        compute = self.compute_s(local_batch_size)
        exchange = self.exchange_s(num_nodes, num_workers)
        longer = np.maximum(compute, exchange)
        ratio = np.maximum(np.minimum(compute, exchange) / longer, LEAST_S)
        step = longer * np.exp(np.log1p(np.exp(self.gamma * np.log(ratio))) / self.gamma)
        return step, step - compute
