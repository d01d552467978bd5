"""The co-scaler: bursts are waited out, lasting load and surges are not, stops are lazy and learn from regret."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from springtide.core.workload import Entrypoint, InferenceService, WorkloadId
from springtide.serving.co_scaler import (
    CoScalerRules,
    CoScalerState,
    LoadSample,
    co_scale,
    rules_of,
)
from springtide_studies.dilu.coscaling_world import published_rules

RULES = CoScalerRules(capacity_per_s=100.0, min_replicas=1, max_replicas=8, planned_fraction=0.8)


def feed(rates, rules=RULES, state=None, queued=0, idle_s=0.0):
    """Every wanted number, the last state and the reasons that were told."""
    state = state or CoScalerState(wanted=1)
    wanted, reasons = [], []
    for rate in rates:
        state, advice = co_scale(rules, state, LoadSample(rate_per_s=rate, num_queued=queued, idle_s=idle_s))
        wanted.append(advice.wanted)
        if advice.reason:
            reasons.append(advice.reason)
    return wanted, state, reasons


def test_a_burst_of_seconds_within_the_limits_starts_nothing():
    wanted, _, reasons = feed([50.0] * 40 + [95.0] * 19 + [50.0] * 60)
    assert set(wanted) == {1}
    assert reasons == []


def test_the_twentieth_value_above_the_plan_asks_for_one_more():
    wanted, _, reasons = feed([50.0] * 10 + [90.0] * 20)
    assert wanted[:-1] == [1] * 29
    assert wanted[-1] == 2
    assert reasons == ["over 80 requests/s in 20 of the last 30 s".replace("the last ", "")]


def test_values_need_not_be_in_a_row():
    wanted, _, _ = feed([90.0, 50.0] * 20)
    assert wanted.index(2) == 38


def test_lasting_load_asks_for_as_many_as_it_takes():
    patient = msgspec.structs.replace(RULES, num_surge=0)
    assert feed([390.0] * 20, patient)[0][-1] == 5


def test_a_surge_above_the_limits_does_not_wait():
    wanted, _, reasons = feed([60.0] * 5 + [240.0, 60.0, 240.0, 250.0])
    assert wanted == [1] * 8 + [3]
    assert "more than 1 can answer in time" in reasons[0]


def test_one_less_takes_more_than_thirty_values_after_the_last_change():
    begun = CoScalerState(wanted=2)
    assert feed([70.0] * 30, state=begun)[0] == [2] * 30
    assert feed([70.0] * 31, state=begun)[0][-1] == 1
    # Ten values above the plan in the window, and no more: still one too many.
    assert feed([90.0] * 9 + [70.0] * 31, state=begun)[0][-1] == 1
    assert feed([90.0] * 10 + [70.0] * 30, state=begun)[0][-1] == 2


def test_replicas_leave_one_at_a_time_and_each_has_its_own_window():
    wanted, _, _ = feed([10.0] * 100, state=CoScalerState(wanted=4))
    assert [wanted.count(number) for number in (4, 3, 2, 1)] == [30, 31, 31, 8]


def test_who_regrets_a_stop_keeps_the_next_one_longer():
    high, low = [90.0] * 25, [40.0] * 60
    first, state, _ = feed(high + low)
    assert first[-1] == 1
    again, state, _ = feed(high, state=state)
    assert again[-1] == 2
    assert state.hold_s == RULES.first_hold_s
    held, state, _ = feed([40.0] * 150, state=state)
    assert held[:149] == [2] * 149
    assert feed([40.0] * 2, state=state)[0][-1] == 1
    # A start long after a stop is no regret.
    late = feed(low + [40.0] * RULES.regret_s + high, state=CoScalerState(wanted=2))[1]
    assert (late.wanted, late.hold_s) == (2, 1)


def test_holding_doubles_up_to_its_bound():
    state = CoScalerState(wanted=1, hold_s=200, stopped_s=(3,))
    assert feed([300.0] * 2, state=state)[1].hold_s == RULES.max_hold_s


def test_zero_after_idleness_and_from_zero_at_once():
    rules = msgspec.structs.replace(RULES, min_replicas=0, idle_s=30.0)
    state = CoScalerState(wanted=3)
    assert feed([0.0], rules, state, idle_s=29.0)[0] == [3]
    wanted, asleep, reasons = feed([0.0], rules, state, idle_s=30.0)
    assert wanted == [0]
    assert reasons == ["nobody has asked for 30 s"]
    assert asleep == CoScalerState(), "a sleep forgets"
    assert feed([0.0] * 50, rules, asleep)[0] == [0] * 50
    assert feed([0.0], rules, asleep, queued=1)[0] == [1], "a request that waits wakes it"
    assert feed([250.0], rules, asleep)[0] == [3]
    assert feed([0.0], RULES, state, idle_s=500.0)[0] == [1], "the minimum stays"


def test_a_service_that_waits_for_answers_is_not_idle():
    rules = msgspec.structs.replace(RULES, min_replicas=0)
    assert feed([0.0], rules, CoScalerState(wanted=2), queued=5, idle_s=100.0)[0] == [2]


def test_bounds_hold_whatever_comes():
    rules = msgspec.structs.replace(RULES, min_replicas=2, max_replicas=3)
    rng = np.random.default_rng(0)
    wanted, _, _ = feed(rng.exponential(200.0, size=600).tolist(), rules, CoScalerState(wanted=9))
    assert set(wanted) <= {2, 3}


def test_a_capacity_profiled_too_high_shows_in_the_queue():
    assert feed([60.0] * 40)[0][-1] == 1
    assert feed([60.0] * 40, queued=50)[0][-1] == 2


def test_the_state_is_a_value():
    rates = np.random.default_rng(1).uniform(0.0, 400.0, size=300).tolist()
    whole, last, _ = feed(rates)
    first, state, _ = feed(rates[:150])
    kept = msgspec.json.decode(msgspec.json.encode(state), type=CoScalerState)
    rest, end, _ = feed(rates[150:], state=kept)
    assert first + rest == whole
    assert end == last


def prototype(rates, throughput):
    """The scaling loop of the published prototype, as its page of research describes it."""
    count, history, told = 1, [], []
    for rate in rates:
        history = [*history, rate][-40:]
        if sum(value > count * throughput for value in history) >= 20:
            count, history = count + 1, []
        elif count > 1 and sum(value < (count - 1) * throughput for value in history) >= 30:
            count, history = count - 1, []
        told.append(count)
    return told


@pytest.mark.parametrize("seed", range(5))
def test_the_published_rules_are_the_prototypes(seed):
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.uniform(10.0, 300.0, size=12), 60) + rng.normal(0.0, 20.0, size=720)
    rates = np.maximum(levels, 1.0).tolist()
    assert feed(rates, published_rules(50.0, 1, 1000))[0] == prototype(rates, 50.0)


def test_rules_come_from_a_service_that_was_profiled():
    service = InferenceService(
        service_id=WorkloadId("s"),
        name="s",
        entrypoint=Entrypoint(source_path="a.py", object_name="S", kind="class"),
        min_replicas=1,
        max_replicas=4,
        idle_s=12.0,
    )
    assert rules_of(service) is None
    rules = rules_of(msgspec.structs.replace(service, capacity_per_s=80.0))
    assert rules is not None
    assert (rules.capacity_per_s, rules.min_replicas, rules.max_replicas, rules.idle_s) == (80.0, 1, 4, 12.0)
