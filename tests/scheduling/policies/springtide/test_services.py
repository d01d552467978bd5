"""Services beside promises: whose claim on a device is stronger, what waits, until when, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.simulation.sweeps import part
from springtide.control.quotes.inquiry import arriving
from springtide.core.decision import Plan, PoolAllocation, ServiceView, Snapshot, TimeClaim
from springtide.core.events import Event, LoadObserved, ServiceDeployed
from springtide.core.job_parts import DeadlinePromise, JobProgress, LearntSpeed
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, Goal, InferenceService, JobState, TrainingJob, WorkloadId
from springtide.scheduling.policies.springtide.policy import DerivedPromises, Springtide
from springtide.scheduling.policies.springtide.reasons import IN_TIME_AGAIN, why_service_waits
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule

SOURCE = Entrypoint(source_path="a.py")
TWO = {1: 10.0, 2: 18.0}
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0}


def job(name: str, steps: int, deadline_s: float | None, *, most: int = 4, profile=None, **changes) -> TrainingJob:
    made = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=SOURCE,
        max_workers=most,
        num_virtual_shards=64,
        total_steps=steps,
        profile_steps_per_s=dict(LINEAR if profile is None else profile),
        goal=Goal(deadline_s=deadline_s),
    )
    return replace(made, **changes)


def service(name: str = "s", *, least: int = 0, most: int = 2, **changes) -> InferenceService:
    made = InferenceService(
        service_id=name, name=name, entrypoint=SOURCE, min_replicas=least, max_replicas=most, grace_s=5.0, idle_s=5.0
    )
    return replace(made, **changes)


def asked(known: InferenceService, queued: int = 1, **changes) -> ServiceView:
    made = ServiceView(service=known, min_replicas=known.min_replicas, max_replicas=known.max_replicas, queued=queued)
    return replace(made, **changes)


def cluster(count: int) -> Topology:
    return Topology(nodes=(make_node("n", count),))


class Remade:
    """The policy, and beside it one that is made anew from the memory for every decision: both say the same."""

    def __init__(self) -> None:
        self.policy, self.derived = Springtide(), DerivedPromises()
        self.plans: list[Plan] = []

    def decide(self, snapshot: Snapshot) -> Plan:
        memory = msgspec.json.decode(msgspec.json.encode(snapshot.memory))
        other = Springtide().decide(replace(snapshot, memory=memory))
        plan = self.policy.decide(snapshot, self.derived)
        for name in ("allocations", "memory", "admitted", "reasons", "claims", "revisit_at_s"):
            assert getattr(other, name) == getattr(plan, name), name
        self.plans.append(plan)
        return plan


def running(decided: Plan, known: TrainingJob, now_s: float, step: int):
    """The job as it runs on what was decided for it."""
    return replace(
        arriving(known, 0.0),
        state=JobState.RUNNING,
        promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=decided.admitted[known.job_id]),
        progress=JobProgress(step=step, progress_at_s=now_s),
        started_at_s=0.0,
        num_replicas=decided.allocations[known.job_id].num_devices,
    )


def wakes(deadline_s: float, *services: ServiceView, num_devices: int = 2) -> tuple[Plan, Plan]:
    """A job of 10,000 steps with this deadline has two devices; at 10 s these services are asked."""
    policy, known = Springtide(), job("fit", 10_000, deadline_s, most=2, profile=TWO)
    first = policy.decide(Snapshot(now_s=0.0, cluster=cluster(num_devices), jobs=(arriving(known, 0.0),)))
    later = Snapshot(
        now_s=10.0,
        cluster=cluster(num_devices),
        jobs=(running(first, known, 10.0, 180),),
        services=services,
        allocations=dict(first.allocations),
        memory=first.memory,
    )
    return first, policy.decide(later)


# --- a first replica from zero ----------------------------------------------------------------------------------------


def test_a_first_replica_waits_for_a_promise_without_slack() -> None:
    first, plan = wakes(600.0, asked(service()))
    assert first.allocations["fit"].num_devices == 2
    assert plan.allocations.keys() == {"fit"}
    assert plan.allocations["fit"] == first.allocations["fit"]
    assert plan.reasons == {"s": "waits for a device: promised deadlines need them ('fit' has 2)"}
    assert plan.claims == {"s": TimeClaim(code="waits_for", at_s=plan.future["fit"][-1].end_s)}


def test_a_promise_that_begins_soon_is_named_and_not_other_services() -> None:
    rows = {WorkloadId("fit"): SimpleNamespace(view=SimpleNamespace(job=SimpleNamespace(name="fit")))}
    entry = SimpleNamespace(is_promised=True, end_s=127.0, size_at=lambda at_s: int(at_s > 20.0))
    for entries, expected in (
        ({"fit": entry}, "waits for a device: promised deadlines need them soon ('fit')"),
        ({}, "waits for a device: other services hold all 2"),
    ):
        table = SimpleNamespace(now_s=11.0, entries=entries)
        assert why_service_waits(table, rows, 2) == expected  # type: ignore[arg-type]


def test_a_first_replica_takes_what_a_promise_can_spare() -> None:
    _, plan = wakes(1200.0, asked(service()))
    assert {who: given.num_devices for who, given in plan.allocations.items()} == {"fit": 1, "s": 1}
    assert plan.reasons["fit"] == "'s' needs 1 device; it keeps its deadline with fewer"
    assert plan.claims["fit"] == TimeClaim(code="kept_in_time", at_s=plan.future["fit"][-1].end_s)
    assert plan.future["fit"][-1].end_s <= 1200.0


def test_of_two_that_wake_one_gets_what_can_be_spared() -> None:
    _, plan = wakes(1200.0, asked(service("a")), asked(service("b")))
    assert plan.allocations.keys() == {"fit", "a"}
    assert plan.claims["b"].code == "waits_for"
    assert plan.claims["b"].at_s == plan.future["fit"][-1].end_s


def test_a_guaranteed_minimum_comes_before_the_first_replica_of_an_earlier_service() -> None:
    _, plan = wakes(1200.0, asked(service("early")), asked(service("sure", least=1), queued=0))
    assert plan.allocations.keys() == {"fit", "sure"}
    assert plan.claims["early"].code == "waits_for"


def test_a_minimum_that_comes_without_asking_says_whose_promise_is_given_up() -> None:
    _, plan = wakes(600.0, asked(service(least=1), queued=0))
    assert {who: given.num_devices for who, given in plan.allocations.items()} == {"fit": 1, "s": 1}
    assert (plan.claims["fit"].code, plan.claims["fit"].is_certain) == ("given_up", False)
    assert plan.reasons["fit"].startswith("promise given up: 1 device left for promised deadlines")
    assert "guaranteed" in plan.reasons["fit"]


@pytest.mark.parametrize("share", [None, Share(request=0.5, limit=0.5)])
def test_a_promised_job_that_is_in_time_again_says_so(share: Share | None) -> None:
    """What it holds is a part of each device where nodes are in pools: the same devices, in another allocation."""
    policy, known = Remade(), job("fit", 10_000, 600.0, most=2, profile=TWO, min_workers=2)
    plan = first = policy.decide(Snapshot(now_s=0.0, cluster=cluster(2), jobs=(arriving(known, 0.0),)))
    told = []
    # 16 steps a second would be too slow; it was the machine, for a while.
    for now_s, step, rate in ((100.0, 1600, 16.0), (200.0, 3500, 19.0), (201.0, 3519, 19.0)):
        samples = LearntSpeed(throughput_samples_per_s={2: rate * known.global_batch_size})
        view = replace(running(first, known, now_s, step), learnt=samples)
        held = {who: replace(given, share=share) if share else given for who, given in plan.allocations.items()}
        known_to = {"allocations": held, "memory": plan.memory}
        plan = policy.decide(Snapshot(now_s=now_s, cluster=cluster(2), jobs=(view,), **known_to))
        told.append((plan.reasons.get("fit", ""), [claim.code for claim in plan.claims.values()]))
    assert told[0] == ("behind its plan: its deadline is in danger, it ends as soon as it can", ["given_up"])
    assert told[1] == (IN_TIME_AGAIN, ["kept_in_time"])
    assert told[2] == told[1], "as long as the plan stands"


def test_a_device_that_is_promised_later_is_lent_until_then() -> None:
    # The job cannot start before 100 s: it waits out a crash.
    policy, known = Remade(), job("fit", 1000, 620.0, most=2, profile={2: 2.0}, min_workers=2)
    view = arriving(known, 0.0)
    view = replace(view, restarts=replace(view.restarts, starts_at_s=100.0))
    first = policy.decide(Snapshot(now_s=0.0, cluster=cluster(2), jobs=(view,)))
    assert first.admitted
    promised = replace(view, promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=first.admitted["fit"]))
    now = Snapshot(now_s=10.0, cluster=cluster(2), jobs=(promised,), services=(asked(service()),), memory=first.memory)
    lent = policy.decide(now)
    assert lent.allocations["s"].num_devices == 1
    # It leaves as long before the start as it drains.
    assert lent.revisit_at_s == pytest.approx(95.0, abs=0.1)
    replica = asked(service(), queued=0, num_ready=1, in_flight=1)
    ending = replace(
        now, now_s=lent.revisit_at_s, services=(replica,), allocations=lent.allocations, memory=lent.memory
    )
    plan = policy.decide(ending)
    assert "s" not in plan.allocations
    assert plan.claims["s"].code == "waits_for"
    assert not any(claim.code == "given_up" for claim in plan.claims.values())


def test_best_effort_and_pursued_deadlines_make_way_for_a_first_replica() -> None:
    policy = Springtide()
    best = arriving(job("best", 1000, None, most=2), 0.0)
    held = PoolAllocation(device_ids=("n/0", "n/1"))
    best = replace(best, state=JobState.RUNNING, started_at_s=0.0, num_replicas=2)
    now = Snapshot(
        now_s=10.0, cluster=cluster(2), jobs=(best,), services=(asked(service()),), allocations={"best": held}
    )
    plan = policy.decide(now)
    assert {who: given.num_devices for who, given in plan.allocations.items()} == {"best": 1, "s": 1}
    # Its speed was measured and not given, so its deadline is pursued and not promised.
    pursued = arriving(job("pursued", 1000, 520.0, most=2, profile={}), 0.0)
    pursued = replace(
        pursued,
        state=JobState.RUNNING,
        started_at_s=0.0,
        num_replicas=2,
        learnt=replace(pursued.learnt, throughput_samples_per_s={1: 1.1, 2: 2.0}),
    )
    plan = policy.decide(replace(now, jobs=(pursued,), allocations={"pursued": held}))
    assert plan.allocations["s"].num_devices == 1


# --- the table of claims ----------------------------------------------------------------------------------------------


@st.composite
def conflicts(draw: st.DrawFn):
    """Jobs of all kinds on nodes of one device, services that wake beside them, and nodes that are lost then."""
    num_devices = draw(st.integers(2, 6))
    jobs = []
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(("promised", "promised", "pursued", "best")))
        steps, most = draw(st.integers(50, 800)), draw(st.sampled_from((1, 2, 4)))
        factor = draw(st.sampled_from((1.05, 1.3, 2.0, 4.0)))
        deadline_s = None if kind == "best" else 20.0 + factor * steps / most
        jobs.append((kind, job(f"{kind}-{index}", steps, deadline_s, most=most)))
    services = [
        service(f"s-{index}", least=draw(st.sampled_from((0, 0, 1))), most=draw(st.integers(1, 3)))
        for index in range(draw(st.integers(1, 3)))
    ]
    queued = [draw(st.integers(0, 3)) for _ in services]
    return num_devices, jobs, services, queued, draw(st.integers(0, num_devices - 1))


def seen(kind: str, known: TrainingJob, plan: Plan | None, now_s: float, since_s: float):
    """The view of a job that has been on its devices since `since_s`."""
    view = arriving(known, 0.0)
    if kind == "pursued":
        # Measured and not given, so that nothing is promised.
        view = replace(view, job=replace(known, profile_steps_per_s={}))
        measured = {count: count * float(known.global_batch_size) for count in (1, 2)}
        view = replace(view, learnt=replace(view.learnt, throughput_samples_per_s=measured))
    given = None if plan is None else plan.allocations.get(known.job_id)
    if plan is not None and known.job_id in plan.admitted:
        promise = DeadlinePromise(admitted_at_s=0.0, promised_finish_s=plan.admitted[known.job_id])
        view = replace(view, promise=promise)
    if given is None:
        return view
    step = int(max(0.0, now_s - since_s) * LINEAR.get(given.num_devices, 1.0))
    return replace(
        view,
        state=JobState.RUNNING,
        started_at_s=since_s,
        num_replicas=given.num_devices,
        progress=JobProgress(step=step, progress_at_s=now_s),
    )


def given_up(plan: Plan) -> set[str]:
    return {who for who, claim in plan.claims.items() if claim.code == "given_up"}


def check_claims(now: Snapshot) -> None:
    """No stronger claim gets less than it would get if the weaker ones were not there."""
    plan = Springtide().decide(now)
    weak = {v.job.job_id for v in now.jobs if v.job.goal.deadline_s is None or not v.job.profile_steps_per_s}
    # A first run whose speed was measured has a promise as any other.
    weak -= plan.admitted.keys()
    strong_jobs = tuple(v for v in now.jobs if v.job.job_id not in weak)
    minimums = tuple(replace(v, queued=0, num_ready=0, max_replicas=max(1, v.min_replicas)) for v in now.services)
    only_promises = Springtide().decide(replace(now, jobs=strong_jobs, services=minimums))
    assert given_up(plan) <= given_up(only_promises), "a promise is given up for a weaker claim"
    num_left = len(now.cluster.device_ids())
    for view in now.services:
        given = plan.allocations.get(view.service.service_id)
        least = min(view.min_replicas, num_left)
        assert (given.num_devices if given else 0) >= least, "a minimum is not there"
        num_left -= least
    firsts = tuple(replace(v, max_replicas=max(1, v.min_replicas)) for v in now.services)
    without = Springtide().decide(replace(now, jobs=strong_jobs, services=firsts))
    lost = {v.service.service_id for v in now.services if v.service.service_id in without.allocations}
    lost -= plan.allocations.keys()
    grown = {
        v.service.service_id
        for v in now.services
        if v.service.service_id in plan.allocations
        and plan.allocations[v.service.service_id].num_devices > max(1, v.min_replicas)
    }
    # A promise that is planned to begin earlier may have the device, too.
    assert not lost or not (weak | grown) & plan.allocations.keys(), (
        f"no first replica for {lost}, which weaker claims have in its place"
    )
    services = {v.service.service_id for v in now.services} & plan.allocations.keys()
    held = sum(plan.allocations[who].num_devices for who in services)
    for who, why in plan.reasons.items():
        assert "other services hold all" not in why or held == len(now.cluster.device_ids()), (who, why)
    for job_id in given_up(without) - given_up(only_promises):
        raise AssertionError(f"the promise of {job_id} is given up for a first replica")


def check_conflict(conflict) -> None:
    num_devices, jobs, services, queued, num_lost = conflict
    nodes = tuple(make_node(f"n{index}", 1) for index in range(num_devices))
    policy = Springtide()
    first = policy.decide(
        Snapshot(
            now_s=0.0, cluster=Topology(nodes=nodes), jobs=tuple(seen(kind, j, None, 0.0, 0.0) for kind, j in jobs)
        )
    )
    jobs = [(kind, j) for kind, j in jobs if j.job_id not in first.rejected]
    views = tuple(seen(kind, j, first, 10.0, 0.0) for kind, j in jobs)
    woken = tuple(asked(known, count) for known, count in zip(services, queued, strict=True))
    now = Snapshot(
        now_s=10.0,
        cluster=Topology(nodes=nodes),
        jobs=views,
        services=woken,
        allocations=dict(first.allocations),
        memory=first.memory,
    )
    check_claims(now)
    plan = policy.decide(now)
    left = nodes[num_lost:]
    alive = {device.device_id for node in left for device in node.devices}
    held = {}
    for who, given_devices in plan.allocations.items():
        devices = tuple(device for device in given_devices.device_ids if device in alive)
        if devices:
            held[who] = replace(given_devices, device_ids=devices)
    serving = tuple(
        replace(v, num_ready=held[v.service.service_id].num_devices if v.service.service_id in held else 0)
        for v in woken
    )
    check_claims(
        replace(
            now,
            now_s=11.0,
            cluster=Topology(nodes=left),
            jobs=tuple(
                replace(v, num_replicas=held[v.job.job_id].num_devices if v.job.job_id in held else 0) for v in views
            ),
            services=serving,
            allocations=held,
            memory=plan.memory,
        )
    )


@pytest.mark.slow
@given(conflict=conflicts())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_stronger_claim_never_loses_a_device_to_a_weaker_one(conflict) -> None:
    check_conflict(conflict)


def test_a_pursued_deadline_gets_no_device_of_a_promise_that_a_first_replica_waits_for() -> None:
    jobs = [
        ("promised", job("promised-0", 395, 434.75, most=1)),
        ("promised", job("promised-1", 189, 265.7, most=1)),
        ("pursued", job("pursued-2", 50, 72.5, most=1)),
    ]
    check_conflict((2, jobs, [service("s-0", most=1), service("s-1", most=1)], [1, 1], 0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(conflict=conflicts())
@settings(max_examples=part(3000), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_stronger_claim_never_loses_a_device_to_a_weaker_one_for_long(conflict) -> None:
    check_conflict(conflict)


# --- plays ------------------------------------------------------------------------------------------------------------


def load(known: InferenceService, queued: int) -> LoadObserved:
    return LoadObserved(service_id=known.service_id, arrivals_per_s=0.1, in_flight=0, queued=queued, idle_s=0.0)


def requests(known: InferenceService, until_s: float, every_s: float) -> list[tuple[float, Event]]:
    """One request every so often, answered after two seconds."""
    events: list[tuple[float, Event]] = [(0.5, ServiceDeployed(service=known))]
    at_s = 5.0
    while at_s < until_s:
        events.append((at_s, load(known, 1)))
        events.append((at_s + 2.0, load(known, 0)))
        at_s += every_s
    return events


def played(policy, arrivals, events, num_devices: int) -> FluidRunResult:
    return play(
        policy,
        arrivals,
        [make_node("n", num_devices)],
        rule=overhead_rule("elasticflow", num_devices),
        speeds=ProfiledSpeeds(devices_per_node=num_devices),
        timed_events=sorted(events, key=lambda item: item[0]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("slack_s", [0.0, 5.0, 500.0])
def test_a_request_every_ten_seconds_for_an_hour_breaks_no_promise(slack_s: float) -> None:
    watched = Remade()
    # Two devices do its work in 3,600 s, and the change that starts it takes six.
    known = job("fit", 7200, 3606.5 + slack_s, most=2, profile={1: 1.0, 2: 2.0})
    run = played(watched, [(0.0, known)], requests(service(), 3600.0, 10.0), 2)
    assert run.runs["fit"].state is JobState.SUCCEEDED
    assert run.runs["fit"].ended_s <= known.goal.deadline_s
    served = any("s" in plan.allocations for plan in watched.plans)
    waited = any(claim.code == "waits_for" for plan in watched.plans for claim in plan.claims.values())
    assert served == (slack_s > 100.0)
    assert waited


@st.composite
def scenes(draw: st.DrawFn):
    """Jobs with and without deadlines, a guaranteed minimum from the beginning, services that wake at any time."""
    num_devices = draw(st.sampled_from((2, 3, 4, 8)))
    arrivals, now_s = [], 1.0
    for index in range(draw(st.integers(1, 6))):
        now_s += draw(st.sampled_from((0.0, 5.0, 60.0)))
        steps, most = draw(st.integers(20, 800)), draw(st.sampled_from((1, 2, 4)))
        factor = draw(st.sampled_from((None, 1.02, 1.3, 3.0)))
        deadline_s = None if factor is None else now_s + 10.0 + factor * steps / most
        arrivals.append((now_s, job(f"job-{index}", steps, deadline_s, most=min(most, num_devices))))
    events: list[tuple[float, Event]] = []
    for index in range(draw(st.integers(1, 3))):
        least = draw(st.sampled_from((0, 0, 1))) if index < num_devices - 1 else 0
        known = service(f"s-{index}", least=least, most=draw(st.integers(max(1, least), 3)))
        events.append((0.0, ServiceDeployed(service=known)))
        at_s = 0.0
        for _ in range(draw(st.integers(1, 6))):
            at_s += draw(st.sampled_from((3.0, 20.0, 150.0)))
            events.append((at_s, load(known, draw(st.integers(0, 6)))))
        events.append((at_s + 5.0, load(known, 0)))
    return arrivals, events, num_devices


def check_scene(scene) -> None:
    """The executor checks each step: no promise is broken or given up for nothing, and what is said of time is true."""
    arrivals, events, num_devices = scene
    played(Remade(), arrivals, events, num_devices)


def test_a_service_that_waits_comes_after_one_whose_loan_ends_before() -> None:
    jobs = [("job-0", 1.0, 20, None, 1), ("job-1", 1.0, 296, 203.4, 2), ("job-2", 1.0, 20, None, 1)]
    jobs += [("job-3", 1.0, 20, None, 1), ("job-4", 61.0, 361, 305.65, 2), ("job-5", 61.0, 20, None, 1)]
    arrivals = [(at_s, job(name, steps, deadline_s, most=most)) for name, at_s, steps, deadline_s, most in jobs]
    services = [service(f"s-{index}") for index in range(3)]
    events: list[tuple[float, Event]] = [(0.0, ServiceDeployed(service=known)) for known in services]
    events += [(3.0, load(services[0], 0)), (8.0, load(services[0], 0))]
    for known in services[1:]:
        events += [(150.0, load(known, 1)), (155.0, load(known, 0))]
    check_scene((arrivals, events, 3))


@pytest.mark.slow
@given(scene=scenes())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_services_that_wake_break_no_promise_and_what_is_said_is_true(scene) -> None:
    check_scene(scene)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(scene=scenes())
@settings(max_examples=part(1000), deadline=None, suppress_health_check=list(HealthCheck))
def test_services_that_wake_break_no_promise_for_long(scene) -> None:
    check_scene(scene)


def test_a_moment_that_has_passed_is_not_told_as_an_end() -> None:
    """A job gives a device up and is to end on the other one: that it has not ended then is no reason to decide yet."""
    policy, known = Remade(), job("fit", 600, 1200.0, most=2, profile=TWO)
    first = policy.decide(Snapshot(now_s=0.0, cluster=cluster(2), jobs=(arriving(known, 0.0),)))
    other = arriving(job("other", 600, 90.0, most=1, profile=TWO), 10.0)
    snapshot = Snapshot(
        now_s=10.0,
        cluster=cluster(2),
        jobs=(running(first, known, 10.0, 180), other),
        allocations=dict(first.allocations),
        memory=first.memory,
    )
    plan = policy.decide(snapshot)
    end_s = plan.future["fit"][-1].end_s
    assert plan.claims["fit"] == TimeClaim(code="kept_in_time", at_s=end_s)
    other = replace(other, promise=DeadlinePromise(admitted_at_s=10.0, promised_finish_s=plan.admitted["other"]))
    snapshot = replace(snapshot, jobs=(snapshot.jobs[0], other), memory=plan.memory)
    for now_s in (end_s - 0.5, end_s + 0.5):
        plan = policy.decide(replace(snapshot, now_s=now_s))
        assert ("fit" in plan.claims) is (now_s < end_s)
        assert plan.allocations["fit"].num_devices == 1
