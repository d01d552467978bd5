"""The seven-parameter model of a step; its fit finds what made the steps and is never worse than SciPy's."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from springtide.perf.throughput import BETWEEN_NODES, Steps, ThroughputModel, fit_parameters, objective

MODEL = ThroughputModel(alpha_c=0.03, beta_c=0.0007, alpha_n=0.1, beta_n=0.002, alpha_r=0.02, beta_r=0.001, gamma=1.5)


def test_a_step_is_the_norm_of_computation_and_exchange():
    step, sync = MODEL.step_s(2, 6, 64)
    compute, exchange = 0.03 + 0.0007 * 64, 0.1 + 0.002 * 4
    assert step == pytest.approx((compute**1.5 + exchange**1.5) ** (1 / 1.5))
    assert sync == pytest.approx(step - compute)


@pytest.mark.parametrize(
    ("num_nodes", "num_workers", "exchange"), [(1, 1, 0.0), (1, 2, 0.02), (1, 4, 0.022), (2, 2, 0.1)]
)
def test_the_exchange_depends_on_the_slowest_link(num_nodes, num_workers, exchange):
    assert MODEL.exchange_s(num_nodes, num_workers) == pytest.approx(exchange)


def test_one_worker_exchanges_nothing():
    step, sync = MODEL.step_s(1, 1, 100)
    assert step == pytest.approx(0.1)
    assert sync == pytest.approx(0.0, abs=1e-8)


def test_the_overlap_goes_from_none_to_nearly_all():
    none = msgspec.structs.replace(MODEL, gamma=1.0)
    most = msgspec.structs.replace(MODEL, gamma=10.0)
    assert none.step_s(2, 2, 100)[0] == pytest.approx(0.2)
    assert 0.1 < most.step_s(2, 2, 100)[0] < 0.11


def test_shapes_broadcast_and_parameters_survive_json():
    step, sync = MODEL.step_s(np.array([1, 2]), np.array([4, 8]), np.array([[32], [64], [128]]))
    assert step.shape == sync.shape == (3, 2)
    assert msgspec.json.decode(msgspec.json.encode(MODEL), type=ThroughputModel) == MODEL


# --- its fit ----------------------------------------------------------------------------------------------------------

TRUE = ThroughputModel(alpha_c=0.02, beta_c=0.001, alpha_n=0.08, beta_n=0.003, alpha_r=0.03, beta_r=0.001, gamma=1.8)
SHAPES = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 8), (4, 16), (8, 32)]


def measured(shapes, locals_=(32, 64, 128), model=TRUE, error=0.0, seed=0):
    rng = np.random.default_rng(seed)
    nodes, workers, local = np.array([(*shape, size) for shape in shapes for size in locals_]).T
    step, sync = model.step_s(nodes, workers, local)
    noise = np.exp(rng.normal(0.0, error, len(nodes)))
    return Steps(
        num_nodes=nodes,
        num_workers=workers,
        local=local.astype(float),
        step_s=step * noise,
        compute_s=(step - sync) * noise,
    )


def log_errors(model, steps):
    step, _ = model.step_s(steps.num_nodes, steps.num_workers, steps.local)
    return np.log(step / steps.step_s)


def vector(model):
    values = np.array(msgspec.structs.astuple(model))
    return np.concatenate([np.log(values[:6]), values[6:]])[None, :]


def test_what_the_model_made_is_met_within_a_percent():
    steps = measured(SHAPES)
    assert np.abs(log_errors(fit_parameters(steps), steps)).max() < 0.01


def test_shapes_that_were_not_seen_come_out_near():
    fitted = fit_parameters(measured(SHAPES, error=0.02))
    assert np.abs(log_errors(fitted, measured([(3, 12), (16, 64), (1, 3)], (48, 96)))).max() < 0.06


def test_one_step_on_one_worker_is_met_and_the_rest_is_hoped_for():
    steps = measured([(1, 1)], (64,))
    fitted = fit_parameters(steps)
    assert np.abs(log_errors(fitted, steps)).max() < 1e-3
    assert fitted.alpha_c == pytest.approx(float(steps.compute_s[0]) / 2, rel=1e-3)
    # Exchanges that were never seen cost next to nothing, so that they are tried.
    step, sync = fitted.step_s([1, 2], [4, 8], 64)
    assert sync == pytest.approx([0.0, 0.0], abs=1e-4)
    assert step == pytest.approx(np.full(2, steps.step_s[0]), rel=1e-2)


def test_between_nodes_is_dearer_than_within_one_until_it_is_seen():
    fitted = fit_parameters(measured([(1, 1), (1, 2), (1, 4)]))
    assert fitted.alpha_n >= fitted.alpha_r * BETWEEN_NODES
    assert fitted.beta_n >= fitted.beta_r * BETWEEN_NODES
    assert fitted.alpha_r == pytest.approx(TRUE.alpha_r, rel=0.3)


def test_steps_whose_exchange_was_not_measured_apart_still_count():
    steps = measured(SHAPES)
    steps = msgspec.structs.replace(steps, compute_s=np.where(steps.num_workers == 1, steps.compute_s, np.nan))
    assert np.abs(log_errors(fit_parameters(steps), steps)).max() < 0.02
    blind = msgspec.structs.replace(steps, compute_s=np.full(len(steps.step_s), np.nan))
    assert np.abs(log_errors(fit_parameters(blind), steps)).max() < 0.05


def test_the_same_steps_give_the_same_parameters():
    steps = measured(SHAPES, error=0.1)
    assert fit_parameters(steps) == fit_parameters(steps)


def test_parameters_stay_within_their_bounds():
    for seed in range(8):
        fitted = fit_parameters(measured(SHAPES[: 1 + seed], error=0.5, seed=seed))
        values = msgspec.structs.astuple(fitted)
        assert all(value >= 1e-8 * 0.999 for value in values[:6])
        assert 1.0 <= fitted.gamma <= 10.0


@pytest.mark.parametrize("num_shapes", [1, 3, 5, 7])
def test_never_worse_than_the_published_optimiser(num_shapes):
    optimize = pytest.importorskip("scipy.optimize")
    for seed in range(3):
        steps = measured(SHAPES[:num_shapes], error=0.15, seed=seed)
        fitted = vector(fit_parameters(steps))
        seen = [bool(np.any(steps.num_nodes > 1)), bool(np.any((steps.num_nodes == 1) & (steps.num_workers > 1)))]
        is_free = np.array([True, True, seen[0], seen[0], seen[1], seen[1], True])
        start = np.where(is_free, [0.1, 0.01] * 3 + [1.001], [1e-8] * 6 + [1.001])

        def value(free, start=start, is_free=is_free, steps=steps):
            values = start.copy()
            values[is_free] = free
            return float(objective(np.concatenate([np.log(values[:6]), values[6:]])[None, :], steps)[0])

        bounds = [(1e-8, None)] * 6 + [(1.0, 10.0)]
        free_bounds = [bound for bound, free in zip(bounds, is_free, strict=True) if free]
        theirs = optimize.minimize(value, start[is_free], bounds=free_bounds, method="L-BFGS-B").fun
        if not seen[0]:
            # The prior for links between nodes is put on after the fit: it is no part of what was minimised.
            fitted[0, 2:4] = np.log(1e-8)
        assert float(objective(fitted, steps)[0]) <= theirs + 2e-3
