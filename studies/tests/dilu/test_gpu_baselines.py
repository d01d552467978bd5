"""The arms on the modelled GPU: what each mechanism is known for, and the published daemon's measured faults."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.shares import Share
from springtide.serving.share_control import Observation
from springtide_studies.dilu.gpu_baselines import (
    Controlled,
    FastGsArm,
    Mps,
    NoControl,
    PublishedDaemon,
    Tgs,
    TimeSlices,
    arms_for,
)
from springtide_studies.dilu.gpu_execution import KernelObservation, SharingArm, TenantFigures, run_device
from springtide_studies.dilu.gpu_execution_work import ModelledTenant, plan_iteration, poisson_arrivals
from springtide_studies.dilu.share_latency import ShareLatency

HORIZON_S = 8.0
LATENCY = ShareLatency(host_s=0.006, work_s=0.0, work_per_item_s=0.0025, saturation=0.17, saturation_per_doubling=0.15)


def service(load: float, tenant_id: str = "service") -> ModelledTenant:
    plans = {size: plan_iteration(LATENCY, size, bandwidth_fraction=0.3) for size in range(1, 5)}
    rate_per_s = load * 4 / plans[4].alone_s
    return ModelledTenant(
        tenant_id=tenant_id,
        share=Share(request=0.3, limit=0.6),
        is_slo=True,
        plans=plans,
        arrivals=poisson_arrivals(np.random.default_rng(len(tenant_id)), rate_per_s, HORIZON_S),
        slo_s=0.1,
    )


def training(tenant_id: str = "training") -> ModelledTenant:
    plan = plan_iteration(LATENCY, 32, passes=3.0, idle_fraction=0.2, bandwidth_fraction=0.4)
    return ModelledTenant(tenant_id=tenant_id, share=Share(request=0.5, limit=0.8), is_slo=False, plans={32: plan})


PAIR = (service(0.5), training())
ALONE = {tenant.tenant_id: run_device([tenant], NoControl([tenant]), HORIZON_S)[tenant.tenant_id] for tenant in PAIR}


def play(arm: SharingArm) -> dict[str, TenantFigures]:
    return run_device(PAIR, arm, HORIZON_S)


def throughput(figures: dict[str, TenantFigures]) -> float:
    return figures["training"].iterations_per_s / ALONE["training"].iterations_per_s


def p95(figures: dict[str, TenantFigures]) -> float:
    return figures["service"].p95_s / ALONE["service"].p95_s


def test_there_is_an_arm_of_every_kind() -> None:
    names = [arm.name for arm in arms_for(PAIR)]
    assert names == ["none", "time-slices", "mps-l", "mps-r", "tgs", "fast-gs", "rckm", "springtide"]


def test_tgs_protects_the_service_and_nearly_stops_the_training() -> None:
    figures = play(Tgs(PAIR))
    assert p95(figures) < 1.1
    assert throughput(figures) < 0.2


def test_fixed_requests_leave_a_service_without_room_for_bursts() -> None:
    requests, limits = play(Mps(PAIR, "request")), play(Mps(PAIR, "limit"))
    assert p95(requests) > 1.3 * p95(limits)
    assert throughput(requests) < 0.9


def test_fast_gs_is_no_faster_than_mps_at_limits() -> None:
    assert p95(play(FastGsArm(PAIR))) >= p95(play(Mps(PAIR, "limit")))


def test_time_slices_run_one_at_a_time() -> None:
    figures = play(TimeSlices(PAIR))
    together = play(NoControl(PAIR))
    assert throughput(figures) < throughput(together)
    assert sum(figure.used_fraction for figure in figures.values()) < 0.9 * sum(
        figure.used_fraction for figure in together.values()
    )


def test_our_control_keeps_the_service_fast_and_the_training_above_its_request() -> None:
    figures = play(Controlled(PAIR))
    assert p95(figures) < p95(play(NoControl(PAIR)))
    assert throughput(figures) > 0.7
    assert figures["training"].used_fraction >= 0.9 * PAIR[1].share.request


class Script:
    """The published daemon, told block counts tick by tick. One SLO task and one training."""

    def __init__(self, *names: str) -> None:
        tenants = [service(0.1, name) for name in names or ("service",)]
        self.names = [tenant.tenant_id for tenant in tenants]
        self.arm = PublishedDaemon([*tenants, training()])

    def tick(self, *blocks: float) -> float:
        """Return the tokens of the training."""
        nothing = Observation(used_fraction=0.0)
        seen = {
            name: KernelObservation(observation=nothing, num_blocks=num)
            for name, num in zip(self.names, blocks, strict=True)
        }
        return self.arm.tick(seen | {"training": KernelObservation(observation=nothing, num_blocks=5.0)}, 0.005)[
            "training"
        ]

    def iterate(self, num_ticks: int, times: int) -> float:
        """Iterations of so many ticks with launches and one without."""
        tokens = 0.0
        for _ in range(times):
            for number in range(num_ticks + 1):
                tokens = self.tick(0.0 if number == num_ticks else 100.0)
        return tokens


@pytest.mark.parametrize(("usual", "slow"), [(5, 10), (2, 4), (8, 34)], ids=["25 to 50", "10 to 20", "40 to 170 ms"])
def test_the_published_daemon_does_not_react(usual: int, slow: int) -> None:
    script = Script()
    before = script.iterate(usual, 20)
    assert script.iterate(slow, 7 if usual == 8 else 20) >= before


def test_the_published_daemon_throttles_only_long_iterations_that_doubled() -> None:
    script = Script()
    before = script.iterate(8, 20)
    assert script.iterate(16, 10) < 0.1 * before


def test_the_published_daemon_lifts_the_training_because_one_slo_task_is_idle_though_another_is_busy() -> None:
    script = Script("service", "another")
    script.tick(100.0, 100.0)
    both_busy = script.tick(0.0, 100.0)
    for _ in range(130):
        one_idle = script.tick(0.0, 100.0)
    assert both_busy == pytest.approx(0.5e6)
    assert one_idle == pytest.approx(5e6)
