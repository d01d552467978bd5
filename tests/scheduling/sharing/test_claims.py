"""Whose claim on a device is stronger, where one of them is a job's on a part: promises, services, best effort."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.sharing_views import HALF, decide, job, places, service
from kits.simulation.sweeps import part
from springtide.core.decision import Overheads, PoolAllocation, Snapshot
from springtide.core.events import Event, LoadObserved, ServiceDeployed
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share, make_share
from springtide.core.workload import Goal, JobState
from springtide.scheduling.registry import make_live_policy, make_policy
from springtide.simulator.fluid.play import play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule

PART = Share(request=0.4, limit=0.8)
KNOWN = {"total_steps": 1000, "profile_steps_per_s": {1: 10.0, 2: 20.0}}
SLOW = {"total_steps": 10**6, "profile_steps_per_s": {1: 10.0, 2: 18.0}}
TWO = [make_node("n", 2)]


def due(deadline_s, name="due", **options):
    """A job on 0.4 of a device that takes 250 s on one, 125 s on two."""
    return job(name, PART, goal=Goal(deadline_s=deadline_s), **{"workers": (1, 2), **KNOWN, **options})


def runs(view, num_devices, **fields):
    """The view of a job that has so many devices since time 0."""
    return with_fields(view, state=JobState.RUNNING, started_at_s=0.0, num_replicas=num_devices, **fields)


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_new_promise_on_a_part_takes_a_device_from_best_effort(is_elastic):
    policy = make_live_policy("springtide")
    best = runs(job("best", workers=(1, 2) if is_elastic else (2, 2), elastic=is_elastic, **SLOW), 2)
    held = {"best": (["n/0", "n/1"], None)}
    plan = decide(policy, [best, due(300.0)], held=held, nodes=TWO)
    assert places(plan)["due"] == ["n/1"]
    assert plan.admitted == {"due": pytest.approx(260.0)}
    assert plan.reasons["best"] == "'due' needs a part of one of its devices"
    # One that cannot be resized has to stop first.
    assert places(plan).get("best", []) == (["n/0"] if is_elastic else [])
    # As long as the device is not free nothing changes, and then the job has it.
    admitted = with_fields(due(300.0), admitted_at_s=10.0, promised_finish_s=260.0)
    again = decide(policy, [best, admitted], held=held, nodes=TWO, memory=plan.memory, now_s=11.0)
    assert places(again) == places(plan)
    assert again.reasons["best"] == plan.reasons["best"]
    free = {"best": (["n/0"], None)} if is_elastic else {}
    best = runs(best, 1) if is_elastic else with_fields(best, state=JobState.PENDING)
    later = decide(policy, [best, admitted], held=free, nodes=TWO, memory=again.memory, now_s=12.0)
    assert places(later)["due"] == ["n/1"] or not is_elastic
    assert not later.claims


def test_who_loses_all_of_its_devices_stops_before_it_goes_on_elsewhere():
    """A move waits for the devices that it goes to; the claim does not."""
    best, leaves = runs(job("best", **SLOW), 1), service("leaves", wanted=0, ready=1)
    held = {"best": (["n/0"], None), "leaves": (["n/1"], None)}
    newcomer = service("s", PART, min_replicas=1)
    plan = decide(make_live_policy("springtide"), [best], [leaves, newcomer], held, TWO)
    assert places(plan) == {"s": ["n/0"]}
    # Once it has stopped it has the other device.
    waits, held = with_fields(best, state=JobState.PENDING, num_replicas=0), {"s": (["n/0"], PART)}
    again = [replace(leaves, num_ready=0), replace(newcomer, num_ready=1)]
    later = decide(make_live_policy("springtide"), [waits], again, held, TWO, plan.memory, now_s=11.0)
    assert places(later) == {"best": ["n/1"], "s": ["n/0"]}


def test_no_more_is_taken_than_the_promise_needs():
    wide = {**SLOW, "profile_steps_per_s": {1: 10.0, 2: 19.0, 4: 36.0}}
    best, held = runs(job("best", workers=(1, 4), **wide), 4), {"best": ([f"n/{at}" for at in range(4)], None)}
    for deadline_s, num_due, num_best in ((300.0, 1, 3), (150.0, 2, 2), (100.0, 0, 4)):
        # What would be late even so takes nothing.
        plan = decide(make_live_policy("springtide"), [best, due(deadline_s)], held=held, nodes=[make_node("n", 4)])
        assert (len(places(plan).get("due", [])), len(places(plan)["best"])) == (num_due, num_best)
        assert set(plan.rejected) == (set() if num_due else {"due"})


def test_a_new_promise_on_a_part_takes_nothing_from_a_promise_or_a_service():
    policy = make_live_policy("springtide")
    tight = job("tight", workers=(1, 2), goal=Goal(deadline_s=560.0), total_steps=10_000, profile_steps_per_s={2: 18.0})
    first = decide(policy, [tight], nodes=TWO, now_s=0.0)
    assert set(first.admitted) == {"tight"}
    tight = runs(tight, 2, admitted_at_s=0.0, promised_finish_s=556.0, step=180, progress_at_s=10.0)
    held = {"tight": (["n/0", "n/1"], None)}
    plan = decide(policy, [tight, due(300.0)], held=held, nodes=TWO, memory=first.memory)
    assert set(plan.rejected) == {"due"}
    assert not plan.claims.keys() & {"due"}
    assert plan.future["tight"][-1].end_s <= 560.0
    # More replicas are not taken from a service; a job without a promise beside it is.
    serves, best = service("s", wanted=2, ready=2), runs(job("best", **SLOW), 1)
    held = {"s": (["n/0", "n/1"], None)}
    full = decide(make_live_policy("springtide"), [due(300.0)], [serves], held, TWO)
    assert set(full.rejected) == {"due"}
    assert places(full)["s"] == ["n/0", "n/1"]
    held |= {"best": (["n/2"], None)}
    beside = decide(make_live_policy("springtide"), [best, due(300.0)], [serves], held, [make_node("n", 3)])
    assert places(beside) == {"s": ["n/0", "n/1"], "due": ["n/2"]}


def test_a_new_promise_on_a_part_takes_room_from_other_parts():
    policy, wide = make_live_policy("springtide"), Share(request=0.7, limit=0.7)
    other, nodes = runs(job("other", wide, **SLOW), 1), [make_node("n", 1)]
    held = {"other": (["n/0"], wide)}
    plan = decide(policy, [other, due(300.0)], held=held, nodes=nodes)
    assert places(plan) == {"due": ["n/0"]}
    assert plan.reasons["other"] == "makes room for 'due'"
    promised = with_fields(other, admitted_at_s=0.0)
    refused = decide(policy, [promised, due(300.0)], held=held, nodes=nodes)
    assert places(refused) == {"other": ["n/0"]}
    assert set(refused.rejected) == {"due"}


def test_a_promise_that_has_lost_its_device_takes_another():
    policy = make_live_policy("springtide")
    admitted = with_fields(due(300.0), admitted_at_s=1.0, promised_finish_s=251.0)
    best, held = runs(job("best", **SLOW), 1), {"best": (["n/0"], None)}
    plan = decide(policy, [best, admitted], held=held, nodes=[make_node("n", 1)])
    assert places(plan) == {"due": ["n/0"]}


# --- the number of workers --------------------------------------------------------------------------------------------


def test_a_job_on_parts_grows_into_what_is_left_and_gives_way_to_another():
    policy = make_live_policy("springtide")
    grows = runs(job("grows", PART, workers=(1, 3), total_steps=10_000, profile_steps_per_s={1: 10.0, 2: 18.0}), 1)
    alone = decide(policy, [grows], held={"grows": (["n/0"], PART)}, nodes=TWO)
    assert places(alone) == {"grows": ["n/0", "n/1"]}
    assert alone.reasons["grows"] == "0.4..0.8 of 2 devices, which nobody else shares"
    # A part of 0.7 leaves it no worker there, whichever came first.
    large, held = job("large", Share(request=0.7, limit=0.7)), {"grows": (["n/0", "n/1"], PART)}
    plan = decide(policy, [runs(grows, 2), large], held=held, nodes=TWO)
    assert places(plan) == {"grows": ["n/0"], "large": ["n/1"]}
    assert plan.reasons["grows"] == "'large' needs the part of one of its workers"
    for other in (job("whole"), job("whole", goal=Goal(deadline_s=300.0), **KNOWN)):
        plan = decide(policy, [runs(grows, 2), other], held=held, nodes=TWO)
        assert (len(places(plan)["grows"]), len(places(plan)["whole"])) == (1, 1)
        lost = places(plan)["whole"][0]
        assert plan.reasons["grows"] == f"'whole' needs {lost} as a whole"
    plan = decide(policy, [runs(grows, 2)], [service("s")], held, TWO)
    assert len(places(plan)["grows"]) == len(places(plan)["s"]) == 1


def test_a_job_on_parts_keeps_its_minimum_and_what_its_promise_needs():
    policy, held = make_live_policy("springtide"), {"grows": (["n/0", "n/1"], PART)}
    large = job("large", Share(request=0.7, limit=0.7))
    least = runs(job("grows", PART, workers=(2, 3), total_steps=10_000, profile_steps_per_s={1: 10.0, 2: 18.0}), 2)
    assert "large" not in decide(policy, [least, large], held=held, nodes=TWO).allocations
    for deadline_s, num_workers in ((150.0, 2), (300.0, 1)):
        promised = runs(due(deadline_s, "grows"), 2, admitted_at_s=0.0, promised_finish_s=deadline_s)
        plan = decide(policy, [promised, large], held=held, nodes=TWO)
        assert len(places(plan)["grows"]) == num_workers
        assert ("large" in plan.allocations) == (num_workers == 1)
        assert not plan.claims


# --- whole devices take from best effort on parts ---------------------------------------------------------------------


def test_a_promise_on_whole_devices_takes_them_from_best_effort_on_parts():
    policy = make_live_policy("springtide")
    due_whole = {"total_steps": 1000, "profile_steps_per_s": {1: 10.0, 2: 20.0}, "goal": Goal(deadline_s=80.0)}
    whole = job("whole", workers=(1, 2), **due_whole)
    first, last = (runs(job(name, PART, **SLOW), 1) for name in ("first", "last"))
    held = {"first": (["n/0"], PART), "last": (["n/1"], PART)}
    # It needs both: with one it is late.
    plan = decide(policy, [first, last, whole], held=held, nodes=TWO)
    assert places(plan) == {"whole": ["n/0", "n/1"]}
    assert set(plan.admitted) == {"whole"}
    assert plan.reasons["last"] == "'whole' needs n/1 as a whole"
    # As long as they have not left, nothing changes.
    promised = with_fields(whole, admitted_at_s=10.0, promised_finish_s=plan.admitted["whole"])
    again = decide(policy, [first, last, promised], held=held, nodes=TWO, memory=plan.memory, now_s=11.0)
    assert places(again) == places(plan)
    assert not again.claims
    # One is enough: the job that came last makes room.
    easy = job("whole", **{**due_whole, "goal": Goal(deadline_s=200.0)})
    plan = decide(policy, [first, last, easy], held=held, nodes=TWO)
    assert places(plan) == {"first": ["n/0"], "whole": ["n/1"]}


def test_a_replica_on_a_whole_device_takes_it_from_best_effort_and_nothing_else_does():
    policy, held = make_live_policy("springtide"), {"best": (["n/0"], PART)}
    best, one = runs(job("best", PART, **SLOW), 1), [make_node("n", 1)]
    plan = decide(policy, [best], [service("s")], held, one)
    assert places(plan) == {"s": ["n/0"]}
    assert plan.reasons["best"] == "'s' needs n/0 as a whole"
    assert places(decide(policy, [best, job("other")], [], held, one)) == {"best": ["n/0"]}
    soft = job("soft", goal=Goal(deadline_s=300.0, is_soft=True), **KNOWN)
    assert places(decide(policy, [best, soft], [], held, one)) == {"best": ["n/0"]}
    promised = runs(due(300.0, "kept"), 1, admitted_at_s=0.0, promised_finish_s=260.0)
    whole = job("whole", goal=Goal(deadline_s=200.0), **KNOWN)
    plan = decide(policy, [promised, whole], [service("s")], {"kept": (["n/0"], PART)}, one)
    assert places(plan) == {"kept": ["n/0"]}
    assert set(plan.rejected) == {"whole"}


def test_what_an_ended_job_on_parts_leaves_is_no_loss_for_a_promise():
    whole = job("whole", workers=(1, 2), goal=Goal(deadline_s=80.0), total_steps=1000, profile_steps_per_s={2: 20.0})
    promised = with_fields(whole, admitted_at_s=10.0, promised_finish_s=70.0)
    plan = decide(make_live_policy("springtide"), [promised], [], {"ended": (["n/1"], PART)}, TWO)
    assert places(plan) == {"whole": ["n/0", "n/1"]}
    assert not plan.claims


@pytest.mark.parametrize(
    ("num_held", "goal", "num_left"), [(3, Goal(), 1), (1, Goal(), 1), (3, Goal(deadline_s=90.0), 3)]
)
def test_best_effort_on_parts_takes_what_best_effort_holds_beyond_its_least(num_held, goal, num_left):
    policy, large = make_live_policy("springtide"), make_share(0.9)
    nodes, at = [make_node("n", num_held)], [f"n/{number}" for number in range(num_held)]
    known = {} if goal.is_hard else SLOW
    wide = runs(job("wide", workers=(1, 3), goal=goal, **known), num_held)
    parts = [job(name, large, workers=(1, 1)) for name in "abc"]
    plan = decide(policy, [wide, *parts], held={"wide": (at, None)}, nodes=nodes)
    assert len(places(plan)["wide"]) == num_left
    assert plan.allocations.keys() == {"wide", *"abc"[: num_held - num_left]}
    # While its device is not free nothing changes.
    again = decide(policy, [wide, *parts], held={"wide": (at, None)}, nodes=nodes, memory=plan.memory, now_s=11.0)
    assert places(again) == places(plan)


def test_a_part_of_best_effort_that_cannot_be_resized_stops_as_a_whole_for_a_stronger_claim():
    fixed = runs(job("best", PART, workers=(1, 2), elastic=False, **SLOW), 2)
    due_whole = job("whole", goal=Goal(deadline_s=900.0), submitted_at_s=5.0, **KNOWN)
    plan = decide(make_policy("dilu/elastic"), [fixed, due_whole], held={"best": (["n/0", "n/1"], PART)}, nodes=TWO)
    assert list(plan.allocations) == ["whole"]
    assert plan.reasons["best"] == "'whole' needs n/0 as a whole"


def test_what_best_effort_is_leaving_for_a_stronger_claim_stays_the_same_device():
    first, due_whole = runs(job("first", PART, **SLOW), 1), job("whole", goal=Goal(deadline_s=900.0), **KNOWN)
    held = {"first": (["n/0"], PART), "other": (["n/1"], HALF)}
    other = runs(job("other", HALF, submitted_at_s=1.0, **SLOW), 1)
    policy = make_policy("dilu/elastic")
    plan = decide(policy, [first, other, due_whole], held=held, nodes=TWO)
    assert places(plan) == {"first": ["n/0"], "whole": ["n/1"]}
    # One more comes that is beside the first, and of the later ones room is asked first.
    late = runs(job("late", PART, submitted_at_s=9.0, **SLOW), 1)
    beside = {**held, "late": (["n/0"], PART)}
    again = decide(policy, [first, other, due_whole, late], held=beside, nodes=TWO, memory=plan.memory, now_s=11.0)
    assert places(again) == {"first": ["n/0"], "whole": ["n/1"], "late": ["n/0"]}


def test_who_makes_room_stops_as_a_whole_and_what_is_not_used_it_keeps():
    policy, nodes = make_live_policy("springtide"), [make_node("n", 3)]
    pair = runs(job("pair", PART, workers=(2, 2), elastic=False, **SLOW), 2)
    alone = runs(job("alone", PART, **SLOW), 1)
    held = {"pair": (["n/0", "n/1"], PART), "alone": (["n/2"], PART)}
    plan = decide(policy, [pair, alone], [service("s")], held, nodes)
    assert places(plan) == {"pair": ["n/0", "n/1"], "s": ["n/2"]}
    plan = decide(policy, [alone, pair], [service("s")], held, nodes)
    assert places(plan)["alone"] == ["n/2"]
    assert "pair" not in plan.allocations
    assert len(places(plan)["s"]) == 1


def test_growth_has_to_be_worth_its_changes():
    policy, held = make_live_policy("springtide"), {"grows": (["n/0"], PART)}
    for steps, num_workers in ((10_000, 2), (30, 1)):
        grows = runs(job("grows", PART, workers=(1, 2), total_steps=steps, profile_steps_per_s={1: 10.0, 2: 18.0}), 1)
        snapshot = Snapshot(
            now_s=10.0,
            cluster=Topology(nodes=tuple(TWO)),
            jobs=(grows,),
            allocations={"grows": PoolAllocation(device_ids=("n/0",), share=PART)},
            overheads=Overheads(change_s=5.0),
        )
        assert policy.decide(snapshot).allocations["grows"].num_devices == num_workers
    # Beside another it would be slower on both than it is on its own.
    wide, full = Share(request=0.3, limit=1.0), Share(request=0.6, limit=0.6)
    grows = runs(job("grows", wide, workers=(1, 2), total_steps=10_000, profile_steps_per_s={1: 10.0, 2: 18.0}), 1)
    other = runs(job("other", full, total_steps=10_000), 1)
    held = {"grows": (["n/0"], wide), "other": (["n/1"], full)}
    assert places(decide(policy, [grows, other], held=held, nodes=TWO))["grows"] == ["n/0"]
    held = {"grows": (["n/0", "n/1"], wide), "other": (["n/1"], full)}
    plan = decide(policy, [runs(grows, 2), other], held=held, nodes=TWO)
    assert places(plan)["grows"] == ["n/0"]
    assert plan.reasons["grows"] == "it is faster without its worker on n/1, where others are"


@st.composite
def scenes(draw: st.DrawFn):
    """Jobs on whole devices and on parts, with and without deadlines, and services of both kinds that wake."""
    num_devices = draw(st.sampled_from((2, 3, 4, 8)))
    arrivals, now_s = [], 1.0
    for index in range(draw(st.integers(1, 8))):
        now_s += draw(st.sampled_from((0.0, 5.0, 60.0)))
        steps, most = draw(st.integers(20, 800)), min(num_devices, draw(st.sampled_from((1, 2, 4))))
        share = draw(st.sampled_from((None, make_share(0.3), make_share(0.4, 0.4), make_share(0.7))))
        factor, speed = draw(st.sampled_from((None, 1.02, 1.3, 3.0))), 1.0 if share is None else share.request
        deadline_s = None if factor is None else now_s + 10.0 + factor * steps / most / speed
        known = job(
            f"job-{index}",
            share,
            workers=(1, most),
            num_virtual_shards=64,
            total_steps=steps,
            profile_steps_per_s={1: 1.0, 2: 2.0, 4: 4.0},
            goal=Goal(deadline_s=deadline_s),
        )
        arrivals.append((now_s, known.job))
    events: list[tuple[float, Event]] = []
    for index in range(draw(st.integers(0, 3))):
        share = draw(st.sampled_from((None, make_share(0.3))))
        known = replace(
            service(f"s-{index}", share).service, grace_s=5.0, idle_s=5.0, max_replicas=draw(st.integers(1, 3))
        )
        events.append((0.0, ServiceDeployed(service=known)))
        at_s = 0.0
        for queued in draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)):
            at_s += draw(st.sampled_from((3.0, 20.0, 150.0)))
            events.append((at_s, load(known, queued)))
        events.append((at_s + 5.0, load(known, 0)))
    return arrivals, events, num_devices


def load(known, queued):
    return LoadObserved(service_id=known.service_id, arrivals_per_s=0.1, in_flight=0, queued=queued, idle_s=0.0)


def check_scene(scene):
    """The executor checks each step: no device holds more than there is, no promise is broken or given up for nothing,
    and what is said of time is true."""
    arrivals, events, num_devices = scene
    play(
        make_live_policy("springtide"),
        arrivals,
        [make_node("n", num_devices)],
        rule=overhead_rule("elasticflow", num_devices),
        speeds=ProfiledSpeeds(devices_per_node=num_devices),
        timed_events=sorted(events, key=lambda item: item[0]),
    )


def test_two_parts_that_would_share_a_device_of_a_promise_both_wait():
    """Barred is also the one that would open the device in place of the first."""
    due_job = job(
        "due", workers=(1, 2), goal=Goal(deadline_s=21.2), total_steps=20, profile_steps_per_s={1: 1.0, 2: 2.0}
    )
    sleepers = [replace(service(f"s-{at}", make_share(0.3)).service, grace_s=5.0, idle_s=5.0) for at in range(2)]
    events = [(0.0, ServiceDeployed(service=known)) for known in sleepers]
    events += [(3.0, load(known, 1)) for known in sleepers] + [(8.0, load(known, 0)) for known in sleepers]
    check_scene(([(1.0, due_job.job)], events, 2))


def test_a_part_without_a_deadline_takes_no_device_that_a_promise_starts_on_later():
    """The promise waits in both plans, and was not seen to be given up in one of them."""
    whole = {"total_steps": 20, "profile_steps_per_s": {1: 1.0, 2: 2.0, 4: 4.0}, "num_virtual_shards": 64}
    soon = [job(f"job-{at}", None, goal=Goal(deadline_s=31.4), **whole).job for at in range(2)]
    part_job = job("job-2", make_share(0.3), workers=(1, 2), **whole).job
    others = [job(f"job-{at}", None, **whole).job for at in range(3, 7)]
    later = job("job-7", None, goal=Goal(deadline_s=71.0), **whole).job
    check_scene(([(1.0, known) for known in (*soon, part_job, *others, later)], [], 2))


def test_a_part_takes_no_device_of_a_promise_that_could_not_pay_for_two_changes():
    """The job gives one device up at once and gets another when that is free. Priced as one change, the part got the
    device in one decision and gave it back in the next, without end."""
    whole = {"profile_steps_per_s": {1: 1.0, 2: 2.0, 4: 4.0}, "num_virtual_shards": 64}
    due_job = job("due", workers=(1, 2), total_steps=592, goal=Goal(deadline_s=312.92), **whole).job
    later = job("later", total_steps=692, goal=Goal(deadline_s=2087.0), **whole).job
    urgent = job("urgent", total_steps=20, goal=Goal(deadline_s=91.4), **whole).job
    weak = job("weak", make_share(0.7), workers=(1, 3), total_steps=237, **whole).job
    part_job = job("part", make_share(0.4, 0.4), workers=(1, 3), total_steps=588, goal=Goal(deadline_s=1601.0), **whole)
    arrivals = [(1.0, due_job), (1.0, later), (61.0, urgent), (121.0, weak), (121.0, part_job.job)]
    check_scene((arrivals, [], 3))


def test_promised_parts_that_start_together_leave_each_other_what_their_deadlines_need():
    """The first one got all devices once the job without a promise had left them, and the second none."""
    whole = {"profile_steps_per_s": {1: 1.0, 2: 2.0, 4: 4.0}, "num_virtual_shards": 64}
    weak = job("weak", make_share(0.7), workers=(1, 4), total_steps=321, **whole).job
    patient = job(
        "patient", make_share(0.4, 0.4), workers=(1, 4), total_steps=446, goal=Goal(deadline_s=967.0), **whole
    )
    urgent = job("urgent", make_share(0.7), workers=(1, 4), total_steps=248, goal=Goal(deadline_s=396.0), **whole)
    check_scene(([(61.0, weak), (121.0, patient.job), (121.0, urgent.job)], [], 4))


def test_a_promised_part_that_may_not_open_all_it_could_use_opens_what_its_deadline_needs():
    """It took two devices, of which a service would have lacked one, and was given none instead, in turns."""
    whole = {"profile_steps_per_s": {1: 1.0, 2: 2.0, 4: 4.0}, "num_virtual_shards": 64}
    first = job("first", workers=(1, 1), total_steps=144, goal=Goal(deadline_s=203.2), **whole).job
    second = job("second", workers=(1, 1), total_steps=361, goal=Goal(deadline_s=545.3), **whole).job
    part_job = job("part", make_share(0.3), workers=(1, 2), total_steps=283, goal=Goal(deadline_s=1551.0), **whole).job
    weak = job("weak", make_share(0.4, 0.4), workers=(1, 1), total_steps=800, **whole).job
    awake = replace(service("s", None).service, grace_s=5.0, idle_s=5.0)
    events = [(0.0, ServiceDeployed(service=awake)), *((at_s, load(awake, 5)) for at_s in (3.0, 156.0, 306.0))]
    check_scene(([(6.0, first), (66.0, second), (126.0, part_job), (126.0, weak)], events, 3))


def test_promised_parts_start_where_they_were_planned_together():
    """Once the weak job had left, the first of them was put where the second one needs to be."""
    whole = {"profile_steps_per_s": {1: 1.0, 2: 2.0, 4: 4.0}, "num_virtual_shards": 64}
    first = job("first", make_share(0.4, 0.4), workers=(1, 1), total_steps=200, goal=Goal(deadline_s=1096.0), **whole)
    weak = job("weak", make_share(0.7), workers=(1, 1), total_steps=442, **whole).job
    small = job("small", make_share(0.3), workers=(1, 1), total_steps=694, goal=Goal(deadline_s=7086.0), **whole).job
    wide = job("wide", make_share(0.4, 0.4), workers=(1, 2), total_steps=504, goal=Goal(deadline_s=965.0), **whole).job
    check_scene(([(6.0, first.job), (16.0, weak), (136.0, small), (136.0, wide)], [], 2))


def test_parts_that_have_grown_give_way_to_a_promise_that_starts_later():
    """The promise waits in both plans, given up in one and in time in the other: the two were taken for the same."""
    whole = {"profile_steps_per_s": {1: 1.0, 2: 2.0, 4: 4.0}, "num_virtual_shards": 64}

    def due_at(name, share, most, steps, deadline_s):
        return job(name, share, workers=(1, most), total_steps=steps, goal=Goal(deadline_s=deadline_s), **whole).job

    arrivals = [
        (11.0, due_at("later", None, 2, 287, 451.5)),
        (16.0, due_at("sooner", None, 3, 335, 361.0)),
        (21.0, due_at("short", None, 1, 94, 126.88)),
        (86.0, due_at("part", make_share(0.7), 2, 251, 633.857)),
    ]
    asleep = replace(service("s", None).service, grace_s=5.0, idle_s=5.0, max_replicas=2)
    events = [(0.0, ServiceDeployed(service=asleep)), (20.0, load(asleep, 3)), (45.0, load(asleep, 0))]
    check_scene((arrivals, events, 3))


def test_a_promise_in_the_place_of_another_part_opens_no_device():
    """A decision came to no end: what the one gave up counted as opened by the other, although that was barred."""
    whole = {"workers": (1, 1), "total_steps": 20, "profile_steps_per_s": {1: 1.0}}
    first = job("first", make_share(0.7), **whole).job
    others = [job(f"whole-{at}", None, **whole).job for at in range(2)]
    urgent = job("urgent", None, goal=Goal(deadline_s=31.4), **whole).job
    part_job = job("part", make_share(0.4, 0.4), goal=Goal(deadline_s=67.0), **whole).job
    arrivals = [(1.0, known) for known in (first, *others, urgent)]
    check_scene(([*arrivals, (6.0, part_job)], [], 2))


@pytest.mark.slow
@given(scene=scenes())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_parts_and_whole_devices_break_no_promise(scene):
    check_scene(scene)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(scene=scenes())
@settings(max_examples=part(600), deadline=None, suppress_health_check=list(HealthCheck))
def test_parts_and_whole_devices_break_no_promise_for_long(scene):
    check_scene(scene)


@st.composite
def newcomers(draw: st.DrawFn):
    """What holds the devices of a cluster, weak and strong, and a job on a part that comes with a deadline."""
    nodes = [make_node(f"n{at}", 2) for at in range(draw(st.integers(1, 3)))]
    devices = [device.device_id for node in nodes for device in node.devices]
    weak, strong, held = [], [], {}
    for index in range(draw(st.integers(0, 4))):
        share = draw(st.sampled_from((None, make_share(0.3), make_share(0.7))))
        size = draw(st.integers(1, 2))
        if len(devices) < size:
            break
        name, mine = f"job-{index}", [devices.pop(draw(st.integers(0, len(devices) - 1))) for _ in range(size)]
        is_elastic = draw(st.booleans())
        known = job(name, share, workers=(1 if is_elastic else size, size), elastic=is_elastic, **SLOW)
        held[name] = (mine, share)
        weak.append(runs(known, size))
    if devices and draw(st.booleans()):
        strong.append(service("s", wanted=1, ready=1))
        held["s"] = ([devices.pop()], None)
    return nodes, weak, strong, held, due(draw(st.sampled_from((140.0, 200.0, 300.0))))


@pytest.mark.slow
@given(drawn=newcomers())
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_new_promise_on_a_part_gets_what_it_would_get_without_weaker_claims(drawn):
    nodes, weak, services, held, newcomer = drawn
    policy = make_live_policy("springtide")
    plan = decide(policy, [*weak, newcomer], services, held, nodes)
    strong = {view.service.service_id: held[view.service.service_id] for view in services}
    alone = decide(policy, [newcomer], services, strong, nodes)
    assert set(plan.admitted) == set(alone.admitted)
    assert plan.admitted.get("due", 0.0) <= newcomer.job.goal.deadline_s
    for view in services:
        given_devices: PoolAllocation = plan.allocations[view.service.service_id]
        assert given_devices.num_devices == view.num_ready
    for view in weak:
        before, after = held[view.job.job_id][0], places(plan).get(view.job.job_id, [])
        assert len(after) >= len(before) or plan.reasons[view.job.job_id], "who loses a device is told why"


def test_a_device_that_a_job_stopped_to_leave_is_the_claimants_although_that_job_waits_now():
    policy = make_live_policy("springtide")
    first = job("first", workers=(1, 2), **SLOW)
    late = job("late", PART, submitted_at_s=5.0, **SLOW)
    plan = decide(policy, [runs(first, 2), late], held={"first": (["n/0", "n/1"], None)}, nodes=TWO)
    (claimed,) = places(plan)["late"]
    stopped = with_fields(first, state=JobState.PENDING)
    again = decide(policy, [stopped, late], nodes=TWO, memory=plan.memory, now_s=11.0)
    assert places(again)["late"] == [claimed]
    assert claimed not in places(again)["first"]
