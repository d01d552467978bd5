"""The model corrected by what was measured: near it, far from it, in other situations, from earlier runs."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from springtide.core.function_search import FunctionMeasurement, FunctionSearch, WorkerModel
from springtide.core.functions import MIB
from springtide.perf.functions.services import aws_lambda
from springtide.perf.functions.workers.belief import Belief, net_step
from springtide.perf.functions.workers.model import space_of
from springtide.perf.functions.workers.surface import Surface, WorkSettings

SERVICE = aws_lambda(concurrency=64)
MODEL = WorkerModel(parameter_bytes=80 * MIB, sample_s=0.1, fixed_s=0.05, sample_bytes=10 * MIB)
SEARCH = FunctionSearch(model=MODEL, space=space_of(SERVICE, MODEL))
HERE = WorkSettings(global_batch_size=128)
SURFACE = Surface(SERVICE, SEARCH.space, MODEL, HERE)


def measured_at(row, column, *, compute=1.0, sync=1.0, num_steps=20, settings=HERE, usd=1.0, deviation=0.03):
    """What a world where computing and exchanging take so many times as long would show."""
    surface = Surface(SERVICE, SEARCH.space, MODEL, settings)
    compute_s = compute * float(surface.compute_s[row, column])
    sync_s = sync * float(surface.sync_s[row, column])
    step_s = compute_s + sync_s
    return FunctionMeasurement(
        plan=surface.plan(row, column),
        global_batch_size=settings.global_batch_size,
        gradient_bytes=round(MODEL.parameter_bytes * settings.size_factor),
        num_steps=num_steps,
        step_s=step_s,
        deviation_s=deviation * step_s,
        compute_s=compute_s,
        sync_s=sync_s,
        usd=usd * float(surface.step_base_usd[row, column] + step_s * surface.usd_per_s[row, column]),
    )


def test_before_anything_is_measured_it_is_the_model_with_its_usual_error():
    found = Belief(SERVICE, SEARCH).predict(HERE)
    assert (found.step_s == SURFACE.step_s).all()
    assert found.spread == pytest.approx(np.full(SURFACE.shape, SEARCH.error_fraction))
    assert found.step_usd == pytest.approx(SURFACE.step_usd)
    assert not found.num_steps.any()


def test_what_was_measured_is_believed_there_and_beside_it():
    found = Belief(SERVICE, SEARCH, [measured_at(5, 20, compute=1.4, sync=0.8)]).predict(HERE)
    truth = 1.4 * SURFACE.compute_s + 0.8 * SURFACE.sync_s
    assert found.step_s[5, 20] == pytest.approx(truth[5, 20], rel=0.03)
    assert found.step_s[6, 21] == pytest.approx(truth[6, 21], rel=0.05)
    assert found.spread[5, 20] < 0.04 < found.spread[-1, -1]
    assert found.num_steps[5, 20] == 20
    assert found.num_steps.sum() == 20


def test_the_parts_are_told_apart_so_one_place_says_something_of_all():
    before = Belief(SERVICE, SEARCH).predict(HERE).step_s
    found = Belief(SERVICE, SEARCH, [measured_at(3, 30, compute=1.5, sync=0.7)]).predict(HERE)
    truth = 1.5 * SURFACE.compute_s + 0.7 * SURFACE.sync_s
    fits = SURFACE.fits
    after = np.abs(np.log(found.step_s / truth))[fits]
    assert after.mean() < 0.4 * np.abs(np.log(before / truth))[fits].mean()
    assert after.max() < np.abs(np.log(before / truth))[fits].max()


def test_more_steps_make_it_surer_and_two_places_differ_less_than_either_is_known():
    few = Belief(SERVICE, SEARCH, [measured_at(5, 20, num_steps=3, deviation=0.1)]).predict(HERE)
    many = Belief(SERVICE, SEARCH, [measured_at(5, 20, num_steps=100, deviation=0.1)]).predict(HERE)
    assert many.spread[5, 20] < few.spread[5, 20]
    apart = few.beside(5, 20)
    assert apart[5, 20] == pytest.approx(0.0, abs=1e-6)
    assert apart[5, 21] < 0.5 * few.spread[5, 21]
    assert (apart <= few.spread + few.spread[5, 20] + 1e-9).all()


def test_a_larger_batch_is_expected_to_be_off_alike():
    later = WorkSettings(global_batch_size=512)
    found = Belief(SERVICE, SEARCH, [measured_at(5, 20, compute=1.4)]).predict(later)
    truth = Surface(SERVICE, SEARCH.space, MODEL, later)
    place = truth.place(SURFACE.plan(5, 20))
    expected = 1.4 * truth.compute_s[place] + truth.sync_s[place]
    assert found.step_s[place] == pytest.approx(expected, rel=0.12)
    assert found.num_steps.sum() == 0


def test_prices_are_corrected_where_more_is_charged_than_was_expected():
    found = Belief(SERVICE, SEARCH, [measured_at(5, 20, usd=1.3)]).predict(HERE)
    assert found.step_usd[5, 20] == pytest.approx(1.3 * SURFACE.step_usd[5, 20], rel=0.05)
    assert found.usd_per_s[6, 20] > 1.1 * SURFACE.usd_per_s[6, 20]


def test_earlier_runs_help_but_leave_more_open_than_this_one():
    measured = measured_at(5, 20, compute=1.4)
    earlier = Belief(SERVICE, replace(SEARCH, earlier=(measured,))).predict(HERE)
    own = Belief(SERVICE, SEARCH, [measured]).predict(HERE)
    nothing = Belief(SERVICE, SEARCH).predict(HERE)
    truth = 1.4 * SURFACE.compute_s[5, 20] + SURFACE.sync_s[5, 20]
    assert abs(earlier.step_s[5, 20] - truth) < 0.4 * abs(nothing.step_s[5, 20] - truth)
    assert own.spread[5, 20] < earlier.spread[5, 20] < nothing.spread[5, 20]
    assert earlier.num_steps.sum() == 0


def test_saves_within_measured_steps_are_no_part_of_them():
    usual = measured_at(5, 20)
    # Every other step saves for 2 s, and one in four of them may be here by chance.
    saving = replace(usual, step_s=usual.step_s + 1.0, deviation_s=1.0)
    parts = net_step(saving, 2.0)
    assert parts.step_s == pytest.approx(usual.step_s)
    assert parts.deviation_s <= 0.12 * saving.step_s
    # What no save explains belongs to the step.
    assert net_step(replace(usual, step_s=usual.step_s + 1.0), 0.0).step_s == pytest.approx(usual.step_s + 1.0)
    untold = net_step(replace(usual, compute_s=0.0, sync_s=0.0), 2.0)
    assert untold.step_s == usual.step_s


def test_measurements_of_nothing_known_are_passed_over():
    strange = measured_at(5, 20)
    stage = replace(strange.plan.stages[0], memory_mb=12345)
    found = Belief(SERVICE, SEARCH, [replace(strange, plan=replace(strange.plan, stages=(stage,)))])
    assert not found.has_observed
    assert not Belief(SERVICE, SEARCH, [replace(strange, step_s=0.0)]).has_observed


def test_it_is_the_same_bits_every_time():
    measurements = [measured_at(row, 4 * row, compute=1.0 + row / 20) for row in range(1, 12)]
    one, other = (Belief(SERVICE, SEARCH, measurements).predict(HERE) for _ in range(2))
    assert one.step_s.tobytes() == other.step_s.tobytes()
    assert one.spread.tobytes() == other.spread.tobytes()
    assert math.isfinite(float(one.step_s.sum()))
