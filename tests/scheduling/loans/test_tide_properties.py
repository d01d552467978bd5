"""Loans by the tide over random days: whatever is switched off, plans stand, minimums are kept, a replay agrees."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kits.scheduling import pool_world
from kits.scheduling.loan_days import Day, nodes, turn
from springtide.control.controller import Controller
from springtide.core.tide import Tide

STRATEGIES = (
    "tide",
    "tide:ahead=no",
    "tide:victims=gain",
    "tide:victims=any:shrink=no",
    "tide:fractions=no:quantile=0.8",
)
TRAINING = ("fifo", "elastic", "springtide", "fapes:round_s=30")


# A turn takes a second: within a run several days pass, so that there is a forecast.
SHORT_DAY = Tide(day_s=16.0, bins_per_day=8)


@pytest.mark.slow
@pytest.mark.parametrize("tide", [Tide(), SHORT_DAY], ids=["unknown", "known"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", TRAINING)
def test_whatever_happens_plans_stand_and_minimums_are_kept(strategy, training, tide, monkeypatch):
    monkeypatch.setattr(pool_world, "Controller", functools.partial(Controller, tide=tide))

    @settings(max_examples=12, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(drawn=nodes, turns=st.lists(turn, min_size=5, max_size=25))
    def play(drawn, turns):
        day = Day(f"{strategy}/{training}", drawn)
        for happening in turns:
            day.take(*happening)
        day.world.rest()
        day.world.replay()
        state = day.world.controller.state
        left = sum(len(each.devices) for each in state.nodes.values())
        for record in [record for record in state.services.values() if record.is_served]:
            guaranteed = min(record.min_replicas, left)
            assert day.world.num_ready(record.workload_id) >= guaranteed, f"{record.workload_id} misses its minimum"
            left -= guaranteed
        assert not [drain for drain in state.drains.values() if drain.reclaim_since_s is not None], "jobs never leave"

    play()
