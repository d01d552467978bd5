"""Devices that several workloads hold parts of: who may start beside whom, and shares that change in place."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller, check_plan
from springtide.core import events
from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.errors import PolicyError
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob

SOURCE = Entrypoint(source_path="job.py", object_name="fit")


def share(request, limit=None, memory_mb=0):
    return Share(request=request, limit=limit or request, memory_mb=memory_mb)


class Wanted:
    """Gives everyone who is there the devices and the share that the test says."""

    def __init__(self):
        self.wish = {}
        self.reasons = {}

    def decide(self, snapshot):
        present = {view.job.job_id for view in snapshot.jobs} | {view.service.service_id for view in snapshot.services}
        return Plan(
            allocations={
                who: PoolAllocation(device_ids=tuple(devices), share=part)
                for who, (devices, part) in self.wish.items()
                if who in present
            },
            reasons=self.reasons,
        )


class Platform:
    def __init__(self, memory_mb=0):
        self.policy = Wanted()
        self.controller = Controller(self.policy)
        self.now_s = 0.0
        self.steps = []
        self.say(events.NodeJoined(node=make_node("n", 2, memory_mb=memory_mb)))

    def say(self, *happened):
        self.now_s += 1.0
        step = self.controller.step(self.now_s, happened)
        self.steps.append(step)
        return [_word(action) for action in step.actions]

    def deploy(self, name, part, **options):
        return self.say(events.ServiceDeployed(service=service(name, part, **options)))

    def ready(self, name, number=0):
        return self.say(events.ReplicaReady(workload_id=name, replica_id=f"{name}.{number}"))


def service(name, part, **options):
    return InferenceService(
        service_id=name, name=name, entrypoint=SOURCE, max_replicas=2, min_replicas=1, share=part, **options
    )


def job(name, part):
    return TrainingJob(job_id=name, name=name, entrypoint=SOURCE, max_workers=2, share=part)


def _word(action):
    kind = type(action).__name__
    if kind == "StartReplica":
        return f"start {action.replica_id} on {action.device_id} {_told(action.share)}"
    if kind == "SetShare":
        return f"share {action.replica_id} {_told(action.share)}"
    if kind == "StopReplica":
        return f"stop {action.replica_id}"
    return kind


def _told(part):
    return "whole" if part is None else f"{part.request:g}..{part.limit:g}"


def test_two_shares_sit_on_one_device_and_a_whole_one_waits_until_it_is_empty():
    platform = Platform()
    platform.policy.wish = {"a": (["n/0"], share(0.3)), "b": (["n/0"], share(0.5))}
    assert platform.deploy("a", share(0.3)) == ["start a.0 on n/0 0.3..0.3"]
    assert platform.deploy("b", share(0.5)) == ["start b.0 on n/0 0.5..0.5"]
    load = platform.controller.state.load("n/0")
    assert (load.num_holders, load.request, load.limit, load.is_exclusive) == (2, 0.8, 0.8, False)
    assert platform.controller.state.holders() == {"n/0": ("a.0", "b.0")}
    platform.policy.wish = {"c": (["n/0"], None), "b": ([], None)}
    assert platform.deploy("c", None) == ["stop a.0", "stop b.0"]
    assert platform.say(events.ReplicaStopped(workload_id="a", replica_id="a.0")) == []
    assert platform.say(events.ReplicaStopped(workload_id="b", replica_id="b.0")) == ["start c.0 on n/0 whole"]
    assert platform.controller.state.load("n/0").is_exclusive


def test_what_is_left_of_a_device_is_granted_once_in_a_round():
    platform = Platform()
    platform.policy.wish = {"a": (["n/0"], share(0.4))}
    platform.deploy("a", share(0.4))
    # The first leaves while two more come: beside it there is room for one of them.
    platform.policy.wish = {"b": (["n/0"], share(0.5)), "c": (["n/0"], share(0.5))}
    events_ = [events.ServiceDeployed(service=service(name, share(0.5))) for name in ("b", "c")]
    assert platform.say(*events_) == ["stop a.0", "start b.0 on n/0 0.5..0.5"]
    assert platform.say() == []
    assert platform.say(events.ReplicaStopped(workload_id="a", replica_id="a.0")) == ["start c.0 on n/0 0.5..0.5"]


def test_memory_is_counted_where_the_device_has_some():
    platform = Platform(memory_mb=1000)
    platform.policy.wish = {"a": (["n/0"], share(0.1, memory_mb=600)), "b": (["n/1"], share(0.1, memory_mb=600))}
    platform.deploy("a", share(0.1, memory_mb=600))
    assert platform.deploy("b", share(0.1, memory_mb=600)) == ["start b.0 on n/1 0.1..0.1"]
    platform.policy.wish = {name: (["n/0"], share(0.1, memory_mb=600)) for name in ("a", "b")}
    with pytest.raises(PolicyError, match="no room for"):
        platform.say()


def test_a_new_share_alone_changes_the_replicas_in_their_places():
    platform = Platform()
    platform.policy.wish = {"a": (["n/0"], share(0.3))}
    platform.deploy("a", share(0.3))
    platform.ready("a")
    platform.policy.wish = {"a": (["n/0"], share(0.4))}
    assert platform.deploy("a", share(0.4)) == ["share a.0 0.4..0.4"]
    record = platform.controller.state.services["a"]
    assert record.service.revision == record.replicas[0].revision == 2
    assert platform.controller.state.load("n/0").request == 0.4
    assert platform.say() == []
    # Anything else that is new needs new replicas.
    assert platform.deploy("a", share(0.4), slo_s=0.1) == ["stop a.0"]


def test_more_of_a_device_waits_until_another_has_given_it_up():
    platform = Platform()
    platform.policy.wish = {"a": (["n/0"], share(0.5)), "b": (["n/0"], share(0.5))}
    platform.deploy("a", share(0.5))
    platform.deploy("b", share(0.5))
    platform.policy.wish = {"a": (["n/0"], share(0.9)), "b": ([], None)}
    assert platform.deploy("a", share(0.9)) == ["stop b.0"]
    assert platform.say(events.ReplicaLost(workload_id="b", replica_id="b.0")) == ["share a.0 0.9..0.9"]


def test_two_shares_that_grow_at_once_never_hold_more_than_the_device_while_a_third_is_leaving():
    platform = Platform()
    platform.policy.wish = {name: (["n/0"], share(0.3, 0.45)) for name in ("a", "b", "c")}
    for name in ("a", "b", "c"):
        platform.deploy(name, share(0.3, 0.45))
    platform.policy.wish = {"a": (["n/0"], share(0.4, 0.45)), "b": (["n/0"], share(0.4, 0.45))}
    assert platform.say() == ["share a.0 0.4..0.45", "stop c.0"]
    assert platform.controller.state.load("n/0").request == pytest.approx(1.0)
    assert platform.say(events.ReplicaStopped(workload_id="c", replica_id="c.0")) == ["share b.0 0.4..0.45"]


def test_a_service_that_waits_for_room_says_so_until_that_is_over_or_it_starts():
    platform = Platform()
    platform.policy.wish = {}
    platform.policy.reasons = {"a": "waits for room"}
    platform.deploy("a", share(0.3))
    assert platform.controller.state.services["a"].reason == "waits for room"
    platform.policy.reasons = {}
    platform.say()
    assert "its guaranteed minimum waits" in platform.controller.state.services["a"].reason
    platform.policy.reasons = {"a": "waits for room"}
    platform.say()
    platform.policy.reasons, platform.policy.wish = {}, {"a": (["n/0"], share(0.3))}
    assert platform.say() == ["start a.0 on n/0 0.3..0.3"]
    assert platform.controller.state.services["a"].reason == "the first replica is loading"
    fresh = Controller(platform.policy)
    for step in platform.steps:
        fresh.restore(step)
    assert fresh.state == platform.controller.state


def test_a_restart_knows_who_holds_which_share():
    platform = Platform()
    platform.policy.wish = {"a": (["n/0"], share(0.3)), "j": (["n/0", "n/1"], share(0.2))}
    platform.deploy("a", share(0.3))
    assert platform.say(events.JobSubmitted(job=job("j", share(0.2)))) == [
        "start j.0 on n/0 0.2..0.2",
        "start j.1 on n/1 0.2..0.2",
    ]
    platform.policy.wish["a"] = (["n/0"], share(0.5))
    platform.deploy("a", share(0.5))
    fresh = Controller(platform.policy)
    for step in platform.steps:
        fresh.restore(step)
    assert fresh.state == platform.controller.state
    assert fresh.state.load("n/0") == platform.controller.state.load("n/0")
    assert [(start.replica_id, _told(start.share)) for start in fresh.standing().replicas] == [
        ("j.0", "0.2..0.2"),
        ("j.1", "0.2..0.2"),
        ("a.0", "0.5..0.5"),
    ]
    assert fresh.snapshot(99.0).allocations["j"].share == share(0.2)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"a": (["n/0"], share(0.6)), "b": (["n/0"], share(0.6))}, "no room for"),
        ({"a": (["n/0"], share(0.2, 0.8)), "b": (["n/0"], share(0.2, 0.8))}, "no room for"),
        ({"a": (["n/0"], share(0.1)), "b": (["n/0"], None)}, "to both 'a' and 'b'"),
        ({"a": (["n/0"], None), "b": (["n/0"], share(0.1))}, "to both 'a' and 'b'"),
        ({"a": (["n/0", "n/0"], share(0.1))}, "a device twice"),
    ],
)
def test_a_plan_that_a_device_has_no_room_for_is_refused(wish, told):
    policy = Wanted()
    policy.wish = wish
    views = Platform()
    views.deploy("a", share(0.1))
    views.deploy("b", share(0.1))
    seen = views.controller.snapshot(9.0)
    snapshot = Snapshot(now_s=9.0, cluster=Topology(nodes=(make_node("n", 2),)), services=seen.services)
    with pytest.raises(PolicyError, match=told):
        check_plan(snapshot, policy.decide(snapshot))


def _wide_start(platform):
    return [
        (action.replica_id, action.device_ids, action.share)
        for action in platform.steps[-1].actions
        if type(action).__name__ == "StartReplica"
    ]


def test_a_replica_starts_once_there_is_room_on_each_of_its_devices():
    platform = Platform()
    platform.policy.wish = {"a": (["n/1"], share(0.8))}
    platform.deploy("a", share(0.8))
    # The first leaves as the wide one comes.
    platform.policy.wish = {"w": (["n/0", "n/1"], share(0.4))}
    platform.deploy("w", share(0.4), devices_each=2)
    assert _wide_start(platform) == []
    platform.say(events.ReplicaStopped(workload_id="a", replica_id="a.0"))
    assert _wide_start(platform) == [("w.0", ("n/0", "n/1"), share(0.4))]
    assert [platform.controller.state.load(device).request for device in ("n/0", "n/1")] == [0.4, 0.4]
    assert platform.controller.state.holders() == {"n/0": ("w.0",), "n/1": ("w.0",)}
    assert platform.say() == []


def test_the_share_of_each_of_its_devices_changes_at_once_where_all_have_room():
    platform = Platform()
    platform.policy.wish = {"w": (["n/0", "n/1"], share(0.4)), "a": (["n/1"], share(0.5))}
    platform.deploy("w", share(0.4), devices_each=2)
    platform.deploy("a", share(0.5))
    platform.ready("w")
    platform.ready("a")
    platform.policy.wish = {"w": (["n/0", "n/1"], share(0.6)), "a": ([], None)}
    # On the second device there is no room yet.
    assert platform.say() == ["stop a.0"]
    assert platform.say(events.ReplicaStopped(workload_id="a", replica_id="a.0")) == ["share w.0 0.6..0.6"]
    assert [platform.controller.state.load(device).request for device in ("n/0", "n/1")] == [0.6, 0.6]


def test_the_loss_of_its_node_ends_a_replica_on_several_devices_once():
    platform = Platform()
    platform.say(events.NodeJoined(node=make_node("m", 2)))
    platform.policy.wish = {"w": (["n/0", "n/1"], share(0.4))}
    platform.deploy("w", share(0.4), devices_each=2)
    platform.ready("w")
    platform.policy.wish = {"w": (["m/1", "m/0"], share(0.4))}
    platform.say(events.NodeLost(node_id="n"))
    assert _wide_start(platform) == [("w.1", ("m/1", "m/0"), share(0.4))]


@pytest.mark.parametrize("devices", [["n/0"], ["n/0", "m/0"], ["n/0", "n/1", "m/0"]])
def test_a_plan_with_a_part_of_a_replica_or_one_over_two_nodes_is_refused(devices):
    platform = Platform()
    platform.say(events.NodeJoined(node=make_node("m", 2)))
    platform.policy.wish = {"w": (devices, share(0.4))}
    with pytest.raises(PolicyError, match="2 devices of one node"):
        platform.deploy("w", share(0.4), devices_each=2)
