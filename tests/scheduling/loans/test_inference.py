"""Replicas on the nodes that serve: minimums by priority, growth, who gives way, which devices, and why."""

from __future__ import annotations

import msgspec
import pytest

from kits.scheduling.loan_views import job, service
from kits.scheduling.pool_world import node
from springtide.core.decision import Drain, JobView, PoolAllocation, Relabel, ServiceView, Snapshot
from springtide.core.resources import Topology
from springtide.scheduling.loans.inference import names_text, replicas_text, serve
from springtide.scheduling.loans.pools import LabelVerdict, pool_state


def look(nodes, *who, verdict=None, drains=None):
    """What services are given: a mapping of names to devices, and the reasons."""
    snapshot = Snapshot(
        now_s=100.0,
        cluster=Topology(nodes=tuple(nodes)),
        jobs=tuple(view for view, _ in who if isinstance(view, JobView)),
        services=tuple(view for view, _ in who if isinstance(view, ServiceView)),
        allocations={_name(view): PoolAllocation(device_ids=held) for view, held in who if held},
        drains=drains or {},
    )
    served = serve(pool_state(snapshot), verdict or LabelVerdict(growth="maximum"))
    return {name: list(given.device_ids) for name, given in served.allocations.items()}, served.reasons


def _name(view):
    return view.job.job_id if isinstance(view, JobView) else view.service.service_id


def counts(given):
    return {name: len(devices) for name, devices in given.items()}


BY_LOAD = LabelVerdict(growth="load")


def test_minimums_come_first_in_order_of_deployment_then_growth_in_the_same_order():
    nodes = [node("i0", "inference", 6)]
    given, _ = look(nodes, service("a", low=1, high=4), service("b", low=2, high=4))
    assert counts(given) == {"a": 4, "b": 2}
    given, reasons = look(nodes, service("a", low=5, high=5), service("b", low=2, high=4))
    assert counts(given) == {"a": 5, "b": 1}
    assert reasons["b"] == "only 1 of its guaranteed 2 replicas fit on what may serve"


def test_who_has_grown_shrinks_to_let_others_have_their_minimum():
    grown = service("a", low=1, high=6, held=[f"i0/{n}" for n in range(6)])
    given, reasons = look([node("i0", "inference", 6)], grown, service("b", low=2, high=4))
    assert counts(given) == {"a": 4, "b": 2}
    assert given["a"] == ["i0/0", "i0/1", "i0/2", "i0/3"], "who stays stays where it is"
    assert reasons["a"] == "gives way to 'b'"


def test_growth_by_load_takes_no_more_than_is_asked_for():
    nodes = [node("i0", "inference", 8)]
    given, reasons = look(nodes, service("a", high=8, load=17), service("b", high=4), verdict=BY_LOAD)
    assert counts(given) == {"a": 3}
    assert reasons["a"] == "its load asks for 3 (17 in flight, 0 queued)"
    given, reasons = look(nodes, service("a", high=8, idle_s=40.0, held=["i0/0"]), verdict=BY_LOAD)
    assert given == {}
    assert reasons["a"] == "nobody has asked for 40 s"


def test_replicas_that_only_lag_behind_a_falling_load_are_handed_over():
    nodes = [node("i0", "inference", 4)]
    falling = service("a", high=4, load=17, held=[f"i0/{n}" for n in range(4)])
    assert counts(look(nodes, falling, verdict=BY_LOAD)[0]) == {"a": 4}
    given, reasons = look(nodes, falling, service("b", high=4, load=3), verdict=BY_LOAD)
    assert counts(given) == {"a": 3, "b": 1}
    assert reasons["a"] == "gives way to 'b'"


def test_a_service_that_only_starts_is_not_idle_and_one_beside_a_ready_one_is():
    nodes = [node("i0", "inference", 8)]
    first = service("a", high=8, idle_s=40.0, starting=1, held=["i0/0"])
    assert counts(look(nodes, first, verdict=BY_LOAD)[0]) == {"a": 1}
    second = service("a", high=8, idle_s=40.0, starting=1, held=["i0/0", "i0/1"])
    assert look(nodes, second, verdict=BY_LOAD)[0] == {}


def test_what_load_asks_for_does_not_change_while_replicas_start_beside_those_that_leave():
    def wanted(ready, starting, *, load=8, **more):
        view, _ = service("a", high=9, ready=ready, starting=starting, load=load)
        view = msgspec.structs.replace(view, **more)
        return pool_state(Snapshot(now_s=1.0, cluster=Topology(), services=(view,))).wanted

    assert wanted(2, 0) == wanted(2, 1) == wanted(3, 1) == wanted(9, 0) == 2, "8 are too many for 0.6 of one replica"
    assert wanted(1, 0) == wanted(0, 1) == 1
    slow = service("a")[0].service
    slow = {"service": msgspec.structs.replace(slow, slo_s=0.1), "latency_p99_s": 0.5}
    assert wanted(1, 0, load=3, **slow) == wanted(1, 1, load=3, **slow) == 2, "one more, and it is let start"


def test_replicas_fill_the_fullest_server_and_leave_those_that_empty_one():
    nodes = [node("i0", "inference"), node("i1", "inference"), node("i2", "inference")]
    given, _ = look(nodes, service("a", low=2, high=2, held=["i1/0", "i1/1"]), service("b", low=3, high=3))
    assert given["b"] == ["i1/2", "i1/3", "i0/0"]
    spread = service("a", low=3, high=3, held=["i0/0", "i1/0", "i1/1", "i1/2", "i2/0"])
    given, reasons = look(nodes, spread)
    assert given["a"] == ["i1/0", "i1/1", "i1/2"], "two servers are idle now"
    assert reasons["a"] == "its owner allows 3"


def test_a_device_that_nobody_holds_comes_before_one_that_is_being_given_back():
    nodes = [node("i0", "inference", 3)]
    leaving = service("old", low=0, high=0, ready=0, held=["i0/0"])
    given, _ = look(nodes, leaving, service("a", low=2, high=2))
    assert given["a"] == ["i0/1", "i0/2"]


def taken(*names, hard=True, label="inference", **more):
    return LabelVerdict(
        pools={name: Relabel(pool=label, reason="x") for name in names},
        reclaimed=frozenset(names if hard else ()),
        **more,
    )


def test_a_reclaimed_server_is_counted_on_and_told_of():
    nodes = [node("i0", "inference", 1), node("t0", "training", 2)]
    who = (service("a", low=2, high=3), job("j", "t0/0", "t0/1"))
    given, reasons = look(nodes, *who, verdict=taken("t0"))
    assert given["a"] == ["i0/0", "t0/0"]
    assert reasons["a"] == "its guaranteed minimum of 2 replicas; waits for t0 to be given back by training"
    given, reasons = look(nodes, *who, verdict=taken("t0", hard=False))
    assert given["a"] == ["i0/0"], "who may stay is not waited for"


def test_a_missing_minimum_gets_the_first_device_that_is_free():
    nodes = [node("i0", "inference", 1), node("t0", "training", 4)]
    who = (service("grown", low=0, high=3), service("new", low=1, high=1), job("j", "t0/0"))
    given, _ = look(nodes, *who, verdict=taken("t0", growth="maximum"))
    assert given["new"] == ["i0/0"]
    assert given["grown"] == ["t0/0", "t0/1", "t0/2"]


def test_a_cordoned_server_without_jobs_serves_at_once():
    given, _ = look([node("t0", "training", 2)], service("a", low=2, high=2), verdict=taken("t0", hard=False))
    assert given["a"] == ["t0/0", "t0/1"]


def test_on_shared_servers_minimums_take_what_costs_least_and_growth_only_what_is_idle():
    nodes = [node("s0", "shared", 6)]
    dear, cheap = job("dear", "s0/0", "s0/1"), job("cheap", "s0/2", "s0/3", "s0/4")
    verdict = LabelVerdict(growth="load", job_costs={"dear": 9.0, "cheap": 2.0})
    given, _ = look(nodes, dear, cheap, service("a", low=3, high=6, load=40), verdict=verdict)
    assert given["a"] == ["s0/5", "s0/4", "s0/3"], "the last ranks of the cheaper job, and the load gets no more"
    own = [node("s0", "shared", 6, home="inference")]
    given, _ = look(own, dear, cheap, service("a", low=3, high=6, load=40), verdict=verdict)
    assert given["a"] == ["s0/5", "s0/4", "s0/3", "s0/2", "s0/1"], "what inference owns comes back for load too"


def test_growth_to_the_maximum_stays_off_shared_servers():
    nodes = [node("i0", "inference", 2), node("s0", "shared", 4)]
    assert counts(look(nodes, service("a", low=1, high=5))[0]) == {"a": 2}
    assert counts(look(nodes, service("a", low=1, high=5, load=40))[0]) == {"a": 5}
    assert counts(look(nodes, service("a", low=4, high=5))[0]) == {"a": 4}


# --- servers that are to train ----------------------------------------------------------------------------------------


def moving(held, *, starting=0, high=4, low=2, ready=None):
    nodes = [node("i0", "inference", 4), node("i1", "inference", 4)]
    who = service("a", low=low, high=high, starting=starting, held=held, ready=ready)
    return look(nodes, who, verdict=taken("i1", hard=False, label="training"))


def test_replicas_start_elsewhere_before_they_leave():
    given, reasons = moving(["i1/0", "i1/1"])
    assert given["a"] == ["i0/0", "i0/1", "i1/0", "i1/1"]
    assert reasons["a"] == "moves off i1, which is to train"
    given, _ = moving(["i1/0", "i1/1", "i0/0", "i0/1"], starting=2)
    assert given["a"] == ["i0/0", "i0/1", "i1/0", "i1/1"], "until the others are ready"
    given, _ = moving(["i1/0", "i1/1", "i0/0", "i0/1"])
    assert given["a"] == ["i0/0", "i0/1"]


def test_without_room_for_one_more_they_move_one_by_one():
    given, _ = moving(["i1/0", "i1/1"], high=2)
    assert given["a"] == ["i0/0", "i1/0"]
    # The one that leaves is on its way out and comes last, the new one starts.
    given, _ = moving(["i1/0", "i0/0", "i1/1"], high=2, ready=1, starting=1)
    assert given["a"] == ["i0/0", "i1/0"]
    given, _ = moving(["i1/0", "i0/0"], high=2)
    assert given["a"] == ["i0/0", "i0/1"]


def test_replicas_stay_where_there_is_no_other_place():
    nodes = [node("i0", "inference", 1), node("i1", "inference", 4)]
    held = service("a", low=3, high=3, held=["i1/0", "i1/1", "i0/0"])
    given, _ = look(nodes, held, verdict=taken("i1", hard=False, label="training"))
    assert given["a"] == ["i0/0", "i1/0", "i1/1"]


def test_a_drain_under_way_shows_in_the_view_of_its_node():
    drain = Drain(pool="inference", since_s=1.0, reclaim_since_s=2.0)
    nodes = (node("t0", "training", 2), node("t1", "training", 2, home="inference"), node("i0", "inference", 2))
    a, held_a = service("a", low=1, high=2, held=["i0/0"])
    j, held_j = job("j", "t0/0", "t1/0")
    snapshot = Snapshot(
        now_s=5.0,
        cluster=Topology(nodes=nodes),
        jobs=(j,),
        services=(a,),
        allocations={
            "a": PoolAllocation(device_ids=held_a),
            "j": PoolAllocation(device_ids=held_j),
            "gone": PoolAllocation(device_ids=("i0/1", "t1/1")),
        },
        drains={"t0": drain},
    )
    pools = pool_state(snapshot)
    by_id = pools.by_id
    assert by_id["t0"].heading == "inference"
    assert by_id["t0"].is_reclaimed
    assert [each.node_id for each in pools.heading("inference")] == ["t0", "i0"]
    assert dict(by_id["i0"].replicas) == {"a": 1, "gone": 1}, "who is gone was of the kind of its node"
    assert dict(by_id["t1"].jobs) == {"j": 1, "gone": 1}
    assert (by_id["t1"].owner, by_id["t1"].num_training, by_id["t1"].is_idle) == ("inference", 2, False)
    assert (pools.required, pools.wanted, pools.maximum, pools.now_s) == (1, 1, 2, 5.0)
    assert msgspec.structs.replace(by_id["t0"], drain=None).heading == "training"


@pytest.mark.parametrize(("count", "told"), [(1, "1 replica"), (3, "3 replicas")])
def test_numbers_and_names_in_words(count, told):
    assert replicas_text(count) == told
    assert names_text(list("abcdef")) == "a, b, c, d and 2 more"
