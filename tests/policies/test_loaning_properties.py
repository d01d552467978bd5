"""Loans over random days: every plan is possible and stands, minimums are kept, a replay sees the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_world import World, node

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
POOLS = ("training", "inference", "shared")

nodes = st.lists(
    st.tuples(st.sampled_from(POOLS), st.sampled_from(POOLS), st.integers(1, 4), st.booleans()), min_size=1, max_size=5
)
turn = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3), st.integers(1, 8), st.booleans()),
    st.tuples(st.just("deploy"), st.integers(0, 4), st.integers(1, 5)),
    st.tuples(st.just("scale"), st.integers(0, 9), st.integers(0, 6), st.integers(1, 6)),
    st.tuples(st.just("load"), st.integers(0, 9), st.integers(0, 50)),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("join"), st.integers(0, 9)),
    st.tuples(st.just("deliver"), st.integers(1, 6)),
    st.tuples(st.just("deliver"), st.integers(1, 6)),
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


class Day:
    """A world with what was handed over and which nodes are there."""

    def __init__(self, policy, drawn):
        made = [
            node(f"n{number}", pool, count, home=home, isolates_devices=parts)
            for number, (pool, home, count, parts) in enumerate(drawn)
        ]
        self.world = World(policy, made)
        self.jobs, self.services = [], []
        self.here = {str(each.node_id): True for each in made}

    def live(self, number):
        services = self.world.controller.state.services
        there = [name for name in self.services if not services[name].is_removed]
        return there[number % len(there)] if there else None

    def take(self, kind, *more):
        """Let one thing happen."""
        world = self.world
        if kind == "submit":
            low, extra, elastic = more
            high = low + extra - 1
            self.jobs.append(world.submit(low=low if elastic else high, high=high, elastic=elastic))
        elif kind == "deploy":
            low, high = more
            self.services.append(world.deploy(low=min(low, high), high=high))
        elif kind in ("scale", "load"):
            name = self.live(more[0])
            if name is not None and kind == "load":
                world.load(name, more[1])
            elif name is not None:
                world.scale(name, min(more[1:]), max(more[1:]))
        elif kind == "finish" and self.jobs:
            world.finish(self.jobs[more[0] % len(self.jobs)])
        elif kind == "cancel":
            everyone = [*self.jobs, *self.services]
            if everyone:
                world.cancel(everyone[more[0] % len(everyone)])
        elif kind in ("lose", "join"):
            name = list(self.here)[more[0] % len(self.here)]
            if self.here[name] == (kind == "lose"):
                self.here[name] = kind == "join"
                (world.lose if kind == "lose" else world.join)(name)
        elif kind == "deliver":
            world.deliver(*more)

    def reach(self, strategy):
        """How many devices a strategy may give to minimums."""
        found = self.world.controller.state.nodes.values()
        return sum(
            len(each.devices)
            for each in found
            if each.pool != "training"
            or strategy in ("two-way", "patient")
            or (strategy == "one-way" and each.owner == "inference")
        )


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
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
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
        for seed in range(100)
    ]
    assert sum(len(world.labelled()) for world in worlds) > 100 or strategy == "dedicated"
    assert sum(drain.is_reclaim for world in worlds for drain in world.drained()) > 10 or strategy == "dedicated"
