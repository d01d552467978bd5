"""What was decided stands until something material changes or its moment comes."""

from __future__ import annotations

import time

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import make_view
from springtide.core.decision import PoolAllocation, ServiceView, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, InferenceService
from springtide.scheduling.decisions.recall import decide_once
from springtide.scheduling.registry import make_policy
from springtide_studies.rivals.policies.gangs import Gangs


class Counting:
    """Gives devices in order of arrival and counts how often it is asked for a new plan."""

    def __init__(self, *, lasts_s=None):
        self.lasts_s = lasts_s
        self.seen = []

    def __call__(self, shares, state):
        self.seen.append(dict(state))
        Gangs(shares).fill(shares.snapshot.jobs)
        until_s = None if self.lasts_s is None else shares.snapshot.now_s + self.lasts_s
        return until_s, {"number": len(self.seen)}


def snapshot(*views, now_s=0.0, memory=None, slots=8, held=None, services=()):
    return Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=(make_node("n", slots),)),
        jobs=views,
        services=services,
        allocations=held or {},
        memory=memory,
    )


def service(*, demand=0, ready=0, idle_s=0.0):
    return ServiceView(
        service=InferenceService(service_id="s", name="s", entrypoint=Entrypoint(source_path="a.py"), max_replicas=4),
        min_replicas=0,
        max_replicas=4,
        num_ready=ready,
        in_flight=demand,
        idle_s=idle_s,
    )


A, B = make_view("a", ask=4), make_view("b", ask=8, at_s=1.0)


def test_the_same_devices_are_wanted_however_far_the_plan_has_come():
    decide = Counting()
    first = decide_once("rule", snapshot(A, B), decide)
    memory = msgspec.json.decode(msgspec.json.encode(first.memory))
    for held in ({}, {"a": PoolAllocation(device_ids=("n/1", "n/0"))}, dict(first.allocations)):
        later = decide_once("rule", snapshot(with_fields(A, step=5), B, now_s=3.0, memory=memory, held=held), decide)
        assert later.allocations == first.allocations
        assert later.reasons == first.reasons
        assert later.memory == memory
    assert len(decide.seen) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"jobs": (A,)},
        {"jobs": (A, B, make_view("c"))},
        {"jobs": (with_fields(A, max_workers=2), B)},
        {"jobs": (A, replace(B, total_steps=7))},
        {"cluster": Topology(nodes=(make_node("n", 9),))},
        {"cluster": Topology(nodes=(make_node("m", 8),))},
        {"services": (service(demand=1),)},
    ],
)
def test_what_is_material_is_decided_anew_from_what_was_remembered(changed):
    decide = Counting()
    first = decide_once("rule", snapshot(A, B), decide)
    decide_once("rule", replace(snapshot(A, B, memory=first.memory), **changed), decide)
    assert decide.seen == [{}, {"number": 1}]


def test_its_moment_comes():
    decide = Counting(lasts_s=60.0)
    first = decide_once("rule", snapshot(A), decide)
    assert first.revisit_at_s == 60.0
    assert decide_once("rule", snapshot(A, now_s=59.0, memory=first.memory), decide).revisit_at_s == 60.0
    assert decide_once("rule", snapshot(A, now_s=60.0, memory=first.memory), decide).revisit_at_s == 120.0


def test_a_service_that_falls_asleep_is_looked_at_in_time():
    decide = Counting(lasts_s=60.0)
    awake = service(ready=1, idle_s=10.0)
    first = decide_once("rule", snapshot(A, services=(awake,)), decide)
    again = decide_once(
        "rule", snapshot(A, services=(replace(awake, idle_s=15.0),), now_s=5.0, memory=first.memory), decide
    )
    assert first.revisit_at_s == again.revisit_at_s == pytest.approx(20.001)


def test_nobody_takes_up_the_memory_of_another():
    decide = Counting()
    first = decide_once("rule", snapshot(A), decide)
    decide_once("other", snapshot(A, memory=first.memory), decide)
    decide_once("rule", snapshot(A, memory=[1, 2]), decide)
    older = {
        **first.memory,
        "rule": first.memory["rule"].replace("1 ", "0 ", 1),
        "fingerprint": "",
        "state": {"gone": 1},
    }
    decide_once("rule", snapshot(A, memory=older), decide)
    assert decide.seen == [{}, {}, {}, {}]


@pytest.mark.parametrize("name", ["tiresias", "themis", "gandiva", "optimus", "sjf", "static", "edf"])
def test_standing_by_a_decision_is_cheap(name):
    """100 jobs in well under a millisecond (the best of several, for a busy machine)."""
    views = tuple(make_view(f"j{number}", ask=1 + number % 4, deadline_s=1000.0) for number in range(100))
    policy = make_policy(name)
    first = policy.decide(snapshot(*views, slots=64))
    after = snapshot(*views, slots=64, memory=first.memory, held=dict(first.allocations))
    took_s = []
    for _ in range(20):
        start_s = time.perf_counter()
        policy.decide(after)
        took_s.append(time.perf_counter() - start_s)
    assert min(took_s) < 0.001
