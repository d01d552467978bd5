"""The control of a shared device: each row of what the published daemon gets wrong, and what always holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.shares import Share
from springtide.serving.share_control import (
    DeviceControl,
    Grant,
    Observation,
    ShareIteration,
    Tenant,
    control_tick,
    learn,
    reference_s,
    stretch,
)

TICK_S = 0.005
WINDOW_TICKS = 200
IDLE = Observation(used_fraction=0.0)


def tenant(tenant_id: str, request: float, limit: float, *, is_slo: bool) -> Tenant:
    return Tenant(tenant_id=tenant_id, share=Share(request=request, limit=limit), is_slo=is_slo)


INFERENCE = tenant("inference", 0.3, 0.6, is_slo=True)
OTHER = tenant("other", 0.3, 0.6, is_slo=True)
TRAINING = tenant("training", 0.3, 0.6, is_slo=False)


class Device:
    """A device under control, told what its tenants did in each tick."""

    def __init__(self, *tenants: Tenant) -> None:
        self.tenants = tenants
        self.control = DeviceControl()
        self.grants: dict[str, Grant] = {}
        self.history: list[dict[str, Grant]] = []

    def tick(self, **observations: Observation) -> dict[str, Grant]:
        self.control, self.grants = control_tick(self.control, self.tenants, observations, TICK_S)
        self.history.append(self.grants)
        return self.grants

    def used(self, tenant_id: str) -> float:
        """All it was granted."""
        shares = {who.tenant_id: who.share for who in self.tenants}
        return self.grants[tenant_id].rate if self.grants else shares[tenant_id].request

    def busy(self, tenant_id: str) -> Observation:
        return Observation(used_fraction=self.used(tenant_id))

    def iterate(self, tenant_id: str, duration_s: float, *, batch_size: int = 4, until_s: float | None = None) -> None:
        """Let an SLO tenant run one iteration of so long, the training busy beside it; `until_s`: look no longer."""
        num_ticks = round((duration_s if until_s is None else until_s) / TICK_S)
        for number in range(1, num_ticks + 1):
            ended = until_s is None and number == num_ticks
            seen = Observation(
                used_fraction=self.used(tenant_id),
                iteration_s=0.0 if ended else number * TICK_S,
                batch_size=batch_size,
                finished=(ShareIteration(batch_size=batch_size, duration_s=duration_s),) if ended else (),
            )
            self.tick(**{tenant_id: seen, "training": self.busy("training")})


def settled(duration_s: float, *tenants: Tenant) -> Device:
    """A device on which the inference has iterated at this pace for a second."""
    device = Device(*(tenants or (INFERENCE, TRAINING)))
    for _ in range(max(3, round(1.0 / duration_s))):
        device.iterate("inference", duration_s)
    assert device.grants["inference"].state == "CONTENTION"
    return device


@pytest.mark.parametrize(
    ("usual_s", "slow_s"),
    [(0.025, 0.05), (0.01, 0.02), (0.03, 0.06), (0.04, 0.08), (0.04, 0.17)],
    ids=["the paper's own 25 to 50 ms", "short", "30 to 60 ms", "40 to 80 ms", "more than four times"],
)
def test_an_iteration_that_takes_too_long_is_an_emergency_within_two_ticks_while_it_runs(
    usual_s: float, slow_s: float
) -> None:
    device = settled(usual_s)
    too_long_s = 1.3 * usual_s
    device.iterate("inference", slow_s, until_s=min(slow_s, too_long_s + 2 * TICK_S))
    assert device.grants["inference"].state == "EMERGENCY"
    assert device.grants["inference"].rate == INFERENCE.share.limit
    assert device.grants["training"].state == "EMERGENCY"
    assert device.grants["training"].rate < TRAINING.share.request


@pytest.mark.parametrize(("usual_s", "slow_s"), [(0.001, 0.0025), (0.002, 0.004)])
def test_iterations_shorter_than_a_tick_are_seen_when_they_end(usual_s: float, slow_s: float) -> None:
    device = Device(INFERENCE, TRAINING)

    def play(duration_s: float) -> Grant:
        ended = tuple(ShareIteration(batch_size=1, duration_s=duration_s) for _ in range(round(TICK_S / duration_s)))
        seen = Observation(used_fraction=device.used("inference"), finished=ended, batch_size=1)
        return device.tick(inference=seen, training=device.busy("training"))["inference"]

    for _ in range(50):
        assert play(usual_s).state == "CONTENTION"
    assert play(slow_s).state == "EMERGENCY"


def test_two_seconds_of_overload_without_an_idle_tick_are_an_emergency_while_they_last() -> None:
    device = settled(0.025)
    start = len(device.history)
    device.iterate("inference", 2.0, until_s=2.0)
    states = [grants["inference"].state for grants in device.history[start:]]
    first = states.index("EMERGENCY")
    assert first * TICK_S <= 0.025 * 1.3 + 2 * TICK_S
    assert set(states[first:]) == {"EMERGENCY"}


def test_trouble_on_one_device_changes_nothing_on_another() -> None:
    calm, beside_trouble, troubled = settled(0.025), settled(0.025), settled(0.025)
    for _ in range(40):
        troubled.iterate("inference", 0.2, until_s=TICK_S)
        assert calm.tick(training=calm.busy("training")) == beside_trouble.tick(
            training=beside_trouble.busy("training")
        )


def test_a_larger_batch_is_not_contention() -> None:
    device = settled(0.025)
    for batch_size, duration_s in ((8, 0.045), (16, 0.09), (32, 0.18), (4, 0.025), (16, 0.09)):
        start = len(device.history)
        device.iterate("inference", duration_s, batch_size=batch_size)
        assert {grants["inference"].state for grants in device.history[start:]} == {"CONTENTION"}


def test_a_batch_size_seen_first_under_contention_is_bounded_by_the_others() -> None:
    device = settled(0.025)
    device.iterate("inference", 0.1, batch_size=2)
    assert device.grants["inference"].state == "EMERGENCY"


def test_a_model_that_is_slower_for_good_is_no_emergency_for_ever() -> None:
    device = settled(0.025)
    for _ in range(20):
        device.iterate("inference", 0.06)
    assert device.grants["inference"].state == "CONTENTION"


def test_one_iteration_that_was_strangely_short_is_forgotten() -> None:
    device = settled(0.05)
    device.iterate("inference", 0.01)
    for _ in range(20):
        device.iterate("inference", 0.05)
    assert device.grants["inference"].state == "CONTENTION"


def test_an_idle_slo_tenant_does_not_lift_the_training_beside_a_busy_one() -> None:
    device = Device(INFERENCE, OTHER, TRAINING)
    rates = []
    for _ in range(260):
        grants = device.tick(other=device.busy("other"), inference=IDLE, training=device.busy("training"))
        rates.append(grants["training"].rate)
    changes = [abs(after - before) for before, after in itertools.pairwise(rates[60:])]
    assert max(changes) < 1e-9
    assert rates[-1] == pytest.approx(1.0 - OTHER.share.limit)


def test_a_small_stretch_never_raises_the_training() -> None:
    """The paper divides by the relative change, which below 1 raises what line 27 means to cut."""
    device = settled(0.1)
    before = device.grants["training"].rate
    start = len(device.history)
    device.iterate("inference", 0.135)
    device.iterate("inference", 0.135)
    rates = [
        grants["training"].rate
        for grants in device.history[start:]
        if grants["inference"].state == "EMERGENCY" and device.control.left_s > 0.2
    ]
    assert rates
    assert max(rates) <= before + 1e-12


def test_a_queue_is_a_burst_before_iterations_get_slow() -> None:
    device = Device(INFERENCE, OTHER, TRAINING)
    for _ in range(40):
        both = {"inference": device.busy("inference"), "other": device.busy("other")}
        device.tick(training=device.busy("training"), **both)
    assert device.grants["inference"].rate == pytest.approx(device.grants["other"].rate)
    queued = Observation(used_fraction=device.used("inference"), iteration_s=0.005, batch_size=4, num_queued=9)
    device.tick(training=device.busy("training"), other=device.busy("other"), inference=queued)
    assert device.grants["inference"].state == "EMERGENCY"
    assert device.grants["inference"].rate > device.grants["other"].rate >= OTHER.share.request - 1e-12


def test_recovery_takes_one_tick_when_the_slo_tenants_fall_idle() -> None:
    device = settled(0.025)
    device.iterate("inference", 0.17)
    device.iterate("inference", 0.025)
    device.tick(training=device.busy("training"))
    assert device.grants["training"].rate == TRAINING.share.limit
    assert device.grants["training"].state == "RECOVERY"


def test_recovery_beside_a_busy_slo_tenant_takes_at_most_seventy_milliseconds() -> None:
    device = settled(0.025)
    device.iterate("inference", 0.17)
    device.iterate("inference", 0.025)
    for _ in range(14):
        device.tick(inference=device.busy("inference"), training=device.busy("training"))
    assert device.control.ceiling == 1.0


def test_alone_a_tenant_has_its_limit() -> None:
    device = Device(TRAINING)
    assert device.tick(training=device.busy("training"))["training"] == Grant(
        rate=0.6, state="NONE", reason="no other tenant is on this device"
    )


def test_what_a_tenant_leaves_unused_goes_to_others() -> None:
    slow_host = tenant("inference", 0.3, 0.8, is_slo=True)
    device = Device(slow_host, TRAINING)
    for _ in range(60):
        device.tick(inference=Observation(used_fraction=0.2, iteration_s=0.005), training=device.busy("training"))
    assert device.grants["training"].rate == TRAINING.share.limit


def test_a_training_that_waits_for_a_collective_lends_its_share_and_has_it_back_at_once() -> None:
    device = Device(tenant("inference", 0.5, 1.0, is_slo=True), tenant("training", 0.5, 1.0, is_slo=False))
    waiting = Observation(used_fraction=0.0, iteration_s=0.3)
    for _ in range(20):
        device.tick(inference=device.busy("inference"), training=waiting)
    assert device.grants["inference"].rate == 1.0
    assert device.grants["training"].rate == 0.5


def test_a_training_held_to_nothing_is_not_taken_for_idle() -> None:
    """Without a slot of its own it shows work only by its use, and it cannot use what it is not granted."""
    device = Device(tenant("inference", 0.5, 1.0, is_slo=True), tenant("training", 0.3, 0.5, is_slo=False))
    granted_s = 0.0
    for _ in range(5 * WINDOW_TICKS):
        grants = device.tick(inference=device.busy("inference"), training=device.busy("training"))
        granted_s += TICK_S * grants["training"].rate
    assert granted_s >= 5 * 0.3 - 1e-6


def test_a_changed_share_is_in_force_in_the_next_tick() -> None:
    device = Device(INFERENCE, TRAINING)
    for _ in range(30):
        device.tick(training=device.busy("training"))
    device.tenants = (INFERENCE, tenant("training", 0.1, 0.2, is_slo=False))
    assert device.tick(training=device.busy("training"))["training"].rate == 0.2


def seconds_of(device: Device, tenant_id: str) -> list[float]:
    """The device time granted in each whole second of the device."""
    rates = [grants[tenant_id].rate for grants in device.history]
    return [
        TICK_S * sum(rates[start : start + WINDOW_TICKS])
        for start in range(0, len(rates) - WINDOW_TICKS + 1, WINDOW_TICKS)
    ]


LOADS: Mapping[str, Callable[[Device, int], Observation]] = {
    "idle": lambda device, number: IDLE,
    "permanent emergency": lambda device, number: Observation(
        used_fraction=device.used("inference"),
        iteration_s=0.005 * number,
        batch_size=1,
        num_queued=50,
        finished=(ShareIteration(batch_size=1, duration_s=0.001),) if number < 3 else (),
    ),
    "bursts": lambda device, number: (
        Observation(used_fraction=device.used("inference"), iteration_s=0.02, num_queued=9)
        if number % 97 < 50
        else IDLE
    ),
    "late in every second": lambda device, number: (
        Observation(used_fraction=device.used("inference"), iteration_s=0.02, num_queued=9)
        if number % 200 > 120
        else IDLE
    ),
    "every other tick": lambda device, number: device.busy("inference") if number % 2 else IDLE,
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("request_of_training", [0.05, 0.3, 0.5])
def test_a_training_with_work_is_granted_its_request_in_every_second(load: str, request_of_training: float) -> None:
    training = tenant("training", request_of_training, min(1.0, 2 * request_of_training), is_slo=False)
    device = Device(tenant("inference", 0.5, 1.0, is_slo=True), training)
    for number in range(10 * WINDOW_TICKS):
        device.tick(inference=LOADS[load](device, number), training=device.busy("training"))
    assert min(seconds_of(device, "training")) >= request_of_training - 1e-9


@st.composite
def devices(draw: st.DrawFn) -> tuple[Tenant, ...]:
    """Two to five tenants whose requests sum to at most 1."""
    weights = draw(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5))
    total = draw(st.floats(0.3, 1.0)) / sum(weights)
    return tuple(
        tenant(
            f"t{number}",
            weight * total,
            min(1.0, weight * total * draw(st.floats(1.0, 4.0))),
            is_slo=draw(st.booleans()),
        )
        for number, weight in enumerate(weights)
    )


@st.composite
def scripts(draw: st.DrawFn) -> tuple[tuple[Tenant, ...], list[tuple[int, ...]], tuple[bool, ...]]:
    """Tenants, what each does in phases of some ticks (0: idle, 1: busy, 2: queued, 3: slow), and who always works."""
    tenants = draw(devices())
    phases = draw(
        st.lists(
            st.tuples(st.integers(1, 90), *(st.integers(0, 3) for _ in tenants)),
            min_size=1,
            max_size=8,
        )
    )
    return tenants, phases, tuple(draw(st.booleans()) for _ in tenants)


def play(tenants: Sequence[Tenant], phases: Sequence[tuple[int, ...]], always: Sequence[bool]) -> Device:
    device = Device(*tenants)
    number = 0
    while number < 4 * WINDOW_TICKS:
        for length, *kinds in phases:
            for _ in range(length):
                number += 1
                seen = {}
                for who, kind, is_always in zip(tenants, kinds, always, strict=True):
                    used = device.used(who.tenant_id)
                    if kind == 0 and not is_always:
                        continue
                    seen[who.tenant_id] = Observation(
                        used_fraction=used,
                        iteration_s=0.5 if kind == 3 else 0.004,
                        batch_size=1,
                        finished=(ShareIteration(batch_size=1, duration_s=0.01),) if kind == 1 else (),
                        num_queued=3 if kind == 2 else 0,
                    )
                device.tick(**seen)
    return device


@pytest.mark.slow
@given(scripts())
def test_a_tenant_that_always_has_work_is_granted_its_request_in_every_second(
    script: tuple[tuple[Tenant, ...], list[tuple[int, ...]], tuple[bool, ...]],
) -> None:
    tenants, phases, always = script
    device = play(tenants, phases, always)
    for who, is_always in zip(tenants, always, strict=True):
        if is_always:
            assert min(seconds_of(device, who.tenant_id)) >= who.share.request - 1e-9


@pytest.mark.slow
@given(scripts())
def test_any_second_lacks_at_most_a_tenth_of_a_request(
    script: tuple[tuple[Tenant, ...], list[tuple[int, ...]], tuple[bool, ...]],
) -> None:
    tenants, phases, always = script
    device = play(tenants, phases, always)
    for who, is_always in zip(tenants, always, strict=True):
        if is_always:
            granted_s = list(
                itertools.accumulate((TICK_S * grants[who.tenant_id].rate for grants in device.history), initial=0.0)
            )
            seconds = [after - before for before, after in zip(granted_s, granted_s[WINDOW_TICKS:], strict=False)]
            assert min(seconds) >= 0.9 * who.share.request - 1e-9


@pytest.mark.parametrize("phase", [3, 40, 10_000], ids=["flickering", "bursts", "always busy"])
def test_late_ticks_cost_a_training_nothing_of_its_request(phase: int) -> None:
    """The time since the last call is told, so a grant that stood for 50 ms counts for 50 ms."""
    rng = np.random.default_rng(phase)
    service, training = tenant("inference", 0.5, 1.0, is_slo=True), tenant("training", 0.3, 0.6, is_slo=False)
    device, rate, granted_s, played_s = DeviceControl(), 0.3, 0.0, 0.0
    for number in range(3000):
        tick_s = float(rng.choice([0.004, 0.005, 0.006, 0.02, 0.05], p=[0.3, 0.4, 0.2, 0.08, 0.02]))
        granted_s, played_s = granted_s + rate * tick_s, played_s + tick_s
        seen = {"training": Observation(used_fraction=rate)}
        if number // phase % 2 == 0:
            seen["inference"] = Observation(used_fraction=1.0, iteration_s=0.5, batch_size=1, num_queued=5)
        device, grants = control_tick(device, (service, training), seen, tick_s)
        rate = grants["training"].rate
    assert granted_s >= 0.99 * 0.3 * played_s


@pytest.mark.slow
@given(scripts())
def test_rates_are_bounded_and_the_same_again(
    script: tuple[tuple[Tenant, ...], list[tuple[int, ...]], tuple[bool, ...]],
) -> None:
    tenants, phases, always = script
    device = play(tenants, phases, always)
    limits = {who.tenant_id: who.share.limit for who in tenants}
    for grants in device.history:
        assert all(0.0 <= grant.rate <= limits[tenant_id] for tenant_id, grant in grants.items())
        assert sum(grant.rate for grant in grants.values() if grant.reason not in IDLE_REASONS) <= 1.0 + 1e-9
    assert play(tenants, phases, always).history == device.history


IDLE_REASONS = {"it has no work: others may have its part", "it works but does not compute: others may have its part"}


@given(devices())
def test_nothing_is_wasted_while_a_tenant_below_its_limit_wants_more(tenants: tuple[Tenant, ...]) -> None:
    device = Device(*tenants)
    for _ in range(40):
        device.tick(**{who.tenant_id: device.busy(who.tenant_id) for who in tenants})
        granted = sum(grant.rate for grant in device.grants.values())
        assert granted == pytest.approx(min(1.0, sum(who.share.limit for who in tenants)))


@pytest.mark.slow
@given(devices())
def test_a_tenant_that_never_works_takes_nothing_from_the_others(tenants: tuple[Tenant, ...]) -> None:
    idle = tenant("idle", max(0.0, 1.0 - sum(who.share.request for who in tenants)), 1.0, is_slo=True)
    without, beside = Device(*tenants), Device(*tenants, idle)
    for _ in range(40):
        for device in (without, beside):
            device.tick(**{who.tenant_id: device.busy(who.tenant_id) for who in tenants})
        alone = sum(without.grants[who.tenant_id].rate for who in tenants)
        assert sum(beside.grants[who.tenant_id].rate for who in tenants) == pytest.approx(alone)


def ended(duration_s: float, batch_size: int = 4) -> ShareIteration:
    return ShareIteration(batch_size=batch_size, duration_s=duration_s)


def test_the_shortest_is_the_reference_of_its_batch_size() -> None:
    references = learn({}, [ended(0.03), ended(0.02), ended(0.05, 8)], is_unhindered=False)
    assert reference_s(references, 4) == 0.02
    assert reference_s(references, 8) == pytest.approx(0.04 + 0.01 * 0.01)


def test_an_unseen_size_is_bounded_by_its_neighbours() -> None:
    references = {4: 0.02, 16: 0.06}
    assert reference_s(references, 8) == 0.04
    assert reference_s(references, 14) == 0.06
    assert reference_s(references, 32) == 0.12
    assert reference_s(references, 1) == 0.02
    assert reference_s({}, 1) == 0.0


def test_a_longer_one_draws_the_reference_up_soon_only_if_nothing_was_in_its_way() -> None:
    slowly = learn({4: 0.02}, [ended(0.04)] * 10, is_unhindered=False)
    soon = learn({4: 0.02}, [ended(0.04)] * 10, is_unhindered=True)
    assert slowly[4] < 0.022
    assert soon[4] > 0.037


def test_what_counts_as_stretched() -> None:
    assert stretch({4: 0.025}, 4, 0.05) == 2.0
    assert stretch({4: 0.025}, 4, 0.03) == 1.0
    assert stretch({4: 0.002}, 4, 0.0029) == 1.0
    assert stretch({}, 4, 5.0) == 1.0
    assert stretch({4: 0.025}, 8, 0.05) == 1.0


def test_the_references_given_are_not_changed_and_at_most_64_sizes_are_kept() -> None:
    before = {size: 0.01 * size for size in range(1, 65)}
    after = learn(before, [ended(0.9, 99)], is_unhindered=False)
    assert len(before) == len(after) == 64
    assert 99 in after
    assert 1 not in after
