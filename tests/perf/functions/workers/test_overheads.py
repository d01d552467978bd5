"""What a run takes beside its steps: saves, deaths, luck, and what has been seen of it."""

import numpy as np
import pytest

from springtide.core.function_search import WorkerModel
from springtide.core.functions import MIB
from springtide.perf.functions.services import aws_lambda
from springtide.perf.functions.workers.model import space_of
from springtide.perf.functions.workers.overheads import overheads_of, seen_scale
from springtide.perf.functions.workers.surface import Surface, WorkSettings

SERVICE = aws_lambda(concurrency=64)


def surface_of(parameter_mb):
    model = WorkerModel(parameter_bytes=parameter_mb * MIB, sample_s=0.1)
    return Surface(SERVICE, space_of(SERVICE, model), model, WorkSettings(global_batch_size=128))


def test_more_functions_die_more_often_and_large_states_cost_more():
    small, large = surface_of(2), surface_of(200)
    for surface in (small, large):
        found = overheads_of(surface, surface.step_s, SERVICE.lifetime_s)
        assert (np.diff(found.deaths_per_s[:, 0]) > 0).all()
        assert (found.lost_fraction > 0).all()
    few = overheads_of(small, small.step_s, SERVICE.lifetime_s).lost_fraction[3, 10]
    many = overheads_of(large, large.step_s, SERVICE.lifetime_s).lost_fraction[3, 10]
    assert few < many < 0.3


def test_saving_is_bounded_by_what_the_coordinator_allows():
    surface = surface_of(200)
    found = overheads_of(surface, np.full(surface.shape, 4.0), SERVICE.lifetime_s, scale=0.0)
    assert found.lost_fraction.max() <= float(surface.save_s.max()) / 4.0
    assert found.lost_fraction.max() >= 0.02


def test_bad_luck_matters_less_in_longer_runs_and_more_than_its_deviation_near_the_end():
    surface = surface_of(20)
    found = overheads_of(surface, surface.step_s, SERVICE.lifetime_s)
    short, long = (found.luck(np.full(surface.shape, seconds)) for seconds in (300.0, 30_000.0))
    assert (short > long).all()
    deaths = found.deaths_per_s * 300.0
    assert (short >= np.sqrt(deaths) * found.death_s / 300.0).all()


def test_what_has_been_lost_so_far_says_what_will_be():
    assert seen_scale(60.0, 600.0, 60.0) == pytest.approx(1.0)
    assert 1.0 < seen_scale(120.0, 600.0, 60.0) < 2.0
    assert seen_scale(1200.0, 6000.0, 600.0) > seen_scale(120.0, 600.0, 60.0)
    assert seen_scale(-50.0, 600.0, 60.0) == pytest.approx(0.5)
    assert seen_scale(1e6, 600.0, 60.0) == 5.0
