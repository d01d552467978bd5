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


def _play(policy, drawn, turns):
    day = Day(policy, drawn)
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


# What was given in a turn was loaned again at once, in the second decision of the same instant.
DRAWN_DAYS = {
    "a part of a node that was just taken": (
        "elastic",
        [("training", "inference", 2, True)],
        [("lose", 0), ("submit", 1, 1, True), ("deploy", 1, 1), ("join", 0)],
    ),
    "a node whose replica still loads": (
        "fapes:round_s=30",
        [("inference", "training", 2, False), ("inference", "training", 1, False)],
        [("submit", 1, 3, True), ("deploy", 2, 2)],
    ),
    "a part of a node from which a removed service leaves": (
        "elastic",
        [("inference", "training", 2, True)],
        [("deploy", 1, 1), ("cancel", 0), ("submit", 1, 1, False)],
    ),
    "a part of a node whose replicas stop": (
        "elastic",
        [("inference", "inference", 2, False), ("training", "inference", 2, True)],
        [("deploy", 3, 3), ("submit", 1, 1, True), ("scale", 0, 0, 0)],
    ),
    "a node that joins with the label of a loaned part": (
        "elastic",
        [("shared", "inference", 1, True), ("training", "inference", 3, True)],
        [("lose", 0), ("submit", 1, 2, True), ("deploy", 2, 2), ("join", 0)],
    ),
    "a node while a service waits for devices that a job holds": (
        "fapes:round_s=30",
        [("training", "shared", 2, True), ("inference", "shared", 2, False), ("shared", "training", 4, True)],
        [
            ("lose", 0),
            ("join", 0),
            ("submit", 3, 4, True),
            ("submit", 1, 3, False),
            ("deploy", 2, 2),
            ("cancel", 0),
            ("scale", 0, 5, 5),
        ],
    ),
    "a node, to take devices of a job instead": (
        "elastic",
        [
            ("shared", "shared", 4, False),
            ("inference", "training", 4, True),
            ("training", "shared", 1, True),
            ("training", "inference", 1, True),
        ],
        [("lose", 2), ("submit", 1, 6, True), ("deploy", 1, 1), ("deliver", 5), ("scale", 0, 4, 4), ("deploy", 4, 4)],
    ),
    "a part of a node for that of a larger one": (
        "fapes:round_s=30",
        [
            ("inference", "training", 3, True),
            ("inference", "shared", 1, False),
            ("shared", "inference", 2, True),
            ("shared", "inference", 3, True),
            ("inference", "inference", 2, True),
        ],
        [
            ("deploy", 1, 1),
            ("deploy", 0, 0),
            ("submit", 1, 5, True),
            ("scale", 1, 2, 2),
            ("lose", 1),
            ("deploy", 3, 3),
            ("deploy", 2, 2),
        ],
    ),
    "a replica that may move once another has stopped": (
        "elastic",
        [("inference", "inference", 3, False), ("inference", "inference", 4, False)],
        [("deploy", 0, 0), ("scale", 0, 4, 6), ("submit", 1, 1, False)],
    ),
    "a replica that runs twice while it moves": (
        "fapes:round_s=30",
        [("shared", "training", 1, True), ("training", "shared", 3, False)],
        [
            ("deploy", 0, 0),
            ("deploy", 1, 1),
            ("cancel", 0),
            ("submit", 1, 1, True),
            ("scale", 0, 4, 0),
            ("load", 0, 10),
        ],
    ),
}


@pytest.mark.parametrize(("training", "drawn", "turns"), DRAWN_DAYS.values(), ids=DRAWN_DAYS)
def test_what_a_turn_gave_stands_at_the_same_instant(training, drawn, turns, monkeypatch):
    monkeypatch.setattr(pool_world, "Controller", functools.partial(Controller, tide=SHORT_DAY))
    _play(f"tide/{training}", drawn, turns)


def test_a_node_that_goes_back_to_both_replaces_one_that_is_being_freed_at_once(monkeypatch):
    monkeypatch.setattr(pool_world, "Controller", functools.partial(Controller, tide=SHORT_DAY))
    drawn = [("training", "training", 1, True), ("shared", "inference", 2, True), ("inference", "shared", 2, True)]
    turns = [("lose", 4), ("submit", 1, 4, True), ("deploy", 1, 1), ("scale", 9, 5, 2)]
    _play("tide:victims=gain/elastic", drawn, turns)


@pytest.mark.slow
@pytest.mark.parametrize("tide", [Tide(), SHORT_DAY], ids=["unknown", "known"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", TRAINING)
def test_whatever_happens_plans_stand_and_minimums_are_kept(strategy, training, tide, monkeypatch):
    monkeypatch.setattr(pool_world, "Controller", functools.partial(Controller, tide=tide))

    @settings(max_examples=12, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(drawn=nodes, turns=st.lists(turn, min_size=5, max_size=25))
    def play(drawn, turns):
        _play(f"{strategy}/{training}", drawn, turns)

    play()
