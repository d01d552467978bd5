"""FaPES-Manager and its two baselines, and victims by their cost, seen from nodes."""

from __future__ import annotations

import msgspec
import pytest

from kits.scheduling.loan_views import job, service
from kits.scheduling.pool_world import World, node
from springtide.core.decision import Drain, JobView, PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import Topology
from springtide.scheduling.loans.pools import pool_state
from springtide.scheduling.loans.reclaim import (
    Dedicated,
    OneWay,
    TwoWay,
    choose_victims,
    needy_services_text,
    servers_of,
)
from springtide.scheduling.registry import make_policy
from springtide.solvers.reclaim import Victim


def look(nodes, *who, drains=None):
    return pool_state(
        Snapshot(
            now_s=100.0,
            cluster=Topology(nodes=tuple(nodes)),
            jobs=tuple(view for view, _ in who if isinstance(view, JobView)),
            services=tuple(view for view, _ in who if isinstance(view, ServiceView)),
            allocations={
                view.job.job_id if isinstance(view, JobView) else view.service.service_id: PoolAllocation(
                    device_ids=held
                )
                for view, held in who
                if held
            },
            drains=drains or {},
        )
    )


def labels(verdict):
    return {name: relabel.pool for name, relabel in verdict.pools.items()}


def every(name, count=8):
    return [f"{name}/{index}" for index in range(count)]


# Figure 6: four servers of eight devices, of which two are needed.
PAIR = (
    job("A", "t1/0", "t1/1", "t1/2", "t1/3", "t2/0", "t2/1", "t2/2", "t2/3"),
    job("B", "t1/4", "t1/5", "t1/6", "t1/7", "t2/4", "t2/5", "t2/6", "t2/7"),
    job("C", *every("t3")),
)
NODES = [node(f"t{number}", "training", 8) for number in (1, 2, 3)]


def test_figure_6_a_by_two_way():
    verdict = TwoWay().choose(look(NODES, *PAIR, service("s", low=16, high=16)))
    assert labels(verdict) == {"t1": "inference", "t2": "inference"}
    assert verdict.reclaimed == {"t1", "t2"}
    assert {relabel.cost_s for relabel in verdict.pools.values()} == {2.0}
    assert verdict.pools["t1"].reason == "taken back for 's', which has 0 of its guaranteed 16 replicas"


def test_figure_6_b_by_two_way():
    held = (
        job("A", "t1/0", "t1/1", *every("t2")),
        job("B", "t1/2", "t1/3", *every("t3")),
        job("C", "t1/4", "t1/5", "t1/6", "t1/7"),
    )
    verdict = TwoWay().choose(look(NODES, *held, service("s", low=16, high=16)))
    assert labels(verdict) == {"t2": "inference", "t3": "inference"}


def test_one_way_takes_back_only_what_was_loaned_in_order_and_dedicated_nothing():
    lent = [msgspec.structs.replace(each, home="inference") for each in NODES[1:]]
    pools = look([NODES[0], *lent], *PAIR, service("s", low=20, high=20))
    assert labels(OneWay().choose(pools)) == {"t2": "inference", "t3": "inference"}
    assert labels(TwoWay().choose(pools)) == {"t1": "inference", "t2": "inference", "t3": "inference"}
    assert labels(Dedicated().choose(pools)) == {}
    few = look([NODES[0], *lent], *PAIR, service("s", low=8, high=8))
    assert labels(OneWay().choose(few)) == {"t2": "inference"}, "it does not look for the cheaper one"
    assert labels(TwoWay().choose(few)) == {"t3": "inference"}


def test_what_is_under_way_goes_on_and_counts():
    drains = {"t3": Drain(pool="inference", since_s=90.0, reclaim_since_s=90.0)}
    pools = look(NODES, *PAIR, service("s", low=8, high=8), drains=drains)
    assert labels(TwoWay().choose(pools)) == {"t3": "inference"}
    more = look(NODES, *PAIR, service("s", low=9, high=9), drains=drains)
    assert labels(TwoWay().choose(more)).keys() > {"t3"}
    over = look(NODES, *PAIR, service("s", low=0, high=8), drains=drains)
    assert labels(TwoWay().choose(over)) == {}, "nobody misses a minimum any more"


def test_free_servers_are_enough_where_they_are():
    nodes = [node("t0", "training", 1), node("t1", "training", 4)]
    drains = {"t0": Drain(pool="inference", since_s=90.0, reclaim_since_s=90.0)}
    pools = look(nodes, job("A", "t0/0"), service("s", low=2, high=2), drains=drains)
    assert labels(TwoWay().choose(pools)) == {"t1": "inference"}


def test_of_uneven_servers_none_is_taken_that_the_others_are_enough_without():
    nodes = [node("t0", "training", 1), node("t1", "training", 4)]
    assert labels(TwoWay().choose(look(nodes, service("s", low=4, high=4)))) == {"t1": "inference"}
    assert labels(TwoWay().choose(look(nodes, service("s", low=5, high=5)))) == {"t0": "inference", "t1": "inference"}


@pytest.mark.parametrize("strategy", [OneWay(), TwoWay()])
def test_a_loan_waits_until_every_service_has_its_maximum(strategy):
    nodes = [node(f"i{number}", "inference", 4) for number in range(3)]
    assert labels(strategy.choose(look(nodes, service("s", low=1, high=9)))) == {}
    assert labels(strategy.choose(look(nodes, service("s", low=1, high=8)))) == {"i2": "training"}
    busy = service("s", low=1, high=8, held=["i2/0", "i1/0", "i1/1"])
    assert labels(strategy.choose(look(nodes, busy))) == {"i0": "training"}, "the emptiest"
    less = service("s", low=1, high=4, held=["i2/0", "i1/0", "i1/1"])
    assert labels(strategy.choose(look(nodes, less))) == {"i0": "training", "i2": "training"}
    going = {"i1": Drain(pool="training", since_s=99.0)}
    assert labels(strategy.choose(look(nodes, busy, drains=going))) == {"i1": "training"}
    back = service("s", low=9, high=9, held=["i2/0", "i1/0", "i1/1"])
    assert labels(strategy.choose(look(nodes, back, drains=going))) == {}, "what has not left is simply kept"


def test_a_server_that_training_owns_goes_home_first():
    nodes = [node("i0", "inference", 4), node("b0", "inference", 4, home="training"), node("i1", "inference", 4)]
    assert labels(TwoWay().choose(look(nodes, service("s", low=1, high=8)))) == {"b0": "training"}


def test_shared_servers_count_for_minimums():
    nodes = [node("s0", "shared", 4), node("t0", "training", 4)]
    assert labels(TwoWay().choose(look(nodes, service("s", low=4, high=4)))) == {}
    assert labels(TwoWay().choose(look(nodes, service("s", low=5, high=5)))) == {"t0": "inference"}


def test_the_needy_are_told_in_order_of_priority():
    nodes = [node("i0", "inference", 4)]
    assert needy_services_text(look(nodes, service("a", low=1, held=["i0/0"]))) == "guaranteed minimums"
    two = look(nodes, service("a", low=3, held=["i0/0"]), service("b", low=1))
    assert needy_services_text(two) == "'a', which has 1 of its guaranteed 3 replicas and 1 more service"


def test_victims_are_chosen_by_what_they_lose():
    pools = look(NODES, *PAIR)
    loses = {"A": 1.0, "B": 1.0, "C": 50.0}
    chosen, cost = choose_victims(pools, pools.nodes, 8, lambda view: Victim(stop_cost=loses[view.job.name]))
    assert ([each.node_id for each in chosen], cost) == (["t2"], 2.0) or [each.node_id for each in chosen] == ["t1"]
    servers, jobs = servers_of(pools.nodes)
    assert jobs == ["A", "B", "C"]
    assert [dict(server.jobs) for server in servers] == [{0: 4, 1: 4}, {0: 4, 1: 4}, {2: 8}]


def test_a_job_that_is_over_loses_nothing():
    pools = look(NODES, *PAIR[:2])
    gone = msgspec.structs.replace(
        pools.snapshot,
        allocations={**pools.snapshot.allocations, "gone": PoolAllocation(device_ids=tuple(every("t3")))},
    )
    pools = pool_state(gone)
    chosen, cost = choose_victims(pools, pools.nodes, 8, lambda view: Victim(stop_cost=1.0))
    assert ([each.node_id for each in chosen], cost) == (["t3"], 0.0)


def test_two_way_may_take_a_server_that_training_owns_and_gives_it_back():
    world = World("two-way/fifo", [node("t0", "training"), node("t1", "training"), node("i0", "inference")])
    world.submit("job", low=4, high=4, elastic=False)
    world.deploy("search", low=6, high=6)
    world.rest()
    assert world.num_ready("search") == 6
    assert len(world.held("job")) == 4
    assert sorted(world.labels().values()) == ["inference", "inference", "training"]
    world.scale("search", 1, 2)
    world.rest()
    assert sorted(world.labels().values()) == ["inference", "training", "training"]
    assert len(world.held("search")) == 2
    world.replay()


def test_dedicated_breaks_a_minimum_that_does_not_fit_and_one_way_one_beyond_its_own():
    for name, ready in (("dedicated/fifo", 4), ("one-way/fifo", 4), ("two-way/fifo", 6)):
        world = World(name, [node("i0", "inference"), node("t0", "training")])
        world.deploy("search", low=6, high=6)
        world.rest()
        assert world.num_ready("search") == ready


def test_strategies_count_on_what_they_have():
    pools = look(NODES)
    for strategy in (Dedicated(), OneWay(), TwoWay()):
        assert strategy.capacity(pools, strategy.choose(pools)) == ()
    assert make_policy("two-way/fifo").strategy == TwoWay()
