"""The choice of models, against every combination; and that floors are had in any case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide.solvers.model_choice import ModelChoice
from springtide.solvers.share_dp import hull_segments

SIZES = np.array([1, 2, 4])


def worth(values: np.ndarray, capacity: list[int], models: tuple[int, ...]) -> float:
    """The most that the devices of all models are worth to the jobs that have them."""
    total = 0.0
    for k, count in enumerate(capacity):
        mine = [j for j, model in enumerate(models) if model == k]
        _, slopes, widths = hull_segments(np.tile(SIZES, (len(mine), 1)), values[mine, k])
        for slope, width in sorted(zip(slopes, widths, strict=True), reverse=True):
            total += slope * min(width, count)
            count -= min(width, count)
    return total


def choose(values: np.ndarray, capacity: list[int], models: list[int] | None = None) -> tuple[int, ...]:
    num_jobs, num_models = values.shape[:2]
    sizes = np.broadcast_to(SIZES, values.shape)
    floors = np.zeros((num_jobs, num_models), dtype=np.int64)
    return tuple(ModelChoice(sizes, values, capacity, models or [-1] * num_jobs, [True] * num_jobs, floors).run())


def test_the_choice_is_worth_nearly_what_the_best_combination_is():
    parts = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        alone = rng.uniform(1.0, 4.0, (4, 1, 1)) * rng.choice([1.0, 2.0, 8.0], (4, 2, 1))
        values = alone * SIZES ** rng.uniform(0.3, 1.0, (4, 1, 1))
        best = max(worth(values, [4, 3], models) for models in itertools.product(range(2), repeat=4))
        found = choose(values, [4, 3], rng.integers(0, 2, 4).tolist())
        parts.append(worth(values, [4, 3], found) / best)
    assert min(parts) > 0.93
    assert np.mean(parts) > 0.985


def test_two_jobs_change_places_where_neither_gains_alone():
    ones = np.array([1.0, 1.0, 1.0])
    values = np.array([[5.0 * ones, 4.0 * ones], [4.9 * ones, 1.0 * ones]])
    assert choose(values, [1, 1], [0, 1]) == (1, 0)
    assert choose(values, [1, 1]) == (1, 0)


@pytest.mark.parametrize("floor", [0, 2])
def test_a_floor_leaves_no_room_for_others(floor: int):
    """The second job would have the first model, but for the devices that the first one has there in any case."""
    values = np.array([[[0.1, 0.2, 0.4], [0.0, 0.0, 0.0]], [[9.0, 18.0, 18.0], [6.0, 12.0, 12.0]]])
    sizes = np.broadcast_to(SIZES, values.shape)
    floors = np.array([[floor, 0], [0, 0]])
    choice = ModelChoice(sizes, values, [3, 3], [0, -1], [False, True], floors)
    assert choice.run() == [0, 1 if floor else 0]
