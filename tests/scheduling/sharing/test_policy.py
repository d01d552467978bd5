"""Parts of devices beside whole ones: who is packed where, what the inner policy is shown, what is claimed of it."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.sharing_views import HALF, SMALL, decide, job, places, service
from springtide.core.decision import Plan, PoolAllocation, Snapshot, TimeClaim
from springtide.core.functions import FunctionPrices, FunctionService
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Goal, JobState
from springtide.scheduling.registry import make_live_policy, make_policy
from springtide.scheduling.sharing.policy import Sharing


@pytest.fixture(params=[False, True], ids=["in memory", "from the journal"])
def plain(request):
    return lambda memory: msgspec.json.decode(msgspec.json.encode(memory)) if request.param else memory


@pytest.fixture
def policy():
    return make_policy("dilu/fifo")


def test_sharers_are_packed_on_one_device_and_whole_ones_get_the_others(policy):
    plan = decide(policy, [job("t", HALF), job("w", workers=(1, 4))], [service("a", SMALL)])
    assert plan.allocations["a"].device_ids == plan.allocations["t"].device_ids
    assert (plan.allocations["a"].share, plan.allocations["t"].share) == (SMALL, HALF)
    assert plan.allocations["w"].share is None
    assert plan.allocations["w"].num_devices == 3
    assert "beside 'a'" in plan.reasons["t"]


def test_where_nobody_has_a_share_it_is_the_inner_policy():
    class Inner:
        def decide(self, snapshot):
            self.seen = snapshot
            self.plan = Plan(memory={"mine": 1})
            return self.plan

    inner = Inner()
    sharing = Sharing(inner=inner)
    snapshot = Snapshot(now_s=1.0, cluster=Topology(nodes=(make_node("n", 2),)), jobs=(job("w"),), memory=7)
    assert sharing.decide(snapshot) is inner.plan
    assert inner.seen is snapshot


@pytest.mark.parametrize(
    ("goal", "claim", "num_sharers", "num_plans"),
    [
        (Goal(deadline_s=500.0), None, 12, 2),
        (Goal(deadline_s=500.0), None, 4, 4),
        (Goal(deadline_s=500.0), TimeClaim(code="given_up"), 4, 4),
        # More devices would not keep its deadline.
        (Goal(deadline_s=500.0), TimeClaim(code="given_up", is_certain=True), 4, 1),
        # No best effort gives devices up for it.
        (Goal(), None, 12, 1),
    ],
)
def test_a_search_for_devices_in_vain_ends_early(goal, claim, num_sharers, num_plans):
    class Inner:
        num_plans = 0

        def decide(self, snapshot):
            self.num_plans += 1
            return Plan(claims={} if claim is None else {"w": claim})

    inner, large = Inner(), Share(request=0.9, limit=1.0)
    jobs = [with_fields(job(f"t{n}", large), state=JobState.RUNNING, num_replicas=1) for n in range(num_sharers)]
    held = {f"t{n}": ([f"n/{n}"], large) for n in range(num_sharers)}
    wide = job("w", workers=(1, 4), goal=goal)
    nodes = (make_node("n", num_sharers),)
    plan = decide(Sharing(inner=inner), [*jobs, wide], (), held, nodes)
    assert len(plan.allocations) == num_sharers
    assert inner.num_plans == num_plans


# That a job is refused is final: all counts are tried before.
@pytest.mark.parametrize(("refused", "num_plans"), [((), 3), (("x",), 6)])
def test_where_all_devices_help_one_at_the_cost_of_another_one_device_alone_is_tried(refused, num_plans):
    class Inner:
        num_plans = 0

        def decide(self, snapshot):
            self.num_plans += 1
            free = snapshot.cluster.device_ids()
            given = {"w" if len(free) == 1 else "v": PoolAllocation(device_ids=free)}
            return Plan(allocations=given, rejected=dict.fromkeys(refused, "too late"))

    inner, large = Inner(), Share(request=0.9, limit=1.0)
    jobs = [with_fields(job(f"t{n}", large), state=JobState.RUNNING, num_replicas=1) for n in range(12)]
    held = {f"t{n}": ([f"n/{n}"], large) for n in range(12)}
    waiting = [job(who, workers=(1, 4), goal=Goal(deadline_s=500.0)) for who in ("w", "v", *refused)]
    plan = decide(Sharing(inner=inner), [*jobs, *waiting], (), held, (make_node("n", 13),))
    assert places(plan) == {"w": ["n/12"]} | {f"t{n}": [f"n/{n}"] for n in range(12)}
    assert inner.num_plans == num_plans


def test_what_was_asked_in_vain_is_asked_again_seconds_later_or_for_another(plain):
    class Inner:
        num_plans = 0

        def decide(self, snapshot):
            self.num_plans += 1
            return Plan()

    inner, large = Inner(), Share(request=0.9, limit=1.0)
    jobs = [with_fields(job(f"t{n}", large), state=JobState.RUNNING, num_replicas=1) for n in range(12)]
    held = {f"t{n}": ([f"n/{n}"], large) for n in range(12)}
    wide = job("w", workers=(1, 4), goal=Goal(deadline_s=500.0))
    sharing, found, memory = Sharing(inner=inner), [], None
    for now_s, waiting in ((0.0, [wide]), (5.0, [wide]), (6.0, [wide, job("v", goal=wide.job.goal)]), (20.0, [wide])):
        inner.num_plans = 0
        plan = decide(sharing, [*jobs, *waiting], (), held, (make_node("n", 12),), now_s=now_s, memory=plain(memory))
        memory = plan.memory
        found.append(inner.num_plans)
    assert found == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("refused", "later", "num_plans", "num_held"),
    [
        # All, then one, two, four and eight: the inner policy makes a new plan each time, and one that was asked for.
        ((), (), [1, 2, 2, 2, 2, 2], [12, 12, 12, 12, 12, 8]),
        # A refusal is final: no decision is left.
        (("x",), (), [6], [8]),
        # A first replica waits for the next decision, and no longer.
        ((), (service("s"),), [1, 6], [12, 8]),
    ],
)
def test_a_search_in_a_large_cluster_goes_on_in_the_next_decisions(plain, refused, later, num_plans, num_held):
    class Inner:
        num_plans = 0

        def decide(self, snapshot):
            self.num_plans += 1
            free = snapshot.cluster.device_ids()
            given = {"w": PoolAllocation(device_ids=free[:4])} if len(free) >= 9 else {}
            return Plan(allocations=given, rejected={} if given else dict.fromkeys(refused, "too late"))

    inner, large = Inner(), Share(request=0.9, limit=1.0)
    jobs = [with_fields(job(f"t{n}", large), state=JobState.RUNNING, num_replicas=1) for n in range(12)]
    held = {f"t{n}": ([f"n/{n}"], large) for n in range(12)}
    waiting = [job(who, workers=(1, 4), goal=Goal(deadline_s=500.0)) for who in ("w", *refused)]
    sharing, memory = Sharing(inner=inner, devices_per_decision=13), None
    found, sharers = [], []
    for turn in range(len(num_plans)):
        inner.num_plans = 0
        plan = decide(sharing, [*jobs, *waiting], later, held, (make_node("n", 13),), now_s=turn / 8, memory=memory)
        memory = plain(plan.memory)
        found.append(inner.num_plans)
        sharers.append(sum(f"t{n}" in plan.allocations for n in range(12)))
        is_waiting = turn + 1 < len(num_plans) and sharers[-1] == 12
        assert (plan.revisit_at_s == turn / 8 + 0.1) == is_waiting
    assert (found, sharers) == (num_plans, num_held)


def test_what_others_left_stays_left_while_the_inner_policy_keeps_its_plan(plain):
    class Inner:
        num_plans = 0

        def decide(self, snapshot):
            self.num_plans += 1
            free = snapshot.cluster.device_ids()
            # It keeps its plan as long as it has the same devices.
            memory = snapshot.memory if snapshot.memory == {"free": list(free)} else {"free": list(free)}
            return Plan(allocations={"w": PoolAllocation(device_ids=free)} if free else {}, memory=memory)

    inner, large = Inner(), Share(request=0.9, limit=1.0)
    jobs = [*[job(f"t{n}", large) for n in range(3)], job("w", goal=Goal(deadline_s=500.0))]
    sharing, found, memory = Sharing(inner=inner), [], None
    for now_s in (0.0, 30.0, 95.0):
        inner.num_plans = 0
        plan = decide(sharing, jobs, nodes=(make_node("n", 1),), now_s=now_s, memory=plain(memory))
        assert places(plan) == {"w": ["n/0"]}
        memory = plan.memory
        found.append(inner.num_plans)
    assert found == [2, 1, 2]


def test_of_sharers_that_would_take_the_same_device_one_plan_beside_all_is_made():
    class Inner:
        num_plans = 0

        def decide(self, snapshot):
            self.num_plans += 1
            free = snapshot.cluster.device_ids()
            return Plan(allocations={"w": PoolAllocation(device_ids=free)} if free else {})

    inner, large = Inner(), Share(request=0.9, limit=1.0)
    jobs = [*[job(f"t{n}", large) for n in range(3)], job("w", goal=Goal(deadline_s=500.0))]
    plan = decide(Sharing(inner=inner), jobs, nodes=(make_node("n", 1),))
    assert places(plan) == {"w": ["n/0"]}
    assert inner.num_plans == 2, "beside a sharer, and beside none"


def test_who_holds_a_part_stays_where_it_is(policy):
    held = {"a": (["n/2"], SMALL), "t": (["n/2"], HALF)}
    plan = decide(policy, [job("t", HALF)], [service("a", SMALL, ready=1)], held)
    assert places(plan) == {"t": ["n/2"], "a": ["n/2"]}
    assert plan.reasons == {}


def test_a_share_that_has_grown_too_large_for_its_device_moves(policy):
    held = {"a": (["n/0"], SMALL), "b": (["n/0"], HALF)}
    larger = Share(request=0.7, limit=0.8)
    plan = decide(policy, (), [service("b", HALF, ready=1), service("a", larger, ready=1)], held)
    assert places(plan) == {"b": ["n/0"], "a": ["n/1"]}


def test_beside_a_share_that_has_grown_a_job_that_cannot_be_resized_leaves_all_of_its_devices(policy):
    pair = with_fields(job("pair", HALF, workers=(2, 2), elastic=False), state=JobState.RUNNING, num_replicas=2)
    grown = service("a", Share(request=0.7, limit=0.8), ready=1)
    plan = decide(policy, [pair], [grown], {"pair": (["n/0", "n/1"], HALF), "a": (["n/0"], SMALL)})
    assert places(plan) == {"a": ["n/0"]}
    assert plan.reasons["pair"] == "its devices have no room for it any more"


def test_replicas_of_one_service_sit_on_devices_of_their_own(policy):
    plan = decide(policy, (), [service("a", Share(request=0.1, limit=0.2), wanted=3)])
    assert len(set(plan.allocations["a"].device_ids)) == 3


def test_it_shrinks_where_a_device_is_emptied_by_it(policy):
    held = {"a": (["n/0", "n/1"], SMALL), "t": (["n/1"], HALF)}
    plan = decide(policy, [job("t", HALF)], [service("a", SMALL, wanted=1, ready=2)], held)
    assert places(plan) == {"t": ["n/1"], "a": ["n/1"]}


def test_what_waits_says_for_how_much_and_what_is_left(policy):
    held = {"w": (["n/0"], None), "t": (["n/1"], HALF)}
    nodes = [make_node("n", 2)]
    waiting = [job("w"), job("t", HALF), job("u", Share(request=0.6, limit=0.8))]
    plan = decide(policy, waiting, (), held, nodes)
    assert "u" not in plan.allocations
    assert (
        plan.reasons["u"] == "waits for room: a worker needs 0.6 of a device, and the most that is left of one is 0.5"
    )


def test_a_first_replica_claims_a_device_of_an_elastic_job_until_it_is_free():
    policy = make_policy("dilu/elastic")
    nodes = [make_node("n", 2)]
    trains = job("w", workers=(1, 2))
    held = {"w": (["n/0", "n/1"], None)}
    plan = decide(policy, [trains], [service("a", SMALL)], held, nodes)
    assert places(plan) == {"w": ["n/0"], "a": ["n/1"]}
    assert plan.memory == {"claimed": {"n/1": "a"}, "inner": None}
    assert plan.reasons["w"] == "'a' needs a part of one of its devices"
    # Still held: the claim stands. Free: it is a device of sharers like any other.
    again = decide(policy, [trains], [service("a", SMALL)], held, nodes, plan.memory)
    assert places(again) == places(plan)
    free = decide(policy, [trains], [service("a", SMALL)], {"w": (["n/0"], None)}, nodes, plan.memory)
    assert places(free) == places(plan)
    assert free.memory is None


def test_more_replicas_than_the_first_claim_nothing():
    nodes = [make_node("n", 3)]
    held = {"w": (["n/0", "n/1"], None), "a": (["n/2"], SMALL)}
    plan = decide(
        make_policy("dilu/elastic"), [job("w", workers=(1, 2))], [service("a", SMALL, wanted=3, ready=1)], held, nodes
    )
    assert places(plan) == {"w": ["n/0", "n/1"], "a": ["n/2"]}
    assert plan.reasons["a"] == (
        "waits for room: 2 replicas need 0.3 of a device, and none of the 3 is open to it: "
        "others hold them as a whole, or it is on them already"
    )


def test_what_jobs_may_use_beyond_their_requests_gives_way_and_comes_back(policy):
    nodes = [make_node("n", 1)]
    wide, other = Share(request=0.3, limit=0.9), Share(request=0.2, limit=0.5)
    alone = decide(policy, [job("t", wide)], (), nodes=nodes)
    assert alone.allocations["t"].share == wide
    jobs = [job("t", wide), job("u", other)]
    held = {"t": (["n/0"], wide)}
    both = decide(policy, jobs, (), held, nodes)
    assert (both.allocations["t"].share, both.allocations["u"].share) == (wide, other)
    # A service's limit is a wish with an objective behind it: theirs shrink in equal proportion, never below requests.
    held = {"t": (["n/0"], wide), "u": (["n/0"], other)}
    plan = decide(policy, jobs, [service("a", Share(request=0.4, limit=0.8))], held, nodes)
    assert places(plan) == {"t": ["n/0"], "u": ["n/0"], "a": ["n/0"]}
    assert plan.allocations["a"].share == Share(request=0.4, limit=0.8)
    assert plan.allocations["t"].share == Share(request=0.3, limit=0.433)
    assert plan.allocations["u"].share == Share(request=0.2, limit=0.266)
    held = {who: (["n/0"], given.share) for who, given in plan.allocations.items()}
    again = decide(policy, jobs, [service("a", Share(request=0.4, limit=0.8), ready=1)], held, nodes)
    assert {who: given.share for who, given in again.allocations.items()} == {
        who: given.share for who, given in plan.allocations.items()
    }
    left = decide(policy, jobs, (), {who: held[who] for who in ("t", "u")}, nodes)
    assert left.allocations["t"].share == wide


def test_a_limit_that_services_leave_no_room_for_is_named(policy):
    nodes = [make_node("n", 1)]
    held = {"b": (["n/0"], Share(request=0.4, limit=0.9))}
    services = [service("b", Share(request=0.4, limit=0.9), ready=1), service("a", Share(request=0.3, limit=0.8))]
    plan = decide(policy, (), services, held, nodes)
    assert plan.reasons["a"] == (
        "waits for room: a replica needs 0.3 of a device and up to 0.8, "
        "and on n/0 there is a limit of 0.6 left: a lower one fits"
    )


def test_a_first_replica_goes_before_the_last_job_that_came_and_no_promise_is_broken(policy):
    nodes = [make_node("n", 1)]
    held = {"t": (["n/0"], HALF), "u": (["n/0"], SMALL)}
    jobs = [job("t", HALF), job("u", SMALL)]
    plan = decide(policy, jobs, [service("a", Share(request=0.4, limit=0.6))], held, nodes)
    assert places(plan) == {"t": ["n/0"], "a": ["n/0"]}
    assert plan.reasons["u"] == "makes room for 'a'"
    promised = [jobs[0], with_fields(jobs[1], admitted_at_s=1.0)]
    plan = decide(policy, promised, [service("a", Share(request=0.4, limit=0.6))], held, nodes)
    assert places(plan) == {"u": ["n/0"], "a": ["n/0"]}
    # What a service would like beyond its first replica displaces nobody.
    nodes = [make_node("n", 2)]
    held = {"t": (["n/0"], HALF), "u": (["n/0"], SMALL), "a": (["n/1"], Share(request=0.4, limit=0.6))}
    plan = decide(policy, jobs, [service("a", Share(request=0.4, limit=0.6), wanted=2, ready=1)], held, nodes)
    assert places(plan)["a"] == ["n/1"]
    assert places(plan)["u"] == ["n/0"]


def test_a_job_with_a_share_opens_no_device_before_one_that_came_earlier():
    held = {"w": (["n/0"], None)}
    nodes = [make_node("n", 2)]
    early = job("early", workers=(2, 2), submitted_at_s=1.0)
    late = job("late", SMALL, submitted_at_s=2.0)
    plan = decide(make_policy("dilu/fifo"), [job("w"), early, late], (), held, nodes)
    assert places(plan) == {"w": ["n/0"]}
    assert "waits for room" in plan.reasons["late"]


def test_a_job_that_may_open_no_device_takes_the_part_of_a_worker_where_others_go_on():
    part = Share(request=0.4, limit=0.4)
    running = [job(name, part, workers=(1, 2), profile_steps_per_s={1: 1.0, 2: 1.9}) for name in ("a", "b")]
    beside = [job(name, part) for name in ("e", "f")]
    held = {"a": (["n/0", "n/1"], part), "b": (["n/2", "n/1"], part), "e": (["n/0"], part), "f": (["n/2"], part)}
    early = job("early", workers=(3, 3), submitted_at_s=1.0)
    late = [job(name, part, submitted_at_s=2.0) for name in ("c", "d")]
    plan = decide(make_policy("dilu/fifo"), [*running, *beside, early, *late], (), held, [make_node("n", 4)])
    # Both parts of n/1 would leave it idle, for the two to wait for parts elsewhere the next time.
    where = places(plan)
    goes_on = {device for who, (devices, _) in held.items() for device in devices if device in where[who]}
    assert where["c"] == ["n/1"]
    assert goes_on.issuperset([*where["c"], *where["d"]])


def test_workers_of_a_job_are_on_one_node_where_that_is_possible(policy):
    nodes = [make_node("m", 2), make_node("n", 2)]
    held = {"w": (["m/0"], None)}
    plan = decide(policy, [job("w"), job("t", HALF, workers=(2, 2))], (), held, nodes)
    assert places(plan)["t"] == ["n/0", "n/1"]
    fewer = decide(policy, [job("w"), job("t", HALF, workers=(1, 3))], (), held, nodes)
    assert len(fewer.allocations["t"].device_ids) == 3


def test_a_deadline_is_promised_by_what_it_can_count_on(policy):
    known = {"total_steps": 100, "profile_steps_per_s": {1: 10.0}}
    plan = decide(policy, [job("t", HALF, goal=Goal(deadline_s=40.0), **known)])
    assert plan.admitted == {"t": 30.0}
    refused = decide(policy, [job("t", HALF, goal=Goal(deadline_s=20.0), **known)])
    assert "takes 20 s" in refused.rejected["t"].reason
    assert "--deadline 20s" in refused.rejected["t"].alternatives
    assert decide(policy, [job("t", HALF, goal=Goal(deadline_s=20.0, is_soft=True), **known)]).allocations


def test_a_promise_on_shares_is_checked_where_its_workers_would_be(policy):
    known = {"total_steps": 1000, "profile_steps_per_s": {1: 10.0, 2: 18.0, 4: 32.0}, "num_virtual_shards": 4}
    part = Share(request=0.4, limit=0.9)
    four = job("t", part, workers=(1, 4), goal=Goal(deadline_s=110.0), **known)
    one = [make_node("n", 1)]
    refused = decide(policy, [four], nodes=one)
    # A device holds one worker of a job, so this one has 0.4 of it for all of its 1,000 steps.
    assert not refused.admitted
    assert "it takes 250 s" in refused.rejected["t"].reason
    promised = decide(policy, [four], nodes=[make_node("n", 4)])
    assert promised.admitted["t"] == pytest.approx(10.0 + 1000 / (32.0 * 0.4))
    # Whoever holds the only device as a whole leaves nothing to count on.
    rigid = job("rigid", elastic=False, total_steps=10**6, profile_steps_per_s={1: 10.0})
    none = decide(policy, [rigid, four], held={"rigid": (["n/0"], None)}, nodes=one)
    assert none.rejected["t"].reason.startswith("its deadline cannot be promised: a worker needs 0.4 of a device")
    others = job("other", Share(request=0.7, limit=0.7))
    full = decide(policy, [others, four], held={"other": (["n/0"], others.job.share)}, nodes=one)
    assert not full.admitted
    assert "the most that is left of one is 0.3" in full.rejected["t"].reason
    waits = with_fields(four, job=replace(four.job, goal=replace(four.job.goal, waits=True)))
    in_line = decide(policy, [others, waits], held={"other": (["n/0"], others.job.share)}, nodes=one)
    assert not in_line.admitted
    assert not in_line.rejected


def test_a_promised_sharer_keeps_its_place_from_a_share_that_is_made_larger(policy):
    promised = with_fields(
        job("t", HALF, goal=Goal(deadline_s=500.0), total_steps=10, profile_steps_per_s={1: 10.0}), admitted_at_s=1.0
    )
    larger = service("s", Share(request=0.6, limit=0.6), ready=1)
    held = {"t": (["n/0"], HALF), "s": (["n/0"], SMALL)}
    plan = decide(policy, [promised], [larger], held=held, nodes=[make_node("n", 1)])
    assert places(plan)["t"] == ["n/0"]
    assert "s" not in plan.allocations


def promised_on_both(policy, nodes, deadline_s, least=1):
    """A promised job that has run on both of two whole devices for ten seconds, what it holds, and the memory."""
    known = {"total_steps": 10_000, "profile_steps_per_s": {1: 10.0, 2: 18.0}, "num_virtual_shards": 4}
    whole = job("whole", workers=(least, 2), goal=Goal(deadline_s=deadline_s), **known)
    first = decide(policy, [whole], nodes=nodes, now_s=0.0)
    assert len(first.allocations["whole"].device_ids) == 2
    runs = with_fields(
        whole, state=JobState.RUNNING, admitted_at_s=0.0, step=180, progress_at_s=10.0, started_at_s=0.0, num_replicas=2
    )
    return runs, {"whole": (first.allocations["whole"].device_ids, None)}, first.memory


@pytest.mark.parametrize(("deadline_s", "is_spared"), [(600.0, False), (1200.0, True)])
def test_a_part_for_a_first_replica_never_breaks_a_promise_on_whole_devices(deadline_s, is_spared):
    policy, nodes = make_live_policy("springtide"), [make_node("n", 2)]
    runs, held, memory = promised_on_both(policy, nodes, deadline_s)
    plan = decide(policy, [runs], [service("s", SMALL)], held, nodes, memory)
    assert plan.future["whole"][-1].end_s <= deadline_s
    if is_spared:
        assert len(plan.allocations["whole"].device_ids) == len(plan.allocations["s"].device_ids) == 1
        assert not plan.claims
    else:
        assert "s" not in plan.allocations
        assert "promised deadlines need the whole ones ('" in plan.reasons["s"]
        assert plan.claims["s"] == TimeClaim(code="waits_for", at_s=plan.future["whole"][-1].end_s)
    # What is guaranteed was admitted before, or takes what it was promised; that is said.
    sure = decide(policy, [runs], [service("s", SMALL, min_replicas=1)], held, nodes, memory)
    assert [claim.code for claim in sure.claims.values()] == ([] if is_spared else ["given_up"])


@pytest.mark.parametrize("share", [None, SMALL], ids=["whole", "part"])
@pytest.mark.parametrize("least", [1, 2])
def test_a_first_replica_never_stops_a_promised_job_that_is_late(share, least):
    """It is slower than its profile says: late, but not by much as long as it runs."""
    policy, nodes = make_live_policy("springtide"), [make_node("n", 2)]
    runs, held, memory = promised_on_both(policy, nodes, 600.0, least)
    after = {"step": 1600, "equivalent_steps": 1600.0, "progress_at_s": 100.0}
    late = with_fields(runs, **after, throughput_samples_per_s={2: 16.0 * runs.job.global_batch_size})
    alone = decide(policy, [late], [], held, nodes, memory, now_s=100.0)
    plan = decide(policy, [late], [service("s", share)], held, nodes, alone.memory, now_s=101.0)
    assert alone.claims["whole"].code == plan.claims["whole"].code == "given_up"
    assert len(plan.allocations["whole"].device_ids) == least
    assert ("s" in plan.allocations) == (least == 1)
    if least == 2:
        assert "promised deadlines need" in plan.reasons["s"]
        assert "('whole' has 2)" in plan.reasons["s"]
        assert plan.claims["s"].at_s == plan.future["whole"][-1].end_s


def test_a_promise_gets_a_device_that_best_effort_and_a_worker_to_spare_have_parts_of():
    policy, nodes = make_live_policy("springtide"), [make_node("n", 2)]
    known = {"total_steps": 1000, "profile_steps_per_s": {1: 10.0, 2: 18.0}, "global_batch_size": 32}
    runs = {"state": JobState.RUNNING, "started_at_s": 0.0}
    grown = job("grown", SMALL, workers=(1, 2), goal=Goal(deadline_s=5000.0), num_virtual_shards=4, **known)
    grown = with_fields(grown, **runs, admitted_at_s=0.0, num_replicas=2)
    beside = with_fields(job("beside", SMALL), **runs, num_replicas=1)
    other = with_fields(
        job("other", SMALL, goal=Goal(deadline_s=5000.0), **known), **runs, admitted_at_s=0.0, num_replicas=1
    )
    held = {"grown": (["n/0", "n/1"], SMALL), "beside": (["n/1"], SMALL), "other": (["n/0"], SMALL)}
    urgent = job("urgent", goal=Goal(deadline_s=160.0), **known)
    plan = decide(policy, [grown, beside, other, urgent], held=held, nodes=nodes)
    assert places(plan) == {"grown": ["n/0"], "other": ["n/0"], "urgent": ["n/1"]}
    assert "urgent" in plan.admitted
    assert plan.reasons["beside"] == "'urgent' needs n/1 as a whole"


@pytest.mark.parametrize("share", [None, SMALL], ids=["whole", "part"])
def test_a_replica_beyond_the_minimum_leaves_its_device_to_a_promise_that_needs_it(share):
    """A job gave a device up since it had time; with fewer it is slower than its profile said."""
    policy, nodes = make_live_policy("springtide"), [make_node("n", 2)]
    runs, held, memory = promised_on_both(policy, nodes, 1200.0)
    given = decide(policy, [runs], [service("s", share)], held, nodes, memory)
    assert [len(given.allocations[who].device_ids) for who in ("whole", "s")] == [1, 1]
    held = {"whole": (given.allocations["whole"].device_ids, None), "s": (given.allocations["s"].device_ids, share)}
    after = {"step": 400, "equivalent_steps": 400.0, "progress_at_s": 40.0, "num_replicas": 1}
    slower = with_fields(runs, **after, throughput_samples_per_s={1: 6.0 * runs.job.global_batch_size})
    plan = decide(policy, [slower], [service("s", share, ready=1)], held, nodes, given.memory, now_s=40.0)
    assert len(plan.allocations["whole"].device_ids) == 2
    assert plan.future["whole"][-1].end_s <= 1200.0
    assert {who: claim.code for who, claim in plan.claims.items()} == {"s": "waits_for"}
    assert plan.reasons["whole"] == "its deadline needs more devices now"
    assert "promised deadlines need" in plan.reasons["s"]
    # What is guaranteed keeps its device, and who lost the promise to it is told.
    sure = service("s", share, ready=1, min_replicas=1)
    plan = decide(policy, [slower], [sure], held, nodes, given.memory, now_s=40.0)
    assert len(plan.allocations["s"].device_ids) == 1
    assert plan.claims["whole"].code == "given_up"


@pytest.mark.parametrize(
    ("fields", "is_late"),
    [
        ({"equivalent_steps": 600.0}, False),
        ({"equivalent_steps": 100.0}, True),
        # It is faster than its part alone, because its neighbours are idle.
        ({"equivalent_steps": 100.0, "throughput_samples_per_s": {1: 320.0}}, False),
        ({"equivalent_steps": 600.0, "state": JobState.PENDING}, False),
        ({"equivalent_steps": 100.0, "state": JobState.PENDING}, True),
    ],
)
def test_a_promised_job_with_a_part_that_becomes_late_is_told(policy, fields, is_late):
    known = {"goal": Goal(deadline_s=500.0), "total_steps": 1000, "profile_steps_per_s": {1: 10.0}}
    runs = with_fields(
        job("t", HALF, global_batch_size=32, **known),
        **{"state": JobState.RUNNING, "admitted_at_s": 1.0, "progress_at_s": 400.0, "num_replicas": 1, **fields},
    )
    held = {"t": (["n/0"], HALF)} if runs.state is JobState.RUNNING else {}
    plan = decide(policy, [runs], held=held, now_s=400.0)
    assert places(plan) == {"t": ["n/0"]}
    if is_late:
        assert plan.claims["t"] == TimeClaim(code="given_up", at_s=580.0)
        assert plan.reasons["t"].startswith("promise given up: its part of a device is too little")
    else:
        assert "t" not in plan.claims
        assert plan.revisit_at_s == pytest.approx(500.001), "it is late then at the latest"
    after = decide(policy, [runs], held=held, now_s=501.0)
    assert after.claims["t"].code == "given_up"


def test_of_two_parts_that_wake_each_takes_only_what_promises_leave():
    policy, nodes = make_live_policy("springtide"), [make_node("n", 2)]
    runs, held, memory = promised_on_both(policy, nodes, 1200.0)
    large = Share(request=0.8, limit=0.8)
    plan = decide(policy, [runs], [service("a", large), service("b", large)], held, nodes, memory)
    assert places(plan).keys() == {"whole", "a"}
    assert plan.future["whole"][-1].end_s <= 1200.0
    assert plan.claims["b"].code == "waits_for"


@pytest.mark.parametrize(("deadline_s", "is_promised"), [(260.0, True), (150.0, False)])
def test_where_nodes_have_labels_a_promise_counts_on_the_request_too(deadline_s, is_promised):
    part = Share(request=0.4, limit=0.4)
    due = job("t", part, goal=Goal(deadline_s=10.0 + deadline_s), total_steps=100, profile_steps_per_s={1: 1.0})
    nodes = [make_node("i", 1, pool="inference"), make_node("k", 1, pool="training")]
    plan = decide(make_policy("dilu/tide/springtide"), [due], nodes=nodes)
    assert set(plan.admitted) == ({"t"} if is_promised else set())


def test_places_for_jobs_on_functions_are_not_shared():
    cloud = make_node("f", 2, kind="function")
    cloud = type(cloud)(
        node_id=cloud.node_id,
        devices=cloud.devices,
        functions=FunctionService(name="lambda", sizes=(), prices=FunctionPrices(usd_per_gb_s=0.1)),
    )
    plan = decide(make_policy("dilu/fifo"), [job("t", SMALL)], (), nodes=[cloud])
    assert plan.allocations == {}


@pytest.mark.parametrize("packer", ["infless-l", "infless-r", "fast-gs", "exclusive"])
def test_every_packer_gives_everyone_a_place(packer):
    plan = decide(make_policy(f"{packer}/fifo"), [job("t", HALF)], [service("a", SMALL)])
    assert set(plan.allocations) == {"t", "a"}
    if packer == "exclusive":
        assert plan.allocations["t"].device_ids != plan.allocations["a"].device_ids


def test_a_platform_packs_by_itself():
    assert isinstance(make_live_policy("fifo"), Sharing)
    assert make_live_policy("dilu/fifo") == make_live_policy("fifo")


@pytest.mark.parametrize("num_devices", [2, 3])
def test_what_a_running_job_lacks_to_its_minimum_is_not_opened_for_those_that_wait(num_devices):
    """One of its two workers was lost: the other goes on, and there is a device for its successor."""
    policy, survivor, held = make_policy("dilu/edf"), job("w", workers=(2, 2)), {"w": (["n/0"], None)}
    plan = decide(policy, [job("t", HALF), survivor], (), held, [make_node("n", num_devices)])
    assert plan.allocations["w"].num_devices == 2
    assert ("t" in plan.allocations) is (num_devices == 3)


def test_a_guaranteed_minimum_comes_before_what_a_running_job_lacks_to_its_own():
    policy, survivor, held = make_policy("dilu/edf"), job("w", workers=(2, 2)), {"w": (["n/0"], None)}
    plan = decide(policy, [survivor], [service("a", HALF, min_replicas=1)], held, [make_node("n", 2)])
    assert places(plan) == {"w": ["n/0"], "a": ["n/1"]}
    assert "w" not in plan.reasons, "it goes on with the one that it has"


def test_what_a_running_job_lacks_to_its_minimum_is_not_opened_for_more_replicas(policy):
    large = Share(request=0.8, limit=0.9)
    held = {"w": (["n/0"], None), "a": (["n/1"], large)}
    nodes = [make_node("n", 3)]
    plan = decide(policy, [job("w", workers=(2, 2))], [service("a", large, wanted=2, ready=1)], held, nodes)
    assert plan.allocations["w"].num_devices == 2
    assert places(plan)["a"] == ["n/1"]


def test_a_service_that_finds_all_devices_in_parts_is_told_so():
    held, nodes = {"t": (["n/0", "n/1"], SMALL)}, [make_node("n", 2)]
    due = job("t", SMALL, workers=(2, 2), goal=Goal(deadline_s=1000.0), total_steps=10, profile_steps_per_s={2: 1.0})
    promised = with_fields(due, admitted_at_s=1.0, promised_finish_s=100.0)
    plan = decide(make_policy("dilu/springtide"), [promised], [service("s")], held, nodes)
    assert plan.reasons["s"] == "waits for a device: there is none that it may have whole"
    assert plan.claims["s"] == TimeClaim(code="waits_for")


@pytest.mark.parametrize(("losses", "num_devices", "count"), [((5.0,), 3, 3), ((5.0,), 2, 2), ((), 3, 2)])
def test_a_sharer_that_has_lost_workers_gets_successors_before_those_that_wait(policy, losses, num_devices, count):
    """One of its workers is left, of two at least and three at most; without a loss it gets its minimum."""
    large = Share(request=0.8, limit=0.9)
    sharer = with_fields(job("t", large, workers=(2, 3)), losses_at_s=losses)
    nodes, held = [make_node("n", num_devices)], {"t": (["n/0"], large)}
    plan = decide(policy, [job("early", large), sharer], [service("a", large)], held, nodes)
    assert plan.allocations["t"].num_devices == min(count, num_devices - 1)
    assert plan.allocations["t"].device_ids[0] == "n/0"
    assert "a" in plan.allocations


def test_what_the_others_of_a_lost_worker_run_on_is_not_given_for_its_successor(policy):
    """The job may do without one of two workers, and only one of them is there: its device is not spare."""
    sharer = with_fields(job("t", HALF, workers=(1, 2)), losses_at_s=(5.0,), grows_at_s=1000.0)
    late = with_fields(sharer, state=JobState.RUNNING, num_replicas=1)
    plan = decide(policy, [late, job("w", workers=(3, 3))], (), {"t": (["n/0"], HALF)}, [make_node("n", 3)])
    assert plan.allocations["t"].device_ids[0] == "n/0"
