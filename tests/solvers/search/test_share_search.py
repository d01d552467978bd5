"""The search for a share and a batch size: what it finds, by how many trials, and what it says when nothing will do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kits.simulation.sweeps import part
from springtide.core.errors import InvalidRequest
from springtide.solvers.search.share_search import (
    BATCH_SIZES,
    CHECK_GAIN_FRACTION,
    MAX_CHECKS,
    MAX_TRIALS,
    SEARCH_GAIN_FRACTION,
    SHARES,
    EfficacySearch,
    Measure,
    limit_of,
    make_trial,
    search_efficacy,
)
from springtide.solvers.search.share_surface import LatencyModel
from springtide_studies.rivals.solvers.share_search_rivals import search_by_growth, search_everything

# Execution models that share nothing with the shapes the search believes in but their factors: host time, fixed work,
# work of a sample, what one sample can use of a device and how much more each doubling can.
MODELS = (
    (0.018, 0.001, 0.0008, 0.2, 0.16),
    (0.004, 0.002, 0.010, 0.3, 0.10),
    (0.012, 0.008, 0.0005, 0.9, 0.05),
    (0.001, 0.0, 0.003, 0.5, 0.0),
    (0.015, 0.0, 0.006, 1.0, 0.0),
)


def surface(model: tuple[float, ...], noise: float = 0.0, seed: int = 0) -> Measure:
    host_s, fixed_s, sample_s, usable, growth = model
    rng = np.random.default_rng(seed)
    factor = {(size, share): math.exp(rng.normal(0.0, noise)) for size in BATCH_SIZES for share in SHARES}

    def measure(batch_size: int, share: float) -> float:
        part = min(share, usable + growth * math.log2(batch_size))
        return (host_s + (fixed_s + sample_s * batch_size) / part) * factor.get((batch_size, share), 1.0)

    return measure


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tightness", [1.3, 2.0, 5.0])
def test_the_optimum_of_all_settings_is_found_by_few_trials(model: tuple[float, ...], tightness: float) -> None:
    measure = surface(model)
    bound_s = measure(1, 1.0) * tightness
    found = search_efficacy(measure, bound_s)
    best = search_everything(measure, bound_s, BATCH_SIZES, SHARES).best
    assert found.best is not None
    assert best is not None
    assert found.best.efficacy == pytest.approx(best.efficacy, rel=1e-12)
    assert len(found.trials) <= MAX_TRIALS
    assert found.reason in ("settled", "most trials")


@pytest.mark.slow
def test_noise_costs_little_and_the_bound_is_kept_all_the_same() -> None:
    losses, published_losses, num_trials = [], [], []
    for seed in range(12):
        measure = surface(MODELS[seed % len(MODELS)], noise=0.03, seed=seed)
        bound_s = measure(1, 1.0) * (1.3 + 0.4 * (seed % 7))
        found = search_efficacy(measure, bound_s)
        best = search_everything(measure, bound_s, BATCH_SIZES, SHARES).best
        published = search_by_growth(measure, bound_s, BATCH_SIZES, SHARES).best
        assert best is not None
        assert found.best is not None
        assert found.best.latency_s is not None
        assert measure(found.best.batch_size, found.best.share) == found.best.latency_s <= bound_s
        losses.append(1.0 - found.best.efficacy / best.efficacy)
        published_losses.append(1.0 - (published.efficacy / best.efficacy if published else 0.0))
        num_trials.append(len(found.trials))
    assert float(np.mean(losses)) < 0.01
    assert float(np.mean(losses)) < float(np.mean(published_losses))
    assert float(np.mean(num_trials)) < 9.0


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "exact", "below"), [(0.0, 0.97, 0.002), (0.03, 0.92, 0.01), (0.07, 0.7, 0.07)])
def test_drawn_surfaces(noise: float, exact: float, below: float) -> None:
    """Execution models with host time, fixed work and work of a sample over two decades, and SLOs over one."""
    rng = np.random.default_rng(11)
    losses, num_trials = [], []
    for seed in range(part(150, least=50)):
        host_s, fixed_s, sample_s = np.exp(rng.uniform(np.log([1e-3, 5e-4, 3e-4]), np.log([3e-2, 3e-2, 1e-2])))
        model = (host_s, fixed_s, sample_s, rng.uniform(0.08, 0.7), rng.uniform(0.0, 0.35))
        measure = surface(model, noise, seed)
        smallest_s = min(measure(size, share) for size in BATCH_SIZES for share in SHARES)
        bound_s = smallest_s * math.exp(rng.uniform(math.log(1.02), math.log(8.0)))
        found = search_efficacy(measure, bound_s)
        best = search_everything(measure, bound_s, BATCH_SIZES, SHARES).best
        assert best is not None
        losses.append(1.0 - (found.best.efficacy / best.efficacy if found.best is not None else 0.0))
        num_trials.append(len(found.trials))
    is_exact = np.array(losses) < 1e-9
    print(
        f"noise {noise:.0%}: exact {is_exact.mean():.1%}, below the best {np.mean(losses):.2%} in the mean, "
        f"{np.max(losses):.1%} at most; trials {np.mean(num_trials):.2f} in the mean, {max(num_trials)} at most"
    )
    assert is_exact.mean() >= exact
    assert np.mean(losses) <= below
    assert np.mean(num_trials) < 9.0


def test_a_surface_that_is_not_convex_is_no_trap() -> None:
    """One sample more than fits on a fifth of the device: with a little more of it the batch is much faster."""
    smooth = surface((0.006, 0.0, 0.0125, 1.0, 0.0))

    def measure(batch_size: int, share: float) -> float:
        return smooth(batch_size, share) * (0.85 if share > 0.25 else 1.0)

    bound_s = measure(4, 0.3) * 1.2
    found = search_efficacy(measure, bound_s)
    best = search_everything(measure, bound_s, BATCH_SIZES, SHARES).best
    assert found.best is not None
    assert best is not None
    assert found.best.efficacy == best.efficacy


def test_what_is_out_of_reach_is_told_after_the_easiest_setting_was_tried() -> None:
    measure = surface(MODELS[0])
    found = search_efficacy(measure, measure(1, 1.0) * 0.7)
    assert found.best is None
    assert found.reason == "out of reach"
    assert (1, 1.0) in {(trial.batch_size, trial.share) for trial in found.trials}
    assert found.smallest_latency_s is not None
    assert found.bound_s < found.smallest_latency_s <= measure(1, 1.0)
    assert len(found.trials) <= 8


def test_a_batch_that_does_not_fit_rules_out_larger_ones_on_every_share() -> None:
    tried: list[int] = []

    def measure(batch_size: int, share: float) -> float:
        tried.append(batch_size)
        return math.inf if batch_size >= 8 else surface(MODELS[3])(batch_size, share)

    found = search_efficacy(measure, 10.0)
    assert found.best is not None
    assert found.best.batch_size == 4
    too_large = [size for size in tried if size >= 8]
    assert all(later < earlier for earlier, later in itertools.pairwise(too_large))
    nothing = search_efficacy(lambda size, share: math.inf, 1.0)
    assert nothing.best is None
    assert nothing.smallest_latency_s is None


def test_no_setting_is_tried_twice_and_the_same_latencies_give_the_same_search() -> None:
    measure = surface(MODELS[1], noise=0.05, seed=3)
    first = search_efficacy(measure, 0.06)
    assert search_efficacy(measure, 0.06) == first
    settings = [(trial.batch_size, trial.share) for trial in first.trials]
    assert len(set(settings)) == len(settings)


def test_the_search_does_not_depend_on_the_unit_of_time() -> None:
    measure = surface(MODELS[2])
    fast = search_efficacy(measure, 0.05)
    slow = search_efficacy(lambda size, share: measure(size, share) * 1000.0, 50.0)
    assert [(t.batch_size, t.share) for t in slow.trials] == [(t.batch_size, t.share) for t in fast.trials]


def test_few_trials_are_kept_to_and_what_is_left_is_told() -> None:
    measure = surface(MODELS[0])
    cut = search_efficacy(measure, 0.06, max_trials=2)
    assert len(cut.trials) == 2
    assert cut.reason == "most trials"
    assert cut.left_fraction > SEARCH_GAIN_FRACTION
    whole = search_efficacy(measure, 0.06)
    assert whole.left_fraction < SEARCH_GAIN_FRACTION
    assert 0 <= whole.num_checks <= MAX_CHECKS
    assert whole.left_fraction < CHECK_GAIN_FRACTION or whole.num_checks == MAX_CHECKS


def test_the_model_predicts_what_was_seen() -> None:
    measure = surface(MODELS[1])
    found = search_efficacy(measure, 0.06)
    assert found.model is not None
    for trial in found.trials:
        assert trial.latency_s == pytest.approx(found.model.latency_s(trial.batch_size, trial.share), rel=0.25)


def test_a_model_of_latency_is_its_parts() -> None:
    model = LatencyModel(
        host_s=1.0,
        host_growth=0.5,
        work_s=2.0,
        fixed_fraction=0.25,
        batch_power=1.0,
        usable=0.4,
        usable_growth=0.1,
        share_power=1.0,
    )
    # Four samples can use 0.6 of the device, one 0.4: host 1 x 2.5, work 2 x 3.25 x 0.4 / min(share, 0.6).
    assert model.latency_s(4, 1.0) == pytest.approx(2.5 + 6.5 * 0.4 / 0.6)
    assert model.latency_s(4, 0.2) == pytest.approx(2.5 + 6.5 * 0.4 / 0.2)
    assert model.latency_s(1, 1.0) == pytest.approx(3.0)


def test_other_grids_and_bad_ones() -> None:
    found = search_efficacy(surface(MODELS[0]), 0.1, (1, 3, 5), (0.25, 0.5, 1.0))
    assert found.best is not None
    assert found.best.batch_size in (1, 3, 5)
    for bound_s, sizes, shares in (
        (0.0, (1,), (1.0,)),
        (1.0, (), (1.0,)),
        (1.0, (0,), (1.0,)),
        (1.0, (1, 1), (1.0,)),
        (1.0, (1,), (0.0,)),
        (1.0, (1,), (1.5,)),
    ):
        with pytest.raises(InvalidRequest):
            EfficacySearch(bound_s, sizes, shares)
    with pytest.raises(InvalidRequest, match="at least one trial"):
        EfficacySearch(1.0, max_trials=0)
    for latency_s in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidRequest, match="no latency"):
            make_trial(1, 1.0, latency_s, 1.0)


def test_the_limit_is_twice_the_request_at_most_the_device() -> None:
    assert [limit_of(share) for share in (0.2, 0.5, 0.7)] == [0.4, 1.0, 1.0]


def test_the_published_search_stops_where_it_was_found_to() -> None:
    """Grows the batch, takes one step more of the device where it misses, and gives up where that misses, too."""
    took = {(1, 0.1): 3.0, (1, 0.2): 1.0, (2, 0.2): 2.1, (2, 0.3): 1.5, (4, 0.3): 3.0, (4, 0.4): 2.5}
    asked: list[tuple[int, float]] = []

    def measure(batch_size: int, share: float) -> float:
        asked.append((batch_size, round(share, 1)))
        return took[asked[-1]]

    found = search_by_growth(measure, 2.0, BATCH_SIZES, SHARES)
    assert asked == list(took)
    assert found.best is not None
    assert (found.best.batch_size, round(found.best.share, 1)) == (2, 0.3)
    assert search_by_growth(lambda size, share: 9.0, 2.0, BATCH_SIZES, SHARES).best is None
