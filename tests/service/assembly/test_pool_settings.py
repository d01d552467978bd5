"""Pools as people write them, the policy that they mean, and how finely a day is remembered."""

from __future__ import annotations

from datetime import datetime

import pytest

from springtide.core.errors import InvalidRequest
from springtide.service.assembly.pool_settings import (
    SHORTEST_BIN_S,
    midnight_before_s,
    parse_pools,
    policy_with_pools,
    tide_of,
    write_pools,
)


@pytest.mark.parametrize(
    ("value", "pools"),
    [
        ("", {}),
        ("inference=2", {"inference": 2}),
        (" training = 3 ,inference=1", {"training": 3, "inference": 1}),
        ({"inference": 2}, {"inference": 2}),
        ("inference=0", {"inference": 0}),
    ],
)
def test_pools_as_they_are_written(value, pools):
    assert parse_pools(value) == pools
    assert parse_pools(write_pools(pools)) == pools


@pytest.mark.parametrize(
    "value",
    ["2", "inference", "inference=", "inference=-1", "inference=1.5", "shared=2", "=2", "inference=2,", 2, None],
)
def test_what_is_no_pool_names_the_mend(value):
    with pytest.raises(InvalidRequest, match="inference"):
        parse_pools(value)


@pytest.mark.parametrize(
    ("policy", "pools", "composed"),
    [
        ("springtide", {}, "springtide"),
        ("springtide", {"inference": 2}, "tide/springtide"),
        ("fapes:round_s=60", {"inference": 2}, "tide/fapes:round_s=60"),
        ("two-way/fifo", {"inference": 2}, "two-way/fifo"),
        ("two-way/fifo", {}, "two-way/fifo"),
    ],
)
def test_a_plain_policy_is_put_under_the_tide(policy, pools, composed):
    assert policy_with_pools(policy, pools) == composed


def test_no_bin_of_a_day_is_shorter_than_a_handover():
    assert (tide_of(None).day_s, tide_of(None).bins_per_day) == (86400.0, 96)
    for day_s in (20.0, 60.0, 90.0, 120.0, 3600.0):
        tide = tide_of(day_s)
        assert tide.day_s == day_s
        assert tide.bin_s >= SHORTEST_BIN_S
        assert tide.bins_per_day >= 4
    with pytest.raises(InvalidRequest, match="--day 2m"):
        tide_of(5.0)


def test_midnight_is_the_last_one_on_the_local_clock() -> None:
    noon_s = datetime(2026, 3, 4, 12, 30, 15).astimezone().timestamp()
    assert midnight_before_s(noon_s) == noon_s - (12 * 3600 + 30 * 60 + 15)
