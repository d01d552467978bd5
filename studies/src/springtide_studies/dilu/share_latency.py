"""How long an iteration takes on a part of a device: a host part, and work that spreads over what it can fill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest

MIN_SATURATION = 0.05
_NUM_PARAMETERS = 5


class LatencyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measured cell: a batch of so many items on this fraction of the device took so long."""

    batch_size: int
    share: float
    latency_s: float


class ShareLatency(msgspec.Struct, frozen=True, kw_only=True):
    """t(batch, share) = host_s + (work_s + work_per_item_s * batch) / min(share, saturation(batch)).

    Work is in seconds of the whole device. saturation(batch) = saturation + saturation_per_doubling * log2(batch),
    between 0.05 and 1: how much of the device a batch can fill.
    """

    host_s: float
    work_s: float
    work_per_item_s: float
    saturation: float
    saturation_per_doubling: float = 0.0

    def saturation_at(self, batch_size: int) -> float:
        """Return the fraction of the device that a batch of this size can fill."""
        return min(
            1.0, max(MIN_SATURATION, self.saturation + self.saturation_per_doubling * math.log2(max(1, batch_size)))
        )

    def device_s(self, batch_size: int) -> float:
        """Return the work of a batch, in seconds of the whole device."""
        return self.work_s + self.work_per_item_s * batch_size

    def latency_s(self, batch_size: int, share: float) -> float:
        """Return how long an iteration takes on this fraction of a device."""
        return self.host_s + self.device_s(batch_size) / min(share, self.saturation_at(batch_size))


class ShareFit(msgspec.Struct, frozen=True, kw_only=True):
    """A model with how far it is off its points, as fractions of what was measured."""

    latency: ShareLatency
    median_error: float
    p90_error: float
    max_error: float


def fit_share_latency(points: Sequence[LatencyPoint]) -> ShareFit:
    """Fit the five parameters to measured points by least squares of relative errors.

    The saturation is searched on a grid that is refined twice; for each the other three follow from a linear least
    squares problem without negative answers. Raises InvalidRequest with fewer points than parameters.
    """
    if len(points) < _NUM_PARAMETERS:
        raise InvalidRequest(
            f"a latency model has {_NUM_PARAMETERS} parameters and needs at least as many measured points, "
            f"got {len(points)}"
        )
    if any(point.latency_s <= 0 or not 0 < point.share <= 1 or point.batch_size < 1 for point in points):
        raise InvalidRequest("a measured point needs a latency above 0, a share in (0, 1] and a batch of at least 1")
    sizes = np.array([float(point.batch_size) for point in points])
    shares = np.array([point.share for point in points])
    measured_s = np.array([point.latency_s for point in points])
    best = (math.inf, 0.5, 0.0, np.zeros(3))
    centre, width = (0.5, 0.1), (0.5, 0.1)
    for _ in range(3):
        for first, each in itertools.product(
            np.linspace(max(MIN_SATURATION, centre[0] - width[0]), min(1.0, centre[0] + width[0]), 21),
            np.linspace(max(0.0, centre[1] - width[1]), centre[1] + width[1], 11),
        ):
            filled = np.minimum(shares, np.clip(first + each * np.log2(sizes), MIN_SATURATION, 1.0))
            columns = np.stack([np.ones_like(filled), 1.0 / filled, sizes / filled], axis=1) / measured_s[:, None]
            error, parts = _without_negatives(columns)
            if error < best[0] - 1e-15:
                best = (error, float(first), float(each), parts)
        centre, width = (best[1], best[2]), (width[0] / 8, width[1] / 4)
    latency = ShareLatency(
        host_s=float(best[3][0]),
        work_s=float(best[3][1]),
        work_per_item_s=float(best[3][2]),
        saturation=best[1],
        saturation_per_doubling=best[2],
    )
    off = sorted(
        abs(latency.latency_s(point.batch_size, point.share) - point.latency_s) / point.latency_s for point in points
    )
    return ShareFit(
        latency=latency,
        median_error=float(np.median(off)),
        p90_error=off[min(len(off) - 1, math.ceil(0.9 * len(off)) - 1)],
        max_error=off[-1],
    )


def _without_negatives(columns: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the least squared error of columns @ x against ones, and the x without negative parts that has it."""
    ones = np.ones(len(columns))
    norms = np.linalg.norm(columns, axis=0)
    columns = columns / norms
    best_error, best = math.inf, np.zeros(columns.shape[1])
    for used in ((0, 1, 2), (0, 2), (0, 1), (1, 2), (2,), (1,)):
        part = columns[:, used]
        # A device that any batch fills at any share makes two columns one: the ridge takes the smaller answer.
        gram = part.T @ part + 1e-9 * np.eye(len(used))
        found = np.linalg.solve(gram, part.T @ ones)
        if (found < 0).any():
            continue
        error = float(((part @ found - ones) ** 2).sum())
        if error < best_error:
            best_error = error
            best = np.zeros(columns.shape[1])
            best[list(used)] = found
        if len(used) == columns.shape[1]:
            break
    return best_error, best / norms
