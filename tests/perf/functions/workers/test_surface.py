"""The surface says of every place what the scalar formulas say of its plan; what does not fit is known."""

import itertools

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import FunctionSearch, SearchSpace, WorkerModel
from springtide.core.functions import MIB
from springtide.perf.functions.collective_choice import choose_collectives
from springtide.perf.functions.services import aws_lambda, emulator
from springtide.perf.functions.workers.belief import plan_model, plan_usd
from springtide.perf.functions.workers.model import space_of, worker_bytes
from springtide.perf.functions.workers.surface import Surface, WorkSettings, exchange_store, worker_numbers

MODEL = WorkerModel(
    parameter_bytes=160 * MIB,
    sample_s=0.15,
    fixed_s=0.1,
    sample_bytes=20 * MIB,
    micro_batch_size=4,
    base_bytes=300 * MIB,
)


def surface_of(service, model=MODEL, **settings):
    return Surface(service, space_of(service, model), model, WorkSettings(**{"global_batch_size": 256, **settings}))


@pytest.mark.parametrize("has_parameter_store", [False, True])
@pytest.mark.parametrize(
    "service", [aws_lambda(concurrency=60), emulator(total_vcpus=2.0, latency_s=0.01)], ids=["aws", "emulator"]
)
def test_every_place_is_what_the_scalar_formulas_say(service, has_parameter_store):
    model = MODEL if service.name == "aws" else WorkerModel(parameter_bytes=8 * MIB, sample_s=0.01)
    surface = surface_of(service, model, has_parameter_store=has_parameter_store)
    search = FunctionSearch(model=model, space=space_of(service, model), has_parameter_store=has_parameter_store)
    rng = np.random.default_rng(5)
    rows, columns = surface.shape
    for row, column in zip(rng.integers(rows, size=20), rng.integers(columns, size=20), strict=True):
        option = surface.option(int(row), int(column))
        alone = plan_model(service, search, option.plan, 256, model.parameter_bytes)
        assert alone.compute_s == pytest.approx(surface.compute_s[row, column], rel=1e-9)
        assert alone.sync_s == pytest.approx(surface.sync_s[row, column], rel=1e-9)
        usd = plan_usd(service, search, option.plan, option.step_s, model.parameter_bytes)
        if option.plan.num_replicas == 1 and has_parameter_store:
            usd -= option.step_s * service.prices.usd_per_parameter_store_hour / 3600
        assert option.step_usd == pytest.approx(usd, rel=2e-3)
        assert surface.place(option.plan) == (row, column)


def test_the_exchange_is_chosen_by_cost():
    service = aws_lambda(concurrency=40)
    surface = surface_of(service)
    for row, column in ((1, 10), (7, 30), (15, 60)):
        plan = surface.plan(row, column)
        gb = plan.memory_mb / 1024
        choice = choose_collectives(
            plan.num_replicas,
            float(MODEL.parameter_bytes),
            surface.sizes[column].bytes_per_s,
            gb * service.prices.usd_per_gb_s,
            exchange_store(service, False),
        )
        # Sizes between those that are looked at take over a neighbour's choice: it is nearly as good.
        priced = surface.sync_s[row, column] * gb * service.prices.usd_per_gb_s
        assert surface.sync_s[row, column] <= choice.sync_s * 1.2
        assert priced <= choice.usd * 1.05


def test_more_time_is_bought_where_a_second_is_worth_more():
    service = aws_lambda(concurrency=40)
    cheap, fast = surface_of(service), surface_of(service, second_worth=50.0)
    assert (fast.sync_s <= cheap.sync_s * (1 + 1e-9)).all()
    assert fast.sync_s.sum() < cheap.sync_s.sum()


def test_a_place_fits_with_its_memory_its_samples_and_a_lifetime():
    service = aws_lambda(concurrency=300)
    surface = surface_of(service, global_batch_size=12)
    assert surface.workers.max() == 12
    small = SearchSpace(max_workers=4, sizes=space_of(service, WorkerModel(parameter_bytes=MIB, sample_s=0.1)).sizes)
    tight = Surface(service, small, MODEL, WorkSettings(global_batch_size=8))
    holds = np.array([size.memory_mb * MIB >= worker_bytes(MODEL) for size in tight.sizes])
    assert not tight.fits[:, ~holds].any()
    assert tight.fits[:, holds].any()
    slow = surface_of(service, global_batch_size=100_000)
    assert not slow.fits[0].any()
    assert (slow.step_s[~slow.fits] * 1.5 + 5 > 0).all()
    few = SearchSpace(max_workers=9, min_workers=3, sizes=small.sizes)
    bounded = Surface(service, few, MODEL, WorkSettings(global_batch_size=64))
    assert not bounded.fits[:2].any()
    assert bounded.fits[2:].any()


def test_a_model_that_has_grown_takes_more_of_everything():
    service = aws_lambda(concurrency=20)
    space = space_of(service, MODEL)
    usual = Surface(service, space, MODEL, WorkSettings(global_batch_size=64))
    grown = Surface(service, space, MODEL, WorkSettings(global_batch_size=64, size_factor=2.0))
    assert (grown.compute_s > usual.compute_s).all()
    assert (grown.sync_s[1:] > usual.sync_s[1:]).all()
    assert grown.fits.sum() < usual.fits.sum()


def test_functions_on_one_machine_are_not_faster_than_it():
    service = emulator(total_vcpus=2.0, concurrency=16)
    model = WorkerModel(parameter_bytes=MIB, sample_s=0.05)
    surface = Surface(service, space_of(service, model), model, WorkSettings(global_batch_size=64))
    most = 64 * 0.05 / 2.0
    assert surface.compute_s.min() >= most * 0.95


def test_all_workers_are_looked_at_up_to_sixteen_and_then_those_that_matter():
    assert worker_numbers(10, 64).tolist() == list(range(1, 11))
    numbers = worker_numbers(200, 512).tolist()
    assert numbers[:16] == list(range(1, 17))
    assert numbers[-1] == 200
    assert {32, 64, 128} <= set(numbers)
    assert all(other / one < 1.14 for one, other in itertools.pairwise(numbers[15:]))
    assert len(numbers) < 60


def test_nonsense_is_refused():
    service = aws_lambda()
    with pytest.raises(InvalidRequest, match="at least one sample"):
        Surface(service, space_of(service, MODEL), MODEL, WorkSettings(global_batch_size=0))
