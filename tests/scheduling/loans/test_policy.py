"""Any training policy under a strategy of loans: what it is shown, what becomes of its plan, and how loans go."""

from __future__ import annotations

import msgspec
import pytest

from kits.cheap_policies import cheap_names
from kits.scheduling.pool_world import World, node
from springtide.core.actions import PreemptJob, ResizeJob
from springtide.core.decision import Capacity, Plan, PoolAllocation, Relabel, Snapshot
from springtide.core.resources import Topology
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.loans.policy import Loaning
from springtide.scheduling.loans.pools import LabelVerdict
from springtide.scheduling.registry import make_policy
from springtide.testing.policy import check_policy


class Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy whose verdict is known; nodes with their new label, `hard` ones are reclaimed."""

    pools: dict[str, str] = {}
    hard: tuple[str, ...] = ()
    counted: tuple[Capacity, ...] = ()

    def choose(self, pools):
        labels = {name: Relabel(pool=pool, reason="so it is") for name, pool in self.pools.items()}
        there = {name: relabel for name, relabel in labels.items() if name in pools.by_id}
        known = {name: relabel for name, relabel in there.items() if pools.by_id[name].pool != relabel.pool}
        return LabelVerdict(pools=known, reclaimed=frozenset(known.keys() & set(self.hard)))

    def capacity(self, pools, verdict):
        return self.counted


class Seen:
    """A training policy that keeps what it was shown; it answers as told, else that everyone keeps what it has."""

    def __init__(self, answers=()):
        self.shown: list[Snapshot] = []
        self.answers = list(answers)

    def decide(self, snapshot):
        self.shown.append(snapshot)
        given = self.answers[min(len(self.shown), len(self.answers)) - 1] if self.answers else None
        if given is None:
            return Plan(allocations=snapshot.allocations, memory={"asked": len(self.shown)})
        return Plan(
            allocations={who: PoolAllocation(device_ids=tuple(devices)) for who, devices in given.items()},
            memory={"asked": len(self.shown)},
        )


def devices_of(snapshot):
    return [str(device) for device in snapshot.cluster.device_ids()]


def ask(world, strategy, *answers):
    """What a training policy is shown of a world under a strategy, and the plan made of its answer."""
    seen = Seen(answers)
    plan = Loaning(strategy=strategy, training=seen).decide(world.controller.snapshot(world.now_s))
    return seen.shown, {who: list(given.device_ids) for who, given in plan.allocations.items()}, plan


def running(*, elastic=True, low=1, high=6):
    """A job on both training nodes of four devices each."""
    world = World(
        "dedicated/fifo",
        [node("t0", "training"), node("t1", "training"), node("i0", "inference"), node("s0", "shared")],
    )
    world.submit("job", low=low, high=high, elastic=elastic)
    world.deliver()
    assert len(world.held("job")) == high
    return world


# --- what training is shown -------------------------------------------------------------------------------------------


def test_training_sees_what_it_may_use_and_no_services():
    world = running()
    world.deploy("search", low=1, high=2)
    (shown,), given, plan = ask(world, Fixed(counted=(Capacity(from_s=0.0, num_devices=3),)))
    assert devices_of(shown) == [f"{name}/{index}" for name in ("t0", "t1", "s0") for index in range(4)]
    assert shown.services == ()
    assert shown.capacity == (Capacity(from_s=0.0, num_devices=3),)
    assert plan.memory == {"training": {"asked": 1}}
    assert given["search"] == ["i0/0"]


def test_devices_that_services_have_on_a_shared_node_are_not_shown_and_the_part_bears_its_own_name():
    world = World("two-way/fifo", [node("s0", "shared")])
    world.deploy("search", low=2, high=2)
    (shown,), given, _ = ask(world, Fixed())
    assert given["search"] == ["s0/0", "s0/1"]
    assert devices_of(shown) == ["s0/2", "s0/3"]
    assert [(each.node_id, {d.node_id for d in each.devices}) for each in shown.cluster.nodes] == [
        ("s0[2,3]", {"s0[2,3]"})
    ]


def test_a_server_that_replicas_are_leaving_is_not_shown_yet():
    world = World("dedicated/fifo", [node("i0", "inference"), node("i1", "inference"), node("s0", "shared")])
    world.deploy("search", low=5, high=5)
    world.deliver()
    lent = Fixed(pools={"i1": "training"})
    world.scale("search", 1, 4)
    (shown,), given, plan = ask(world, lent)
    assert [device for device in world.held("search") if device.startswith("i1")] == []
    assert devices_of(shown) == [f"s0/{n}" for n in range(4)], "the last replica is on its way out of i1"
    assert plan.pools["i1"].pool == "training"
    assert all(device.startswith("i0") for device in given["search"])
    world.deliver()
    (shown,), _, _ = ask(world, lent)
    assert devices_of(shown) == [f"{name}/{n}" for name in ("i1", "s0") for n in range(4)]


def test_a_device_that_a_replica_is_leaving_is_not_shown_yet():
    world = World("dedicated/fifo", [node("s0", "shared")])
    world.deploy("search", low=3, high=3)
    world.deliver()
    world.scale("search", 1, 1)
    assert devices_of(ask(world, Fixed())[0][0]) == ["s0/3"]
    world.deliver()
    assert len(devices_of(ask(world, Fixed())[0][0])) == 3


def test_memory_of_training_comes_back_to_it():
    world = running()
    snapshot = world.controller.snapshot(world.now_s)
    seen = Seen()
    Loaning(strategy=Fixed(), training=seen).decide(msgspec.structs.replace(snapshot, memory={"training": {"x": 1}}))
    Loaning(strategy=Fixed(), training=seen).decide(msgspec.structs.replace(snapshot, memory="somebody else's"))
    assert [shown.memory for shown in seen.shown] == [{"x": 1}, None]


def test_the_same_cluster_is_the_same_object_again():
    world = running()
    first, second = (ask(world, Fixed())[0][0] for _ in range(2))
    assert first.cluster is second.cluster


def test_a_platform_without_pools_is_shown_as_it_is():
    world = World("dedicated/fifo", [node("s0", "shared")])
    snapshot = world.controller.snapshot(world.now_s)
    world.submit("job")
    assert ask(world, Fixed())[0][0].cluster is snapshot.cluster


def test_a_platform_that_goes_down_changes_no_label():
    world = running()
    snapshot = world.controller.snapshot(world.now_s)
    stopping = Snapshot(now_s=1.0, cluster=snapshot.cluster, allocations=snapshot.allocations, memory={"training": 1})
    plan = make_policy("two-way/fifo").decide(stopping)
    assert not plan.allocations
    assert not plan.pools
    assert plan.memory == {"training": 1}


# --- a server that jobs have to leave ---------------------------------------------------------------------------------


def test_an_elastic_job_is_shown_on_what_it_keeps_and_a_rigid_one_not_at_all():
    elastic, rigid = running(), running(elastic=False)
    hard = Fixed(pools={"t1": "inference"}, hard=("t1",))
    (shown,), given, _ = ask(elastic, hard)
    assert list(shown.allocations["job"].device_ids) == ["t0/0", "t0/1", "t0/2", "t0/3"]
    assert given["job"] == ["t0/0", "t0/1", "t0/2", "t0/3"]
    assert devices_of(shown)[:5] == ["t0/0", "t0/1", "t0/2", "t0/3", "s0/0"]
    (shown,), given, plan = ask(rigid, hard, {"job": ["t0/0", "t0/1", "t0/2", "t0/3", "s0/0", "s0/1"]})
    assert "job" not in shown.allocations
    assert "job" not in given, "it has to stop before it may start elsewhere"
    assert plan.reasons["job"] == "leaves t1: so it is"


def test_an_elastic_job_does_not_shrink_below_its_minimum():
    world = running(low=5)
    hard = Fixed(pools={"t1": "inference"}, hard=("t1",))
    _, given, _ = ask(world, hard, {"job": ["t0/0", "t0/1", "t0/2", "t0/3"]})
    assert "job" not in given
    _, given, _ = ask(world, hard, {"job": ["t0/0", "t0/1", "t0/2", "t0/3", "s0/0"]})
    assert given["job"] == ["t0/0", "t0/1", "t0/2", "t0/3", "s0/0"], "it may move without a stop"
    alone = World("two-way/fifo", [node("t0", "training"), node("t1", "training")])
    alone.submit("job", low=5, high=8)
    alone.deliver()
    alone.deploy("search", low=2, high=2)
    alone.rest()
    assert alone.held("job") == []
    assert any(isinstance(action, PreemptJob) for action in alone.actions)


def test_a_minimum_takes_the_server_of_a_job_that_shrinks():
    world = World("two-way/fifo", [node("t0", "training"), node("t1", "training")])
    world.submit("job", low=1, high=8)
    world.deliver()
    world.deploy("search", low=2, high=2)
    assert [action.is_reclaim for action in world.drained()] == [True]
    world.deliver()
    (taken,) = [name for name, pool in world.labels().items() if pool == "inference"]
    assert world.num_ready("search") == 2
    assert len(world.held("job")) == 4
    assert not any(device.startswith(taken) for device in world.held("job"))
    assert not any(isinstance(action, PreemptJob) for action in world.actions)
    assert any(isinstance(action, ResizeJob) and len(action.replica_ids) == 4 for action in world.actions)
    world.replay()


def test_a_rigid_job_is_preempted_and_starts_where_there_is_room():
    world = World("two-way/fifo", [node("t0", "training"), node("t1", "training"), node("t2", "training", 2)])
    world.submit("wide", low=4, high=4, elastic=False)
    world.deliver()
    world.submit("other", low=4, high=4, elastic=False)
    world.deliver()
    world.finish("other")
    world.deliver()
    world.deploy("search", low=6, high=6)
    world.rest()
    assert world.num_ready("search") == 6
    assert len(world.held("wide")) == 4, "it moved to the server that was left"
    world.replay()


# --- a server that jobs may leave when they end -----------------------------------------------------------------------


def test_on_a_cordoned_server_jobs_stay_and_nobody_starts():
    world = running()
    soft = Fixed(pools={"t1": "inference"})
    (shown,), given, plan = ask(world, soft)
    assert devices_of(shown) == ["t0/0", "t0/1", "t0/2", "t0/3", "t1/0", "t1/1", *(f"s0/{n}" for n in range(4))]
    assert given["job"] == world.held("job")
    assert plan.pools["t1"].pool == "inference"
    (name,) = shown.drains
    assert name == "t1[0,1]"
    assert shown.drains[name].reclaim_since_s is None


def test_a_device_given_up_on_a_cordoned_server_is_nobodys():
    world = running(high=6)
    world.submit("other")
    soft = Fixed(pools={"t1": "inference"})
    greedy = {"job": ["t0/0", "t0/1", "t0/2", "t0/3"], "other": ["t1/0"]}
    shown, given, _ = ask(world, soft, greedy, {"job": ["t0/0", "t0/1", "t0/2", "t0/3"], "other": ["s0/0"]})
    assert "t1/0" not in devices_of(shown[1]), "asked again as it will be asked then"
    assert given["other"] == ["s0/0"]


def test_a_policy_that_insists_gets_the_rest_if_that_is_enough():
    world = running(high=6)
    world.submit("other", low=2, high=2)
    soft = Fixed(pools={"t1": "inference"})
    shown, given, _ = ask(world, soft, {"job": ["t0/0"], "other": ["t1/0", "t1/1"]})
    assert len(shown) > 2
    assert given == {"job": ["t0/0"]}


def test_a_cordon_is_over_when_the_last_job_has_ended():
    nodes = [node("t0", "training"), node("t1", "training")]
    world = World(lambda: Loaning(strategy=Fixed(), training=make_policy("fifo")), nodes)
    world.submit("first", low=4, high=4)
    world.submit("second", low=4, high=4)
    world.deliver()
    world.make = lambda: Loaning(strategy=Fixed(pools={"t1": "inference"}), training=make_policy("fifo"))
    world.controller._decisions = DecisionCache(world.make())
    world.deploy("search", low=0, high=8)
    world.submit("third", low=1, high=1)
    world.load("search", 20)
    world.deliver()
    assert world.label("t1") == "training"
    assert [(action.node_id, action.is_reclaim) for action in world.drained()] == [("t1", False)]
    assert world.held("search") == world.held("third") == []
    (there,) = [name for name in ("first", "second") if world.held(name)[0].startswith("t1")]
    world.finish(there)
    world.deliver()
    assert world.label("t1") == "inference"
    assert world.num_ready("search") == 3
    assert not world.controller.state.drains
    world.replay()


# --- a loan -----------------------------------------------------------------------------------------------------------


def test_idle_servers_are_loaned_and_used_in_the_same_turn_and_come_back_for_a_minimum():
    world = World("one-way/fifo", [node("i0", "inference"), node("i1", "inference"), node("t0", "training")])
    world.deploy("search", low=2, high=4)
    world.deliver()
    assert world.labels() == {"i0": "inference", "i1": "training", "t0": "training"}
    world.submit("job", low=8, high=8, elastic=False)
    world.deliver()
    assert len(world.held("job")) == 8
    world.scale("search", 6, 6)
    assert [(action.node_id, action.is_reclaim) for action in world.drained()] == [("i1", True)]
    assert world.drained()[0].reason == "taken back for 'search', which has 4 of its guaranteed 6 replicas"
    world.rest()
    assert world.num_ready("search") == 6
    assert world.held("job") == [], "there is no room for it now"
    world.scale("search", 1, 1)
    world.rest()
    assert len(world.held("job")) == 8
    world.replay()


def test_a_need_that_is_over_calls_the_drain_off():
    world = World("two-way/fifo", [node("t0", "training")])
    world.submit("job", low=2, high=2)
    world.deliver()
    world.deploy("search", low=2, high=2)
    assert world.drained()
    world.cancel("search")
    assert not world.controller.state.drains
    assert world.label("t0") == "training"
    world.rest()
    assert len(world.held("job")) == 2


# --- a part of a server -----------------------------------------------------------------------------------------------


def half_lent(policy="fifo"):
    """A server of eight isolated devices that inference owns, of which services need half by night."""
    lent = node("i0", "inference", 8, isolates_devices=True)
    world = World(
        lambda: Loaning(strategy=Fixed(pools={"i0": "shared"}), training=make_policy(policy)),
        [lent, node("t0", "training")],
    )
    world.deploy("search", low=2, high=8)
    world.load("search", 32)
    world.deliver()
    assert world.num_ready("search") == 4
    return world


def test_a_server_needed_by_half_lends_the_other_half():
    world = half_lent()
    world.submit("job", low=8, high=8, elastic=False)
    world.deliver()
    assert world.label("i0") == "shared"
    assert world.controller.state.nodes["i0"].is_loaned
    assert sorted(world.held("job")) == [*(f"i0/{n}" for n in range(4, 8)), *(f"t0/{n}" for n in range(4))]
    world.replay()


def test_a_part_comes_back_device_by_device_when_the_load_rises():
    world = half_lent("elastic")
    world.submit("job", low=1, high=8)
    world.deliver()
    assert len(world.held("job")) == 8
    world.load("search", 48)
    world.deliver()
    assert world.num_ready("search") == 6
    assert len(world.held("job")) == 6, "it shrank by what was needed"
    assert not any(isinstance(action, PreemptJob) for action in world.actions)
    world.load("search", 16)
    world.deliver()
    world.rest()
    assert len(world.held("job")) == 8
    world.replay()


def test_a_rigid_job_stops_for_a_part_and_its_other_devices_stay_free_for_jobs():
    world = half_lent()
    world.submit("job", low=8, high=8, elastic=False)
    world.deliver()
    world.load("search", 40)
    world.submit("small", low=2, high=2, elastic=False)
    world.rest()
    assert world.num_ready("search") == 5
    assert world.held("job") == []
    world.cancel("job")
    world.rest()
    assert len(world.held("small")) == 2


def test_a_waiting_job_is_told_of_training_not_of_the_platform():
    world = World("dedicated/fifo", [node("t0", "training", 2), node("i0", "inference", 6)])
    world.submit("job", low=4, high=4)
    assert world.plan().reasons["job"] == "needs 4 devices, training has 2 of 8 now"


@pytest.mark.parametrize("strategy", ["dedicated", "one-way", "two-way"])
@pytest.mark.parametrize("training", cheap_names())
def test_every_policy_for_training_may_be_loaned_to(strategy, training):
    check_policy(lambda: make_policy(f"{strategy}/{training}"), num_snapshots=6)


@pytest.mark.parametrize("training", cheap_names())
def test_training_without_a_single_device_is_no_accident(training):
    world = World(f"two-way/{training}", [node("t0", "training", 2)])
    world.submit("job", low=1, high=2)
    world.deliver()
    world.deploy("search", low=2, high=2)
    world.rest()
    assert world.num_ready("search") == 2
    assert world.held("job") == []
    world.cancel("search")
    world.rest()
    assert world.label("t0") == "training"
    world.replay()


def test_an_empty_platform_is_no_accident_either():
    plan = make_policy("two-way/springtide").decide(Snapshot(now_s=1.0, cluster=Topology()))
    assert not plan.allocations
