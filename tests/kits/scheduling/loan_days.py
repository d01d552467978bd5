"""A drawn day of two pools, decided turn by turn."""

from __future__ import annotations

from hypothesis import strategies as st

from kits.scheduling.pool_world import World, node

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
