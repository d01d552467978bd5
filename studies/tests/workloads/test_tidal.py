"""The drawn tide: its shape and height, its functions and their bounds, what gateways say, and its seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from springtide.core.errors import InvalidRequest
from springtide.core.events import CancelRequested, LoadObserved, ServiceDeployed
from springtide.core.tide import DAY_S
from springtide_studies.workloads.tidal import (
    NIGHT_FRACTION,
    TidalSetting,
    TidalTrace,
    draw_needs,
    draw_tidal,
    tide_level,
)

SETTING = TidalSetting(num_servers=4)


def test_the_night_needs_a_fifth_of_the_day() -> None:
    assert pytest.approx(0.2205, abs=1e-3) == NIGHT_FRACTION
    level = tide_level(np.arange(0.0, 24.0, 0.5) / 24.0)
    assert level[8] == 0.0, "at four"
    assert level[30] == 1.0, "at three in the afternoon"
    assert np.abs(np.diff(np.append(level, level[0]))).max() < 0.2, "no step anywhere, midnight included"


@pytest.mark.parametrize("seed", range(5))
def test_days_and_nights_are_as_high_as_in_the_figure(seed: int) -> None:
    needs = draw_needs(seed, TidalSetting(num_servers=100, days=7)).reshape(7, 96)
    peak = 800
    assert needs.max() == peak
    days, nights = needs[:, 48:80].mean(axis=1), needs[:, 14:22].mean(axis=1)
    assert np.all((days > 0.75 * peak) & (days <= peak))
    assert np.all(nights / days < 0.3)
    assert np.all(nights > 0.1 * peak)


@pytest.mark.parametrize("setting", [SETTING, TidalSetting(num_servers=1), TidalSetting(num_servers=50, days=1)])
@pytest.mark.parametrize("seed", range(5))
def test_minimums_add_up_to_the_tide_and_never_to_more(setting: TidalSetting, seed: int) -> None:
    trace = draw_tidal(seed, setting)
    levels = trace.minimums()
    peak = setting.num_servers * setting.devices_per_server
    assert max(level for _, level in levels) == peak
    assert min(level for _, level in levels) >= 1
    needs, bin_s = draw_needs(seed, setting), setting.day_s / 96
    for at_s, level in levels:
        index = int(at_s / bin_s)
        assert level <= max(needs[max(0, index - 1)], needs[index])
    assert levels[0][0] == 0.0


def test_functions_grow_with_the_pool_and_keep_their_number() -> None:
    small, large = (draw_tidal(0, replace(SETTING, num_servers=number)) for number in (4, 16))
    sizes = [np.mean([f.service.min_replicas for f in trace.functions]) for trace in (small, large)]
    assert sizes[1] / sizes[0] == pytest.approx(4.0, rel=0.3)
    assert 0.6 < len(large.functions) / len(small.functions) < 1.6


def test_bounds_are_those_of_the_paper() -> None:
    for function in draw_tidal(0, replace(SETTING, num_servers=16)).functions:
        service = function.service
        assert service.max_replicas == -(-service.min_replicas * 3 // 2)


def test_priority_is_the_order_of_submission() -> None:
    trace = draw_tidal(1, SETTING)
    names = [event.service.service_id for _, event in trace.timed_events if isinstance(event, ServiceDeployed)]
    assert names == [function.service.service_id for function in trace.functions]
    begins = [function.begin_s for function in trace.functions]
    assert begins == sorted(begins)


def lives(trace: TidalTrace) -> dict[str, tuple[float, float]]:
    return {f.service.service_id: (f.begin_s, np.inf if f.end_s is None else f.end_s) for f in trace.functions}


def test_gateways_speak_of_living_functions_within_their_maximum_and_only_when_it_changes() -> None:
    trace = draw_tidal(0, replace(SETTING, num_servers=16))
    known: dict[str, int] = {}
    shares = []
    life, service_of = lives(trace), {f.service.service_id: f.service for f in trace.functions}
    for at_s, event in trace.timed_events:
        if isinstance(event, LoadObserved):
            begin_s, end_s = life[event.service_id]
            service = service_of[event.service_id]
            assert begin_s < at_s < end_s
            assert event.in_flight != known.get(event.service_id)
            assert event.in_flight <= service.max_replicas * service.target_in_flight
            known[event.service_id] = event.in_flight
            shares.append(event.in_flight / service.target_in_flight / service.min_replicas)
    assert 0.7 < np.mean(shares) < 1.1
    assert np.mean(np.array(shares) > 1.0) > 0.02, "some ask for more than their minimum"


def test_every_end_follows_its_submission() -> None:
    trace = draw_tidal(2, SETTING)
    ends = {e.workload_id: at_s for at_s, e in trace.timed_events if isinstance(e, CancelRequested)}
    for name, (begin_s, end_s) in lives(trace).items():
        assert ends.get(name, np.inf) == end_s
        assert begin_s < end_s
    moments = [at_s for at_s, _ in trace.timed_events]
    assert moments == sorted(moments)
    assert moments[-1] <= 3 * DAY_S


def test_weekends_may_be_lower() -> None:
    needs = draw_needs(0, TidalSetting(num_servers=50, days=14, weekend_fraction=0.5)).reshape(14, 96)
    noon = needs[:, 48:80].mean(axis=1)
    assert noon[[5, 6, 12, 13]].max() < 0.75 * noon[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]].min()


def test_surges_come_at_any_hour_and_need_no_more_than_the_highest_tide() -> None:
    calm = TidalSetting(num_servers=50, days=7)
    plain, surging = draw_needs(3, calm), draw_needs(3, replace(calm, surges_per_day=2.0))
    assert np.all(surging >= plain)
    assert surging.max() == plain.max()
    risen = surging > plain + 0.2 * plain.max()
    assert 5 < risen.sum() < 100


def test_a_day_may_be_shorter() -> None:
    day, minute = draw_tidal(0, SETTING), draw_tidal(0, replace(SETTING, day_s=60.0))
    assert [f.service for f in day.functions] == [f.service for f in minute.functions]
    assert [at_s for at_s, _ in minute.timed_events] == pytest.approx([at_s / 1440.0 for at_s, _ in day.timed_events])


def test_a_seed_says_it_all() -> None:
    assert draw_tidal(7, SETTING) == draw_tidal(7, SETTING)
    assert draw_tidal(7, SETTING) != draw_tidal(8, SETTING)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_servers": 0},
        {"days": 0},
        {"noise_fraction": float("nan")},
        {"surges_per_day": -1.0},
        {"max_over_min": 0.5},
        {"num_servers": 90_000, "devices_per_server": 8},
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        draw_tidal(0, replace(SETTING, **wrong))
    with pytest.raises(InvalidRequest):
        draw_tidal(-1, SETTING)
