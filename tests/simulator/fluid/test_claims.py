"""What is claimed of time and is not so is found: in plans that are written here, and in a policy with an old fault."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.quotes.inquiry import arriving
from springtide.core.decision import (
    EMPTY,
    Overheads,
    Plan,
    PlannedRun,
    PoolAllocation,
    ServiceView,
    Snapshot,
    TimeClaim,
)
from springtide.core.events import Event, LoadObserved, NodeLost, ReplicaLost, ServiceDeployed
from springtide.core.job_parts import DeadlinePromise
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, Goal, InferenceService, TrainingJob
from springtide.scheduling.policies.springtide import decision
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.services import ServiceNeeds, service_needs
from springtide.simulator.fluid.claims import ClaimChecks
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide.simulator.fluid.play import play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule

SOURCE = Entrypoint(source_path="a.py")
JOB = TrainingJob(
    job_id="fit",
    name="fit",
    entrypoint=SOURCE,
    max_workers=2,
    num_virtual_shards=4,
    total_steps=1000,
    profile_steps_per_s={1: 1.0, 2: 2.0},
    goal=Goal(deadline_s=600.0),
)
SERVICE = InferenceService(service_id="s", name="s", entrypoint=SOURCE, max_replicas=1, grace_s=5.0, idle_s=5.0)
VIEW = replace(arriving(JOB, 0.0), promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=510.0))
NOW = Snapshot(
    now_s=10.0,
    cluster=Topology(nodes=(make_node("n", 2),)),
    jobs=(VIEW,),
    services=(ServiceView(service=SERVICE, min_replicas=0, max_replicas=1, queued=1),),
)


def plan(end_s: float, *, num_devices: int = 2, **claims: TimeClaim) -> Plan:
    run = PlannedRun(start_s=10.0, end_s=end_s, num_devices=num_devices)
    given = {"fit": PoolAllocation(device_ids=("n/0", "n/1")[:num_devices])}
    return Plan(allocations=given, future={"fit": (run,)}, claims=claims or EMPTY)


def found(decided: Plan, *events: Event) -> list[str]:
    """The invariants that the plan breaks if these events came since the promise."""
    names: list[str] = []
    checks = ClaimChecks(lambda name, detail, now_s: names.append(name), keeps_promises=True)
    checks.check(NOW, plan(510.0))
    for event in events:
        checks.note(event)
    checks.check(NOW, decided)
    return names


def test_what_is_so_is_left_alone() -> None:
    kept, waits = TimeClaim(code="kept_in_time", at_s=510.0), TimeClaim(code="waits_for", at_s=510.0)
    assert found(plan(510.0)) == []
    assert found(plan(510.0, fit=kept, s=waits)) == []


@pytest.mark.parametrize(
    "claims",
    [
        {"fit": TimeClaim(code="kept_in_time", at_s=600.0)},
        {"s": TimeClaim(code="waits_for", at_s=300.0)},
        {"s": TimeClaim(code="waits_for")},
    ],
)
def test_another_moment_than_that_of_the_schedule_is_found(claims) -> None:
    assert found(plan(510.0, **claims)) == ["reason-true"]


def test_a_price_of_nothing_is_found_where_a_job_gains_by_more() -> None:
    best = arriving(replace(JOB, goal=Goal()), 0.0)
    waiting = replace(best, job=replace(best.job, job_id="late"))
    rigid = replace(best, job=replace(best.job, elastic=False))
    slow_to_change = replace(NOW, overheads=Overheads(change_s=1e6))
    alone, two = plan(510.0, num_devices=1).allocations, plan(510.0).allocations
    one = {**alone, "s": PoolAllocation(device_ids=("n/1",))}
    for now, jobs, held, given, expected in (
        (NOW, (best,), one, one, 1),
        (NOW, (best,), alone, alone, 0),
        (NOW, (best,), one, two, 0),
        (NOW, (best, waiting), two, two, 1),
        (NOW, (VIEW,), EMPTY, {"s": PoolAllocation(device_ids=("n/0", "n/1"))}, 0),
        (NOW, (rigid,), one, one, 0),
        (slow_to_change, (best,), one, one, 0),
    ):
        for price_s in (0.0, 0.5, None):
            names: list[str] = []
            checks = ClaimChecks(lambda name, detail, now_s, names=names: names.append(name))
            checks.check(replace(now, jobs=jobs, allocations=held), Plan(allocations=given, price_s=price_s))
            assert names == ["reason-true"] * (expected if price_s == 0.0 else 0)


def test_a_device_that_is_held_in_parts_is_not_free() -> None:
    names: list[str] = []
    part = PoolAllocation(device_ids=("n/0", "n/1"), share=Share(request=0.2, limit=0.4))
    decided = Plan(allocations={"part": part}, claims={"s": TimeClaim(code="waits_for")})
    ClaimChecks(lambda name, detail, now_s: names.append(name)).check(NOW, decided)
    assert names == []


def test_nobody_waits_beside_a_device_that_is_free() -> None:
    waits = TimeClaim(code="waits_for", at_s=510.0)
    assert found(plan(510.0, num_devices=1, s=waits)) == ["reason-true"]


def test_a_promise_is_given_up_only_for_what_it_excludes_and_that_is_said() -> None:
    told = plan(700.0, fit=TimeClaim(code="given_up", at_s=700.0))
    assert found(told) == ["promise-excused"]
    assert found(told, NodeLost(node_id="n")) == []
    lost = ReplicaLost(workload_id="fit", replica_id="fit.0", reason="it died")
    assert found(told, lost) == []
    assert found(plan(700.0), lost) == ["promise-told"]
    assert "reason-true" in found(plan(700.0, fit=TimeClaim(code="kept_in_time", at_s=700.0)), lost)


def test_a_first_replica_that_counts_as_guaranteed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that was there: one request took a promised job's device."""

    def as_before(snapshot: Snapshot) -> ServiceNeeds:
        needs = service_needs(snapshot)
        return needs._replace(least=needs.first)

    monkeypatch.setattr(decision, "service_needs", as_before)
    events = [
        (0.5, ServiceDeployed(service=SERVICE)),
        (20.0, LoadObserved(service_id="s", arrivals_per_s=0.1, in_flight=0, queued=1, idle_s=0.0)),
    ]
    with pytest.raises(InvariantViolation, match=r"promise-excused.*promise given up: 1 device left"):
        play(
            Springtide(),
            [(0.0, JOB)],
            [make_node("n", 2)],
            rule=overhead_rule("elasticflow", 2),
            speeds=ProfiledSpeeds(devices_per_node=2),
            timed_events=events,
        )
