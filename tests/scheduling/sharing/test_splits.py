"""Replicas and workers that hold their share of several devices: together, on one node, whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.sharing_views import HALF, SMALL, decide, job, places, service
from springtide.core.decision import Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.shares import make_share
from springtide.core.workload import JobState
from springtide.scheduling.registry import make_live_policy, make_policy


@pytest.fixture
def policy():
    return make_policy("dilu/fifo")


def nodes_of(devices):
    return [device.rpartition("/")[0] for device in devices]


def test_a_replica_holds_its_share_of_different_devices_of_one_node(policy):
    plan = decide(
        policy, (), [service("a", SMALL, devices_each=2, wanted=2)], nodes=[make_node("n", 3), make_node("m", 3)]
    )
    given_ = plan.allocations["a"]
    assert given_.num_devices == 4
    assert len(set(given_.device_ids)) == 4
    assert [len(set(nodes_of(given_.device_ids[at : at + 2]))) for at in (0, 2)] == [1, 1]
    assert given_.share == SMALL


def test_shared_devices_with_room_come_first(policy):
    held = {"t": (["n/1"], HALF), "u": (["n/2"], HALF)}
    runs = [with_fields(job(name, HALF), state=JobState.RUNNING, num_replicas=1) for name in ("t", "u")]
    plan = decide(policy, runs, [service("a", SMALL, devices_each=2)], held)
    assert places(plan)["a"] == ["n/1", "n/2"]


def test_replicas_that_are_there_stay_and_the_one_that_is_least_shared_goes(policy):
    held = {"a": (["n/0", "n/1", "n/2", "n/3"], SMALL), "t": (["n/3"], HALF)}
    trains = with_fields(job("t", HALF), state=JobState.RUNNING, num_replicas=1)
    both = decide(policy, [trains], [service("a", SMALL, devices_each=2, wanted=2, ready=2)], held)
    assert places(both)["a"] == ["n/0", "n/1", "n/2", "n/3"]
    one = decide(policy, [trains], [service("a", SMALL, devices_each=2, wanted=1, ready=2)], held)
    assert places(one)["a"] == ["n/2", "n/3"]


def test_a_share_that_does_not_fit_on_one_of_its_devices_any_more_moves_the_replica(policy):
    larger = make_share(0.6, 0.8)
    held = {"b": (["n/1"], HALF), "a": (["n/0", "n/1"], SMALL)}
    plan = decide(policy, (), [service("b", HALF, ready=1), service("a", larger, devices_each=2, ready=1)], held)
    assert places(plan) == {"b": ["n/1"], "a": ["n/2", "n/3"]}


def test_what_no_node_can_hold_waits_and_says_why(policy):
    wide = service("a", SMALL, devices_each=4)
    plan = decide(policy, (), [wide], nodes=[make_node("n", 2), make_node("m", 2)])
    assert plan.reasons["a"] == (
        "waits for room: a replica needs 0.3 of each of 4 devices of one node, and the largest node has 2"
    )
    # Each node has room on one device only.
    large = make_share(0.8)
    held = {"s": (["n/0"], large), "t": (["m/0"], large)}
    others = [service(name, large, ready=1) for name in ("s", "t")]
    plan = decide(
        policy, (), [*others, service("a", HALF, devices_each=2)], held, nodes=[make_node("n", 2), make_node("m", 2)]
    )
    assert "a" not in plan.allocations
    assert plan.reasons["a"].endswith(
        "needs 0.5 of each of 2 devices of one node, and the most on one that have room for it is 1"
    )


def test_a_first_replica_claims_all_of_its_devices_of_elastic_jobs_of_one_node():
    policy = make_policy("dilu/elastic")
    trains = [with_fields(job(name, workers=(1, 3)), state=JobState.RUNNING, num_replicas=3) for name in ("v", "w")]
    held = {"v": (["n/0", "n/1", "n/2"], None), "w": (["m/0", "m/1", "m/2"], None)}
    nodes = [make_node("n", 3), make_node("m", 3)]
    plan = decide(policy, trains, [service("a", SMALL, devices_each=2)], held, nodes)
    given_ = places(plan)["a"]
    assert len(given_) == 2
    assert len(set(nodes_of(given_))) == 1
    assert plan.memory["claimed"] == dict.fromkeys(given_, "a")


def test_what_cannot_be_had_whole_takes_nothing_from_anyone():
    """One device of each node could be claimed: what was claimed on the way is given back."""
    policy = make_policy("dilu/elastic")
    trains = [with_fields(job(name, workers=(1, 2)), state=JobState.RUNNING, num_replicas=2) for name in ("v", "w")]
    solid = [service(name, make_share(0.9), ready=1) for name in ("x", "y")]
    held = {
        "v": (["n/0", "m/0"], None),
        "w": (["o/0", "p/0"], None),
        "x": (["n/1"], make_share(0.9)),
        "y": (["m/1"], make_share(0.9)),
    }
    nodes = [make_node("n", 2), make_node("m", 2), make_node("o", 1), make_node("p", 1)]
    plan = decide(policy, trains, [*solid, service("a", SMALL, devices_each=2)], held, nodes)
    assert places(plan) == {name: list(devices) for name, (devices, _) in held.items()}
    assert not plan.memory


def wide_job(name="t", share=HALF, workers=(1, 3), each=2, **options):
    """A job as policies see it: its numbers of workers count devices."""
    known = job(name, share, workers=(workers[0] * each, workers[1] * each), num_virtual_shards=64, **options)
    return replace(known, job=replace(known.job, devices_each=each))


def running(view, num_devices):
    return with_fields(view, state=JobState.RUNNING, num_replicas=num_devices)


def test_a_job_starts_with_as_many_whole_workers_as_have_room(policy):
    nodes = [make_node("n", 3), make_node("m", 3)]
    plan = decide(policy, [wide_job()], (), nodes=nodes)
    given_ = plan.allocations["t"].device_ids
    assert len(given_) == 4
    assert [len(set(nodes_of(given_[at : at + 2]))) for at in (0, 2)] == [1, 1]
    assert len(decide(policy, [wide_job(workers=(1, 1))], (), nodes=nodes).allocations["t"].device_ids) == 2
    too_many = decide(policy, [wide_job(workers=(3, 3))], (), nodes=nodes)
    assert "t" not in too_many.allocations
    assert "3 workers need 0.5 of each of 2 devices of one node" in too_many.reasons["t"]


def test_a_service_takes_a_whole_worker_that_a_job_can_do_without(policy):
    large = make_share(0.6, 0.6)
    held = {"t": (["n/0", "n/1", "n/2", "n/3"], HALF)}
    plan = decide(policy, [running(wide_job(), 4)], [service("s", large, min_replicas=1)], held)
    assert places(plan) == {"t": ["n/0", "n/1"], "s": ["n/2"]}
    assert plan.reasons["t"] == "'s' needs the part of one of its workers"
    both = decide(policy, [running(wide_job(), 4)], [service("s", large, devices_each=2, min_replicas=1)], held)
    assert places(both) == {"t": ["n/0", "n/1"], "s": ["n/2", "n/3"]}


def test_a_lost_worker_is_replaced_by_a_whole_one(policy):
    nodes = [make_node("n", 2), make_node("m", 2)]
    held = {"t": (["n/0", "n/1", "gone/0", "gone/1"], HALF)}
    view = running(wide_job(workers=(2, 2)), 4)
    assert places(decide(policy, [view], (), held, nodes))["t"] == ["n/0", "n/1", "m/0", "m/1"]


def test_a_running_job_grows_by_a_whole_worker(policy):
    profile = {2: 1.0, 4: 1.9, 6: 2.7}
    view = wide_job(total_steps=100_000, profile_steps_per_s=profile, elastic=True)
    beside = {"t": (["n/0", "n/1"], HALF), "s": (["n/3"], SMALL)}
    plan = decide(policy, [running(view, 2)], [service("s", SMALL, ready=1)], beside)
    assert sorted(places(plan)["t"]) == ["n/0", "n/1", "n/2", "n/3"]


def test_where_nodes_have_pools_it_is_given_on_those_that_serve():
    policy = make_live_policy("two-way/fifo")
    nodes = (make_node("t", 4, pool="training"), make_node("n", 4, pool="inference"))
    snapshot = Snapshot(
        now_s=1.0, cluster=Topology(nodes=nodes), services=(service("a", SMALL, devices_each=2, min_replicas=1),)
    )
    assert policy.decide(snapshot).allocations["a"].device_ids == ("n/0", "n/1")


def test_a_plan_without_such_services_is_what_it_was(policy):
    services = [service("a", SMALL, wanted=3), service("b", HALF, wanted=2)]
    plan = decide(policy, [job("t", HALF, workers=(1, 3))], services)
    assert plan == decide(policy, [job("t", HALF, workers=(1, 3))], [replace(view) for view in services])


@st.composite
def scenes(draw: st.DrawFn):
    """Services of all widths on nodes that hold some of their replicas, and jobs on parts and on whole devices."""
    nodes = [make_node(f"n{at}", draw(st.integers(1, 5)), memory_mb=1000) for at in range(draw(st.integers(1, 4)))]
    shares = st.sampled_from((make_share(0.2), make_share(0.3, 0.6, 400), make_share(0.5, 0.5), make_share(0.9)))
    services = [
        service(
            f"s{at}",
            draw(shares),
            devices_each=draw(st.sampled_from((1, 2, 2, 4))),
            wanted=draw(st.integers(0, 3)),
            min_replicas=draw(st.integers(0, 2)),
        )
        for at in range(draw(st.integers(1, 4)))
    ]
    jobs = [
        job(f"j{at}", draw(st.one_of(st.none(), shares)), workers=(1, draw(st.integers(1, 4))))
        for at in range(draw(st.integers(0, 2)))
    ]
    jobs += [
        wide_job(f"w{at}", draw(shares), (1, draw(st.integers(1, 3))), draw(st.sampled_from((2, 2, 4))))
        for at in range(draw(st.integers(0, 2)))
    ]
    return nodes, services, jobs


@given(scene=scenes())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_replicas_are_whole_and_no_device_holds_more_than_there_is(scene):
    """`decide` checks the bounds of each device, and that replicas are whole and on one node."""
    nodes, services, jobs = scene
    policy = make_live_policy("fifo")
    held, ready = {}, dict.fromkeys((view.service.service_id for view in services), 0)
    for turn in range(3):
        wanted = [
            replace(view, num_ready=ready[view.service.service_id], wanted_replicas=(view.wanted_replicas + turn) % 4)
            for view in services
        ]
        started = [running(view, len(held[view.job.job_id][0])) if view.job.job_id in held else view for view in jobs]
        plan = decide(policy, started, wanted, held, nodes)
        for view in wanted:
            given_ = plan.allocations.get(view.service.service_id)
            devices = () if given_ is None else given_.device_ids
            assert len(set(devices)) == len(devices)
            assert len(devices) % view.service.devices_each == 0
            ready[view.service.service_id] = len(devices) // view.service.devices_each
        held = {who: (given_.device_ids, given_.share) for who, given_ in plan.allocations.items() if given_.device_ids}
