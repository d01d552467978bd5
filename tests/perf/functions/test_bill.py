"""Bills: each item by its price, and the requests of a step by counting them out on small plans."""

from __future__ import annotations

import pytest

from springtide.core.functions import (
    FunctionPlan,
    FunctionPrices,
    FunctionStage,
    LayerProfile,
    ModelProfile,
    Usage,
)
from springtide.perf.functions.bill import (
    PollPacing,
    StepHabits,
    StepSizes,
    bill_of,
    collective_requests,
    expected_polls,
    gb_s_of,
    sizes_of,
    step_usd,
    usage_of_start,
    usage_of_steps,
)

PRICES = FunctionPrices(
    usd_per_gb_s=0.0000166667,
    usd_per_invocation=2e-7,
    usd_per_put=5e-6,
    usd_per_get=4e-7,
    usd_per_stored_gb_month=0.023,
    usd_per_parameter_store_hour=0.068,
)
# Nothing but what travels: no reports, no looks at the control record, no waiting, no hand-over.
QUIET = StepHabits(
    save_every=10**9,
    report_interval_s=1e12,
    control_interval_s=1e12,
    read_interval_s=1e12,
    lifetime_s=1e12,
    pacing=PollPacing(first_s=1e12, longest_s=1e12),
)


def plan_of(num_stages: int, **fields: object) -> FunctionPlan:
    stages = tuple(FunctionStage(first_layer=i, end_layer=i + 1, memory_mb=2048) for i in range(num_stages))
    return FunctionPlan(stages=stages, **fields)  # type: ignore[arg-type]


def test_each_item_has_its_price() -> None:
    usage = Usage(
        function_gb_s=1000,
        num_invocations=10,
        num_puts=100,
        num_lists=20,
        num_gets=1000,
        num_deletes=500,
        stored_gb_s=730 * 3600.0,
        parameter_store_s=1800,
    )
    bill = bill_of(usage, PRICES, profiling_usage=Usage(function_gb_s=60))
    assert bill.function_usd == pytest.approx(0.0166667)
    assert bill.invocation_usd == pytest.approx(2e-6)
    assert bill.request_usd == pytest.approx(120 * 5e-6 + 1000 * 4e-7)
    assert bill.storage_usd == pytest.approx(0.023)
    assert bill.parameter_store_usd == pytest.approx(0.034)
    assert bill.profiling_usd == pytest.approx(0.001000002)
    assert bill.total_usd == pytest.approx(
        bill.function_usd
        + bill.invocation_usd
        + bill.request_usd
        + bill.storage_usd
        + bill.parameter_store_usd
        + bill.profiling_usd
    )
    assert bill_of(Usage(), PRICES).total_usd == 0


def test_a_gigabyte_is_what_providers_call_one() -> None:
    assert gb_s_of(1024, 2.0) == 2.0
    assert gb_s_of(10240, 0.5) == 5.0


@pytest.mark.parametrize(
    ("collective", "chunks", "counts"),
    [
        ("lambdaml", 4, (4, 6)),
        ("funcpipe", 4, (4, 6)),
        ("smlt", 1, (5, 8)),
        ("parameter-server", 1, (1, 1.5)),
        ("parameter-server", 4, (4, 6)),
        ("all-to-all", 1, (1, 3)),
        ("duplex", 1, (4, 6)),
        ("duplex", 3, (12, 18)),
    ],
)
def test_what_a_rank_of_four_asks_for(collective: str, chunks: int, counts: tuple[int, int]) -> None:
    assert collective_requests(collective, 4, chunks) == counts  # type: ignore[arg-type]
    assert collective_requests(collective, 1, chunks) == (0, 0)  # type: ignore[arg-type]


def test_what_travels_in_a_step() -> None:
    plan = plan_of(3, num_replicas=2, num_micro_batches=4, collective="duplex", num_chunks=2)
    usage = usage_of_steps(plan, 2.0, habits=QUIET, num_steps=1000)
    moved = 2 * 2 * 4 * 2  # both ways, two boundaries, four micro-batches, two replicas
    # A control record is read at every step even where no step lasts long enough for a second look.
    assert usage.num_puts == pytest.approx(1000 * (moved + 4 * 6), abs=1)
    receiving = sum(4 * ((stage > 0) + (stage < 2)) + 4 for stage in range(3)) * 2
    assert usage.num_gets == pytest.approx(1000 * (moved + 4 * 6 + 6 + receiving), abs=2)
    assert usage.function_gb_s == pytest.approx(1000 * 2.0 * 6 * 2, rel=1e-6)


def test_a_parameter_store_takes_what_travels() -> None:
    plan = plan_of(2, num_replicas=2, num_micro_batches=4)
    habits = StepHabits(has_parameter_store=True, save_every=5)
    usage = usage_of_steps(plan, 1.0, habits=habits, num_steps=100)
    assert usage.parameter_store_s == 100
    # A report of each function and step, and two objects of each stage every fifth step; hand-overs are few.
    assert 100 * (4 + 4 / 5) <= usage.num_puts <= 100 * (4 + 4 / 5) + 4
    assert usage.num_puts < usage_of_steps(plan, 1.0, num_steps=100).num_puts


def test_waiting_is_asking() -> None:
    pacing = PollPacing(first_s=0.1, growth=2.0, longest_s=0.4)
    assert expected_polls(0.0, pacing) == 0
    assert expected_polls(0.05, pacing) == 1
    assert expected_polls(0.25, pacing) == 2
    # 0.1, 0.3, then every 0.4 s.
    assert expected_polls(0.3 + 4 * 0.4, pacing) == 6
    plan = plan_of(2, num_micro_batches=2)
    short, long = (usage_of_steps(plan, seconds, num_steps=10).num_gets for seconds in (1.0, 30.0))
    assert long > 10 * short / 2
    # More in a longer wait, never less.
    counts = [expected_polls(seconds / 10, pacing) for seconds in range(60)]
    assert counts == sorted(counts)


def test_short_lifetimes_cost_warm_ups() -> None:
    plan = plan_of(2)
    long = usage_of_steps(plan, 1.0, num_steps=600)
    short = usage_of_steps(plan, 1.0, habits=StepHabits(lifetime_s=60.0, start_s=10.0), num_steps=600)
    assert short.num_invocations == 600 // 50 * 2
    assert short.function_gb_s == pytest.approx(600 * 4 * 1.2, rel=1e-6)
    assert long.function_gb_s < 600 * 4 * 1.01


def test_sizes_come_from_the_layers() -> None:
    layers = tuple(
        LayerProfile(
            name=str(i),
            parameter_bytes=10 ** (i + 1),
            activation_bytes=1,
            output_bytes=100 + i,
            gradient_bytes=200 + i,
            forward_s=(1.0,),
            backward_s=(1.0,),
        )
        for i in range(3)
    )
    profile = ModelProfile(model="m", micro_batch_size=2, memory_mb=(2048,), bytes_per_s=(1e6,), layers=layers)
    stages = (
        FunctionStage(first_layer=0, end_layer=2, memory_mb=2048),
        FunctionStage(first_layer=2, end_layer=3, memory_mb=2048),
    )
    sizes = sizes_of(FunctionPlan(stages=stages, micro_batch_size=4), profile)
    assert sizes == StepSizes(activation_bytes=(202,), gradient_bytes=(404,), parameter_bytes=(110, 1000))


def test_a_step_s_price_is_all_of_it() -> None:
    plan = plan_of(2, num_replicas=2, num_micro_batches=4, num_chunks=2)
    usd = step_usd(plan, PRICES, 1.0)
    functions_usd = gb_s_of(plan.memory_mb, 1.0) * PRICES.usd_per_gb_s
    assert usd > functions_usd
    # Requests are worth more than function time in a short step: the reason for pricing them at all.
    assert usd > 2 * functions_usd
    assert step_usd(plan, PRICES, 2.0) > usd
    sizes = StepSizes(parameter_bytes=(10**9, 10**9))
    assert step_usd(plan, PRICES, 1.0, sizes) > usd


def test_a_start_is_paid_before_the_first_step() -> None:
    plan = plan_of(3, num_replicas=2)
    usage = usage_of_start(plan, 4.0)
    assert usage.num_invocations == 6
    assert usage.function_gb_s == pytest.approx(6 * 2 * 4.0)
