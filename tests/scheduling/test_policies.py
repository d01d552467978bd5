"""What each first policy promises, on snapshots that a reader can hold in mind."""

from __future__ import annotations

import msgspec
import pytest

from kits.job_parts import with_fields
from springtide.control.controller import check_plan
from springtide.core.decision import JobView, Overheads, PoolAllocation, ServiceView, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.job_parts import JobBounds, JobProgress, LearntSpeed
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, Goal, InferenceService, JobState, TrainingJob
from springtide.scheduling.registry import POLICY_NAMES, describe_policy, make_policy
from springtide.scheduling.replicas import wanted_replicas

SOURCE = Entrypoint(source_path="a.py")


def job(name, *, low=1, high=4, deadline_s=None, done=0, total=100, rates=None, elastic=True, at_s=0.0):
    return JobView(
        job=TrainingJob(
            job_id=name,
            name=name,
            entrypoint=SOURCE,
            global_batch_size=10,
            min_workers=low,
            max_workers=high,
            elastic=elastic,
            goal=Goal(deadline_s=deadline_s),
        ),
        state=JobState.PENDING,
        submitted_at_s=at_s,
        total_steps=total,
        bounds=JobBounds(min_workers=low, max_workers=high),
        progress=JobProgress(step=done),
        learnt=LearntSpeed(throughput_samples_per_s=rates or {}),
    )


def service(name, *, ready=0, starting=0, demand=0, idle_s=0.0, low=0, high=4, p99_s=None, slo_s=None):
    return ServiceView(
        service=InferenceService(
            service_id=name, name=name, entrypoint=SOURCE, min_replicas=low, max_replicas=high, slo_s=slo_s
        ),
        min_replicas=low,
        max_replicas=high,
        num_ready=ready,
        num_starting=starting,
        in_flight=demand,
        idle_s=idle_s,
        latency_p99_s=p99_s,
    )


def decide(policy, *views, held=None, slots=4, now_s=0.0, overheads=None):
    snapshot = Snapshot(
        now_s=now_s,
        overheads=overheads or Overheads(),
        cluster=Topology(nodes=(make_node("n", slots),)),
        jobs=tuple(
            msgspec.structs.replace(view, num_replicas=len((held or {}).get(view.job.name, ())))
            for view in views
            if isinstance(view, JobView)
        ),
        services=tuple(view for view in views if isinstance(view, ServiceView)),
        allocations={
            name: PoolAllocation(device_ids=tuple(f"n/{index}" for index in devices))
            for name, devices in (held or {}).items()
        },
    )
    plan = make_policy(policy).decide(snapshot)
    check_plan(snapshot, plan)
    return plan


def counts(plan):
    return {name: allocation.num_devices for name, allocation in plan.allocations.items()}


def test_fifo_gives_all_to_the_first_and_nobody_overtakes():
    plan = decide("fifo", job("a", high=3), job("b", high=2), job("c", high=1))
    assert counts(plan) == {"a": 3}
    assert plan.reasons["b"] == "waiting for 1 of 4 devices: 'a' has 3"


def test_fifo_never_shrinks_a_running_job():
    assert counts(decide("fifo", job("a"), job("b"), held={"a": [0, 1, 2, 3]})) == {"a": 4}


def test_edf_takes_devices_from_the_later_deadline():
    views = job("late", deadline_s=900.0), job("soon", deadline_s=60.0, high=3), job("none", at_s=-1.0)
    assert counts(decide("edf", *views, held={"late": [0, 1, 2, 3]})) == {"soon": 3, "late": 1}


def test_elastic_gives_a_deadline_the_fewest_workers_that_make_it_and_the_rest_to_who_gains_most():
    rates = {1: 10.0, 2: 19.0, 4: 34.0}
    urgent = job("urgent", deadline_s=70.0, rates=rates)
    plan = decide("elastic", urgent, job("easy", rates=rates), now_s=0.0)
    assert counts(plan)["urgent"] >= 2, "1,000 samples in 70 s need more than the 10 samples/s of one worker"
    assert counts(plan)["easy"] >= 1, "everyone gets a share"
    assert sum(counts(plan).values()) == 4, "no device is left idle"


def test_elastic_does_not_starve_others_for_a_deadline_that_is_lost():
    rates = {1: 10.0, 4: 30.0}
    plan = decide("elastic", job("lost", deadline_s=1.0, rates=rates), job("other", rates=rates))
    assert counts(plan) == {"lost": 2, "other": 2}


def test_elastic_prefers_the_job_that_scales():
    flat, steep = {1: 10.0, 2: 10.5, 4: 11.0}, {1: 10.0, 2: 20.0, 4: 40.0}
    assert counts(decide("elastic", job("flat", rates=flat), job("steep", rates=steep))) == {"flat": 1, "steep": 3}


def test_elastic_does_not_flap_between_equals():
    rates = {1: 10.0, 2: 19.0}
    held = {"a": [0], "b": [1, 2, 3]}
    assert counts(decide("elastic", job("a", rates=rates), job("b", rates=rates), held=held))["b"] >= 2
    again = {
        name: [int(d[2:]) for d in a.device_ids]
        for name, a in decide("elastic", job("a", rates=rates), job("b", rates=rates), held=held).allocations.items()
    }
    settled = decide("elastic", job("a", rates=rates), job("b", rates=rates), held=again)
    assert counts(settled) == {name: len(devices) for name, devices in again.items()}


def test_elastic_leaves_devices_the_longer_where_a_change_costs_more():
    flat, steep = {1: 10.0, 2: 10.5, 4: 11.0}, {1: 10.0, 2: 20.0, 4: 40.0}
    holder = with_fields(job("flat", rates=flat), resized_at_s=100.0)
    held = {"flat": [0, 1], "steep": [2, 3]}

    def now(at_s, change_s):
        overheads = Overheads(change_s=change_s)
        return counts(decide("elastic", holder, job("steep", rates=steep), held=held, now_s=at_s, overheads=overheads))

    assert now(130.0, 1.0) == {"flat": 1, "steep": 3}
    assert now(130.0, 6.0) == {"flat": 2, "steep": 2}
    assert now(149.0, 6.0) == {"flat": 1, "steep": 3}


def test_elastic_tries_again_what_was_slow_when_it_was_measured():
    slower = with_fields(job("a", high=2, rates={1: 10.0, 2: 4.0}), resized_at_s=100.0)

    def now(at_s, *others):
        return decide("elastic", slower, *others, held={"a": [0]}, now_s=at_s)

    soon = now(200.0)
    assert (counts(soon), soon.revisit_at_s) == ({"a": 1}, 400.0)
    assert counts(now(400.0)) == {"a": 2}
    # Whoever gains goes first.
    assert counts(now(400.0, job("b", rates={1: 10.0, 2: 20.0}))) == {"a": 1, "b": 3}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_service_that_is_asked_gets_a_replica_before_idle_devices_are_shared_out(policy):
    plan = decide(policy, service("s", demand=1), job("a"))
    assert counts(plan)["s"] == 1


@pytest.mark.parametrize("policy", ["springtide", "elastic", "edf", "fifo"])
def test_an_idle_service_starts_for_its_guaranteed_minimum(policy):
    assert decide(policy, service("s", low=2)).reasons["s"] == "its guaranteed minimum is 2"
    left = decide(policy, service("s", ready=3, low=2, idle_s=500.0), held={"s": [0, 1, 2]})
    assert left.reasons["s"] == "nobody has asked for 500 s"


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_running_work_stays_where_it_is(policy):
    plan = decide(policy, job("a", high=2), job("b", high=2), held={"b": [0, 1], "a": [3, 2]})
    assert {name: a.device_ids for name, a in plan.allocations.items()} == {"b": ("n/0", "n/1"), "a": ("n/3", "n/2")}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_inelastic_job_gets_all_or_nothing(policy):
    script = job("script", low=3, high=3, elastic=False)
    assert counts(decide(policy, script, slots=4)) == {"script": 3}
    assert counts(decide(policy, script, slots=2)) == {}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_policy_is_pure(policy):
    views = (job("a", deadline_s=50.0, rates={1: 9.0}), job("b"), service("s", demand=20))
    before = msgspec.json.encode(views)
    assert decide(policy, *views) == decide(policy, *views)
    assert msgspec.json.encode(views) == before


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (service("s"), 0),
        (service("s", demand=1), 1),
        (service("s", ready=1, demand=17), 3),
        (service("s", ready=3, demand=17), 3),
        (service("s", ready=3, demand=15), 3),
        (service("s", ready=3, demand=8), 1),
        (service("s", ready=1, idle_s=29.0), 1),
        (service("s", ready=1, idle_s=31.0), 0),
        (service("s", starting=1, idle_s=999.0), 1),
        (service("s", ready=1, demand=1, idle_s=999.0), 1),
        (service("s", ready=2, idle_s=99.0, low=1), 1),
        (service("s", ready=1, demand=100, high=2), 2),
        (service("s", ready=1, demand=3, p99_s=0.5, slo_s=0.2), 2),
    ],
)
def test_replicas_follow_the_load_and_a_loading_or_busy_one_is_never_taken(view, wanted):
    assert wanted_replicas(view) == wanted


def test_an_unknown_policy_is_named_with_the_known_ones():
    with pytest.raises(InvalidRequest, match="choose one of springtide, elastic, edf, fifo"):
        make_policy("best")
    assert all(describe_policy(name) for name in POLICY_NAMES)
