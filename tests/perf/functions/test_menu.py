"""The menu of ways to run a job on functions: a priced front within the service's limits."""

import itertools

import msgspec
import pytest

from kits.perf.pipeline_profiles import drawn_profile
from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionPrices, FunctionService, MemorySize
from springtide.perf.functions.menu import menu_of
from springtide.perf.functions.pipeline.step_time import estimate_step

SERVICE = FunctionService(
    name="drawn",
    sizes=tuple(
        MemorySize(memory_mb=memory_mb, vcpus=memory_mb / 1769, bytes_per_s=40e6 + 5e6 * number)
        for number, memory_mb in enumerate((512, 1024, 2048, 4096))
    ),
    prices=FunctionPrices(
        usd_per_gb_s=0.0000166667,
        usd_per_invocation=2e-7,
        usd_per_put=5e-6,
        usd_per_get=4e-7,
        usd_per_stored_gb_month=0.023,
    ),
)


def test_options_are_a_front_cheapest_first_and_one_is_recommended():
    profile = drawn_profile(1, 12)
    menu = menu_of(profile, SERVICE, 64)
    assert len(menu.options) > 2
    for one, other in itertools.pairwise(menu.options):
        assert one.step_usd < other.step_usd
        assert one.step_s > other.step_s
    assert 0 <= menu.recommended < len(menu.options)
    assert menu.num_layers == 12
    for option in menu.options:
        plan = option.plan
        assert option.step_s == pytest.approx(estimate_step(profile, plan).step_s)
        assert plan.num_replicas * plan.num_micro_batches * plan.micro_batch_size >= 64
        assert plan.num_replicas * (plan.num_micro_batches - 1) * plan.micro_batch_size < 64
        functions_usd = option.step_s * plan.memory_mb / 1024 * SERVICE.prices.usd_per_gb_s
        assert option.step_usd > functions_usd
        assert option.start_s > SERVICE.cold_start_s
        assert option.start_usd > 0


def test_the_recommended_option_is_worth_its_cost():
    menu = menu_of(drawn_profile(1, 12), SERVICE, 64)
    cheapest, chosen = menu.options[0], menu.options[menu.recommended]
    if menu.recommended:
        faster = cheapest.step_s / chosen.step_s - 1
        assert faster >= 0.8 * (chosen.step_usd / cheapest.step_usd - 1)


def test_no_option_has_more_functions_than_may_run():
    narrow = msgspec.structs.replace(SERVICE, concurrency=3)
    menu = menu_of(drawn_profile(1, 12), narrow, 64)
    assert all(option.plan.num_functions <= 3 for option in menu.options)


def test_functions_that_share_a_machine_are_no_faster_than_it():
    profile = drawn_profile(1, 12)
    alone, shared = (
        menu_of(profile, msgspec.structs.replace(SERVICE, total_vcpus=total_vcpus), 64) for total_vcpus in (None, 1.0)
    )
    work_s = sum(layer.forward_s[-1] + layer.backward_s[-1] for layer in profile.layers) * 16
    # One whole function of 4,096 MB has 2.3 of the vCPUs of which there is one.
    floor_s = work_s * (4096 / 1769)
    assert min(option.step_s for option in shared.options) > min(option.step_s for option in alone.options)
    assert min(option.step_s for option in shared.options) >= 0.9 * floor_s
    assert max(o.plan.num_functions for o in shared.options) <= max(o.plan.num_functions for o in alone.options)


def test_a_step_longer_than_a_lifetime_is_refused():
    short = msgspec.structs.replace(SERVICE, lifetime_s=9.0)
    with pytest.raises(InvalidRequest, match="lives 9 s; drawn-1 needs at least"):
        menu_of(drawn_profile(1, 12), short, 256)


@pytest.mark.slow
def test_options_that_do_not_fit_a_lifetime_are_left_out():
    whole = menu_of(drawn_profile(1, 12), SERVICE, 64)
    lifetime_s = 1.5 * whole.options[0].step_s
    short = msgspec.structs.replace(SERVICE, lifetime_s=lifetime_s)
    menu = menu_of(drawn_profile(1, 12), short, 64)
    assert all(1.5 * option.step_s < lifetime_s for option in menu.options)
    assert len(menu.options) < len(whole.options)


def test_large_models_are_merged_and_their_plans_are_in_their_own_layers():
    profile = drawn_profile(3, 70, megabytes=4.0)
    menu = menu_of(profile, SERVICE, 32)
    assert menu.num_layers == 70
    assert all(option.plan.stages[-1].end_layer == 70 for option in menu.options)


def test_dear_requests_take_fewer_chunks():
    profile = drawn_profile(1, 8)
    dear = msgspec.structs.replace(SERVICE, prices=msgspec.structs.replace(SERVICE.prices, usd_per_put=1e-2))
    free = msgspec.structs.replace(
        SERVICE, prices=msgspec.structs.replace(SERVICE.prices, usd_per_put=0.0, usd_per_get=0.0)
    )

    def chunks(service):
        return max(one.plan.num_chunks for one in menu_of(profile, service, 64, degrees=(4,)).options)

    assert chunks(dear) == 1
    assert chunks(free) > 1


def test_a_profile_of_other_sizes_is_refused():
    with pytest.raises(InvalidRequest, match="scale it"):
        menu_of(drawn_profile(1, 3, memory_mb=(600, 1200)), SERVICE, 8)
    with pytest.raises(InvalidRequest, match="at least 1"):
        menu_of(drawn_profile(1, 3), SERVICE, 0)
