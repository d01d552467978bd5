"""Loans over random days: every plan is possible and stands, minimums are kept, a replay sees the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kits.scheduling.loan_days import POOLS, Day, nodes, turn
from kits.simulation.sweeps import part
from springtide.core.decision import Relabel
from springtide.scheduling.loans.policy import Loaning
from springtide.scheduling.loans.pools import LabelVerdict
from springtide.scheduling.registry import make_policy

STRATEGIES = ("two-way", "one-way", "dedicated", "patient")
TRAINING = (
    "fifo",
    "sjf",
    "edf",
    "elastic",
    "springtide",
    "goodput",
    "fapes:round_s=30",
    "pollux:population=6:generations=2",
    "elasticflow",
    "tiresias",
)


class Patient(msgspec.Struct, frozen=True, kw_only=True):
    """Cordons as many nodes as services could use, and takes back at once only what minimums need."""

    def choose(self, pools):
        serving = sum(each.num_devices for each in pools.nodes if each.pool != "training")
        labels, reclaimed = {}, set()
        training = [each for each in pools.nodes if each.pool == "training"]
        for each in sorted(training, key=lambda each: (each.num_training > 0, each.drain is None)):
            if serving < pools.maximum:
                labels[each.node_id] = Relabel(pool="inference", reason="wanted soon")
                if serving < pools.required:
                    reclaimed.add(each.node_id)
                serving += each.num_devices
        return LabelVerdict(pools=labels, reclaimed=frozenset(reclaimed))

    def capacity(self, pools, verdict):
        return ()


def policy_of(strategy, training):
    if strategy == "patient":
        return lambda: Loaning(strategy=Patient(), training=make_policy(training))
    return f"{strategy}/{training}"


def play(strategy, training, drawn, turns):
    day = Day(policy_of(strategy, training), drawn)
    for happening in turns:
        day.take(*happening)
    day.world.rest()
    day.world.replay()
    state = day.world.controller.state
    left = day.reach(strategy)
    for record in [record for record in state.services.values() if record.is_served]:
        guaranteed = min(record.min_replicas, left)
        assert day.world.num_ready(record.workload_id) >= guaranteed, f"{record.workload_id} misses its minimum"
        left -= guaranteed
    assert not [drain for drain in state.drains.values() if drain.reclaim_since_s is not None], "jobs never leave"
    return day.world


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", TRAINING)
def test_whatever_happens_plans_stand_and_minimums_are_kept(strategy, training):
    @settings(max_examples=part(12, least=4), deadline=None, suppress_health_check=list(HealthCheck))
    @given(drawn=nodes, turns=st.lists(turn, min_size=5, max_size=25))
    def check(drawn, turns):
        play(strategy, training, drawn, turns)

    check()


def draw(rng):
    """Nodes and a long day, every kind of turn as likely as every other."""

    def number(low, high):
        return int(rng.integers(low, high + 1))

    drawn = [(POOLS[number(0, 2)], POOLS[number(0, 2)], number(1, 4), bool(number(0, 1))) for _ in range(number(1, 5))]
    turns = []
    for _ in range(number(5, 40)):
        kind = rng.choice(["submit", "deploy", "scale", "load", "finish", "cancel", "lose", "join", *3 * ["deliver"]])
        more = {
            "submit": (number(1, 3), number(1, 8), bool(number(0, 1))),
            "deploy": (number(0, 4), number(1, 5)),
            "scale": (number(0, 9), number(0, 6), number(1, 6)),
            "load": (number(0, 9), number(0, 50)),
            "deliver": (number(1, 6),),
        }
        turns.append((str(kind), *more.get(str(kind), (number(0, 9),))))
    return drawn, turns


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hundred_long_days(strategy):
    worlds = [
        play(strategy, training, *draw(np.random.default_rng(seed)))
        for training in ("fifo", "elastic", "springtide")
        for seed in range(part(100, least=30))
    ]
    assert sum(len(world.labelled()) for world in worlds) > part(100, least=30) or strategy == "dedicated"
    assert sum(drain.is_reclaim for world in worlds for drain in world.drained()) > part(10) or strategy == "dedicated"
