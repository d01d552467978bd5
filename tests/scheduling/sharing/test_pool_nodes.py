"""Sharers on nodes with pools: where they open devices, whom they join, and what is loaned and given back for them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.scheduling.sharing_views import HALF, SMALL, decide, job, places, service
from springtide.core.decision import Drain
from springtide.core.resources import admits, make_node
from springtide.core.workload import Goal
from springtide.scheduling.registry import make_policy

NODES = (make_node("k", 2, pool="training"), make_node("i", 2, pool="inference"))


@pytest.fixture(params=["dilu/tide/springtide", "dilu/two-way/fifo", "dilu/dedicated/elastic"])
def policy(request):
    return make_policy(request.param)


def held_by(plan):
    return {who: (list(given.device_ids), given.share) for who, given in plan.allocations.items()}


def test_jobs_share_a_device_of_training_and_services_one_of_inference(policy):
    jobs = decide(policy, [job(name, SMALL) for name in "abc"], nodes=NODES)
    assert places(jobs) == {name: ["k/0"] for name in "abc"}
    services = decide(policy, [], [service(name, SMALL) for name in "xyz"], nodes=NODES)
    assert places(services) == {name: ["i/0"] for name in "xyz"}


def test_a_job_joins_the_device_of_a_service(policy):
    plan = decide(policy, [job("t", SMALL)], [service("a", HALF, min_replicas=1)], nodes=NODES)
    assert places(plan) == {"t": ["i/0"], "a": ["i/0"]}
    again = decide(
        policy, [job("t", SMALL)], [service("a", HALF, ready=1, min_replicas=1)], held_by(plan), NODES, plan.memory
    )
    assert places(again) == places(plan)


def test_growth_by_load_opens_no_device_that_training_owns_and_a_guaranteed_minimum_does(policy):
    nodes = (make_node("k", 2, pool="training"),)
    waits = decide(policy, [], [service("a", SMALL)], nodes=nodes)
    assert "a" not in waits.allocations
    assert waits.reasons["a"].startswith("waits for room: a replica needs 0.3 of a device")
    assert "belong to training" in waits.reasons["a"]
    given = decide(policy, [], [service("a", SMALL, min_replicas=1)], nodes=nodes)
    assert places(given) == {"a": ["k/0"]}


def test_an_idle_node_of_inference_is_loaned_for_a_job_on_a_part_and_goes_back_to_a_service():
    policy = make_policy("dilu/tide/springtide")
    nodes = [make_node("k", 1, pool="training"), make_node("i", 1, pool="inference")]
    whole, part = job("w", goal=Goal(deadline_s=500.0), profile_steps_per_s={1: 1.0}, total_steps=300), job("t", HALF)
    plan = decide(policy, [whole, part], [service("s", wanted=0)], {"w": (["k/0"], None)}, nodes)
    assert places(plan) == {"w": ["k/0"]}
    assert plan.pools["i"].pool == "training"
    assert plan.revisit_at_s == pytest.approx(10.1)
    nodes[1] = replace(nodes[1], pool="training", home="inference")
    held = {"w": (["k/0"], None)}
    loaned = decide(policy, [whole, part], [service("s", wanted=0)], held, nodes, plan.memory)
    assert places(loaned) == {"w": ["k/0"], "t": ["i/0"]}
    running = replace(part, bounds=part.bounds)
    back = decide(policy, [whole, running], [service("s", wanted=1)], held_by(loaned), nodes, loaned.memory)
    assert places(back) == {"w": ["k/0"], "s": ["i/0"]}
    assert back.pools["i"].pool == "inference"
    assert back.reasons["t"] == "'s' needs i/0 as a whole"


def test_on_a_node_that_changes_its_label_sharers_stay_and_no_device_is_opened(policy):
    drains = {"i": Drain(pool="training", since_s=5.0, reason="a loan")}
    snapshots = []

    class Draining:
        def decide(self, snapshot):
            snapshots.append(replace(snapshot, drains=drains))
            return policy.decide(snapshots[-1])

    services = [service("a", SMALL, ready=1), service("b", replace(HALF, request=0.8, limit=0.9))]
    plan = decide(Draining(), [], services, {"a": (["i/0"], SMALL)}, NODES)
    assert places(plan) == {"a": ["i/0"]}


@pytest.mark.parametrize("pool", ["training", "inference"])
@pytest.mark.parametrize("is_job", [True, False])
def test_a_label_is_about_whole_devices(pool, is_job):
    assert admits(pool, is_job=is_job, is_part=True)
    assert admits(pool, is_job=is_job) == ((pool == "training") == is_job)
