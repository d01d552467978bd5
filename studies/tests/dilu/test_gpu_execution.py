"""The modelled GPU: alone as planned, shared in proportion, gated by launches that are never taken back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from springtide.core.shares import Share
from springtide_studies.dilu.gpu_baselines import Controlled, Mps, NoControl
from springtide_studies.dilu.gpu_execution import QUEUE_DEPTH, TICK_S, WARM_UP_S, KernelObservation, run_device
from springtide_studies.dilu.gpu_execution_work import IterationPlan, Kernel, ModelledTenant

SHARE = Share(request=0.3, limit=0.6)


def kernels(number: int, *, sm: float = 1.0, duration_s: float = 0.001, bandwidth: float = 0.0) -> tuple[Kernel, ...]:
    kernel = Kernel(
        duration_s=duration_s, sm_fraction=sm, bandwidth_fraction=bandwidth, num_blocks=1000.0 * duration_s * sm
    )
    return (kernel,) * number


def training(
    tenant_id: str = "training", *, sm: float = 1.0, idle_s: float = 0.0, share: Share = SHARE, bandwidth: float = 0.0
) -> ModelledTenant:
    plan = IterationPlan(host_s=0.002, kernels=kernels(18, sm=sm, bandwidth=bandwidth), idle_s=idle_s)
    return ModelledTenant(tenant_id=tenant_id, share=share, is_slo=False, plans={1: plan})


def service(*arrivals: float, sm: float = 0.5, slo_s: float = 0.05, max_batch_size: int = 1) -> ModelledTenant:
    plans = {
        size: IterationPlan(host_s=0.004, kernels=kernels(6 * size, sm=sm)) for size in range(1, max_batch_size + 1)
    }
    return ModelledTenant(tenant_id="service", share=SHARE, is_slo=True, plans=plans, arrivals=arrivals, slo_s=slo_s)


class Fixed(NoControl):
    """Fixed budgets a tick."""

    tick_s = TICK_S

    def __init__(self, budgets: Mapping[str, float]) -> None:
        super().__init__([])
        self.budgets = budgets
        self.seen: list[Mapping[str, KernelObservation]] = []

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        self.seen.append(seen)
        return self.budgets


def test_alone_an_iteration_takes_as_long_as_planned() -> None:
    tenant = training(idle_s=0.005)
    figures = run_device([tenant], NoControl([tenant]), 6.0)["training"]
    assert figures.iterations_per_s == pytest.approx(1 / 0.025, rel=0.01)
    assert figures.used_fraction == pytest.approx(18 / 25, rel=0.01)


def test_a_request_alone_waits_for_nobody() -> None:
    tenant = service(1.5, 2.0, 3.0)
    figures = run_device([tenant], NoControl([tenant]), 5.0)["service"]
    assert figures.p50_s == figures.p99_s == pytest.approx(0.01)
    assert figures.violation_fraction == 0.0


def test_requests_that_wait_are_served_together() -> None:
    tenant = service(1.5, 1.501, 1.502, 1.503, max_batch_size=4)
    figures = run_device([tenant], NoControl([tenant]), 5.0)["service"]
    assert figures.p99_s == pytest.approx(0.009 + 0.004 + 0.018)


def test_kernels_that_fill_the_device_twice_run_at_half_speed() -> None:
    pair = [training("one"), training("two")]
    figures = run_device(pair, NoControl(pair), 6.0)
    alone = run_device(pair[:1], NoControl(pair[:1]), 6.0)["one"]
    assert 0.5 < figures["one"].iterations_per_s / alone.iterations_per_s < 0.58
    assert sum(figure.used_fraction for figure in figures.values()) == pytest.approx(2 * 18 / 38, abs=0.01)


def test_kernels_that_fit_side_by_side_do_not_disturb_each_other_unless_by_bandwidth() -> None:
    free = [training("one", sm=0.5), training("two", sm=0.5)]
    bound = [training("one", sm=0.5, bandwidth=0.75), training("two", sm=0.5, bandwidth=0.75)]
    alone = run_device(free[:1], NoControl(free[:1]), 4.0)["one"].iterations_per_s
    assert run_device(free, NoControl(free), 4.0)["one"].iterations_per_s == pytest.approx(alone)
    assert run_device(bound, NoControl(bound), 4.0)["one"].iterations_per_s < 0.8 * alone


def test_a_bound_on_the_sms_stretches_only_what_is_wider() -> None:
    wide, narrow = training(sm=1.0), training(sm=0.5)
    half = run_device([wide], Mps([wide], "limit"), 4.0)["training"].iterations_per_s
    assert half == pytest.approx(1 / (0.002 + 0.018 / 0.6), rel=0.02)
    same = run_device([narrow], Mps([narrow], "limit"), 4.0)["training"].iterations_per_s
    assert same == pytest.approx(1 / 0.02, rel=0.02)


def test_tokens_hold_a_tenant_to_their_rate_on_average() -> None:
    tenant = training()
    figures = run_device([tenant], Fixed({"training": 0.3 * TICK_S}), 11.0)["training"]
    assert figures.used_fraction == pytest.approx(0.3, rel=0.03)


def test_what_is_launched_runs_to_its_end_whatever_the_budget() -> None:
    tenant = training()
    arm = Fixed({"training": 1e-6})
    run_device([tenant], arm, 0.1)
    used_s = [TICK_S * seen["training"].observation.used_fraction for seen in arm.seen]
    # A budget of a microsecond launches one kernel of a millisecond, which is paid off in ticks to come.
    assert max(used_s) == pytest.approx(0.001, rel=0.3)
    assert sum(used_s) <= 0.002


def test_the_host_runs_ahead_by_a_bounded_number_of_launches() -> None:
    tenant = ModelledTenant(
        tenant_id="long",
        share=SHARE,
        is_slo=False,
        plans={1: IterationPlan(host_s=0.0, kernels=kernels(50, duration_s=0.02))},
    )
    arm = Fixed({"long": math.inf})
    run_device([tenant], arm, 0.1)
    assert sum(seen["long"].num_blocks for seen in arm.seen[:3]) == pytest.approx(QUEUE_DEPTH * 20.0)


def test_the_control_sees_iterations_while_they_run_and_when_they_end() -> None:
    tenant = service(0.012, 0.0121, 0.0122, sm=1.0)
    arm = Fixed({"service": math.inf})
    run_device([tenant], arm, 0.06)
    seen = [each["service"].observation for each in arm.seen]
    running = next(each for each in seen if each.iteration_s > 0)
    assert 0.0 < running.iteration_s < 0.01
    assert (running.batch_size, running.num_queued) == (1, 2)
    ended = [iteration for each in seen for iteration in each.finished]
    assert [iteration.duration_s for iteration in ended] == pytest.approx([0.01, 0.01, 0.01])


def test_requests_that_are_never_answered_count_as_missed() -> None:
    tenant = service(*(WARM_UP_S + 0.001 * number for number in range(1, 1000)))
    figures = run_device([tenant], NoControl([tenant]), 3.0)["service"]
    assert figures.num_requests > 900
    assert figures.violation_fraction > 0.9


def test_the_same_seed_gives_the_same_bits() -> None:
    pair = [service(*(0.03 * number for number in range(1, 90))), training()]
    first = run_device(pair, Controlled(pair), 3.0, seed=3)
    assert run_device(pair, Controlled(pair), 3.0, seed=3) == first
    assert run_device(pair, Controlled(pair), 3.0, seed=4) != first
